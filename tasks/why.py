"""Why a version is where it is: the chain from an alias to the prompts, with what was judged.

Everything is read from MLflow and the ledger, so it works where the store is not; the store of
this machine helps out for versions that were made before lineages were recorded. What does not
agree is a problem and comes first; nothing is repaired here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

from registry.errors import UserError
from registry.ledger import Entry, Ledger, LedgerDamaged, anchor_of, verify
from registry.lineage import BUNDLE, PROMPTS, Edge, Lineage, Node, whole_store
from registry.outcome import Verdict
from registry.settings import settings
from registry.tracking import BUNDLE_FILE, OUTCOME_FILE, TAG_BUNDLE, asking_mlflow
from registry.versions import PREVIOUS
from tasks.bundles import tracker, version_named
from tasks.version_files import VersionFiles

if TYPE_CHECKING:
    pass

TAG_PROMPTS = "pilotage.prompts"
"""On a version: digests of the prompt sets behind it, comma separated."""

NO_LINE = "moved before the ledger began, or outside of pilotage"

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


@dataclass
class _Findings:
    problems: list[str] = field(default_factory=list)
    """What contradicts, or lacks, what an alias has to rest on."""
    notes: list[str] = field(default_factory=list)
    """What a reader should know, and contradicts nothing."""


def why(reference: str) -> Why:
    """The answer for MODEL@ALIAS or MODEL@VERSION. Raises `UserError` when there is no such."""
    named = version_named(reference)
    model, alias, version, client = named.model, named.alias, named.version, tracker().client
    findings = _Findings()
    files = VersionFiles(version)
    tagged = version.tags.get(TAG_BUNDLE, "")
    _check_bundle(files, tagged, findings)
    _check_outcome(files, tagged, findings)
    evidence = _evidence(files, tagged, findings)
    lineage = _lineage(files, tagged, findings)
    with asking_mlflow(f"read {model}"):
        registered = client.get_registered_model(model)
    number = int(version.version)
    moved = _moved(model, alias, number, tagged, registered.tags, findings)
    return Why(
        {
            "model": model,
            "alias": alias,
            "version": number,
            "aliases": sorted(a for a, held in registered.aliases.items() if int(held) == number),
            "bundle": tagged,
            "candidate": files.outcome.get("name", ""),
            "verdict": files.outcome.get("verdict"),
            "problems": findings.problems,
            "notes": findings.notes,
            "moved": moved,
            "gates": [_short(gate) for gate in files.outcome.get("gates", [])],
            "waivers": [
                {"gate": gate["name"], **gate["waived"]}
                for gate in files.outcome.get("gates", [])
                if gate.get("waived")
            ],
            "policy": version.tags.get("pilotage.policy", ""),
            "release": version.tags.get("pilotage.release", ""),
            "run_id": version.run_id,
            "evidence": evidence,
            "load": _load(files),
            "serving": _serving(files),
            **_sections(lineage, files),
            "chain": _chain(model, alias, number, tagged, lineage),
        },
        lineage,
    )


# -- which version ---------------------------------------------------------------------------


# -- what has to agree -----------------------------------------------------------------------


def _check_bundle(files: VersionFiles, tagged: str, findings: _Findings) -> None:
    if files.bundle is None:
        findings.problems.append(f"{BUNDLE_FILE} is missing or cannot be read")
        return
    bundle, named = files.bundle
    if named != bundle.digest:
        findings.problems.append(
            f"{BUNDLE_FILE} names the digest {_cut(named)}, its content is {_cut(bundle.digest)}: "
            "it was changed after it was gated"
        )
    if bundle.digest != tagged:
        findings.problems.append(
            f"{BUNDLE_FILE} is bundle {_cut(bundle.digest)}, the version's tag says {_cut(tagged)}"
        )


def _check_outcome(files: VersionFiles, tagged: str, findings: _Findings) -> None:
    outcome = files.outcome
    if not outcome:
        findings.problems.append(
            f"{OUTCOME_FILE} is missing or cannot be read: verdict and gates are not known"
        )
        return
    if outcome.get("bundle") != tagged:
        findings.problems.append(
            f"{OUTCOME_FILE} judged bundle {_cut(outcome.get('bundle', ''))}, "
            f"the version is of {_cut(tagged)}"
        )
    if outcome.get("verdict") != Verdict.PASS:
        findings.problems.append(
            f"its verdict is {outcome.get('verdict')}; only PASS becomes a version"
        )


def _evidence(files: VersionFiles, tagged: str, findings: _Findings) -> dict[str, Any]:
    """By kind: digest of the folder, and what its summary says of itself."""
    found = {}
    for kind, digest in (files.outcome.get("evidence") or {}).items():
        name = f"evidence-{kind}.json"
        document = files.document(name)
        if document is None:
            findings.problems.append(f"{name} is missing or cannot be read")
            found[kind] = {"digest": digest}
            continue
        bundle = document.get("bundle", tagged)
        if bundle != tagged:
            findings.problems.append(f"{name} was measured on bundle {_cut(bundle)}")
        newer = files.version.tags.get(f"pilotage.evidence.{kind}", digest)
        if newer != digest:
            findings.notes.append(
                f"{kind} was measured again later (evidence {_cut(newer)}); shown is what was "
                "judged when the version was made"
            )
        keys = ("measured_at", "engine", "harness", "suite", "profile", "hardware", "items_asked",
                "items_scored", "metrics", "smoke", "limited", "stays", "reason",
            "num_speculative_tokens")  # fmt: skip
        found[kind] = {"digest": digest, **{key: document[key] for key in keys if key in document}}
    return found


def _lineage(files: VersionFiles, tagged: str, findings: _Findings) -> Lineage | None:
    lineage = files.recorded_lineage()
    if lineage is None:
        lineage = files.lineage(whole_store(settings().store_dir)[0])
        if lineage is not None:
            findings.notes.append(
                "the version has no lineage of its own: the chain is as this machine's store has it"
            )
    tops = lineage.of_kind(BUNDLE) if lineage is not None else []
    if lineage is None or len(tops) != 1:
        findings.problems.append("nothing says what the bundle was made of")
        return None
    if tops[0].digest != tagged:
        findings.problems.append(f"its lineage is that of bundle {_cut(tops[0].digest)}")
    judged = files.outcome.get("evidence") or {}
    for role, node in lineage.parents(tops[0].id).items():
        kind = role.removeprefix("evidence.")
        if kind != role and judged.get(kind, node.digest) != node.digest:
            findings.problems.append(
                f"its lineage names {kind} evidence {_cut(node.digest)}, "
                f"judged was {_cut(judged[kind])}"
            )
    prompts = files.version.tags.get(TAG_PROMPTS)
    if prompts is not None and prompts != lineage.prompts_digest():
        # The tag is of the last release that measured the bundle, the lineage of the first.
        tags = files.version.tags
        again = any(tags.get(f"pilotage.evidence.{k}", d) != d for k, d in judged.items())
        told = f"its tag {TAG_PROMPTS} is not the prompts of its lineage"
        (findings.notes if again else findings.problems).append(told)
    gone = [node.title for node in lineage.ordered() if node.gone]
    if gone:
        findings.notes.append(f"known by digest only, their content is gone: {', '.join(gone)}")
    if not lineage.of_kind(PROMPTS):
        findings.notes.append("the chain ends before the prompts")
    return lineage


# -- how it got there ------------------------------------------------------------------------


def _moved(
    model: str,
    alias: str | None,
    number: int,
    bundle: str,
    tags: Mapping[str, str],
    findings: _Findings,
) -> dict[str, Any] | None:
    """The ledger's last line that moved the alias here; None where there is none."""
    entries = _ledger(model, tags, findings)
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
            f"the ledger's line {line.sequence} is about bundle {_cut(line.bundle)}"
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


