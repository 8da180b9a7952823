"""Parts of the page of a release: gates as intervals, the front, flips, lineage, the short page."""

from __future__ import annotations

import json
import re
from datetime import date
from typing import Any

import pandas
import pytest

from eval_suites.selection import choose
from registry import report
from registry.outcome import (
    CandidateOutcome,
    ComparedAxis,
    Flips,
    GateResult,
    Measure,
    ReleaseOutcome,
    Selection,
    Verdict,
    WaiverShown,
)
from registry.release_summary import markdown
from registry.report import ReportDetails
from registry.report_flips import FlippedItem, FlipTexts, compared
from registry.report_gates import panels, ticks
from registry.report_pareto import HEIGHT, WIDTH, scatter, table
from tasks.reporting import flip_texts
from tests.unit.test_report import (
    NASTY,
    NOW,
    bounded_gates,
    details,
    page_of,
    release,
    searched_details,
    searched_release,
)


def words_of(outcome: ReleaseOutcome, shown: ReportDetails) -> str:
    return re.sub(r"\s+", " ", " ".join(page_of(report.render(outcome, shown)).text))


# -- gates as intervals ----------------------------------------------------------------------


def ceiling(**changes: Any) -> GateResult:
    known: dict[str, Any] = {
        "name": "sla", "kind": "ceiling", "metric": "latency.e2el_p90_ms", "tier": "critical",
        "result": Verdict.PASS, "estimate": 400.0, "bound": 600.0, "opposite_bound": 300.0,
        "margin": 1000.0, "limit": 1000.0, "level": 0.05, "candidate": 400.0, "n": 60,
        "reason": "",
    }  # fmt: skip
    return GateResult.model_validate(known | changes)


def test_one_panel_for_each_kind_of_scale() -> None:
    kept = ceiling(kind="floor", metric="latency.kept_rate", bound=None, margin=4.0, estimate=5.0)
    value = ceiling(kind="floor", metric="accuracy.hit_rate", margin=0.8, limit=0.8, estimate=0.9,
                    bound=0.85, opposite_bound=0.95)  # fmt: skip
    shown = panels([*bounded_gates(), ceiling(), kept, value])
    assert [panel.title for panel in shown] == [
        "ratio to the reference", "difference to the reference", "time", "requests/s",
        "the value itself",
    ]  # fmt: skip
    assert [len(panel.strips) for panel in shown] == [1, 2, 1, 1, 1]


def test_places_tell_whether_the_bound_clears_what_was_asked() -> None:
    (ratios, differences, times) = panels([*bounded_gates(), ceiling()])
    retention, regression, slow = ratios.strips[0], differences.strips[0], times.strips[0]
    assert retention.bound is not None
    assert retention.dot is not None
    assert retention.bound < retention.margin < retention.dot, "INCONCLUSIVE: straddles"
    assert retention.refused == (0.0, retention.margin)
    assert retention.span is not None
    assert retention.span[0] == retention.bound
    assert regression.opposite is not None
    assert regression.opposite < regression.margin + 1
    assert slow.refused == (slow.margin, pytest.approx(100 - slow.margin))
    assert slow.span is not None
    assert slow.span[1] == slow.bound
    assert slow.words == "400 ms, bound 600 ms; ≤ 1 s asked"
    assert times.ticks[0] == (0.0, "0")
    for panel in (ratios, differences, times):
        for strip in panel.strips:
            places = (strip.margin, strip.dot, strip.bound, strip.opposite)
            assert all(place is not None and 0 <= place <= 100 for place in places)


def test_an_open_end_reaches_the_edge_and_no_number_has_no_strip() -> None:
    (times,) = panels([ceiling(bound=None), ceiling(estimate=None), ceiling(opposite_bound=None)])
    above, below = times.strips
    assert above.span is not None
    assert above.span[1] == 100.0
    assert below.span is not None
    assert below.span[0] == 0.0
    (point,) = panels([ceiling(bound=None, opposite_bound=None)])[0].strips
    assert point.span is None


@pytest.mark.parametrize(
    ("low", "high", "found"),
    [
        (0.88, 1.27, [0.9, 1.0, 1.1, 1.2]),
        (-0.11, 0.11, [-0.1, -0.05, 0.0, 0.05, 0.1]),
        (0.0, 1060.0, [0.0, 500.0, 1000.0]),
        (0.9305, 0.9345, [0.931, 0.932, 0.933, 0.934]),
    ],
)
def test_ticks_are_round(low: float, high: float, found: list[float]) -> None:
    assert ticks(low, high) == pytest.approx(found)


