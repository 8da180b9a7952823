"""The page of a release: complete, self-contained, and safe with whatever a model wrote."""

from __future__ import annotations

import base64
import random
import re
from datetime import UTC, date, datetime
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from eval_suites.selection import choose
from flows.rendering import outcome_text
from registry import report, report_charts, report_latency
from registry import report_numbers as numbers
from registry.digests import digest_of
from registry.engine_memory import ComparedMemory
from registry.evidence import LoadPoint, percentiles
from registry.outcome import (
    CandidateOutcome,
    Champion,
    Flips,
    GateResult,
    LoosenedGate,
    ReleaseOutcome,
    StageOutcome,
    Verdict,
    Waived,
    WaiverShown,
)
from registry.release_summary import markdown
from registry.report import Example, ReferenceFigures, ReportDetails, Response, write_report
from registry.report_latency import LatencyFigures, Picture
from registry.report_steps import steps_table

NOW = datetime(2030, 1, 2, 3, 4, 5, tzinfo=UTC)
RATES = (0.5, 1.0, 2.0, 4.0)
TEACHER = {"hit_rate": 0.905, "slot_f1": 0.874, "satisfaction": 0.881, "format_valid": 0.995}
STUDENT = {"hit_rate": 0.880, "slot_f1": 0.842, "satisfaction": 0.853, "format_valid": 0.990}
SEGMENTS = ("customer_zh", "customer_en", "driver_zh", "driver_en")
NASTY = "<script>alert('x')</script> & \"quotes\" </div><img src=http://evil.example/x.png>"


def load_points(base_ms: float, draft: bool, seed: int, failing: bool = False) -> list[LoadPoint]:
    """Times that rise with the rate, as a queue's do; the last rate may lose requests."""
    rng = random.Random(seed)
    made = []
    for rate in RATES:
        crowd = 1 + (rate / 4) ** 2 * 3
        times = [base_ms * crowd * rng.lognormvariate(0, 0.25) for _ in range(40)]
        failed = 6 if failing and rate == RATES[-1] else 0
        answered = times[: 40 - failed]
        made.append(
            LoadPoint(
                rate=rate,
                achieved_rate=rate * 0.98,
                total=40,
                ok=len(answered),
                failed=failed,
                duration_s=40 / rate,
                ttft_ms=percentiles([t * 0.12 for t in answered], failed),
                tpot_ms=percentiles([t * 0.012 for t in answered], failed),
                itl_ms=percentiles([t * 0.013 for t in answered], failed),
                e2el_ms=percentiles(answered, failed),
                output_tokens_per_s=60 * rate,
                acceptance_length=2.71 + rng.uniform(-0.1, 0.1) if draft else None,
                prefix_cache_hit_rate=0.42,
            )
        )
    return made


def gate(
    name: str, metric: str, kind: str, own: float | None, theirs: float | None, margin: float,
    result: Verdict, reason: str, who: str | None = None,
) -> GateResult:  # fmt: skip
    ratio = own / theirs if own is not None and theirs else None
    estimate = {"retention": ratio, "ceiling": own}.get(kind)
    return GateResult(
        name=name,
        kind=kind,
        metric=metric,
        tier="critical",
        result=result,
        estimate=estimate,
        margin=margin,
        candidate=own,
        reference=theirs,
        reference_name=who,
        ratio=ratio,
        rate=2.0 if kind == "ceiling" else None,
        n=200 if kind == "retention" else 40,
        reason=reason,
    )


