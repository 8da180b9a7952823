"""The plan inside of a release: what is refused before anything of a candidate is started."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from eval_suites.loader import load_policy
from flows import measuring
from flows.candidate import ended
from flows.measuring import measure_candidate
from flows.rendering import plan_document, plan_table
from recipes import loader
from recipes.quantize_presets import PRESETS
from recipes.schema import QuantizeRecipe
from registry.candidate_memory import PLAN_FILE, MemoryPlan
from registry.engine_memory import MeasuredMemory
from registry.json_files import json_object
from registry.machines import Machine
from registry.model_shapes import shape_of
from registry.outcome import Verdict
from registry.settings import CHECKOUT
from tasks import release_capacity, serving
from tasks.judging import Measured, judge_candidates
from tasks.planning import CandidatePlan, ReleasePlan, plan, resolve
from tasks.release_capacity import (
    is_here,
    plan_before,
    plan_of_bundle,
    quantization_config,
    refused_before,
    release_machine,
    this_machine,
)
from tasks.serving import known_infeasible, prove_serving, serving_evidence, short_of_memory
from tasks.stages import begin_run, store
from tests.unit.shape_builders import small
from tests.unit.turn_builders import bundle

CONFIG = CHECKOUT / "tests" / "data" / "model_configs" / "llama_3_1_8b.json"
GIB = 1 << 30


@pytest.fixture(autouse=True)
def no_serve_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(CHECKOUT)
    for module in ("accuracy", "release_capacity"):
        monkeypatch.setattr(f"tasks.{module}.engine_version", lambda: "0.32.0")
    for module in ("serving", "latency", "draft_stage", "draft_checkpoints"):
        monkeypatch.setattr(f"tasks.{module}.engine_tools", lambda: {"vllm": "0.32.0"})


# -- what a quantize recipe will write -------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "format", "kv"),
    [
        ("fp8_dynamic", "fp8_dynamic", "auto"),
        ("fp8_static", "fp8_static", "auto"),
        ("fp8_block", "fp8_block", "auto"),
        ("fp8_kv_cache", "fp8_dynamic", "fp8"),
        ("w8a8_int8", "w8a8_int8", "auto"),
        ("w8a8_int8_static_foreign", "w8a8_int8", "auto"),
        ("w4a16_gptq", "w4a16", "auto"),
        ("w4a16_awq", "w4a16", "auto"),
        ("nvfp4", "nvfp4", "auto"),
        ("mxfp4", "mxfp4", "auto"),
    ],
)
def test_every_shipped_quantize_recipe_is_understood(name: str, format: str, kv: str) -> None:
    recipe = loader.load(name, "quantize", QuantizeRecipe).recipe
    assert recipe is not None
    plain = json_object(CONFIG)
    section = quantization_config(recipe, shape_of(plain, "config.json"))
    shape = shape_of({**plain, "quantization_config": section}, "config.json")
    assert shape.quantization is not None
    assert (shape.quantization.format.kv_dtype, shape.quantization.kv_dtype) == ("auto", kv)
    assert FORMAT_NAMES.get(shape.quantization.format.name, shape.quantization.format.name) == (
        FORMAT_NAMES.get(format, format)
    )


FORMAT_NAMES = {"fp8_static": "fp8", "fp8_dynamic": "fp8"}
"""compressed-tensors calls both the same; what differs is where the scales are."""


@pytest.mark.parametrize(
    "modifiers",
    [
        {"QuantizationModifier": {"scheme": "NOBODYS"}},
        {"QuantizationModifier": {"scheme": "W8A8"}, "GPTQModifier": {"scheme": "W4A16"}},
        {"SparseGPTModifier": {"sparsity": 0.5}, "GPTQModifier": {"scheme": "W4A16"}},
        {"QuantizationModifier": {"config_groups": {"0": {"targets": ["Linear"]}}}},
    ],
)
def test_a_recipe_that_is_not_understood_says_nothing(modifiers: dict[str, Any]) -> None:
    recipe = {"quant_stage": {"quant_modifiers": modifiers}}
    assert quantization_config(recipe, small()) is None


@pytest.mark.parametrize(("hidden", "group"), [(256, 128), (192, 64)])
def test_groups_are_those_of_the_recipe(hidden: int, group: int) -> None:
    """Of the shipped ones 64 columns; of a preset the largest that divides every matrix."""
    student = small(hidden_size=hidden, num_attention_heads=6 if hidden == 192 else 8,
                    num_key_value_heads=2)  # fmt: skip
    for recipe, columns in (
        (loader.load("w4a16_gptq", "quantize", QuantizeRecipe).recipe, 64),
        (PRESETS["w4a16_gptq"].recipe, group),
    ):
        assert recipe is not None
        section = quantization_config(recipe, student)
        assert section is not None
        assert section["config_groups"]["group_0"]["weights"]["group_size"] == columns


# -- the machine -----------------------------------------------------------------------------


def test_the_largest_gpu_and_what_its_file_says(monkeypatch: pytest.MonkeyPatch) -> None:
    gpus = ["NVIDIA L20, 46068 MiB, 550.54", "NVIDIA A10, 23028 MiB, 550.54", "odd"]
    monkeypatch.setattr(release_capacity, "hardware", lambda: {"gpus": gpus})
    here = this_machine()
    assert (here.title, here.memory_bytes, here.accelerators) == ("NVIDIA L20", 46068 << 20, 2)
    assert here.capability == (8, 9)
    # The file says 44.98 GiB; what is here is a little more, and it counts.
    assert release_machine("nvidia_l20").memory_bytes == 46068 << 20
    assert (
        release_machine("nvidia_h20").memory_bytes
        == release_capacity.machine_of("nvidia_h20").memory_bytes
    )


def test_a_cpu_has_all_its_memory_and_swap(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(release_capacity, "hardware", lambda: {"gpus": []})
    monkeypatch.setattr(release_capacity.psutil, "virtual_memory", lambda: SimpleNamespace(total=7))
    monkeypatch.setattr(release_capacity.psutil, "swap_memory", lambda: SimpleNamespace(total=2))
    here = release_machine("any")
    assert (here.is_cpu, here.memory_bytes) == (True, 9)
    assert release_machine("cpu_2core").memory_bytes == 8 * GIB
    assert is_here(release_machine("cpu_2core"), here)
    assert not is_here(release_machine("nvidia_t4"), here)


# -- in a release ----------------------------------------------------------------------------


def on_a_card(name: str, gib: float) -> Machine:
    return Machine(name, name, int(gib * GIB), accelerators=1, capability=(8, 6))


def planned_release(monkeypatch: pytest.MonkeyPatch, gib: float = 12) -> ReleasePlan:
    """The tiny release, as if its student were a Llama of 8B and its machine a small card."""
    args = "{max-model-len: 8192}"
    todo = plan(resolve("freight_demo", [f"serve.vllm_cpu_2core.engine_args={args}"]))
    monkeypatch.setattr(release_capacity, "student_config", lambda todo: json_object(CONFIG))
    monkeypatch.setattr(release_capacity, "release_machine", lambda name: on_a_card("card", gib))
    return todo


def test_candidates_are_refused_by_what_they_will_be(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    todo = planned_release(monkeypatch)
    plans = {one.name: plan_before(todo, one) for one in todo.candidates}
    # 8B: 15 GiB in 16 bit, 8.0 GiB in 8 bit (table and head stay), 5.6 in 4, and 1 GiB of cache.
    refused = {name for name, one in plans.items() if one.refusal}
    assert refused == {"bf16", "bf16-eagle3"}
    assert {name: round((one.least_bytes or 0) / GIB, 1) for name, one in plans.items()} == {
        "bf16": 16.0, "bf16-eagle3": 16.0, "fp8_dynamic": 9.5, "w8a8_int8": 9.5,
        "w4a16_gptq": 6.4, "w4a16_awq": 6.4, "w8a8_int8_static_foreign": 9.5,
    }  # fmt: skip
    # The reference candidate is made all the same: its answers are what others are compared with.
    assert [one.name for one in todo.candidates if refused_before(todo, one)] == ["bf16-eagle3"]


def test_a_dry_run_shows_what_will_not_be_served(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    todo = planned_release(monkeypatch)
    shown = {one["candidate"]: one["refusal"] for one in plan_document(todo)["candidates"]}
    assert {name for name, why in shown.items() if why} == {"bf16", "bf16-eagle3"}
    text = plan_table(todo)
    assert "INFEASIBLE: bf16: too little memory: it takes at least 15.96 GiB" in text
    assert "INFEASIBLE: w8a8_int8" not in text


def test_a_student_that_is_not_there_refuses_nothing(home: Path) -> None:
    todo = plan(resolve("freight_demo"))
    assert {plan_before(todo, one).unknown for one in todo.candidates} == {
        "the student's configuration is not there yet"
    }


def test_nothing_is_made_of_a_refused_candidate(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    todo = planned_release(monkeypatch, gib=8)
    begin_run(1)
    monkeypatch.setattr(measuring, "make_bundle", lambda *_: pytest.fail("it was made"))
    wanted = next(one for one in todo.candidates if one.name == "w8a8_int8")
    found = measure_candidate(todo, wanted)
    assert found.infeasible.startswith("too little memory: it takes at least 9.46 GiB")
    assert ended(found).name == "Infeasible"
    student = Measured("bf16", digest="b" * 64, bundle=bundle("bf16"))
    [one] = judge_candidates(load_policy("demo"), [found], {"student": student, "teacher": student})
    assert (one.verdict, one.reasons, one.bundle) == (Verdict.INFEASIBLE, [found.infeasible], "")


def test_a_recipe_that_was_not_understood_is_asked_again_before_the_draft(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Training a draft starts servers; by then the quantized files say what they are."""
    todo = planned_release(monkeypatch, gib=8)
    drafted = next(one for one in todo.candidates if one.name == "bf16-eagle3")
    plain = next(one for one in todo.candidates if one.name == "w8a8_int8")
    wanted = replace(drafted, candidate=plain.candidate, quantize=plain.quantize, below="quantized")
    monkeypatch.setattr(release_capacity, "quantization_config", lambda *_: None)
    monkeypatch.setattr(measuring, "make_bundle", lambda *_: pytest.fail("a draft was trained"))
    begin_run(1)

    def quantize(todo: ReleasePlan, wanted: CandidatePlan) -> None:
        assert wanted.quantize is not None
        folder = store().folder(wanted.quantize) / "files" / "quantized"
        folder.mkdir(parents=True)
        (folder / "config.json").write_text(CONFIG.read_text())

    monkeypatch.setattr(measuring, "quantized", quantize)
    assert refused_before(todo, wanted) == ""
    assert measure_candidate(todo, wanted).infeasible.startswith(
        "too little memory: it takes at least 15.96"
    )


