"""What a prompt reached, row by row; and what cannot be seen, said so."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

import tasks.impact
import tasks.prompt_rows
from flows.lineage_commands import impact as command
from registry.errors import UserError
from registry.settings import settings
from tasks.impact import MOST_IDS, impact
from tasks.prompt_files import write_jsonl
from tasks.prompt_rows import FEW, asked_ids, find_ids, find_rows, ids_of
from tasks.version_files import Registered
from tasks.why import TAG_PROMPTS
from tests.unit.lineage_builders import Release, release, text_of
from tests.unit.lineage_registry import MODEL, version_of

app = typer.Typer()
app.command()(command)


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Release:
    return release(tmp_path_factory.mktemp("template") / "store")


@pytest.fixture
def made(template: Release, home: Path) -> Release:
    """A home with one release in its store, and no registry."""
    shutil.copytree(template.store.root, home / "store")
    return template._replace(store=type(template.store)(home / "store"))


@pytest.fixture
def registry(home: Path, monkeypatch: pytest.MonkeyPatch) -> list[Registered]:
    """What the registry lists; tests append to it."""
    listed: list[Registered] = []
    monkeypatch.setattr(tasks.impact, "registered_versions", lambda: listed)
    home.mkdir(exist_ok=True)
    (home / "mlflow.db").touch()
    return listed


def reached(*words: str) -> dict[str, dict[str, int]]:
    """Rows by artifact."""
    found = impact(words).document["artifacts"]
    return {f"{one['kind']} {one['label']}".strip(): one["rows"] for one in found}


# -- row by row ------------------------------------------------------------------------------


def test_a_training_prompt_reaches_the_adapter_and_all_that_is_made_of_it(made: Release) -> None:
    one = {"train": 1}
    assert reached("t0") == {
        "prompts wo.csv": one,
        "teacher_data": one,
        "distill": one,
        "quantize w8a8": one,
        "quantize w8a8_foreign": one,
        "draft": one,
    }
    found = impact(["t0"]).document["artifacts"]
    assert {one["kind"]: one["role"] for one in found} == {
        "prompts": "data",
        "teacher_data": "data",
        "distill": "weights",
        "quantize": "weights",
        "draft": "weights",
    }
    assert all(one["sure"] and one["ids"] == ["t0"] for one in found)
    assert found[0]["where"] == f"store/prompts/{made.refs['prompts'].key}"
    assert (settings().home / found[0]["where"] / "manifest.json").exists()


def test_an_answer_that_was_set_aside_reached_no_weights(made: Release) -> None:
    assert reached("t3") == {"prompts wo.csv": {"train": 1}, "teacher_data": {"set_aside": 1}}


def test_calibration_reaches_the_first_samples_of_what_was_accepted(made: Release) -> None:
    # c1 was set aside, so c2 is the second row of two; c3 is the third.
    data = {"prompts wo.csv", "teacher_data"}
    for name, rows in (("c0", {"calibration": 1}), ("c2", {"calibration": 1}), ("c3", {})):
        found = reached(name)
        # Any of them may have judged the model that was calibrated on foreign text.
        assert set(found) == data | {"quantize w8a8", "quantize w8a8_foreign"}, name
        assert (found["quantize w8a8"], found["quantize w8a8_foreign"]) == (rows, {})
    assert set(reached("c1")) == data


def test_an_answer_that_judged_a_quantized_model_is_in_its_report(made: Release) -> None:
    found = {one["label"]: one for one in impact(["c3"]).document["artifacts"]}
    one = found["w8a8"]
    assert (one["role"], one["rows"], one["evidence_rows"]) == ("evidence", {}, {"calibration": 1})
    assert one["ids"] == ["c3"]


def test_foreign_text_is_followed_into_the_quantization_that_looked_at_it(made: Release) -> None:
    assert reached("f0") == {
        "prompts wo.csv": {"foreign": 1},
        "quantize w8a8_foreign": {"foreign": 1},
    }
    assert reached("f1") == {"prompts wo.csv": {"foreign": 1}}


def test_a_draft_prompt_reaches_the_draft_only(made: Release) -> None:
    assert set(reached("d0")) == {"prompts wo.csv", "draft"}


def test_eval_and_load_prompts_reach_evidence_and_no_weights(made: Release) -> None:
    for name, kind in (("e1", "accuracy"), ("l0", "latency"), ("l1", "latency")):
        found = {one["kind"]: one["role"] for one in impact([name]).document["artifacts"]}
        assert found == {"prompts": "data", kind: "evidence"}, name
    # Beyond the suite's items; and after the last prompt that was sent.
    assert set(reached("e2")) == set(reached("l2")) == {"prompts wo.csv"}


def test_several_prompts_are_counted_by_part(made: Release) -> None:
    found = reached("t0", "t1", "c0", "d1", "e0", "nobody")
    assert found["quantize w8a8"] == {"train": 2, "calibration": 1}
    assert found["draft"] == {"train": 2, "draft": 1}
    assert found["accuracy"] == {"eval": 1}


def test_an_id_that_is_known_nowhere_is_an_answer(made: Release) -> None:
    document = impact(["nobody", "t0\n"]).document
    assert document["unknown"] == ["nobody", "t0\n"]
    assert document["artifacts"] == document["versions"] == document["aliases"] == []
    done = CliRunner().invoke(app, ["nobody"])
    assert done.exit_code == 0
    assert "not found in any prompt set of this store: nobody" in done.output


def test_without_a_store_nothing_is_found(home: Path) -> None:
    document = impact(["t0"]).document
    assert (document["found"], document["artifacts"]) == (0, [])


# -- what is gone ----------------------------------------------------------------------------


def test_where_the_answers_are_gone_all_they_may_have_held_counts(made: Release) -> None:
    shutil.rmtree(made.store.folder(made.stages["teacher_data"]))
    for name in ("t0", "t3"):
        found = {one["kind"]: one for one in impact([name]).document["artifacts"]}
        # The manifest that named the prompts is gone as well, so the store alone cannot tell.
        assert set(found) == {"prompts"}, name


def test_a_version_knows_the_way_that_the_store_has_lost(
    made: Release, registry: list[Registered]
) -> None:
    registry.append(Registered(version_of(made, made.bundle()), []))
    for name in ("teacher_data", "distill", "accuracy"):
        shutil.rmtree(made.store.folder(made.stages[name]))
    document = impact(["t3"]).document
    found = {one["kind"]: one for one in document["artifacts"]}
    assert {"prompts", "teacher_data", "distill", "quantize", "draft"} == set(found)
    assert not found["teacher_data"]["sure"] and not found["distill"]["sure"]
    assert found["distill"]["where"] == ""
    assert document["versions"][0]["used_for"] == "weights"
    assert not document["versions"][0]["sure"]
    # All eval items count where the rows are gone, also those beyond the suite's.
    assert impact(["e2"]).document["versions"][0]["evidence_rows"] == {"eval": 1}


def test_prompts_that_are_gone_are_found_in_what_holds_them(made: Release) -> None:
    shutil.rmtree(made.store.folder(made.stages["prompts"]))
    assert set(reached("t0")) >= {"teacher_data", "distill", "draft"}


def test_rows_that_cannot_be_read_are_named_and_count_as_reached(made: Release) -> None:
    folder = made.store.folder(made.stages["accuracy"])
    (folder / "files" / "items.parquet").write_text("no table", encoding="utf-8")
    data = made.store.folder(made.stages["teacher_data"])
    (data / "files" / "train.jsonl").unlink()
    document = impact(["t3", "e2"]).document
    found = {one["kind"]: one for one in document["artifacts"]}
    assert found["accuracy"]["rows"] == {"eval": 1} and not found["accuracy"]["sure"]
    assert found["distill"]["rows"] == {"train": 1} and not found["distill"]["sure"]
    named = [line for line in document["unseen"] if "its rows cannot be read" in line]
    assert [line.split("/")[1] for line in named] == ["teacher_data", "accuracy"]


def test_a_manifest_that_cannot_be_read_is_named(made: Release) -> None:
    (made.store.folder(made.stages["draft"]) / "manifest.json").write_text("{", encoding="utf-8")
    unseen = impact(["t0"]).document["unseen"]
    assert f"store/draft/{made.refs['draft'].key}/manifest.json cannot be read" in unseen


# -- versions and aliases --------------------------------------------------------------------


@pytest.mark.parametrize("recorded", [True, False], ids=["lineage.json", "from the store"])
def test_versions_and_aliases_by_weights_or_evidence(
    made: Release, registry: list[Registered], recorded: bool
) -> None:
    plain, drafted = 1, 2
    for number, alias in ((plain, "canary"), (drafted, "champion")):
        bundle = made.bundle(draft=number == drafted)
        version = version_of(made, bundle, number=number, recorded=recorded)
        registry.append(Registered(version, [alias]))

    def versions(name: str) -> dict[int, str]:
        return {one["version"]: one["used_for"] for one in impact([name]).document["versions"]}

    assert versions("t0") == {plain: "weights", drafted: "weights"}
    assert versions("d0") == {drafted: "weights"}
    assert versions("e0") == versions("l0") == {plain: "evidence", drafted: "evidence"}
    assert versions("t3") == versions("e2") == versions("nobody") == {}
    document = impact(["d0", "e0"]).document
    assert document["aliases"] == [
        {"model": MODEL, "alias": "canary", "version": plain, "used_for": "evidence"},
        {"model": MODEL, "alias": "champion", "version": drafted, "used_for": "weights"},
    ]
    top = document["versions"][1]
    assert (top["rows"], top["evidence_rows"]) == ({"draft": 1}, {"eval": 1})
    assert top["where"] == f"models:/{MODEL}/{drafted}"
    assert [one["kind"] for one in top["through"]] == ["accuracy", "draft", "prompts"]


def test_a_version_made_elsewhere_is_not_answered_for(
    made: Release, registry: list[Registered]
) -> None:
    other = release(settings().home / "elsewhere", seed=8)
    lineage = json.loads(_lineage_of(other))
    unknown = {"recorded": False, "files": {"bundle.json": None}}
    registry += [
        Registered(version_of(made, made.bundle(), files={"lineage.json": lineage}), []),
        Registered(version_of(made, made.bundle("distill"), number=2, **unknown), []),
    ]
    document = impact(["t0"]).document
    digest = other.manifest("prompts").digest[:12]
    assert any(digest in line and "ask where it was made" in line for line in document["unseen"])
    assert any("version 2: nothing says" in line for line in document["unseen"])
    assert document["versions"] == []


def _lineage_of(other: Release) -> str:
    from registry.lineage import Named, Node, collect

    part = other.part("quantize")
    top = Node(kind="bundle", key="b" * 64, digest="b" * 64)
    roots = {"target": Named(part.stage, part.key, part.digest)}
    return collect(other.store.root, top, roots).model_dump_json()


def test_a_tag_of_newer_prompts_hides_no_older_evidence(
    made: Release, registry: list[Registered]
) -> None:
    other = release(settings().home / "elsewhere", seed=8)
    shutil.copytree(other.store.root, made.store.root, dirs_exist_ok=True)
    newer = made.store.root / "prompts" / other.refs["prompts"].key / "files" / "eval.jsonl"
    newer.write_text("", encoding="utf-8")
    tags = {TAG_PROMPTS: other.manifest("prompts").digest}
    registry.append(Registered(version_of(made, made.bundle(), tags=tags), []))
    # Only the older prompts hold it.
    (version,) = impact(["e0"]).document["versions"]
    assert version["used_for"] == "evidence"


def test_the_same_content_under_another_key_is_the_same_prompts(
    made: Release, registry: list[Registered]
) -> None:
    lineage = json.loads(_lineage_of(made))
    (node,) = [one for one in lineage["nodes"].values() if one["kind"] == "prompts"]
    text = json.dumps(lineage).replace(node["key"][:16], "0" * 16)
    registry.append(Registered(version_of(made, made.bundle(), files={"lineage.json": text}), []))
    assert [one["used_for"] for one in impact(["t0"]).document["versions"]] == ["weights"]


# -- texts -----------------------------------------------------------------------------------


def test_files_that_hold_the_text_are_listed(made: Release) -> None:
    home = settings().home
    for folder, name, text in (
        ("logs", "quantize-calibration.jsonl", json.dumps({"t": text_of("t0")})),
        ("logs", "plain.log", text_of("t0")),
        ("logs", "other.log", text_of("t1")),
        ("reports", "r.html", text_of("t0").replace("&", "&amp;")),
        ("mlartifacts", "summary.json", json.dumps(text_of("t0"), ensure_ascii=False)),
    ):
        (home / folder).mkdir(exist_ok=True)
        (home / folder / name).write_text(text, encoding="utf-8")
    found = {one["path"]: one["how"] for one in impact(["t0"]).document["texts"]}
    by_text = {path for path, how in found.items() if how == "text"}
    assert by_text == {
        "logs/quantize-calibration.jsonl",
        "logs/plain.log",
        "reports/r.html",
        "mlartifacts/summary.json",
    }
    prompts, data = made.refs["prompts"].key, made.refs["teacher_data"].key
    assert set(found) - by_text == {
        f"store/prompts/{prompts}/files/train.jsonl",
        f"store/teacher_data/{data}/files/train.jsonl",
        f"store/teacher_data/{data}/files/responses.jsonl",
    }


def test_the_examples_of_a_data_card_are_searched(made: Release) -> None:
    data = made.refs["teacher_data"].key
    card = f"store/teacher_data/{data}/files/data_card.json"
    (settings().home / card).write_text(json.dumps({"examples": [text_of("t0")]}))
    assert {"path": card, "holds": "prompt", "how": "text"} in impact(["t0"]).document["texts"]
    assert card not in {one["path"] for one in impact(["t1"]).document["texts"]}


def test_earlier_turns_of_a_person_are_searched_for(made: Release) -> None:
    file = settings().store_dir / "prompts" / made.refs["prompts"].key / "files" / "train.jsonl"
    rows = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    turns = [
        ("system", "You are the freight desk."),
        ("user", "I am Ann Lee of Dock 7."),
        ("assistant", "Good morning, how can I help?"),
        ("user", rows[0]["prompt"]),
    ]
    rows[0]["messages"] = [{"role": role, "content": text} for role, text in turns]
    write_jsonl(file, rows)
    logs = settings().home / "logs"
    logs.mkdir(exist_ok=True)
    for number, (_, text) in enumerate(turns):
        (logs / f"turn-{number}.log").write_text(f"asked: {text}\n", encoding="utf-8")
    found = {one["path"] for one in impact([rows[0]["id"]]).document["texts"]}
    assert {name for name in found if name.startswith("logs/turn")} == {
        "logs/turn-1.log",
        "logs/turn-3.log",
    }


def test_too_many_texts_are_not_searched_for(
    made: Release, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tasks import text_search

    monkeypatch.setattr(text_search, "MOST_WORK", 10)
    unseen = impact(["t0", "t1"]).document["unseen"]
    assert any("not searched for 2 texts" in line for line in unseen)
    monkeypatch.setattr(text_search, "LARGEST", 10)
    assert any("too large" in line for line in impact(["t0"]).document["unseen"])


# -- what is asked for -----------------------------------------------------------------------


def test_ids_come_from_words_and_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("ids.txt").write_bytes("\ufeffb\r\n\r\na b\n".encode())
    Path("ids.csv").write_text("name,id\nx,7\ny,b\n", encoding="utf-8")
    Path("ids.jsonl").write_text('{"id": 7}\n{"id": "é"}\n', encoding="utf-8")
    assert asked_ids(["x", "ids.txt", "x"]) == ["x", "b", "a b"]
    assert asked_ids(["ids.csv", "ids.jsonl"]) == ["7", "b", "é"]
    line = {"custom_id": "é1", "method": "POST", "url": "/v1/chat/completions", "body": {}}
    Path("batch.jsonl").write_text(json.dumps(line), encoding="utf-8")
    assert asked_ids(["batch.jsonl"]) == ["é1"]
    assert asked_ids(["no.x", "a" * 5000, "\0"]) == ["no.x", "a" * 5000, "\0"]


@pytest.mark.parametrize("word", ["", "ids.txt", "ids.CSV", "deletions/ids", "./", "/dev/zero"])
def test_a_mistyped_file_is_not_an_id_that_reached_nothing(
    word: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match="is no file"):
        asked_ids([word])


@pytest.mark.parametrize(
    ("name", "content", "what"),
    [
        ("a.txt", b"\xff\xfe\x00", "UTF-8"),
        ("a.txt", b"\n \n", "holds no ids"),
        ("a.csv", b"name\nx\n", "no column 'id'; it has name"),
        ("a.jsonl", b"{", "not JSON"),
        ("a.parquet", b"nothing", "Parquet"),
    ],
)
def test_a_file_that_cannot_be_read_is_named(
    tmp_path: Path, name: str, content: bytes, what: str
) -> None:
    file = tmp_path / name
    file.write_bytes(content)
    with pytest.raises(UserError, match=what) as raised:
        asked_ids([str(file)])
    assert str(file) in str(raised.value)


def test_odd_rows_are_found_as_well(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    rows = [{"id": 7, "x": "y" * 100}, {"id": "b", "x": {"id": "z"}}, {"x": 1}, {"id": "b"}]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    assert find_rows(file, {"7", "b", "z"}) == {"7": 0, "b": 1}
    with pytest.raises(OSError):
        find_rows(tmp_path / "none.jsonl", {"a"})
    many = {f"x{n}" for n in range(2 * FEW)} | {"b"}
    assert find_rows(file, many) == {"b": 1}
    file.write_text("", encoding="utf-8")
    assert find_rows(file, {"a"}) == {}
    assert find_ids(ids_of(file), {"a"}) == {}


def test_few_ids_and_many_are_found_alike(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tasks.prompt_rows, "BLOCK", 16)
    names = ["a", "aa", 'q"\\', "é\n", "名", "last"]
    inner = [{"id": name, "prompt": f'{{"id": "{name}x"}}', "r": {"id": "inner"}} for name in names]
    file = tmp_path / "rows.jsonl"
    write_jsonl(file, inner)
    for place, name in enumerate(names):
        assert find_rows(file, {name, "inner", "ax"}) == {name: place}
    monkeypatch.setattr(tasks.prompt_rows, "BLOCK", 1 << 20)
    many = {*names, *(f"x{n}" for n in range(FEW))}
    assert find_rows(file, many) == {name: place for place, name in enumerate(names)}


def test_a_long_list_of_ids_is_cut_and_counted(made: Release, home: Path) -> None:
    folder = made.store.folder(made.stages["prompts"]) / "files"
    names = [f"n{number}" for number in range(MOST_IDS + 1)]
    rows = [json.dumps({"id": name, "prompt": "a prompt of some length"}) for name in names]
    (folder / "draft.jsonl").write_text("\n".join(rows) + "\n", encoding="utf-8")
    found = impact(names).document["artifacts"][0]
    assert (found["prompts"], len(found["ids"])) == (MOST_IDS + 1, MOST_IDS)


# -- the command -----------------------------------------------------------------------------


def test_the_command_prints_json_text_and_a_picture(
    made: Release, registry: list[Registered], tmp_path: Path
) -> None:
    number = 1
    registry.append(Registered(version_of(made, made.bundle()), ["champion"]))
    done = CliRunner().invoke(app, ["t0", "e0", "--json"])
    document: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    assert done.exit_code == 0
    assert {"artifacts", "versions", "aliases"} <= set(document)
    picture = tmp_path / "impact.svg"
    done = CliRunner().invoke(app, ["t0", "e0", "--picture", str(picture)])
    assert f"{MODEL}@champion (version {number}): weights" in done.output
    assert (
        f"in its weights    {MODEL} version {number} (champion)  train 1; in evidence eval 1"
        in (done.output)
    )
    drawn = picture.read_text(encoding="utf-8")
    assert drawn.startswith("<svg") and "@champion" in drawn
    # It came through the training, not through the calibration.
    assert ">student<" in drawn and ">calibration<" not in drawn
