"""The shape of the checkout: light imports, names that shadow nothing, documented recipes."""

from __future__ import annotations

import importlib.metadata
import re
import subprocess
import sys
from pathlib import Path

import pytest

from eval_suites import loader as suites
from eval_suites.schema import KINDS as SUITE_KINDS
from recipes import loader
from recipes.schema import ReleaseRecipe
from registry.settings import CHECKOUT

HEAVY = ("torch", "transformers", "vllm", "llmcompressor", "mlflow", "lm_eval", "peft")


@pytest.mark.parametrize(
    "module",
    [
        "flows",
        "flows.cli",
        "flows.forms",
        # Each of these imports the release's or the promotion's modules, and its own.
        "flows.nightly, flows.maintenance",
        "flows.teacher, flows.distill, flows.quantize, flows.draft",
        "flows.benchmark, flows.gate, flows.promote, flows.rollback",
        "flows.prompts, flows.accuracy",
        "eval_suites.gates",
    ],
)
def test_importing_the_flows_imports_no_model_library(module: str) -> None:
    code = f"import sys, {module}; print([n for n in {HEAVY!r} if n in sys.modules])"
    answer = subprocess.run(
        [sys.executable, "-c", code], cwd=CHECKOUT, capture_output=True, text=True, check=True
    )
    assert answer.stdout.strip() == "[]"


def test_recipes_suites_and_gates_import_no_prefect() -> None:
    modules = "recipes.loader, eval_suites.gates, registry.store"
    code = f"import sys, {modules}; print('prefect' in sys.modules)"
    answer = subprocess.run(
        [sys.executable, "-c", code], cwd=CHECKOUT, capture_output=True, text=True, check=True
    )
    assert answer.stdout.strip() == "False"


def test_no_module_carries_the_name_of_an_installed_library() -> None:
    installed = set(importlib.metadata.packages_distributions())
    ours = {"flows", "tasks", "recipes", "eval_suites", "registry"}
    modules = [*(CHECKOUT / "flows").glob("*.py"), *(CHECKOUT / "tasks").rglob("*.py")]
    taken = {path.stem for path in modules} & (installed - ours - {"__init__"})
    assert taken == set()


def test_every_release_recipe_is_listed() -> None:
    """In the README what has run somewhere, in docs/capacity.md what has not yet."""
    ran: dict[bool, set[str]] = {True: set(), False: set()}
    for name in loader.shipped("release"):
        ran[bool(loader.load(name, "release", ReleaseRecipe).run_on)].add(name)
    for has_run, file in ((True, "README.md"), (False, "docs/capacity.md")):
        _, _, text = (CHECKOUT / file).read_text().rpartition("## Recipes for GPUs")
        listed = set(re.findall(r"^\| `([a-z0-9_]+)` \|", text, flags=re.MULTILINE))
        assert listed == ran[has_run], file


@pytest.mark.parametrize("kind", ["release", "teacher", "distill"])
def test_a_recipe_begins_with_the_command_that_runs_it(kind: str) -> None:
    for name in loader.shipped(kind):
        first = loader.find(name, kind).read_text().splitlines()[0]
        assert first.startswith("# pilotage release "), name


def test_every_suite_kind_has_files() -> None:
    assert all(suites.shipped(kind) for kind in SUITE_KINDS)


def test_the_pinned_lists_say_how_they_were_made() -> None:
    for path in sorted((CHECKOUT / "requirements").glob("*-c*.txt")):
        if path.name.startswith("overrides"):
            continue
        lines = path.read_text().splitlines()
        assert lines[0].startswith("# Made by `make lock` from "), path.name
        pins = [line for line in lines if not line.startswith("#")]
        assert pins
        assert all(re.fullmatch(r"[A-Za-z0-9_.-]+(\[\w+\])?==[^ ;]+", pin) for pin in pins), path


def test_nothing_of_this_machine_is_in_the_checkout() -> None:
    tracked = subprocess.run(
        ["git", "ls-files"], cwd=CHECKOUT, capture_output=True, text=True, check=True
    ).stdout.split()
    home = str(Path.home()) + "/"
    found = []
    for name in tracked:
        path = CHECKOUT / name
        if path.is_file() and home in path.read_text(encoding="utf-8", errors="ignore"):
            found.append(name)
    assert found == []


def test_make_help_names_every_target() -> None:
    text = (CHECKOUT / "Makefile").read_text()
    named = re.findall(r"^#   make ([\w-]+)", text, flags=re.MULTILINE)
    (phony,) = re.findall(r"^\.PHONY: (.*)$", text, flags=re.MULTILINE)
    assert sorted([*named, "help"]) == sorted(phony.split())
    for target in phony.split():
        assert re.search(rf"^{target}:", text, flags=re.MULTILINE), target
