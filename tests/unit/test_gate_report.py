"""What CI systems and people read of a judged gate: right values, whatever text is in it."""

from __future__ import annotations

import json
import math
import re
import subprocess
import sys
from datetime import date
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from markdown_it import MarkdownIt

from registry import gate_report as rendering
from registry.errors import InfrastructureError, UserError
from registry.gate_outcome import CandidateVerdict, GateOutcome
from registry.outcome import Flips, GateResult, LoosenedGate, Verdict, Waived, WaiverShown
from registry.settings import CHECKOUT

WAIVED = Waived(owner="ops", reason="bad labels", expires=date(2030, 2, 1))
FIRST_COLUMNS = {"name", "kind", "metric", "tier", "result", "estimate", "bound", "margin", "n"}
NASTY = "a|b`c\r\n<script>*x*\u2028[y](z) \\| _q_ $1$ ~~s~~ &amp; \x1b[31m\ud800\x00"


def gate(name: str, result: Verdict = Verdict.PASS, **changes: Any) -> GateResult:
    return GateResult(
        **{
            "name": name,
            "kind": "retention",
            "metric": "hit_rate",
            "tier": "critical",
            "result": result,
            "estimate": 0.931249,
            "bound": 0.90481,
            "opposite_bound": 0.957,
            "margin": 0.9,
            "level": 0.05,
            "candidate": 0.861,
            "reference": 0.905,
            "reference_name": "teacher",
            "ratio": 0.931249,
            "n": 1200,
            "mde": 0.93121,
            "needed": None,
            "reason": f"reason of {name}",
            **changes,
        }
    )


def candidate(*gates: GateResult, **changes: Any) -> CandidateVerdict:
    return CandidateVerdict(
        **{
            "name": "int8",
            "folder": "evidence/candidate",
            "bundle": "ab" * 32,
            "verdict": Verdict.PASS,
            "gates": list(gates),
            "settings": "recorded",
            **changes,
        }
    )


def outcome(*candidates: CandidateVerdict, **changes: Any) -> GateOutcome:
    return GateOutcome(
        **{
            "verdict": Verdict.PASS,
            "promotable": True,
            "settings": "recorded",
            "policy": "retention_hit_rate",
            "policy_digest": "cd" * 32,
            "candidates": list(candidates),
            "references": {"teacher": "evidence/teacher"},
            "seconds": 0.42,
            **changes,
        }
    )


EVERY_FORM = [
    gate("passes"),
    gate("fails", Verdict.FAIL),
    gate("anomalous", Verdict.ANOMALOUS, kind="implausible"),
    gate("inconclusive", Verdict.INCONCLUSIVE, needed=640),
    gate("infeasible", Verdict.INFEASIBLE, estimate=None, bound=None, candidate=None, n=None),
    gate("invalid", Verdict.INVALID, estimate=None, bound=None),
    gate("supporting", Verdict.FAIL, tier="supporting"),
    gate("advisory", Verdict.INVALID, tier="advisory"),
    gate("waived", Verdict.FAIL, waived=WAIVED),
    gate("waived_for_nothing", Verdict.PASS, waived=WAIVED),
    gate("supporting_passes", tier="supporting"),
]


def every_form() -> GateOutcome:
    refused = candidate(
        *EVERY_FORM, verdict=Verdict.INFEASIBLE, reasons=["infeasible INFEASIBLE: no kernel"]
    )
    return outcome(refused, verdict=Verdict.INFEASIBLE, promotable=False)


def with_text(text: str) -> GateOutcome:
    """An outcome with `text` wherever somebody else may have written."""
    flips = Flips(gained=1, lost=2, gained_items=[text], lost_items=[text, text], mcnemar_p=1.0)
    told = gate(
        text, Verdict.FAIL, reason=text, metric=text, slice=text, method=text, flips=flips,
        reference_name=text, waived=Waived(owner=text, reason=text, expires=date(2030, 2, 1)),
    )  # fmt: skip
    plain = gate(text, Verdict.INVALID, reason=text, kind=text)
    refused = candidate(
        told, plain, name=text, folder=text, bundle=text, verdict=Verdict.INVALID, reasons=[text]
    )
    return outcome(
        refused,
        verdict=Verdict.INVALID,
        promotable=False,
        policy=text,
        policy_digest=text,
        references={text: text},
        notes=[text],
        waivers=[
            WaiverShown(
                gate=text, owner=text, reason=text, expires=date(2030, 2, 1), state="active"
            )
        ],
        loosened=[LoosenedGate(gate=text, what=text, acknowledged_by=text, reason=text)],
    )


