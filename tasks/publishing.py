"""Record a judged release in MLflow, promote the best passing bundle, write the report.

Everything here is found before it is made, so a release that is run again, or was killed in the
middle of publishing, ends with the same runs, the same version and the same alias.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

from filelock import FileLock
from prefect import task

from eval_suites.gating import notes_of, waivers_of
from eval_suites.verdicts import release_verdict
from registry.artifacts import Stage
from registry.digests import digest_of
from registry.evidence import LatencyEvidence, read_summary
from registry.gate_report import json_line, markdown
from registry.outcome import CandidateOutcome, Champion, LoosenedGate, ReleaseOutcome
from registry.promotion import (
    CHAMPION,
    current_champion,
    promote,
    register_candidate,
)
from registry.provenance import provenance
from registry.report import report_path, write_report
from registry.settings import settings
from registry.store import Absent
from registry.tracking import StageRecord
from tasks.bundles import tracker
from tasks.judging import Measured, select
from tasks.planning import ReleasePlan, ResolvedRelease
from tasks.plotting import plot_artifacts, release_plots
from tasks.progress import LOG
from tasks.reporting import gate_outcome, report_details
from tasks.stages import TASK_OPTIONS, artifact_of, stages_of_run, store

PUBLISH_WAIT = 600.0
"""Seconds that a release waits for another one of the same model to be recorded."""


@task(name="publish", **TASK_OPTIONS)
def publish(
    todo: ReleasePlan,
    candidates: Sequence[CandidateOutcome],
    measured: Sequence[Measured],
    teacher: Measured,
    seconds: float,
    notes: Sequence[str] = (),
    loosened: Sequence[LoosenedGate] = (),
) -> ReleaseOutcome:
    """Record every candidate, promote the best passing one, and say what came of the release.

    One release of a model at a time: what is looked for before it is made must not be made by
    another in between.
    """
    locks = settings().home / "locks"
    locks.mkdir(parents=True, exist_ok=True)
    with FileLock(locks / f"{todo.resolved.release.model}.lock", timeout=PUBLISH_WAIT):
        return _publish(todo, candidates, measured, teacher, seconds, notes, loosened)


def _publish(
    todo: ReleasePlan,
    candidates: Sequence[CandidateOutcome],
    measured: Sequence[Measured],
    teacher: Measured,
    seconds: float,
    notes: Sequence[str],
    loosened: Sequence[LoosenedGate],
) -> ReleaseOutcome:
    recipes = todo.resolved
    release = recipes.release
    records = tracker()
    chosen = select(candidates, release.promotion.objective, sla_rate(recipes))
    digest = digest_of(
        {
            "recipe": recipes.digest,
            "candidates": [
                {"name": one.name, "bundle": one.bundle, "evidence": one.evidence}
                for one in candidates
            ],
        }
    )
    run = records.release_run(
        release.model,
        digest,
        recipes.name,
        tags=provenance_tags(recipes),
        texts={"recipe.json": recipes.model_dump_json(indent=1)},
    )
    records.stage_runs(run, [stage_record(stage) for stage in todo.stages() if is_made(stage)])
    by_name = {one.name: one for one in measured}
    bundles = [
        (one, bundle) for one in candidates if (bundle := by_name[one.name].bundle) is not None
    ]
    models = records.candidates(
        run,
        bundles,
        {one.name: by_name[one.name].summaries() for one, _ in bundles},
        measured_at=max(
            (ref.made_at for one in measured for ref in one.refs().values()),
            default=datetime.now(UTC),
        ),
    )
    version, champion, previous = None, None, None
    if chosen is not None:
        winner = next(one for one in candidates if one.name == chosen)
        arguments: dict[str, Any] = {
            "model_id": models[chosen],
            "run_id": run,
            "tags": {
                "pilotage.release": digest,
                "pilotage.policy": digest_of(recipes.policy),
                "pilotage.recipe": recipes.digest,
            },
        }
        register_candidate(records.client, release.model, winner, **arguments)
        promotion = promote(
            records.client,
            release.model,
            winner,
            first_release=release.promotion.first_release,
            **arguments,
        )
        version, champion = promotion.champion.version, promotion.champion
        previous = promotion.previous
        LOG.info(
            "%s@%s is version %d (%s)%s",
            release.model,
            CHAMPION,
            version,
            chosen,
            "" if promotion.changed else ", as before",
        )
    else:
        holder = current_champion(records.client, release.model)
        if holder is not None:
            bundle = holder.tags.get("pilotage.bundle", "")
            champion = Champion(version=int(holder.version), bundle=bundle)
    outcome = ReleaseOutcome(
        release=digest,
        name=recipes.name,
        verdict=release_verdict([one.verdict for one in candidates], chosen is not None),
        reasons=[f"{one.name}: {reason}" for one in candidates for reason in one.reasons[:1]],
        model=release.model,
        version=version,
        promoted=chosen,
        champion=champion,
        previous=previous,
        candidates=list(candidates),
        stages=stages_of_run(),
        notes=[*notes, *notes_of(recipes.policy, len(candidates))],
        waivers=waivers_of(recipes.policy, {one.name: one.gates for one in candidates}),
        loosened=list(loosened),
        run_id=run,
        policy=release.policy,
        suite=release.accuracy,
        profile=release.load,
        recipe_digest=recipes.digest,
        finished_at=datetime.now(UTC),
        seconds=round(seconds, 1),
    )
    everyone = {"teacher": teacher, **by_name}
    plots = release_plots(digest, measured)
    details = report_details(todo, everyone, teacher, outcome, plots, sla_rate(recipes))
    outcome = outcome.model_copy(update={"report": report_path(outcome)})
    report = write_report(outcome, details)
    gates = gate_outcome(outcome, recipes.policy)
    texts = {"gates.md": markdown(gates), "gates.json": json_line(gates)}
    records.finish(run, outcome, report, texts, plot_artifacts(plots))
    show_gates(outcome.release, texts["gates.md"])
    return outcome


def show_gates(release: str, table: str) -> None:
    """The gates as an artifact of the Prefect run; a server without room for it refuses nothing."""
    from prefect.artifacts import create_markdown_artifact
    from prefect.exceptions import PrefectHTTPStatusError

    try:
        create_markdown_artifact(key="gates", markdown=table, description=f"release {release[:12]}")
    except PrefectHTTPStatusError as error:
        LOG.warning("the gates' table is not shown in Prefect: %s", error)


def sla_rate(recipes: ResolvedRelease) -> float | None:
    """The request rate that the policy judges; the highest measured one where it judges none.

    None where the load profile searches for its rates.
    """
    rates = [gate.rate for gate in recipes.policy.gates if gate.rate is not None]
    return rates[0] if rates else max(recipes.load.rates, default=None)


def is_made(stage: Stage) -> bool:
    """Whether the store has the stage (a refused or infeasible candidate lacks some)."""
    try:
        store().recorded_digest(stage)
    except Absent:
        return False
    return True


def stage_record(stage: Stage) -> StageRecord:
    """What MLflow keeps of a stage: its recipe section, tools and summary; never weights."""
    ref = artifact_of(stage)
    manifest = store().manifest(ref)
    numbers: dict[str, float | None] = {
        name: float(value)
        for name, value in ref.summary.items()
        if isinstance(value, int | float) and not isinstance(value, bool)
    }
    evidence = read_summary(ref.path) if stage.name == "latency" else None
    load = evidence if isinstance(evidence, LatencyEvidence) else None
    return StageRecord(
        key=stage.key,
        name=stage.title,
        made_at=ref.made_at,
        seconds=ref.seconds,
        reused=ref.reused,
        metrics=numbers,
        points=load.points if load is not None else [],
        kept_rate=load.kept_rate if load is not None else None,
        tags={
            "pilotage.digest": ref.digest,
            **{f"pilotage.tool.{name}": version for name, version in stage.tools.items()},
        },
        texts={
            "config.json": json.dumps(stage.config, indent=1, ensure_ascii=False),
            "summary.json": json.dumps(ref.summary, indent=1, ensure_ascii=False),
            "parents.json": json.dumps(manifest.parents, indent=1),
        },
    )


def provenance_tags(recipes: ResolvedRelease) -> dict[str, str]:
    facts = provenance()
    tags = {
        "pilotage.recipe": recipes.digest,
        "pilotage.git": str(facts["git"]),
        "pilotage.hardware": facts["hardware_fingerprint"],
        "pilotage.cpu": facts["hardware"]["cpu"],
        "pilotage.gpus": ", ".join(facts["hardware"]["gpus"]) or "none",
    }
    for environment in ("driver", "serve"):
        for name, version in (facts[environment] or {}).items():
            tags[f"pilotage.{environment}.{name}"] = str(version)
    return tags
