"""The least memory of a model, and the most sequences of a GPU."""

from __future__ import annotations

from math import ceil
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from registry.errors import UserError
from registry.memory_floor import Parts, floor_of, largest_concurrency
from registry.model_shapes import ModelShape
from registry.weight_formats import FORMATS
from tests.unit.shape_builders import draft, published, small

GIB = 1 << 30
DOCS = Path(__file__).parents[2] / "docs" / "capacity.md"
SUMMANDS = (
    "weights_bytes", "engine_bytes", "kv_bytes", "kv_slack_bytes", "draft_weights_bytes",
    "draft_kv_bytes", "activation_bytes", "graph_bytes",
)  # fmt: skip
SHAPES = {
    "llama": small(),
    "mqa": small(num_key_value_heads=1),
    "windows": small(model_type="gemma2", head_dim=32, sliding_window=64),
    "experts": small(model_type="mixtral", num_local_experts=4, num_experts_per_tok=2),
    "latent": published("deepseek_v3", num_hidden_layers=4, quantization_config=None),
    "states": published("qwen3_next_80b", num_hidden_layers=4),
    "odd vocabulary": small(vocab_size=1000, tie_word_embeddings=True),
}


def summed(parts: Parts) -> int:
    return sum(getattr(parts, name) for name in SUMMANDS)


def test_llama_3_1_8b_by_hand() -> None:
    """32 sequences of 8192 tokens in bf16."""
    parts = floor_of(published("llama_3_1_8b"), concurrency=32, context=8192).per_gpu
    assert parts.weights_bytes == 8_030_261_248 * 2
    assert parts.kv_bytes_per_token == 131_072
    assert parts.kv_bytes == 32 * 8192 * 131_072 == 32 * GIB
    # The null block of 16 tokens.
    assert parts.kv_slack_bytes == 16 * 131_072
    # 2048 tokens: states and residual of 4096, and gate, up and their product of 14336.
    assert parts.activation_bytes == 2048 * (2 * 4096 + 3 * 14_336) * 2
    # 1, 2, 4 and 8, 16, ... 64: eleven sizes, 32 layers, 256 KiB.
    assert parts.graph_bytes == 11 * 32 * 256 * 1024
    assert parts.floor_bytes == ceil(1.05 * summed(parts))
    assert parts.reserve_bytes == parts.floor_bytes - summed(parts)


def test_deepseek_v3_in_its_own_fp8_by_hand() -> None:
    shape = published("deepseek_v3")
    parts = floor_of(shape, concurrency=1, context=160).per_gpu
    # In 16 bit stay table and head, norms and routers; all else is a byte, and a float32 for each
    # block of 128 x 128.
    norms = 61 * (2 * 7168 + 1536 + 512) + 7168
    plain = 2 * 129_280 * 7168 + norms + 58 * 256 * 7168
    quantized = shape.parameters - plain
    # Blocks: every side is a multiple of 128 but the 576 rows of K and V's first matrix.
    blocks = (quantized - 61 * 576 * 7168) // 128**2 + 61 * 5 * 56
    assert parts.weights_bytes == 2 * plain + quantized + 4 * blocks
    assert parts.kv_bytes == 160 * 70_272
    # W_UK and W_UV: 128 heads of 128 + 128 from 512, in 16 bit.
    assert parts.engine_bytes == 61 * 128 * 256 * 512 * 2


def test_w4a16_of_llama_3_1_8b_by_hand() -> None:
    parts = floor_of(
        published("llama_3_1_8b"), format="w4a16_awq", concurrency=1, context=16
    ).per_gpu
    outer = 2 * 128_256 * 4096 + 65 * 4096
    linear = 8_030_261_248 - outer
    # Half a byte, 16 bit for each 128, and the shape (two int64) of 7 matrices in 32 layers.
    expected = 2 * outer + linear // 2 + linear // 128 * 2 + 32 * 7 * 16
    assert parts.weights_bytes == expected == 5_700_595_200


