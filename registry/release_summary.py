"""A release on less than a page, as Markdown: for Prefect's artifacts and for a CI system.

The whole story is in the report. Whatever models and people wrote is escaped.
"""

from __future__ import annotations

from collections.abc import Iterator

from registry.gate_report import escaped
from registry.outcome import CandidateOutcome, Champion, ReleaseOutcome, Verdict
from registry.report_latency import flagged, kept_words, percentile_of, shown_point, sla_of
from registry.report_numbers import NONE, cost, cut, megabytes, number, short_ms
from registry.report_savings import statement

LONGEST = 240
"""Characters of one reason."""

SAVINGS = 600
"""Characters of the sentence about savings."""

MOST_METRICS = 3
MOST_REFUSED = 12


def markdown(outcome: ReleaseOutcome) -> str:
    """Headline, candidates, who was chosen and why, who was refused, and the champion."""
    return "\n".join(_lines(outcome)) + "\n"


def _lines(outcome: ReleaseOutcome) -> Iterator[str]:
    yield f"## {_plain(outcome.name)}: {outcome.verdict}"
    yield ""
    yield f"**{_headline(outcome)}**"
    if outcome.selection is not None:
        yield ""
        yield _plain(outcome.selection.reason)
    if outcome.savings is not None:
        yield ""
        yield f"Savings: {escaped(cut(statement(outcome.savings), SAVINGS))}."
    yield ""
    yield from _table(outcome)
    refused = [one for one in outcome.candidates if one.verdict is not Verdict.PASS]
    if refused:
        yield ""
        yield "Refused:"
        yield ""
        for one in refused[:MOST_REFUSED]:
            why = one.reasons[0] if one.reasons else "no reason was recorded"
            more = f" (and {len(one.reasons) - 1} more)" if len(one.reasons) > 1 else ""
            yield f"- {_plain(one.name)}: {_plain(why)}{more}"
        if len(refused) > MOST_REFUSED:
            yield f"- and {len(refused) - MOST_REFUSED} more"
    waived = [one for one in outcome.waivers if one.state == "active"]
    if waived:
        yield ""
        yield "Waived: " + "; ".join(
            f"{_plain(one.gate)} by {_plain(one.owner)} until {one.expires}" for one in waived
        )
    yield ""
    before = _held(outcome.previous) if outcome.version is not None else "unchanged"
    yield f"Champion: {_held(outcome.champion)}; before: {before}."
    where = [f"report {_plain(outcome.report.name)}"] if outcome.report is not None else []
    where += [f"MLflow run {_plain(outcome.run_id)}"] if outcome.run_id else []
    if where:
        yield ""
        yield f"More: {', '.join(where)}."


def _headline(outcome: ReleaseOutcome) -> str:
    model = _plain(outcome.model)
    if outcome.awaits_approval is not None and outcome.selection is not None:
        name = _plain(outcome.selection.chosen or "")
        return f"{name} passed; {model} version {outcome.awaits_approval} awaits approval"
    if outcome.promoted is None:
        return f"Nothing promoted for {model}"
    name = _plain(outcome.promoted)
    return f"{name} promoted as {model} version {outcome.version}"


def _held(champion: Champion | None) -> str:
    return f"version {champion.version} ({champion.bundle[:12]})" if champion else "none"


def _table(outcome: ReleaseOutcome) -> Iterator[str]:
    """One row per candidate; a column only where somebody has a number."""
    candidates = outcome.candidates
    sla = sla_of(candidates)
    percentile = percentile_of(sla)
    rate = sla.rate if sla is not None else None
    points = {one.name: shown_point(one, rate) for one in candidates}
    metrics = list(dict.fromkeys(name for one in candidates for name in one.metrics))[:MOST_METRICS]
    columns = {
        **{name: [number(one.metrics.get(name)) for one in candidates] for name in metrics},
        "keeps the SLA at req/s": [
            flagged(kept_words(one.kept_rate), one) or NONE for one in candidates
        ],
        f"{percentile.upper()} E2EL": [
            flagged(short_ms(p.e2el_ms.get(percentile)), one) if (p := points[one.name]) else NONE
            for one in candidates
        ],
        "acceptance": [
            number(p.acceptance_length, 2) if (p := points[one.name]) else NONE
            for one in candidates
        ],
        "cost per 1M tokens": [
            flagged(cost(p.cost.get("per_million_output_tokens")), one)
            if (p := points[one.name])
            else NONE
            for one in candidates
        ],
        "weights": [_weights(one) for one in candidates],
        "place": [_place(outcome, one) for one in candidates],
    }
    shown = {name: cells for name, cells in columns.items() if any(c != NONE for c in cells)}
    yield f"| candidate | verdict | {' | '.join(map(_plain, shown))} |"
    yield f"|{' --- |' * (len(shown) + 2)}"
    for row, one in enumerate(candidates):
        cells = " | ".join(_plain(column[row]) for column in shown.values())
        yield f"| {_plain(one.name)} | {one.verdict} | {cells} |"


def _weights(candidate: CandidateOutcome) -> str:
    if candidate.size_bytes is None:
        return NONE
    return megabytes(candidate.size_bytes + (candidate.draft_bytes or 0))


def _place(outcome: ReleaseOutcome, candidate: CandidateOutcome) -> str:
    """Where the selection put it; a dash for who did not pass."""
    selection = outcome.selection
    if candidate.name == outcome.promoted:
        return "promoted"
    if selection is None:
        return NONE
    if candidate.name in selection.dominated:
        return f"dominated by {', '.join(selection.dominated[candidate.name])}"
    return "front" if candidate.name in selection.front else NONE


def _plain(text: str) -> str:
    """One line, cut, and shown by Markdown as it is."""
    return escaped(cut(" ".join(text.split()), LONGEST))
