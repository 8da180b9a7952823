"""What stays with a Prefect run when it has ended: tables, a summary and links, as artifacts.

A server without room for them, or gone, refuses nothing: the report and the ledger have it all.
"""

from __future__ import annotations

import re
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit, urlunsplit

from prefect.context import FlowRunContext

from registry import release_summary
from registry.errors import EXIT_INFRASTRUCTURE, PilotageError
from registry.gate_report import escaped, number
from registry.outcome import GateResult, ReleaseOutcome
from registry.redaction import redacted
from registry.report_latency import flagged
from registry.report_numbers import NONE, asked, cut, scaled, short_ms
from registry.settings import Settings, settings
from tasks import run_log
from tasks.engines.subprocesses import last_lines
from tasks.progress import LOG
from tasks.service_notes import MLFLOW, read_note

LAST_LINES = 20
MOST_FILES = 12


def artifact_key(name: str, kind: str) -> str:
    """Prefect allows `[a-z0-9-]` only. Pure."""
    return re.sub(r"[^a-z0-9]+", "-", f"{name}-{kind}".lower()).strip("-")


# -- a release that came to a verdict --------------------------------------------------------


def show_release(outcome: ReleaseOutcome, experiment: str | None) -> None:
    """experiment: id in MLflow of the release's run."""
    from prefect import artifacts

    context = FlowRunContext.get()
    run = context.flow_run if context is not None else None
    name = run.name if run is not None else f"release-{outcome.name}"
    about = f"{outcome.name}: {outcome.verdict}"
    _show(
        artifacts.create_markdown_artifact,
        key=artifact_key(name, "summary"),
        markdown=summary(outcome, settings(), experiment, _log_files(outcome)),
        description=about,
    )
    for kind, rows in (("gates", gate_rows(outcome)), ("latency", latency_rows(outcome))):
        if rows:
            _show(
                artifacts.create_table_artifact,
                key=artifact_key(name, kind),
                table=rows,
                description=f"{about}, {kind}",
            )
    if outcome.report is not None:
        _show(
            artifacts.create_link_artifact,
            link=outcome.report.resolve().as_uri(),
            link_text=f"report of {outcome.name}",
            key=artifact_key(name, "report"),
            description=f"on the machine that made it: {outcome.report}",
        )


def summary(
    outcome: ReleaseOutcome, home: Settings, experiment: str | None, files: Sequence[Path]
) -> str:
    """The release on a page, and where everything of it lies."""
    lines = [release_summary.markdown(outcome), "### Where to look", ""]
    if outcome.run_id:
        lines.append(f"- MLflow: {mlflow_words(home, experiment, outcome.run_id)}")
    if outcome.report is not None:
        lines.append(f"- report: {code(str(outcome.report))}")
    bundle = next((one.bundle for one in outcome.candidates if one.name == outcome.promoted), None)
    if bundle is not None:
        where = home.home / "bundles" / f"{bundle}.json"
        lines.append(f"- bundle {code(bundle[:12])}: {code(str(where))}")
        lines.append(f"- serve it: {code(f'pilotage serve {outcome.model}@champion --print')}")
    lines += [f"- log: {code(str(file))}" for file in files[:MOST_FILES]]
    if len(files) > MOST_FILES:
        lines.append(f"- and {len(files) - MOST_FILES} more logs in {code(str(home.logs_dir))}")
    return "\n".join(lines) + "\n"


def mlflow_words(home: Settings, experiment: str | None, run: str) -> str:
    """A link where there is an address to link to, else the command that shows the run."""
    address = mlflow_address(home)
    if address:
        within = f"experiments/{experiment}/" if experiment else ""
        return f"[run {run}]({address}/#/{within}runs/{run})"
    if home.mlflow_uri:
        return f"run {code(run)}, where PILOTAGE_MLFLOW_URI points"
    tool = Path(sys.executable).with_name("mlflow")
    return f"run {code(run)}; {code(f'{tool} ui --backend-store-uri {home.tracking_uri}')}"


def mlflow_address(home: Settings) -> str:
    """Of MLflow's pages, without a password: a server of one's own, or that of `pilotage up`.

    Empty where neither runs.
    """
    if home.mlflow_uri.startswith(("http://", "https://")):
        parts = urlsplit(home.mlflow_uri)
        host, path = parts.netloc.rpartition("@")[2], parts.path.rstrip("/")
        return urlunsplit((parts.scheme, host, path, "", ""))
    note = read_note(MLFLOW)
    return note.url if note is not None and note.alive else ""


