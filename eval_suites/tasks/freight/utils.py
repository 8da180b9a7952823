"""Functions of `freight.yaml`: how an item is asked and scored."""

from __future__ import annotations

import json
from typing import Any

from eval_suites.scoring import score


def prompt(doc: dict[str, Any]) -> str:
    """The user message as it is: a function, because a template would be rendered and stripped."""
    return str(doc["prompt"])


def target(doc: dict[str, Any]) -> str:
    """For the harness's log alone; scoring reads the reference itself."""
    return json.dumps(doc["reference"], ensure_ascii=False)


def process_results(doc: dict[str, Any], results: list[str]) -> dict[str, float]:
    return score(results[0], doc["reference"], doc["prompt"])
