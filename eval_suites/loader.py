"""Find and validate suites; the rules are those of `recipes.loader`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from eval_suites.schema import KINDS, AccuracySuite, LoadProfile, Policy
from recipes import loader

SUITES_DIR = Path(__file__).resolve().parent
TASKS_DIR = SUITES_DIR / "tasks"


def load_accuracy(name: str, overrides: Mapping[str, Any] | None = None) -> AccuracySuite:
    return loader.load(name, "accuracy", AccuracySuite, root=SUITES_DIR, overrides=overrides)


def load_profile(name: str, overrides: Mapping[str, Any] | None = None) -> LoadProfile:
    """With the lengths of the logs that its scenarios name. Raises `UserError`."""
    profile = loader.load(name, "load", LoadProfile, root=SUITES_DIR, overrides=overrides)
    # Reading a log takes pandas; a profile without one needs none.
    from eval_suites.output_logs import with_lengths

    return with_lengths(profile)


def load_policy(name: str, overrides: Mapping[str, Any] | None = None) -> Policy:
    return loader.load(name, "policy", Policy, root=SUITES_DIR, overrides=overrides)


def shipped(kind: str) -> list[str]:
    """Names of the suites of one kind that come with the checkout."""
    return loader.shipped(kind, SUITES_DIR)


__all__ = ["KINDS", "TASKS_DIR", "load_accuracy", "load_policy", "load_profile", "shipped"]
