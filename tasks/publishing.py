"""Record a judged release in MLflow; after its promotion, say what came of it in a report.

Everything here is found before it is made, so a release that is run again, or was killed in the
middle of publishing, ends with the same runs, the same version and the same alias.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

from prefect import task

from eval_suites.gating import notes_of, waivers_of
from eval_suites.verdicts import release_verdict
from registry import release_summary
from registry.alias_moves import told
from registry.alias_outcome import AliasOutcome
from registry.artifacts import Stage
from registry.bundle import Bundle
from registry.candidate_memory import PLAN_FILE
from registry.digests import digest_of
from registry.errors import PilotageError
from registry.evidence import LatencyEvidence, LoadPoint, read_summary
from registry.gate_report import json_line, markdown
from registry.lineage import LINEAGE_FILE
from registry.outcome import CandidateOutcome, LoosenedGate, ReleaseOutcome, Selection, Verdict
from registry.promotion import champion_of
from registry.provenance import provenance
from registry.release_facts import RELEASE_FILE, ReleaseFacts
from registry.report import report_path, write_report
from registry.stage_pages import StagePage, page_of, texts_of
from registry.store import Absent
from registry.taken_out import taken_out
from registry.tracking import StageRecord
from registry.versions import CHAMPION, PREVIOUS
from tasks import run_log
from tasks.bundles import aliases_of_model, tracker
from tasks.conversations import messages_of
from tasks.judging import Measured, selected
from tasks.lineage import lineage_for
from tasks.planning import ReleasePlan, ResolvedRelease
from tasks.plotting import lineage_picture, plot_artifacts, release_plots
from tasks.promoting import SmokeFailed
from tasks.prompt_files import read_jsonl
from tasks.registering import make_version
from tasks.release_traffic import traffic_or_none
from tasks.reporting import gate_outcome, report_details
from tasks.run_pages import show_release
from tasks.saving import savings_of
from tasks.serving import plan_findings, serving_evidence
from tasks.stages import TASK_OPTIONS, artifact_of, folder_of, stages_of_run, store

LEDGER_LINES = 12
"""Newest lines of the ledger that a report shows."""

PUBLISH_WAIT = 600.0
"""Seconds that a release waits for another one of the same model to be recorded."""


@dataclass(frozen=True)
class RecordedRelease:
    """What of a judged release is in MLflow: its run, its candidates, and the chosen version."""

    digest: str
    run: str
    selection: Selection
    version: int | None
    notes: list[str]


@dataclass(frozen=True)
class Awaiting:
    """The chosen version waits for a person: its policy asks for one."""

    version: int


@task(name="record", **TASK_OPTIONS)
def record(
    todo: ReleasePlan,
    candidates: Sequence[CandidateOutcome],
    measured: Sequence[Measured],
    champion: int | None,
) -> RecordedRelease:
    """Record every candidate, refused ones too, and make the best passing one a version.

    One release of a model at a time: what is looked for before it is made must not be made by
    another in between. champion: the version that the gates compared with.
    """
    run_log.doing("record")
    recipes = todo.resolved
    release = recipes.release
    records = tracker()
    digest = digest_of(
        {
            "recipe": recipes.digest,
            "candidates": [
                {"name": one.name, "bundle": one.bundle, "evidence": one.evidence}
                for one in candidates
            ],
        }
    )
    # Where the ledger is, not in this home: another machine's may record the same model.
    ledger = aliases_of_model(release.model).ledger
    with ledger.lock(f"{release.model} (recording)", PUBLISH_WAIT):
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
        facts = release_facts(todo, digest, champion)
        models = records.candidates(
            run,
            bundles,
            {one.name: by_name[one.name].summaries() for one, _ in bundles},
            measured_at=max(
                (ref.made_at for one in measured for ref in one.refs().values()),
                default=datetime.now(UTC),
            ),
            texts={
                one.name: candidate_texts(facts, bundle, by_name[one.name])
                for one, bundle in bundles
            },
        )
        eligible, notes = without_rolled_back(release.model, candidates)
        incumbent = champion_of(aliases_of_model(release.model), champion) if champion else None
        selection = selected(
            eligible,
            release.promotion,
            sla_rate(recipes),
            incumbent=incumbent.bundle if incumbent is not None else None,
        )
        chosen, version = selection.chosen, None
        if chosen is not None:
            winner = next(one for one in candidates if one.name == chosen)
            version = make_version(
                release.model,
                winner,
                next(bundle for one, bundle in bundles if one.name == chosen),
                facts,
                model_id=models[chosen],
                run_id=run,
                actor=f"release {recipes.name}",
                startup_seconds=startup_of(by_name[chosen]),
                asked=traffic_or_none(release),
            )
    return RecordedRelease(digest, run, selection, version, notes)


def startup_of(measured: Measured) -> float | None:
    """Seconds its server took to start when it was proved; None where that is not known."""
    seconds = measured.serving.summary.get("startup_seconds") if measured.serving else None
    return float(seconds) if seconds is not None else None


def release_facts(todo: ReleasePlan, digest: str, champion: int | None) -> ReleaseFacts:
    recipes = todo.resolved
    release = recipes.release
    first = next(iter(read_jsonl(folder_of(todo.prompts) / "load.jsonl")))
    return ReleaseFacts(
        release=digest,
        recipe=recipes.name,
        recipe_digest=recipes.digest,
        model=release.model,
        policy_name=release.policy,
        policy=recipes.policy.model_dump(mode="json"),
        policy_digest=digest_of(recipes.policy),
        suite=release.accuracy,
        profile=release.load,
        champion=champion,
        first_release=release.promotion.first_release,
        prompts=artifact_of(todo.prompts).digest,
        smoke=messages_of(first),
    )


def candidate_texts(facts: ReleaseFacts, bundle: Bundle, measured: Measured) -> dict[str, str]:
    """What a candidate's LoggedModel holds beside bundle, outcome and evidence."""
    lineage = lineage_for(bundle, measured.refs())
    texts = {
        RELEASE_FILE: facts.model_dump_json(indent=1),
        LINEAGE_FILE: lineage.model_dump_json(indent=1),
    }
    plan = measured.serving.path / PLAN_FILE if measured.serving else None
    if plan is not None and plan.is_file():
        texts[PLAN_FILE] = plan.read_text("utf-8")
    return texts


