"""What counters of transfers prove, and what the proxy of a server in parts asks and shows."""

from __future__ import annotations

from pathlib import Path

import pytest

from registry.errors import InfrastructureError, UserError
from registry.topology import Disaggregated
from registry.transfer import Transfer, blocks_of, untransferred
from tasks.engines import disaggregated_server
from tasks.engines.disaggregated_server import DisaggregatedServer, device_places
from tasks.engines.disaggregated_transfer import keeps_whole_prompts, transfer_of
from tasks.engines.ports import free_ports
from tasks.serving import Watched

GOOD = Transfer(
    transferred_tokens=129, cached_tokens=0, computed_tokens=0, transfers=1,
    bytes_moved=131_072, failed=0, block_size=128, block_bytes=65_536,
)  # fmt: skip


def having(**changes: int) -> Transfer:
    return GOOD.model_copy(update=changes)


@pytest.mark.parametrize(
    ("found", "said"),
    [
        (GOOD, ""),
        (having(cached_tokens=128), ""),
        (having(transferred_tokens=0, bytes_moved=0, transfers=0, cached_tokens=256), ""),
        (having(computed_tokens=300), "computed 300 prompt tokens themselves"),
        (having(transferred_tokens=0, bytes_moved=0), "no prompt token was transferred"),
        (having(bytes_moved=131_071), "no whole number of blocks"),
        (having(block_bytes=0), "no whole number of blocks"),
        (having(bytes_moved=65_536), "1 blocks were moved for 129 tokens, which fill 2"),
        # A fetch that failed gave its client an error, and no answer without a transfer.
        (having(failed=1), ""),
        (having(preempted=1), ""),
    ],
)
def test_what_counters_prove(found: Transfer, said: str) -> None:
    reasons = untransferred(found)
    assert [said in reason for reason in reasons] == ([True] if said else [])


def test_a_window_takes_fewer_blocks_than_the_prompt() -> None:
    found = having(bytes_moved=65_536)
    assert untransferred(found, whole_prompts=False) == []
    assert keeps_whole_prompts({"model_type": "llama"})
    assert keeps_whole_prompts({"sliding_window": 4096, "use_sliding_window": False})
    assert not keeps_whole_prompts({"sliding_window": 4096})
    mixed = {"layer_types": ["full_attention", "sliding_attention"]}
    assert not keeps_whole_prompts({"text_config": mixed})


def test_counters_are_differences_and_sums() -> None:
    twice = GOOD.plus(GOOD)
    assert (twice.bytes_moved, twice.transfers, twice.block_size) == (262_144, 2, 128)
    assert twice.since(GOOD, 65_536) == GOOD
    # 1, 128, 129 and 300 tokens: 1 + 1 + 2 + 3 blocks; two of them were in the prefix cache.
    assert blocks_of([1, 128, 129, 300], 128) == 7
    assert blocks_of([1, 128, 129, 300], 128, cached_tokens=256) == 5


PAGE = """# HELP vllm:prompt_tokens_by_source_total x
# TYPE vllm:prompt_tokens_by_source_total counter
vllm:prompt_tokens_by_source_total{engine="0",source="local_compute"} 0.0
vllm:prompt_tokens_by_source_total{engine="0",source="local_cache_hit"} 128.0
vllm:prompt_tokens_by_source_total{engine="0",source="external_kv_transfer"} 129.0
# HELP vllm:cache_config_info x
# TYPE vllm:cache_config_info gauge
vllm:cache_config_info{block_size="128",engine="0"} 1.0
# HELP vllm:nixl_bytes_transferred x
# TYPE vllm:nixl_bytes_transferred histogram
vllm:nixl_bytes_transferred_bucket{engine="0",le="+Inf"} 1.0
vllm:nixl_bytes_transferred_count{engine="0"} 1.0
vllm:nixl_bytes_transferred_sum{engine="0"} 131072.0
# HELP vllm:nixl_num_failed_transfers_total x
# TYPE vllm:nixl_num_failed_transfers_total counter
vllm:nixl_num_failed_transfers_total{engine="0"} 2.0
# HELP vllm:num_preemptions_total x
# TYPE vllm:num_preemptions_total counter
vllm:num_preemptions_total{engine="0"} 4.0
"""