any_text = (
    st.text(st.characters(), max_size=60)
    | st.text("|`\\*_[](){}<>&#~$!-+=.:@/'\"019 ax\n\t", max_size=30)
    | st.just(NASTY)
)
"""All of Unicode, lone surrogates and control characters included, and what Markdown obeys."""


# -- the model -------------------------------------------------------------------------------


@pytest.mark.parametrize("changes", [{"verdict": Verdict.FAIL}, {"settings": "unknown"}])
def test_only_a_pass_with_known_settings_is_promotable(changes: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="only PASS with recorded settings is promotable"):
        outcome(candidate(), **changes)


# -- JSON ------------------------------------------------------------------------------------


def test_gates_of_one_candidate_are_listed_once_more() -> None:
    document = rendering.document(outcome(candidate(gate("a"), gate("b", needed=12))))
    assert document["verdict"] == "PASS"
    assert [one["name"] for one in document["gates"]] == ["a", "b"]
    assert FIRST_COLUMNS | {"mde", "needed"} <= set(document["gates"][0])
    assert document["gates"] == document["candidates"][0]["gates"]
    assert document["gates"][1]["needed"] == 12
    assert document["gates"][0]["estimate"] == 0.931249


def test_gates_of_several_candidates_name_theirs() -> None:
    document = rendering.document(
        outcome(candidate(gate("a")), candidate(gate("a"), gate("b"), name="fp8"))
    )
    named = [(one["candidate_name"], one["name"]) for one in document["gates"]]
    assert named == [("int8", "a"), ("fp8", "a"), ("fp8", "b")]
    assert document["gates"][0]["candidate"] == 0.861
    assert "candidate_name" not in document["candidates"][0]["gates"][0]


def test_no_candidate_no_gates() -> None:
    document = rendering.document(outcome(verdict=Verdict.INVALID, promotable=False))
    assert document["gates"] == []


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_no_number_is_null(value: float) -> None:
    line = rendering.json_line(outcome(candidate(gate("a", estimate=value, margin=value))))
    document = json.loads(line, parse_constant=pytest.fail)
    assert document["gates"][0]["estimate"] is None
    assert document["candidates"][0]["gates"][0]["margin"] is None


@given(any_text)
@settings(max_examples=200)
def test_any_text_is_strict_json_on_one_line(text: str) -> None:
    line = rendering.json_line(with_text(text))
    assert line.splitlines() == [line]
    document = json.loads(line.encode(), parse_constant=pytest.fail)
    assert document["notes"] == [re.sub("[\ud800-\udfff]", "\ufffd", text)]


def test_json_keeps_other_scripts_readable() -> None:
    assert "您好" in rendering.json_line(outcome(candidate(), notes=["您好"]))


# -- JUnit -----------------------------------------------------------------------------------


def parsed(text: str) -> ElementTree.Element:
    """The root, after checking what the schemas of Jenkins and Ant ask for."""
    root = ElementTree.fromstring(text.encode())
    assert root.tag == "testsuites"
    marks = ("failure", "error", "skipped")
    for level in (root, *root.iter("testsuite")):
        cases = list(level.iter("testcase"))
        assert int(level.get("tests", "-1")) == len(cases)
        for mark, attribute in zip(marks, ("failures", "errors", "skipped"), strict=True):
            found = sum(case.find(mark) is not None for case in cases)
            assert int(level.get(attribute, "-1")) == found
        assert float(level.get("time", "-1")) >= 0
        assert level.get("name") is not None
    for suite in root:
        tags = [element.tag for element in suite]
        order = {"properties": 0, "testcase": 1, "system-out": 2}
        assert tags == sorted(tags, key=order.__getitem__)
        assert tags.count("properties") == 1
        assert tags.count("system-out") <= 1
    for case in root.iter("testcase"):
        assert {"classname", "name", "time"} == set(case.attrib)
        tags = [element.tag for element in case]
        assert tags in ([], ["system-out"], *([mark] for mark in marks), *([mark, "system-out"] for mark in marks))  # fmt: skip # noqa: E501
        for element in case:
            known = {"failure": {"type", "message"}, "error": {"type", "message"}}
            assert set(element.attrib) == known.get(element.tag, set(element.attrib) & {"message"})
    return root