def candidate(
    name: str, loss: float, base_ms: float, *, draft: bool = False, failing: bool = False
) -> CandidateOutcome:
    metrics: dict[str, float | None] = {k: round(v - loss, 4) for k, v in STUDENT.items()}
    points = load_points(base_ms, draft, len(name), failing)
    p99 = points[2].e2el_ms["p99"]
    assert p99 is not None
    gates = []
    for label, reference, margin in (("teacher", TEACHER, 0.90), ("student", STUDENT, 0.97)):
        for metric in ("hit_rate", "slot_f1", "satisfaction"):
            own = metrics[metric]
            assert own is not None
            good = own / reference[metric] >= margin
            words = "keeps" if good else "keeps only"
            gates.append(
                gate(
                    f"{'retention' if label == 'teacher' else 'recovery'}_{metric}",
                    f"accuracy.{metric}",
                    "retention",
                    own,
                    reference[metric],
                    margin,
                    Verdict.PASS if good else Verdict.FAIL,
                    f"{words} {own / reference[metric]:.4f} of the {label}'s accuracy.{metric} "
                    f"({own:.4g} / {reference[metric]:.4g}), at least {margin:g} asked",
                    label,
                )
            )
    fast = p99 <= 2500
    gates.append(
        gate(
            "sla_e2el_p99", "latency.e2el_p99_ms", "ceiling", p99, None, 2500.0,
            Verdict.PASS if fast else Verdict.FAIL,
            f"latency.e2el_p99_ms at 2 requests/s is {p99:.6g}, at most 2500 asked",
        )
    )  # fmt: skip
    refused = [f"{g.name} {g.result}: {g.reason}" for g in gates if g.result is not Verdict.PASS]
    return CandidateOutcome(
        name=name,
        bundle=digest_of(name),
        verdict=Verdict.FAIL if refused else Verdict.PASS,
        reasons=refused,
        gates=gates,
        metrics=metrics,
        latency=points,
        target=name.removesuffix("_eagle3"),
        draft=draft,
        size_bytes=round(7.1e6 * (1 if name.startswith("bf16") else 0.58)),
        engines={"accuracy": "vllm 0.32.0+cpu", "latency": "vllm 0.32.0+cpu"},
    )


def infeasible() -> CandidateOutcome:
    reason = (
        "vllm 0.32.0+cpu cannot serve it on this hardware: AttributeError: '_OpNamespace' '_C' "
        "object has no attribute 'cpu_gemm_wna16'"
    )
    return CandidateOutcome(
        name="w4a16_gptq",
        bundle="f" * 64,
        verdict=Verdict.INFEASIBLE,
        reasons=[reason],
        gates=[
            gate("retention_hit_rate", "accuracy.hit_rate", "retention", 0.861, 0.905, 0.9,
                 Verdict.INFEASIBLE, reason, "teacher"),
            gate("sla_e2el_p99", "latency.e2el_p99_ms", "ceiling", None, None, 2500.0,
                 Verdict.INFEASIBLE, reason),
        ],
        metrics={"hit_rate": 0.861, "slot_f1": 0.82, "satisfaction": 0.83, "format_valid": 0.98},
        target="w4a16_gptq",
        size_bytes=2_300_000,
        engines={"accuracy": "transformers 5.16.0 (reference engine)"},
    )  # fmt: skip


def release() -> ReleaseOutcome:
    candidates = [
        candidate("bf16", 0.0, 640),
        candidate("bf16_eagle3", 0.0, 410, draft=True),
        candidate("w8a8_int8", 0.004, 520),
        candidate("w8a8_int8_eagle3", 0.004, 340, draft=True),
        candidate("fp8_dynamic", 0.002, 3600, failing=True),
        candidate("w8a8_static_harsh", 0.19, 500),
        infeasible(),
    ]
    stages = [
        ("prompts", 2.1), ("teacher_model", 131.0), ("teacher_data", 96.0), ("distill", 104.0),
        ("quantize w8a8_int8", 4.9), ("quantize fp8_dynamic", 0.4), ("draft", 171.0),
        ("accuracy bf16", 61.0), ("latency bf16", 82.0), ("accuracy w8a8_int8", 58.0),
    ]  # fmt: skip
    return ReleaseOutcome(
        release="a1b2c3d4" * 8,
        name="demo",
        verdict=Verdict.PASS,
        model="freight-assistant",
        version=4,
        promoted="w8a8_int8_eagle3",
        champion=Champion(version=4, bundle=candidates[3].bundle),
        previous=Champion(version=3, bundle="e" * 64, alias="previous"),
        candidates=candidates,
        stages=[
            StageOutcome(
                name=name,
                key=f"{number:02d}" * 32,
                reused=number < 4,
                seconds=0.03 if number < 4 else seconds,
                made_seconds=seconds,
            )
            for number, (name, seconds) in enumerate(stages)
        ],
        run_id="0f" * 16,
        policy="demo",
        suite="freight",
        profile="cpu_2core",
        recipe_digest="9c" * 32,
        finished_at=NOW,
        seconds=911.0,
    )


