"""The parts that a model's size is made of: weights, layers, the whole."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from registry.weight_formats import Quantization

Kind = Literal["linear", "router", "norm", "bias", "embedding", "head", "other"]
Split = Literal["column", "row", "kv", "none", "vocab"]
Attention = Literal["full", "sliding", "mla", "linear"]


@dataclass(frozen=True)
class Weight:
    """One tensor of `out` rows and `columns`, or `count` equal ones (experts).

    `kind` says what a quantizer makes of it: only `linear` leaves 16 bit. `split` says what tensor
    parallelism does: `column` and `vocab` split the rows, `row` the columns, `kv` the rows by
    whole KV heads (replicated where there are more GPUs than heads), `none` leaves all of it on
    every GPU. `name` is the module's within its layer, as checkpoints spell it.
    """

    name: str
    out: int
    columns: int = 1
    kind: Kind = "linear"
    split: Split = "none"
    count: int = 1
    active: int = 1

    @property
    def parameters(self) -> int:
        return self.out * self.columns * self.count

    @property
    def active_parameters(self) -> int:
        """Of `count` experts only `active` work on a token."""
        return self.out * self.columns * min(self.active, self.count)


@dataclass(frozen=True)
class LayerShape:
    """One decoder layer, and what it caches of a token.

    `mla`: one latent vector of `head_dim` values, no V (`v_head_dim` 0, `kv_heads` 1).
    `sliding`: only the last `window` tokens.`linear`: no token, but a state for
    a sequence, split over GPUs: `state` values of a convolution and `state_matrix` values beside
    them. `widest` is the largest row that the
    feed-forward part holds of a token, in values, gate and up together.
    """

    attention: Attention
    kv_heads: int
    head_dim: int
    v_head_dim: int
    weights: tuple[Weight, ...]
    widest: int
    window: int | None = None
    state: int = 0
    state_matrix: int = 0
    experts: int = 0
    experts_per_token: int = 0
    latent_copy: int = 0
    """Values that the engine holds a second time, decompressed for MLA's decoding."""

    @property
    def parameters(self) -> int:
        return sum(weight.parameters for weight in self.weights)


@dataclass(frozen=True)
class ModelShape:
    """A model as its config.json describes it.

    `first` and `last` are the weights outside of the layers, on the first and the last stage of a
    pipeline; a tied head is in neither. `max_len`: tokens that it was trained for.
    `shares_embedding`: a draft that takes its target's table.
    """

    model_type: str
    hidden: int
    vocab: int
    heads: int
    layers: tuple[LayerShape, ...]
    first: tuple[Weight, ...]
    last: tuple[Weight, ...]
    tied: bool
    max_len: int
    dtype: str
    quantization: Quantization | None = None
    shares_embedding: bool = False
    index_bytes: int = 0
    """Tables of whole numbers: which token of the target a draft's token is."""

    @property
    def latent(self) -> bool:
        """Whether its cache holds MLA's latent vectors."""
        return any(layer.attention == "mla" for layer in self.layers)

    @property
    def weights(self) -> tuple[Weight, ...]:
        inner = (weight for layer in self.layers for weight in layer.weights)
        return (*self.first, *inner, *self.last)

    @property
    def parameters(self) -> int:
        """All of them; tied embeddings once."""
        return sum(weight.parameters for weight in self.weights)

    @property
    def active_parameters(self) -> int:
        """That work on one token: of a mixture of experts only those that are asked."""
        return sum(weight.active_parameters for weight in self.weights)