def gate_rows(outcome: ReleaseOutcome) -> list[dict[str, Any]]:
    """One row for each gate of each candidate. Pure."""
    return [
        {
            "candidate": one.name,
            "gate": gate.name,
            "result": gate.result.value + (" (waived)" if gate.waived else ""),
            "value": number(gate.candidate),
            "reference": f"{number(gate.reference)} {gate.reference_name or ''}".strip(),
            "bound": scaled(gate.bound, gate),
            "asked": f"{asked(gate)}{scaled(_limit(gate), gate)}",
            "why": cut(" ".join(gate.reason.split())),
        }
        for one in outcome.candidates
        for gate in one.gates
    ]


def _limit(gate: GateResult) -> float:
    """A result from before limits were recorded has its margin only."""
    return gate.limit if gate.limit is not None else gate.margin


def latency_rows(outcome: ReleaseOutcome) -> list[dict[str, Any]]:
    """One row for each load of each candidate; times that do not count are marked. Pure."""
    return [
        {
            "candidate": one.name,
            "req/s": number(point.rate),
            "requests": point.total,
            "failed": point.failed,
            "TTFT p99": flagged(short_ms(point.ttft_ms.get("p99")), one),
            "TPOT p99": flagged(short_ms(point.tpot_ms.get("p99")), one),
            "E2EL p50": flagged(short_ms(point.e2el_ms.get("p50")), one),
            "E2EL p99": flagged(short_ms(point.e2el_ms.get("p99")), one),
            "tokens/s": number(point.output_tokens_per_s),
            "acceptance": number(point.acceptance_length) if point.acceptance_length else NONE,
            "SLA": point.answer or NONE,
        }
        for one in outcome.candidates
        for point in one.latency
    ]


def _log_files(outcome: ReleaseOutcome) -> list[Path]:
    """The logs of what this run made; of what it reused, those of the run that made it."""
    keys = [stage.key[:12] for stage in outcome.stages if not stage.reused]
    bundles = [one.bundle[:12] for one in outcome.candidates]
    found = sorted(settings().logs_dir.glob("*.log"))
    wanted = (*keys, *(bundles if keys else []))
    return [file for file in found if any(word in file.name for word in wanted)]


# -- a run that came to none -----------------------------------------------------------------


def show_failure(key: str, message: str, error: BaseException) -> None:
    """The stage, its log files and their last lines; also as lines of the run's log."""
    from prefect import artifacts

    mark = run_log.mark()
    ends = {file: redacted(last_lines(file, LAST_LINES)) for file in mark.files}
    # A server that is the fault itself can keep the run from its end for minutes: a terminal is
    # told of a fault now. A person's mistake, or a refusal, is told once, when the run has ended.
    ours = isinstance(error, PilotageError) and error.exit_status != EXIT_INFRASTRUCTURE
    log = run_log.RUN_LOG if ours else LOG
    log.error("failed in %s: %s", mark.doing, message)
    if not isinstance(error, PilotageError):
        words = "".join(traceback.format_exception(error))
        run_log.RUN_LOG.error("%s", redacted(words))
    _show(
        artifacts.create_markdown_artifact,
        key=key,
        markdown=failure_page(mark.doing, message, ends),
        description=message.splitlines()[0][:200],
    )


def stopped() -> str:
    """Of a run that was told to end: what it was at, and where that was logged."""
    mark = run_log.mark()
    logs = f"; log {', '.join(map(str, mark.files))}" if mark.files else ""
    return f"stopped while at {mark.doing}{logs}"


def failure_page(doing: str, message: str, ends: Mapping[Path, str]) -> str:
    """Pure."""
    lines = ["## What failed", "", f"While it was at: **{escaped(doing)}**", "", fenced(message)]
    for file, end in ends.items():
        lines += ["", f"### The end of {code(str(file))}", "", fenced(end or "nothing was written")]
    return "\n".join(lines) + "\n"


# -- parts -----------------------------------------------------------------------------------


def code(text: str) -> str:
    """As Markdown shows it letter by letter, whatever it holds. Pure."""
    longest = max((len(run) for run in re.findall(r"`+", text)), default=0)
    quotes = "`" * (longest + 1)
    space = " " if longest else ""
    return f"{quotes}{space}{' '.join(text.split())}{space}{quotes}"


def fenced(text: str) -> str:
    """Several lines, letter by letter. Pure."""
    longest = max((len(run) for run in re.findall(r"`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}text\n{text}\n{fence}"


def _show(create: Callable[..., Any], **content: Any) -> None:
    from prefect.settings import PREFECT_CLIENT_MAX_RETRIES, temporary_settings

    try:
        # Of a server with a locked database each try takes a minute, and five more would follow.
        with temporary_settings({PREFECT_CLIENT_MAX_RETRIES: 1}):
            create(**content)
    except Exception as error:
        # Whatever the server or the way to it says: nothing depends on it.
        LOG.warning("%r is not shown in Prefect: %s", content["key"], error)
