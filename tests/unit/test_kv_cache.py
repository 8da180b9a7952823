"""The KV cache in vLLM's pages, groups and blocks. Published figures with their working."""

from __future__ import annotations

from math import ceil

import pytest

from registry.errors import UserError
from registry.kv_cache import kv_dtype_of, kv_tokens, pool_of, stage_of_layers, token_bytes
from registry.weight_formats import FORMATS
from tests.unit.shape_builders import draft, published, small


@pytest.mark.parametrize(
    ("name", "per_token"),
    [
        # K and V, layers, KV heads, head size, two bytes.
        ("llama_3_1_8b", 2 * 32 * 8 * 128 * 2),
        ("llama_3_1_70b", 2 * 80 * 8 * 128 * 2),
        ("qwen2_5_7b", 2 * 28 * 4 * 128 * 2),
        ("qwen2_5_32b", 2 * 64 * 8 * 128 * 2),
        ("qwen3_8b", 2 * 36 * 8 * 128 * 2),
        ("qwen3_32b", 2 * 64 * 8 * 128 * 2),
        ("mixtral_8x7b", 2 * 32 * 8 * 128 * 2),
        # One latent vector of 512, and 64 for the position.
        ("deepseek_v3", 61 * (512 + 64) * 2),
        ("gemma_3_27b", 2 * 62 * 16 * 128 * 2),
    ],
)
def test_bytes_of_a_token(name: str, per_token: int) -> None:
    layers = published(name).layers
    assert sum(token_bytes(layer, "bfloat16") for layer in layers) == per_token


def test_the_figures_that_are_often_quoted() -> None:
    for name, per_token in (("llama_3_1_8b", 131_072), ("deepseek_v3", 70_272)):
        layers = published(name).layers
        assert sum(token_bytes(layer, "bfloat16") for layer in layers) == per_token
        assert sum(token_bytes(layer, "fp8") for layer in layers) == per_token // 2


def test_int8_has_a_scale_for_each_head() -> None:
    (layer, *_) = published("llama_3_1_8b").layers
    # 8 heads, K and V: 128 bytes and a float32 each.
    assert token_bytes(layer, "int8_per_token_head") == 8 * 2 * (128 + 4)


@pytest.mark.parametrize(("tp", "heads"), [(1, 8), (2, 4), (4, 2), (8, 1), (16, 1), (32, 1)])
def test_heads_are_divided_then_replicated(tp: int, heads: int) -> None:
    (layer, *_) = published("llama_3_1_8b").layers
    assert token_bytes(layer, "bfloat16", tp) == heads * 2 * 128 * 2


def test_the_latent_vector_is_whole_on_every_gpu() -> None:
    (layer, *_) = published("deepseek_v3").layers
    assert token_bytes(layer, "bfloat16", 8) == 576 * 2


def test_full_attention_is_one_group_with_rounded_blocks() -> None:
    pool = pool_of(published("llama_3_1_8b"), "bfloat16")
    assert len(pool.groups) == 1
    assert pool.block_bytes(0) == 16 * 131_072
    assert [pool.held(context) for context in (1, 16, 17, 8192)] == [1, 1, 2, 512]


def test_gemma_3_by_hand() -> None:
    """10 full layers make a group, 52 with windows six groups of at most 10; a page of 16 tokens
    is 2 * 16 heads * 128 * 2 bytes * 16 = 131072."""
    pool = pool_of(published("gemma_3_27b"), "bfloat16")
    assert [len(group.layers) for group in pool.groups] == [9, 9, 9, 9, 8, 8, 10]
    assert pool.block_bytes(0) == 10 * 131_072
    # 8192 tokens: 512 blocks in full; 1024 in a window that may begin within a block: 65.
    assert pool.held(8192) == 512 + 6 * 65
    # Shorter than the window: no more than there are tokens.
    assert pool.held(160) == 7 * 10
    # While a batch of 2048 tokens is in flight: (1023 + 2048) / 16, and one more.
    assert pool.most(8192, 2048) == 512 + 6 * (192 + 1)


def test_qwen3_next_by_hand() -> None:
    """36 layers keep a state: a convolution over 3 steps of 2 * 2048 + 4096 channels, and 32 heads
    of 128 x 128. In 16 bit 1097728 bytes; a token of attention takes 2 * 2 * 256 * 2 = 2048, so
    34 blocks of 16 tokens are needed for a page that holds it: 544 tokens."""
    shape = published("qwen3_next_80b")
    state = 3 * 8192 + 32 * 128 * 128
    assert {layer.state + layer.state_matrix for layer in shape.layers} == {0, state}
    assert ceil(2 * state / (16 * 2048)) * 16 == 544
    pool = pool_of(shape, "bfloat16")
    assert [(len(one.layers), one.block, one.state) for one in pool.groups] == [
        *[(12, 544, True)] * 3,
        (12, 544, False),
    ]
    assert pool.block_bytes(0) == 12 * 544 * 2048
    # Two states in each of three groups, and the tokens.
    assert pool.held(5440) == 3 * 2 + 10


