"""What a config.json says of a model's size. Published figures with their working."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from registry.errors import UserError
from registry.model_shapes import shape_of
from tests.unit.shape_builders import config, draft, published, small, small_config


def test_llama_3_1_8b_by_hand() -> None:
    shape = published("llama_3_1_8b")
    # A layer: Q and output 4096 x 4096, K and V 8 heads x 128 = 1024 rows, three feed-forward
    # matrices of 14336 x 4096, two norms.
    layer = 2 * 4096 * 4096 + 2 * 1024 * 4096 + 3 * 14336 * 4096 + 2 * 4096
    assert layer == 218_112_000
    # 32 of them, table and head of 128256 rows, the last norm.
    assert shape.parameters == 32 * layer + 2 * 128_256 * 4096 + 4096 == 8_030_261_248
    assert shape.active_parameters == shape.parameters
    assert (shape.max_len, shape.dtype, shape.quantization) == (131_072, "bfloat16", None)


def test_llama_3_1_70b_by_hand() -> None:
    layer = 2 * 8192 * 8192 + 2 * 1024 * 8192 + 3 * 28_672 * 8192 + 2 * 8192
    total = 80 * layer + 2 * 128_256 * 8192 + 8192
    assert published("llama_3_1_70b").parameters == total == 70_553_706_496


def test_qwen2_5_by_hand() -> None:
    # 7B: 28 heads of 128 (3584), 4 KV heads (512 rows), a bias on Q, K and V.
    layer = 2 * 3584 * 3584 + 2 * 512 * 3584 + 3 * 18_944 * 3584 + 3584 + 2 * 512 + 2 * 3584
    total = 28 * layer + 2 * 152_064 * 3584 + 3584
    assert published("qwen2_5_7b").parameters == total == 7_615_616_512
    # 32B: 40 heads of 128 (5120), 8 KV heads.
    layer = 2 * 5120 * 5120 + 2 * 1024 * 5120 + 3 * 27_648 * 5120 + 5120 + 2 * 1024 + 2 * 5120
    total = 64 * layer + 2 * 152_064 * 5120 + 5120
    assert published("qwen2_5_32b").parameters == total == 32_763_876_352


def test_qwen3_by_hand() -> None:
    # 32B: 64 heads of 128 are 8192 rows, more than the hidden size of 5120; a norm of 128 on Q
    # and on K.
    layer = 2 * 8192 * 5120 + 2 * 1024 * 5120 + 3 * 25_600 * 5120 + 2 * 128 + 2 * 5120
    total = 64 * layer + 2 * 151_936 * 5120 + 5120
    assert published("qwen3_32b").parameters == total == 32_762_123_264
    layer = 2 * 4096 * 4096 + 2 * 1024 * 4096 + 3 * 12_288 * 4096 + 2 * 128 + 2 * 4096
    total = 36 * layer + 2 * 151_936 * 4096 + 4096
    assert published("qwen3_8b").parameters == total == 8_190_735_360


def test_mixtral_by_hand() -> None:
    shape = published("mixtral_8x7b")
    expert = 3 * 14_336 * 4096
    rest = 2 * 4096 * 4096 + 2 * 1024 * 4096 + 8 * 4096 + 2 * 4096
    outer = 2 * 32_000 * 4096 + 4096
    assert shape.parameters == 32 * (8 * expert + rest) + outer == 46_702_792_704
    # Two of eight experts work on a token: "13B active".
    assert shape.active_parameters == 32 * (2 * expert + rest) + outer == 12_879_925_248


def test_deepseek_v3_by_hand() -> None:
    shape = published("deepseek_v3")
    # Q through 1536 to 128 heads x (128 + 64); K and V through 512 (+ 64 of the position) to
    # 128 heads x (128 + 128); output from 128 x 128; norms on both inner vectors.
    attention = (
        1536 * 7168 + 1536 + 24_576 * 1536
        + 576 * 7168 + 512 + 32_768 * 512
        + 7168 * 16_384
    )  # fmt: skip
    dense = 3 * 18_432 * 7168
    expert = 3 * 2048 * 7168
    # 3 dense layers, then 58 with 256 experts, one shared, and a router of 256 rows.
    moe = 257 * expert + 256 * 7168
    norms, outer = 2 * 7168, 2 * 129_280 * 7168 + 7168
    total = 61 * (attention + norms) + 3 * dense + 58 * moe + outer
    # "671B total, 37B active" (its report counts the active ones without the table).
    assert shape.parameters == total == 671_026_404_352
    active = 58 * (9 * expert + 256 * 7168)
    assert shape.active_parameters == total - 58 * moe + active == 37_552_282_624
    assert shape.quantization is not None and shape.quantization.format.name == "fp8_block"
    assert shape.max_len == 163_840
    assert {layer.attention for layer in shape.layers} == {"mla"}


def test_gemma_3_27b_by_hand() -> None:
    shape = published("gemma_3_27b")
    # 32 heads of 128 (4096 rows of a hidden size of 5376), 16 KV heads, four norms and two on Q, K.
    layer = 2 * 4096 * 5376 + 2 * 2048 * 5376 + 3 * 21_504 * 5376 + 4 * 5376 + 2 * 128
    text = 62 * layer + 262_208 * 5376 + 5376
    # SigLIP: patches of 14 x 14 x 3, 64 x 64 positions, 27 layers with biases everywhere.
    tower = (
        1152 * 588 + 1152 + 4096 * 1152 + 2 * 1152
        + 27 * (4 * (1152 * 1152 + 1152) + 2 * 4304 * 1152 + 4304 + 1152 + 4 * 1152)
        + 1152 * 5376 + 1152
    )  # fmt: skip
    assert shape.parameters == text + tower == 27_432_406_640
    windows = [layer.window for layer in shape.layers]
    # Every sixth layer sees all of the context: 10 of 62.
    assert windows[:6] == [1024] * 5 + [None]
    assert (windows.count(None), windows.count(1024)) == (10, 52)
    # Linear RoPE scaling by 8 is in the 131072 already.
    assert shape.max_len == 131_072


def test_gemma_3_as_published_leaves_out_what_its_class_knows() -> None:
    """google/gemma-3-27b-it has no vocabulary and no length, -4b-it no heads either."""
    whole = config("gemma_3_27b")
    text = dict(whole["text_config"])
    for key in ("vocab_size", "max_position_embeddings", "sliding_window_pattern"):
        del text[key]
    assert shape_of({**whole, "text_config": text}, "x") == published("gemma_3_27b")
    text = {"model_type": "gemma3_text", "hidden_size": 2560, "intermediate_size": 10240,
            "num_hidden_layers": 34, "sliding_window": 1024,
            "rope_scaling": {"factor": 8.0, "rope_type": "linear"}}  # fmt: skip
    shape = shape_of({**whole, "text_config": text}, "x")
    # 8 heads of 256 (2048 rows), 4 KV heads.
    layer = 2 * 2048 * 2560 + 2 * 1024 * 2560 + 3 * 10_240 * 2560 + 4 * 2560 + 2 * 256
    decoder = 34 * layer + 262_208 * 2560 + 2560
    tower = 416_866_032 + 1152 * 2560 + 1152  # The 27B's, with another projector.
    assert shape.parameters == decoder + tower
    assert {(one.kv_heads, one.head_dim) for one in shape.layers} == {(4, 256)}
    assert shape.max_len == 131_072


@pytest.mark.parametrize(
    ("rope", "length"),
    [
        (None, 4096),
        ({"rope_type": "linear", "factor": 2.0}, 8192),
        ({"type": "dynamic", "factor": 4}, 16_384),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}, 4096),
        ({"rope_type": "llama3", "factor": 8.0}, 4096),
        ({"rope_type": "telechat3-yarn", "factor": 8.0}, 4096),
        ({"rope_type": "deepseek_llama_scaling", "factor": 8.0}, 4096),
        ({"type": "mrope", "mrope_section": [8, 4, 4]}, 4096),
        # vLLM multiplies by whatever factor stands there.
        ({"rope_type": "default", "factor": 2.0}, 8192),
        ({"rope_type": "dynamic", "alpha": 1000.0}, 4096),
        # One for each kind of layer.
        (
            {
                "full_attention": {"rope_type": "linear", "factor": 4.0},
                "sliding_attention": {"rope_type": "default"},
            },
            16_384,
        ),
    ],
)
def test_trained_length_as_vllm_reads_it(rope: Any, length: int) -> None:
    assert small(rope_scaling=rope).max_len == length


@pytest.mark.parametrize(
    ("dtype", "taken"), [("float16", "float16"), ("float32", "bfloat16"), (None, "bfloat16")]
)
def test_dtype_is_the_one_that_the_engine_takes(dtype: str | None, taken: str) -> None:
    assert small(torch_dtype=dtype).dtype == taken


def test_a_draft_by_hand() -> None:
    shape = draft()
    # Q reads 512 (embeddings and states), 8 heads of 32; K and V 4 heads; output, three norms.
    layer = 256 * 512 + 2 * 128 * 512 + 256 * 256 + 3 * 512 * 256 + 3 * 256
    # Three hidden states into one, the last norm, a head of 320 rows, a table of 1024.
    outer = 256 * 768 + 256 + 320 * 256 + 1024 * 256
    assert shape.parameters == layer + outer
    assert (shape.model_type, shape.index_bytes) == ("eagle3", 8 * 320)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"model_type": "mamba2"}, "model_type: is 'mamba2'"),
        ({"model_type": "jamba"}, "model_type: is 'jamba'"),
        ({"model_type": None}, "model_type: is 'missing'"),
        ({"hidden_size": "wide"}, "hidden_size: is 'wide'"),
        ({"num_hidden_layers": 0}, "num_hidden_layers: is '0'"),
        (
            {"num_attention_heads": 7, "num_key_value_heads": 1},
            "num_attention_heads: is 7, which does not divide 256",
        ),
        ({"num_key_value_heads": 3}, "num_key_value_heads: is 3, which does not divide the"),
        ({"num_key_value_heads": 512}, "num_key_value_heads: is 512, which does not divide the"),
        ({"tie_word_embeddings": "no"}, "tie_word_embeddings: is 'no'"),
        ({"vocab_size": None}, "vocab_size: is missing"),
        ({"max_position_embeddings": True}, "max_position_embeddings: is 'True'"),
        ({"layer_types": ["full_attention", "linear_attention"] * 2}, "has linear_attention"),
        ({"torch_dtype": "int4"}, "torch_dtype: is 'int4'"),
        ({"vision_config": {"hidden_size": 8}}, "vision_config: is given beside llama"),
        ({"quantization_config": {"quant_method": "bitsandbytes"}}, "is 'bitsandbytes': vLLM 0.32"),
        ({"rope_scaling": {"rope_type": "odd", "factor": 2}}, "rope_type: is 'odd', which vLLM"),
        ({"architectures": ["LlamaForSequenceClassification"]}, "gives classes, scores or vectors"),
        ({"architectures": ["Qwen2ForRewardModel"]}, "architectures: is 'Qwen2ForRewardModel'"),
        ({"architectures": ["LlamaModel"]}, "architectures: is 'LlamaModel'"),
        ({"rope_scaling": {"rope_type": "linear", "factor": "2"}}, "factor: is '2'"),
        ({"num_hidden_layers": 10**9}, "no model has more than 4096"),
        ({"rope_scaling": 8}, "rope_scaling: is '8', not an object"),
    ],
)
def test_what_cannot_be_counted_is_refused_by_name(change: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError) as raised:
        shape_of(small_config(**change), "folder/config.json")
    assert said in str(raised.value)
    assert all(one.where.startswith("folder/config.json") for one in raised.value.problems)
    assert all(one.remedy for one in raised.value.problems)


VALUES = st.one_of(
    st.none(), st.booleans(), st.integers(-3, 10**30), st.floats(), st.text(max_size=5),
    st.lists(st.integers(0, 9), max_size=3), st.lists(st.text(max_size=3), max_size=3),
    st.dictionaries(st.sampled_from(["factor", "type", "quant_method", "bits"]),
                    st.one_of(st.integers(), st.floats(), st.text(max_size=4)), max_size=3),
)  # fmt: skip
BASES = [
    small_config(),
    small_config(model_type="qwen3", sliding_window=32, use_sliding_window=True),
    small_config(model_type="gpt_oss", num_local_experts=4, num_experts_per_tok=2,
                 sliding_window=32),
    config("deepseek_v3") | {"num_hidden_layers": 4},
    config("qwen3_next_80b") | {"num_hidden_layers": 4},
    config("gemma_3_27b"),
    {"architectures": ["Eagle3Speculator"], "transformer_layer_config": small_config()},
]  # fmt: skip


@settings(max_examples=400, deadline=None)
@given(st.data())
def test_any_value_is_read_or_refused_with_its_place(data: st.DataObject) -> None:
    written = dict(data.draw(st.sampled_from(BASES)))
    key = data.draw(st.sampled_from([*written, "rope_scaling", "quantization_config", "head_dim"]))
    inner = written[key] if isinstance(written.get(key), dict) else None
    if inner and data.draw(st.booleans()):
        changed = data.draw(st.sampled_from(list(inner)))
        written[key] = inner | {changed: data.draw(VALUES)}
    else:
        written[key] = data.draw(VALUES)
    try:
        assert shape_of(written, "config.json").parameters > 0
    except UserError as error:
        assert all(one.where.startswith("config.json") and one.remedy for one in error.problems)


def test_a_pattern_of_layers_must_fit_their_number() -> None:
    changed = {"model_type": "qwen3", "layer_types": ["full_attention"] * 3}
    with pytest.raises(UserError, match="has 3 entries, num_hidden_layers is 4"):
        small(**changed)