def details() -> ReportDetails:
    rng = random.Random(1)
    people = {"teacher": 0.9, "bf16": 0.88, "w8a8_int8_eagle3": 0.87, "w8a8_static_harsh": 0.68}
    answer = (
        '{"intent":"track_order","slots":{"order":"FH-20871"},'
        '"reply":"您好，订单FH-20871正在查询。"}'
    )
    wrong = answer.replace("track_order", "complain")
    return ReportDetails(
        references=[
            ReferenceFigures(
                name="teacher", bundle="7" * 64, engine="vllm 0.32.0+cpu", metrics=TEACHER
            )
        ],
        student="bf16",
        segments={
            "hit_rate": {
                segment: {who: mean + rng.uniform(-0.05, 0.05) for who, mean in people.items()}
                for segment in SEGMENTS
            }
        },
        segment_sizes=dict.fromkeys(SEGMENTS, 50),
        examples=[
            Example(
                item_id="eval-0007",
                segment="customer_zh",
                prompt="师傅你好，我那个单FH-20871到哪了啊😡都两天了",
                expected="track_order, order=FH-20871",
                responses=[
                    Response(name="teacher", text=answer, right=True),
                    Response(name="bf16", text=answer, right=True),
                    Response(name="w8a8_int8_eagle3", text=answer, right=True),
                    Response(name="w8a8_static_harsh", text=wrong, right=False),
                ],
            ),
            Example(
                item_id="eval-0012",
                segment="driver_en",
                prompt=f"cant find the dock {NASTY}",
                responses=[
                    Response(name="teacher", text=NASTY, right=None),
                    Response(name="bf16", text="", right=False),
                    Response(name="w8a8_int8_eagle3", text="long " * 2000, right=False),
                ],
            ),
        ],
        environments={
            "Driver environment": {"python": "3.11.9", "torch": "2.13.0", "mlflow": "3.17.2"},
            "Serve environment": {"vllm": "0.32.0+cpu", "torch": "2.13.0+cpu"},
            "Hardware": {"cpu": "2 cores, AVX2", "memory": "24 GiB", "gpu": "none"},
            "Code": {"git": "1f2e3d4c5b6a79880f1e2d3c4b5a69788f7e6d5c"},
        },
    )