def test_the_page_draws_every_gate_with_a_number() -> None:
    judged = release().candidates[0].model_copy(update={"gates": [*bounded_gates(), ceiling()]})
    outcome = release().model_copy(update={"candidates": [judged]})
    html = report.render(outcome, details())
    assert html.count('<div class="strip PASS"') == 2
    assert html.count('<div class="strip FAIL"') == 1
    assert html.count('<div class="strip INCONCLUSIVE"') == 1
    assert "retention_hit_rate INCONCLUSIVE: 0.9312, bound 0.8871; ≥ 0.9000 asked" in html


# -- the front -------------------------------------------------------------------------------


def axis(key: str, better: str, **values: Any) -> ComparedAxis:
    return ComparedAxis.model_validate(
        {
            "key": key,
            "label": key,
            "better": better,
            "values": {
                name: Measure(value=v, low=v, high=v) if not isinstance(v, Measure) else v
                for name, v in values.items()
            },
        }
    )


def selection(**changes: Any) -> Selection:
    known: dict[str, Any] = {
        "objective": "fastest",
        "axes": [
            axis("accuracy", "higher", a=0.95, b=0.93, c=0.92),
            axis(
                "kept_rate", "higher", a=Measure(value=4, low=4, high=8),
                b=Measure(value=5, low=5), c=Measure(value=2, low=2, high=3),
            ),
            axis("memory", "lower", a=2e6, b=1e6, c=None),
        ],
        "front": ["a", "b"],
        "dominated": {"c": ["a", "b"]},
        "nearly": {"b": ["a"]},
        "chosen": "b",
        "reason": "b was chosen",
    }  # fmt: skip
    return Selection.model_validate(known | changes)


def test_the_table_has_all_axes_and_says_who_is_dominated_by_whom() -> None:
    rows = table(selection())
    assert [(row.name, row.place) for row in rows] == [
        ("a", "front"),
        ("b", "front; no better than a anywhere, within the noise"),
        ("c", "dominated by a, b"),
    ]
    assert rows[0].cells == [
        ("0.950", ""), ("4 requests/s", "4 to 8 requests/s"), ("2.0 MB", ""),
    ]  # fmt: skip
    assert rows[1].cells[1] == ("5 requests/s", "5 requests/s or more")
    assert rows[2].cells[2] == ("–", "")
    cost = axis("cost", "lower", a=Measure(value=2, high=2), b=Measure(value=1, low=0.5, high=1))
    assert [row.cells for row in table(selection(axes=[cost]))] == [
        [("2", "up to 2")], [("1", "0.5 to 1")],
    ]  # fmt: skip
    weighed = selection(
        objective="weights", weights={"accuracy": 1.0},
        scores={"a": Measure(value=1.0), "b": Measure(value=0.97), "c": Measure(value=None)},
    )  # fmt: skip
    assert [row.cells[-1][0] for row in table(weighed)] == ["1.000", "0.970", "–"]


def test_the_drawing_shows_the_objective_against_accuracy() -> None:
    drawn = scatter(selection())
    assert drawn is not None
    assert drawn.x_title == "kept_rate: → better"
    assert drawn.y_title == "accuracy: ↑ better"
    looks = {spot.name: spot.look for spot in drawn.spots}
    assert looks == {"a": "front", "b": "chosen", "c": "beaten"}
    by_name = {spot.name: spot for spot in drawn.spots}
    assert by_name["c"].x < by_name["a"].x < by_name["b"].x
    assert by_name["a"].y < by_name["b"].y < by_name["c"].y, "SVG counts downwards"
    assert by_name["a"].across[0] < by_name["a"].across[1]
    for spot in drawn.spots:
        assert 0 < spot.x < WIDTH
        assert 0 < spot.y < HEIGHT


def test_the_axes_follow_the_objective_and_who_lacks_one_is_named() -> None:
    small = scatter(selection(objective="smallest"))
    assert small is not None
    assert small.x_title == "memory: ← better"
    assert small.missing == ["c"]
    accurate = scatter(selection(objective="most_accurate"))
    assert accurate is not None
    assert (accurate.x_title, accurate.y_title) == ("kept_rate: → better", "accuracy: ↑ better")
    weighed = scatter(selection(objective="weights", weights={"memory": 0.7, "kept_rate": 0.3}))
    assert weighed is not None
    assert "memory" in weighed.y_title
    assert "kept_rate" in weighed.x_title


def test_an_axis_on_which_nobody_differs_is_not_drawn_while_another_is_there() -> None:
    same = [axis("accuracy", "higher", a=0.9, b=0.9, c=0.9), *selection().axes[1:]]
    drawn = scatter(selection(axes=same))
    assert drawn is not None
    assert {"memory", "kept_rate"} == {drawn.x_title.split(":")[0], drawn.y_title.split(":")[0]}