def test_a_draft_beside_linear_attention_is_refused() -> None:
    with pytest.raises(UserError, match="draft: beside linear attention"):
        pool_of(published("qwen3_next_80b"), "bfloat16", draft=draft())


def test_alternating_layers_make_two_groups() -> None:
    shape = small(model_type="gemma2", head_dim=32, sliding_window=64)
    assert [len(group.layers) for group in pool_of(shape, "bfloat16").groups] == [2, 2]


def test_a_kind_with_less_than_half_more_layers_widens_the_groups() -> None:
    """gpt-oss-20b with a draft: 12 sliding, 12 + 1 full layers are padded to 13 and 13."""
    shape = small(
        model_type="gpt_oss", num_hidden_layers=24, head_dim=32, sliding_window=128,
        num_local_experts=2, num_experts_per_tok=1,
    )  # fmt: skip
    pool = pool_of(shape, "bfloat16", draft=draft())
    assert sorted(len(group.layers) for group in pool.groups) == [12, 13]
    assert pool.block_bytes(0) == 13 * 16 * 2 * 4 * 32 * 2


def test_a_draft_lies_in_its_target_s_group_whatever_its_heads() -> None:
    alone = pool_of(small(), "bfloat16")
    with_draft = pool_of(small(), "bfloat16", draft=draft(num_key_value_heads=8))
    assert len(with_draft.groups) == 1
    # 4 layers with 4 heads of 32; the draft's one with 8.
    assert alone.block_bytes(0) == 4 * 16 * 2 * 4 * 32 * 2
    assert with_draft.block_bytes(0) - alone.block_bytes(0) == 16 * 2 * 8 * 32 * 2


def test_small_pages_take_more_tokens_where_kinds_differ() -> None:
    """Windows beside a draft with half the heads: its blocks hold twice the tokens."""
    shape = small(model_type="mistral", sliding_window=64)
    pool = pool_of(shape, "bfloat16", draft=draft(num_key_value_heads=2))
    assert [(group.window, group.block) for group in pool.groups] == [(64, 16)] * 4 + [(None, 32)]


@pytest.mark.parametrize(
    ("count", "pp", "sizes"),
    [
        (32, 1, [32]),
        (32, 2, [16, 16]),
        # What is left over: from the stage before the last one on.
        (62, 4, [15, 16, 16, 15]),
        (61, 2, [31, 30]),
        (61, 4, [15, 15, 16, 15]),
        (7, 4, [2, 2, 2, 1]),
    ],
)
def test_layers_are_spread_as_vllm_spreads_them(count: int, pp: int, sizes: list[int]) -> None:
    stages = stage_of_layers(count, pp)
    assert [stages.count(stage) for stage in range(pp)] == sizes


def test_tokens_that_vllm_prints() -> None:
    """1 GiB for Llama 3.1 8B: 512 blocks of 16 x 131072 bytes; of 1024 tokens 64 blocks each."""
    shape = published("llama_3_1_8b")
    assert kv_tokens(shape, 1 << 30, max_len=1024) == 512 * 16
    # A length that fills no whole blocks: 63 of 64 tokens are used, in the engine's arithmetic.
    assert kv_tokens(shape, 1 << 30, max_len=1000) == int(512 / 63 * 1000)
    # 512 blocks hold one request of 8176 tokens beside the null block, and none of 8192.
    assert kv_tokens(shape, 1 << 30, max_len=8176) > 0
    assert kv_tokens(shape, 1 << 30, max_len=8192) == 0


def test_kv_dtype_follows_the_weights() -> None:
    plain = small(torch_dtype="float16")
    assert kv_dtype_of(plain, "auto") == "float16"
    assert kv_dtype_of(plain, "auto", FORMATS["fp8_kv_cache"]) == "fp8"
    assert kv_dtype_of(plain, "auto", FORMATS["fp32"]) == "float32"
    assert token_bytes(plain.layers[0], "float32") == 2 * token_bytes(plain.layers[0], "float16")
    assert kv_dtype_of(plain, "BF16") == "bfloat16"
    scheme = {
        "quant_method": "compressed-tensors",
        "config_groups": {
            "a": {"weights": {"num_bits": 8, "type": "float", "strategy": "channel"}}
        },
        "kv_cache_scheme": {"num_bits": 8, "type": "float"},
    }
    assert kv_dtype_of(small(quantization_config=scheme), "auto") == "fp8"


@pytest.mark.parametrize("name", ["float32", "q4", "nvfp4", ""])
def test_an_unknown_kv_dtype_is_refused(name: str) -> None:
    with pytest.raises(UserError, match="is not known"):
        kv_dtype_of(small(), name)


def test_int8_is_not_for_a_latent_cache() -> None:
    with pytest.raises(UserError, match="latent cache"):
        kv_dtype_of(published("deepseek_v3"), "int8")


def test_more_stages_than_layers_are_refused() -> None:
    with pytest.raises(UserError, match="5 stages for 4 layers"):
        pool_of(small(), "bfloat16", pp=5)