class Page(HTMLParser):
    """Checks that tags close in order, and collects what the page would load."""

    VOID = frozenset({"meta", "line", "circle", "polyline", "br", "link", "img"})

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: set[str] = set()
        self.loads: list[str] = []
        self.text: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.add(tag)
        self.loads += [value or "" for name, value in attrs if name in ("src", "href")]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.add(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text.append(data)


def page_of(text: str) -> Page:
    page = Page()
    page.feed(text)
    page.close()
    assert page.open == []
    return page


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_report(release(), details(), tmp_path_factory.mktemp("reports"))


def test_page_stands_alone(written: Path) -> None:
    text = written.read_text(encoding="utf-8")
    page = page_of(text)
    assert len(text.encode()) < 3_000_000
    assert page.loads == []
    assert not page.seen & {"script", "img", "link", "iframe"}
    assert "url(" not in text
    assert "@import" not in text
    assert [path.name for path in written.parent.iterdir()] == [written.name]


def test_page_tells_the_whole_story(written: Path) -> None:
    text = re.sub(r"\s+", " ", " ".join(page_of(written.read_text(encoding="utf-8")).text))
    for words in (
        "w8a8_int8_eagle3 promoted as freight-assistant version 4",
        "before it version 3",
        "Point estimates, no bound yet",
        "cpu_gemm_wna16",
        "keeps only",
        "SLA 2.50 s",
        "no P99: too many requests failed",
        "Draft off and on",
        "customer_zh",
        "您好，订单FH-20871正在查询。",
        "teacher, bf16, w8a8_int8_eagle3",
        "(nothing)",
        "more characters)",
        "4 of 10 stages were reused",
        "vllm",
        "2 cores, AVX2",
    ):
        assert words in text, words


def bounded_gates() -> list[GateResult]:
    """One gate of each form that statistics can give a result."""
    retention = GateResult(
        name="retention_hit_rate",
        kind="retention",
        metric="accuracy.hit_rate",
        tier="critical",
        result=Verdict.INCONCLUSIVE,
        estimate=0.9312,
        bound=0.8871,
        opposite_bound=0.9733,
        margin=0.9,
        level=0.0125,
        p_value=0.11,
        method="score interval of paired proportions",
        candidate=0.843,
        reference=0.905,
        reference_name="teacher",
        ratio=0.9315,
        n=200,
        units=171,
        mde=0.9577,
        needed=640,
        reason="the interval 0.8871 to 0.9733 straddles 0.9",
    )
    regression = retention.model_copy(
        update={
            "name": "regression_hit_rate",
            "kind": "regression",
            "result": Verdict.FAIL,
            "estimate": -0.045,
            "bound": -0.0712,
            "opposite_bound": -0.0203,
            "margin": 0.02,
            "limit": -0.02,
            "mde": 0.0041,
            "needed": None,
            "reference_name": "champion",
            "flips": Flips(
                gained=2,
                lost=11,
                gained_items=["eval-0003"],
                lost_items=["eval-0008", "<b>eval-0013</b>"],
                mcnemar_p=0.02246,
            ),
            "waived": Waived(owner="ops", reason="known bad labels", expires=date(2030, 2, 1)),
            "reason": "loses 0.045 to the champion",
        }
    )
    worst = retention.model_copy(
        update={
            "name": "worst_segment",
            "kind": "slice",
            "tier": "supporting",
            "result": Verdict.PASS,
            "estimate": -0.01,
            "bound": -0.048,
            "opposite_bound": 0.028,
            "margin": -0.05,
            "mde": None,
            "needed": None,
            "slice": "segment=driver_zh",
            "reason": "the worst slice loses 0.01",
        }
    )
    return [retention, regression, worst]


def bounded_release() -> ReleaseOutcome:
    judged = candidate("w8a8_int8", 0.004, 520).model_copy(
        update={"gates": bounded_gates(), "verdict": Verdict.INCONCLUSIVE}
    )
    return release().model_copy(update={"candidates": [judged], "promoted": None})


def bounded_details() -> ReportDetails:
    return details().model_copy(
        update={
            "waivers": [
                WaiverShown(
                    gate="regression_hit_rate", owner="ops", reason="known bad labels",
                    expires=date(2030, 2, 1), state="active",
                ),
                WaiverShown(
                    gate="sla_e2el_p99", owner="infra", reason="old cards",
                    expires=date(2029, 1, 1), state="expired",
                ),
            ],
            "loosened": [
                LoosenedGate(
                    gate="retention_hit_rate", what="margin 0.95 -> 0.90", acknowledged_by=None
                )
            ],
            "notes": ["levels divided among 4 candidates (Holm)"],
        }
    )  # fmt: skip


def test_nothing_that_decided_is_hidden() -> None:
    page = page_of(report.render(bounded_release(), bounded_details()))
    text = re.sub(r"\s+", " ", " ".join(page.text))
    for words in (
        "A gate with a bound passes when the bound clears its margin",
        "bound 0.8871",
        "other 0.9733",
        "≥ 0.9",
        "≥ -0.02",
        "0.0125",
        "p 0.11",
        "171 clusters",
        "0.9577",
        "640 more",
        "score interval of paired proportions",
        "Worst slice: segment=driver_zh",
        "-0.0712",
        "Flips: 2 gained, 11 lost, exact McNemar p 0.022; first lost: eval-0008, "
        "<b>eval-0013</b>; first gained: eval-0003",
        "Waived and without a say in this verdict: "
        "regression_hit_rate of w8a8_int8 (FAIL, ops, until 2030-02-01)",
        "Waived by ops until 2030-02-01: known bad labels",
        "sla_e2el_p99 expired infra 2029-01-01 old cards",
        "retention_hit_rate margin 0.95 -> 0.90 nobody",
        "levels divided among 4 candidates (Holm)",
    ):
        assert words in text, words
    assert "Point estimates, no bound yet" not in text


def test_without_waivers_and_notes_there_is_no_such_section(written: Path) -> None:
    text = written.read_text(encoding="utf-8")
    assert "Waivers, loosened gates and notes" not in text
    assert "<b>Waived</b>" not in text


def test_a_bound_tells_which_side_of_the_margin_is_asked_for() -> None:
    better_when_low = bounded_gates()[1].model_copy(
        update={"bound": 0.07, "opposite_bound": 0.02, "margin": 0.05}
    )
    assert numbers.asked(better_when_low) == "≤ "
    assert [numbers.asked(one) for one in bounded_gates()] == ["≥ "] * 3
    unbounded = bounded_gates()[1].model_copy(update={"bound": None})
    assert numbers.asked(unbounded) == ""


@pytest.mark.parametrize(
    ("kind", "metric", "value", "text"),
    [
        ("retention", "accuracy.hit_rate", 0.93124, "0.9312"),
        ("retention", "latency.e2el_p99_ms", 1.02, "1.0200"),
        ("ceiling", "latency.e2el_p99_ms", 1234.5, "1.23 s"),
        ("non_inferiority", "latency.e2el_p99_ms", -1234.5, "-1.23 s"),
        ("regression", "accuracy.hit_rate", 0.012, "+0.0120"),
        ("slice", "accuracy.hit_rate", -0.012, "-0.0120"),
        ("floor", "accuracy.hit_rate", None, "–"),
    ],
)
def test_one_scale_for_estimate_bound_and_margin(
    kind: str, metric: str, value: float | None, text: str
) -> None:
    one = bounded_gates()[0].model_copy(update={"kind": kind, "metric": metric})
    assert numbers.scaled(value, one) == text


def test_model_output_is_escaped(written: Path) -> None:
    text = written.read_text(encoding="utf-8")
    assert "<script>" not in text
    assert "&lt;script&gt;alert" in text
    assert "<img" not in text


def test_refused_release_with_nothing_measured(tmp_path: Path) -> None:
    never = CandidateOutcome(
        name="broken", bundle="", verdict=Verdict.INVALID, reasons=["zero layers were quantized"]
    )
    outcome = ReleaseOutcome(
        release="0" * 64,
        name="demo",
        verdict=Verdict.INVALID,
        model="freight-assistant",
        candidates=[never],
        finished_at=NOW,
        seconds=3.0,
    )
    page = page_of(write_report(outcome, ReportDetails(), tmp_path).read_text(encoding="utf-8"))
    text = " ".join(page.text)
    assert "Nothing promoted for freight-assistant" in text
    assert "zero layers were quantized" in text


def test_written_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_report(release(), details(), tmp_path)
    before = path.read_bytes()
    monkeypatch.setattr(report, "render", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        write_report(release(), details(), tmp_path)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def test_charts_share_axes_and_mark_lost_requests() -> None:
    outcome = release()
    drawn = report_charts.charts(outcome.candidates, report_latency.sla_of(outcome.candidates))
    assert len(drawn) == 6
    assert len({chart.sla_y for chart in drawn}) == 1
    fp8 = next(chart for chart in drawn if chart.candidate.name == "fp8_dynamic")
    assert [dot.label is None for dot in fp8.dots] == [False, False, False, True]
    assert all(0 <= dot.y <= report_charts.HEIGHT for chart in drawn for dot in chart.dots)


def test_a_void_point_of_fixed_rates_is_no_part_of_the_line() -> None:
    points = load_points(500, draft=False, seed=1)
    points[1] = points[1].model_copy(update={"answer": "void", "cause": "the cache answered"})
    one = candidate("bf16", 0.0, 500).model_copy(update={"latency": points[::-1]})
    (chart,) = report_charts.charts([one], report_latency.sla_of([one]))
    assert len(chart.line.split()) == 3
    xs = [float(place.split(",")[0]) for place in chart.line.split()]
    assert xs == sorted(xs), "by rate, in whatever order they were measured"
    assert [dot.void for dot in chart.dots] == [False, True, False, False]


def test_drafts_are_paired_by_target() -> None:
    pairs = report_latency.draft_pairs(release().candidates)
    assert [(pair.off.name, pair.on.name) for pair in pairs] == [
        ("bf16", "bf16_eagle3"),
        ("w8a8_int8", "w8a8_int8_eagle3"),
    ]
    assert len(pairs[0].points) == len(RATES)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(None, "–"), (0.04, "0.0 s"), (48.2, "48 s"), (59.7, "1 min 00 s"), (7500, "2 h 05 min")],
)
def test_durations(seconds: float | None, text: str) -> None:
    assert numbers.duration(seconds) == text


