"""Which column of a request log is which field: by the names that logs use, or as a person says."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping
from pathlib import Path

from recipes.loader import read_yaml
from registry.errors import Problem, UserError

NEEDED = ("arrived", "prompt_tokens", "output_tokens")
NAMES: dict[str, tuple[str, ...]] = {
    "arrived": (
        "arrived", "arrived_at", "arrival", "arrival_time", "arrival_timestamp", "received_at",
        "start", "start_time", "started", "started_at", "request_time", "request_start_time",
        "timestamp", "ts", "time", "datetime", "created", "created_at",
    ),
    "prompt_tokens": (
        "prompt_tokens", "input_tokens", "context_tokens", "contexttokens", "request_tokens",
        "num_prompt_tokens", "n_prompt_tokens", "prompt_len", "prompt_length", "input_len",
        "input_length", "in_tokens", "tokens_in",
    ),
    "output_tokens": (
        "output_tokens", "completion_tokens", "generated_tokens", "generatedtokens",
        "response_tokens", "num_generation_tokens", "num_output_tokens", "n_output_tokens",
        "output_len", "output_length", "out_tokens", "tokens_out",
    ),
    "latency": (
        "latency", "latency_s", "latency_ms", "e2el", "e2el_s", "e2el_ms", "e2e_latency",
        "e2e_latency_s", "e2e_latency_ms", "duration", "duration_s", "duration_ms",
        "response_time", "response_time_ms", "elapsed", "elapsed_s", "elapsed_ms",
    ),
    "ended": (
        "ended", "ended_at", "end", "end_time", "finished", "finished_at", "finish_time",
        "completed_at",
    ),
    "ttft": ("ttft", "ttft_s", "ttft_ms", "time_to_first_token", "time_to_first_token_ms"),
    "segment": ("segment", "scenario"),
    "id": ("request_id", "id"),
    "status": ("status", "status_code"),
    "prefix_id": ("prefix_id", "prefix_hash", "system_prompt_id"),
    "prefix_tokens": (
        "prefix_tokens", "shared_prefix_tokens", "prefix_len", "cached_tokens",
        "num_cached_tokens",
    ),
    "prompt": ("messages", "prompt", "prompt_text"),
}  # fmt: skip
"""Names by field, the likelier first; compared in small letters with `_` between words."""

HOLDERS = {
    "", "usage", "response", "body", "request", "result", "prompt_tokens_details", "metrics",
    "input_tokens_details", "metadata",
}  # fmt: skip
"""Objects of an OpenAI-style line in which a field may lie."""


def chosen(columns: Iterable[str], asked: Mapping[str, str], where: str) -> dict[str, str]:
    """`{field: column}`, dotted where it lies in an object. Raises `UserError`.

    What a person asked for goes before what is found by name, and must be there.
    """
    there = list(columns)
    problems = []
    for field, column in asked.items():
        if column not in there:
            near = difflib.get_close_matches(column, there, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"it has: {_listed(there)}"
            problems.append(Problem(f"{where}: {field}={column}", "no such column", hint))
    found = {field: column for field, column in asked.items() if column in there}
    for field, names in NAMES.items():
        named = _by_name(there, names) if field not in asked else None
        if named is not None:
            found[field] = named
    missing = [field for field in NEEDED if field not in found and field not in asked]
    if missing:
        words = " ".join(f"--columns {field}=COLUMN" for field in missing)
        problems.append(
            Problem(
                where,
                f"no column for {', '.join(missing)} (it has: {_listed(there)})",
                f"name it: {words}",
            )
        )
    if problems:
        raise UserError(problems)
    return found


def _by_name(columns: list[str], names: tuple[str, ...]) -> str | None:
    ranked = []
    for column in columns:
        *holders, last = [_plain(part) for part in column.split(".")]
        if last in names and set(holders) <= HOLDERS:
            ranked.append((names.index(last), len(holders), column))
    return min(ranked)[2] if ranked else None


def _plain(name: str) -> str:
    return re.sub(r"[^a-z0-9]+", "_", name.strip().lower()).strip("_")


def _listed(columns: list[str]) -> str:
    shown = ", ".join(columns[:40]) or "none"
    return f"{shown}, ..." if len(columns) > 40 else shown


def read_mapping(words: Iterable[str]) -> dict[str, str]:
    """Of `FIELD=COLUMN[,FIELD=COLUMN...]` and YAML files that hold such pairs."""
    found: dict[str, str] = {}
    problems = []
    for word in words:
        if word.endswith((".yaml", ".yml")) and "=" not in word:
            pairs = [(str(key), str(value)) for key, value in read_yaml(Path(word)).items()]
        else:
            pairs = []
            for part in word.split(","):
                field, equals, column = part.partition("=")
                if not equals or not column.strip():
                    problems.append(
                        Problem(f"--columns {part}", "is not FIELD=COLUMN", "e.g. arrived=ts")
                    )
                else:
                    pairs.append((field, column))
        for field, column in pairs:
            if field.strip() not in NAMES:
                known = f"known: {', '.join(NAMES)}"
                problems.append(Problem(f"--columns {field}={column}", "no such field", known))
            elif found.setdefault(field.strip(), column.strip()) != column.strip():
                problems.append(Problem(f"--columns {field}={column}", "the field stands twice"))
    if problems:
        raise UserError(problems)
    return found


UNITS = {"s": 1e6, "ms": 1e3, "us": 1.0, "ns": 1e-3}
"""Microseconds of each."""


def unit_of_name(column: str) -> str:
    """The unit that a duration's name ends with; seconds where it says none."""
    last = _plain(column.rpartition(".")[2]).rpartition("_")[2]
    return last if last in UNITS else "s"
