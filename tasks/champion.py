"""The current champion: the policy that promoted it, and its accuracy on this release's items."""

from __future__ import annotations

import json
from dataclasses import dataclass, field

from prefect import task

from eval_suites.gating import check_not_looser
from eval_suites.policy import Policy
from registry.alias_moves import State
from registry.bundle import Bundle
from registry.errors import Infeasible, UserError
from registry.outcome import LoosenedGate
from registry.promotion import check_promotable, promoting_run
from registry.provenance import engine_version
from registry.tracking import asking_mlflow
from registry.versions import CHAMPION, numbered_version
from tasks import accuracy, run_log
from tasks.accuracy import measure_accuracy
from tasks.bundles import aliases_of_model, promoted_bundle, tracker, weights_as_gated
from tasks.judging import Measured
from tasks.logged_files import ModelFiles
from tasks.planning import ReleasePlan
from tasks.progress import LOG
from tasks.serving import ServedBundle
from tasks.stages import TASK_OPTIONS

RECIPE_FILE = "recipe.json"
"""Artifact of a release's MLflow run: the resolved recipe, its policy included."""


@dataclass(frozen=True)
class Incumbent:
    """What stands in the registry before a release."""

    version: int | None = None
    loosened: list[LoosenedGate] = field(default_factory=list)


@task(name="check_registry", **TASK_OPTIONS)
def check_registry(model: str, first_release: bool, policy: Policy) -> Incumbent:
    """Refuse before the work, not after a night of it, when nothing could be promoted.

    Raises `UserError` where the champion's alias was lost, and where the policy is looser than
    the one that promoted the champion and nobody owned up to it.
    """
    run_log.doing("check_registry")
    state = check_promotable(aliases_of_model(model), first_release=first_release)
    number = state.aliases.get(CHAMPION)
    if number is None:
        return Incumbent()
    return Incumbent(number, check_policy(model, state, policy))


def check_policy(model: str, state: State, policy: Policy) -> list[LoosenedGate]:
    """What the policy asks less of than the one that promoted the champion, each owned up to.

    Raises `UserError` where nobody did.
    """
    number = state.aliases[CHAMPION]
    version = numbered_version(tracker().client, model, number)
    registered_by = str(version.run_id) if version is not None and version.run_id else None
    run = promoting_run(state, number) or registered_by
    old = recorded_policy(run) if run is not None else None
    if old is None:
        LOG.warning("%s version %d: no policy is recorded, so none is compared", model, number)
        return []
    return check_not_looser(old, policy)


def recorded_policy(run_id: str) -> Policy | None:
    """The policy of the release that a run recorded; None where it recorded none."""
    with asking_mlflow(f"read run {run_id}"):
        source = tracker().client.get_run(run_id).info.artifact_uri
    text = ModelFiles(source, f"run {run_id}").text(RECIPE_FILE)
    if text is None:
        return None
    try:
        return Policy.model_validate(json.loads(text)["policy"])
    except (ValueError, KeyError, TypeError) as error:
        raise UserError.at(
            f"run {run_id}: {RECIPE_FILE}",
            f"the policy that promoted the champion cannot be read: {error}",
            "release with the version of this project that promoted it",
        ) from None


def measure_champion(todo: ReleasePlan, measured: list[Measured]) -> Measured:
    """The champion on the same items, by the engine of this release.

    A champion that is a candidate again is not measured twice. One that cannot be served here
    gives the reason, and the gates that need it are INVALID.
    """
    reference = f"{todo.resolved.release.model}@{CHAMPION}"
    bundle = promoted_bundle(reference)
    if bundle.engine_version != engine_version():
        LOG.info("%s was gated with %s; measured here with this release's", reference,
                 f"{bundle.engine} {bundle.engine_version}")  # fmt: skip
        bundle = bundle.model_copy(update={"engine_version": engine_version()})
    for one in measured:
        if one.digest == bundle.digest and one.accuracy is not None:
            return one
    try:
        weights_as_gated(bundle, reference)
        with ServedBundle(bundle) as served:
            found = measure_accuracy(
                champion_stage(todo, bundle),
                todo.resolved.accuracy,
                todo.resolved.release.accuracy,
                served,
            )
    except (UserError, Infeasible) as error:
        LOG.error("champion: %s", error)
        return Measured(CHAMPION, digest=bundle.digest, failure=str(error))
    return Measured(CHAMPION, digest=bundle.digest, bundle=bundle, accuracy=found)


def champion_stage(todo: ReleasePlan, bundle: Bundle) -> accuracy.Stage:
    return accuracy.stage(
        CHAMPION, todo.resolved.accuracy, todo.prompts, {}, {"champion": bundle.digest}
    )