def case_of(root: ElementTree.Element, name: str) -> ElementTree.Element:
    (found,) = [case for case in root.iter("testcase") if case.get("name") == name]
    return found


def test_each_form_of_a_gate_is_the_case_that_ci_systems_know() -> None:
    root = parsed(rendering.junit(every_form()))
    assert root.attrib == {
        "name": "pilotage gate", "tests": "11", "failures": "4", "errors": "1", "skipped": "3",
        "time": "0.420",
    }  # fmt: skip
    ended = {
        case.get("name"): [(one.tag, one.get("type")) for one in case if one.tag != "system-out"]
        for case in root.iter("testcase")
    }
    assert ended == {
        "passes": [],
        "fails": [("failure", "FAIL")],
        "anomalous": [("failure", "ANOMALOUS")],
        "inconclusive": [("failure", "INCONCLUSIVE")],
        "infeasible": [("failure", "INFEASIBLE")],
        "invalid": [("error", "INVALID")],
        "supporting": [("skipped", None)],
        "advisory": [("skipped", None)],
        "waived": [("skipped", None)],
        "waived_for_nothing": [],
        "supporting_passes": [],
    }
    assert {case.get("classname") for case in root.iter("testcase")} == {"retention_hit_rate.int8"}


def test_a_case_says_why_and_by_how_much() -> None:
    root = parsed(rendering.junit(every_form()))
    failure = case_of(root, "fails").find("failure")
    assert failure is not None
    assert failure.get("message") == "reason of fails"
    assert (failure.text or "").startswith("reason of fails\n")
    figures = (case_of(root, "inconclusive").findtext("system-out") or "").splitlines()
    assert {"estimate: 0.9312", "bound: 0.9048", "margin: 0.9", "n: 1200", "needed: 640"} <= set(
        figures
    )
    waived = case_of(root, "waived").find("skipped")
    assert waived is not None
    assert waived.get("message") == (
        "waived by ops until 2030-02-01 (bad labels); FAIL: reason of waived"
    )
    supporting = case_of(root, "supporting").find("skipped")
    assert supporting is not None
    assert supporting.get("message") == ("supporting gate, has no say; FAIL: reason of supporting")


def test_properties_name_policy_and_bundles() -> None:
    root = parsed(rendering.junit(every_form()))
    properties = {one.get("name"): one.get("value") for one in root.iter("property")}
    assert properties == {
        "policy": "retention_hit_rate",
        "policy_digest": "cd" * 32,
        "verdict": "INFEASIBLE",
        "promotable": "false",
        "settings": "recorded",
        "reference.teacher": "evidence/teacher",
        "candidate.int8.verdict": "INFEASIBLE",
        "candidate.int8.folder": "evidence/candidate",
        "candidate.int8.bundle": "ab" * 32,
        "candidate.int8.settings": "recorded",
        "candidate.int8.level_share": "1",
    }


def test_one_case_per_gate_and_candidate() -> None:
    both = outcome(
        candidate(gate("a"), gate("b")),
        candidate(gate("a", Verdict.FAIL), gate("b"), name="fp8", verdict=Verdict.FAIL),
    )
    root = parsed(rendering.junit(both))
    assert [(case.get("classname"), case.get("name")) for case in root.iter("testcase")] == [
        ("retention_hit_rate.int8", "a"),
        ("retention_hit_rate.int8", "b"),
        ("retention_hit_rate.fp8", "a"),
        ("retention_hit_rate.fp8", "b"),
    ]
    assert root.get("failures") == "1"


@pytest.mark.parametrize(
    ("gates", "verdict", "tag"),
    [
        ([gate("a")], Verdict.INCONCLUSIVE, "failure"),
        ([gate("a", Verdict.FAIL, tier="advisory")], Verdict.FAIL, "failure"),
        ([], Verdict.INVALID, "error"),
    ],
)
def test_a_refusal_that_no_gate_stands_for_is_a_case(
    gates: list[GateResult], verdict: Verdict, tag: str
) -> None:
    refused = candidate(*gates, verdict=verdict, reasons=["a smoke suite", "twice"])
    root = parsed(rendering.junit(outcome(refused, verdict=verdict, promotable=False)))
    element = case_of(root, "(verdict)").find(tag)
    assert element is not None
    assert (element.get("type"), element.get("message")) == (verdict, "a smoke suite; twice")


