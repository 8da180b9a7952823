"""Why a version is where it is: the right chain, and every disagreement found."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from xml.etree import ElementTree

import pytest
import typer
from mlflow.exceptions import MlflowException
from mlflow.protos.databricks_pb2 import RESOURCE_DOES_NOT_EXIST
from typer.testing import CliRunner

import tasks.why
import tasks.why_checks
from eval_suites.policy import Policy
from flows.lineage_commands import why as command
from registry.digests import digest_of
from registry.errors import InfrastructureError, UserError
from registry.evidence import AccuracyEvidence, Evidence, LatencyEvidence
from registry.ledger import TAG_HEAD, TAG_LENGTH, Draft, Ledger, Move
from registry.lineage import Edge, Lineage, Node
from registry.lineage_picture import MOST_NODES, svg
from registry.outcome import CandidateOutcome
from registry.release_facts import ReleaseFacts
from registry.settings import settings
from tasks.bundles import Named
from tasks.lineage import lineage_for
from tasks.recorded import judged_digest
from tasks.why import why
from tasks.why_checks import TAG_PROMPTS
from tests.unit.lineage_builders import Release, release
from tests.unit.lineage_registry import ACCURACY, GATE, LATENCY, MODEL, outcome_of, version_of

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
    """`why` for version 1, asked by alias or by number; keywords as `version_of`.

    The ledger's anchor is right unless `model_tags` are told. `logged`: folders of other
    LoggedModels, by id.
    """

    def asked(
        alias: str | None = "champion",
        *,
        bundle: Any = None,
        model_tags: dict[str, str] | None = None,
        logged: dict[str, str] | None = None,
        **told: Any,
    ) -> dict[str, Any]:
        shutil.rmtree(settings().mlartifacts_dir, ignore_errors=True)
        version = version_of(made, bundle or made.bundle(), **told)
        tags = anchor() if model_tags is None else model_tags
        model = SimpleNamespace(aliases={"champion": "1", "old": "7"}, tags=tags)

        def logged_model(name: str) -> SimpleNamespace:
            if name not in (logged or {}):
                raise MlflowException("no such", RESOURCE_DOES_NOT_EXIST)
            return SimpleNamespace(artifact_location=(logged or {})[name])

        client = SimpleNamespace(
            get_registered_model=lambda name: model, get_logged_model=logged_model
        )
        named = Named(MODEL, alias, version)  # type: ignore[arg-type]
        monkeypatch.setattr(tasks.why, "version_named", lambda name: named)
        for module in (tasks.why, tasks.why_checks):
            monkeypatch.setattr(module, "tracker", lambda: SimpleNamespace(client=client))
        return why("any").document

    return asked


def anchor() -> dict[str, str]:
    """The tags that anchor the ledger as it is; none without a line or a ledger."""
    with suppress(UserError):
        head = Ledger(settings().ledger_uri).head(MODEL)
        if head.length:
            return {TAG_LENGTH: str(head.length), TAG_HEAD: head.hash}
    return {}


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
    (gate,) = document["gates"]
    assert {**gate, **GATE, "flips": {"gained": 1, "lost": 0}} == gate
    assert document["evidence"]["accuracy"]["digest"] == made.refs["accuracy"].digest
    # Of the two rates only the one that a gate judged.
    (point,) = document["load"]["points"]
    assert (point["rate"], point["ttft_ms"]["p99"]) == (4.0, 80.0)
    assert document["load"]["hardware"] == LATENCY["hardware"]
    assert document["quantization"]["facts"]["calibration.samples"] == "2"
    assert document["adapter"]["facts"]["lora.r"] == "8"
    assert document["draft"]["digest"] == made.refs["draft"].digest
    assert document["serving"]["num_speculative_tokens"] == 3
    assert document["serving"]["topology"] == "colocated"
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


def test_a_kept_rate_names_the_point_that_was_judged(ask: Ask, made: Release) -> None:
    outcome = outcome_of(made, made.bundle(), gates=[{**GATE, "rate": None}])
    latency = {**LATENCY, "bundle": made.bundle().digest, "kept_rate": [2.0, 4.0]}
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


def test_a_ledger_out_of_reach_is_a_problem(ask: Ask, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PILOTAGE_LEDGER_URI", "http://tracking")
    settings.cache_clear()
    document = ask()
    (problem,) = document["problems"]
    assert "ledger could not be asked: the ledger is kept in SQLite or PostgreSQL" in problem
    assert document["moved"] is None and document["notes"] == []


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
        ("bundle.json", "{", "bundle.json cannot be read: Expecting"),
        ("outcome.json", None, "verdict and gates are not known"),
        ("outcome.json", "[]", "outcome.json cannot be read: is no JSON object"),
        ("evidence-accuracy.json", None, "evidence-accuracy.json is missing"),
        (
            "evidence-accuracy.json",
            {**ACCURACY, "bundle": "c" * 64},
            "was measured on bundle cccccccccccc",
        ),
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
    problems = ask(files={"lineage.json": None, "bundle.json": None})["problems"]
    assert "nothing says what the bundle was made of" in problems


def test_tags_are_compared_with_what_they_name(ask: Ask) -> None:
    assert any(TAG_PROMPTS in one for one in ask(tags={TAG_PROMPTS: "0" * 64})["problems"])
    # Measured again with other prompts: the tags are newer than the files.
    later = ask(tags={"pilotage.evidence.accuracy": "d" * 64, TAG_PROMPTS: "0" * 64})
    assert later["problems"] == []
    assert any("measured again later (evidence dddddddddddd)" in one for one in later["notes"])


def test_a_waiver_is_told(ask: Ask, made: Release) -> None:
    waived = {"owner": "kim", "reason": "known", "expires": "2027-01-01"}
    gates = [{**GATE, "name": "other"}, {**GATE, "result": "FAIL", "waived": waived}]
    document = ask(files={"outcome.json": outcome_of(made, made.bundle(), gates=gates)})
    assert document["problems"] == []
    assert document["waivers"] == [{"gate": "keeps_hits", **waived}]
    told = CliRunner().invoke(app, ["any"]).output
    assert "waived   keeps_hits by kim until 2027-01-01: known" in told


# -- what was changed ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("told", "what"),
    [
        ({"gates": [{**GATE, "result": "FAIL"}]}, "its gates make FAIL, its verdict says PASS"),
        ({"gates": []}, "its gates make INVALID, its verdict says PASS"),
        ({"verdict": "FAIL"}, "its verdict is FAIL"),
        ({"bundle": "b" * 64}, "outcome.json judged bundle bbbbbbbbbbbb"),
        ({"name": "other"}, "is candidate 'quantize', outcome.json judged 'other'"),
        ({"evidence": {}}, "outcome.json names accuracy evidence nothing, the ledger's line 1"),
        ({"evidence": []}, "outcome.json cannot be read: evidence: Input should be a valid dict"),
        ({"evidence": 5}, "outcome.json cannot be read: evidence"),
        ({"evidence": {"accuracy": 5}}, "outcome.json cannot be read: evidence.accuracy"),
        ({"gates": None}, "outcome.json cannot be read: gates"),
        ({"gates": [5]}, "outcome.json cannot be read: gates.0"),
        ({"gates": [{}]}, "outcome.json cannot be read: gates.0.name: Field required"),
        ({"gates": [{**GATE, "estimate": float("nan")}]}, "gates.0.estimate is no number"),
        ({"bundle": None}, "outcome.json cannot be read: bundle"),
        ({"name": "\ud800"}, "outcome.json cannot be read: 'utf-8' codec"),
        ({"metrics": {"hit_rate": 0.99}}, "evidence-accuracy.json differ in hit_rate"),
    ],
)
def test_a_changed_outcome_is_a_problem(
    ask: Ask, made: Release, told: dict[str, Any], what: str
) -> None:
    bundle = made.bundle()
    move(1, bundle=bundle.digest, evidence=outcome_of(made, bundle)["evidence"])
    assert ask()["problems"] == []
    document = ask(files={"outcome.json": outcome_of(made, bundle, **told)})
    assert any(what in one for one in document["problems"]), document["problems"]
    _answers_in_one_line()


@pytest.mark.parametrize(
    ("kind", "told", "what"),
    [
        ("accuracy", {"bundle": None}, "bundle: Input should be a valid string"),
        ("accuracy", {"bundle": 5}, "bundle: Input should be a valid string"),
        ("accuracy", {"metrics": {"hit_rate": float("inf")}}, "metrics.hit_rate is no number"),
        ("accuracy", {"kind": "latency"}, "cannot be read"),
        ("latency", {"points": 5}, "points: Input should be a valid"),
        ("latency", {"points": [5]}, "points.0: "),
        ("latency", {"kept_rate": 5}, "kept_rate: "),
        ("latency", {"measured_at": 5}, "measured_at: "),
    ],
)
def test_malformed_evidence_is_a_problem_and_no_section(
    ask: Ask, made: Release, kind: str, told: dict[str, Any], what: str
) -> None:
    good = {"accuracy": ACCURACY, "latency": LATENCY}[kind]
    name = f"evidence-{kind}.json"
    document = ask(files={name: {**good, "bundle": made.bundle().digest, **told}})
    (problem,) = document["problems"]
    assert problem.startswith(f"{name} cannot be read: ") and what in problem
    assert list(document["evidence"][kind]) == ["digest"]
    _answers_in_one_line()


@pytest.mark.parametrize(
    "name", ["bundle.json", "outcome.json", "lineage.json", "release.json", "evidence-latency.json"]
)
@pytest.mark.parametrize(
    "content", [b"\xff\x00\xfe", b"5", b"null", b"[]", b'{"a', b"{}", b"[" * 99_999]
)
def test_no_file_of_a_version_breaks_the_answer(ask: Ask, name: str, content: bytes) -> None:
    problems = ask(files={name: content})["problems"]
    assert any(one.startswith(f"{name} cannot be read: ") for one in problems), problems
    assert all("\n" not in one for one in problems)
    _answers_in_one_line()


def test_a_critical_gate_of_the_policy_without_a_result_is_a_problem(
    ask: Ask, made: Release
) -> None:
    gates = [
        {"name": name, "kind": "floor", "metric": "hit_rate", "margin": 0.5}
        for name in ("keeps_hits", "left_out")
    ]
    policy = Policy.model_validate({"kind": "policy", "description": "", "gates": gates})
    facts = ReleaseFacts(
        release="r", recipe="r", recipe_digest="d", model=MODEL, policy_name="p",
        policy=policy.model_dump(mode="json"), policy_digest=digest_of(policy), suite="s",
        profile="day", champion=None, first_release=True, prompts="p",
    )  # fmt: skip
    files = {"release.json": facts.model_dump(mode="json")}
    assert ask(files=files)["problems"] == ["gates of its policy were not judged: left_out"]
    move(1, bundle=made.bundle().digest, policy="9" * 64)
    changed = facts.model_copy(update={"policy_digest": "8" * 64}).model_dump(mode="json")
    problems = ask(files={"release.json": changed})["problems"]
    assert "the recorded policy is not the one of its digest" in problems
    assert any("policy 888888888888, the ledger's line 1 says 999999999999" in p for p in problems)


def test_numbers_that_were_changed_since_the_promotion_are_a_problem(
    ask: Ask, made: Release
) -> None:
    digest = made.bundle().digest
    outcome = CandidateOutcome.model_validate(outcome_of(made, made.bundle()))
    evidence: dict[str, Evidence] = {
        "accuracy": AccuracyEvidence.model_validate({**ACCURACY, "bundle": digest}),
        "latency": LatencyEvidence.model_validate({**LATENCY, "bundle": digest}),
    }
    own = f"m-{'0' * 32}"
    details = {"logged_model": own, "judged": judged_digest(outcome, evidence)}
    move(1, bundle=digest, evidence=outcome.evidence, details=details)
    # The fixture's folder has no LoggedModel's name: the line says from where to read.
    ask()
    folder = settings().mlartifacts_dir / MODEL / "1"
    kept = settings().home / "judged"
    shutil.copytree(folder, kept)
    logged = {own: kept.as_uri()}
    broken = {"outcome.json": "{", "evidence-latency.json": None}
    document = ask(files=broken, logged=logged)
    assert document["problems"] == []
    assert any(f"later judgement than the version's own, models:/{own}" in n
               for n in document["notes"])  # fmt: skip
    assert document["load"]["points"][0]["rate"] == 4.0
    edited = {**ACCURACY, "bundle": digest, "seconds": 3.6}
    (kept / "evidence-accuracy.json").write_text(json.dumps(edited), encoding="utf-8")
    assert ask(logged=logged)["problems"] == [
        "verdict or evidence were changed since the promotion read them"
    ]
    (problem,) = ask()["problems"]
    assert f"models:/{own} is gone" in problem


# -- a lineage that was changed --------------------------------------------------------------


def _lineage(made: Release) -> dict[str, Any]:
    return lineage_for(made.bundle(), {}).model_dump(mode="json")


def test_a_lineage_that_holds_not_together_is_a_problem(ask: Ask, made: Release) -> None:
    def problem(document: Any) -> str:
        told = ask(files={"lineage.json": document})
        assert not any("no lineage of its own" in note for note in told["notes"])
        _answers_in_one_line()
        return str(told["problems"][0])

    unknown = _lineage(made)
    unknown["edges"][0]["parent"] = "model/x/y"
    assert "an edge names model/x/y, which is no node" in problem(unknown)
    circle = _lineage(made)
    edge = circle["edges"][-1]
    circle["edges"].append({"child": edge["parent"], "role": "x", "parent": edge["child"]})
    assert "made of itself" in problem(circle)
    renamed = _lineage(made)
    name = next(one for one in renamed["nodes"] if one.startswith("quantize"))
    renamed["nodes"][name]["digest"] = "0" * 64
    assert f"node {name} is quantize/" in problem(renamed)
    assert "in its lineage nothing was made of: draft" in problem({**_lineage(made), "edges": []})
    other = _lineage(made)
    (top,) = (edge for edge in other["edges"] if edge["role"] == "target")
    top["role"] = "weights"
    assert problem(other) == "its lineage does not lead to the target of bundle.json"


# -- the ledger's anchor ---------------------------------------------------------------------


def test_an_anchor_that_is_gone_damaged_or_behind_is_a_problem(ask: Ask) -> None:
    for before in (None, 1, 1):
        move(1, before)
    right = anchor()
    assert ask()["problems"] == []

    def problems(**tags: str) -> list[str]:
        document = ask(model_tags=tags)
        assert document["moved"]["sequence"] == 3
        return list(document["problems"])

    assert "line 3 has no anchor in MLflow" in problems()[0]
    assert "line 3 has no anchor in MLflow" in problems(**{TAG_LENGTH: "3"})[0]
    assert "are no anchor of a ledger" in problems(**{**right, TAG_LENGTH: "abc"})[0]
    hashes = [line.hash for line in Ledger(settings().ledger_uri).entries(MODEL)]
    behind = {TAG_LENGTH: "1", TAG_HEAD: hashes[0]}
    assert "line 3 is 1 after what a killed move leaves" in problems(**behind)[0]
    # What a killed move leaves.
    killed = ask(model_tags={TAG_LENGTH: "2", TAG_HEAD: hashes[1]})
    assert killed["problems"] == []
    (note,) = killed["notes"]
    assert "line 3 of the ledger has no anchor in MLflow yet" in note


def test_a_ledger_whose_lines_are_gone_began_all_the_same(ask: Ask) -> None:
    document = ask(model_tags={TAG_LENGTH: "2", TAG_HEAD: "a" * 64})
    (problem,) = document["problems"]
    assert "the ledger is damaged" in problem
    assert document["notes"] == []


def test_nobody_moved_latest(ask: Ask) -> None:
    move(7)
    document = ask("latest")
    assert document["problems"] == [] and document["moved"] is None
    (note,) = document["notes"]
    assert "MLflow's own word" in note and "began" not in note


# -- the command -----------------------------------------------------------------------------


def test_the_command_answers_in_text_json_and_a_picture(ask: Ask, tmp_path: Path) -> None:
    move(1, reason="better in every gate")
    ask()
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


def _answers_in_one_line() -> None:
    """The command, asked for the same again: status 10, strict JSON on the last line."""

    def refuse(word: str) -> None:
        raise ValueError(word)

    done = CliRunner().invoke(app, ["any", "--json"])
    assert done.exit_code == 10, done.output
    assert json.loads(done.stdout.splitlines()[-1], parse_constant=refuse)["problems"]
    assert "PROBLEM" in CliRunner().invoke(app, ["any"]).output


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
