"""Costs: a quotient where both numbers are known, null where one is not."""

from __future__ import annotations

import math
from datetime import date
from pathlib import Path

import pytest

from eval_suites.costs import cost_of, machines_paid, price_note
from eval_suites.loader import load_profile
from recipes.schema import HardwareRecipe
from tasks.hardware import price_of


def test_the_formula() -> None:
    """3.60 an hour is 0.001 a second: two requests a second share it, 50 tokens a second too."""
    cost = cost_of(3.6, 2.0, 50.0)
    assert cost["per_request"] == pytest.approx(0.0005)
    assert cost["per_million_output_tokens"] == pytest.approx(20.0)


def test_the_two_agree_on_what_a_request_of_known_length_costs() -> None:
    cost = cost_of(1.7, 4.0, 4.0 * 128)
    per_request, per_million = cost["per_request"], cost["per_million_output_tokens"]
    assert per_request is not None
    assert per_million is not None
    assert per_million * 128 / 1_000_000 == pytest.approx(per_request)


@pytest.mark.parametrize("bad", [None, 0.0, -1.0, math.nan, math.inf, -math.inf])
def test_what_is_not_known_costs_null(bad: float | None) -> None:
    assert set(cost_of(bad, 1.0, 1.0).values()) <= {None}
    rateless = cost_of(1.0, bad, 1.0)
    assert rateless["per_request"] is None
    assert rateless["per_million_output_tokens"] == pytest.approx(1e6 / 3600)
    tokenless = cost_of(1.0, 1.0, bad)
    assert tokenless["per_million_output_tokens"] is None
    assert tokenless["per_request"] == pytest.approx(1 / 3600)


def test_a_rate_near_zero_gives_no_infinity() -> None:
    assert set(cost_of(1e300, 1e-300, 1e-300).values()) == {None}


def test_a_report_says_where_costs_come_from_or_why_there_are_none() -> None:
    bare = HardwareRecipe(kind="hardware", description="d", memory_gib=8)
    assert price_note("cpu", bare) == "no costs: hardware cpu has no `price_per_hour`"
    priced = bare.model_copy(
        update={
            "price_per_hour": 0.42,
            "currency": "EUR",
            "price_source": "our contract",
            "price_as_of": date(2026, 1, 31),
        }
    )
    assert price_note("cpu", priced) == (
        "costs in EUR at 0.42 per hour of cpu (our contract, as of 2026-01-31)"
    )
    assert ", 2 of them (our contract" in price_note("nvidia_l20", priced, 2)


@pytest.mark.parametrize(
    ("gpus", "accelerators", "machines"),
    [(0, 1, 1), (1, 1, 1), (14, 1, 14), (4, 8, 1), (8, 8, 1), (14, 8, 2), (4, 0, 1)],
)
def test_a_server_of_several_gpus_pays_for_all_of_them(
    gpus: int, accelerators: int, machines: int
) -> None:
    card = HardwareRecipe(kind="hardware", description="d", memory_gib=8)
    priced = card.model_copy(update={"accelerators": accelerators})
    assert machines_paid(priced, gpus) == machines


def test_the_price_of_a_server_is_that_of_all_its_gpus(tmp_path: Path) -> None:
    file = tmp_path / "card.yaml"
    file.write_text(
        "kind: hardware\ndescription: d\naccelerator: G\naccelerators: 1\nmemory_gib: 8\n"
        "price_per_hour: 1.2\ncurrency: USD\nprice_source: s\nprice_as_of: 2026-01-31\n"
    )
    profile = load_profile("demo_cpu_2core")
    assert price_of(str(file), profile)[0] == 1.2
    price, note = price_of(str(file), profile, 3)
    assert price == pytest.approx(3.6)
    assert note == "costs in USD at 1.2 per hour of card, 3 of them (s, as of 2026-01-31)"
