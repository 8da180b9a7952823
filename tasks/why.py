"""Why a version is where it is: the chain from an alias to the prompts, with what was judged.

Everything is read from MLflow and the ledger, so it works where the store is not; the store of
this machine helps out for versions that were made before lineages were recorded. What does not
agree is a problem and comes first; nothing is repaired here.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

from registry.bundle import Bundle
from registry.evidence import LatencyEvidence
from registry.ledger import Entry
from registry.lineage import BUNDLE, PROMPTS, Edge, Lineage, Node
from registry.outcome import CandidateOutcome, GateResult
from registry.topology import COLOCATED
from registry.tracking import TAG_BUNDLE, asking_mlflow
from registry.versions import PREVIOUS
from tasks.bundles import tracker, version_named
from tasks.version_files import VersionFiles
from tasks.why_checks import (
    TAG_PROMPTS,
    Findings,
    Judged,
    check_bundle,
    check_judged,
    check_lineage,
    cut,
    judging_line,
    read_ledger,
)

__all__ = ["TAG_PROMPTS", "Why", "why"]

NO_LINE = "moved before the ledger began, or outside of pilotage"

NEWEST = "latest"
"""MLflow's own word, in any case of letters; it can be no alias."""

LINKS = ("alias", "version")
"""What stands above a bundle in the chain."""

_COMMON = ("tools", "git", "driver", "serve", "hardware", "machine", "made_at")
"""Facts of every artifact; told once, not with each."""


class Why(NamedTuple):
    """`document` is what `pilotage why --json` prints. `lineage` None: nothing is known of it."""

    document: dict[str, Any]
    lineage: Lineage | None

    @property
    def pictured(self) -> Lineage:
        """The lineage with the alias and the version on top of it."""
        chain = self.document["chain"]
        links = [Node(**link, label=link["key"]) for link in chain if link["kind"] in LINKS]
        parts = self.lineage or Lineage(nodes={})
        below = parts.of_kind(BUNDLE)[:1]
        nodes = {node.id: node for node in links} | parts.nodes
        pairs = pairwise([*links, *below])
        edges = [Edge(child=a.id, role="points to", parent=b.id) for a, b in pairs]
        return Lineage(nodes=nodes, edges=edges + parts.edges)

    @property
    def explained(self) -> bool:
        """Whether all that is known agrees."""
        return not self.document["problems"]


def why(reference: str) -> Why:
    """The answer for MODEL@ALIAS or MODEL@VERSION. Raises `UserError` when there is no such."""
    named = version_named(reference)
    model, alias, version, client = named.model, named.alias, named.version, tracker().client
    findings = Findings()
    files = VersionFiles(version)
    tagged = version.tags.get(TAG_BUNDLE, "")
    number = int(version.version)
    with asking_mlflow(f"read {model}"):
        registered = client.get_registered_model(model)
    entries = read_ledger(model, registered.tags, findings)
    bundle = check_bundle(files, tagged, findings)
    judged = check_judged(files, bundle, judging_line(entries, number), tagged, findings)
    lineage = check_lineage(judged, bundle, version, tagged, findings)
    moved = _moved(entries, alias, number, tagged, findings)
    outcome = judged.outcome
    gates = outcome.gates if outcome is not None else []
    return Why(
        {
            "model": model,
            "alias": alias,
            "version": number,
            "aliases": sorted(a for a, held in registered.aliases.items() if int(held) == number),
            "bundle": tagged,
            "candidate": outcome.name if outcome is not None else "",
            "verdict": outcome.verdict.value if outcome is not None else None,
            "problems": findings.problems,
            "notes": findings.notes,
            "moved": moved,
            "gates": [_short(gate) for gate in gates],
            "waivers": [
                {"gate": gate.name, **gate.waived.model_dump(mode="json")}
                for gate in gates
                if gate.waived is not None
            ],
            "policy": version.tags.get("pilotage.policy", ""),
            "release": version.tags.get("pilotage.release", ""),
            "run_id": version.run_id,
            "evidence": _evidence(judged),
            "load": _load(judged.evidence.get("latency"), outcome),
            "serving": serving_facts(bundle),
            **_sections(lineage),
            "chain": _chain(model, alias, number, tagged, lineage),
        },
        lineage,
    )


# -- how it got there ------------------------------------------------------------------------


def _moved(
    entries: Sequence[Entry] | None,
    alias: str | None,
    number: int,
    bundle: str,
    findings: Findings,
) -> dict[str, Any] | None:
    """The ledger's last line that moved the alias here; None where there is none."""
    if alias is not None and alias.lower() == NEWEST:
        findings.notes.append(
            f"{alias!r} is MLflow's own word for the newest version: nobody moved it here"
        )
        return None
    if entries is None:
        return None
    lines = [
        (name, one)
        for one in entries
        for name, move in one.moves.items()
        if (name == alias if alias is not None else move.after == number)
    ]
    if not lines:
        findings.notes.append(f"no line of the ledger says how it got here: {NO_LINE}")
        return None
    name, line = lines[-1]
    move = line.moves[name]
    if move.after != number:
        where = f"version {move.after}" if move.after is not None else "nothing"
        last = line is entries[-1]
        findings.problems.append(
            f"alias {name} points to version {number}, the ledger's line {line.sequence} "
            f"({line.at:%Y-%m-%d %H:%M} UTC, {line.actor}) to {where}: "
            + ("that move was not finished, or " if last else "")
            + "it was moved outside of pilotage"
        )
        return None
    # A line is about what it promotes; `previous` moves along with it.
    if name != PREVIOUS and line.bundle and line.bundle != bundle:
        findings.problems.append(
            f"the ledger's line {line.sequence} is about bundle {cut(line.bundle)}"
        )
    return {
        "alias": name,
        "sequence": line.sequence,
        "at": line.at.isoformat(),
        "by": line.actor,
        "action": line.action,
        "from": move.before,
        "to": move.after,
        "reason": line.reason,
        "policy": line.policy,
        "waivers": line.waivers,
        "evidence": line.evidence,
        "details": line.details,
        "hash": line.hash,
    }


