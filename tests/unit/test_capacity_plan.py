"""`pilotage plan`: worked numbers, what is ruled out and why, ranks, limits, errors."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from flows.cli import app
from flows.plan_rendering import together_text
from recipes.serve_rules import argument_problems
from registry.bundle import Bundle, Part
from registry.capacity_plan import plan
from registry.errors import UserError
from registry.format_support import kv_problem, support_of
from registry.json_files import json_object
from registry.machines import GIB, Machine
from registry.memory_floor import floor_of
from registry.model_shapes import shape_of
from registry.plan_parts import Demand, Limits, Model, Wish
from registry.roofline import Load, Work, decode_step, estimate, prefill
from registry.settings import CHECKOUT
from tasks import bundles
from tasks.capacity import _engines_on, planned, planned_together
from tasks.capacity_inputs import limits_of, machine_of, machines_of
from tests.unit.traffic_builders import written_traffic

CONFIGS = CHECKOUT / "tests" / "data" / "model_configs"
LLAMA = CONFIGS / "llama_3_1_8b.json"
USD = "price_per_hour: {}\ncurrency: USD\nprice_source: a test\nprice_as_of: 2026-01-31\n"


def model(name: str = "llama_3_1_8b") -> Model:
    path = CONFIGS / f"{name}.json"
    return Model(shape_of(json_object(path), str(path)), name)


def made(name: str = "llama_3_1_8b", **options: Any) -> tuple[dict[str, Any], int]:
    asked = {"concurrency": 32, "context": 8192, "utilization": 0.9, "max_batched_tokens": 2048}
    return planned(str(CONFIGS / f"{name}.json"), **{**asked, **options})


def priced(tmp_path: Path, name: str, price: float, **changes: Any) -> str:
    """A hardware file with a price, in a folder of its own."""
    content = yaml.safe_load((CHECKOUT / "recipes" / "hardware" / f"{name}.yaml").read_text())
    content |= yaml.safe_load(USD.format(price)) | changes
    path = tmp_path / f"{name}.yaml"
    path.write_text(yaml.safe_dump(content))
    return str(path)


def only(fits: list[dict[str, Any]], **wanted: Any) -> dict[str, Any]:
    found = [one for one in fits if all(one[key] == value for key, value in wanted.items())]
    assert len(found) == 1, found
    return found[0]


# -- the contract ----------------------------------------------------------------------------


def test_the_contract_for_automation_with_worked_numbers() -> None:
    """Llama 3.1 8B: 32 layers, 8 KV heads of 128, 8,030,261,248 parameters of two bytes."""
    done = CliRunner().invoke(
        app,
        ["plan", "--model", str(LLAMA), "--concurrency", "32", "--context", "8192", "--json"],
    )
    assert done.exit_code == 0, done.output
    told = json.loads(done.output.splitlines()[-1])
    assert told["weights_bytes"] == 8_030_261_248 * 2
    assert told["kv_bytes_per_token"] == 32 * 2 * 8 * 128 * 2
    assert told["kv_bytes"] == 131_072 * 8192 * 32
    summands = [
        value
        for key, value in told.items()
        if key.endswith("_bytes") and key not in ("floor_bytes", "reserve_bytes")
    ]
    assert told["floor_bytes"] == math.ceil(sum(summands) * 1.05)
    assert told["per_gpu"]["floor_bytes"] == told["floor_bytes"]
    assert told["format"] == "bf16" and told["kv_dtype"] == "bfloat16"

    h20 = only(told["fits"], hardware="nvidia_h20")
    assert (h20["format"], h20["tp"], h20["cost_per_month"]) == ("bf16", 1, None)
    assert h20["engine_args"] == {
        "max-model-len": 8192,
        "max-num-seqs": 32,
        "max-num-batched-tokens": 2048,
        "gpu-memory-utilization": 0.9,
        "tensor-parallel-size": 1,
    }
    shape, budget = model().shape, math.floor(math.floor(95.57 * GIB) * 0.9)
    most = h20["max_concurrency"]
    for sequences, fits in ((most, True), (most + 1, False)):
        floor = floor_of(shape, concurrency=sequences, context=8192).per_gpu.floor_bytes
        assert (floor <= budget) == fits
    reasons = {one["hardware"]: one["reason"] for one in told["ruled_out"]}
    assert reasons["nvidia_t4"] == (
        "INFEASIBLE on Tesla T4: bfloat16 needs compute capability 8.0; this is 7.5; the baseline "
        "there is fp16"
    )
    assert "too little memory" in reasons["cpu_2core"]
    assert any("price_per_hour" in note for note in told["notes"])


def test_over_two_gpus_everything_is_halved_but_the_norms() -> None:
    document, _ = made(tp=2)
    norms = (2 * 32 + 1) * 4096 * 2
    assert document["weights_bytes"] == 8_030_261_248 * 2 + norms
    assert document["per_gpu"]["weights_bytes"] == (8_030_261_248 * 2 + norms) // 2
    assert document["per_gpu"]["kv_bytes_per_token"] == 131_072 // 2
    assert {fit["tp"] for fit in document["fits"]} == {2}


def test_where_bfloat16_is_missing_float16_is_the_baseline() -> None:
    document, _ = made(hardware=["nvidia_t4"])
    fit = only(document["fits"], hardware="nvidia_t4")
    assert (fit["format"], fit["tp"], fit["kv_dtype"]) == ("fp16", 4, "float16")
    assert fit["engine_args"]["dtype"] == "float16"
    assert document["ruled_out"][0]["format"] == "bf16"
    # Whoever asks for bf16 by name gets no other format.
    document, status = made(hardware=["nvidia_t4"], format="bf16")
    assert (document["fits"], status) == ([], 10)


def test_the_fewest_gpus_that_hold_it_are_found() -> None:
    document, _ = made("llama_3_1_70b", concurrency=8, context=4096)
    assert only(document["fits"], hardware="nvidia_h800")["tp"] == 4
    assert only(document["fits"], hardware="nvidia_h200")["tp"] == 2
    assert only(document["fits"], hardware="nvidia_b200")["tp"] == 1


def test_heads_that_do_not_divide() -> None:
    """Qwen2.5 7B has 28 heads: 8 GPUs are none that the engine takes."""
    with pytest.raises(UserError, match="28"):
        made("qwen2_5_7b", tp=8)
    document, _ = made("qwen2_5_7b", concurrency=512, context=32768, hardware=["nvidia_a10"])
    assert "on each of 4 GPUs" in document["ruled_out"][0]["reason"]


def test_nothing_fits_and_the_least_that_would_do(tmp_path: Path) -> None:
    document, status = made(hardware=["A10"], tp=1)
    assert status == 10 and document["fits"] == []
    assert document["ruled_out"][0]["max_concurrency"] == 4
    floor = floor_of(model().shape, concurrency=32, context=8192).per_gpu.floor_bytes
    assert document["least_memory"] == {
        "floor_bytes_per_gpu": floor,
        "gpu_memory_bytes": math.ceil(floor / 0.9),
        "format": "bf16",
        "tp": 1,
    }
    words = ["plan", "--model", str(LLAMA), "--concurrency", "32", "--context", "8192"]
    done = CliRunner().invoke(app, [*words, "--hardware", "nvidia_a10", "--tp", "1"])
    assert done.exit_code == 10
    assert f"1 GPU(s) of {floor / 0.9 / GIB:.2f} GiB, in bf16" in done.output


def test_a_context_above_the_trained_length_is_refused() -> None:
    with pytest.raises(UserError, match=r"--context: 131073 tokens are more than the 131072") as at:
        made(context=131_073)
    assert at.value.problems[0].remedy == (
        "ask for at most 131072, or take a model with a longer context"
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"concurrency": None}, "--concurrency: is missing"),
        ({"concurrency": None, "context": None}, r"(?s)--concurrency: is missing.*--context"),
        ({"format": "int3"}, "'int3' is not known"),
        ({"kv_dtype": "int3"}, "'int3' is not known"),
        ({"hardware": ["nvidia_a11"]}, "did you mean 'nvidia_a10'"),
        ({"current": "nvidia_a10"}, "is not HARDWARE x REPLICAS"),
        ({"current": "nvidia_a10 x 0"}, "is not HARDWARE x REPLICAS"),
        ({"sla": "ttft p95 soon"}, "is not"),
        ({"sla": "no_such_profile"}, "no recipe or suite of that name"),
        ({"draft": Path("/nowhere")}, "no such file or folder"),
    ],
)
def test_mistakes(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        made(**options)


def test_a_quantized_model_has_one_format() -> None:
    with pytest.raises(UserError, match="is quantized already"):
        made("deepseek_v3", all_formats=True)
    document, _ = made("deepseek_v3", hardware=["nvidia_h200"], concurrency=8)
    assert document["format"] == "fp8_block"
    assert document["kv_bytes_per_token"] == 61 * (512 + 64) * 2


def test_a_folder_without_a_configuration(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"has no config\.json"):
        planned(str(tmp_path), concurrency=1, context=1, utilization=0.9, max_batched_tokens=2048)


def test_a_bundle_is_planned_with_its_draft(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its own folders in the store; nothing is hashed, nothing is fetched where they are there."""
    small = {"num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 128}
    small |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
    content = json_object(LLAMA) | small
    parts = {}
    for name in ("target", "draft"):
        parts[name] = Part(stage=name, key="k" * 8, below="model", digest="0" * 64)
        parts[name].path.mkdir(parents=True)
        (parts[name].path / "config.json").write_text(json.dumps(content))
    whole = Bundle(name="b", engine_version="0.32", num_speculative_tokens=2, **parts)
    monkeypatch.setattr(bundles, "bundle_named", lambda reference: whole)
    asked = {"concurrency": 2, "context": 64, "utilization": 0.9, "max_batched_tokens": 2048}
    document, _ = planned("small@champion", **asked, hardware=["h20"])
    assert document["kv_bytes_per_token"] == 2 * 2 * 2 * 16 * 2
    assert document["draft_kv_bytes_per_token"] == document["kv_bytes_per_token"]
    assert document["draft_weights_bytes"] == document["weights_bytes"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"[1]", "is not a JSON object"),
        (b"\xff\xfe", "cannot be read"),
        (b"[" * 100_000, "cannot be read"),
        (b'{"model_type": "bert", "hidden_size": 3}', "is 'bert'"),
        (b'{"model_type": "llama"}', "hidden_size: is missing"),
    ],
)
def test_what_is_no_configuration(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(content)
    with pytest.raises(UserError, match=message) as at:
        planned(str(path), concurrency=1, context=1, utilization=0.9, max_batched_tokens=2048)
    assert at.value.problems[0].remedy and str(path) in at.value.problems[0].where


# -- formats ---------------------------------------------------------------------------------


def test_formats_by_card() -> None:
    """The kernels are asked of the engine itself in tests/integration/test_format_support.py."""
    cases = {
        "nvidia_t4": ("fp16", "fp16", "int8", None, "fp16"),
        "nvidia_a10": ("bf16", "bf16", "int8", "bf16", "bf16"),
        "nvidia_l20": ("fp8", "bf16", "int8", "bf16", "bf16"),
        "nvidia_h20": ("fp8", "fp8", "int8", "bf16", "bf16"),
        "nvidia_b200": ("fp8", "fp8", None, "fp4", "bf16"),
    }
    formats = ("fp8_dynamic", "fp8_block", "w8a8_int8", "mxfp4", "w4a16")
    for name, units in cases.items():
        machine = machine_of(name)
        assert tuple(support_of(one, machine).unit for one in formats) == units, name
    document, _ = made(format="int8", hardware=["nvidia_b200"])
    assert document["ruled_out"][0]["reason"] == (
        "INFEASIBLE on NVIDIA B200: vLLM 0.32 has INT8 products below compute capability 10.0 "
        "only; this is 10.0"
    )


def test_formats_of_a_cpu() -> None:
    here = machine_of("cpu_2core")
    old = replace(here, cpu_instructions=frozenset({"avx2"}))
    amx = replace(here, cpu_instructions=frozenset({"avx2", "avx512", "amx"}))
    assert support_of("w4a16", here).unit == "bf16"
    assert "AVX-512" in support_of("w4a16", old).reason
    assert "emulates" in support_of("fp8_dynamic", here).reason
    assert support_of("fp8_dynamic", amx).unit == "bf16"
    assert "no nvfp4 kernel" in support_of("nvfp4", amx).reason
    assert support_of("w8a8_int8", old).unit == "int8"
    document, _ = made(concurrency=1, context=512, hardware=["cpu_2core"], format="w4a16")
    args = document["fits"][0]["engine_args"]
    parts = document["fits"][0]["per_gpu"]
    assert args["kv-cache-memory-bytes"] == parts["kv_bytes"] + parts["kv_slack_bytes"]
    assert "gpu-memory-utilization" not in args and "tensor-parallel-size" not in args
    document, status = made(concurrency=1, context=512, hardware=["cpu_2core"], tp=2)
    assert status == 10 and "a CPU is one" in document["ruled_out"][0]["reason"]


def test_an_fp8_cache_by_card() -> None:
    document, _ = made(kv_dtype="fp8", hardware=["nvidia_t4", "nvidia_a10", "nvidia_h20"])
    assert document["kv_bytes_per_token"] == 131_072 // 2
    assert only(document["fits"], hardware="nvidia_h20")["engine_args"]["kv-cache-dtype"] == "fp8"
    # Two cards where bf16 takes four.
    assert only(document["fits"], hardware="nvidia_a10")["tp"] == 2
    assert any("an FP8 KV cache" in one["reason"] for one in document["ruled_out"])
    assert kv_problem("fp8", machine_of("cpu_2core"), mla=True, head_dim=576)
    assert kv_problem("int8_per_token_head", machine_of("cpu_2core"), mla=False, head_dim=128)
    assert kv_problem("bfloat16", machine_of("nvidia_t4"), mla=False, head_dim=128)


def test_a_file_without_a_capability_rules_out_everything() -> None:
    unknown = Machine("mine", "mine", 80 * GIB, accelerators=1)
    assert "compute_capability" in support_of("bf16", unknown).reason
    old = replace(unknown, capability=(7, 0))
    assert "needs compute capability 7.5" in support_of("fp16", old).reason


# -- cost and rank ---------------------------------------------------------------------------


def test_costs_and_order(tmp_path: Path) -> None:
    h20 = priced(tmp_path, "nvidia_h20", 4.0)
    a10 = priced(tmp_path, "nvidia_a10", 0.5)
    eight = priced(tmp_path, "nvidia_l20", 12.0, accelerators=8)
    document, _ = made(hardware=[h20, a10, eight, "nvidia_h200"])
    assert [fit["hardware"] for fit in document["fits"]] == [
        "nvidia_a10",
        "nvidia_h20",
        "nvidia_l20",
        "nvidia_h200",
    ]
    costs = [fit["cost_per_month"] for fit in document["fits"]]
    # Four cards of a file with one; one card; two of a machine with eight; no price.
    assert costs == [4 * 0.5 * 730, 4.0 * 730, 12.0 * 730, None]
    assert document["fits"][0]["currency"] == "USD"


def test_a_machine_has_no_more_gpus_than_its_file_says(tmp_path: Path) -> None:
    two = priced(tmp_path, "nvidia_a10", 1.0, accelerators=2)
    document, status = made(hardware=[two])
    assert status == 10
    assert "on each of 2 GPUs" in document["ruled_out"][-1]["reason"]
    document, _ = made(hardware=[two], tp=4)
    assert "the machine has 2" in document["ruled_out"][0]["reason"]


# -- estimates -------------------------------------------------------------------------------


def test_the_roofline_by_hand() -> None:
    """Llama 3.1 8B on an H100: 3.35 TB/s and 989.4 TFLOPS, of which 0.75 and 0.55.

    A step reads all weights but the table of embeddings (128256 x 4096) and the cache:
        2 x (8,030,261,248 - 525,336,576) + 32 x 8192 x 131,072 = 49,369,587,712 bytes
        / (3.35e12 x 0.75) = 19.6496 ms
    A prompt of 8192 multiplies the layers (6,979,584,000) for each token, the head once, and
    33,554,432 pairs in 32 layers of 32 heads of 128 and 128:
        2 x (6,979,584,000 x 8192 + 525,336,576) + 32 x 2 x 32 x 256 x 33,554,432
        = 131,946,740,973,568 / (989.4e12 x 0.55) = 242.473 ms
    """
    shape = model().shape
    machine = machine_of("nvidia_h100")
    parts = floor_of(shape, concurrency=32, context=8192).per_gpu
    work = Work(shape, machine, parts, machine.compute["bf16"], tp=1)
    step, first = decode_step(work, 32, 8192), prefill(work, 8192, 2048)
    assert step == pytest.approx(49_369_587_712 / (3.35e12 * 0.75), rel=1e-9)
    assert first == pytest.approx(131_946_740_973_568 / (989.4e12 * 0.55), rel=1e-9)
    found = estimate(work, Load(32, 8192, 8192, 101, 8192), 2048)
    assert found.tpot_ms == pytest.approx(19.6496, abs=1e-3)
    assert found.ttft_ms == pytest.approx(242.473 + 19.6496, abs=2e-3)
    assert found.e2el_ms == pytest.approx(262.1226 + 100 * 19.6496, abs=0.1)
    assert found.note == "estimate, not measured"
    # Half of the time goes to prompts: tokens come half as often, and prompts wait half a prompt.
    half = estimate(work, Load(32, 8192, 8192, 101, 8192, rate=0.5 / first), 2048)
    assert half.prefill_share == pytest.approx(0.5)
    assert half.tpot_ms == pytest.approx(2 * 19.6496, abs=2e-3)
    assert half.ttft_ms == pytest.approx(242.473 * 1.5 + 19.6496, abs=2e-3)
    assert estimate(work, Load(32, 8192, 8192, 101, 8192, rate=2 / first), 2048).tpot_ms == math.inf


def test_a_measurement_of_somebody_else() -> None:
    """75 tokens/s on an A100 with 40 GB, one sequence of 1024 + 128 tokens, vLLM 0.23
    (johnmusgrave.com/p/vllm-throughput-latency-sweep-on): the assumed share of the bandwidth is
    not far from what an engine reached."""
    shape, machine = model().shape, machine_of("nvidia_a100_40gb")
    parts = floor_of(shape, concurrency=1, context=1152).per_gpu
    step = decode_step(Work(shape, machine, parts, machine.compute["bf16"], tp=1), 1, 1088)
    assert step == pytest.approx(1 / 75, rel=0.05)


def test_experts_that_no_token_asks_are_not_read() -> None:
    """Mixtral: 2 of 8 experts. One token reads a quarter of them, 64 tokens all but nothing."""
    shape = model("mixtral_8x7b").shape
    machine = machine_of("nvidia_h200")
    parts = floor_of(shape, concurrency=1, context=16, tp=2).per_gpu
    work = Work(shape, replace(machine, link=None), parts, machine.compute["bf16"], tp=1)
    one, many = decode_step(work, 1, 16), decode_step(work, 64, 16)
    assert one is not None and many is not None and machine.bandwidth is not None
    experts = sum(weight.parameters for weight in shape.weights if weight.count > weight.active)
    table = shape.vocab * shape.hidden
    read = (shape.parameters - table - 0.75 * experts) / shape.parameters
    cache = 16 * parts.kv_bytes_per_token
    expected = (parts.weights_bytes * read + cache) / (machine.bandwidth * 0.75)
    assert one == pytest.approx(expected, rel=1e-9)
    assert many > 3 * one


def test_two_gpus_pay_for_adding_up() -> None:
    """64 all-reduces of 32 x 4096 x 2 bytes: 1 x the bytes over 450 GB/s x 0.7, and 20 us each."""
    shape = model().shape
    machine = machine_of("nvidia_h100")
    parts = floor_of(shape, concurrency=32, context=8192, tp=2).per_gpu
    work = Work(shape, machine, parts, machine.compute["bf16"], tp=2)
    alone = Work(shape, replace(machine, link=1e30), parts, machine.compute["bf16"], tp=2)
    step, free = decode_step(work, 32, 8192), decode_step(alone, 32, 8192)
    assert step is not None and free is not None
    assert step - free == pytest.approx(64 * 32 * 4096 * 2 / (450e9 * 0.7), rel=1e-6)


def test_without_a_number_there_is_no_estimate() -> None:
    document, _ = made(hardware=["nvidia_rtx_3090"], sla="tpot p95 10ms")
    fit = document["fits"][0]
    assert fit["estimate"]["tpot_ms"] is None
    assert fit["estimate"]["note"] == "no estimate: hardware nvidia_rtx_3090 has no compute"
    said = "not compared with the limit of tpot, for want of a number: nvidia_rtx_3090"
    assert said in document["notes"]
    # Without a length of answers nothing can be said of the whole.
    document, _ = made(hardware=["nvidia_h20"], sla="e2el p95 1s")
    assert "not compared with the limit of e2el" in document["notes"][-1]


# -- traffic and limits ----------------------------------------------------------------------


@pytest.fixture
def traffic(tmp_path: Path) -> Path:
    """As `pilotage profile` writes it: 143 in flight, prompts to 2000 and answers to 450 tokens."""
    return written_traffic(tmp_path)


def test_traffic_gives_the_main_range_and_not_the_extremes(traffic: Path) -> None:
    document, status = made(
        "qwen2_5_7b", concurrency=None, context=None, traffic=traffic, hardware=["nvidia_l20"]
    )
    assert status == 0
    assert (document["concurrency"], document["context"]) == (143, 2450)
    fit = document["fits"][0]
    # The longest request is answered, too.
    assert fit["engine_args"]["max-model-len"] == 14_000
    # One would hold them in memory, and not keep up with their prompts: 22 x 900 tokens a second.
    assert fit["max_concurrency"] > 143 and fit["replicas"] == 4
    assert document["extremes"]["concurrency"] == 310
    assert document["extremes"]["context"] == 14_000
    assert document["extremes"]["floor_bytes"] > 5 * document["floor_bytes"]
    # Flags go before the profile.
    document, _ = made("qwen2_5_7b", concurrency=10, context=None, traffic=traffic)
    assert (document["concurrency"], document["context"]) == (10, 2450)


def test_limits_make_replicas(traffic: Path, tmp_path: Path) -> None:
    a10 = priced(tmp_path, "nvidia_a10", 1.0)
    asked = {"concurrency": None, "context": None, "traffic": traffic, "hardware": [a10]}
    sla = "ttft p95 1500ms, tpot p95 60ms"
    document, _ = made("qwen2_5_7b", **asked, sla=sla, current=f"{a10} x 40")
    assert document["sla_ms"] == {"ttft": 1500, "tpot": 60}
    best = document["fits"][0]
    assert best["replicas"] > math.ceil(143 / best["max_concurrency"])
    for fit in document["fits"]:
        assert fit["estimate"]["tpot_ms"] <= 60 and fit["estimate"]["ttft_ms"] <= 1500
        # The peak of 310, as far as the cache holds it.
        peak = math.ceil(310 / fit["replicas"])
        assert fit["engine_args"]["max-num-seqs"] == min(peak, fit["max_concurrency"])
        assert fit["machines"] == fit["replicas"] * fit["tp"]
    now = document["current"]
    assert now["needed"] == best["machines"] and now["unneeded"] == 40 - best["machines"]
    assert now["saving_per_month"] == (40 - best["machines"]) * 730
    # What no number of replicas reaches is ruled out, as an estimate.
    document, status = made("qwen2_5_7b", **asked, sla="tpot p95 1ms")
    assert status == 10
    reason = document["ruled_out"][0]["reason"]
    assert reason.startswith("estimate, not measured: with 143 replicas of 4 GPUs tpot")


def test_no_fewer_replicas_would_do() -> None:
    shape, machine = model("qwen2_5_7b").shape, machine_of("nvidia_l20")
    demand = Demand(143, 2450, 14_000, None, 2000, 450, 900, 180, 22.0)
    limits = Limits({"tpot": 55})
    fits = plan(model("qwen2_5_7b"), [machine], demand, Wish(replicas=True), limits).fits
    assert {fit.tp for fit in fits} == {1, 2, 4}
    for fit in fits:
        work = Work(shape, machine, fit.floor.per_gpu, machine.compute["bf16"], fit.tp)
        for replicas, holds in ((fit.replicas, True), (fit.replicas - 1, False)):
            if replicas == 0:
                continue
            share = math.ceil(143 / replicas)
            load = Load(share, demand.mean_context, 2000, 450, 900, 22.0 / replicas)
            assert (not limits.broken(estimate(work, load, 2048))) == holds, (fit.tp, replicas)


def test_a_profile_without_ends_of_requests(traffic: Path) -> None:
    content = yaml.safe_load(traffic.read_text()) | {"stable_peak_concurrency": None}
    traffic.write_text(yaml.safe_dump(content))
    with pytest.raises(UserError, match="stable_peak_concurrency: is null"):
        made("qwen2_5_7b", concurrency=None, context=None, traffic=traffic)
    traffic.write_text(yaml.safe_dump(content | {"requests": 0, "odd": 1}))
    with pytest.raises(UserError) as at:
        made("qwen2_5_7b", concurrency=4, context=None, traffic=traffic)
    assert len(at.value.problems) == 2


def test_limits_of_our_own_suites(tmp_path: Path) -> None:
    assert limits_of("customer_service_nvidia_a10") == {"ttft": 800, "e2el": 10_000, "tpot": 60}
    assert limits_of("demo") == {"e2el": 1000}
    assert limits_of("e2el p99 2s, ITL p95 40ms") == {"e2el": 2000, "itl": 40}
    assert limits_of(None) == {}
    with pytest.raises(UserError, match="has no limit"):
        limits_of("retention_hit_rate")


# -- several models on the same GPUs ---------------------------------------------------------


def test_two_models_on_one_gpu() -> None:
    words = ["plan", "--concurrency", "16", "--context", "4096", "--json"]
    for name in ("llama_3_1_8b", "qwen2_5_7b"):
        words += ["--model", str(CONFIGS / f"{name}.json")]
    done = CliRunner().invoke(app, [*words, "--hardware", "h20", "--hardware", "a10"])
    assert done.exit_code == 0, done.output
    told = json.loads(done.output.splitlines()[-1])
    h20 = only(told["fits"], hardware="nvidia_h20")
    memory = math.floor(95.57 * GIB)
    for engine, one in zip(h20["engines"], told["models"], strict=True):
        share = math.ceil(100 * one["floor_bytes"] / memory) / 100
        assert engine["engine_args"]["gpu-memory-utilization"] == engine["share"] == share
        assert engine["estimate"] is None
    assert h20["gpus"] == 1
    # 24.37 and 18.88 GiB: on two A10 the shares would be 0.55 and 0.43.
    a10 = only(told["fits"], hardware="nvidia_a10")
    assert a10["gpus"] == 4
    assert sum(engine["share"] for engine in a10["engines"]) <= 0.9


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--concurrency", "4"], "--context: is missing"),
        (
            ["--concurrency", "4", "--context", "64", "--sla", "demo"],
            "--sla: cannot be planned for",
        ),
        (
            ["--concurrency", "4", "--concurrency", "4", "--concurrency", "4", "--context", "64"],
            "is given 3 times for 2 models",
        ),
        (["--concurrency", "4", "--context", "131073"], "more than the 131072"),
    ],
)
def test_mistakes_with_several_models(more: list[str], message: str) -> None:
    words = ["plan", "--model", str(LLAMA), "--model", str(LLAMA), *more]
    done = CliRunner().invoke(app, words)
    assert isinstance(done.exception, UserError)
    assert message in str(done.exception)


