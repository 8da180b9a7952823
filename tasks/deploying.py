"""Register `prefect.yaml` and `automations/` with a Prefect server, and only what is different.

Prefect's own `prefect deploy` does the registering; it makes everything anew each time, so it is
given those deployments only that are not on the server as they stand in the file. Automations are
known by their names. What is ours on the server and in no file any more is told, never removed:
it may have runs that somebody still looks at.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from recipes.loader import read_yaml
from registry.errors import InfrastructureError, UserError
from registry.redaction import is_secret
from registry.settings import CHECKOUT, settings
from tasks import notifications
from tasks.deploy_file import (
    DEPLOY_FILE,
    OURS,
    DeployFile,
    Deployment,
    full_name,
    load_flow,
    read_automations,
    read_deploy_file,
)
from tasks.service_notes import SERVER, only_one, read_note
from tasks.worker_health import prefect_client

DEPLOY_SECONDS = 600.0


@dataclass(frozen=True)
class Deployed:
    """What a deploy did. `left`: name, and the command that removes it."""

    changed: dict[str, str] = field(default_factory=dict)
    unchanged: list[str] = field(default_factory=list)
    left: list[tuple[str, str]] = field(default_factory=list)


def deploy(own_api: str = "", file: Path | None = None) -> Deployed:
    """Check everything first, then register what is different.

    Raises `UserError` for mistakes in the files or a server that does not run,
    `InfrastructureError` where it does not answer or refuses.
    """
    path = file or DEPLOY_FILE
    found = read_deploy_file(path)
    automations = read_automations()
    known = [*automations, *read_automations(notifications.FILES)]
    with only_one("deploy"), prefect_client(own_api or running_api()) as client:
        done = Deployed()
        _check_pools(client)
        raw = read_yaml(path)
        wanted, differing = {full_name(one): one for one in found.deployments}, []
        for number, (name, deployment) in enumerate(wanted.items()):
            live = _live(client, name)
            if differences := _differences(client, deployment, live, found.pull):
                differing.append(raw["deployments"][number])
                done.changed[name] = _what(live, differences)
            else:
                done.unchanged.append(name)
        if differing:
            _register({"name": raw["name"], "pull": raw.get("pull", []), "deployments": differing})
            _check_registered(client, found, done.changed)
        _register_automations(client, automations, done)
        done.changed.update(notifications.register(client))
        _name_left(client, set(wanted), known, found.deployments, done)
        return done


def running_api() -> str:
    """The API of the server that `pilotage up` runs. Raises `UserError` where none does."""
    note = read_note(SERVER)
    if note is None or not note.alive:
        what = "no Prefect server runs" if note is None else "its Prefect server has died"
        raise UserError.at(
            f"PILOTAGE_HOME={settings().home}",
            what,
            "`make up` (pilotage up) first, or set PREFECT_API_URL to a server of your own",
        )
    return f"{note.url}/api"


def desired(deployment: Deployment, pull: list[dict[str, dict[str, str]]]) -> dict[str, Any]:
    """A deployment of the file in the words of the server."""
    from prefect.utilities.callables import parameter_schema

    limit = deployment.concurrency_limit
    schema = parameter_schema(load_flow(deployment.entrypoint)).model_dump_for_openapi()
    return {
        "entrypoint": deployment.entrypoint,
        "description": deployment.description,
        "parameters": deployment.parameters,
        "form": json.loads(json.dumps(schema)),
        "work pool": deployment.work_pool.name,
        "job variables": deployment.work_pool.job_variables.model_dump(exclude_unset=True),
        "tags": sorted(deployment.tags),
        "schedules": [one.model_dump() for one in deployment.schedules],
        "concurrency limit": None if limit is None else limit.model_dump(),
        "pull": pull,
        "paused": False,
    }


def registered(live: Any) -> dict[str, Any]:
    """The same of a deployment on the server."""
    limit, options = live.global_concurrency_limit, live.concurrency_options
    return {
        "entrypoint": live.entrypoint,
        "description": live.description,
        "parameters": live.parameters,
        "form": live.parameter_openapi_schema,
        "work pool": live.work_pool_name,
        "job variables": live.job_variables,
        "tags": sorted(live.tags),
        "schedules": [
            {
                "cron": getattr(one.schedule, "cron", None),
                "timezone": getattr(one.schedule, "timezone", None),
                "slug": one.slug,
                "active": one.active,
            }
            for one in live.schedules
        ],
        "concurrency limit": None
        if limit is None
        else {
            "limit": limit.limit,
            "collision_strategy": options.collision_strategy.value if options else None,
            "grace_period_seconds": options.grace_period_seconds if options else None,
        },
        "pull": live.pull_steps or [],
        "paused": live.paused,
    }


def differing_fields(wanted: Mapping[str, Any], live: Mapping[str, Any] | None) -> list[str]:
    """Which fields are not as wanted; all of them where there is nothing."""
    return [name for name, value in wanted.items() if live is None or live.get(name) != value]


def _what(live: Any, differences: list[str]) -> str:
    return "registered" if live is None else f"changed ({', '.join(differences)})"


def _check_pools(client: Any) -> None:
    from prefect.exceptions import ObjectNotFound

    from tasks.deploy_file import POOLS

    for pool in POOLS:
        try:
            client.read_work_pool(pool)
        except ObjectNotFound:
            raise UserError.at(
                f"work pool {pool!r}",
                "is not on the server: its first worker makes it",
                "`make up` (pilotage up), or `prefect work-pool create --type process " + pool,
            ) from None


def _live(client: Any, name: str) -> Any | None:
    from prefect.exceptions import ObjectNotFound

    try:
        return client.read_deployment_by_name(name)
    except ObjectNotFound:
        return None


def _differences(
    client: Any, deployment: Deployment, live: Any | None, pull: list[dict[str, dict[str, str]]]
) -> list[str]:
    found = differing_fields(desired(deployment, pull), None if live is None else registered(live))
    if live is not None and not _triggers_stand(client, deployment, live):
        found.append("triggers")
    return found


def _triggers_stand(client: Any, deployment: Deployment, live: Any) -> bool:
    from prefect.events.schemas.deployment_triggers import DeploymentEventTrigger

    for trigger in deployment.triggers:
        wanted = DeploymentEventTrigger.model_validate(trigger.model_dump())
        wanted.set_deployment_id(live.id)
        found = client.read_automations_by_name(trigger.name)
        if len(found) != 1 or _core(found[0]) != _core(wanted.as_automation()):
            return False
    return True


def _core(automation: Any) -> dict[str, Any]:
    """What counts of an automation, without the ids and times that the server adds."""
    fields = {"name", "description", "enabled", "trigger", "actions"}
    dumped: dict[str, Any] = automation.model_dump(mode="json", include=fields)
    dumped["trigger"] = {
        key: sorted(value) if key in ("expect", "after", "for_each") else value
        for key, value in dumped["trigger"].items()
        if key != "id"
    }
    return dumped


def _register(content: dict[str, Any]) -> None:
    """Hand deployments to `prefect deploy`, as a file of their own."""
    # The key of Prefect's own server is Prefect's; no other secret is.
    environment = {
        name: value
        for name, value in os.environ.items()
        if name.startswith("PREFECT_") or not is_secret(name, value)
    }
    environment.pop("PILOTAGE_CHECKOUT", None)
    with tempfile.TemporaryDirectory(prefix="pilotage-deploy-") as folder:
        # JSON is YAML.
        path = Path(folder) / "prefect.yaml"
        path.write_text(json.dumps(content), encoding="utf-8")
        words = ["--no-prompt", "deploy", "--all", "--prefect-file", str(path)]
        try:
            ended = subprocess.run(
                [sys.executable, "-m", "prefect", *words],
                cwd=CHECKOUT,
                env=environment,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                errors="replace",
                timeout=DEPLOY_SECONDS,
                check=False,
            )
        except subprocess.TimeoutExpired:
            raise InfrastructureError(
                f"`prefect deploy` did not end within {DEPLOY_SECONDS:.0f} s"
            ) from None
    if ended.returncode:
        said = "\n".join((ended.stdout + ended.stderr).strip().splitlines()[-15:])
        raise InfrastructureError(f"`prefect deploy` ended with {ended.returncode}:\n{said}")


def _check_registered(client: Any, found: DeployFile, names: Mapping[str, str]) -> None:
    """Raises `InfrastructureError` where the server does not have what it was just given."""
    for deployment in found.deployments:
        name = full_name(deployment)
        if name not in names:
            continue
        left = _differences(client, deployment, _live(client, name), found.pull)
        if left:
            raise InfrastructureError(
                f"{name}: `prefect deploy` says that it was registered, and the server has another "
                f"{', '.join(left)}"
            )


def _register_automations(client: Any, wanted: list[dict[str, Any]], done: Deployed) -> None:
    from prefect.events.schemas.automations import AutomationCore

    for entry in wanted:
        core = AutomationCore.model_validate(entry)
        name = f"automation {core.name!r}"
        found = client.read_automations_by_name(core.name)
        if not found:
            client.create_automation(core)
            done.changed[name] = "registered"
        elif _core(found[0]) != _core(core):
            client.update_automation(found[0].id, core)
            done.changed[name] = "changed"
        else:
            done.unchanged.append(name)


def _name_left(
    client: Any,
    wanted: set[str],
    automations: list[dict[str, Any]],
    deployments: list[Deployment],
    done: Deployed,
) -> None:
    from prefect.client.schemas.filters import DeploymentFilter, DeploymentFilterTags

    ours = DeploymentFilter(tags=DeploymentFilterTags(all_=[OURS]))
    offset = 0
    while page := client.read_deployments(deployment_filter=ours, offset=offset):
        offset += len(page)
        for live in page:
            name = f"{client.read_flow(live.flow_id).name}/{live.name}"
            if name not in wanted:
                done.left.append((name, f"`prefect deployment delete {name}` removes it"))
    known = {str(entry["name"]) for entry in automations}
    known |= {trigger.name for one in deployments for trigger in one.triggers}
    for live in client.read_automations():
        if live.name.startswith(f"{OURS} ") and live.name not in known:
            how = f"`prefect automation delete --id {live.id}` removes it"
            done.left.append((f"automation {live.name!r}", how))
