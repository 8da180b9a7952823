"""The command line: exit statuses, messages without tracebacks, JSON as the last line."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from registry.settings import CHECKOUT

TINY = "tests/recipes/release_tiny.yaml"


def pilotage(home: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "flows.cli", *words],
        cwd=CHECKOUT,
        env={**os.environ, "PILOTAGE_HOME": str(home)},
        capture_output=True,
        text=True,
        timeout=120,
    )


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["release", "freight_dmo"], "did you mean 'freight_demo'?"),
        (["release", "none/such.yaml"], "no such file"),
        (["release", TINY, "--set", "distill.epochs=-1"], "epochs: Input should be greater than 0"),
        (["release", TINY, "--set", "epochs"], "is not KEY.KEY=VALUE"),
        (["release", TINY, "--set", "nothing=1"], "nothing: unknown key"),
        (["release", TINY, "--prompts", "README.md"], "no answer could be scored"),
        (
            ["release", TINY, "--prompts", "none.csv", "--set", "prompts.mapping.reference=x"],
            "no such file",
        ),
        (["release", TINY, "--set", "teacher.url=localhost:8000"], "must be http(s)://HOST/PATH"),
        (["validate", "README.md"], "README.md"),
        (["validate", "requirements"], "no YAML file there"),
        (["serve", "nothing"], "is not MODEL@ALIAS"),
        (["serve", "nothing@champion"], "no such database"),
        (["release", TINY, "--set", "distill.epochs=.inf"], "value is not YAML that a recipe"),
        (["release", TINY, "--set", 'distill.lora.x="\\ud800"'], "value is not YAML that a recipe"),
        (["release", TINY, "--set", "load.rates=[1e308]"], "at most 10000 requests/s"),
        (["release", "~nobody-here/a.yaml"], "Could not determine home directory"),
        (["release", TINY, "--set", "accuracy.task=no/no.yaml"], "no such lm-eval task"),
        (["validate", "/dev/zero"], "is no regular file"),
    ],
)
def test_a_persons_mistake_is_a_message_and_status_2(
    home: Path, words: list[str], message: str
) -> None:
    answer = pilotage(home, *words)
    assert answer.returncode == 2, answer.stderr
    assert message in answer.stderr
    assert "Traceback" not in answer.stderr
    assert answer.stdout == ""


@pytest.mark.parametrize("words", [["nothing"], ["release"], ["release", TINY, "--nothing"]])
def test_wrong_use_of_the_command_line_is_status_2(home: Path, words: list[str]) -> None:
    answer = pilotage(home, *words)
    assert answer.returncode == 2
    assert "Traceback" not in answer.stderr


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["rollback", "m", "--reason", ""], "--reason: is empty"),
        (["rollback", "m", "--reason", "  "], "--reason: is empty"),
        (["rollback", "m@champion", "--reason", "x"], "is no name of a registered model"),
        (["rollback", "", "--reason", "x"], "is no name of a registered model"),
        (["rollback", "a/b", "--reason", "x"], "is no name of a registered model"),
        (["promote", "fr\udcff"], "BUNDLE: 'fr\\udcff' is no text"),
        (["promote", "a/b@1"], "is not MODEL@ALIAS"),
        (["why", "fr\udcff@champion"], "is no text"),
        (["serve", "fr\udcff@champion", "--print"], "is no text"),
    ],
)
def test_words_that_name_no_model_and_no_reason(home: Path, words: list[str], message: str) -> None:
    done = pilotage(home, *words)
    assert done.returncode == 2, done.stderr
    assert message in done.stderr
    assert "Traceback" not in done.stderr


def test_a_missing_serve_environment_names_the_command_that_repairs_it(home: Path) -> None:
    os.environ["PILOTAGE_SERVE_PYTHON"] = str(home / "no" / "python")
    try:
        answer = pilotage(home, "release", TINY, "--dry-run")
    finally:
        del os.environ["PILOTAGE_SERVE_PYTHON"]
    assert answer.returncode == 2
    assert "make env" in answer.stderr


def test_a_setting_that_cannot_be_read_is_named(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PILOTAGE_THREADS", "many")
    answer = pilotage(home, "recipes")
    assert answer.returncode in (0, 2)
    answer = pilotage(home, "release", TINY, "--dry-run")
    assert answer.returncode == 2
    assert "PILOTAGE_THREADS" in answer.stderr
    assert "Traceback" not in answer.stderr


def test_a_home_that_cannot_be_made_is_named(home: Path) -> None:
    home.parent.mkdir(parents=True, exist_ok=True)
    home.write_text("a file, not a folder")
    answer = pilotage(home, "release", TINY, "--dry-run")
    assert answer.returncode == 2, answer.stderr
    assert f"PILOTAGE_HOME={home}" in answer.stderr
    assert "Traceback" not in answer.stderr


def test_a_dry_run_shows_the_plan_and_makes_nothing(home: Path) -> None:
    answer = pilotage(home, "release", TINY, "--dry-run", "--json")
    assert answer.returncode == 0, answer.stderr
    plan = json.loads(answer.stdout.splitlines()[-1])
    assert plan["to_be_made"] == len(plan["stages"]) > 10
    assert all(not stage["reused"] for stage in plan["stages"])
    assert plan["estimate_seconds"] is None
    assert not (home / "store").exists()


def test_recipes_as_json(home: Path) -> None:
    listed = json.loads(pilotage(home, "recipes", "--json").stdout.splitlines()[-1])
    assert {"kind", "name", "description", "file"} == set(listed[0])
    assert {"release", "teacher", "distill", "quantize", "draft", "serve"} <= {
        row["kind"] for row in listed
    }


def test_validate_counts_what_it_read(home: Path) -> None:
    answer = pilotage(home, "validate", "recipes", "eval_suites")
    assert answer.returncode == 0
    assert answer.stdout.endswith("files are valid\n")