def findings_of_plans(measured: Sequence[Measured]) -> list[str]:
    """Where an engine's KV cache or memory is not as it was planned."""
    return [
        found
        for one in measured
        if one.serving is not None
        for found in plan_findings(one.name, serving_evidence(one.serving), _points(one))
    ]


def _points(measured: Measured) -> list[LoadPoint]:
    found = read_summary(measured.latency.path) if measured.latency is not None else None
    return found.points if isinstance(found, LatencyEvidence) else []


def without_rolled_back(
    model: str, candidates: Sequence[CandidateOutcome]
) -> tuple[list[CandidateOutcome], list[str]]:
    """Candidates that may be chosen: what a person took out of production stays out of it.

    So does what a person said no to, until somebody asks for it anew with a reason; and also where
    somebody has deleted that version since.
    """
    aliases = aliases_of_model(model)
    bundles = {
        one.bundle or champion_of(aliases, one.version).bundle: one
        for one in taken_out(aliases.settle())
    }
    # A candidate that was never made has no bundle either.
    bundles.pop("", None)
    notes = []
    for one in candidates:
        against = bundles.get(one.bundle)
        if against is not None:
            notes.append(
                f"{one.name} was not chosen: it is version {against.version}, {against.what} on "
                f"{against.line.at:%Y-%m-%d} by {against.line.actor}: {against.line.reason}"
            )
    return [one for one in candidates if one.bundle not in bundles], notes


