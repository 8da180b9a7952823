"""Functions of `intent_label.yaml`: how an item is asked and scored."""

from __future__ import annotations

from typing import Any

from eval_suites.scoring import label_named, score_label


def prompt(doc: dict[str, Any]) -> str:
    """The user message as it is: a function, because a template would be rendered and stripped."""
    return str(doc["prompt"])


def target(doc: dict[str, Any]) -> str:
    return str(doc["reference"]["intent"])


def process_results(doc: dict[str, Any], results: list[str]) -> dict[str, float]:
    named = {"label_named": label_named(results[0], doc["reference"])}
    return score_label(results[0], doc["reference"]) | named
