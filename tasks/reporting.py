"""What the report shows beside the outcome: texts side by side, segments, environments."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from eval_suites.gating import share_of
from eval_suites.policy import Policy
from registry.digests import digest_of
from registry.evidence import ITEMS, read_summary
from registry.gate_outcome import CandidateVerdict, GateOutcome
from registry.outcome import GateResult, ReleaseOutcome, Verdict
from registry.provenance import provenance
from registry.report import Example, ReferenceFigures, ReportDetails, Response
from registry.report_flips import FlippedItem, FlipTexts
from registry.stage_pages import StagePage
from registry.versions import CHAMPION
from tasks.judging import Measured
from tasks.planning import ReleasePlan
from tasks.plotting import Plots, compared_picture, latency_figures
from tasks.prompt_files import read_jsonl
from tasks.stages import folder_of
from tasks.topologies import topology_tables

EXAMPLES = 12
FLIPS = 4
"""Lost items whose texts are shown; of gained ones half as many."""


def report_details(
    todo: ReleasePlan,
    everyone: Mapping[str, Measured],
    teacher: Measured,
    outcome: ReleaseOutcome,
    plots: Plots,
    lineage_svg: str = "",
    ledger: Sequence[str] = (),
    stage_pages: Sequence[StagePage] = (),
) -> ReportDetails:
    """Read the evidence of everybody who was measured; `everyone` is by name, the teacher first.

    With a `champion` among them, flips against it have their texts too. `ledger` are the alias
    moves of this release, one line each.
    """
    import pandas

    metrics = todo.resolved.accuracy.metrics
    tables = {
        name: pandas.read_parquet(one.accuracy.path / ITEMS).set_index("item_id")
        for name, one in everyone.items()
        if one.accuracy is not None
    }
    # A champion that is a candidate again would be the same column twice.
    candidates = {one.bundle for one in outcome.candidates}
    columns = {
        name: table
        for name, table in tables.items()
        if name != CHAMPION or everyone[name].digest not in candidates
    }
    segments: dict[str, dict[str, dict[str, float | None]]] = {
        metric: {
            str(segment): {
                name: float(table.loc[table["segment"] == segment, metric].mean())
                for name, table in columns.items()
                if (table["segment"] == segment).any()
            }
            for segment in sorted(set(tables["teacher"]["segment"]))
        }
        for metric in metrics
    }
    sizes = tables["teacher"]["segment"].value_counts()
    evidence = read_summary(teacher.accuracy.path) if teacher.accuracy is not None else None
    figures = ReferenceFigures(
        name="teacher",
        bundle=teacher.digest,
        engine=getattr(evidence, "engine", ""),
        metrics=getattr(evidence, "metrics", {}),
    )
    student = todo.resolved.release.reference_candidate
    return ReportDetails(
        references=[figures],
        student=student,
        segments=segments,
        segment_sizes={str(segment): int(count) for segment, count in sizes.items()},
        latency=latency_figures(
            list(everyone.values()), plots, pictured=(outcome.promoted, student)
        ),
        compared=compared_picture(plots),
        examples=examples(todo, tables, metrics),
        flips=flip_texts(todo, tables, outcome),
        lineage_svg=lineage_svg,
        ledger=list(ledger),
        topologies=topology_tables(outcome, everyone),
        stage_pages=list(stage_pages),
        environments=environments(),
        waivers=outcome.waivers,
        loosened=outcome.loosened,
        notes=outcome.notes,
    )


def gate_outcome(outcome: ReleaseOutcome, policy: Policy) -> GateOutcome:
    """The gates of a release as `pilotage gate` would print them."""
    return GateOutcome(
        verdict=outcome.verdict,
        promotable=outcome.verdict is Verdict.PASS,
        settings="recorded",
        policy=outcome.policy,
        policy_digest=digest_of(policy),
        candidates=[
            CandidateVerdict(
                name=one.name,
                folder="",
                bundle=one.bundle,
                verdict=one.verdict,
                reasons=one.reasons,
                gates=one.gates,
                level_share=share_of(policy, one.gates),
                settings="recorded",
            )
            for one in outcome.candidates
        ],
        notes=outcome.notes,
        waivers=outcome.waivers,
        loosened=outcome.loosened,
        seconds=outcome.seconds,
    )


def flip_texts(
    todo: ReleasePlan, tables: Mapping[str, Any], outcome: ReleaseOutcome
) -> list[FlipTexts]:
    """For each candidate and reference the first flipped items, of the first gate that has any."""
    prompts = {item["id"]: item for item in read_jsonl(folder_of(todo.prompts) / "eval.jsonl")}
    names = {"student": todo.resolved.release.reference_candidate}
    found = []
    for candidate in outcome.candidates:
        first = {gate.reference_name: gate for gate in reversed(candidate.gates) if _flipped(gate)}
        for reference, gate in first.items():
            theirs = tables.get(names.get(reference or "", reference or ""))
            ours = tables.get(candidate.name)
            if theirs is not None and ours is not None:
                found.append(_flips_of(candidate.name, gate, prompts, theirs, ours))
    return found


def _flipped(gate: GateResult) -> bool:
    return gate.flips is not None and bool(gate.flips.gained_items or gate.flips.lost_items)


def _flips_of(
    candidate: str, gate: GateResult, prompts: Mapping[str, Any], theirs: Any, ours: Any
) -> FlipTexts:
    flips = gate.flips
    assert flips is not None
    sides: list[tuple[Literal["lost", "gained"], str]] = [
        *(("lost", item) for item in flips.lost_items[:FLIPS]),
        *(("gained", item) for item in flips.gained_items[: FLIPS // 2]),
    ]
    return FlipTexts(
        candidate=candidate,
        gate=gate.name,
        metric=gate.metric.removeprefix("accuracy."),
        reference=gate.reference_name or "",
        gained=flips.gained,
        lost=flips.lost,
        items=[
            FlippedItem(
                item_id=item,
                side=side,
                segment=prompts[item]["segment"],
                prompt=prompts[item]["prompt"],
                expected=_expected(prompts[item]),
                theirs=str(theirs.at[item, "response"]),
                ours=str(ours.at[item, "response"]),
            )
            for side, item in sides
            if item in prompts and item in theirs.index and item in ours.index
        ],
    )


def _expected(item: Mapping[str, Any]) -> str:
    """The reference answer of an item, as people read it."""
    return json.dumps(item["reference"], ensure_ascii=False)


def examples(todo: ReleasePlan, tables: Mapping[str, Any], metrics: Sequence[str]) -> list[Example]:
    """Items on which the answers differ most in the first metric, then others, in file order."""
    items = read_jsonl(folder_of(todo.prompts) / "eval.jsonl")[: todo.resolved.accuracy.items]

    def disagreement(item: dict[str, Any]) -> float:
        scores = [
            float(table.at[item["id"], metrics[0]])
            for table in tables.values()
            if item["id"] in table.index
        ]
        return max(scores) - min(scores) if scores else 0.0

    # Stable: half shows disagreements, half what is usual.
    ranked = sorted(items, key=disagreement, reverse=True)[: EXAMPLES // 2]
    usual = [item for item in items if item not in ranked][: EXAMPLES - len(ranked)]
    return [
        Example(
            item_id=item["id"],
            segment=item["segment"],
            prompt=item["prompt"],
            expected=_expected(item),
            responses=[
                Response(
                    name=name,
                    text=str(table.at[item["id"], "response"]),
                    right=all(table.at[item["id"], metric] == 1 for metric in metrics),
                )
                for name, table in tables.items()
                if item["id"] in table.index
            ],
        )
        for item in [*ranked, *usual]
    ]


def environments() -> dict[str, dict[str, str]]:
    facts = provenance()
    return {
        "driver": {name: str(version) for name, version in facts["driver"].items()},
        "serve": {name: str(version) for name, version in (facts["serve"] or {}).items()},
        "hardware": {
            name: ", ".join(value) if isinstance(value, list) else str(value)
            for name, value in facts["hardware"].items()
        },
        "code": {"git": facts["git"], "python": facts["python"]},
    }
