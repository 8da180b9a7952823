"""What counts as "beyond rounding" when an adapter is merged."""

from __future__ import annotations

import math
from typing import Any

import pytest

from registry.errors import StageFailed
from tasks.engines.merge_check import check, check_losses


def figures(value: float) -> dict[str, Any]:
    return {"max_relative": value, "mean_relative": value}


EXACT = figures(1e-5)


@pytest.mark.parametrize(
    ("float32", "saved", "message"),
    [
        (figures(1e-3), EXACT, "differ in float32"),
        (figures(math.nan), EXACT, "differ in float32"),
        (EXACT, figures(1e-3), "are not those that were saved"),
        (EXACT, figures(math.nan), "are not those that were saved"),
    ],
)
def test_anything_more_is_refused(
    float32: dict[str, Any], saved: dict[str, Any], message: str
) -> None:
    check(EXACT, figures(0.0), "folder")
    with pytest.raises(StageFailed, match=message):
        check(float32, saved, "folder")


def losses(trained: float, applied: float, stored: float) -> dict[str, float]:
    return {"trained": trained, "applied": applied, "stored": stored}


def test_what_is_served_is_as_good_as_what_was_trained() -> None:
    check_losses(losses(2.0, 2.0001, 2.01), "float32", False, "folder")
    check_losses(losses(0.01, 0.0101, 0.04), "float32", False, "folder")  # small: counted in nat
    check_losses(losses(2.0, 2.09, 1.9), "bfloat16", False, "folder")
    for found, dtype, message in (
        (losses(4.7249, 4.8602, 4.8602), "float32", "loss of 4.8602, and 4.7249 when it was"),
        (losses(2.0, 1.9, 1.9), "float32", "is not read back as it was"),
        (losses(2.0, 2.2, 2.2), "bfloat16", "is not read back as it was"),
        (losses(2.0, 2.0, 2.2), "float32", "rounding lost what was learned"),
        (losses(2.0, math.nan, 2.0), "float32", "is not read back as it was"),
        (losses(2.0, 2.0, math.nan), "float32", "rounding lost what was learned"),
    ):
        with pytest.raises(StageFailed, match=message):
            check_losses(found, dtype, False, "folder")


def test_over_four_bits_the_base_in_training_was_another_one() -> None:
    check_losses(losses(2.0, 1.7, 1.71), "bfloat16", True, "folder")
    with pytest.raises(StageFailed, match="rounding lost"):
        check_losses(losses(2.0, 1.7, 2.0), "bfloat16", True, "folder")
