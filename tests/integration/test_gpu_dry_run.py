"""Release recipes for GPUs as a dry run on small stand-ins: the wiring, and nothing else."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from registry.errors import UserError
from registry.settings import settings
from tasks.planning import plan, resolve

# One with a teacher from a folder and a draft, one with a teacher behind a URL.
RELEASES = ["qwen3_32b_to_8b_nvidia_h20", "qwen2_5_7b_nvidia_a10"]


@pytest.fixture(scope="module")
def stand_in(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tasks.engines import random_llama

    folder = tmp_path_factory.mktemp("stand-in")
    random_llama.make({"out": str(folder), "seed": 0})
    return folder


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("prompts") / "prompts.jsonl"
    labels = "abcd"
    rows = [
        {"prompt": f"what of number {n * 7919}?", "segment": labels[n % 4], "reference": "a"}
        for n in range(7000)
    ]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return file


@pytest.mark.parametrize("name", RELEASES)
def test_every_stage_is_planned_and_none_started(
    name: str, stand_in: Path, prompts: Path, home: Path
) -> None:
    if not settings().serve_python.exists():
        pytest.skip("no serve environment: `make env` builds it")
    given = [f"distill.student.path={stand_in}"]
    if resolve(name).teacher.model is not None:
        given.append(f"teacher.model.path={stand_in}")
    todo = plan(resolve(name, given, str(prompts)))
    candidates = len(todo.resolved.release.candidates)
    names = [stage.name for stage in todo.stages()]
    assert names.count("serving") == names.count("latency") == candidates
    assert names.count("accuracy") == candidates + 1
    assert not (home / "store").exists()


def test_prompts_that_are_not_there_name_the_setting(stand_in: Path, home: Path) -> None:
    given = [f"distill.student.path={stand_in}", f"teacher.model.path={stand_in}"]
    with pytest.raises(UserError, match=r"prompts\.jsonl: no such file\s.*--prompts"):
        plan(resolve("qwen3_32b_to_8b_nvidia_h20", given))
