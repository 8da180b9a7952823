"""What counts as "beyond rounding" when an adapter is merged."""

from __future__ import annotations

import math
from typing import Any

import pytest

from registry.errors import StageFailed
from tasks.engines.merge_check import check, compared, cut_logits


def figures(value: float) -> dict[str, Any]:
    return {"max_relative": value, "mean_relative": value}


EXACT, WITHIN, CUT = figures(1e-5), figures(0.052), figures(0.11)


def test_within_rounding_passes() -> None:
    check(EXACT, WITHIN, CUT, "folder")
    check(figures(0.0), figures(0.0), figures(0.0), "stored in float32")


@pytest.mark.parametrize(
    ("float32", "stored", "message"),
    [
        (figures(1e-3), WITHIN, "differ in float32"),
        (figures(math.nan), WITHIN, "differ in float32"),
        (EXACT, figures(0.12), "beyond rounding"),
        (EXACT, figures(math.nan), "beyond rounding"),
    ],
)
def test_anything_more_is_refused(
    float32: dict[str, Any], stored: dict[str, Any], message: str
) -> None:
    with pytest.raises(StageFailed, match=message):
        check(float32, stored, CUT, "folder")


def test_cutting_errs_more_than_rounding_and_puts_the_weights_back() -> None:
    import torch

    class Linear(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Embedding(50, 40)
            self.head = torch.nn.Linear(40, 50)

        def forward(self, input_ids: Any) -> Any:
            return type("Out", (), {"logits": self.head(self.layer(input_ids))})()

    torch.manual_seed(0)
    model = Linear()
    before = [weight.clone() for weight in model.parameters()]
    with torch.no_grad():
        wanted = model(torch.arange(50)[None]).logits[0]
    cut = compared(wanted, cut_logits(model, [list(range(50))]))
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    with torch.no_grad():
        for weight in model.parameters():
            weight.copy_(weight.to(torch.bfloat16).float())
        rounded = compared(wanted, model(torch.arange(50)[None]).logits[0])
    assert 0 < rounded["mean_relative"] < cut["mean_relative"]
