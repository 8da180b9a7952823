"""The plan of prefill and decode apart, against sums worked out by hand."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from flows.cli import app
from recipes.loader import find
from registry.errors import UserError
from registry.machines import Machine
from registry.parts_plan import (
    PartsFit,
    machines_for,
    plan_in_parts,
    request_bytes,
    role_asks,
)
from registry.plan_parts import HOURS_PER_MONTH, Demand, Limits, Model, RuledOut
from registry.roofline import decode_step, prefill, transfer_seconds
from registry.settings import CHECKOUT
from registry.topology import Disaggregated
from tasks.capacity_inputs import machine_of
from tasks.capacity_parts import planned_in_parts
from tests.unit.shape_builders import published
from tests.unit.test_gpu_recipes import draft_of
from tests.unit.traffic_builders import written_traffic

GIB = 2**30
H20 = machine_of("nvidia_h20")
MODEL = Model(published("qwen2_5_32b"), "qwen2_5_32b")
TOPOLOGY = Disaggregated(
    prefill=2,
    decode=1,
    prefill_args={"max-num-seqs": 8, "max-num-batched-tokens": 8192},
    decode_args={"max-num-seqs": 64, "tensor-parallel-size": 2},
)
ARGS = {"max-model-len": 4096, "gpu-memory-utilization": 0.9}
CONFIG = "tests/data/model_configs/qwen2_5_32b.json"
RECIPE = "vllm_qwen2_5_32b_prefill_decode_nvidia_h20"


def planned(
    machine: Machine = H20,
    topology: Disaggregated = TOPOLOGY,
    args: dict[str, Any] = ARGS,
    demand: Demand | None = None,
    limits: dict[str, float] | None = None,
) -> tuple[tuple[PartsFit, ...], tuple[RuledOut, ...]]:
    asks = role_asks(topology, args, "auto")
    wanted = demand or Demand(64 * topology.decode, 4096, 4096)
    return plan_in_parts(MODEL, [machine], topology, asks, wanted, Limits(limits or {}))


def fit(**changes: Any) -> PartsFit:
    (found,), ruled = planned(**changes)
    assert ruled == ()
    return found


# -- memory ----------------------------------------------------------------------------------


def test_a_prompt_moves_the_cache_of_its_blocks() -> None:
    # 64 layers x (K and V) x 8 heads x 128 x 2 bytes = 262,144 bytes of a token.
    token = 64 * 2 * 8 * 128 * 2
    wish = role_asks(TOPOLOGY, ARGS, "auto")["decode"].wish
    assert request_bytes(MODEL, wish, 4096, cpu=False) == 4096 * token == GIB
    # 1000 tokens are 63 blocks of 16; on a CPU 8 of 128.
    assert request_bytes(MODEL, wish, 1000, cpu=False) == 63 * 16 * token
    assert request_bytes(MODEL, wish, 1000, cpu=True) == 8 * 128 * token
    fp8 = role_asks(TOPOLOGY, {**ARGS, "kv-cache-dtype": "fp8"}, "auto")["decode"].wish
    assert request_bytes(MODEL, fp8, 4096, cpu=False) == GIB // 2


def test_of_windows_only_what_they_hold_goes_over() -> None:
    # Gemma 3 27B: 62 layers, 16 KV heads of 128; 10 keep all, 52 a window of 1024 tokens, which are
    # 64 blocks, and one more.
    layer = 2 * 16 * 128 * 2
    wish = role_asks(TOPOLOGY, ARGS, "auto")["decode"].wish
    gemma = Model(published("gemma_3_27b"), "gemma")
    assert request_bytes(gemma, wish, 8192, cpu=False) == (10 * 8192 + 52 * 65 * 16) * layer
    assert request_bytes(gemma, wish, 100, cpu=False) == 62 * 7 * 16 * layer


def test_of_a_latent_cache_the_latent_vector_goes_over_once() -> None:
    # DeepSeek-V3: 61 layers x (512 + 64) x 2 bytes.
    deepseek = Model(published("deepseek_v3"), "deepseek")
    wish = role_asks(TOPOLOGY, ARGS, "auto")["decode"].wish
    assert request_bytes(deepseek, wish, 16, cpu=True) == 16 * 61 * 576 * 2


def test_the_cache_of_a_draft_goes_over_too() -> None:
    wish = role_asks(TOPOLOGY, ARGS, "auto")["decode"].wish
    plain = request_bytes(MODEL, wish, 4096, cpu=False)
    drafted = replace(MODEL, draft=draft_of("qwen2_5_32b", None))
    assert request_bytes(drafted, wish, 4096, cpu=False) == plain + plain // 64


def test_each_role_is_planned_as_an_engine_of_its_own() -> None:
    found = fit()
    prefill_floor, decode_floor = (found.roles[role].floor for role in ("prefill", "decode"))
    assert prefill_floor.per_gpu.kv_bytes == 8 * GIB
    assert decode_floor.per_gpu.kv_bytes == 64 * GIB // 2
    assert (found.gpus, found.max_concurrency) == (2 * 1 + 2, 101)
    # Summed over all GPUs: two prefill engines and the decode engine.
    assert found.total.weights_bytes == 2 * 65527752704 + 2 * 32764536832
    assert found.total.kv_bytes == (2 * 8 + 64) * GIB
    assert found.total.floor_bytes == (
        2 * prefill_floor.total.floor_bytes + decode_floor.total.floor_bytes
    )
    assert found.total.kv_bytes_per_token == 262_144
    assert found.fullest == prefill_floor.per_gpu


def test_a_role_that_does_not_fit_rules_the_machine_out_by_its_name() -> None:
    many = TOPOLOGY.model_copy(update={"prefill_args": {"max-num-seqs": 32}})
    fits, (out,) = planned(topology=many)
    assert fits == () and out.reason.startswith("prefill: too little memory")
    alone = TOPOLOGY.model_copy(update={"decode_args": {"max-num-seqs": 64}})
    _, (out,) = planned(topology=alone)
    assert out.reason.startswith("decode: too little memory: the floor is")


def test_more_sequences_than_the_recipe_lets_in_are_refused() -> None:
    _, (out,) = planned(demand=Demand(65, 4096, 4096))
    assert out.reason == "decode: 65 sequences on each engine, and max-num-seqs is 64"
    two = TOPOLOGY.model_copy(update={"decode": 2})
    assert fit(topology=two, demand=Demand(65, 4096, 4096)).gpus == 2 + 2 * 2


def test_numbers_that_the_recipe_leaves_open_are_all_named() -> None:
    open_ = Disaggregated(decode_args={"max-num-seqs": 4})
    with pytest.raises(UserError) as refusal:
        role_asks(open_, {}, "auto")
    assert [problem.where for problem in refusal.value.problems] == [
        "serve recipe: prefill: max-num-seqs",
        "serve recipe: prefill: max-model-len",
        "serve recipe: decode: max-model-len",
    ]


# -- machines and money ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("accelerators", "sizes", "machines"),
    [
        (1, [1, 1, 2], 4),  # a file of one GPU, as often as there are GPUs
        (8, [2, 2, 4], 1),
        (8, [4, 4, 2], 2),
        (8, [8, 1, 1], 2),
        (4, [3, 3, 1, 1], 2),
        (4, [8, 1], 3),  # an engine over two machines, and one more
        (0, [1, 1], 2),
    ],
)
def test_engines_are_put_into_as_few_machines_as_hold_them(
    accelerators: int, sizes: list[int], machines: int
) -> None:
    assert machines_for(sizes, replace(H20, accelerators=accelerators)) == machines


def test_the_price_is_of_all_machines() -> None:
    priced = replace(H20, price_per_hour=2.0, currency="USD")
    assert fit(machine=priced).cost_per_month == 2.0 * HOURS_PER_MONTH * 4
    eight = replace(priced, accelerators=8)
    assert fit(machine=eight).cost_per_month == 2.0 * HOURS_PER_MONTH
    assert fit().cost_per_month is None


# -- estimates -------------------------------------------------------------------------------


def test_the_transfer_takes_one_direction_of_the_narrower_side() -> None:
    # 1 GiB over one GPU's 900 GB/s (both directions) at 70 %: 1.0737 / (0.45 x 0.7) ms.
    assert fit().transfer_ms == pytest.approx(GIB / (450e9 * 0.7) * 1000)
    assert transfer_seconds(GIB, H20, 2) == pytest.approx(GIB / (900e9 * 0.7))
    assert transfer_seconds(GIB, replace(H20, link=None), 1) is None


def test_no_prompt_is_computed_between_two_tokens() -> None:
    from registry.parts_plan import _work

    demand = Demand(32, 4096, 4096, prompt=1000, output=200, mean_prompt=800, mean_output=100,
                    rate=2.0)  # fmt: skip
    found = fit(demand=demand)
    decoding = _work(MODEL, H20, found.roles["decode"])
    prefilling = _work(MODEL, H20, found.roles["prefill"])
    step = decode_step(decoding, 32, 800 + 100 / 2)
    first, mean = (prefill(prefilling, tokens, 8192) for tokens in (1000, 800))
    assert step is not None and first is not None and mean is not None
    share = 2.0 * mean / 2
    moved = request_bytes(MODEL, role_asks(TOPOLOGY, ARGS, "auto")["decode"].wish, 1000, cpu=False)
    seconds = moved / (450e9 * 0.7)
    ttft = first * (1 + share / (2 * (1 - share))) + seconds + step
    told = found.estimate
    assert told.tpot_ms == pytest.approx(step * 1000)
    assert told.ttft_ms == pytest.approx(ttft * 1000)
    assert told.e2el_ms == pytest.approx((ttft + 199 * step) * 1000)
    assert told.prefill_share == pytest.approx(share)


def test_more_prompts_than_can_be_computed_are_refused() -> None:
    demand = Demand(32, 4096, 4096, prompt=4000, output=50, mean_prompt=4000, mean_output=50,
                    rate=5.0)  # fmt: skip
    _, (out,) = planned(demand=demand)
    assert out.reason == (
        "estimate, not measured: more prompts arrive than the prefill engines can compute"
    )


def test_a_limit_is_held_against_the_estimate() -> None:
    _, (out,) = planned(limits={"ttft": 100.0})
    assert out.reason.startswith("estimate, not measured: ttft ")
    assert planned(limits={"tpot": 100.0})[1] == ()


def test_without_a_link_nothing_is_said_of_what_waits_for_it() -> None:
    found = fit(machine=replace(H20, link=None), topology=Disaggregated(
        prefill_args={"max-num-seqs": 8}, decode_args={"max-num-seqs": 16}),
        demand=Demand(16, 4096, 4096))  # fmt: skip
    assert found.transfer_ms is None and found.estimate.ttft_ms is None
    assert found.estimate.tpot_ms is not None and "not known" in found.estimate.note


# -- the command -----------------------------------------------------------------------------


def command(*words: str) -> tuple[int, str]:
    done = CliRunner().invoke(app, ["plan", *words], catch_exceptions=True)
    text = str(done.exception) if isinstance(done.exception, UserError) else done.output
    return done.exit_code, text


@pytest.fixture(autouse=True)
def _from_the_checkout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(CHECKOUT)


def test_the_document_keeps_the_contract() -> None:
    status, text = command(
        "--model", CONFIG, "--hardware", "nvidia_h20", "--serve", RECIPE, "--json"
    )
    assert status == 0
    document = json.loads(text.splitlines()[-1])
    assert document["weights_bytes"] == 65527752704 + 2 * 32764536832
    assert document["kv_bytes"] == (8 + 64) * GIB
    assert document["kv_bytes_per_token"] == 262144
    assert document["per_gpu"]["kv_bytes"] == 8 * GIB
    assert document["ruled_out"] == []
    (found,) = document["fits"]
    assert {"hardware", "format", "tp", "max_concurrency", "engine_args", "cost_per_month"} <= set(
        found
    )
    assert (found["gpus"], found["transfer"]["bytes_per_request"]) == (3, GIB)
    assert found["roles"]["prefill"]["engine_args"]["max-num-seqs"] == 8
    assert document["demand"]["source"] == f"the most that {RECIPE} takes"


def test_what_the_command_says_to_people() -> None:
    status, text = command("--model", CONFIG, "--hardware", "nvidia_h20", "--serve", RECIPE)
    assert status == 0
    assert "disaggregated, 1 prefill + 1 decode (NixlConnector)" in text
    row = next(line for line in text.splitlines() if line.startswith("nvidia_h20"))
    assert row.split()[2:8] == ["3", "74.06", "66.16", "101", "1024.0", "3.4"]
    status, text = command("--model", CONFIG, "--hardware", "nvidia_a10", "--serve", RECIPE)
    assert status == 10 and "Nothing fits." in text and "prefill: too little memory" in text


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--serve", "vllm_qwen2_5_32b_nvidia_h20"], "is colocated: one engine does all"),
        (["--serve", RECIPE, "--tp", "2"], "--tp: is in the serve recipe"),
        (["--serve", RECIPE, "--context", "8192"], "more than the recipe's max-model-len, 4096"),
        (["--serve", "nobody"], "nobody"),
    ],
)
def test_what_cannot_be_planned_so(words: list[str], message: str) -> None:
    _, text = command("--model", CONFIG, "--hardware", "nvidia_h20", *words)
    assert message in text


def test_a_profile_with_longer_requests_than_the_recipe_takes_is_refused(tmp_path: Path) -> None:
    profile = written_traffic(tmp_path)
    with pytest.raises(UserError, match="14000 tokens are more than the recipe's max-model-len"):
        planned_in_parts(CONFIG, RECIPE, hardware=["nvidia_h20"], traffic=profile)


def test_a_traffic_profile_says_the_load(tmp_path: Path) -> None:
    """143 sequences at once and 22 requests/s with prompts of 900 tokens on average."""
    profile = written_traffic(tmp_path)
    shipped = (
        find(RECIPE, "serve").read_text().replace("max-model-len: 4096", "max-model-len: 16384")
    )
    shipped = shipped.replace("max-num-seqs: 8", "max-num-seqs: 4")

    def made(prefill: int, decode: int) -> tuple[dict[str, Any], int]:
        text = shipped.replace("prefill: 1", f"prefill: {prefill}")
        recipe = tmp_path / f"{prefill}-{decode}.yaml"
        recipe.write_text(text.replace("decode: 1", f"decode: {decode}"))
        return planned_in_parts(CONFIG, str(recipe), hardware=["nvidia_h20"], traffic=profile)

    few, status = made(1, 1)
    assert status == 10
    assert few["ruled_out"][0]["reason"] == (
        "decode: 143 sequences on each engine, and max-num-seqs is 64"
    )
    slow, status = made(1, 3)
    assert (
        "more prompts arrive than the prefill engines can compute"
        in (slow["ruled_out"][0]["reason"])
    )
    enough, status = made(24, 3)
    demand, (found,) = enough["demand"], enough["fits"]
    assert status == 0 and found["gpus"] == 24 + 3 * 2
    # Of the prompt that limits are meant for, 2000 tokens, in whole blocks.
    assert demand["prompt"] == 2000
    assert found["transfer"]["bytes_per_request"] == 125 * 16 * 262144
    # 22 requests/s on 24 engines, each 2 x 31.2e9 operations for each of 900 tokens and a few
    # more for attention, at 55 % of 148e12.
    least = 22 / 24 * 2 * 31.2e9 * 900 / (148e12 * 0.55)
    assert least < found["estimate"]["prefill_share"] < 1.05 * least
