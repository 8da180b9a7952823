"""Plans of models of this project, equal to what vLLM 0.32 printed when it served them.

`tests/data/engine_printed/` has the configurations of finished releases: the demo's
(`freight_demo`) and SmolLM2's (`smollm2_cpu`, 30 layers; its students keep 28 or 24 of them). All
were served with `recipes/serve/vllm_cpu_2core.yaml` on two CPU cores with AVX-512, each server's
log having the line `CPU KV cache size: N tokens`. The weights are what the tensors of their files
take together, by the files' headers; on a CPU the engine prints no size of them.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from recipes import loader
from recipes.schema import ServeRecipe
from registry.candidate_memory import MemoryPlan, memory_plan
from registry.json_files import json_object
from registry.machines import Machine
from registry.memory_floor import floor_of
from registry.model_shapes import ModelShape, shape_of

FOLDER = Path(__file__).parents[1] / "data" / "engine_printed"
SERVE = loader.load("vllm_cpu_2core", "serve", ServeRecipe)
HERE = Machine("cpu", "CPU", 24 << 30, cpu_instructions=frozenset({"avx512"}))


def read(name: str) -> ModelShape:
    path = FOLDER / f"{name}.json"
    return shape_of(json_object(path), str(path))


def planned(name: str, draft: str | None) -> MemoryPlan:
    own = None if draft is None else read(draft)
    return memory_plan(name, read(name), own, SERVE.engine_args, SERVE.env, HERE, "0.32.0")


# A token of the demo's student takes 3 layers x 4 heads x 32 x 2 (K and V) x 2 bytes = 1536; in
# 512 MiB that is 349,525, in whole blocks of 128 less than that. Its draft is a layer more: 2048.
# SmolLM2 has 3 heads of 64, so 768 in each of its layers.
PRINTED = [
    ("demo_teacher", None, 262_144),
    ("demo_student", None, 349_440),
    ("demo_student", "demo_draft", 262_144),
    ("demo_fp8_dynamic", None, 349_440),
    ("demo_w8a8_int8", None, 349_440),
    ("demo_w8a8_int8_static_foreign", None, 349_440),
    ("demo_w4a16_gptq", None, 349_440),
    ("demo_w4a16_awq", None, 349_440),
    ("smollm2", None, 23_296),
    ("smollm2_28_layers", None, 24_960),
    ("smollm2_28_layers", "smollm2_draft", 24_064),
    ("smollm2_24_layers", None, 29_056),
]


@pytest.mark.parametrize(("name", "draft", "tokens"), PRINTED)
def test_kv_tokens_are_those_that_were_printed(name: str, draft: str | None, tokens: int) -> None:
    found = planned(name, draft)
    assert (found.unknown, found.refusal) == ("", "")
    assert (found.kv_cache_tokens, found.exact) == (tokens, True)


WEIGHTS = {
    "demo_teacher": 3_934_464,
    "demo_student": 2_328_320,
    "demo_w4a16_gptq": 1_390_160,
    "demo_w4a16_awq": 1_390_160,
    "smollm2": 269_030_016,
    "smollm2_28_layers": 254_869_632,
    "smollm2_24_layers": 226_548_864,
}


@pytest.mark.parametrize(("name", "size"), WEIGHTS.items())
def test_weights_are_the_bytes_of_the_tensors(name: str, size: int) -> None:
    assert floor_of(read(name), concurrency=1, context=1).total.weights_bytes == size


@pytest.mark.parametrize(
    ("name", "size", "wider"),
    [
        # 4224 rows have a scale, in float32 where the files have 16 bit.
        ("demo_fp8_dynamic", 1_697_792, 2 * 4224),
        ("demo_w8a8_int8", 1_697_792, 2 * 4224),
        # One scale for each of 21 matrices, and one for its inputs.
        ("demo_w8a8_int8_static_foreign", 1_689_428, 2 * 2 * 21),
    ],
)
def test_scales_are_wider_in_the_engine_than_in_the_files(name: str, size: int, wider: int) -> None:
    found = floor_of(read(name), concurrency=1, context=1).total.weights_bytes
    assert found == size + wider


def test_a_draft_s_tensors() -> None:
    """Beside its target, which has the table; the draft's own file has it too."""
    target, draft = read("demo_student"), read("demo_draft")
    parts = floor_of(target, concurrency=1, context=1, draft=draft).total
    table = 2 * 2048 * 128
    assert parts.draft_weights_bytes == 1_672_192 - table