def test_a_refused_policy_is_never_green() -> None:
    refused = outcome(
        candidate(gate("a")),
        verdict=Verdict.FAIL,
        promotable=False,
        loosened=[LoosenedGate(gate="a", what="margin 0.95 -> 0.90", acknowledged_by=None)],
    )
    root = parsed(rendering.junit(refused))
    whole = case_of(root, "(verdict)")
    assert whole.get("classname") == "retention_hit_rate"
    element = whole.find("failure")
    assert element is not None
    assert element.get("message") == "loosened: a: margin 0.95 -> 0.90, not acknowledged"
    nobody = parsed(rendering.junit(outcome(verdict=Verdict.INVALID, promotable=False)))
    assert nobody.get("errors") == "1"


@given(any_text)
@settings(max_examples=200)
def test_any_text_is_xml(text: str) -> None:
    root = parsed(rendering.junit(with_text(text)))
    assert [root.get(name) for name in ("tests", "errors", "skipped")] == ["2", "1", "1"]


def test_what_xml_cannot_hold_is_replaced() -> None:
    root = parsed(rendering.junit(outcome(candidate(gate("a\x00\x1b\ud800\ufffe|<&>é😀")))))
    (case,) = root.iter("testcase")
    assert case.get("name") == "a\ufffd\ufffd\ufffd\ufffd|<&>é😀"


# -- Markdown --------------------------------------------------------------------------------


def tables(markdown: str) -> list[list[list[str]]]:
    """Cells of every table as GitHub's dialect shows them, header first."""
    found: list[list[list[str]]] = []
    for token in MarkdownIt("gfm-like", {"html": True, "linkify": False}).parse(markdown):
        if token.type == "table_open":
            found.append([])
        elif token.type == "tr_open":
            found[-1].append([])
        elif token.type == "inline" and found and len(found[-1]) and token.level > 3:
            parts = token.children or []
            assert {part.type for part in parts} <= {"text", "text_special"}
            found[-1][-1].append("".join(part.content for part in parts))
    return found


def test_a_row_per_gate_with_its_numbers() -> None:
    page = rendering.markdown(every_form())
    assert page.startswith("## Gate retention_hit_rate: INFEASIBLE\n")
    (table,) = tables(page)
    assert table[0] == list(rendering.COLUMNS)
    assert [row[0] for row in table[1:]] == [one.name for one in EVERY_FORM]
    assert table[4] == [
        "inconclusive", "hit_rate", "retention", "critical", "0.861", "0.905 (teacher)",
        "0.9312", "0.9312", "0.9048", "0.9", "1200", "0.9312", "640", "INCONCLUSIVE",
    ]  # fmt: skip
    assert table[5][7:9] == ["–", "–"]
    assert [table[7][-1], table[9][-1]] == ["FAIL (supporting)", "FAIL (waived)"]
    for words in (
        "- infeasible INFEASIBLE: no kernel\n",
        "- supporting: supporting gate, has no say; FAIL: reason of supporting\n",
        "- waived: waived by ops until 2030-02-01 (bad labels); FAIL: reason of waived\n",
        "settings: recorded, never promotes",
        "Compared with: teacher = evidence/teacher",
    ):
        assert words in page, words


def test_flips_waivers_loosened_gates_and_notes_are_shown() -> None:
    flips = Flips(
        gained=2, lost=11, gained_items=["e-3"], lost_items=["e-8", "e|9"], mcnemar_p=0.022461
    )
    page = rendering.markdown(
        outcome(
            candidate(gate("a", flips=flips, slice="segment=zh"), level_share=0.25),
            notes=["levels by Holm"],
            waivers=[
                WaiverShown(
                    gate="b", owner="ops", reason="old", expires=date(2029, 1, 1), state="expired"
                )
            ],
            loosened=[
                LoosenedGate(
                    gate="a", what="margin 0.95 -> 0.90", acknowledged_by="jo", reason="new teacher"
                )
            ],
        )
    )
    gates, flipped, waivers, loosened = tables(page)
    assert gates[1][1] == "hit_rate (segment=zh)"
    assert flipped[1] == ["int8", "a", "2", "11", "0.02246", "e-3", "e-8, e|9"]
    assert waivers[1] == ["b", "ops", "old", "2029-01-01", "expired"]
    assert loosened[1] == ["a", "margin 0.95 -> 0.90", "acknowledged by jo", "new teacher"]
    assert "- levels by Holm" in page
    assert "settings: recorded, may promote" in page
    assert "share of the level 0.25" in page


