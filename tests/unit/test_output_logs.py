"""Output lengths from production logs: read with the profile, every mistake by file and column."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import pytest
import yaml

from eval_suites.loader import load_profile
from registry.errors import UserError
from tests.unit.load_builders import profile


def written(folder: Path, file: Path, column: str = "completion_tokens") -> str:
    scenario = {"unit": "words", "input": 8, "output": {"file": str(file), "column": column}}
    content = profile().model_dump(mode="json", exclude_none=True, exclude_defaults=True)
    content |= {"kind": "load", "scenarios": {"chat": scenario}, "sla": ["e2el p99 2s"]}
    path = folder / "production.yaml"
    path.write_text(yaml.safe_dump(content))
    return str(path)


@pytest.mark.parametrize("kind", ["csv", "jsonl", "parquet"])
def test_lengths_are_read_with_the_profile(tmp_path: Path, kind: str) -> None:
    frame = pd.DataFrame({"id": ["a", "b", "c", "d"], "completion_tokens": [30, 10, 10, 200]})
    log = tmp_path / f"log.{kind}"
    if kind == "csv":
        frame.to_csv(log, index=False)
    elif kind == "jsonl":
        frame.to_json(log, orient="records", lines=True)
    else:
        frame.to_parquet(log)
    found = load_profile(written(tmp_path, log))
    assert found.scenarios["chat"].output == [10, 10, 30, 200]


def test_a_long_log_becomes_its_quantiles(tmp_path: Path) -> None:
    log = tmp_path / "log.csv"
    pd.DataFrame({"completion_tokens": range(1, 50_001)}).to_csv(log, index=False)
    lengths = load_profile(written(tmp_path, log)).scenarios["chat"].output
    assert isinstance(lengths, list)
    assert len(lengths) == 1000
    assert sum(lengths) / 1000 == pytest.approx(25_000, rel=0.01)
    assert lengths[989] == pytest.approx(49_475, rel=0.01)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ([10, 0], "1 of 2 values are no whole number from 1 on, the first in row 2: 0"),
        ([10, 2.5], "the first in row 2: 2.5"),
        ([10, None], "the first in row 2: nan"),
        (["ten", 10], "the first in row 1"),
        ([], "holds no length"),
    ],
)
def test_lengths_that_are_none_are_named(tmp_path: Path, values: list[object], words: str) -> None:
    log = tmp_path / "log.csv"
    pd.DataFrame({"completion_tokens": values}).to_csv(log, index=False)
    with pytest.raises(UserError) as error:
        load_profile(written(tmp_path, log))
    assert words in str(error.value)
    assert f"{log}: completion_tokens" in str(error.value)


def test_a_log_that_is_not_there_and_a_wrong_column(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="does not exist"):
        load_profile(written(tmp_path, tmp_path / "none.csv"))
    log = tmp_path / "log.csv"
    pd.DataFrame({"tokens": [1]}).to_csv(log, index=False)
    with pytest.raises(UserError, match=r"no such column \(it has: tokens\)"):
        load_profile(written(tmp_path, log))
    with pytest.raises(UserError, match=r"is no \.csv"):
        load_profile(written(tmp_path, tmp_path / "log.txt"))