def test_what_does_not_fit_together() -> None:
    asked = {"concurrency": [64], "context": [8192], "utilization": 0.9}
    document, status = planned_together(
        [str(LLAMA)] * 3,
        **asked,
        max_batched_tokens=2048,
        hardware=["a100_40gb", "cpu_2core"],
        tp=2,
    )
    assert status == 10
    reasons = [one["reason"] for one in document["ruled_out"]]
    assert "too little memory" in reasons[0] and "take turns" in reasons[1]
    assert "Nothing fits." in together_text(document)


# -- the whole -------------------------------------------------------------------------------


def test_every_machine_is_either_in_or_out() -> None:
    """Each named once for each format, whatever the model."""
    machines = machines_of(["t4", "a10", "h20", "b200", "cpu_2core"])
    for path in sorted(CONFIGS.glob("*.json")):
        name = path.stem
        found = plan(model(name), machines, Demand(8, 4096, 4096), Wish(), Limits())
        named = {one.machine.name for one in (*found.fits, *found.ruled_out)}
        assert named == {machine.name for machine in machines}
        assert list(found.fits) == sorted(found.fits, key=lambda one: one.rank)
        # A serve recipe may have them as they are.
        assert not any(argument_problems(one.engine_args) for one in found.fits)


def test_the_table_for_people(traffic: Path) -> None:
    words = ["plan", "--model", str(CONFIGS / "qwen2_5_7b.json"), "--traffic", str(traffic)]
    done = CliRunner().invoke(app, [*words, "--all-formats", "--sla", "tpot p95 60ms"])
    assert done.exit_code == 0, done.output
    assert "estimate, not measured" in done.output
    assert "sized by the extremes (310 sequences of 14000 tokens)" in done.output
    assert "Of each hardware and format the cheapest" in done.output
    assert "Ruled out:" in done.output and "INFEASIBLE on Tesla T4" in done.output