def shown(text: str) -> str:
    """What a cell should show of a text: one line, no control characters."""
    return re.sub("[\x00-\x1f\x7f-\x9f\ud800-\udfff]", "\ufffd", " ".join(text.split()))


@given(any_text)
@settings(max_examples=200)
def test_any_text_stays_in_its_cell(text: str) -> None:
    page = rendering.markdown(with_text(text))
    rows = [line for line in page.splitlines() if line.startswith("| ")]
    # Header, rule and rows: two gates, one with flips, one waiver, one loosened gate.
    assert len(rows) == 4 + 3 + 3 + 3
    for row in rows:
        cells = re.sub(r"\\.", "", row).count("|") - 1
        assert cells in (14, 7, 5, 4)
    gates, flipped, waivers, loosened = tables(page)
    assert gates[1][0] == shown(text)
    assert flipped[1][0] == shown(text)
    assert waivers[1][:3] == [shown(text)] * 3
    assert loosened[1][1] == shown(text)
    assert "<" not in page


@given(any_text)
@settings(max_examples=100)
def test_any_text_is_one_plain_point_of_a_list(text: str) -> None:
    page = rendering.markdown(outcome(candidate(), notes=[text]))
    notes = page[page.index("Notes:") :]
    kinds = [token.type for token in MarkdownIt("gfm-like", {"linkify": False}).parse(notes)]
    inside = ["paragraph_open", "inline", "paragraph_close"] if shown(text) else []
    assert kinds == [
        "paragraph_open", "inline", "paragraph_close", "bullet_list_open", "list_item_open",
        *inside, "list_item_close", "bullet_list_close",
    ]  # fmt: skip


def many_gates(count: int, reason: str, flips: Flips | None = None) -> GateOutcome:
    gates = [gate(f"g{n}", Verdict.FAIL, reason=reason, flips=flips) for n in range(count)]
    refused = candidate(
        *gates, verdict=Verdict.FAIL, reasons=[f"{one.name} FAIL: {one.reason}" for one in gates]
    )
    return outcome(refused, verdict=Verdict.FAIL, promotable=False)


def test_a_summary_that_is_too_long_loses_its_flips_first() -> None:
    flips = Flips(gained=0, lost=400, lost_items=[f"item-{n:06d}" for n in range(150)])
    page = rendering.markdown(many_gates(700, "lost", flips))
    assert len(page.encode()) <= rendering.MOST_SUMMARY
    assert "item-000001" not in page
    assert "Flips are left out" in page
    assert page.count("FAIL: lost") == 700
    short = rendering.markdown(many_gates(3, "lost", flips))
    assert "item-000001" in short


def test_then_the_ends_of_long_texts_then_the_rest() -> None:
    page = rendering.markdown(many_gates(700, "é" * 1900))
    assert len(page.encode()) <= rendering.MOST_SUMMARY
    assert page.count(" more characters)") == 700
    page = rendering.markdown(many_gates(4500, "x" * 500))
    assert len(page.encode()) <= rendering.MOST_SUMMARY
    assert page.startswith("## Gate retention_hit_rate: FAIL\n")
    assert page.endswith("The rest is left out: it would be longer than GitHub shows.\n")


# -- text ------------------------------------------------------------------------------------