@task(name="conclude", **TASK_OPTIONS)
def conclude(
    todo: ReleasePlan,
    candidates: Sequence[CandidateOutcome],
    measured: Sequence[Measured],
    others: Sequence[Measured],
    recorded: RecordedRelease,
    promotion: AliasOutcome | Awaiting | PilotageError | None,
    seconds: float,
    notes: Sequence[str] = (),
    loosened: Sequence[LoosenedGate] = (),
) -> ReleaseOutcome:
    """Say what came of the release, write its report, and close its run.

    others: the teacher, and the champion where it was measured. promotion: what moving the alias
    ended with; `Awaiting` where a person is asked, an error where it was refused, None where
    nothing was chosen.
    """
    run_log.doing("report")
    recipes = todo.resolved
    release = recipes.release
    records = tracker()
    aliases = aliases_of_model(release.model)
    state = aliases.settle()
    now, selection = state.aliases, recorded.selection
    promoted = selection.chosen if isinstance(promotion, AliasOutcome) else None
    awaited = promotion if isinstance(promotion, Awaiting) else None
    passed = promoted is not None or awaited is not None
    verdict = release_verdict([one.verdict for one in candidates], passed)
    reasons = [f"{one.name}: {reason}" for one in candidates for reason in one.reasons[:1]]
    if isinstance(promotion, PilotageError):
        # It passed, and what it was compared with is gone, or it does not answer any more.
        verdict = Verdict.INFEASIBLE if isinstance(promotion, SmokeFailed) else Verdict.INVALID
        reasons.insert(0, f"{selection.chosen} passed and was not promoted: {promotion}")
    elif not passed and any(one.verdict is Verdict.PASS for one in candidates):
        reasons.insert(0, selection.reason)
    outcome = ReleaseOutcome(
        release=recorded.digest,
        name=recipes.name,
        verdict=verdict,
        reasons=reasons,
        model=release.model,
        version=recorded.version if promoted is not None else None,
        promoted=promoted,
        awaits_approval=awaited.version if awaited is not None else None,
        champion=champion_of(aliases, now[CHAMPION]) if CHAMPION in now else None,
        previous=champion_of(aliases, now[PREVIOUS], PREVIOUS) if PREVIOUS in now else None,
        candidates=list(candidates),
        selection=selection,
        stages=stages_of_run(),
        notes=[
            *notes,
            *findings_of_plans(measured),
            *recorded.notes,
            *notes_of(recipes.policy, len(candidates)),
        ],
        waivers=waivers_of(recipes.policy, {one.name: one.gates for one in candidates}),
        loosened=list(loosened),
        run_id=recorded.run,
        policy=release.policy,
        suite=release.accuracy,
        profile=release.load,
        recipe_digest=recipes.digest,
        finished_at=datetime.now(UTC),
        seconds=round(seconds, 1),
    )
    outcome = outcome.model_copy(update={"savings": savings_of(todo, outcome, measured)})
    plots = release_plots(recorded.digest, measured)
    details = report_details(
        todo,
        {one.name: one for one in (*others, *measured)},
        next(one for one in others if one.name == "teacher"),
        outcome,
        plots,
        lineage_svg=lineage_picture(shown_in_lineage(outcome, measured)),
        ledger=[told(entry) for entry in state.entries[-LEDGER_LINES:]],
        stage_pages=stage_pages(todo),
    )
    outcome = outcome.model_copy(update={"report": report_path(outcome)})
    report = write_report(outcome, details)
    gates = gate_outcome(outcome, recipes.policy)
    texts = {
        "summary.md": release_summary.markdown(outcome),
        "gates.md": markdown(gates),
        "gates.json": json_line(gates),
    }
    records.finish(recorded.run, outcome, report, texts, plot_artifacts(plots))
    show_release(outcome, records.experiment(release.model))
    return outcome


def stage_pages(todo: ReleasePlan) -> list[StagePage]:
    """What the stages that were made say of themselves."""
    made = [stage for stage in todo.stages() if is_made(stage)]
    pages = [page_of(stage.title, artifact_of(stage).path) for stage in made]
    return [page for page in pages if page is not None]


def shown_in_lineage(outcome: ReleaseOutcome, measured: Sequence[Measured]) -> Measured | None:
    """Whose lineage the report draws: the promoted candidate's, else the first that was made."""
    made = [one for one in measured if one.bundle is not None]
    return next((one for one in made if one.name == outcome.promoted), made[0] if made else None)


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
            **texts_of(ref.path),
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
