"""What may stand in a suite: an accuracy suite, a load profile (load.py), a policy (policy.py)."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from eval_suites.load import LoadProfile
from eval_suites.policy import Policy
from recipes.schema import Sampling, Written


class AccuracySuite(Written):
    """kind: accuracy. An lm-eval task over the eval part, scored item by item."""

    kind: Literal["accuracy"]
    description: str
    task: str = Field(
        pattern=r"^[a-z0-9_]+/[a-z0-9_]+\.yaml$",
        description="lm-eval task file below `eval_suites/tasks/`.",
    )
    items: int = Field(gt=0, description="Items asked; fewer scored is INVALID.")
    metrics: list[str] = Field(min_length=1)
    sampling: Sampling
    concurrency: int = Field(default=8, gt=0)
    smoke: bool = Field(default=False, description="A smoke suite can never promote.")


KINDS: dict[str, type[Written]] = {
    "accuracy": AccuracySuite,
    "load": LoadProfile,
    "policy": Policy,
}

__all__ = ["KINDS", "AccuracySuite", "LoadProfile", "Policy"]
