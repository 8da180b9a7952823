"""What a release does about the run of a candidate, however that ended."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from prefect.client.schemas.objects import StateType
from prefect.utilities.engine import resolve_inputs_sync

from flows.candidate import (
    ENGINE,
    HARDWARE,
    UNLIKE,
    Unlike,
    candidate_of,
    check_keys,
    ended,
    reason_of,
    refusal,
)
from flows.candidate_runs import End, decision
from flows.endings import REFUSED
from flows.forms import CandidateRequest
from registry.errors import UserError
from tasks.judging import Measured


@pytest.mark.parametrize(
    ("end", "what"),
    [
        (End("r", StateType.COMPLETED, "Measured"), "read"),
        (End("r", StateType.COMPLETED, "Infeasible"), "read"),
        (End("r", StateType.FAILED, REFUSED), "refused"),
        (End("r", StateType.FAILED, "Failed"), "measure"),
        (End("r", StateType.FAILED, "TimedOut"), "measure"),
        (End("r", StateType.CRASHED, "Crashed"), "measure"),
        (End("r", StateType.FAILED, UNLIKE), "stop"),
        (End("r", StateType.CANCELLED, "Cancelled"), "stop"),
        (End("r", StateType.CANCELLED, "Deleted"), "stop"),
        (End("r", StateType.CANCELLED, "Cancelled", given_up="never started"), "measure"),
        (End("r", StateType.CANCELLED, "Cancelled", given_up="took too long"), "stop"),
    ],
)
def test_decision(end: End, what: str) -> None:
    assert decision(end) == what


def test_an_end_is_told_with_its_run() -> None:
    end = End("0f3c", StateType.CRASHED, "Crashed", "Process exited with status code: -9")
    assert str(end) == "its run 0f3c ended as Crashed: Process exited with status code: -9"
    late = End("0f3c", StateType.CANCELLED, "Cancelled", given_up="never started")
    assert str(late) == "its run 0f3c never started"


def test_a_refusal_carries_its_whole_reason_to_the_release() -> None:
    reason = "quantize w8a8: perplexity 12.1 of at most 11\n    remedy: more calibration\n" * 30
    end = ended(Measured("w8a8", failure=reason))
    assert (end.name, end.refused) == (REFUSED, True)
    assert end.message == refusal("w8a8", reason)
    assert reason_of("w8a8", end.message) == reason


def test_equal_keys_are_accepted() -> None:
    keys = {"latency bf16": "1" * 64, HARDWARE: "abc", ENGINE: "vllm 0.32"}
    check_keys(keys, dict(keys))


def test_an_unlike_worker_says_what_differs() -> None:
    here = {"serving bf16": "1" * 64, "latency bf16": "2" * 64, HARDWARE: "abc", ENGINE: "vllm 1"}
    there = {**here, "serving bf16": "3" * 64, "latency bf16": "4" * 64, HARDWARE: "def"}
    with pytest.raises(Unlike, match=r"\(hardware: def there, abc here\)"):
        check_keys(there, here)
    with pytest.raises(Unlike, match=r"\(engine: vllm 2 there, vllm 1 here\)"):
        check_keys({**here, ENGINE: "vllm 2"}, here)
    # Neither: another checkout, other prompts. The first stage that differs is named.
    with pytest.raises(Unlike, match=r"\(latency bf16: 5{40} there, 2{40} here\)"):
        check_keys({**here, "latency bf16": "5" * 64}, here)
    with pytest.raises(Unlike, match=r"serving bf16: none there"):
        check_keys({name: key for name, key in here.items() if name != "serving bf16"}, here)


def test_prefect_can_look_into_the_request() -> None:
    """It takes what has `keys` for a mapping, and fails before the flow begins."""
    request = CandidateRequest(expected={"latency bf16": "1" * 64})
    assert not hasattr(request, "keys")
    assert resolve_inputs_sync({"request": request}) == {"request": request}


def test_a_request_that_names_no_candidate_measures_none() -> None:
    # The form allows an empty field; in the forms of single stages that means all of them.
    todo: Any = SimpleNamespace(candidates=[SimpleNamespace(name=n) for n in ("bf16", "w8a8")])
    with pytest.raises(UserError, match=r"candidate: names none\n.*one of: bf16, w8a8"):
        candidate_of(todo, CandidateRequest(candidate=""))
    assert candidate_of(todo, CandidateRequest(candidate="w8a8")).name == "w8a8"
