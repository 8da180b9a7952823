"""Turn measurements under load into text for a terminal."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.table import Table

from eval_suites.draft_choice import kept_in_words
from registry.gate_report import drawn
from tasks.comparing import FEWEST_REPEATS

Document = Mapping[str, Any]


# -- bench -----------------------------------------------------------------------------------


def bench_text(document: dict[str, Any]) -> str:
    """Steps in the order in which they were measured, and the interval."""
    table = Table(title=f"{', '.join(document['sla'])}: {document['verdict']}")
    for column in ("requests/s", "", "requests", "failed", "hit rate", "P99 E2EL", "bound", "why"):
        table.add_column(column, overflow="fold")
    for point in document["points"]:
        hit_rate = point["hit_rate"]
        table.add_row(
            f"{point['rate']:.4g}",
            point["verdict"],
            str(point["n"]),
            str(point["failed"]),
            "" if hit_rate is None else f"{hit_rate:.2f}",
            _milliseconds(point["p99_e2el"]),
            _milliseconds(point["p99_e2el_bound"]),
            point["cause"],
        )
    low, high = document["kept_rate"]
    kept = "no rate was kept" if low is None else f"kept at {low:.4g} requests/s"
    lost = "no rate was not kept" if high is None else f"not kept at {high:.4g}"
    lines = [drawn(table), f"{kept}; {lost}; {document['requests_total']} requests"]
    costs = [point["cost"] for point in document["points"] if point["rate"] == low]
    if costs and costs[0].get("per_request") is not None:
        per_request, per_million = costs[0]["per_request"], costs[0]["per_million_output_tokens"]
        lines.append(f"at that rate {per_request:.3g} per request, {per_million:.3g} per million "
                     "output tokens")  # fmt: skip
    lines += _emulated(document)
    lines += [f"note: {note}" for note in document["notes"]]
    return "\n".join([*lines, f"evidence: {document['evidence']}"])


def _emulated(document: Document) -> list[str]:
    if not document["emulated"]:
        return []
    says = "; under a profile of production they decide nothing" if document["production"] else ""
    return [
        "note: the engine emulated a kernel that this hardware lacks: none of these times is the "
        f"format's{says}"
    ]


def _milliseconds(value: float | None) -> str:
    return "" if value is None else f"{value:.0f} ms"


# -- two bundles in turn ---------------------------------------------------------------------

RATIOS = {
    **{
        f"{name}_p{percent}": f"{name.upper()} P{percent}"
        for name in ("ttft", "tpot", "e2el")
        for percent in (50, 90, 99)
    },
    "output_tokens_per_s": "output tokens/s",
}
"""Rows of a table of ratios: the name in the document, and for people."""


def compare_text(document: Document) -> str:
    """Turns as they were measured, ratios with intervals, and how the machine drifted."""
    title = f"A {document['a']}, B {document['b']} at {document['rate']:.4g} requests/s"
    lines = [_turns_drawn(document, title), _ratios_drawn(document)]
    lines += _drifts(document)
    count, all_ = document["usable_repeats"], len(document["turns"]) // 2
    lines.append(f"{count} of {all_} repeats count")
    if count < FEWEST_REPEATS:
        lines.append("so few have no interval: nothing can be said of how sure a ratio is")
    lines += [f"topology: {words}" for words in document.get("topologies", {}).get("words", [])]
    lines += [f"note: {note}" for note in document["notes"]]
    return "\n".join([*lines, f"evidence: {document['evidence']}"])


def _turns_drawn(document: Document, title: str) -> str:
    """Times are those of the steady part, as in the ratios; tokens/s are of the whole turn."""
    table = Table(title=title)
    columns = ("turn", "bundle", "sent", "failed", "TTFT P50", "TPOT P50", "E2EL P50", "E2EL P99")
    for column in (*columns, "tokens/s", "tokens per step", "void"):
        table.add_column(column, overflow="fold")
    for turn in document["turns"]:
        point, steady = turn["point"], turn["steady_ms"]
        table.add_row(
            turn["name"],
            turn["bundle"][:8],
            str(point["total"]),
            str(point["failed"]),
            *(_short(steady[name]) for name in ("ttft_p50", "tpot_p50", "e2el_p50", "e2el_p99")),
            _figure(point["output_tokens_per_s"]),
            _figure(point["acceptance_length"]),
            turn["void"],
        )
    return drawn(table)


def _ratios_drawn(document: Document) -> str:
    table = Table(title="B / A; below 1 B's number is the smaller one")
    for column in ("", "ratio", "95 % interval", "repeats", "why not"):
        table.add_column(column, overflow="fold")
    for name, words in RATIOS.items():
        one = document["ratios"][name]
        known = one["low"] is not None and one["high"] is not None
        table.add_row(
            words,
            _ratio(one["value"]),
            f"{_ratio(one['low'])} to {_ratio(one['high'])}" if known else "",
            str(one["repeats"]),
            one["reason"],
        )
    return drawn(table)


def _drifts(document: Document) -> list[str]:
    """How A moved while everything was measured: what is the machine's and not the bundles'."""
    lines = []
    for name, drift in document["drift_of_a"].items():
        if drift["spread"] is None:
            continue
        told = f"{RATIOS[name]} of A: largest over smallest {1 + drift['spread']:.3f}"
        if drift["whole"] is not None and drift["p"] is not None:
            told += f", drift from first to last {drift['whole']:+.1%} (p {drift['p']:.2f})"
        lines.append(told)
    return lines


# -- whether a draft pays --------------------------------------------------------------------

DECISIONS = {True: "the draft stays", False: "the draft goes", None: "not decided"}


def proof_text(document: Document) -> str:
    """The decision, its reason, and the numbers behind it."""
    lines = []
    if document["tokens"] is not None:
        lines += [_tokens_drawn(document), document["tokens"]["reason"]]
    if document["turns"] is not None:
        turns = document["turns"]
        title = f"A without, B with the draft, at {turns['rate']:.4g} requests/s"
        lines += [_turns_drawn(turns, title), _ratios_drawn(turns), *_drifts(turns)]
        lines += [f"note: {note}" for note in turns["notes"]]
    kept = document["kept_rate"]
    lines.append(
        f"kept rate: {kept_in_words(kept['without'])} without the draft, "
        f"{kept_in_words(kept['with'])} with it"
    )
    agreement = document["agreement"]
    if agreement is not None:
        near, odd = len(agreement["near_ties"]), len(agreement["disagreements"])
        lines.append(
            f"greedy answers: {agreement['equal']} of {agreement['asked']} equal, "
            f"{near} part at a near-tie, {odd} disagree"
        )
    best, served = document["num_speculative_tokens"], document["served_tokens"]
    if best is not None and best != served:
        lines.append(f"k={best} was best; the bundle is served with k={served}")
    lines += _emulated(document)
    lines.append(f"{document['name']}: {DECISIONS[document['stays']]}: {document['reason']}")
    return "\n".join([*lines, f"evidence: {document['evidence']}"])


def _tokens_drawn(document: Document) -> str:
    """Every number of speculative tokens that was tried; `off` is without the draft."""
    table = Table(title="numbers of speculative tokens, on the same prompts")
    for column in ("tokens", "TPOT P50", "95 % interval", "over off", "tokens per step", "why not"):
        table.add_column(column, overflow="fold")
    tried = {str(one["tokens"]): one for one in document["tokens"]["tried"]}
    for name, turns in document["tries"].items():
        one, measured = tried.get(name, {}), [turn for turn in turns if "point" in turn]
        last = measured[-1] if measured else None
        known = one.get("low_ms") is not None and one.get("high_ms") is not None
        tpot = one.get("tpot_ms") if one else last and last["steady_ms"]["tpot_p50"]
        over = last.get("tpot_p50_over_off") if last else None
        troubles = [turn.get("infeasible") or turn.get("void") or "" for turn in turns]
        table.add_row(
            name,
            _short(tpot),
            f"{_short(one['low_ms'])} to {_short(one['high_ms'])}" if known else "",
            _ratio(over),
            _figure(last["point"]["acceptance_length"]) if last else "",
            "; ".join(filter(None, troubles)),
        )
    return drawn(table)


def _short(value: float | None) -> str:
    """Milliseconds with three digits, as TPOT needs them."""
    return "" if value is None else f"{value:.3g} ms" if value < 100 else f"{value:.0f} ms"


def _ratio(value: float | None) -> str:
    """Three decimals; two repeats may leave an interval over several powers of ten."""
    return "" if value is None else f"{value:.3f}" if 0.01 <= value < 100 else f"{value:.2g}"


def _figure(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}"