def test_tensor_parallel_by_hand() -> None:
    """Llama 3.1 70B on 16 GPUs: 8 KV heads, each of them on two."""
    shape = published("llama_3_1_70b")
    floor = floor_of(shape, concurrency=4, context=4096, tp=16)
    # Norms on each GPU; of K and V one head (128 rows) instead of half of one.
    norms = 161 * 8192
    keys = 80 * 2 * 1024 * 8192
    rest = shape.parameters - norms - keys
    assert floor.per_gpu.weights_bytes == 2 * (rest // 16 + norms + keys // 8)
    assert floor.per_gpu.kv_bytes_per_token == 2 * 80 * 128 * 2
    assert floor.total.kv_bytes == 16 * floor.per_gpu.kv_bytes == 2 * 4 * 4096 * 327_680


def test_pipeline_parallel_by_hand() -> None:
    """Llama 3.1 8B on two stages: table on the first, norm and head on the last."""
    floor = floor_of(published("llama_3_1_8b"), concurrency=4, context=4096, pp=2)
    first, last = floor.stages
    layers, table = 16 * 218_112_000, 128_256 * 4096
    assert first.weights_bytes == 2 * (layers + table)
    assert last.weights_bytes == 2 * (layers + table + 4096)
    assert floor.total.weights_bytes == 2 * 8_030_261_248
    assert floor.total.kv_bytes == 4 * 4096 * 131_072
    assert floor.per_gpu.floor_bytes == max(first.floor_bytes, last.floor_bytes)


def test_a_tied_table_lies_on_both_ends_of_a_pipeline() -> None:
    shape = small(tie_word_embeddings=True)
    one, two = (floor_of(shape, concurrency=1, context=64, pp=pp).total for pp in (1, 2))
    assert two.weights_bytes - one.weights_bytes == 2 * 1024 * 256


def test_the_vocabulary_is_padded_to_64() -> None:
    parts = floor_of(small(vocab_size=1000), concurrency=1, context=64).per_gpu
    assert parts.engine_bytes == 2 * 24 * 256 * 2


def test_a_draft_stands_beside_its_target() -> None:
    alone = floor_of(small(), concurrency=8, context=512).per_gpu
    parts = floor_of(small(), concurrency=8, context=512, draft=draft()).per_gpu
    assert (parts.weights_bytes, parts.kv_bytes) == (alone.weights_bytes, alone.kv_bytes)
    # One layer of 4 heads of 32 values.
    assert parts.draft_kv_bytes_per_token == 2 * 4 * 32 * 2
    assert parts.draft_kv_bytes == 8 * 512 * parts.draft_kv_bytes_per_token
    # Its table is the target's, its map of tokens has int64 entries.
    own = draft().parameters - 1024 * 256
    assert parts.draft_weights_bytes == 2 * own + 8 * 320
    assert parts.floor_bytes == ceil(1.05 * summed(parts))


def test_fp8_cache_is_half_and_comes_with_its_preset() -> None:
    shape = published("llama_3_1_8b")
    full, half, preset = (
        floor_of(shape, format=form, kv_dtype=kv, concurrency=2, context=1024).per_gpu.kv_bytes
        for form, kv in (("bf16", "auto"), ("bf16", "fp8"), ("fp8_kv_cache", "auto"))
    )
    assert full == 2 * half == 2 * preset


def test_a_checkpoint_s_own_bytes_take_the_place_of_the_counted() -> None:
    shape = small()
    counted = floor_of(shape, concurrency=1, context=64).per_gpu.weights_bytes
    measured = floor_of(shape, concurrency=1, context=64, checkpoint_bytes=counted + 1000)
    assert measured.per_gpu.weights_bytes == counted + 1000


def test_an_fp8_cache_has_two_scales_a_layer() -> None:
    plain, scaled = (
        floor_of(small(), kv_dtype=name, concurrency=1, context=64).per_gpu.engine_bytes
        for name in ("auto", "fp8")
    )
    assert scaled - plain == 4 * 2 * 4


def test_a_batch_in_flight_is_held_once_beside_the_windows() -> None:
    """Gemma 3 27B: two batches of 2048 tokens (asynchronous scheduling) in six groups."""
    parts = floor_of(published("gemma_3_27b"), concurrency=2, context=8192).per_gpu
    # (1023 + 4096) / 16, one more, in place of 65; and the null block.
    extra = 6 * ((320 + 1) - 65) + 1
    assert parts.kv_slack_bytes == extra * 10 * 131_072
    assert parts.kv_bytes == 2 * (512 + 6 * 65) * 10 * 131_072


def test_without_graphs() -> None:
    assert floor_of(small(), concurrency=1, context=64, eager=True).per_gpu.graph_bytes == 0


# -- properties ------------------------------------------------------------------------------

shapes = st.sampled_from(list(SHAPES.values()))
formats = st.sampled_from(sorted(FORMATS))
parallel = st.sampled_from([(1, 1), (2, 1), (4, 1), (1, 2), (2, 2), (1, 4), (8, 1)])


@settings(max_examples=60, deadline=None)
@given(shapes, formats, parallel, st.integers(1, 600), st.integers(1, 4096), st.booleans())
def test_more_asked_is_never_less_memory(
    shape: ModelShape, form: str, gpus: tuple[int, int], sequences: int, context: int, eager: bool
) -> None:
    arguments: dict[str, Any] = {"format": form, "tp": gpus[0], "pp": gpus[1], "eager": eager}
    one = floor_of(shape, concurrency=sequences, context=context, **arguments)
    more = floor_of(shape, concurrency=sequences + 1, context=context, **arguments)
    assert more.per_gpu.floor_bytes > one.per_gpu.floor_bytes
    longer = floor_of(shape, concurrency=sequences, context=min(4096, context + 1), **arguments)
    assert longer.per_gpu.kv_bytes >= one.per_gpu.kv_bytes
    for parts in (*one.stages, one.per_gpu):
        assert parts.floor_bytes == summed(parts) + parts.reserve_bytes
        assert all(getattr(parts, name) >= 0 for name in SUMMANDS)
    tp, pp = gpus
    assert len(one.stages) == pp
    assert one.total.floor_bytes == tp * sum(parts.floor_bytes for parts in one.stages)
    # Every sequence at once holds no less than its tokens take.
    if shape is SHAPES["llama"]:
        assert one.total.kv_bytes >= sequences * context * one.total.kv_bytes_per_token


@settings(max_examples=60, deadline=None)
@given(shapes, formats, parallel, st.integers(1, 4096), st.integers(1, 40_000))
def test_largest_concurrency_is_the_exact_inverse(
    shape: ModelShape, form: str, gpus: tuple[int, int], context: int, mib: int
) -> None:
    arguments: dict[str, Any] = {"format": form, "tp": gpus[0], "pp": gpus[1], "context": context}
    memory = mib << 20
    found = largest_concurrency(shape, memory, **arguments)
    if found:
        assert floor_of(shape, concurrency=found, **arguments).per_gpu.floor_bytes <= memory
    assert floor_of(shape, concurrency=found + 1, **arguments).per_gpu.floor_bytes > memory


def test_a_batch_has_at_least_a_token_of_each_sequence() -> None:
    """vLLM refuses a `max-num-batched-tokens` below `max-num-seqs`."""
    few, many = (
        floor_of(SHAPES["llama"], concurrency=3000, context=16, max_batched_tokens=batch)
        for batch in (16, 3000)
    )
    assert few == many
    # States and residual of 256; and all logits of 1024, in 16 bit and float32.
    assert few.per_gpu.activation_bytes == 3000 * (2 * 256 * 2 + 1024 * (2 + 4))


@settings(max_examples=40, deadline=None)
@given(shapes, formats, parallel)
def test_quantized_weights_are_never_larger(
    shape: ModelShape, form: str, gpus: tuple[int, int]
) -> None:
    arguments: dict[str, Any] = {
        "concurrency": 1, "context": 64, "tp": gpus[0], "pp": gpus[1]
    }  # fmt: skip
    sixteen = floor_of(shape, format="bf16", **arguments).total.weights_bytes
    given_format = floor_of(shape, format=form, **arguments).total.weights_bytes
    if FORMATS[form].weight_bits < 16:
        assert given_format < sixteen
    elif FORMATS[form].weight_bits == 16:
        assert given_format == sixteen == 2 * _copies(shape, *gpus)
    else:
        assert given_format == 2 * sixteen


def _copies(shape: ModelShape, tp: int, pp: int) -> int:
    """Parameters on all GPUs together: what is not split counts on each."""
    found = 0
    for weight in shape.weights:
        each = weight.parameters
        if weight.split == "none":
            each *= tp
        elif weight.split == "kv":
            each *= max(1, tp // max(layer.kv_heads for layer in shape.layers))
        found += each
    if shape.tied and pp > 1:
        found += shape.first[0].parameters
    return found


@pytest.mark.parametrize(
    ("name", "title", "tp"),
    [
        ("llama_3_1_8b", "Llama 3.1 8B", 1),
        ("llama_3_1_70b", "Llama 3.1 70B", 4),
        ("qwen2_5_7b", "Qwen2.5 7B", 1),
        ("qwen2_5_32b", "Qwen2.5 32B", 2),
        ("qwen3_8b", "Qwen3 8B", 1),
        ("qwen3_32b", "Qwen3 32B", 2),
        ("mixtral_8x7b", "Mixtral 8x7B", 2),
        ("gemma_3_27b", "Gemma 3 27B", 2),
        ("deepseek_v3", "DeepSeek-V3 (its FP8)", 16),
    ],
)
def test_the_table_in_the_docs(name: str, title: str, tp: int) -> None:
    shape = published(name)
    one = floor_of(shape, concurrency=1, context=16).total
    parts = floor_of(shape, concurrency=32, context=8192, tp=tp).per_gpu
    gib = [f"{size / GIB:.2f}" for size in (parts.weights_bytes, parts.kv_bytes, parts.floor_bytes)]
    whole = (shape.parameters, shape.active_parameters, one.weights_bytes, one.kv_bytes_per_token)
    line = " | ".join([title, *(f"{number:,}" for number in whole), str(tp), *gib])
    assert f"| {line} |" in DOCS.read_text(encoding="utf-8")


# -- refused ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"tp": 3}, "tensor parallel size 3: does not divide the 8 attention heads of llama"),
        ({"tp": 0}, "tensor parallel size: is 0"),
        ({"pp": 5}, "5 stages for 4 layers"),
        ({"context": 4097}, "is 4097, the model was trained for 4096"),
        ({"context": 0, "block": 0}, "block size: is 0"),
        ({"concurrency": 0}, "concurrency: is 0"),
        ({"format": "int3"}, "'int3' is not known"),
        ({"kv_dtype": "int3"}, "'int3' is not known"),
        ({"max_batched_tokens": -1}, "max batched tokens: is -1"),
    ],
)
def test_what_vllm_would_refuse(arguments: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError) as raised:
        floor_of(small(), **({"concurrency": 1, "context": 64} | arguments))
    assert said in str(raised.value)


def test_heads_of_which_neither_number_divides_the_other() -> None:
    shape = small(num_attention_heads=12, num_key_value_heads=6, hidden_size=384)
    with pytest.raises(UserError, match="6 KV heads"):
        floor_of(shape, concurrency=1, context=64, tp=4)


def test_a_matrix_that_cannot_be_split() -> None:
    with pytest.raises(UserError, match=r"does not divide mlp.gate_proj"):
        floor_of(small(intermediate_size=514), concurrency=1, context=64, tp=4)


def test_qwen2_5_7b_runs_on_four_gpus_and_not_on_eight() -> None:
    shape = published("qwen2_5_7b")
    assert floor_of(shape, concurrency=1, context=64, tp=4).per_gpu.weights_bytes > 0
    with pytest.raises(UserError, match="28 attention heads"):
        floor_of(shape, concurrency=1, context=64, tp=8)