def test_a_folder_of_an_adapter(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(UserError, match="is an adapter, no model"):
        planned(str(tmp_path), concurrency=1, context=1, utilization=0.9, max_batched_tokens=2048)


def test_the_most_sequences_fit_when_they_are_asked_for_and_one_more_does_not() -> None:
    """Above 2048 sequences the batch grows along with them."""
    ask = {"hardware": ["nvidia_h200"], "tp": 8, "context": 512, "format": "w4a16"}
    most = made(**ask, concurrency=1)[0]["fits"][0]["max_concurrency"]
    assert most > 2048
    (fit,) = made(**ask, concurrency=most)[0]["fits"]
    assert (fit["max_concurrency"], fit["engine_args"]["max-num-batched-tokens"]) == (most, most)
    assert made(**ask, concurrency=most + 1)[0]["fits"] == []


@pytest.mark.parametrize(
    ("format", "cache"),
    [("bf16", "bfloat16"), ("fp16", "float16"), ("fp32", "float32"), ("fp8", "bfloat16")],
)
def test_a_cache_has_the_kind_of_plain_weights(format: str, cache: str) -> None:
    document, _ = made(format=format, hardware=["nvidia_h200"])
    assert document["kv_dtype"] == cache
    assert {one["kv_dtype"] for one in document["fits"]} == {cache}


@pytest.mark.parametrize(
    ("accelerators", "gpus", "machines", "engines"),
    [(0, 1, 3, 3), (1, 1, 3, 3), (1, 2, 5, 2), (8, 1, 2, 16), (8, 2, 3, 12), (8, 5, 2, 2)],
)
def test_engines_that_the_current_machines_hold(
    accelerators: int, gpus: int, machines: int, engines: int
) -> None:
    """Two machines of eight hold sixteen engines of one GPU, and two of five GPUs."""
    assert _engines_on(Machine("m", "m", GIB, accelerators), gpus, machines) == engines
