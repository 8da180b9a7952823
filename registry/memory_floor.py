"""The least GPU memory that serves a model at a concurrency and a context, and the way back.

Weights and KV cache are counted, as vLLM 0.32 places them on each GPU. What a prefill holds for a
moment and what CUDA graphs take are estimates by a stated formula, until an engine has printed
them (docs/capacity.md).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from fractions import Fraction
from math import ceil
from typing import Required, TypedDict, Unpack

from registry.errors import UserError
from registry.gpu_shares import check_split, padding_of, share_of
from registry.kv_cache import (
    BLOCK,
    FP8_KV,
    MAX_BATCHED_TOKENS,
    Pool,
    kv_dtype_of,
    pool_of,
    stage_of_layers,
    token_bytes,
)
from registry.quantization_configs import format_of
from registry.shape_parts import LayerShape, ModelShape, Weight
from registry.weight_formats import FLOAT32, FORMATS, WeightFormat, format_named

__all__ = ["FORMATS", "MemoryFloor", "Parts", "floor_of", "largest_concurrency", "named_format"]

AUTO = "auto"
RESERVE = Fraction(5, 100)
"""Of everything else: fragmentation, the CUDA context, buffers of collectives."""

GRAPH_BYTES = 256 << 10
"""Estimate: of one captured batch size, for each layer. No figure of ours; no GPU was here."""

MAX_GRAPH_SIZE = 512
"""The largest batch that vLLM captures where nobody says otherwise."""


@dataclass(frozen=True)
class Parts:
    """Bytes. Every field stands beside the others, none within another; `floor_bytes` is the sum.

    `kv_bytes_per_token` is no summand: what a token takes in all layers while it is in all of
    their windows, before rounding to blocks.
    """

    weights_bytes: int
    """The target's tensors in the format, scales included; copies on several GPUs each time."""
    engine_bytes: int
    """What the engine adds to them: padding of the vocabulary, MLA's decompressed matrices, the
    scales of an FP8 cache."""
    kv_bytes_per_token: int
    kv_bytes: int
    """Blocks of all sequences at the full context, the target's share of them."""
    kv_slack_bytes: int
    """vLLM's null block, and what sliding windows hold more while one batch is in flight."""
    draft_weights_bytes: int
    draft_kv_bytes_per_token: int
    draft_kv_bytes: int
    activation_bytes: int
    """Estimate."""
    graph_bytes: int
    """Estimate; 0 without CUDA graphs."""
    reserve_bytes: int
    floor_bytes: int

    def __add__(self, other: Parts) -> Parts:
        return Parts(
            **{one.name: getattr(self, one.name) + getattr(other, one.name) for one in fields(self)}
        )

    def __mul__(self, times: int) -> Parts:
        return Parts(**{one.name: getattr(self, one.name) * times for one in fields(self)})


@dataclass(frozen=True)
class MemoryFloor:
    per_gpu: Parts
    """Of the fullest GPU."""
    total: Parts
    """Summed over all GPUs."""
    stages: tuple[Parts, ...]
    """Of one GPU of each stage of the pipeline."""


class How(TypedDict, total=False):
    """What a floor depends on beside the model and how many sequences there are."""

    context: Required[int]
    """Tokens of a sequence, prompt and answer together."""
    format: str
    """`auto`, the default, is the configuration's."""
    kv_dtype: str
    """Likewise."""
    tp: int
    pp: int
    draft: ModelShape | None
    block: int
    max_batched_tokens: int | None
    eager: bool
    """No CUDA graphs; a CPU has none."""
    checkpoint_bytes: int | None
    """The tensors of a folder (`weights_of_checkpoint`), in place of what the configuration gives.
    """


def floor_of(shape: ModelShape, *, concurrency: int, **how: Unpack[How]) -> MemoryFloor:
    """Of `concurrency` sequences. Raises `UserError` for arguments that vLLM would refuse."""
    return _Plan(shape, **how).floor(concurrency)


def largest_concurrency(shape: ModelShape, gpu_bytes: int, **how: Unpack[How]) -> int:
    """Most sequences whose floor fits into `gpu_bytes` of each GPU; 0: not even one.

    The exact inverse of `floor_of`: the result fits, one more does not.
    """
    plan = _Plan(shape, **how)
    if not plan.fits(1, gpu_bytes):
        return 0
    fits, too_many = 1, 2
    while plan.fits(too_many, gpu_bytes):
        fits, too_many = too_many, 2 * too_many
    while too_many - fits > 1:
        middle = (fits + too_many) // 2
        if plan.fits(middle, gpu_bytes):
            fits = middle
        else:
            too_many = middle
    return fits