def test_a_page_that_counts_no_transfers_proves_nothing() -> None:
    assert transfer_of(PAGE) == having(
        cached_tokens=128, failed=2, preempted=4, block_bytes=0
    )  # fmt: skip
    for gone in ("external_kv_transfer", "_sum", "failed", "preempt", "cache_config"):
        page = "\n".join(line for line in PAGE.splitlines() if gone not in line) + "\n"
        with pytest.raises(InfrastructureError, match="is not to be seen"):
            transfer_of(page)


# -- devices ---------------------------------------------------------------------------------


def test_each_engine_has_gpus_of_its_own_prefill_first() -> None:
    topology = Disaggregated(prefill=1, decode=2, prefill_args={"tensor-parallel-size": 2})
    found = device_places(topology, {}, ["a", "b", "c", "d", "e"])
    assert found == {
        "prefill-0": {"CUDA_VISIBLE_DEVICES": "a,b"},
        "decode-0": {"CUDA_VISIBLE_DEVICES": "c"},
        "decode-1": {"CUDA_VISIBLE_DEVICES": "d"},
    }
    with pytest.raises(UserError, match=r"needs 4 GPUs \(prefill-0 2, .*\), and there are 3"):
        device_places(topology, {}, ["a", "b", "c"])
    assert device_places(topology, {}, ["cpu"])["decode-1"] == {}


def test_the_servers_of_one_bundle_share_a_key_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disaggregated_server, "hardware", lambda: {"cores": 8})
    server = DisaggregatedServer(
        tmp_path, topology=Disaggregated(prefill=1, decode=3), log=tmp_path / "s.log",
        served_name="m", engine_args={"max-model-len": 256}, env={"OMP_NUM_THREADS": "3"},
    )  # fmt: skip
    assert [part.part for part in server.parts] == ["prefill-0", "decode-0", "decode-1", "decode-2"]
    assert {part.api_key for part in server.parts} == {server.api_key}
    assert server.parts[1].log == tmp_path / "s-decode-0.log"
    assert server.start_requests == 3
    env = server.parts[0]._env
    assert (env["UCX_TLS"], env["UCX_NET_DEVICES"]) == ("tcp,sm,self", "lo")
    assert env["OMP_NUM_THREADS"] == "3", "the recipe stands above"
    words = " ".join(server.parts[1].command)
    assert '"kv_role": "kv_consumer"' in words and '"kv_load_failure_policy": "fail"' in words
    assert server.api_key not in words + " ".join(server.command)
    gpus = DisaggregatedServer(
        tmp_path, topology=Disaggregated(), log=tmp_path / "g.log", served_name="m", devices=["a"]
    )
    assert "UCX_TLS" not in gpus.parts[0]._env
    with pytest.raises(UserError, match="needs 2 GPUs"), gpus:
        pass


# -- the proof of a pair, with counters that are pretended ------------------------------------

NONE = GOOD.model_copy(
    update=dict.fromkeys(("transferred_tokens", "transfers", "bytes_moved", "block_bytes"), 0)
)


class Counts:
    """A decode engine that has counted `after` once the probe was answered."""

    part, log = "decode-0", "d.log"

    def __init__(self, after: Transfer) -> None:
        self.pages = [NONE, after]

    def transfer(self) -> Transfer:
        return self.pages.pop(0) if len(self.pages) > 1 else self.pages[0]


class Answered:
    status_code = 200


@pytest.fixture
def proved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> DisaggregatedServer:
    monkeypatch.setattr(disaggregated_server, "SETTLE", 0.3)
    server = DisaggregatedServer(
        tmp_path, topology=Disaggregated(), log=tmp_path / "s.log", served_name="m"
    )
    monkeypatch.setattr(server._client, "post", lambda *_, **__: Answered())
    return server