def test_what_was_served_here_is_not_refused_by_a_plan(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    todo = planned_release(monkeypatch)
    wanted = next(one for one in todo.candidates if one.name == "bf16-eagle3")
    assert refused_before(todo, wanted)
    served = SimpleNamespace(summary={"feasible": True})
    shelf = SimpleNamespace(find=lambda stage: served)
    monkeypatch.setattr(release_capacity, "store", lambda: shelf)
    monkeypatch.setattr(release_capacity, "this_machine", lambda: on_a_card("card", 12))
    assert refused_before(todo, wanted) == ""
    # On another kind of machine it says nothing about the one that the release is for.
    monkeypatch.setattr(release_capacity, "this_machine", lambda: on_a_card("other", 80))
    assert refused_before(todo, wanted)


# -- the proof of serving --------------------------------------------------------------------


class Untouched:
    """A bundle whose server nobody may ask for."""

    bundle = bundle("int4")
    digest = "b" * 64
    engine = "vllm 0.32.0"

    @property
    def server(self) -> Any:
        raise AssertionError("it was started")


def test_a_refused_bundle_is_not_started_and_is_asked_again(home: Path) -> None:
    begin_run(1)
    stage = serving.stage("int4", {}, {"engine": "vllm"})
    refused = MemoryPlan(candidate="int4", hardware="card", refusal="no kernel on card: none")
    served: Any = Untouched()
    ref = prove_serving.fn(stage, served, refused)
    found = serving_evidence(ref)
    assert (found.feasible, found.reason) == (False, "no kernel on card: none")
    assert found.plan == refused.digest
    assert json.loads((ref.path / PLAN_FILE).read_text())["refusal"] == "no kernel on card: none"
    # The hardware file is not in the stage's key: another one is another answer.
    assert short_of_memory(ref.summary)
    assert not known_infeasible(stage)
    begin_run(1)
    other = MemoryPlan(candidate="int4", hardware="card", refusal="too little memory: 9 GiB")
    assert serving_evidence(prove_serving.fn(stage, served, other)).plan == other.digest


def test_the_plan_is_there_before_the_engine_and_compared_after(
    home: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin_run(1)
    seen: list[list[str]] = []

    class Served(Untouched):
        @property
        def server(self) -> Any:
            seen.append([path.name for path in store().root.rglob(PLAN_FILE)])
            return SimpleNamespace(
                startup_seconds=1.0, kv_cache_tokens=9_000, kernels=[], emulated=False,
                emulated_kernels=[], memory=lambda: MeasuredMemory(resident_bytes=3 << 30),
            )  # fmt: skip

    planned = MemoryPlan(candidate="int4", hardware="card", kv_cache_tokens=10_000, exact=False)
    served: Any = Served()
    ref = prove_serving.fn(serving.stage("int4", {}, {"engine": "vllm"}), served, planned)
    assert seen == [[PLAN_FILE]]
    found = serving_evidence(ref)
    assert (found.planned_kv_tokens, found.plan_exact, found.plan) == (
        10_000, False, planned.digest,
    )  # fmt: skip
    assert (
        "int4: the engine has room for 9000 KV tokens, its plan said 10000 (-10.0%, an estimate)"
        in caplog.text
    )


def test_a_bundle_is_planned_from_its_files(home: Path) -> None:
    one = bundle("bf16")
    one.target.path.mkdir(parents=True)
    (one.target.path / "config.json").write_text(CONFIG.read_text())
    found = plan_of_bundle(one, "nvidia_a10")
    assert (found.hardware, found.format, found.refusal) == ("nvidia_a10", "bf16", "")
    (one.target.path / "config.json").write_text('{"model_type": "nobodys"}')
    assert plan_of_bundle(one, "nvidia_a10").unknown.startswith("config.json: is 'nobodys'")


GPU_STUDENTS = {
    "llama_3_1_70b_to_8b_nvidia_h800": "llama_3_1_8b",
    "qwen2_5_32b_colocated_nvidia_h20": "qwen2_5_32b",
    "qwen2_5_7b_nvidia_a10": "qwen2_5_7b",
    "qwen3_32b_to_8b_nvidia_h20": "qwen3_8b",
    "qwen3_32b_to_8b_nvidia_l20": "qwen3_8b",
}


@pytest.mark.parametrize("name", [one for one in loader.shipped("release") if one in GPU_STUDENTS])
def test_shipped_releases_are_understood_and_run_on_their_cards(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = json_object(CONFIG.with_name(f"{GPU_STUDENTS[name]}.json"))
    monkeypatch.setattr(release_capacity, "student_config", lambda todo: config)
    resolved = resolve(name)
    todo: Any = SimpleNamespace(resolved=resolved)
    for candidate in resolved.release.candidates:
        wanted: Any = SimpleNamespace(candidate=candidate, name=candidate.name, quantize=None)
        found = plan_before(todo, wanted)
        assert (found.refusal, found.unknown) == ("", ""), candidate.name
        assert found.hardware == resolved.load.hardware
        assert found.kv_cache_tokens is not None


def test_another_engine_is_not_planned(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    todo = planned_release(monkeypatch)
    serve = todo.resolved.serve["vllm_cpu_2core"].model_copy(update={"engine": "other"})
    monkeypatch.setitem(todo.resolved.serve, "vllm_cpu_2core", serve)
    assert {plan_before(todo, one).unknown for one in todo.candidates} == {"other is not planned"}
    one = bundle("bf16").model_copy(update={"engine": "other"})
    assert plan_of_bundle(one, "nvidia_a10").unknown == "other is not planned"
