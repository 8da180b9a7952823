"""What the report shows beside the outcome: texts side by side, segments, environments."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from eval_suites.gating import share_of
from eval_suites.policy import Policy
from registry.digests import digest_of
from registry.evidence import ITEMS, read_summary
from registry.gate_outcome import CandidateVerdict, GateOutcome
from registry.outcome import ReleaseOutcome, Verdict
from registry.provenance import provenance
from registry.report import Example, ReferenceFigures, ReportDetails, Response
from tasks.judging import Measured
from tasks.planning import ReleasePlan
from tasks.plotting import Plots, compared_picture, latency_figures
from tasks.prompt_files import read_jsonl
from tasks.stages import folder_of

EXAMPLES = 12


def report_details(
    todo: ReleasePlan,
    everyone: Mapping[str, Measured],
    teacher: Measured,
    outcome: ReleaseOutcome,
    plots: Plots,
    objective_rate: float | None,
) -> ReportDetails:
    """Read the evidence of everybody who was measured; `everyone` is by name, the teacher first.

    `objective_rate` is the one by which fixed rates were compared.
    """
    import pandas

    metrics = todo.resolved.accuracy.metrics
    tables = {
        name: pandas.read_parquet(one.accuracy.path / ITEMS).set_index("item_id")
        for name, one in everyone.items()
        if one.accuracy is not None
    }
    segments: dict[str, dict[str, dict[str, float | None]]] = {
        metric: {
            str(segment): {
                name: float(table.loc[table["segment"] == segment, metric].mean())
                for name, table in tables.items()
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
        objective=todo.resolved.release.promotion.objective,
        objective_rate=objective_rate,
        examples=examples(todo, tables, metrics),
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
            expected=json.dumps(item["reference"], ensure_ascii=False),
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