# -- what was judged, what it was made of ----------------------------------------------------


def _short(gate: GateResult) -> dict[str, Any]:
    """A gate without the ids of the items that flipped."""
    flips = gate.flips
    counts = {"gained": flips.gained, "lost": flips.lost} if flips is not None else None
    return {**gate.model_dump(mode="json"), "flips": counts}


def _evidence(judged: Judged) -> dict[str, Any]:
    """By kind: digest of the folder, and what its summary says of itself."""
    keys = ("measured_at", "engine", "harness", "suite", "profile", "hardware", "items_asked",
            "items_scored", "metrics", "smoke", "limited", "emulated", "stays", "reason",
            "num_speculative_tokens")  # fmt: skip
    return {
        kind: {"digest": digest, **{key: told[key] for key in keys if key in told}}
        for kind, digest in judged.digests.items()
        for told in (judged.told.get(kind, {}),)
    }


def _load(evidence: object, outcome: CandidateOutcome | None) -> dict[str, Any] | None:
    """The load that was judged: the points at the gates' rates, or at the largest kept one."""
    if not isinstance(evidence, LatencyEvidence) or outcome is None:
        return None
    rates = {gate.rate for gate in outcome.gates} - {None}
    if not rates and evidence.kept_rate is not None:
        rates = {evidence.kept_rate[0]}
    points = [point for point in evidence.points if point.rate in rates] or evidence.points
    keys = {"rate", "concurrency", "total", "failed", "ttft_ms", "tpot_ms", "itl_ms", "e2el_ms",
            "output_tokens_per_s", "acceptance_length", "prefix_cache_hit_rate"}  # fmt: skip
    return {
        "profile": evidence.profile,
        "hardware": evidence.hardware,
        "kept_rate": list(evidence.kept_rate) if evidence.kept_rate is not None else None,
        "emulated": evidence.emulated,
        "points": [point.model_dump(mode="json", include=keys) for point in points],
    }


def serving_facts(bundle: Bundle | None) -> dict[str, Any] | None:
    """What a bundle is served with."""
    if bundle is None:
        return None
    return {
        "engine": f"{bundle.engine} {bundle.engine_version}",
        "engine_args": bundle.engine_args,
        "env": bundle.env,
        "target": bundle.target.digest,
        "draft": bundle.draft.digest if bundle.draft else None,
        "num_speculative_tokens": bundle.num_speculative_tokens,
        "topology": bundle.topology.model_dump(mode="json") if bundle.topology else COLOCATED,
    }


def _sections(lineage: Lineage | None) -> dict[str, Any]:
    """What release engineers ask for by name; the chain has the same in its order."""
    nodes = lineage.ordered() if lineage is not None else []

    def first(kind: str) -> dict[str, Any] | None:
        return next((_own(node) for node in nodes if node.kind == kind), None)

    data = first("teacher_data")
    models = [node for node in nodes if node.kind == "model"]
    teacher = next((_own(node) for node in models if node.label == "teacher"), None)
    answers = "made.answers."
    return {
        "draft": first("draft"),
        "quantization": first("quantize"),
        "adapter": first("distill"),
        "teacher": {**(teacher or {}), "data": data} if data or teacher else None,
        "filters": {
            name.removeprefix(answers): int(count)
            for name, count in (data or {}).get("facts", {}).items()
            if name.startswith(answers) and count.isdecimal()
        },
        "prompts": [_own(node) for node in nodes if node.kind == PROMPTS],
        "prompts_digest": lineage.prompts_digest() if lineage is not None else "",
        "code": _by_value(nodes, "git"),
        "environments": {
            "driver": _by_value(nodes, "driver"),
            "serve": _by_value(nodes, "serve"),
            "hardware": _by_value(nodes, "hardware"),
            "machine": _by_value(nodes, "machine"),
        },
    }


def _own(node: Node) -> dict[str, Any]:
    facts = {name: value for name, value in node.facts.items() if name not in _COMMON}
    return {
        "kind": node.kind,
        "label": node.label,
        "key": node.key,
        "digest": node.digest,
        "made_at": node.facts.get("made_at", ""),
        "gone": node.gone,
        "facts": facts,
    }


def _by_value(nodes: Sequence[Node], fact: str) -> dict[str, list[str]]:
    """Kinds of artifacts by the value of a fact: one key where all were made alike."""
    found: dict[str, list[str]] = {}
    for node in nodes:
        if fact in node.facts:
            found.setdefault(node.facts[fact], []).append(node.kind)
    return found


def _chain(
    model: str, alias: str | None, number: int, bundle: str, lineage: Lineage | None
) -> list[dict[str, Any]]:
    """From the alias to the prompts. An alias and a version have the digest of their bundle."""
    links: list[dict[str, Any]] = []
    if alias is not None:
        links.append({"kind": "alias", "key": f"{model}@{alias}", "digest": bundle})
    links.append({"kind": "version", "key": f"{model}/{number}", "digest": bundle})
    if lineage is None:
        return [*links, {"kind": BUNDLE, "key": bundle, "digest": bundle}]
    return links + [_own(node) for node in lineage.ordered()]