def test_text_says_what_never_promotes_and_why() -> None:
    unknown = outcome(
        candidate(gate("retention", flips=Flips(gained=1, lost=2)), settings="unknown"),
        settings="unknown",
        promotable=False,
        notes=["one look"],
    )
    text = rendering.text(unknown)
    assert text.startswith(
        "retention_hit_rate: PASS (settings: unknown, never promotes, policy digest cdcdcdcdcdcd"
    )
    for words in ("0.9312", "0.9048", "1200", "1 gained, 2 lost", "note: one look"):
        assert words in text, words
    refused = rendering.text(every_form())
    assert "int8: infeasible INFEASIBLE: no kernel" in refused
    assert "int8: waived: waived by ops until 2030-02-01 (bad labels)" in refused
    assert "may promote" in rendering.text(outcome(candidate(gate("a"))))


@given(any_text)
@settings(max_examples=60)
def test_no_text_reaches_the_terminal_as_a_command(text: str) -> None:
    written = rendering.text(with_text(text))
    assert not re.search("[\x00-\x09\x0b-\x1f\x7f-\x9f\ud800-\udfff]", written)
    drawn = [line for line in written.splitlines() if line.startswith(("┏", "┃", "│", "└", "┡"))]
    assert drawn
    written.encode()


def test_a_table_shows_words_as_they_are() -> None:
    from rich.table import Table

    words = "died [/usr/lib/x.py] [red] :100:"
    table = Table(title=words)
    table.add_column(words)
    table.add_row(words)
    assert rendering.drawn(table).count(words) == 3


def test_markup_is_shown_not_obeyed() -> None:
    assert "[bold]x[/bold]" in rendering.text(outcome(candidate(gate("[bold]x[/bold]"))))


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "–"), (0.0, "0"), (0.9, "0.9"), (0.931249, "0.9312"), (-0.0312449, "-0.03124"),
        (12345.6, "12350"), (1e-9, "1e-09"), (123456, "123456"), (1.0, "1"), (math.nan, "nan"),
        (math.inf, "inf"), (0.00012344, "0.0001234"),
    ],
)  # fmt: skip
def test_numbers_have_four_digits(value: float | None, text: str) -> None:
    assert rendering.number(value) == text


# -- files -----------------------------------------------------------------------------------


def test_files_are_replaced_whole_and_summaries_appended(tmp_path: Path) -> None:
    path = tmp_path / "new" / "gate.xml"
    rendering.write_text(path, "one")
    rendering.write_text(path, "two é")
    assert path.read_text(encoding="utf-8") == "two é"
    summary = tmp_path / "summary.md"
    rendering.write_text(summary, "one\n", append=True)
    rendering.write_text(summary, "two\n", append=True)
    assert summary.read_text() == "one\ntwo\n"
    assert sorted(one.name for one in tmp_path.rglob("*")) == ["gate.xml", "new", "summary.md"]


def test_a_link_stays_a_link(tmp_path: Path) -> None:
    real, link = tmp_path / "real.xml", tmp_path / "link.xml"
    real.write_text("old")
    link.symlink_to(real)
    rendering.write_text(link, "new")
    assert link.is_symlink()
    assert real.read_text() == "new"


def test_a_device_is_written_to_not_replaced() -> None:
    code = (
        "from pathlib import Path; from registry.gate_report import write_text;"
        "write_text(Path('/dev/stdout'), 'told'); write_text(Path('/dev/null'), 'x')"
    )
    answer = subprocess.run(
        [sys.executable, "-c", code], cwd=CHECKOUT, capture_output=True, text=True, check=True
    )
    assert answer.stdout == "told"
    assert Path("/dev/null").is_char_device()


@pytest.mark.parametrize("append", [False, True])
@pytest.mark.parametrize("name", [".", "file/gate.xml", "nul\0.xml", "x" * 300])
def test_what_cannot_be_written_is_a_mistake_with_its_path(
    tmp_path: Path, name: str, append: bool
) -> None:
    (tmp_path / "file").write_text("a file, no folder")
    path = tmp_path / name
    with pytest.raises(UserError) as caught:
        rendering.write_text(path, "content", append=append)
    assert str(path) in str(caught.value)
    assert "cannot be written" in str(caught.value)
    assert [one.name for one in tmp_path.iterdir()] == ["file"]


def test_a_write_that_fails_leaves_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "gate.xml"
    rendering.write_text(path, "old")
    monkeypatch.setattr(Path, "replace", lambda *_: (_ for _ in ()).throw(OSError(28, "No space")))
    with pytest.raises(InfrastructureError, match="No space"):
        rendering.write_text(path, "new")
    assert [one.name for one in tmp_path.iterdir()] == ["gate.xml"]
    assert path.read_text() == "old"