def test_no_drawing_without_two_axes_or_two_candidates() -> None:
    assert scatter(selection(axes=[axis("memory", "lower", a=1.0, b=2.0)])) is None
    alone = [axis("memory", "lower", a=1.0), axis("cost", "lower", a=1.0)]
    assert scatter(selection(axes=alone)) is None
    assert scatter(Selection(objective="fastest", reason="No candidate passed.")) is None
    assert table(Selection(objective="fastest", reason="No candidate passed.")) == []


def test_names_beside_spots_do_not_lie_on_each_other() -> None:
    names = [f"candidate_number_{one}" for one in range(8)]
    crowd = selection(
        axes=[
            axis("accuracy", "higher", **{n: 0.93 + 0.0001 * i for i, n in enumerate(names)}),
            axis("latency", "lower", **{n: 100.0 + i for i, n in enumerate(names)}),
        ],
        dominated={},
    )
    drawn = scatter(crowd)
    assert drawn is not None
    assert len({spot.label for spot in drawn.spots}) == 8


def test_the_selection_stands_on_the_page() -> None:
    text = words_of(searched_release(), searched_details())
    assert "Selection Those that passed, on every axis that was measured." in text
    assert "bf16_eagle3 chosen" in text
    assert "One candidate dominates another when" in text
    refused = searched_release().model_copy(update={"selection": None, "promoted": None})
    assert "dominates another" not in words_of(refused, searched_details())


def test_that_nothing_could_be_chosen_stands_there_too() -> None:
    ours = searched_release().candidates
    outcome = searched_release().model_copy(
        update={"promoted": None, "selection": choose(ours, "cheapest")}
    )
    assert "Nothing was chosen of 2 that passed: cheapest needs cost" in words_of(
        outcome, searched_details()
    )


# -- flips -----------------------------------------------------------------------------------


def test_what_two_answers_do_not_share_is_marked() -> None:
    left, right = compared('{"intent":"track"} 订单在上海', '{"intent":"cancel"} 订单在北京')
    assert "".join(one.text for one in left) == '{"intent":"track"} 订单在上海'
    assert "".join(one.text for one in right) == '{"intent":"cancel"} 订单在北京'
    assert [one.text for one in left if one.differs] == ["track", "上海"]
    assert [one.text for one in right if one.differs] == ["cancel", "北京"]
    assert compared("same", "same")[0][0].differs is False
    long = "a b " * 2000
    assert [one.differs for one in compared(long, "x")[0]] == [False]
    assert compared("", "new")[0] == []


def test_flips_stand_side_by_side_and_are_escaped() -> None:
    item = FlippedItem(
        item_id="eval-7", side="lost", segment="zh", prompt=NASTY, expected="x", theirs="right",
        ours=NASTY,
    )  # fmt: skip
    texts = FlipTexts(
        candidate="bf16", gate="retention", metric="hit_rate", reference="teacher", gained=2,
        lost=5, items=[item],
    )  # fmt: skip
    html = report.render(release(), details().model_copy(update={"flips": [texts]}))
    assert "<script>" not in html
    text = re.sub(r"\s+", " ", " ".join(page_of(html).text))
    assert "hit_rate against the teacher: 5 lost, 2 gained" in text
    assert "lost eval-7 · zh" in text
    assert "Flips" not in words_of(release(), details())


