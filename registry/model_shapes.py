"""What a Hugging Face config.json says of a model's size: its layers, weights and cache.

Every weight is counted with its shape, so parameters, bytes in any format and shares of a GPU
follow from one list. An architecture whose list is not known is refused by name: a guess would be
a wrong number in a plan.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from registry.weight_formats import Quantization

Kind = Literal["linear", "router", "norm", "bias", "embedding", "head", "other"]
Split = Literal["column", "row", "kv", "none", "vocab"]
Attention = Literal["full", "sliding", "chunked", "mla", "linear", "none"]


@dataclass(frozen=True)
class Weight:
    """One tensor, or `count` equal ones (experts).

    `split` says what tensor parallelism does: `column` and `vocab` split the rows of the output,
    `row` the input, `kv` the output by whole KV heads (`heads` of them, replicated where there are
    more GPUs), `none` leaves the whole on every GPU.
    """

    name: str
    out: int
    columns: int
    kind: Kind = "linear"
    split: Split = "none"
    count: int = 1
    active: int = 1
    heads: int = 0

    @property
    def parameters(self) -> int:
        return self.out * self.columns * self.count

    @property
    def active_parameters(self) -> int:
        """Of `count` experts only `active` work on a token."""
        return self.out * self.columns * min(self.active, self.count)


@dataclass(frozen=True)
class LayerShape:
    """One decoder layer. `state_elements` and `state_bytes`: of a layer that keeps a state."""

    attention: Attention
    kv_heads: int
    head_dim: int
    v_head_dim: int
    weights: tuple[Weight, ...]
    window: int | None = None
    experts: int = 0
    experts_per_token: int = 0

    @property
    def parameters(self) -> int:
        return sum(weight.parameters for weight in self.weights)


@dataclass(frozen=True)
class ModelShape:
    """A model as its config.json describes it. `outer`: weights outside of the layers."""

    model_type: str
    hidden: int
    vocab: int
    heads: int
    layers: tuple[LayerShape, ...]
    outer: tuple[Weight, ...]
    tied: bool
    max_len: int
    dtype: str
    quantization: Quantization | None = None

    @property
    def weights(self) -> tuple[Weight, ...]:
        return (*self.outer, *(weight for layer in self.layers for weight in layer.weights))

    @property
    def parameters(self) -> int:
        """All of them; tied embeddings once."""
        return sum(weight.parameters for weight in self.weights)

    @property
    def active_parameters(self) -> int:
        """That work on one token: of a mixture of experts only those that are asked."""
        return sum(weight.active_parameters for weight in self.weights)


def shape_of(config: Mapping[str, Any], where: str) -> ModelShape:
    """Raises `UserError` naming file, key, value and remedy; and for what cannot be counted."""
    raise NotImplementedError
