"""Bytes of weights by format."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class WeightFormat:
    """How linear weights lie in memory, and in how many bits their inputs are multiplied."""

    name: str
    weight_bits: int
    activation_bits: int


@dataclass(frozen=True)
class Quantization:
    """Of a checkpoint: which module has which format."""

    format: WeightFormat


FORMATS: dict[str, WeightFormat] = {}
