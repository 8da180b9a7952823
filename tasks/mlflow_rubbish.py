"""Runs that a person deleted in MLflow, removed for good by MLflow's own `gc`."""

from __future__ import annotations

import sys
import time

from registry.errors import InfrastructureError
from registry.settings import settings
from registry.tracking import asking_mlflow, pages
from tasks.bundles import tracker
from tasks.engines.subprocesses import ProcessTree
from tasks.version_files import registered_versions


def collect(days: int, deadline: float) -> str:
    """What was removed. Raises `InfrastructureError`, also where a version refers to a deleted run.

    Nothing at all is removed then: `mlflow gc` does not ask whether a version needs a run.
    """
    uri = settings().tracking_uri
    if uri.startswith("http"):
        return "left to the MLflow server's owner: `mlflow gc` needs its database"
    file = settings().tracking_file
    if file is not None and not file.exists():
        return "there is no database yet"
    before = deleted_runs()
    if not before:
        return "none is deleted"
    if needed := deleted_but_needed():
        raise InfrastructureError(
            f"nothing was removed: {'; '.join(needed)}; restore it in MLflow, or delete the version"
        )
    log = settings().logs_dir / "mlflow-gc.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    # Not on the command line: the address of a database may hold a password. The first name is
    # the one that `mlflow server` gives to its own workers (3.17).
    env = {"_MLFLOW_SERVER_FILE_STORE": uri, "MLFLOW_TRACKING_URI": uri}
    words = [sys.executable, "-m", "mlflow", "gc", "--older-than", f"{days}d"]
    with ProcessTree(words, log=log, env=env) as tree:
        status = tree.wait(max(1.0, deadline - time.monotonic()))
    if status != 0:
        raise InfrastructureError(f"mlflow gc ended with {status}; its log is {log}")
    return f"{before - deleted_runs()} of {before} that were deleted"


def deleted_runs() -> int:
    """How many runs are deleted and still there."""
    from mlflow.entities import ViewType

    client = tracker().client
    with asking_mlflow("list the deleted runs"):
        experiments = [
            one.experiment_id
            for one in pages(lambda **at: client.search_experiments(view_type=ViewType.ALL, **at))
        ]
        if not experiments:
            return 0
        found = pages(
            lambda **at: client.search_runs(experiments, run_view_type=ViewType.DELETED_ONLY, **at)
        )
        return sum(1 for _ in found)


def deleted_but_needed() -> list[str]:
    """Versions whose run or weights somebody deleted, each with what it is."""
    from mlflow.exceptions import MlflowException

    client = tracker().client
    found = []
    for version, _ in registered_versions():
        title = f"{version.name} version {version.version}"
        model = (version.source or "").removeprefix("models:/")
        with asking_mlflow(f"read what {title} refers to"):
            run = client.get_run(version.run_id) if version.run_id else None
            if run is not None and run.info.lifecycle_stage != "active":
                found.append(f"{title} refers to run {version.run_id}, which is deleted")
            try:
                if model.startswith("m-"):
                    client.get_logged_model(model)
            except MlflowException:
                found.append(f"{title} refers to model {model}, which is deleted")
    return found