def test_milliseconds() -> None:
    shown = [numbers.short_ms(value) for value in (None, 0.512, 87.2, 1000.0, 1234.5, 12_345.0)]
    assert shown == ["–", "0.51 ms", "87 ms", "1 s", "1.23 s", "12.3 s"]


# -- a release whose load profile was a search -----------------------------------------------

SLA = "e2el p99 2000ms"
PNG = b"\x89PNG\r\n\x1a\n and so on"


def step(rate: float, answer: str | None, p99: float | None = 900.0, **changes: Any) -> LoadPoint:
    (point, *_) = load_points(300, draft=False, seed=1)
    judged = answer not in (None, "void")
    known: dict[str, Any] = {
        "rate": rate,
        "achieved_rate": rate,
        "answer": answer,
        "values": {SLA: p99} if judged else {},
        "bounds": {SLA: p99 and p99 * 1.5} if judged else {},
        "goodput": rate * 0.9,
    }
    return LoadPoint.model_validate(point.model_dump() | known | changes)


STEPS = [
    step(4, "kept"),
    step(8, "not kept", None, failed=5, cause="e2el p99 2000ms: 5 over"),
    step(5.657, "kept", 1100.0),
    step(6.727, "void", cause="prefix-cache hit rate 0.56"),
    step(6.8, "undecided", 1900.0, cause="one over would lose it"),
    step(5.657, "kept", 1200.0, total=1200, cost={"per_request": 0.0000123}),
]


