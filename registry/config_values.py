"""Values of a config.json of somebody else's making, or an error that names file, key and value."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from registry.errors import UserError

LARGEST = 1 << 40
"""Above every number of a model; keeps products within what prints."""

MOST_LAYERS = 4096
"""Each is an object here; the deepest published models have some 130."""

_TAKE = "take the config.json that came with the model"


class ConfigValues:
    """A mapping and where it was read. Each getter raises `UserError` for a value of other kind."""

    def __init__(self, values: Mapping[str, Any], where: str) -> None:
        self.values = values
        self.where = where

    def has(self, name: str) -> bool:
        return self.values.get(name) is not None

    def number(
        self, name: str, default: int | None = None, least: int = 1, most: int = LARGEST
    ) -> int:
        """A whole number from `least` to `most`; missing and null are `default`."""
        value = self.values.get(name)
        if value is None and default is not None:
            return default
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if type(value) is not int or value < least:
            shown = "is missing" if value is None else f"is {str(value)[:60]!r}"
            raise self.error(name, f"{shown}; a whole number of at least {least} is needed")
        if value > most:
            raise self.error(name, f"is {str(value)[:60]}; no model has more than {most}")
        return value

    def numbers(self, name: str) -> list[int]:
        """A list of whole numbers; empty where there is none."""
        value = self.values.get(name)
        if value is None:
            return []
        if not isinstance(value, list) or not all(type(one) is int for one in value):
            raise self.error(name, f"is {str(value)[:60]!r}, no list of whole numbers")
        return value

    def flag(self, name: str, default: bool) -> bool:
        value = self.values.get(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.error(name, f"is {str(value)[:60]!r}, not true or false")
        return value

    def text(self, name: str, default: str = "") -> str:
        value = self.values.get(name)
        if value is None:
            return default
        if not isinstance(value, str):
            raise self.error(name, f"is {str(value)[:60]!r}, no text")
        return value

    def strings(self, name: str) -> list[str]:
        """A list of texts; empty where there is none."""
        value = self.values.get(name)
        if value is None:
            return []
        if not isinstance(value, list) or not all(isinstance(one, str) for one in value):
            raise self.error(name, f"is {str(value)[:60]!r}, no list of names")
        return value

    def check_layer_types(self, types: Collection[str], known: set[str], count: int) -> None:
        """Raises `UserError` where `layer_types` names other kinds, or too few or many layers."""
        odd = sorted(set(types) - known)
        if odd:
            raise self.error(
                "layer_types",
                f"has {', '.join(odd)}: what such a layer keeps cannot be counted",
                "serve this model with the engine and read its memory there",
            )
        if len(types) != count:
            what = f"has {len(types)} entries, num_hidden_layers is {count}"
            raise self.error("layer_types", what)

    def section(self, name: str) -> ConfigValues | None:
        """An object within; None where there is none."""
        value = self.values.get(name)
        if value is None:
            return None
        if not isinstance(value, Mapping):
            raise self.error(name, f"is {str(value)[:60]!r}, not an object")
        return ConfigValues(value, f"{self.where}: {name}")

    def error(self, name: str, what: str, remedy: str = _TAKE) -> UserError:
        return UserError.at(f"{self.where}: {name}", what, remedy)
