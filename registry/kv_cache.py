"""Bytes of the KV cache, as vLLM 0.32 lays it out: pages, groups, blocks of one shared pool.

Read from `v1/kv_cache_interface.py` and `v1/core/kv_cache_utils.py`. A page holds `block` tokens
of one layer. Layers that need the same tokens form a group; each group has block numbers of its
own, and one block of any group takes as many bytes as the widest group. Layers of another kind
(sliding windows beside full attention) make more groups of the same width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import ceil

from registry.errors import UserError
from registry.shape_parts import LayerShape, ModelShape
from registry.weight_formats import WeightFormat

BLOCK, CPU_BLOCK = 16, 128
"""Tokens of a block on GPUs and on vLLM's CPU platform, which takes 16 for MLA."""

MAX_BATCHED_TOKENS = 2048
"""vLLM's `max-num-batched-tokens` on a GPU of less than 70 GiB; 8192 on a larger one."""

FP8_KV = ("fp8", "fp8_e4m3", "fp8_e5m2")
"""With one scale for a whole layer."""

_WIDTHS = {
    "bfloat16": 2,
    "float16": 2,
    **dict.fromkeys(FP8_KV, 1),
    "int8_per_token_head": 1,
    "fp8_per_token_head": 1,
    # Of a model that is served in float32 as a whole; vLLM takes it by no name.
    "float32": 4,
}
_SYNONYMS = {
    "bf16": "bfloat16",
    "fp16": "float16",
    "half": "float16",
    "int8": "int8_per_token_head",
}
_OF_PLAIN = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
"""Of weights that are not quantized; others have the model's own kind."""

KV_DTYPES = ("auto", *(name for name in _WIDTHS if name != "float32"), *_SYNONYMS)

STATE_BLOCKS = 2
"""Of a sequence in each group of linear layers while prefixes are cached, as is the default: the
state at the end of the last whole block, and the one in work (`MambaSpec`, mode `align`)."""

_SCALE = 4
"""float32 beside each head's K and V of each token, with `..._per_token_head`."""


def block_size(shape: ModelShape, *, cpu: bool) -> int:
    """Tokens of a block as vLLM 0.32 chooses it, where no argument does."""
    return CPU_BLOCK if cpu and not shape.latent else BLOCK


def kv_dtype_of(shape: ModelShape, kv_dtype: str, form: WeightFormat | None = None) -> str:
    """The dtype that the engine takes; `auto`: what goes with the weights.

    Raises `UserError` for a name that is not known, or of no use with this model.
    """
    asked = name = kv_dtype.lower()
    name = _SYNONYMS.get(name, name)
    if name == "auto":
        given = form.kv_dtype if form else "auto"
        if given == "auto" and shape.quantization is not None:
            given = shape.quantization.kv_dtype
        if given == "auto":
            # The engine is asked for such a kind as a whole: `--dtype float32`.
            given = _OF_PLAIN.get(form.name if form else "", shape.dtype)
        name = given
    if name not in _WIDTHS or asked == "float32":
        raise UserError.at("kv dtype", f"{kv_dtype!r} is not known", f"one of {_listed()}")
    if name.endswith("_per_token_head") and any(one.attention == "mla" for one in shape.layers):
        what = f"{name} is not for models with a latent cache ({shape.model_type})"
        raise UserError.at("kv dtype", what, "auto or fp8")
    return name


def _listed() -> str:
    return ", ".join(KV_DTYPES)