def found(
    name: str, kept_rate: tuple[float | None, float | None], steps: list[LoadPoint] = STEPS
) -> CandidateOutcome:
    one = candidate(name, 0.0, 500, draft=name.endswith("_eagle3"))
    gates = [gate for gate in one.gates if gate.kind != "ceiling"]
    changes = {"latency": steps, "kept_rate": kept_rate, "gates": gates, "reasons": []}
    return one.model_copy(update=changes | {"verdict": Verdict.PASS})


def searched_release(*others: CandidateOutcome) -> ReleaseOutcome:
    candidates = [found("bf16", (4, 5.0), STEPS[:1]), found("bf16_eagle3", (5.657, 8)), *others]
    known = {"candidates": candidates, "promoted": "bf16_eagle3"}
    return release().model_copy(update=known | {"selection": choose(candidates, "fastest")})


def searched_details(**changes: Any) -> ReportDetails:
    pictures = [Picture(title="latency against request rate", png=PNG)]
    figures = {
        "bf16": LatencyFigures(sla=[SLA], sustained=False),
        "bf16_eagle3": LatencyFigures(
            sla=[SLA], sustained=True, notes=["6.727 was void <once>"], pictures=pictures
        ),
    }
    known = {
        "latency": figures,
        "compared": [Picture(title="all candidates", png=PNG)],
    }
    return details().model_copy(update=known | changes)


