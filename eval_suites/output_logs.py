"""Output lengths from production logs, so that a load test writes answers as long as real ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from eval_suites.load import OUTPUT_QUANTILES, LoadProfile, OutputLog
from registry.errors import UserError


def with_lengths(profile: LoadProfile) -> LoadProfile:
    """The profile with every log replaced by the quantiles of its lengths.

    So the profile's digest covers what the log said. Raises `UserError` naming file and column.
    """
    if not any(isinstance(one.output, OutputLog) for one in profile.scenarios.values()):
        return profile
    scenarios = {
        name: one.model_copy(update={"output": lengths(one.output)})
        if isinstance(one.output, OutputLog)
        else one
        for name, one in profile.scenarios.items()
    }
    return profile.model_copy(update={"scenarios": scenarios})


def lengths(log: OutputLog) -> list[int]:
    """At most `OUTPUT_QUANTILES` of the column's values, at equal distances in their order."""
    path = Path(log.file)
    column = _column(path, log.column)
    values = np.array([one if isinstance(one, int | float) else np.nan for one in column], float)
    odd = np.flatnonzero(~np.isfinite(values) | (values < 1) | (values != np.round(values)))
    if len(odd):
        raise UserError.at(
            f"{path}: {log.column}",
            f"{len(odd)} of {len(values)} values are no whole number from 1 on, the first in row "
            f"{odd[0] + 1}: {column[odd[0]]!r}",
            "leave out requests without an answer",
        )
    if not len(values):
        raise UserError.at(f"{path}: {log.column}", "holds no length", "name a log with requests")
    ordered = np.sort(values).astype(int)
    if len(ordered) <= OUTPUT_QUANTILES:
        return [int(value) for value in ordered]
    places = (np.arange(OUTPUT_QUANTILES) + 0.5) / OUTPUT_QUANTILES * len(ordered)
    return [int(value) for value in ordered[places.astype(int)]]


def _column(path: Path, name: str) -> list[Any]:
    import pandas as pd

    readers: dict[str, Any] = {
        ".csv": pd.read_csv,
        ".parquet": pd.read_parquet,
        ".jsonl": lambda file: pd.read_json(file, lines=True),
    }
    if path.suffix.lower() not in readers:
        raise UserError.at(path, "is no .csv, .jsonl or .parquet file", "convert the log")
    try:
        frame = readers[path.suffix.lower()](path)
    except FileNotFoundError:
        raise UserError.at(path, "does not exist", "name the log of output lengths") from None
    except (OSError, ValueError) as error:
        raise UserError.at(path, f"cannot be read: {error}") from None
    if name not in frame.columns:
        has = ", ".join(map(str, frame.columns)) or "none"
        raise UserError.at(f"{path}: {name}", f"no such column (it has: {has})")
    numbers = pd.to_numeric(frame[name], errors="coerce")
    return [
        number if pd.notna(number) else written
        for number, written in zip(numbers.tolist(), frame[name].tolist(), strict=True)
    ]
