"""Why a version is where it is: the right chain, and every disagreement found."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from xml.etree import ElementTree

import pytest
import typer
from typer.testing import CliRunner

import tasks.why
from flows.lineage_commands import why as command
from registry.errors import InfrastructureError, UserError
from registry.ledger import TAG_HEAD, TAG_LENGTH, Draft, Ledger, Move
from registry.lineage import Edge, Lineage, Node
from registry.lineage_picture import MOST_NODES, svg
from registry.settings import settings
from tasks.bundles import Named
from tasks.lineage import lineage_for
from tasks.why import TAG_PROMPTS, why
from tests.unit.lineage_builders import Release, release
from tests.unit.lineage_registry import GATE, LATENCY, MODEL, version_of

app = typer.Typer()
app.command()(command)


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Release:
    return release(tmp_path_factory.mktemp("template") / "store")


@pytest.fixture
def made(template: Release, home: Path) -> Release:
    shutil.copytree(template.store.root, home / "store")
    return template._replace(store=type(template.store)(home / "store"))


Ask = Callable[..., dict[str, Any]]


@pytest.fixture
def ask(made: Release, monkeypatch: pytest.MonkeyPatch) -> Ask:
    """`why` for version 1, asked by alias or by number; keywords as `version_of`."""

    def asked(
        alias: str | None = "champion",
        *,
        bundle: Any = None,
        model_tags: dict[str, str] | None = None,
        **told: Any,
    ) -> dict[str, Any]:
        shutil.rmtree(settings().mlartifacts_dir, ignore_errors=True)
        version = version_of(made, bundle or made.bundle(), **told)
        model = SimpleNamespace(aliases={"champion": "1", "old": "7"}, tags=model_tags or {})
        client = SimpleNamespace(get_registered_model=lambda name: model)
        named = Named(MODEL, alias, version)  # type: ignore[arg-type]
        monkeypatch.setattr(tasks.why, "version_named", lambda name: named)
        monkeypatch.setattr(tasks.why, "tracker", lambda: SimpleNamespace(client=client))
        return why("any").document

    return asked


def move(after: int | None, before: int | None = None, bundle: str = "", **told: Any) -> None:
    ledger = Ledger(settings().ledger_uri)
    draft = Draft(
        actor="night",
        action="promote",
        moves={"champion": Move(before=before, after=after)},
        bundle=bundle,
        **told,
    )
    ledger.append(MODEL, draft, ledger.head(MODEL))


# -- the answer ------------------------------------------------------------------------------


def test_the_chain_leads_from_the_alias_to_the_prompts(ask: Ask, made: Release) -> None:
    document = ask()
    bundle = made.bundle()
    assert document["problems"] == []
    assert [link["kind"] for link in document["chain"]] == [
        "alias",
        "version",
        "bundle",
        "accuracy",
        "latency",
        "draft",
        "quantize",
        "distill",
        "teacher_data",
        "model",
        "prompts",
    ]
    assert [link["key"] for link in document["chain"][:3]] == [
        f"{MODEL}@champion",
        f"{MODEL}/1",
        bundle.digest,
    ]
    by_kind = {link["kind"]: link for link in document["chain"]}
    for kind in ("prompts", "teacher_data", "distill", "quantize", "draft", "accuracy"):
        ref = made.refs[kind]
        assert (by_kind[kind]["key"], by_kind[kind]["digest"]) == (ref.key, ref.digest), kind
    assert document["prompts_digest"] == made.refs["prompts"].digest
    assert (document["version"], document["bundle"], document["verdict"]) == (
        1,
        bundle.digest,
        "PASS",
    )
    assert document["aliases"] == ["champion"]


def test_what_a_release_engineer_asks_for_has_a_name(ask: Ask, made: Release) -> None:
    document = ask()
    assert document["gates"][0] == {**GATE, "flips": {"gained": 1, "lost": 0}}
    assert document["evidence"]["accuracy"]["digest"] == made.refs["accuracy"].digest
    # Of the two rates only the one that a gate judged.
    (point,) = document["load"]["points"]
    assert (point["rate"], point["ttft_ms"]["p99"]) == (4.0, 80.0)
    assert document["load"]["hardware"] == LATENCY["hardware"]
    assert document["quantization"]["facts"]["calibration.samples"] == "2"
    assert document["adapter"]["facts"]["lora.r"] == "8"
    assert document["draft"]["digest"] == made.refs["draft"].digest
    assert document["serving"]["num_speculative_tokens"] == 3
    assert document["teacher"]["data"]["facts"]["engine.url"] == "http://teacher/v1"
    assert document["filters"] == {"accepted": 6, "length": 2}
    assert document["prompts"][0]["facts"]["made.prompts.train"] == "4"
    assert list(document["code"]) == ["a" * 40]
    assert list(document["environments"]["serve"]) == ["vllm 0.32.0"]


def test_a_number_is_answered_like_an_alias(ask: Ask) -> None:
    document = ask(alias=None)
    assert document["alias"] is None
    assert document["chain"][0]["kind"] == "version"
    move(1, reason="better")
    assert ask(alias=None)["moved"]["alias"] == "champion"


def test_a_kept_rate_names_the_point_that_was_judged(ask: Ask) -> None:
    outcome = {"bundle": "", "verdict": "PASS", "gates": [], "evidence": {}}
    latency = {**LATENCY, "kept_rate": [2.0, 4.0]}
    files = {"outcome.json": outcome, "evidence-latency.json": latency}
    assert [point["rate"] for point in ask(files=files)["load"]["points"]] == [2.0]
    assert ask(files={"evidence-latency.json": None})["load"] is None


def test_it_works_where_the_store_is_not(ask: Ask, made: Release) -> None:
    lineage = lineage_for(made.bundle(), {}).model_dump(mode="json")
    shutil.rmtree(made.store.root)
    document = ask(files={"lineage.json": lineage})
    assert document["problems"] == []
    assert document["chain"][-1]["kind"] == "prompts"


def test_an_older_version_is_explained_by_this_store(ask: Ask, made: Release) -> None:
    whole = [link["digest"] for link in ask()["chain"]]
    document = ask(recorded=False)
    assert document["problems"] == []
    assert any("no lineage of its own" in note for note in document["notes"])
    assert [link["digest"] for link in document["chain"]] == whole
    shutil.rmtree(made.store.folder(made.stages["distill"]))
    notes = ask(recorded=False)["notes"]
    assert any("content is gone: distill" in note for note in notes)


# -- the ledger ------------------------------------------------------------------------------


def test_the_last_move_says_who_when_and_why(ask: Ask, made: Release) -> None:
    move(1, reason="first")
    move(2, 1)
    move(1, 2, made.bundle().digest, reason="back again", waivers=["slow"], policy="p" * 64)
    moved = ask()["moved"]
    assert (moved["sequence"], moved["by"], moved["action"]) == (3, "night", "promote")
    assert (moved["from"], moved["to"], moved["reason"]) == (2, 1, "back again")
    assert (moved["waivers"], moved["policy"]) == (["slow"], "p" * 64)
    assert ask()["problems"] == []


def test_no_line_is_an_answer_of_its_own(ask: Ask) -> None:
    document = ask()
    assert document["moved"] is None
    assert any("before the ledger began" in note for note in document["notes"])
    assert document["problems"] == []


def test_a_ledger_out_of_reach_is_noted(ask: Ask, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PILOTAGE_LEDGER_URI", "http://tracking")
    settings.cache_clear()
    document = ask()
    assert any("ledger was not read" in note for note in document["notes"])
    assert document["problems"] == []


def test_an_alias_that_the_ledger_has_elsewhere_is_a_problem(ask: Ask) -> None:
    move(1)
    move(2, 1)
    document = ask()
    assert document["moved"] is None
    (problem,) = document["problems"]
    assert "points to version 1, the ledger's line 2" in problem and "to version 2" in problem
    move(None, 2)
    assert "to nothing" in ask()["problems"][0]


def test_a_line_about_another_bundle_is_a_problem(ask: Ask) -> None:
    move(1, bundle="0" * 64)
    assert ask()["problems"] == ["the ledger's line 1 is about bundle 000000000000"]


def test_a_ledger_that_was_cut_off_is_a_problem(ask: Ask) -> None:
    move(1)
    tags = {TAG_LENGTH: "2", TAG_HEAD: "a" * 64}
    assert any("ledger is damaged" in one for one in ask(model_tags=tags)["problems"])


# -- what does not agree ---------------------------------------------------------------------


def test_a_changed_bundle_file_is_a_problem(ask: Ask, made: Release) -> None:
    bundle = made.bundle()
    changed = {**bundle.model_dump(mode="json"), "engine_version": "9", "digest": bundle.digest}
    problems = ask(files={"bundle.json": changed})["problems"]
    assert any("was changed after it was gated" in one for one in problems)
    assert any("the version's tag says" in one for one in problems)


@pytest.mark.parametrize(
    ("name", "content", "what"),
    [
        ("bundle.json", None, "bundle.json is missing"),
        ("bundle.json", "{", "bundle.json is missing"),
        ("outcome.json", None, "verdict and gates are not known"),
        ("outcome.json", "[]", "verdict and gates are not known"),
        ("outcome.json", {"bundle": "b", "verdict": "PASS"}, "judged bundle b"),
        ("outcome.json", {"bundle": "b", "verdict": "FAIL"}, "its verdict is FAIL"),
        ("evidence-accuracy.json", None, "evidence-accuracy.json is missing"),
        ("evidence-accuracy.json", {"bundle": "c" * 64}, "was measured on bundle cccccccccccc"),
    ],
)
def test_missing_and_foreign_files_are_problems(
    ask: Ask, name: str, content: Any, what: str
) -> None:
    assert any(what in problem for problem in ask(files={name: content})["problems"])


def test_a_lineage_of_something_else_is_a_problem(ask: Ask, made: Release) -> None:
    other = lineage_for(made.bundle(draft=False), {}).model_dump(mode="json")
    problems = ask(files={"lineage.json": other})["problems"]
    assert any("its lineage is that of bundle" in one for one in problems)
    swapped = lineage_for(made.bundle(), {"accuracy": made.refs["latency"]})
    problems = ask(files={"lineage.json": swapped.model_dump(mode="json")})["problems"]
    assert any("names accuracy evidence" in one for one in problems)
    problems = ask(files={"lineage.json": "{", "bundle.json": None})["problems"]
    assert "nothing says what the bundle was made of" in problems


def test_tags_are_compared_with_what_they_name(ask: Ask) -> None:
    assert any(TAG_PROMPTS in one for one in ask(tags={TAG_PROMPTS: "0" * 64})["problems"])
    # Measured again with other prompts: the tags are newer than the files.
    later = ask(tags={"pilotage.evidence.accuracy": "d" * 64, TAG_PROMPTS: "0" * 64})
    assert later["problems"] == []
    assert any("measured again later (evidence dddddddddddd)" in one for one in later["notes"])


def test_a_waiver_is_told(ask: Ask, made: Release) -> None:
    waived = {"owner": "kim", "reason": "known", "expires": "2027-01-01"}
    outcome = {
        "name": "c",
        "bundle": made.bundle().digest,
        "verdict": "PASS",
        "gates": [{**GATE, "result": "FAIL", "waived": waived}],
        "evidence": {},
    }
    document = ask(files={"outcome.json": outcome})
    assert document["waivers"] == [{"gate": "keeps_hits", **waived}]
    told = CliRunner().invoke(app, ["any"]).output
    assert "waived   keeps_hits by kim until 2027-01-01: known" in told


# -- the command -----------------------------------------------------------------------------


def test_the_command_answers_in_text_json_and_a_picture(ask: Ask, tmp_path: Path) -> None:
    ask()
    move(1, reason="better in every gate")
    done = CliRunner().invoke(app, ["any", "--json"])
    assert done.exit_code == 0
    assert json.loads(done.stdout.splitlines()[-1])["prompts_digest"]
    file = tmp_path / "why.svg"
    done = CliRunner().invoke(app, ["any", "--picture", str(file)])
    assert done.exit_code == 0
    for told in ("reason   better in every gate", "PASS         keeps_hits", "4/s  p50/p99",
                 "TTFT 12 ms/80 ms", "acceptance length 2.5", "draft "):  # fmt: skip
        assert told in done.output
    ElementTree.fromstring(file.read_text(encoding="utf-8"))
    assert f"{MODEL}@champion" in file.read_text(encoding="utf-8")
    done = CliRunner().invoke(app, ["any", "--picture", str(tmp_path / "no" / "why.svg")])
    assert isinstance(done.exception, UserError)


def test_the_command_refuses_what_it_cannot_explain(ask: Ask) -> None:
    ask(files={"outcome.json": None})
    done = CliRunner().invoke(app, ["any"])
    assert done.exit_code == 10
    assert done.output.index("PROBLEM") < done.output.index("gates")
    assert "none known" in done.output


def test_a_reference_that_is_none_is_named(home: Path) -> None:
    for wrong in ("wo", "@champion", "wo@", "wo@champion"):
        with pytest.raises(UserError):
            why(wrong)


# -- the picture -----------------------------------------------------------------------------


def test_names_of_people_cannot_break_the_picture() -> None:
    evil = '&lt; <script>alert("x")</script> & \\N \\l{a|b} "quoted" \u0007 你好'
    node = Node(kind="prompts", key="k", digest="d" * 64, label=evil)
    top = Node(kind="bundle", key="b", digest="b" * 64, label=evil, facts={"engine": evil})
    roles = (evil, "<b>bold</b>")
    edges = [Edge(child=top.id, role=role, parent=node.id) for role in roles]
    drawn = svg(Lineage(nodes={top.id: top, node.id: node}, edges=edges), title=evil)
    tree = ElementTree.fromstring(drawn)
    assert "<script" not in drawn
    text = " ".join(part.text or "" for part in tree.iter() if part.tag.endswith("text"))
    assert "<b>bold</b>" in text
    assert "alert" in text and "\\N" in text and "&lt;" in text
    assert drawn.startswith("<svg") and "currentColor" in drawn and "black" not in drawn


def test_a_long_lineage_and_long_names_stay_small(made: Release) -> None:
    nodes = [
        Node(kind="quantize", key=f"{n:03}", digest="d" * 64, label="name " * 99, gone=n == 1)
        for n in range(300)
    ]
    drawn = svg(Lineage(nodes={node.id: node for node in nodes}))
    assert f"and {300 - MOST_NODES + 1} more" in drawn
    assert len(drawn) < 60_000
    assert len(svg(lineage_for(made.bundle(), made.refs))) < 30_000


def test_a_drawing_that_fails_comes_after_the_answer(
    ask: Ask, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import pygraphviz

    def broken(*_: Any, **__: Any) -> None:
        raise OSError("no dot")

    ask()
    monkeypatch.setattr(pygraphviz.AGraph, "draw", broken)
    done = CliRunner().invoke(app, ["any", "--picture", str(tmp_path / "x.svg")])
    assert isinstance(done.exception, InfrastructureError)
    assert "is version 1" in done.output
    assert not (tmp_path / "x.svg").exists()
