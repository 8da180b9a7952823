"""`kill -9` of each part of a server in parts, under load: what clients see, and what comes back.

Also the whole comparison with one engine that does all: tokens and logprobs at temperature 0.
"""

from __future__ import annotations

import os
import signal
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from registry.errors import InfrastructureError
from registry.settings import settings
from registry.topology import Disaggregated
from registry.transfer import blocks_of
from tasks.engines.disaggregated_server import DisaggregatedServer
from tasks.engines.subprocesses import run_job, wait_until
from tasks.engines.vllm_server import VllmServer
from tests.disaggregated import (
    BLOCK,
    BLOCK_BYTES,
    ENGINE_ARGS,
    ENGINE_ENV,
    Asked,
    Said,
    addresses,
    ask,
    ask_all,
    prompts,
)
from tests.faults.conftest import Tell

pytestmark = [pytest.mark.fault, pytest.mark.alone, pytest.mark.timeout(3600)]

LENGTHS = [5, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK, 2 * BLOCK + 1, 3 * BLOCK + 1, 400]
ASKED = [
    Asked(one, stream=stream)
    for stream in (False, True)
    for one in prompts(LENGTHS, seed=int(stream))
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("disaggregated")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PILOTAGE_HOME", str(folder / "home"))
        settings.cache_clear()
        job = {"out": str(folder / "model")}
        run_job("tasks.engines.random_llama", job, log=folder / "job.log")
        yield folder
    settings.cache_clear()


@pytest.fixture(scope="module")
def colocated(folder: Path) -> list[Said]:
    """What one engine says that does all."""
    server = VllmServer(
        folder / "model",
        log=folder / "one.log",
        served_name="m",
        engine_args=ENGINE_ARGS,
        env=ENGINE_ENV,
    )
    with server:
        return ask_all(server, ASKED)


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[DisaggregatedServer]:
    server = DisaggregatedServer(
        folder / "model", topology=Disaggregated(), log=folder / "s.log", served_name="m",
        engine_args=ENGINE_ARGS, env=ENGINE_ENV,
    )  # fmt: skip
    with server:
        # Nothing of it is open to other machines.
        assert {address for address, _ in addresses(server)} <= {"127.0.0.1", "::1"}
        yield server


def test_the_answers_are_those_of_one_engine(
    colocated: list[Said], server: DisaggregatedServer, tell: Tell
) -> None:
    """Nothing is killed: 16 prompts at once, of less than a block to three blocks and a token"""
    before = server.transfer()
    said = ask_all(server, ASKED)
    found = server.check_transferred(before)
    tell(caused="16 requests at once, half of them streamed", stage="a server in parts",
         seen=found.words, status="equal", then="tokens and logprobs of one engine")  # fmt: skip
    assert [one.fault for one in [*said, *colocated]] == [""] * 32
    assert [one.tokens for one in said] == [one.tokens for one in colocated]
    for one, other in zip(said, colocated, strict=True):
        assert one.logprobs == pytest.approx(other.logprobs, abs=0.02)
    assert found.transferred_tokens == 2 * sum(LENGTHS)
    assert (found.computed_tokens, found.cached_tokens, found.failed) == (0, 0, 0)
    assert found.bytes_moved == 2 * blocks_of(LENGTHS, BLOCK) * BLOCK_BYTES


@pytest.mark.parametrize("part", ["prefill-0", "decode-0", "proxy"])
def test_a_part_is_killed(server: DisaggregatedServer, tell: Tell, part: str) -> None:
    """`kill -9` of a part of a server in parts, under load"""
    seen: list[Said] = []
    stop = threading.Event()

    def client(number: int) -> None:
        for turn, one in enumerate(prompts([300] * 400, seed=f"{part} {number}")):
            if stop.is_set():
                return
            seen.append(ask(server, Asked(one, stream=turn % 2 == 0, max_tokens=60)))

    clients = [threading.Thread(target=client, args=(number,)) for number in range(4)]
    for thread in clients:
        thread.start()
    assert wait_until(lambda: len(seen) >= 8, 300)
    before = server.transfer()
    pids = {"proxy": server.pid, **{one.part: one.pid for one in server.parts}}
    count = len(seen)
    os.kill(pids[part], signal.SIGKILL)
    assert wait_until(lambda: len(seen) >= count + 12, 300)
    with pytest.raises(InfrastructureError, match="ended" if part == "proxy" else part):
        server.check_alive()
    # Dead: nobody gets an answer, least of all one whose prompt was computed again.
    asked = [Asked(one) for one in prompts([300] * 3, seed=part)]
    dead = ask_all(server, asked)
    stop.set()
    for thread in clients:
        thread.join()
    if part != "decode-0":
        assert server.of("decode")[0].transfer().since(before, 0).computed_tokens == 0
    assert all(one.fault for one in dead)
    faults = Counter(
        f"HTTP {one.status}" if one.status != 200 else one.fault for one in seen[count:]
    )
    if part != "proxy":
        assert {one.status for one in dead} == {503}
        assert "prefill" in dead[0].fault if part == "prefill-0" else "decode" in dead[0].fault
    # No answer that was broken off passes for a whole one.
    assert {len(one.tokens) for one in seen if not one.fault} == {60}

    revived = server.revive()
    assert part in revived
    before = server.transfer()
    again = ask_all(server, asked)
    found = server.check_transferred(before)
    tell(
        fault=f"{part} of a server in parts, killed",
        caused="`kill -9` under 4 requests at once",
        stage="a server in parts",
        seen=", ".join(f"{count} x {what or 'whole answers'}" for what, count in faults.items()),
        status="InfrastructureError that names it",
        then=f"{', '.join(revived)} started again at its place; {found.words}",
    )
    assert [one.fault for one in again] == ["", "", ""]
    assert (found.transferred_tokens, found.computed_tokens) == (900, 0)
