"""Turn plans, outcomes and listings into JSON documents and into text for a terminal."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel
from rich.table import Table

from eval_suites import loader as suites
from eval_suites.schema import KINDS as SUITE_KINDS
from eval_suites.traffic import TrafficProfile
from recipes import loader
from recipes.schema import KINDS as RECIPE_KINDS
from registry.errors import Problem, UserError
from registry.gate_report import drawn
from registry.outcome import ReleaseOutcome
from registry.redaction import redacted
from registry.report_latency import flagged, kept_words, percentile_of, sla_of
from registry.report_savings import statement
from registry.settings import Settings, settings
from tasks.planning import CandidatePlan, ReleasePlan
from tasks.progress import LOG, spell
from tasks.release_capacity import certain_refusal, plan_before
from tasks.stages import store

# -- the plan of a dry run -------------------------------------------------------------------


def plan_document(todo: ReleasePlan) -> dict[str, Any]:
    """Stages in order with key, whether the store has them, why not, and an estimate."""
    stages = []
    for stage in todo.stages():
        reason = store().peek(stage)
        stages.append(
            {
                "name": stage.title,
                "key": stage.key,
                "reused": reason is None,
                "reason": reason,
                "estimate_seconds": store().last_seconds(stage.name, stage.label),
            }
        )
    missing = [stage for stage in stages if not stage["reused"]]
    known: list[Any] = [stage["estimate_seconds"] for stage in missing]
    return {
        "recipe": todo.resolved.name,
        "recipe_digest": todo.resolved.digest,
        "model": todo.resolved.release.model,
        "stages": stages,
        "candidates": [_before(todo, one) for one in todo.candidates],
        "to_be_made": len(missing),
        "estimate_seconds": None if None in known else round(sum(known), 1),
    }


def plan_table(todo: ReleasePlan) -> str:
    document = plan_document(todo)
    table = Table(title=f"{document['recipe']} → {document['model']} (nothing was started)")
    for column in ("stage", "key", "", "estimate"):
        table.add_column(column)
    for stage in document["stages"]:
        estimate = stage["estimate_seconds"]
        table.add_row(
            stage["name"],
            stage["key"][:12],
            "reused" if stage["reused"] else "to be made",
            "" if stage["reused"] else (spell(estimate) if estimate else "never made here"),
        )
    total = document["estimate_seconds"]
    end = spell(total) if total is not None else "unknown until every stage has run once"
    refused = [
        f"INFEASIBLE: {one['candidate']}: {one['refusal']}"
        for one in document["candidates"]
        if one["refusal"]
    ]
    told = f"{document['to_be_made']} stages to be made; estimated time: {end}"
    return "\n".join([drawn(table), *refused, told])


def _before(todo: ReleasePlan, wanted: CandidatePlan) -> dict[str, Any]:
    """What is certain of a candidate; `refusal`: its server will not be started."""
    plan = plan_before(todo, wanted)
    return {**plan.model_dump(mode="json"), "refusal": certain_refusal(todo, wanted)}


# -- what came of a release ------------------------------------------------------------------


def outcome_text(outcome: ReleaseOutcome) -> str:
    """Candidates with verdicts and reasons, what was promoted, and where to look."""
    table = Table(title=f"{outcome.name}: {outcome.verdict}")
    metrics = list(dict.fromkeys(name for one in outcome.candidates for name in one.metrics))
    times = sla_of(outcome.candidates)
    searched = any(one.kept_rate is not None for one in outcome.candidates)
    slow = "keeps the SLA at req/s" if searched else f"{percentile_of(times).upper()} E2EL"
    for column in ("candidate", "verdict", *metrics, slow):
        table.add_column(column, overflow="fold")
    for one in outcome.candidates:
        sla = next((gate for gate in one.gates if times and gate.name == times.name), None)
        slowest = f"{sla.candidate:.0f} ms" if sla and sla.candidate is not None else ""
        if searched:
            slowest = kept_words(one.kept_rate)
        table.add_row(
            one.name,
            one.verdict.value,
            *(_number(one.metrics.get(name)) for name in metrics),
            flagged(slowest, one),
        )
    lines = [drawn(table)]
    for one in outcome.candidates:
        lines += [f"  {one.name}: {reason}" for reason in one.reasons]
    if outcome.selection is not None:
        lines.append(f"selection: {outcome.selection.reason}")
        lines += [
            f"  {name} is dominated by {', '.join(by)}"
            for name, by in outcome.selection.dominated.items()
        ]
    if outcome.awaits_approval is not None:
        lines += _approval_lines(f"{outcome.model}@{outcome.awaits_approval}")
    elif outcome.promoted is not None and outcome.champion is not None:
        what = f"{outcome.model}@{outcome.champion.alias} is version {outcome.champion.version}"
        lines.append(f"promoted: {outcome.promoted}; {what}")
    elif outcome.champion is not None:
        lines.append(f"nothing promoted; champion stays version {outcome.champion.version}")
    else:
        lines.append("nothing promoted; the model has no champion")
    home = settings()
    if outcome.savings is not None:
        lines.append(f"savings: {statement(outcome.savings)}")
    lines += [
        f"report:    {outcome.report}",
        f"MLflow UI: {_mlflow_ui(home)}",
        f"Prefect:   {_prefect_ui(home)}",
    ]
    if outcome.champion is not None:
        lines.append(f"serve it:  {_tool('pilotage')} serve {outcome.model}@champion --print")
    return "\n".join(lines)


def _approval_lines(asked: str) -> list[str]:
    """How to say yes. A temporary server ends with its command: nothing of it asks anybody."""
    if os.environ.get("PREFECT_API_URL"):
        how = "in the form of its run of promote/on-candidate (where `pilotage deploy` was run), or"
    else:
        how = "no form will come, as no Prefect server runs. To say yes:"
    return [
        f"awaits approval: {asked}; {how}",
        f'  {_tool("pilotage")} promote {asked} --approve --reason "..."',
    ]


def _prefect_ui(home: Settings) -> str:
    """Where the run is shown: by the server that has it, or by one that is to be started."""
    api = os.environ.get("PREFECT_API_URL", "")
    if api:
        return redacted(api.rstrip("/").removesuffix("/api"))
    return f"{_tool('pilotage')} up, then http://127.0.0.1:{home.prefect_port}"


def _tool(name: str) -> str:
    """A program of the environment that this process runs in."""
    return str(Path(sys.executable).with_name(name))


def _mlflow_ui(home: Settings) -> str:
    if home.mlflow_uri:
        # May hold a password; whoever set it knows it.
        return "where PILOTAGE_MLFLOW_URI points"
    return f"{_tool('mlflow')} ui --backend-store-uri {home.tracking_uri}"


# -- recipes and suites ----------------------------------------------------------------------


def recipes_document() -> list[dict[str, str | None]]:
    """Every shipped recipe and suite: kind, name, description, file; of releases where they ran."""
    listed: list[dict[str, str | None]] = []
    for kinds, root in ((RECIPE_KINDS, loader.RECIPES_DIR), (SUITE_KINDS, suites.SUITES_DIR)):
        for kind in kinds:
            for name in loader.shipped(kind, root):
                path = loader.find(name, kind, root)
                content = loader.read_yaml(path)
                row: dict[str, str | None] = {
                    "kind": kind,
                    "name": name,
                    "description": " ".join(str(content.get("description", "")).split()),
                    "file": path.relative_to(root.parent).as_posix(),
                }
                if kind == "release":
                    row["run_on"] = content.get("run_on")
                listed.append(row)
    return listed


def recipes_table(document: Sequence[dict[str, str | None]]) -> str:
    table = Table()
    for column in ("kind", "name", "description", "run on"):
        table.add_column(column, overflow="fold")
    for row in document:
        ran = (row["run_on"] or "nowhere yet") if "run_on" in row else ""
        table.add_row(row["kind"], row["name"], row["description"], ran)
    return drawn(table)


def validate_files(paths: Sequence[Path]) -> int:
    """Validate every YAML recipe and suite below `paths`; the number that were read.

    lm-eval task files (below a folder `tasks`) are the harness's own and are not looked at.
    Raises `UserError` with the problems of all files together.
    """
    problems: list[Problem] = []
    files: list[Path] = []
    for path in paths:
        if path.is_dir():
            found = yaml_below(path)
            files += [file for file in found if "tasks" not in file.relative_to(path).parts]
        else:
            files.append(path)
    if not files:
        raise UserError.at(", ".join(map(str, paths)), "no YAML file there", "name recipes/")
    # Written by `pilotage profile`; none comes with the checkout.
    kinds: dict[str, type[BaseModel]] = {**RECIPE_KINDS, **SUITE_KINDS, "traffic": TrafficProfile}
    for file in files:
        try:
            content = loader.read_yaml(file)
            kind = content.get("kind")
            if not isinstance(kind, str) or kind not in kinds:
                raise UserError.at(
                    f"{file}: kind", f"is {loader.cut(kind)}", f"one of {', '.join(sorted(kinds))}"
                )
            loader.validate(content, kind, kinds[kind], source=str(file))
        except UserError as error:
            problems += error.problems
    if problems:
        raise UserError(problems)
    return len(files)


def yaml_below(folder: Path) -> list[Path]:
    """Every YAML file below a folder. Raises `UserError` for a folder that cannot be read: what
    was not looked at must not count as valid.
    """

    def unreadable(error: OSError) -> None:
        raise UserError.at(error.filename, f"cannot be read ({error.strerror})", "make it readable")

    return sorted(
        Path(root, name)
        for root, _, names in os.walk(folder, onerror=unreadable)
        for name in names
        if name.endswith((".yaml", ".yml"))
    )


# -- doctor ----------------------------------------------------------------------------------


def doctor_document(prove: bool) -> dict[str, Any]:
    """What is installed, what the machine is, which formats it serves, and the problems.

    `prove` starts a server per format once for this hardware and engine; later it is remembered.
    """
    from tasks.doctor import examine, serving_formats

    checks = [check.model_dump() for check in examine()]
    problems = [check for check in checks if check["state"] == "problem"]
    formats: list[dict[str, Any]] | None = None
    if prove and not any(check["area"] != "machine" for check in problems):
        proved, _ = serving_formats(store(), on_progress=LOG.info)
        formats = [one.model_dump() for one in proved]
    return {"checks": checks, "formats": formats, "problems": problems}


def doctor_text(document: dict[str, Any]) -> str:
    table = Table(title="environments and machine")
    for column in ("", "what", "found", "state"):
        table.add_column(column, overflow="fold")
    for check in document["checks"]:
        table.add_row(check["area"], check["name"], check["found"], check["state"])
    lines = [drawn(table)]
    if document["formats"] is None:
        lines.append("formats this hardware serves: not asked")
    else:
        formats = Table(title="formats this hardware serves, each proved by a generated token")
        for column in ("format", "served", "how, or why not"):
            formats.add_column(column, overflow="fold")
        for one in document["formats"]:
            formats.add_row(one["format"], "yes" if one["served"] else "no", _proof(one))
        lines.append(drawn(formats))
    for problem in document["problems"]:
        lines.append(f"problem: {problem['name']}: {problem['found']}\n  {problem['remedy']}")
    return "\n".join(lines)


# -- parts -----------------------------------------------------------------------------------


def _proof(served: dict[str, Any]) -> str:
    if not served["served"]:
        return str(served["reason"])
    how = ", its kernel emulated: right answers, no times" if served["emulated"] else ""
    return f"started in {spell(served['seconds'])}{how}"


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.3f}"
