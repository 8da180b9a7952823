"""What lm-eval's own command writes is evidence, with nothing else of this project around it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from eval_suites.gating import judge_folders
from registry.evidence_folders import read_folder
from registry.outcome import Verdict

TASK = """\
task: echo
dataset_path: json
dataset_kwargs: {data_files: {test: ITEMS}}
test_split: test
output_type: generate_until
doc_to_text: "{{prompt}}"
doc_to_target: "{{answer}}"
generation_kwargs: {until: ["\\n"]}
metric_list: [{metric: exact_match, aggregation: mean, higher_is_better: true}]
metadata: {version: 1}
"""

POLICY = """\
kind: policy
description: for a test
gates:
  - {name: kept, metric: exact_match, kind: retention, reference: teacher}
  - {name: good, metric: exact_match, kind: floor, margin: 0.8}
"""


def run_lm_eval(folder: Path, *words: str) -> None:
    """The dummy model answers every question with `lol`."""
    subprocess.run(
        [
            *(sys.executable, "-m", "lm_eval", "--model", "dummy", "--tasks", "echo"),
            *("--include_path", str(folder.parent), "--output_path", str(folder)),
            *("--log_samples", *words),
        ],
        check=True,
        capture_output=True,
        timeout=300,
    )


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("lm-eval")
    rows = [{"prompt": f"q{i}", "answer": "lol" if i % 10 else "no"} for i in range(200)]
    items = root / "items.jsonl"
    items.write_text("".join(json.dumps(row) + "\n" for row in rows))
    (root / "echo.yaml").write_text(TASK.replace("ITEMS", str(items)))
    (root / "policy.yaml").write_text(POLICY)
    run_lm_eval(root / "teacher")
    run_lm_eval(root / "limited", "--limit", "150")
    return root


def test_scores_and_settings_are_read(runs: Path) -> None:
    found = read_folder(runs / "teacher")
    assert found.source == "lm-eval"
    assert found.unreadable == {}
    assert found.accuracy is not None
    assert found.items is not None
    assert (found.accuracy.items_asked, found.accuracy.items_scored) == (200, 200)
    assert found.items.metric("exact_match").mean() == pytest.approx(0.9)
    assert found.accuracy.settings["num_fewshot"] == 0


def test_a_gate_on_them_and_nothing_else(runs: Path) -> None:
    teacher = {"teacher": runs / "teacher"}
    same = judge_folders(str(runs / "policy.yaml"), {"c": runs / "teacher"}, teacher)
    assert same.verdict is Verdict.PASS
    assert same.settings == "recorded"
    assert not same.promotable  # no bundle is named
    (kept, good) = same.candidates[0].gates
    assert kept.bound is not None
    assert kept.bound > 0.97
    assert good.candidate == pytest.approx(0.9)


def test_a_limited_run_is_not_compared(runs: Path) -> None:
    teacher = {"teacher": runs / "teacher"}
    limited = judge_folders(str(runs / "policy.yaml"), {"c": runs / "limited"}, teacher)
    assert limited.verdict is Verdict.INVALID
    assert "items_asked 150 against 200" in limited.candidates[0].gates[0].reason
    assert limited.candidates[0].gates[1].result is Verdict.INCONCLUSIVE