def named_format(name: str, shape: ModelShape) -> WeightFormat | None:
    """The format of a name, with groups that divide this model; None: the checkpoint's own.

    Raises `UserError` for a name that is not known, or a group that does not divide.
    """
    lowered = name.lower()
    if lowered == AUTO:
        if shape.quantization is not None:
            return None
        lowered = shape.dtype
    found = format_named(lowered)
    if found is None:
        known = ", ".join(sorted(FORMATS))
        remedy = f"auto, or one of {known}; of 4-bit integers also with a group: w4a16_g64"
        raise UserError.at("format", f"{name!r} is not known", remedy)
    widths = [weight.columns for weight in shape.weights if weight.kind == "linear"]
    odd = [width for width in widths if found.fixed and width % found.group]
    if odd:
        what = f"{name}: {found.group} columns do not divide a matrix of {odd[0]}"
        raise UserError.at("format", what, "take a smaller group, or leave it to the quantizer")
    return found.fitted(widths)


class _Plan:
    """What does not depend on the concurrency, computed once."""

    def __init__(
        self,
        shape: ModelShape,
        *,
        context: int,
        format: str = AUTO,
        kv_dtype: str = AUTO,
        tp: int = 1,
        pp: int = 1,
        draft: ModelShape | None = None,
        block: int = BLOCK,
        max_batched_tokens: int | None = None,
        eager: bool = False,
        checkpoint_bytes: int | None = None,
    ) -> None:
        batch = MAX_BATCHED_TOKENS if max_batched_tokens is None else max_batched_tokens
        check_split(
            shape, draft, context=context, tp=tp, pp=pp, block=block, max_batched_tokens=batch
        )
        form = named_format(format, shape)
        kv_name = kv_dtype_of(shape, kv_dtype, form)
        self.shape, self.draft, self.tp, self.pp = shape, draft, tp, pp
        self.context, self.batch, self.eager = context, batch, eager
        self.width = FLOAT32 if form is not None and form.weight_bits == 32 else 2
        self.stages = stage_of_layers(len(shape.layers), pp)
        self.pool = pool_of(shape, kv_name, tp=tp, pp=pp, block=block, draft=draft)
        self.target_pool = pool_of(shape, kv_name, tp=tp, pp=pp, block=block)
        self.fixed = [self._fixed(stage, form, kv_name) for stage in range(pp)]
        if checkpoint_bytes is not None:
            counted = sum(_bytes(one, form, shape, 1, self.width, n) for n, one in _named(shape))
            self.fixed = [
                (ceil(weights * Fraction(checkpoint_bytes, counted)), *others)
                for weights, *others in self.fixed
            ]

    def fits(self, concurrency: int, gpu_bytes: int) -> bool:
        return self.floor(concurrency).per_gpu.floor_bytes <= gpu_bytes

    def floor(self, concurrency: int) -> MemoryFloor:
        if concurrency < 1:
            raise UserError.at("concurrency", f"is {concurrency}", "give at least 1")
        stages = tuple(self._parts(stage, concurrency) for stage in range(self.pp))
        total = stages[0] * self.tp
        for one in stages[1:]:
            total += one * self.tp
        fullest = max(stages, key=lambda one: one.floor_bytes)
        return MemoryFloor(per_gpu=fullest, total=total, stages=stages)

    def _fixed(self, stage: int, form: WeightFormat | None, kv_name: str) -> Sequence[int]:
        """Weights, engine, KV of a token, draft's weights, draft's KV of a token."""
        shape, draft, tp, last = self.shape, self.draft, self.tp, stage == self.pp - 1
        here = [
            (index, layer)
            for index, layer in enumerate(shape.layers)
            if self.stages[index] == stage
        ]
        placed: list[tuple[int | None, Weight]] = [
            (index, weight) for index, layer in here for weight in layer.weights
        ]
        if stage == 0:
            placed += [(None, weight) for weight in shape.first]
        if last:
            placed += [(None, weight) for weight in shape.last]
            if shape.tied and stage > 0:
                placed.append((None, shape.first[0]))
        weights = sum(_bytes(one, form, shape, tp, self.width, index) for index, one in placed)
        engine = sum(padding_of(one, tp) * self.width for _, one in placed)
        engine += sum(layer.latent_copy // tp * self.width for _, layer in here)
        if kv_name in FP8_KV:
            # A float32 for K and one for V of each layer.
            engine += len(here) * 2 * FLOAT32
        kv = sum(token_bytes(layer, kv_name, tp) for _, layer in here)
        if draft is None or not last:
            return weights, engine, kv, 0, 0
        plain = FORMATS["bf16"]
        first = () if draft.shares_embedding and self.pp == 1 else draft.first
        own = [*first, *draft.last, *(one for layer in draft.layers for one in layer.weights)]
        draft_weights = sum(_bytes(one, plain, draft, tp, self.width, None) for one in own)
        draft_weights += draft.index_bytes
        engine += sum(padding_of(one, tp) * self.width for one in own)
        draft_kv = sum(token_bytes(layer, kv_name, tp) for layer in draft.layers)
        return weights, engine, kv, draft_weights, draft_kv

    def _parts(self, stage: int, concurrency: int) -> Parts:
        weights, engine, kv_token, draft_weights, draft_kv_token = self.fixed[stage]
        block = self.pool.block_bytes(stage)
        kv = concurrency * self.pool.held(self.context) * block
        alone = concurrency * self.target_pool.held(self.context)
        target_kv = min(kv, alone * self.target_pool.block_bytes(stage))
        # vLLM takes no batch of fewer tokens than sequences.
        batch = max(self.batch, concurrency)
        # With asynchronous scheduling, the default, one batch more than there are stages.
        in_flight = (self.pp + 1) * batch
        slack = block * (1 + _extra(self.pool, self.context, in_flight))
        activations = self._activations(stage, concurrency, batch)
        graphs = 0 if self.eager else _graphs(self.stages.count(stage), concurrency)
        without = weights + engine + kv + slack + draft_weights + activations + graphs
        floor = ceil(without * (1 + RESERVE))
        return Parts(
            weights_bytes=weights,
            engine_bytes=engine,
            kv_bytes_per_token=kv_token,
            kv_bytes=target_kv,
            kv_slack_bytes=slack,
            draft_weights_bytes=draft_weights,
            draft_kv_bytes_per_token=draft_kv_token,
            draft_kv_bytes=kv - target_kv,
            activation_bytes=activations,
            graph_bytes=graphs,
            reserve_bytes=floor - without,
            floor_bytes=floor,
        )

    def _activations(self, stage: int, concurrency: int, batch: int) -> int:
        """Estimate of what a forward pass holds beside weights and cache, at its peak.

        Prefill of a full batch: hidden states and residual, and of the widest layer the rows of
        attention or of the feed-forward part on this GPU. Or, on the last stage, the logits of
        every sequence, in the model's dtype and in float32, beside the hidden states.
        """
        shape = self.shape
        hidden = 2 * batch * shape.hidden * self.width
        layers = [
            layer for place, layer in zip(self.stages, shape.layers, strict=True) if place == stage
        ]
        rows = max(_row(layer) for layer in layers)
        peak = batch * ceil(rows / self.tp) * self.width
        if stage == self.pp - 1:
            peak = max(peak, concurrency * shape.vocab * (self.width + FLOAT32))
        return hidden + peak


def _extra(pool: Pool, context: int, in_flight: int) -> int:
    """Blocks that the sequence whose prompt is being computed holds above those that decode."""
    return max(0, pool.most(context, in_flight) - pool.held(context))


def _row(layer: LayerShape) -> int:
    """Values of one token in the wider of the two halves of a layer, on all GPUs together."""
    attention = sum(
        weight.columns if weight.split == "row" else weight.out
        for weight in layer.weights
        if weight.name.startswith(("self_attn.", "linear_attn.")) and weight.kind == "linear"
    )
    # Gate and up, and their product.
    return max(attention, layer.widest + layer.widest // 2)


def _graphs(layers: int, concurrency: int) -> int:
    """Estimate: for each layer and each batch size that vLLM captures (`_set_cudagraph_sizes`)."""
    largest = min(2 * concurrency, MAX_GRAPH_SIZE)
    sizes = sum(size <= largest for size in (1, 2, 4))
    sizes += len(range(8, min(largest + 1, 256), 8))
    sizes += len(range(256, largest + 1, 16))
    return sizes * layers * GRAPH_BYTES


def _named(shape: ModelShape) -> Iterator[tuple[int | None, Weight]]:
    for index, layer in enumerate(shape.layers):
        yield from ((index, weight) for weight in layer.weights)
    yield from ((None, weight) for weight in (*shape.first, *shape.last))


def _bytes(
    weight: Weight,
    form: WeightFormat | None,
    shape: ModelShape,
    tp: int,
    width: int,
    index: int | None,
) -> int:
    """Of one GPU's share of a weight. `form` None: what the checkpoint says of this module."""
    rows, columns = share_of(weight, shape, tp, index)
    if weight.kind != "linear":
        return rows * columns * width * weight.count
    if form is None and shape.quantization is not None:
        ends = f"layers.{index}.{weight.name}"
        names = tuple(f"{start}{ends}" for start in ("model.", "model.language_model."))
        form = format_of(shape.quantization, (*names, f"language_model.model.{ends}"))
    if form is None or form.scales == "none":
        return rows * columns * width * weight.count
    return form.matrix(rows, columns) * weight.count
