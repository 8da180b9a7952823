"""What a run says of how far it is: honest about what was never made, below 100 before the end."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tasks.run_progress import MOST, Current, Progress, percent, remaining, words


def current(**changes: object) -> Current:
    fields = {"key": "c", "title": "distill", "number": 2, "planned": 4, "estimate": 60.0}
    return Current(**{**fields, "since": 100.0, **changes})  # type: ignore[arg-type]


def test_what_remains_is_what_the_absent_stages_took_last_time() -> None:
    progress = Progress(planned=4, to_come={"a": 10.0, "b": 20.0}, current=current())
    assert remaining(progress, 130.0) == (60.0, 0)
    assert words(progress, 130.0) == (
        "stage 2 of 4: distill, for 30 s (last time 1 min 0 s); about 1 min 0 s to go"
    )
    assert percent(progress, 130.0) == 33.3


def test_a_stage_that_takes_longer_than_last_time_takes_nothing_off_the_others() -> None:
    progress = Progress(planned=4, to_come={"a": 10.0}, current=current())
    assert remaining(progress, 1000.0) == (10.0, 0)


def test_what_was_never_made_has_no_estimate() -> None:
    never = Progress(planned=4, to_come={"a": None, "b": None}, current=current(estimate=None))
    assert words(never, 105.0) == (
        "stage 2 of 4: distill, for 5 s; no estimate yet: what remains was never made here"
    )
    partly = Progress(planned=4, to_come={"a": 30.0, "b": None}, ended=1)
    assert words(partly, 0.0) == (
        "1 of 4 stages are there; no estimate yet of the whole: about 30 s to go, and a stage "
        "that was never made here"
    )
    assert percent(partly, 0.0) == 25.0


def test_what_is_made_or_left_out_is_not_to_come() -> None:
    progress = Progress(planned=3, to_come={"a": 10.0, "b": 20.0, "c": 30.0})
    progress = progress.begun(current(key="a", estimate=10.0)).done("a", 112.0).without(["c"])
    assert (progress.ended, progress.spent, progress.current) == (1, 12.0, None)
    assert remaining(progress, 120.0) == (20.0, 0)


@given(
    to_come=st.dictionaries(st.text(max_size=2), st.none() | st.floats(0, 1e6), max_size=5),
    ended=st.integers(0, 50),
    planned=st.integers(0, 50),
    spent=st.floats(0, 1e6),
    running=st.booleans(),
)
def test_no_run_shows_its_whole_before_it_ended(
    to_come: dict[str, float | None], ended: int, planned: int, spent: float, running: bool
) -> None:
    now = current(since=0.0) if running else None
    progress = Progress(planned, to_come, ended, spent, now)
    assert 0 <= percent(progress, 500.0) <= MOST
    assert words(progress, 500.0)
