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
"""


def test_a_page_that_counts_no_transfers_proves_nothing() -> None:
    assert transfer_of(PAGE) == having(cached_tokens=128, failed=2, block_bytes=0)
    for gone in ("external_kv_transfer", "_sum", "failed", "cache_config"):
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


def test_ports_of_parts_differ() -> None:
    ports = free_ports(20)
    assert len(set(ports)) == 20 and min(ports) > 0