def words_of(outcome: ReleaseOutcome, shown: ReportDetails) -> str:
    return re.sub(r"\s+", " ", " ".join(page_of(report.render(outcome, shown)).text))


def test_a_search_is_told_with_its_steps() -> None:
    text = words_of(searched_release(infeasible()), searched_details())
    for words in (
        "bf16_eagle3 was chosen as the fastest of 2 that passed: request rate that keeps the SLA "
        "5.657 requests/s (next: bf16, 4 requests/s).",
        "4 requests/s 4 to 5 requests/s",
        "Highest rate that keeps the SLA 5.657 req/s not kept at 8; E2EL P99 ≤ 2 s",
        "searched in steps: E2EL P99 ≤ 2 s",
        "bf16 reference student 4 5 no 40",
        "bf16_eagle3 draft on promoted 5.657 8 yes",
        "keeps 5.657, not 8 requests/s",
        "e2el p99 2000ms: 5 over",
        "! void",
        "prefix-cache hit rate 0.56",
        "6.727 was void <once>",
        "1.20 s 1.80 s",
        "over all –",
        "0.0000123",
        "Costs are in the currency of the hardware's file",
        "4, not 5 5.657, not 8 1.41",
    ):
        assert words in text, words
    assert "P99 of the end-to-end time against the request rate" not in text, "of fixed rates"


def test_plots_are_carried_by_the_page() -> None:
    page = page_of(report.render(searched_release(), searched_details()))
    addresses = [f"data:image/png;base64,{base64.b64encode(PNG).decode()}"] * 2
    assert page.loads == addresses


@pytest.mark.parametrize("kept_rate", [(None, None), (None, 2.0), (200.0, None)])
def test_intervals_that_are_open(kept_rate: tuple[float | None, float | None]) -> None:
    one = found("bf16", kept_rate, [step(2, "void")])
    outcome = release().model_copy(update={"candidates": [one], "promoted": None})
    text = words_of(outcome, ReportDetails())
    expected = {
        (None, None): "unknown – –",
        (None, 2.0): "none 2 –",
        (200.0, None): "200 none lost not recorded",
    }
    assert expected[kept_rate] in text


def test_a_search_without_plots_and_figures_has_its_steps() -> None:
    text = words_of(searched_release(), ReportDetails())
    assert "Steps in order of measuring" in text
    assert "Plots" not in text


