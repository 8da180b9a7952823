"""`pilotage compare` around the turns: bundles by name, folders, exit status, what it prints."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from flows.bench_rendering import RATIOS, compare_text
from flows.cli import app
from registry.bundle import Bundle
from registry.errors import InfrastructureError, UserError
from tasks import bundles, comparing, measured_folders
from tasks.comparing import Compared, compare
from tasks.engines.load_prompts import word_tokenizer
from tests.unit.turn_builders import World, bundle, written

KNOWN = {"a@champion": bundle("a"), "b@champion": bundle("b", 3)}
RATE = 5.0


@pytest.fixture(autouse=True)
def known_bundles(monkeypatch: pytest.MonkeyPatch) -> None:
    def named(reference: str) -> Bundle:
        if reference not in KNOWN:
            raise UserError.at(reference, "no such model or alias")
        return KNOWN[reference]

    monkeypatch.setattr(measured_folders, "bundle_named", named)
    monkeypatch.setattr(bundles, "weights_as_gated", lambda bundle, reference: None)
    monkeypatch.setattr(bundles, "engine_version", lambda: "1")


def load(folder: Path, **changes: Any) -> str:
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "load.yaml"
    file.write_text(yaml.safe_dump(written(**changes).model_dump(mode="json")))
    return str(file)


def compared(tmp_path: Path, world: World, repeats: int = 3, **changes: Any) -> Compared:
    return compare(
        "a@champion", "b@champion", load(tmp_path), RATE, repeats, serve=world.serve, **changes
    )


def prompts(folder: Path, count: int) -> Path:
    file = folder / "prompts.jsonl"
    rows = [{"id": n, "prompt": f"question number {n}"} for n in range(count)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def test_two_bundles_in_turn_below_the_home(home: Path, tmp_path: Path) -> None:
    world = World({"a": 0.02, "b-3": 0.014})
    found = compared(tmp_path, world)
    assert found.exit_status == 0
    assert world.starts == ["a", "b-3"] * 3
    assert found.folder.parent == home / "compare"
    assert found.folder.name.startswith("load-")
    document = found.document
    assert (document["a"], document["usable_repeats"]) == ("a@champion", 3)
    assert len({turn["bundle"] for turn in document["turns"]}) == 2
    shown = compare_text(document)
    assert all(words in shown for words in RATIOS.values())
    assert "3 of 3 repeats count" in shown
    assert "TPOT P50 of A: largest over smallest" in shown
    assert "2.5" in shown, "tokens per step of B"


def test_fewer_than_two_usable_repeats_are_inconclusive(home: Path, tmp_path: Path) -> None:
    found = compared(tmp_path, World(), repeats=1)
    assert found.exit_status == 11
    assert "nothing can be said" in compare_text(found.document)
    void = compared(tmp_path, World(hit_rates=(0.0, 0.9, 0.0, 0.9)), repeats=2)
    assert void.exit_status == 11
    shown = compare_text(void.document)
    assert "0 of 2 repeats count" in shown
    assert "turn 01-b is void" in shown
    assert "no repeat was measured" in shown


def test_a_stopped_one_goes_on_and_a_finished_one_is_put_aside(home: Path, tmp_path: Path) -> None:
    with pytest.raises(InfrastructureError):
        compared(tmp_path, World(dies_after=7))
    world = World()
    found = compared(tmp_path, world)
    assert world.starts == ["b-3", "a", "b-3"]
    first = (found.folder / "first_prompt").read_text()
    again = World()
    assert compared(tmp_path, again).folder == found.folder
    assert again.starts == ["a", "b-3"] * 3
    assert (found.folder / "first_prompt").read_text() != first
    aside = [path for path in found.folder.parent.iterdir() if "-until-" in path.name]
    assert [(path / "first_prompt").read_text() for path in aside] == [first]


def test_another_comparison_is_not_mixed_in(home: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    with pytest.raises(InfrastructureError):
        compared(tmp_path, World(dies_after=1), out=out)
    with pytest.raises(UserError, match=r"not finished \(of another a, b\)"):
        compare("b@champion", "a@champion", load(tmp_path), RATE, 3, out=out)
    strange = tmp_path / "strange"
    strange.mkdir()
    (strange / "thesis.tex").write_text("")
    with pytest.raises(UserError, match="something else than a measurement"):
        compared(tmp_path, World(), out=strange)
    with pytest.raises(UserError, match="is no folder"):
        compared(tmp_path, World(), out=strange / "thesis.tex")
    (out / "identity.json").write_text("{")
    with pytest.raises(UserError, match="cannot be read"):
        compared(tmp_path, World(), out=out)


def test_too_few_prompts_are_found_before_anything_starts(home: Path, tmp_path: Path) -> None:
    world = World()
    with pytest.raises(UserError, match="holds 100 different prompts, 648 are needed"):
        compared(tmp_path, world, prompts=prompts(tmp_path, 100))
    assert world.starts == []
    assert not (home / "compare").exists()
    word_tokenizer(KNOWN["a@champion"].target.path)
    assert compared(tmp_path, world, prompts=prompts(tmp_path, 648)).exit_status == 0
    asked = [row["messages"][0]["content"] for batch in world.batches for row in batch.rows]
    assert asked[0] == "question number 0"
    assert len(asked) == 2 * len(set(asked)) == 2 * 648


def test_mistakes_are_named(home: Path, tmp_path: Path) -> None:
    closed = load(tmp_path / "closed", search=None, concurrencies=[1, 2])
    bare = load(tmp_path / "bare", scenarios={})
    for profile, message in [(closed, "is a closed loop"), (bare, "--prompts")]:
        with pytest.raises(UserError, match=message):
            compare("a@champion", "b@champion", profile, RATE, 2)
    with pytest.raises(UserError, match="nobody@champion: no such model"):
        compare("a@champion", "nobody@champion", load(tmp_path), RATE, 2)


def test_the_command_prints_a_table_or_one_line_of_json(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World()
    monkeypatch.setattr(
        comparing, "compare_bundles", _with(comparing.compare_bundles, serve=world.serve)
    )
    words = ["compare", "a@champion", "b@champion", "--load", load(tmp_path), "--rate", "5"]
    shown = CliRunner().invoke(app, [*words, "--repeats", "2"])
    assert shown.exit_code == 0, shown.output
    assert "2 of 2 repeats count" in shown.output
    answer = CliRunner().invoke(app, [*words, "--repeats", "1", "--json"])
    assert answer.exit_code == 11
    document = json.loads(answer.stdout.splitlines()[-1])
    assert document["usable_repeats"] == 1
    assert document["ratios"]["tpot_p50"]["low"] is None
    for wrong in (["--rate", "0"], ["--repeats", "0"]):
        assert CliRunner().invoke(app, [*words, *wrong]).exit_code == 2


def _with(function: Any, **fixed: Any) -> Any:
    return lambda *args, **kwargs: function(*args, **(kwargs | fixed))
