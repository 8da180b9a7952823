"""Hardware files: what a machine is and what its user pays; no price of ours."""

from __future__ import annotations

from datetime import date
from pathlib import Path

import pytest

from recipes import loader
from recipes.schema import KINDS, HardwareRecipe
from registry.digests import digest_of
from registry.errors import UserError

GPU = """
kind: hardware
description: One card
accelerator: NVIDIA A10
accelerators: 1
memory_gib: 22.48
"""
PRICE = """
price_per_hour: 1.2
currency: USD
price_source: our contract
price_as_of: 2026-01-31
"""


def load(tmp_path: Path, text: str) -> HardwareRecipe:
    path = tmp_path / "h.yaml"
    path.write_text(text)
    return loader.load(str(path), "hardware", HardwareRecipe)


@pytest.mark.parametrize("name", loader.shipped("hardware"))
def test_shipped_files_name_no_price(name: str) -> None:
    """A list price of some day is not what anybody pays."""
    recipe = loader.load(name, "hardware", HardwareRecipe)
    assert recipe.price_per_hour is None
    assert recipe.memory_gib > 0
    assert (recipe.accelerator is None) == name.startswith("cpu")
    assert recipe.accelerator is None or recipe.accelerator.startswith("NVIDIA ")


def test_the_kind_is_known() -> None:
    assert KINDS["hardware"] is HardwareRecipe
    assert "cpu_2core" in loader.shipped("hardware")


@pytest.mark.parametrize("day", ["2026-01-31", '"2026-01-31"'])
def test_a_price_with_all_that_belongs_to_it(tmp_path: Path, day: str) -> None:
    recipe = load(tmp_path, GPU + PRICE.replace("2026-01-31", day))
    assert recipe.price_per_hour == 1.2
    assert recipe.price_as_of == date(2026, 1, 31)
    assert digest_of(recipe)


@pytest.mark.parametrize("line", ["currency: USD", "price_source: our contract"])
def test_a_price_without_its_origin_is_refused(tmp_path: Path, line: str) -> None:
    missing = line.partition(":")[0]
    with pytest.raises(UserError, match=f"a price needs {missing} too"):
        load(tmp_path, GPU + PRICE.replace(line, ""))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (GPU + PRICE.replace("price_per_hour: 1.2", ""), "without a `price_per_hour`"),
        (GPU.replace("accelerators: 1", ""), "give both `accelerator` and `accelerators`"),
        (GPU.replace("accelerator: NVIDIA A10", ""), "give both `accelerator` and `accelerators`"),
        (GPU + PRICE.replace("1.2", "0"), "greater than 0"),
        (GPU + PRICE.replace("1.2", ".nan"), "no recipe can have"),
        (GPU + PRICE.replace("USD", "dollars"), "pattern"),
        (GPU + PRICE.replace("2026-01-31", "soon"), "date"),
        (GPU.replace("22.48", "0"), "greater than 0"),
        (GPU + "price: 3\n", "unknown key"),
    ],
)
def test_what_is_no_hardware(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        load(tmp_path, text)