def test_optional_columns_only_where_a_step_has_a_number() -> None:
    fixed = candidate("bf16", 0.0, 500)
    heads = [" ".join(head.lines) for head in steps_table(fixed, LatencyFigures()).heads]
    assert heads[:4] == ["req/s", "sent/s", "requests", "failed"]
    assert heads[4:7] == ["TTFT P90", "TTFT P95", "TTFT P99"]
    assert heads[-3:] == ["tokens per s", "accept. length", "cache hits"]
    loaded = [
        step(2, None, truncated=3, concurrency=16, engine={"waiting_max": 7.0}),
        step(4, "void", cause="the generator sent 3 of 4 requests/s"),
    ]
    table = steps_table(fixed.model_copy(update={"latency": loaded}), LatencyFigures())
    heads = [" ".join(head.lines) for head in table.heads]
    assert {"in flight", "trun- cated", "within SLA/s", "waiting most"} <= set(heads)
    assert "KV cache most" not in heads
    assert table.answered
    assert [row.answer for row in table.rows] == ["", "void"]
    assert table.rows[0].cells[:2] == ["16", "2"]
    search = steps_table(found("bf16", (5.657, 8)), LatencyFigures(sla=["ttft p95 500ms"]))
    heads = [" ".join(head.lines) for head in search.heads]
    assert "TTFT P95" not in heads, "no step has a value of it"
    assert "E2EL P99 all" in heads, "where the SLA does not name it, that of all requests"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("e2el p99 2000ms", "E2EL P99 ≤ 2 s"),
        ("customer_service ttft p95 500ms", "customer_service TTFT P95 ≤ 500 ms"),
        ("something else", "something else"),
    ],
)
def test_a_line_of_the_sla_in_words(text: str, words: str) -> None:
    assert report_latency.clause_words(text) == words


def test_an_sla_without_a_rate_is_shown_without_one() -> None:
    one = candidate("bf16", 0.0, 500)
    gates = [g.model_copy(update={"rate": None}) for g in one.gates]
    outcome = release().model_copy(
        update={"candidates": [one.model_copy(update={"gates": gates})], "promoted": "bf16"}
    )
    assert "The dashed line is the SLA of 2.50 s." in words_of(outcome, ReportDetails())


def test_costs_are_written_without_exponents() -> None:
    shown = [numbers.cost(value) for value in (None, 0.0000123, 4.9612, 12.0, 1234.0)]
    assert shown == ["–", "0.0000123", "4.96", "12", "1,230"]


def test_the_terminal_shows_the_kept_rate() -> None:
    text = outcome_text(searched_release(infeasible()))
    assert "5.657, not 8" in text
    assert "P99 E2EL" not in text
    assert "selection: bf16_eagle3 was chosen as the fastest of 2 that passed" in text
    assert "P99 E2EL" in outcome_text(release())


def test_an_emulated_time_is_never_shown_without_saying_so() -> None:
    outcome = release()
    first, *others = outcome.candidates
    flagged = outcome.model_copy(
        update={"candidates": [first.model_copy(update={"emulated": True}), *others]}
    )
    assert outcome_text(flagged).count("(emulated)") == 1
    assert "(emulated)" not in outcome_text(outcome)
    page = words_of(flagged, ReportDetails())
    assert "times emulated" in page
    assert "Times marked emulated are of a kernel that the engine imitates" in page
    assert "emulated" not in words_of(outcome, ReportDetails())
    rows = [line for line in markdown(flagged).splitlines() if "(emulated)" in line]
    assert [row.split(" ")[1] for row in rows] == [first.name]


def test_an_emulated_kept_rate_is_never_shown_without_saying_so() -> None:
    outcome = searched_release()
    emulated = [one.model_copy(update={"emulated": True}) for one in outcome.candidates]
    flagged = outcome.model_copy(update={"candidates": emulated})
    assert "5.657, not 8 (emulated)" in outcome_text(flagged)
    assert "times emulated" in words_of(flagged, ReportDetails())


def test_memory_stands_beside_its_plan() -> None:
    start = ComparedMemory(
        what="engine at its start", planned_bytes=2 << 30, measured_bytes=3 << 30, counted=False,
        how="resident memory of all its processes",
    )  # fmt: skip
    outcome = release()
    assert "Memory, planned and measured" not in words_of(outcome, ReportDetails())
    first, *others = outcome.candidates
    told = [first.model_copy(update={"memory": [start]}), *others]
    text = words_of(outcome.model_copy(update={"candidates": told}), ReportDetails())
    assert "Memory, planned and measured" in text
    assert "engine at its start 2.00 GiB estimate 3.00 GiB +50.0 %" in text