def _ledger(model: str, tags: Mapping[str, str], findings: _Findings) -> Sequence[Entry] | None:
    """The model's lines; None where they cannot be read or trusted, with the reason found."""
    try:
        entries = Ledger(settings().ledger_uri).entries(model)
        broken = verify(entries, anchor_of(tags, model))
    except LedgerDamaged as error:
        findings.problems.append(f"the ledger is damaged: {error.broken}")
        return None
    except UserError as error:
        findings.notes.append(f"the ledger was not read: {error.problems[0].what}")
        return None
    if broken is not None:
        findings.problems.append(f"the ledger is damaged: {broken}")
    return entries


# -- what was judged, what it was made of ----------------------------------------------------


def _short(gate: Mapping[str, Any]) -> dict[str, Any]:
    """A gate without the ids of the items that flipped."""
    flips = gate.get("flips")
    counts = {key: flips[key] for key in ("gained", "lost")} if flips else None
    return {**gate, "flips": counts}


def _load(files: VersionFiles) -> dict[str, Any] | None:
    """The load that was judged: the points at the gates' rates, or at the largest kept one."""
    document = files.document("evidence-latency.json")
    if document is None:
        return None
    points = document.get("points") or []
    kept = document.get("kept_rate")
    rates = {gate.get("rate") for gate in files.outcome.get("gates", [])} - {None}
    if not rates and kept:
        rates = {kept[0]}
    judged = [point for point in points if point.get("rate") in rates] or points
    keys = ("rate", "concurrency", "total", "failed", "ttft_ms", "tpot_ms", "itl_ms", "e2el_ms",
            "output_tokens_per_s", "acceptance_length", "prefix_cache_hit_rate")  # fmt: skip
    return {
        "profile": document.get("profile"),
        "hardware": document.get("hardware"),
        "kept_rate": kept,
        "points": [{key: point.get(key) for key in keys} for point in judged],
    }


def _serving(files: VersionFiles) -> dict[str, Any] | None:
    if files.bundle is None:
        return None
    bundle = files.bundle[0]
    return {
        "engine": f"{bundle.engine} {bundle.engine_version}",
        "engine_args": bundle.engine_args,
        "env": bundle.env,
        "target": bundle.target.digest,
        "draft": bundle.draft.digest if bundle.draft else None,
        "num_speculative_tokens": bundle.num_speculative_tokens,
    }


def _sections(lineage: Lineage | None, files: VersionFiles) -> dict[str, Any]:
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
            if name.startswith(answers)
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


def _cut(digest: str) -> str:
    return digest[:12] or "nothing"
