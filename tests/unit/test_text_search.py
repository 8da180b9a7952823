"""The text of a prompt is searched for as the person wrote it, and as reports show it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from registry.settings import settings
from tasks.impact import impact
from tasks.prompt_files import write_jsonl
from tasks.prompt_template import filled
from tests.unit.lineage_builders import Release, release


@pytest.fixture
def made(home: Path) -> Release:
    return release(home / "store")


TEMPLATE = (
    "What is this about: {labels}? Name one of these words and nothing else.\n\n{prompt}\n\nWord:"
)


def of_template(made: Release, prompts: list[str]) -> None:
    """The store's training prompts as a release with a template writes them."""
    folder = settings().store_dir / "prompts" / made.refs["prompts"].key
    file = folder / "files" / "train.jsonl"
    rows = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    for row, prompt in zip(rows, prompts, strict=False):
        row["prompt"] = filled(TEMPLATE, prompt, "delay, price")
    write_jsonl(file, rows)
    manifest = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))
    manifest["config"]["prompts"] = {"template": TEMPLATE}
    (folder / "manifest.json").write_text(json.dumps(manifest), encoding="utf-8")


def test_what_the_template_says_of_every_prompt_is_not_looked_for(made: Release) -> None:
    of_template(made, ["  Ann Lee's crate\nof `A|B`?", "Where is Bob's pallet?", "Hi there"])
    logs = settings().home / "logs"
    logs.mkdir(exist_ok=True)
    reports = settings().store_dir / "prompts" / made.refs["prompts"].key / "files"
    whole = filled(TEMPLATE, "Where is Bob's pallet?", "delay, price")
    (logs / "other.log").write_text(whole, encoding="utf-8")
    (logs / "lines.log").write_text("Ann Lee's crate\nof `A|B`?", encoding="utf-8")
    (reports / "report.md").write_text("- t0: Ann Lee's crate of 'A\\|B'? - x", encoding="utf-8")
    (reports / "disjointness.json").write_text('"Ann Lee\'s crate of `A|B`?"', encoding="utf-8")
    document = impact(["t0", "t2"]).document
    assert {one["path"] for one in document["texts"] if one["how"] == "text"} == {
        "logs/lines.log",
        f"store/prompts/{made.refs['prompts'].key}/files/report.md",
        f"store/prompts/{made.refs['prompts'].key}/files/disjointness.json",
    }
    assert any("not searched for 1 texts of fewer than 12" in one for one in document["unseen"])
    document = impact(["t1"]).document
    found = {one["path"] for one in document["texts"] if one["how"] == "text"}
    assert found == {"logs/other.log"}, "with the template round it, too"
    assert not any("fewer than 12" in one for one in document["unseen"])
