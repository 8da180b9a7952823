"""How a flow run ends: a state whose name and message say what came of it, in one line.

A flow's function returns `Ended`; `@told` makes the state of it. Completed is green, and Failed is
red also where nothing broke: a refusal at night must be seen. Who calls a flow from Python gets
what it would have returned, or its own error. Outside of a run the function is what it was.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from typing import Any, Generic, TypeVar, cast

from prefect.context import FlowRunContext
from prefect.states import Completed, Failed

from registry.alias_outcome import AliasOutcome
from registry.errors import EXIT_INCONCLUSIVE, EXIT_REFUSED, PilotageError
from registry.outcome import ReleaseOutcome, Verdict
from registry.redaction import redacted
from tasks import run_log, run_pages, run_progress

R = TypeVar("R")
T = TypeVar("T")

PROMOTED, PASSED, REFUSED, FAILED = "Promoted", "Passed", "Refused", "Failed"
COMPLETED, ROLLED_BACK = "Completed", "RolledBack"
LONGEST = 600
"""Characters of the line that a state's message is."""


@dataclass(frozen=True)
class Ended(Generic[T]):
    """What a flow came to. `refused`: the run is Failed, though the flow ran to its end."""

    outcome: T
    name: str
    message: str
    refused: bool = False


class Refused(PilotageError):
    """A flow that ran well and came to a no; `outcome` is what it would have returned."""

    exit_status = EXIT_REFUSED

    def __init__(self, message: str, outcome: Any) -> None:
        super().__init__(message)
        self.outcome = outcome

    def __reduce__(self) -> tuple[object, ...]:
        return (type(self), (str(self), self.outcome))


def told(body: Callable[[R], Ended[T]]) -> Callable[[R], T]:
    """A flow's function whose run is shown while it works, and ends with a state that says how.

    Goes below `@flow`. A refusal is raised as `Refused` to who calls the flow.
    """

    @wraps(body)
    def run(request: R) -> T:
        context = FlowRunContext.get()
        if context is None or context.flow_run is None:
            return body(request).outcome
        name = context.flow_run.name
        key = run_pages.artifact_key(name, "progress")
        with run_log.in_run_log(name), run_progress.shown(key) as ends:
            try:
                end = body(request)
            except Exception as error:
                message = failure(error)
                ends(message, False)
                run_pages.show_failure(run_pages.artifact_key(name, "failure"), message, error)
                refused = isinstance(error, PilotageError) and error.exit_status in (
                    EXIT_REFUSED,
                    EXIT_INCONCLUSIVE,
                )
                # Returned, not raised: Prefect would make a page of traceback its message.
                state: Any = Failed(name=REFUSED if refused else FAILED, message=message)
                state.data = error
            except BaseException:
                # Cancelled or ended by a signal: whoever did it waits, so this is all that is said.
                ends(run_pages.stopped(), False)
                raise
            else:
                ends(end.message, True)
                if end.refused:
                    state = Failed(name=end.name, message=end.message)
                    state.data = Refused(end.message, end.outcome)
                else:
                    state = Completed(name=end.name, message=end.message)
                    state.data = end.outcome
        # Prefect raises or returns what is in it.
        return cast(T, state)

    # Prefect reads the annotations, which are names of the flow's module.
    run.__signature__ = inspect.signature(body, eval_str=True)  # type: ignore[attr-defined]
    return run


def failure(error: Exception) -> str:
    """The message of a run that failed: our own words first, or what kind of fault it was. Pure."""
    if isinstance(error, PilotageError):
        return redacted(str(error)).strip() or type(error).__name__
    said = " ".join(redacted(str(error)).split())[:LONGEST]
    return f"{type(error).__name__}: {said}" if said else type(error).__name__


def outcome_of(flow: Callable[[R], T], request: R) -> T:
    """What a flow came to, a refusal too. Raises the error of a flow that failed."""
    try:
        return flow(request)
    except Refused as refused:
        return cast(T, refused.outcome)


def outcome_in(state: Any) -> Any:
    """What the flow of a state came to, a refusal too; the error of one that failed."""
    found = state.result(raise_on_failure=False)
    return found.outcome if isinstance(found, Refused) else found


# -- what each kind of flow ends with --------------------------------------------------------


def release_ended(outcome: ReleaseOutcome, moved: bool) -> Ended[ReleaseOutcome]:
    """moved: whether the champion is another one than before. Pure."""
    report = f"; report {outcome.report}" if outcome.report is not None else ""
    if outcome.verdict is not Verdict.PASS:
        why = "; ".join(outcome.reasons) or "no reason was recorded"
        message = line(f"{outcome.verdict}: nothing was promoted: {why}", report)
        return Ended(outcome, REFUSED, message, refused=True)
    if outcome.promoted is None:
        asked = outcome.awaits_approval
        what = f"version {asked} awaits approval" if asked is not None else "nothing had to move"
        chosen = outcome.selection.chosen if outcome.selection is not None else None
        who = f" ({chosen})" if chosen else ""
        return Ended(outcome, PASSED, line(f"PASS: {outcome.model}: {what}{who}", report))
    bundle = next((one.bundle for one in outcome.candidates if one.name == outcome.promoted), "")
    already = "" if moved else " already"
    message = (
        f"PASS: {outcome.model}@champion is version {outcome.version}{already} "
        f"({outcome.promoted}, bundle {bundle[:12]})"
    )
    return Ended(outcome, PROMOTED if moved else PASSED, line(message, report))


def move_ended(outcome: AliasOutcome) -> Ended[AliasOutcome]:
    """Of a promotion or a rollback. Pure."""
    where = f"{outcome.model}@{outcome.alias}"
    now = f"version {outcome.version} (bundle {outcome.bundle[:12]})"
    if not outcome.changed:
        return Ended(outcome, PASSED, line(f"PASS: {where} is {now} already"))
    was = f"version {outcome.before}" if outcome.before is not None else "nothing"
    said = line(f"PASS: {where}: {was} -> {now}")
    if outcome.action == "promote":
        return Ended(outcome, PROMOTED, said)
    return Ended(outcome, ROLLED_BACK, said)


def line(text: str, end: str = "") -> str:
    """One line; where it is long the middle goes, and the end stays. Pure."""
    plain = " ".join(redacted(text).split())
    room = LONGEST - len(end)
    return f"{plain if len(plain) <= room else f'{plain[: room - 1]}…'}{end}"
