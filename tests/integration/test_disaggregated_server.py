"""A server in parts for real: what goes over, that the answers are the same, what is refused.

The kills of its parts are in `tests/faults/test_disaggregated.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest

from registry.settings import settings
from registry.topology import Disaggregated
from registry.transfer import blocks_of
from tasks.engines.disaggregated_server import DisaggregatedServer
from tasks.engines.engine_watch import EngineWatch
from tasks.engines.subprocesses import run_job
from tests.disaggregated import (
    BLOCK,
    BLOCK_BYTES,
    ENGINE_ARGS,
    ENGINE_ENV,
    Asked,
    addresses,
    ask_all,
    prompts,
)
from tests.processes import gone

pytestmark = pytest.mark.alone

LENGTHS = [5, BLOCK, 2 * BLOCK, 2 * BLOCK + 1, 300]


@pytest.fixture(autouse=True)
def _own_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("PILOTAGE_HOME", str(tmp_path / "home"))
    settings.cache_clear()
    yield
    settings.cache_clear()


def test_prompts_go_over_and_answers_are_the_same(tmp_path: Path) -> None:
    model = tmp_path / "model"
    run_job("tasks.engines.random_llama", {"out": str(model)}, log=tmp_path / "job.log")
    server = DisaggregatedServer(
        model, topology=Disaggregated(), log=tmp_path / "s.log", served_name="m",
        engine_args=ENGINE_ARGS, env=ENGINE_ENV,
    )  # fmt: skip
    with server:
        family = [
            process
            for pid in server.pids
            for process in [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]
        ]
        assert server.block_bytes == BLOCK_BYTES
        assert server.kv_cache_tokens == 64 * 2**20 // 512
        asked = [Asked(one, stream=i % 2 == 0) for i, one in enumerate(prompts(LENGTHS, seed=1))]

        before, shown = server.transfer(), server.metrics()
        with EngineWatch(server.url, api_key=server.api_key, pids=lambda: server.pids).step() as w:
            said = ask_all(server, asked)
        found = server.check_transferred(before)
        assert found.transferred_tokens == sum(LENGTHS)
        assert (found.cached_tokens, found.computed_tokens, found.failed) == (0, 0, 0)
        assert found.bytes_moved == blocks_of(LENGTHS, BLOCK) * BLOCK_BYTES
        assert found.transfers == len(LENGTHS)

        # The page of all engines counts an answer once, and a prompt where it is looked up.
        now = server.metrics()
        grown = {name: value - shown[name] for name, value in now.items() if name in shown}
        assert grown["vllm:generation_tokens_total"] == 8 * len(LENGTHS)
        assert grown["vllm:request_success_total"] == len(LENGTHS)
        assert w.growth["vllm:prefix_cache_queries_total"] == sum(LENGTHS)
        assert not any("_seconds" in name for name in now if name.startswith("vllm:"))

        # The prefill engine alone, asked past the proxy, computes and answers it all itself.
        alone = ask_all(server, asked, server.of("prefill")[0]._root)
        assert [one.fault for one in said + alone] == [""] * (2 * len(LENGTHS))
        assert [one.tokens for one in said] == [one.tokens for one in alone]
        assert [len(one.tokens) for one in said] == [8] * len(LENGTHS)
        for one, other in zip(said, alone, strict=True):
            assert one.logprobs == pytest.approx(other.logprobs, abs=0.02)

        check_refusals(server)
        listening = addresses(server)
        assert {address for address, _ in listening} <= {"127.0.0.1", "::1"}
        assert {server.port, *(part.port for part in server.parts)} <= {p for _, p in listening}
    assert all(map(gone, family))


def check_refusals(server: DisaggregatedServer) -> None:
    def status(key: str, **body: object) -> int:
        words = {"model": "m", "prompt": [40] * 5, "max_tokens": 1, **body}
        headers = {"Authorization": f"Bearer {key}"}
        url = f"{server.url}/completions"
        return httpx.post(url, json=words, headers=headers, trust_env=False).status_code

    assert status("wrong") == 401
    assert status(server.api_key, n=2) == 400
    assert status(server.api_key, prompt=["one", "two"]) == 400
    assert status(server.api_key, echo=True) == 400
    # The engine's own refusal, as it is.
    assert status(server.api_key, prompt=[40] * 600) == 400
    assert status(server.api_key) == 200
