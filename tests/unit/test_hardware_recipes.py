"""Hardware files: what a machine is and what its user pays; no price of ours."""

from __future__ import annotations

from datetime import date
from pathlib import Path

import pytest

from recipes import loader
from recipes.schema import KINDS, HardwareRecipe
from registry.deploy_attention import attention_backend
from registry.digests import digest_of
from registry.errors import UserError
from registry.settings import CHECKOUT

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
    # As nvidia-smi shows it.
    assert recipe.accelerator is None or recipe.accelerator.startswith(("NVIDIA ", "Tesla "))


NAMED = ("t4", "a10", "rtx_3090", "rtx_4090", "l20", "l40s", "a100_40gb", "a100_80gb", "h20",
         "h800", "h100", "h200", "b200")  # fmt: skip


def test_the_cards_that_a_plan_knows() -> None:
    assert set(loader.shipped("hardware")) == {"cpu_2core", *(f"nvidia_{one}" for one in NAMED)}


@pytest.mark.parametrize("name", loader.shipped("hardware"))
def test_every_number_has_its_source(name: str) -> None:
    recipe = loader.load(name, "hardware", HardwareRecipe)
    assert set(recipe.sources) == set(recipe.numbers)
    for field, source in recipe.sources.items():
        place = "." in source and "/" in source
        own = source.startswith(
            ("measured", "derived: ", "what `pilotage doctor`", "nvidia-smi in")
        )
        assert place or own, f"{field}: {source}"


@pytest.mark.parametrize("name", loader.shipped("hardware"))
def test_numbers_fit_each_other(name: str) -> None:
    """Types that a generation has no units for are null, and dense rates double from type to type:
    a rate with sparsity would stand out."""
    recipe = loader.load(name, "hardware", HardwareRecipe)
    rates = recipe.compute
    if recipe.compute_capability is None:
        assert name == "cpu_2core"
        return
    major, minor = map(int, recipe.compute_capability.split("."))
    assert (rates.bf16 is None) or (major, minor) >= (8, 0)
    assert (rates.fp8 is not None) == ((major, minor) >= (8, 9))
    assert (rates.fp4 is not None) == (major >= 10)
    if rates.fp16 is not None:
        assert rates.bf16 in (None, rates.fp16)
        assert rates.fp8 in (None, pytest.approx(2 * rates.fp16, rel=0.02))
        # INT8 sums in 32 bits at full rate on GeForce cards, FP16 at half of it.
        assert rates.int8 is not None and round(rates.int8 / rates.fp16) in (2, 4)
    assert recipe.bandwidth_gb_s is not None and recipe.link_gb_s is not None


def hardware_table() -> list[str]:
    """The table of docs/capacity.md, from the files."""
    rows = [
        "| file | as `nvidia-smi` calls it | GiB | GB/s | link GB/s | fp32 | fp16 | bf16 | fp8 "
        "| int8 | fp4 | capability | attention |",
        f"|{'---|' * 13}",
    ]
    for name in loader.shipped("hardware"):
        recipe = loader.load(name, "hardware", HardwareRecipe)
        backend = "CPU"
        if recipe.compute_capability is not None:
            major, minor = map(int, recipe.compute_capability.split("."))
            taken = attention_backend((major, minor))
            backend = " ".join(map(str, filter(None, (taken.backend, taken.flash_attn_version))))
        rates = recipe.compute.model_dump().values()
        numbers = [recipe.memory_gib, recipe.bandwidth_gb_s, recipe.link_gb_s, *rates]
        cells = ["-" if value is None else f"{value:g}" for value in numbers]
        words = [f"`{name}`", recipe.accelerator or "-", *cells, recipe.compute_capability or "-"]
        rows.append(f"| {' | '.join(words)} | {backend} |")
    return rows


def test_the_table_of_the_documentation_is_the_folder() -> None:
    text = (CHECKOUT / "docs" / "capacity.md").read_text(encoding="utf-8")
    assert "\n".join(hardware_table()) in text


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
        (GPU + "bandwidth_gb_s: 600\n", "no `sources` for bandwidth_gb_s"),
        (GPU + "compute: {fp8: 100}\n", r"no `sources` for compute\.fp8"),
        (GPU + "compute: {fp6: 100}\n", "unknown key"),
        (GPU + "compute: {fp8: -1}\n", "greater than 0"),
        (GPU + "sources: {link_gb_s: me}\n", "of which there is no number"),
        (GPU + 'sources: {memory_gib: " "}\n', "says nothing of memory_gib"),
        (GPU + "compute_capability: 8.6\n", "valid string"),
        (GPU + 'compute_capability: "sm86"\n', "pattern"),
        (GPU + "cpu_instructions: [avx2]\n", "without an accelerator"),
        (GPU + "cpu_instructions: [mmx]\n", "avx512"),
        ("kind: hardware\ndescription: d\nmemory_gib: 8\nlink_gb_s: 8\n", "an accelerator's"),
    ],
)
def test_what_is_no_hardware(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        load(tmp_path, text)


def test_all_mistakes_at_once(tmp_path: Path) -> None:
    text = GPU.replace("accelerators: 1", "") + "bandwidth_gb_s: 1\nprice_per_hour: 2\n"
    with pytest.raises(UserError) as at:
        load(tmp_path, text)
    for words in ("give both", "no `sources` for bandwidth_gb_s", "a price needs currency"):
        assert words in str(at.value)
    with pytest.raises(UserError) as at:
        load(tmp_path, GPU + "bandwidth_gb_s: -1\nlink_gb_s: fast\nodd: 1\n")
    assert len(at.value.problems) == 3
