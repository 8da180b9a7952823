"""The answers of `why` and `impact` as text for a terminal."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from registry.report_numbers import NONE, gate_value, rate, short_ms
from registry.topology import ROLES, Disaggregated

MOST_IDS = 5
_UP_TO = 34
"""Width of the name of a gate."""


def why_text(document: Mapping[str, Any]) -> str:
    return "\n".join(_why_lines(document))


def _why_lines(document: Mapping[str, Any]) -> Iterator[str]:
    model, alias, version = document["model"], document["alias"], document["version"]
    verdict = document["verdict"] or "no verdict"
    if alias is not None:
        yield f"{model}@{alias} is version {version}: {document['candidate']}, {verdict}"
    else:
        held = ", ".join(document["aliases"]) or "no alias"
        yield f"{model} version {version} ({held}): {document['candidate']}, {verdict}"
    for problem in document["problems"]:
        yield f"  PROBLEM  {problem}"
    for note in document["notes"]:
        yield f"  note     {note}"
    yield f"  bundle   {document['bundle']}"
    yield from _moved(document["moved"])
    yield "gates"
    for gate in document["gates"]:
        yield _gate(gate)
    if not document["gates"]:
        yield "  none known"
    for waiver in document["waivers"]:
        yield (
            f"  waived   {waiver['gate']} by {waiver['owner']} until {waiver['expires']}: "
            f"{waiver['reason']}"
        )
    yield "evidence"
    for kind, one in document["evidence"].items():
        told = [one.get("engine"), one.get("harness"), (one.get("measured_at") or "")[:16]]
        yield f"  {kind:9} {one['digest'][:12]}  {', '.join(filter(None, told))}"
    yield from _load(document["load"])
    serving = document["serving"]
    if serving is not None:
        yield "served with"
        yield f"  {serving['engine']}  {_settings(serving['engine_args'])}"
        yield from topology_lines(serving["topology"])
        if serving["draft"]:
            yield (
                f"  draft {serving['draft'][:12]}, {serving['num_speculative_tokens']} "
                "speculative tokens"
            )
    yield "chain"
    for link in document["chain"]:
        yield from _link(link)
    for name, found in (("code", document["code"]), *document["environments"].items()):
        for value, kinds in found.items():
            of = "" if len(found) == 1 else f"  ({', '.join(dict.fromkeys(kinds))})"
            yield f"{name:9} {value}{of}"


def topology_lines(topology: Mapping[str, Any] | str) -> Iterator[str]:
    """Nothing where one engine does all."""
    if isinstance(topology, str):
        return
    found = Disaggregated.model_validate(topology)
    yield f"  {found.words}"
    for role in ROLES:
        if own := found.own(role):
            yield f"    {role} alone: {_settings(own)}"


def _moved(moved: Mapping[str, Any] | None) -> Iterator[str]:
    if moved is None:
        return
    before = f"version {moved['from']}" if moved["from"] is not None else "nothing"
    yield (
        f"  moved    {moved['alias']}, from {before}, {moved['at'][:16]} UTC by {moved['by']} "
        f"({moved['action']}, ledger line {moved['sequence']})"
    )
    if moved["reason"]:
        yield f"  reason   {moved['reason']}"
    for waiver in moved["waivers"]:
        yield f"  waiver   {waiver}"


def _gate(gate: Mapping[str, Any]) -> str:
    metric = gate["metric"]
    result = "waived" if gate.get("waived") else gate["result"]
    parts = [
        f"  {result:12} {gate['name']:{_UP_TO}} {gate_value(gate['estimate'], metric):>9}",
        f"bound {gate_value(gate['bound'], metric)}",
        f"margin {gate['margin']:.4g}",
        f"n {gate['n'] if gate['n'] is not None else NONE}",
    ]
    if gate.get("rate") is not None:
        parts.append(f"at {rate(gate['rate'])}/s")
    if gate["tier"] != "critical":
        parts.append(gate["tier"])
    line = "  ".join(parts)
    return line if gate["result"] == "PASS" else f"{line}\n               {gate['reason']}"


def _load(load: Mapping[str, Any] | None) -> Iterator[str]:
    if load is None:
        return
    flag = "; times of an emulated kernel" if load["emulated"] else ""
    yield f"load judged: {load['profile']} on hardware {load['hardware']}{flag}"
    if load["kept_rate"]:
        low, high = load["kept_rate"]
        yield f"  kept up to {rate(low)} requests/s, not {rate(high)}"
    for point in load["points"]:
        times = "  ".join(
            f"{name} {short_ms(point[field]['p50'])}/{short_ms(point[field]['p99'])}"
            for name, field in (("TTFT", "ttft_ms"), ("TPOT", "tpot_ms"), ("E2EL", "e2el_ms"))
            if point.get(field) and "p50" in point[field] and "p99" in point[field]
        )
        length = point["acceptance_length"]
        accepted = f"  acceptance length {length:.3g}" if length is not None else ""
        yield f"  {rate(point['rate'])}/s  p50/p99  {times}{accepted}  {point['failed']} failed"


def _link(link: Mapping[str, Any]) -> Iterator[str]:
    title = f"{link['kind']} {link.get('label', '')}".strip()
    if link["kind"] in ("alias", "version"):
        title = f"{link['kind']} {link['key']}"
    gone = "  (content gone)" if link.get("gone") else ""
    made = f"  {link['made_at'][:16]}" if link.get("made_at") else ""
    yield f"  {title:32} {link['digest'][:12]}{made}{gone}"
    facts = {k: v for k, v in link.get("facts", {}).items() if not k.startswith("input.")}
    settings = {k: v for k, v in facts.items() if not k.startswith("made.")}
    counts = {k.removeprefix("made."): v for k, v in facts.items() if k.startswith("made.")}
    for told in (settings, counts):
        if told:
            yield f"    {_settings(told)}"


def _settings(values: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in values.items())


# -- impact ----------------------------------------------------------------------------------


def impact_text(document: Mapping[str, Any]) -> str:
    return "\n".join(_impact_lines(document))


def _impact_lines(document: Mapping[str, Any]) -> Iterator[str]:
    unknown = document["unknown"]
    if not document["found"] and not document["artifacts"]:
        yield f"not found in any prompt set of this store: {_few(unknown)}"
        yield "nothing was reached"
    else:
        yield f"{document['found']} of {document['asked']} ids found in {document['store']}"
        if unknown:
            yield f"not found in any prompt set of this store: {_few(unknown)}"
        yield "artifacts"
        for one in document["artifacts"]:
            title = f"{one['kind']} {one['label']}".strip()
            rows = one["rows"] or one["evidence_rows"]
            yield (
                f"  {one['role']:8}  {title:32} {one['digest'][:12]}  {_rows(rows)}"
                f"{_unsure(one)}  {one['where'] or 'gone from this store'}"
            )
        yield "versions"
        for one in document["versions"]:
            held = ", ".join(one["aliases"])
            name = f"{one['model']} version {one['version']}{f' ({held})' if held else ''}"
            if one["used_for"] == "weights":
                seen = one["evidence_rows"]
                also = f"; in evidence {_rows(seen)}" if seen else ""
                yield f"  in its weights    {name}  {_rows(one['rows'])}{also}{_unsure(one)}"
            else:
                seen = _rows(one["evidence_rows"])
                yield f"  in evidence only  {name}  {seen}{_unsure(one)}"
        if not document["versions"]:
            yield "  none"
        yield "aliases"
        for one in document["aliases"]:
            yield f"  {one['model']}@{one['alias']} (version {one['version']}): {one['used_for']}"
        if not document["aliases"]:
            yield "  none"
        yield "files that hold text of it"
        for one in document["texts"]:
            yield f"  {one['holds']:18} {one['path']}  (found by {one['how']})"
        if not document["texts"]:
            yield "  none"
    yield "not seen from here"
    for line in document["unseen"]:
        yield f"  {line}"


def _rows(rows: Mapping[str, int]) -> str:
    return ", ".join(f"{part} {count}" for part, count in rows.items())


def _unsure(one: Mapping[str, Any]) -> str:
    return "" if one["sure"] else " (at most: files in between are gone)"


def _few(names: Sequence[str]) -> str:
    more = f" and {len(names) - MOST_IDS} more" if len(names) > MOST_IDS else ""
    return ", ".join(names[:MOST_IDS]) + more