def token_bytes(layer: LayerShape, kv_dtype: str, tp: int = 1) -> int:
    """Bytes that one token takes in one layer on one GPU.

    KV heads are split over GPUs; where there are fewer, each GPU has one. The latent vector of MLA
    is one head, which every GPU has whole (`ModelConfig.get_num_kv_heads`).
    """
    if layer.attention == "linear":
        return 0
    heads = max(1, layer.kv_heads // tp)
    scales = 2 * _SCALE if kv_dtype.endswith("_per_token_head") else 0
    return heads * ((layer.head_dim + layer.v_head_dim) * _WIDTHS[kv_dtype] + scales)


@dataclass(frozen=True)
class CachedLayer:
    """A layer's page, and the stage of the pipeline that it lies on."""

    stage: int
    page: int
    block: int
    window: int | None
    state: bool = False

    @property
    def kind(self) -> tuple[int | None, int, bool]:
        return self.window, self.block, self.state


@dataclass(frozen=True)
class Group:
    """Layers with one block table."""

    layers: tuple[CachedLayer, ...]
    block: int
    window: int | None
    state: bool = False

    def bytes_on(self, stage: int) -> int:
        return sum(layer.page for layer in self.layers if layer.stage == stage)

    def held(self, context: int) -> int:
        """Blocks of a sequence of `context` tokens while it decodes.

        Of a window of w tokens: it may begin and end within a block.
        """
        if self.state:
            return STATE_BLOCKS
        whole = ceil(context / self.block)
        if self.window is None:
            return whole
        return min(whole, ceil(self.window / self.block) + 1)

    def most(self, max_len: int, in_flight: int) -> int:
        """Blocks that vLLM reckons with for one request, while its prompt is computed too.

        `SlidingWindowSpec.max_admission_blocks_per_request`.
        """
        if self.window is None:
            return self.held(max_len)
        return ceil(min(self.window - 1 + in_flight, max_len) / self.block) + 1


@dataclass(frozen=True)
class Pool:
    """The one pool that all groups take blocks from."""

    groups: tuple[Group, ...]

    def block_bytes(self, stage: int) -> int:
        """Of one block on a GPU of this stage."""
        return max((group.bytes_on(stage) for group in self.groups), default=0)

    def held(self, context: int) -> int:
        """Blocks of one sequence."""
        return sum(group.held(context) for group in self.groups)

    def most(self, max_len: int, in_flight: int) -> int:
        return sum(group.most(max_len, in_flight) for group in self.groups)


def pool_of(
    shape: ModelShape,
    kv_dtype: str,
    *,
    tp: int = 1,
    pp: int = 1,
    block: int = BLOCK,
    draft: ModelShape | None = None,
    state_width: int | None = None,
) -> Pool:
    """`kv_dtype` as `kv_dtype_of` gives it. A draft's layers lie on the last stage.

    `state_width`: bytes of a value of linear attention's matrix; None: the model's dtype, as on
    GPUs. vLLM's CPU platform takes float32.

    Raises `UserError` where vLLM has no layout for the mixture of layers.
    """
    stages = stage_of_layers(len(shape.layers), pp)
    width = _WIDTHS[shape.dtype]
    state = max(
        layer.state // tp * width + layer.state_matrix // tp * (state_width or width)
        for layer in shape.layers
    )
    if state:
        return _with_states(shape, stages, kv_dtype, tp, block, state, draft)
    layers = [
        CachedLayer(stage, token_bytes(layer, kv_dtype, tp) * block, block, layer.window)
        for stage, layer in zip(stages, shape.layers, strict=True)
    ]
    if draft is not None:
        layers += [
            CachedLayer(pp - 1, token_bytes(layer, kv_dtype, tp) * block, block, layer.window)
            for layer in draft.layers
        ]
    if len({layer.window for layer in layers}) == 1:
        # All of them need the same tokens: one group, whatever their pages.
        return Pool((Group(tuple(layers), block, layers[0].window),))
    mixed = shape.latent
    return Pool(_groups(_one_page(layers, splits=not mixed)))


def _with_states(
    shape: ModelShape,
    stages: Sequence[int],
    kv_dtype: str,
    tp: int,
    block: int,
    state: int,
    draft: ModelShape | None,
) -> Pool:
    """Blocks of attention grow until their page holds a state; states are padded to that page.

    `Platform._align_hybrid_block_size`.
    """
    if draft is not None:
        what = f"beside linear attention ({shape.model_type}) cannot be counted"
        raise UserError.at("draft", what, "plan without a draft, or measure it with the engine")
    token = max(token_bytes(layer, kv_dtype, tp) for layer in shape.layers)
    if not token:
        what = f"{shape.model_type} has layers of linear attention alone"
        raise UserError.at("model", what, "measure it with the engine")
    block *= ceil(state / (block * token))
    layers = [
        CachedLayer(stage, token * block, block, None, state=layer.attention == "linear")
        for stage, layer in zip(stages, shape.layers, strict=True)
    ]
    return Pool(_groups(layers))


def _one_page(layers: Sequence[CachedLayer], *, splits: bool) -> list[CachedLayer]:
    """Layers with pages of one size: more tokens in small pages, or bytes that lie idle.

    `unify_kv_cache_spec_page_size`.
    """
    largest = max(layer.page for layer in layers)
    found = []
    for layer in layers:
        if largest % layer.page == 0:
            layer = replace(layer, block=layer.block * (largest // layer.page))
        elif not splits:
            what = "a latent cache beside sliding windows of another page size"
            raise UserError.at("model", f"{what} cannot be counted", "measure it with the engine")
        found.append(replace(layer, page=largest))
    return found


def _groups(layers: Sequence[CachedLayer]) -> tuple[Group, ...]:
    """Groups of equally many layers, by kind; the last one of a kind may have fewer.

    `_get_kv_cache_groups_uniform_page_size`: as many as the rarest kind has, or as the most
    frequent has where that is less than half more.
    """
    kinds: dict[tuple[int | None, int, bool], list[CachedLayer]] = {}
    for layer in layers:
        kinds.setdefault(layer.kind, []).append(layer)
    fewest = min(len(found) for found in kinds.values())
    most = max(len(found) for found in kinds.values())
    size = most if most < 1.5 * fewest else fewest
    return tuple(
        Group(tuple(found[first :: ceil(len(found) / size)]), block, window, state)
        for (window, block, state), found in kinds.items()
        for first in range(ceil(len(found) / size))
    )


def stage_of_layers(count: int, pp: int) -> list[int]:
    """The stage of each layer, as vLLM spreads them (`get_pp_indices`).

    What is left over goes to the stages before the last one, from the back.
    """
    if pp > count:
        raise UserError.at("pipeline parallel size", f"{pp} stages for {count} layers", "take less")
    sizes = [count // pp] * pp
    for place in range(2, count % pp + 2):
        sizes[-place] += 1
    return [stage for stage, size in enumerate(sizes) for _ in range(size)]


def kv_tokens(
    shape: ModelShape,
    budget_bytes: int,
    *,
    max_len: int,
    kv_dtype: str = "auto",
    tp: int = 1,
    pp: int = 1,
    block: int = BLOCK,
    draft: ModelShape | None = None,
    max_batched_tokens: int = MAX_BATCHED_TOKENS,
    batches: int = 1,
    state_width: int | None = None,
) -> int:
    """The tokens that vLLM prints at start for this budget on each GPU; 0: it refuses to start.

    "GPU KV cache size: N tokens". `max_len` is its max-model-len; `batches` how many it has in
    flight, 2 with asynchronous scheduling (only sliding windows ask).
    """
    pool = pool_of(
        shape,
        kv_dtype_of(shape, kv_dtype),
        tp=tp,
        pp=pp,
        block=block,
        draft=draft,
        state_width=state_width,
    )
    blocks = min(budget_bytes // pool.block_bytes(stage) for stage in range(pp))
    request = pool.most(max_len, batches * max_batched_tokens)
    if blocks - 1 < request:
        # One block is nobody's, and a request of the full length has to fit.
        return 0
    # In floating point, as `get_kv_cache_capacity` computes it.
    return int(blocks / request * max_len)