def test_rendering_imports_nothing_heavy() -> None:
    heavy = ("prefect", "torch", "mlflow", "pandas", "numpy", "scipy", "jinja2", "rich")
    code = f"import sys, registry.gate_report; print([n for n in {heavy!r} if n in sys.modules])"
    answer = subprocess.run(
        [sys.executable, "-c", code], cwd=CHECKOUT, capture_output=True, text=True, check=True
    )
    assert answer.stdout.strip() == "[]"


# -- the examples for CI systems -------------------------------------------------------------


def example(name: str) -> dict[Any, Any]:
    content = yaml.safe_load((CHECKOUT / "docs" / "ci" / name).read_text(encoding="utf-8"))
    assert isinstance(content, dict)
    return content


def github_steps() -> dict[str, dict[str, Any]]:
    return {step["name"]: step for step in example("github-actions.yml")["jobs"]["gate"]["steps"]}


def test_the_github_example_is_a_workflow() -> None:
    content = example("github-actions.yml")
    # YAML 1.1 reads the key `on` as true; GitHub does not.
    assert set(content) == {"name", True, "permissions", "jobs"}
    for step in github_steps().values():
        assert ("uses" in step) != ("run" in step)
        assert set(step) <= {"name", "id", "if", "uses", "with", "run", "shell", "env"}
        if "uses" in step:
            assert re.fullmatch(r"[\w-]+/[\w-]+@v\d+", step["uses"])
    assert "continue-on-error" not in str(content)
    # Results are published when the gate has refused, above all then.
    assert "!cancelled()" in github_steps()["Publish the JUnit results"]["if"]
    assert "!cancelled()" in github_steps()["Keep the results"]["if"]


def test_the_gitlab_example_is_a_pipeline() -> None:
    job = example("gitlab-ci.yml")["gate"]
    assert job["artifacts"]["reports"]["junit"] == "gate.xml"
    assert job["artifacts"]["when"] == "always"
    assert job["retry"] == {"max": 1, "exit_codes": 4}
    assert "allow_failure" not in job
    text = (CHECKOUT / "docs" / "ci" / "gitlab-ci.yml").read_text(encoding="utf-8")
    assert "  # allow_failure:\n  #   exit_codes: 11\n" in text


STAND_IN = """#!/bin/sh
echo "$@" > arguments
echo a line of the log
echo '{"verdict": "PASS"}'
exit $STATUS
"""


@pytest.mark.parametrize("system", ["github", "gitlab"])
@pytest.mark.parametrize(
    ("status", "words"),
    [(0, ""), (10, "refused"), (11, "INCONCLUSIVE"), (2, "not run"), (4, "not run"), (1, "crash")],
)
def test_the_examples_end_as_the_gate_ended(
    tmp_path: Path, system: str, status: int, words: str
) -> None:
    if system == "github":
        script = github_steps()["Gate"]["run"]
    else:
        (script,) = example("gitlab-ci.yml")["gate"]["script"]
    program = tmp_path / "bin" / "pilotage"
    program.parent.mkdir()
    program.write_text(STAND_IN)
    program.chmod(0o755)
    answer = subprocess.run(
        ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", script],
        cwd=tmp_path,
        env={
            "PATH": f"{program.parent}:/usr/bin:/bin",
            "STATUS": str(status),
            "GITHUB_OUTPUT": str(tmp_path / "output"),
            "GITHUB_STEP_SUMMARY": "summary.md",
        },
        capture_output=True,
        text=True,
    )
    assert answer.returncode == status, answer.stderr
    assert words in answer.stdout
    assert "a line of the log" in answer.stdout
    assert json.loads((tmp_path / "gate.json").read_text()) == {"verdict": "PASS"}
    summary = "summary.md" if system == "github" else "gate.md"
    assert (tmp_path / "arguments").read_text().split() == (
        "gate --policy retention_hit_rate --candidate evidence/candidate "
        f"--reference teacher=evidence/teacher --junit gate.xml --summary {summary} --json"
    ).split()
    if system == "github":
        assert (tmp_path / "output").read_text() == f"status={status}\n"
        assert ("::error" in answer.stdout) == (status != 0)
