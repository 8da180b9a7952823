"""One candidate of a release in a run of its own: deployment `candidate/one`.

Makes what of the release is not in the store yet, measures the candidate, and leaves everything in
the store, where the release reads it. The run's state says how it ended: `Measured`, `Infeasible`
(this hardware cannot serve it), `Refused` with the reason of the stage whose result is no good, or
`Unlike` where this worker would measure under other keys than the release that asked.
"""

from __future__ import annotations

from prefect import flow

from flows.endings import REFUSED, Ended, line, told
from flows.forms import CandidateRequest
from flows.making import after_student, begin, candidates_of, student
from flows.measuring import measure_candidate
from registry.artifacts import Stage
from registry.errors import InfrastructureError, UserError
from registry.provenance import engine_tools, hardware_fingerprint
from tasks.judging import Measured
from tasks.planning import CandidatePlan, ReleasePlan
from tasks.serving import serving_evidence
from tasks.stages import store

MEASURED, INFEASIBLE, UNLIKE = "Measured", "Infeasible", "Unlike"


@flow(
    name="candidate",
    flow_run_name="candidate-{request.candidate}",
    validate_parameters=True,
)
@told
def measure_one(request: CandidateRequest) -> Ended[Measured | None]:
    """Measure one candidate of a release recipe, and judge nothing."""
    try:
        todo = begin(request, lambda todo: stages_of(todo, candidate_of(todo, request)))
        wanted = candidate_of(todo, request)
        if request.expected:
            check_keys(request.expected, keys_of(todo, wanted))
    except UserError as error:
        if not request.expected:
            raise
        # The release planned the same words without a mistake: this worker has other files.
        return Ended(None, UNLIKE, f"{wanted_text(request)}: {error}", refused=True)
    except Unlike as unlike:
        return Ended(None, UNLIKE, str(unlike), refused=True)
    if not all(store().is_there(stage) for stage in after_student(todo)):
        student(todo)
    return ended(measure_candidate(todo, wanted))


def candidate_of(todo: ReleasePlan, request: CandidateRequest) -> CandidatePlan:
    """Raises `UserError` for a name that the recipe has not got, and for none."""
    if not request.candidate:
        known = ", ".join(one.name for one in todo.candidates)
        raise UserError.at("candidate", "names none", f"one of: {known}")
    return candidates_of(todo, request.candidate)[0]


def ended(measured: Measured) -> Ended[Measured | None]:
    """What is told of a candidate, whole: the release repeats the reason of a refusal. Pure but for
    the reading of the evidence."""
    if measured.failure:
        return Ended(measured, REFUSED, refusal(measured.name, measured.failure), refused=True)
    if measured.infeasible:
        what = f"{measured.name}: this hardware cannot serve it: {measured.infeasible}"
        return Ended(measured, INFEASIBLE, line(what))
    if measured.serving is not None:
        evidence = serving_evidence(measured.serving)
        if not evidence.feasible:
            what = f"{measured.name}: this hardware cannot serve it: {evidence.reason}"
            return Ended(measured, INFEASIBLE, line(what))
    return Ended(measured, MEASURED, f"{measured.name}: bundle {measured.digest[:12]} is measured")


def refusal(name: str, reason: str) -> str:
    return f"FAIL: {name}: {reason}"


def reason_of(name: str, message: str) -> str:
    """The reason in what `refusal` wrote."""
    return message.removeprefix(refusal(name, ""))


# -- the same thing there and here -----------------------------------------------------------


class Unlike(InfrastructureError):
    """A worker that would store its results under other keys than the release looks for."""


def stages_of(todo: ReleasePlan, wanted: CandidatePlan) -> list[Stage]:
    """All that is made before and on a candidate, in order."""
    return after_student(todo, *own_stages(wanted))


def own_stages(wanted: CandidatePlan) -> list[Stage]:
    """What is made and measured for a candidate alone, and where it is served."""
    return wanted.own_stages()


def keys_of(todo: ReleasePlan, wanted: CandidatePlan) -> dict[str, str]:
    """By which keys a candidate's results are found, and what of the machine is in them."""
    return {
        **{stage.title: stage.key for stage in stages_of(todo, wanted)},
        HARDWARE: hardware_fingerprint(),
        ENGINE: " ".join(f"{name} {version}" for name, version in sorted(engine_tools().items())),
    }


HARDWARE, ENGINE = "hardware", "engine"


def check_keys(theirs: dict[str, str], ours: dict[str, str]) -> None:
    """Raise `Unlike`, naming the causes first: the hardware, the engine, else the first stage."""
    other = [name for name in theirs if theirs[name] != ours.get(name)]
    other += [name for name in ours if name not in theirs]
    if not other:
        return
    causes = [name for name in (HARDWARE, ENGINE) if name in other] or other[:1]
    said = "; ".join(
        f"{name}: {theirs.get(name, 'none')[:40]} there, {ours.get(name, 'none')[:40]} here"
        for name in causes
    )
    raise Unlike(
        f"this worker is not like the machine of the release ({said}); results would be stored "
        "under other keys: give the pool workers with the same hardware, checkout and environments "
        "as the release's"
    )


def wanted_text(request: CandidateRequest) -> str:
    return f"candidate {request.candidate} of {request.recipe}"