def test_texts_of_flips_are_read_from_the_items(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = [
        {"id": f"e{n}", "segment": "zh", "prompt": f"prompt {n}", "reference": {"intent": "a"}}
        for n in range(9)
    ]
    (tmp_path / "eval.jsonl").write_text("\n".join(json.dumps(line) for line in lines))
    monkeypatch.setattr("tasks.reporting.folder_of", lambda _: tmp_path)
    tables = {
        who: pandas.DataFrame(
            {"item_id": [f"e{n}" for n in range(8)], "response": [f"{who} {n}" for n in range(8)]}
        ).set_index("item_id")
        for who in ("teacher", "bf16", "int8")
    }
    flips = Flips(
        gained=3, lost=6, gained_items=["e0", "e1", "e2"],
        lost_items=["e3", "e4", "e8", "e5", "e6"],
    )  # fmt: skip
    none = Flips(gained=0, lost=0)
    first, second, _ = bounded_gates()
    gates = [
        first.model_copy(update={"name": "early", "flips": none}),
        first.model_copy(update={"flips": flips}),
        first.model_copy(update={"name": "student", "reference_name": "student", "flips": flips}),
        second,
    ]
    judged = release().candidates[0].model_copy(update={"name": "int8", "gates": gates})
    outcome = release().model_copy(update={"candidates": [judged, release().candidates[-1]]})

    class Todo:
        prompts = None

        class resolved:
            class release:
                reference_candidate = "bf16"

    found = flip_texts(Todo, tables, outcome)  # type: ignore[arg-type]
    assert [(one.reference, one.gate) for one in found] == [
        ("student", "student"), ("teacher", "retention_hit_rate"),
    ]  # fmt: skip
    (student, teacher) = found
    assert [(i.side, i.item_id) for i in teacher.items] == [
        ("lost", "e3"), ("lost", "e4"), ("lost", "e5"), ("gained", "e0"), ("gained", "e1"),
    ]  # fmt: skip
    assert (teacher.items[0].theirs, teacher.items[0].ours) == ("teacher 3", "int8 3")
    assert student.items[0].theirs == "bf16 3"
    assert teacher.items[0].expected == '{"intent": "a"}'
    assert (teacher.gained, teacher.lost) == (3, 6)


# -- lineage, aliases, costs -----------------------------------------------------------------


def test_lineage_and_ledger_have_their_sections_only_where_there_is_something() -> None:
    svg = (
        '<?xml version="1.0"?>\n<!DOCTYPE svg>\n<svg width="9pt"><g><text>prompts</text></g></svg>'
    )
    shown = details().model_copy(
        update={"lineage_svg": svg, "ledger": [f"1 champion 3 -> 4 {NASTY}"]}
    )
    html = report.render(release(), shown)
    assert '<svg width="9pt">' in html
    assert "<?xml" not in html
    assert "<script>" not in html
    text = words_of(release(), shown)
    assert "Champion now: version 4" in text
    assert "Before it: version 3" in text
    assert "1 champion 3 -> 4 <script>" in text
    assert "Lineage" not in words_of(release(), details())
    assert "Lineage" not in words_of(release(), shown.model_copy(update={"lineage_svg": "no"}))


def test_costs_and_acceptance_stand_with_the_candidates_where_they_were_measured() -> None:
    ours = release().candidates
    priced = [
        one.model_copy(
            update={
                "draft_bytes": 1_700_000 if one.draft else None,
                "latency": [
                    point.model_copy(update={"cost": {"per_million_output_tokens": 1.25}})
                    for point in one.latency
                ],
            }
        )
        for one in ours
    ]
    text = words_of(release().model_copy(update={"candidates": priced}), details())
    assert "Cost per million output tokens" in text
    assert "1.25" in text
    assert "+ 1.7 MB draft" in text
    assert "5.8 MB of target and draft" in text
    assert "Cost per million" not in words_of(release(), details())


def test_an_outcome_of_before_is_still_read() -> None:
    written = json.loads(release().model_dump_json())
    assert written.pop("selection") is None
    for one in written["candidates"]:
        del one["draft_bytes"]
    assert ReleaseOutcome.model_validate(written) == release()


# -- the short page --------------------------------------------------------------------------


def test_the_short_page_says_who_was_chosen_and_who_refused() -> None:
    text = markdown(release().model_copy(update={"selection": selection()}))
    for words in (
        "## demo: PASS",
        "**w8a8_int8_eagle3 promoted as freight-assistant version 4**",
        "b was chosen",
        "| candidate | verdict | hit_rate | slot_f1 | satisfaction | P99 E2EL | acceptance |",
        "| w8a8_int8_eagle3 | PASS |",
        "Refused:",
        "- w4a16_gptq: vllm 0.32.0+cpu cannot serve it",
        "Champion: version 4",
        "before: version 3 (eeeeeeeeeeee).",
        "MLflow run 0f0f",
    ):
        assert words in text, words
    assert len(text.splitlines()) < 60


def test_the_short_page_of_a_search_with_costs() -> None:
    text = markdown(searched_release())
    assert "keeps the SLA at req/s" in text
    assert "| bf16_eagle3 | PASS |" in text
    assert "5.657, not 8" in text
    assert "| promoted |" in text
    assert "Refused" not in text


def test_the_short_page_shows_what_was_written_and_nothing_else() -> None:
    odd = CandidateOutcome(
        name="a|b", bundle="", verdict=Verdict.INVALID,
        reasons=[f"line\n# one | two `three` {NASTY}" + " long" * 500],
    )  # fmt: skip
    outcome = ReleaseOutcome(
        release="0" * 64, name="x*y", verdict=Verdict.INVALID, model="m", candidates=[odd] * 20,
        finished_at=NOW, seconds=1.0,
        waivers=[
            WaiverShown(gate="g", owner="o|p", reason="", expires=date(2030, 1, 1), state="active")
        ],
    )  # fmt: skip
    text = markdown(outcome)
    assert r"## x\*y: INVALID" in text
    assert r"| a\|b | INVALID |" in text
    assert r"one \| two \`three\`" in text
    assert "<script" not in text
    assert "&lt;script&gt;" in text
    assert "- and 8 more" in text
    assert r"Waived: g by o\|p until 2030-01-01" in text
    assert "Champion: none; before: unchanged." in text
    assert max(map(len, text.splitlines())) < 500
    assert len(text.splitlines()) < 60
