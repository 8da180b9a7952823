"""One candidate of a release, measured: its bundle is made, started once, and everything asked.

Shared by the release and by the run that a release gives each candidate (`flows/candidate.py`).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from flows.making import make_bundle, quantized
from registry.artifacts import ArtifactRef
from registry.bundle import Bundle
from registry.candidate_memory import MemoryPlan
from registry.errors import Infeasible, InfrastructureError, PilotageError, StageFailed
from tasks.accuracy import measure_accuracy
from tasks.bundles import remember
from tasks.draft_stage import prove_candidate
from tasks.judging import Measured
from tasks.latency import measure_latency, will_run
from tasks.planning import CandidatePlan, ReleasePlan
from tasks.progress import LOG
from tasks.release_capacity import plan_of_bundle, proved_here, refused_before
from tasks.serving import ServedBundle, known_infeasible, prove_serving, serving_evidence
from tasks.stages import leave_out, store


def measure_candidate(
    todo: ReleasePlan, wanted: CandidatePlan, *, measured_already: bool = False
) -> Measured:
    """Make one bundle, start it once and measure everything on it.

    A candidate whose own stage fails, or that this hardware cannot serve, ends with its reason
    and does not stop the others. `measured_already`: by a run of its own, so that what is not there
    did not come of it, and is not tried again.
    """
    recipes = todo.resolved
    try:
        if why := refused(todo, wanted):
            LOG.error("%s: not made: %s", wanted.name, why)
            leave_out(*wanted.own_stages())
            return Measured(wanted.name, infeasible=why, draft=wanted.draft is not None)
        bundle = make_bundle(todo, wanted)
    except StageFailed as error:
        LOG.error("%s: %s", wanted.name, error)
        leave_out(*wanted.measurements(), wanted.serving)
        return Measured(wanted.name, failure=str(error), draft=wanted.draft is not None)
    remember(bundle)
    planned = planned_bundle(todo, wanted, bundle)
    with ServedBundle(bundle) as served, served_as_before(wanted.name):
        if (
            not planned.refusal
            and will_run(wanted.latency, recipes.policy.max_age_days)
            and not known_infeasible(wanted.serving)
        ):
            # Its import takes as long as the server's start; the two overlap.
            _ = served.load_generator
        serving = prove_serving(wanted.serving, served, planned)
        feasible = serving_evidence(serving).feasible
        accuracy: ArtifactRef | None
        latency, again = None, None
        if feasible:
            accuracy = measure_accuracy(
                wanted.accuracy, recipes.accuracy, recipes.release.accuracy, served
            )
            if wanted.accuracy_again is not None:
                again = measure_accuracy(
                    wanted.accuracy_again, recipes.accuracy, recipes.release.accuracy, served
                )
            latency = measure_latency(
                wanted.latency,
                recipes.load,
                recipes.release.load,
                recipes.policy.max_age_days,
                served,
            )
        else:
            leave_out(*wanted.measurements())
            accuracy = None
            if not measured_already or store().is_there(wanted.accuracy_reference):
                accuracy = reference_accuracy(todo, wanted, served)
    proof = prove_its_draft(todo, wanted, bundle) if feasible else None
    return Measured(
        wanted.name,
        digest=bundle.digest,
        bundle=bundle,
        serving=serving,
        accuracy=accuracy,
        latency=latency,
        again=again,
        draft_proof=proof,
        draft=bundle.draft is not None,
    )


def planned_bundle(todo: ReleasePlan, wanted: CandidatePlan, bundle: Bundle) -> MemoryPlan:
    """The plan of a bundle from its files. Where it has run here, that is better than any plan."""
    planned = plan_of_bundle(bundle, todo.resolved.load.hardware)
    if planned.refusal and proved_here(todo, wanted):
        return planned.model_copy(update={"refusal": "", "notes": [planned.refusal]})
    return planned


def refused(todo: ReleasePlan, wanted: CandidatePlan) -> str:
    """Why it is certain that its hardware cannot serve it; empty where that is not certain.

    Asked again when it is quantized and before a draft is trained for it, which starts servers:
    the files say what a recipe that is not understood did not.
    """
    why = refused_before(todo, wanted)
    if why or wanted.quantize is None or wanted.draft is None:
        return why
    quantized(todo, wanted)
    return refused_before(todo, wanted)


def prove_its_draft(todo: ReleasePlan, wanted: CandidatePlan, bundle: Bundle) -> ArtifactRef | None:
    """Whether its draft pays, where that is asked for; once the candidate's own server has ended.

    The proof starts a server for every turn, and two at once would slow each other down.
    """
    recipes = todo.resolved
    asked, profile = recipes.release.prove_draft, recipes.draft_load
    if wanted.draft_proof is None or asked is None or profile is None:
        return None
    with served_as_before(wanted.name):
        return prove_candidate(
            wanted.draft_proof, asked, profile, recipes.policy.max_age_days, bundle
        )


@contextmanager
def served_as_before(name: str) -> Iterator[None]:
    """A bundle that was proved and does not start now is a fault of the machine, no verdict."""
    try:
        yield
    except Infeasible as reason:
        raise InfrastructureError(f"{name} was served before and is not now: {reason}") from None


def reference_accuracy(
    todo: ReleasePlan, wanted: CandidatePlan, served: ServedBundle
) -> ArtifactRef | None:
    """Accuracy by the reference engine where the serving engine has no kernel: for the report.

    The candidate is INFEASIBLE whatever comes of it, so a failure here is only logged.
    """
    recipes = todo.resolved
    try:
        return measure_accuracy(
            wanted.accuracy_reference, recipes.accuracy, recipes.release.accuracy, served
        )
    except PilotageError as error:
        LOG.warning("%s: no accuracy from the reference engine: %s", wanted.name, error)
        return None
