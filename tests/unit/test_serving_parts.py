"""`pilotage serve` of a bundle with prefill and decode apart, without an engine."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest

from registry.bundle import Bundle, Part
from registry.errors import Infeasible, InfrastructureError, UserError
from registry.topology import Disaggregated
from tasks import serving_parts
from tasks.serving_parts import (
    MOST_REVIVALS,
    QUIET,
    WATCH,
    FrontedServer,
    printed,
    serve_in_parts,
    watch,
)

BUNDLE = Bundle(
    name="c",
    target=Part(stage="distill", key="k", digest="t"),
    engine_version="0.32.0",
    engine_args={"max-model-len": 512},
    topology=Disaggregated(decode=2, decode_args={"max-num-seqs": 4}),
)


class Stopped(Exception):
    """What a signal becomes."""


class Failing:
    """Parts that die at the given looks."""

    def __init__(self, dead_at: set[int], stop_at: int) -> None:
        self.error: Exception = InfrastructureError("decode-0: ended")
        self.dead_at, self.stop_at = dead_at, stop_at
        self.looks, self.revived, self.now = 0, 0, 0.0

    def check_alive(self) -> None:
        self.looks += 1
        if self.looks in self.dead_at:
            raise self.error

    def revive(self) -> list[str]:
        self.revived += 1
        return ["decode-0"]

    def sleep(self, seconds: float) -> None:
        if self.looks == self.stop_at:
            raise Stopped
        self.now += seconds

    def clock(self) -> float:
        return self.now


def watched(dead_at: set[int], stop_at: int) -> Failing:
    parts = Failing(dead_at, stop_at)
    with pytest.raises(Stopped):
        watch(parts, parts.sleep, parts.clock)
    return parts


def test_a_part_that_dies_is_started_again_until_a_signal_comes() -> None:
    assert watched(set(), 5).revived == 0
    assert watched({2, 4}, 6).revived == 2


def test_a_part_that_always_dies_ends_the_server() -> None:
    parts = Failing(set(range(1, 100)), 99)
    with pytest.raises(InfrastructureError, match="decode-0: ended"):
        watch(parts, parts.sleep, parts.clock)
    assert parts.revived == MOST_REVIVALS


def test_a_part_that_ran_and_had_no_memory_is_started_again() -> None:
    parts = Failing({2}, 4)
    parts.error = Infeasible("CUDA out of memory")
    with pytest.raises(Stopped):
        watch(parts, parts.sleep, parts.clock)
    assert parts.revived == 1


def test_deaths_that_lie_far_apart_are_each_the_first() -> None:
    far = int(QUIET / WATCH) + 2
    parts = watched({far * n for n in range(1, MOST_REVIVALS + 3)}, far * (MOST_REVIVALS + 3))
    assert parts.revived == MOST_REVIVALS + 2


def test_without_a_key_nothing_is_started(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VLLM_API_KEY", raising=False)
    with pytest.raises(UserError, match="the parts of this server need one key"):
        serve_in_parts(BUNDLE, "freight@champion", 8000)


def test_the_proxy_has_the_port_that_was_asked_for_and_all_parts_one_key(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = []

    def entered(server: FrontedServer) -> None:
        made.append(server)
        raise Stopped

    monkeypatch.setattr(serving_parts, "devices", lambda: ("cpu",))
    monkeypatch.setattr(FrontedServer, "__enter__", entered)
    monkeypatch.setenv("VLLM_API_KEY", "secret")
    with pytest.raises(Stopped):
        serve_in_parts(BUNDLE, "freight@champion", 9000)
    (server,) = made
    assert server._choose_port() == 9000 and server.served_name == "freight"
    assert [part.part for part in server.parts] == ["prefill-0", "decode-0", "decode-1"]
    assert {server.api_key, *(part.api_key for part in server.parts)} == {"secret"}


def test_all_parts_are_printed_with_their_own_ports(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serving_parts, "devices", lambda: ("cpu",))
    monkeypatch.setenv("VLLM_API_KEY", "secret")
    lines = printed(BUNDLE, "freight@champion", 9000).splitlines()
    assert lines[::2] == ["# prefill-0", "# decode-0", "# decode-1", "# proxy"]
    engines = [shlex.split(line) for line in lines[1:6:2]]
    for number, words in enumerate(engines):
        assert words[words.index("--port") + 1] == str(8100 + number)
        assert f"VLLM_NIXL_SIDE_CHANNEL_PORT={5600 + number}" in words
        # As at the gate: the cache of all engines of this machine goes over loopback alone.
        assert "UCX_NET_DEVICES=lo" in words
        assert words[words.index("--served-model-name") + 1] == "freight"
        config = json.loads(words[words.index("--kv-transfer-config") + 1])
        assert config["kv_role"] == ("kv_consumer" if number else "kv_producer")
        assert ("--max-num-seqs" in words) == bool(number)
    assert shlex.split(lines[-1])[2:] == [
        *("--port", "9000", "--prefill", "http://127.0.0.1:8100"),
        *("--decode", "http://127.0.0.1:8101", "--decode", "http://127.0.0.1:8102"),
    ]
    assert "secret" not in "\n".join(lines)


def test_by_gpus_each_engine_is_given_its_own(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving_parts, "devices", lambda: ("GPU-a", "GPU-b", "GPU-c"))
    lines = printed(BUNDLE, "freight@champion", 9000).splitlines()
    shown = [line for line in lines if "CUDA_VISIBLE_DEVICES" in line]
    assert [line.partition("CUDA_VISIBLE_DEVICES=")[2].split()[0] for line in shown] == [
        "GPU-a",
        "GPU-b",
        "GPU-c",
    ]
    monkeypatch.setattr(serving_parts, "devices", lambda: ("GPU-a",))
    with pytest.raises(UserError, match="needs 3 GPUs"):
        printed(BUNDLE, "freight@champion", 9000)