def probe(server: DisaggregatedServer, after: Transfer) -> str:
    return server._probe(server.of("prefill")[0], Counts(after), float("inf"))  # type: ignore[arg-type]


def test_a_pair_is_proved_by_its_own_prompt(proved: DisaggregatedServer) -> None:
    assert probe(proved, having(block_bytes=0)) == ""
    assert proved.block_bytes == 65_536
    with pytest.raises(InfrastructureError, match="did not fetch its prompt from prefill-0"):
        probe(proved, having(transferred_tokens=0, bytes_moved=0, computed_tokens=129))
    assert "no proof" in probe(proved, having(bytes_moved=65_536))
    assert "no proof" in probe(proved, NONE)


def test_a_pair_is_proved_while_clients_are_answered(proved: DisaggregatedServer) -> None:
    """`pilotage serve` starts a part again under its clients' requests."""
    beside = having(transferred_tokens=429, transfers=2, bytes_moved=5 * 65_536)
    # What a block has is taken from a prompt that was alone.
    assert "no proof" in probe(proved, beside)
    assert proved.block_bytes == 0
    probe(proved, having(block_bytes=0))
    assert probe(proved, beside) == ""
    with pytest.raises(InfrastructureError, match="computed 129 prompt tokens"):
        probe(proved, beside.model_copy(update={"computed_tokens": 129}))
    assert proved.block_bytes == 65_536


def test_an_engine_that_gives_no_counters_is_a_fault_of_the_machine(
    proved: DisaggregatedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An error of the HTTP library would pass by all who start a server again."""
    decode = proved.of("decode")[0]
    monkeypatch.setattr(decode, "check_alive", lambda: None)
    decode.port = free_ports(1)[0]
    with pytest.raises(InfrastructureError, match="decode-0 gives no metrics"):
        decode.transfer()


def test_a_part_that_has_to_move_is_told_to_the_proxy(
    proved: DisaggregatedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    dead: list[list[str]] = [["decode-0"], []]
    did: list[str] = []
    moves = True
    decode = proved.of("decode")[0]

    def ready(deadline: float) -> None:
        decode.port += moves

    monkeypatch.setattr(proved, "_dead", lambda: dead.pop(0))
    monkeypatch.setattr(decode, "begin", lambda: did.append("decode-0"))
    monkeypatch.setattr(decode, "ready", ready)
    monkeypatch.setattr(proved, "_start_proxy", lambda deadline: did.append("proxy"))
    monkeypatch.setattr(proved, "_prove", lambda deadline: did.append("proof"))
    assert proved.revive() == ["decode-0"]
    assert did == ["decode-0", "proxy", "proof"]
    dead, moves = [["decode-0"], []], False
    proved.revive()
    assert did[3:] == ["decode-0", "proof"]


def test_what_is_counted_between_two_checks_is_looked_at(
    proved: DisaggregatedServer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    now = having(transferred_tokens=0, bytes_moved=0, transfers=0)
    monkeypatch.setattr(proved, "transfer", lambda: now)
    monkeypatch.setattr(proved, "check_alive", lambda: None)
    watched = Watched(proved)

    def counted(before: Transfer) -> Transfer:
        """The engine answers one more request as soon as its counters have been read."""
        nonlocal now
        found = now.since(before, 65_536)
        now = now.plus(having(preempted=3))
        return found

    monkeypatch.setattr(proved, "check_transferred", counted)
    for _ in range(3):
        watched.check()
    assert watched.transfer is not None and watched.transfer.transferred_tokens == 2 * 129
    assert watched.transfer.preempted == 6
    assert caplog.text.count("m: 3 requests had to give up their room") == 2


def test_ports_of_parts_differ() -> None:
    ports = free_ports(20)
    assert len(set(ports)) == 20 and min(ports) > 0
