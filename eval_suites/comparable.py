"""Whether evidence may be judged at all, and compared: accounting first, then the settings."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from eval_suites.policy import GateRule
from registry.evidence import AccuracyEvidence, Unusable

if TYPE_CHECKING:
    from registry.evidence_folders import CandidateEvidence
    from registry.items import Items

MAY_DIFFER = frozenset(
    {"batch_size", "concurrency", "model", "num_concurrent", "served_model", "timeout", "url"}
)
"""Settings that say how the questions were sent, not what was asked."""

TOKENIZER, TEMPLATE = "tokenizer_digest", "chat_template_"
"""`chat_template_digest` and the like say which one; `chat_template`, whether there is one."""

ALIKE = {
    "accuracy": ("suite", "task", "task_version", "harness", "items_digest", "items_asked", "smoke",
                 "limited"),
    "latency": ("profile", "hardware", "harness", "smoke"),
}  # fmt: skip
"""Fields of the summaries that must be equal for two numbers to be compared."""

PERCENT = 50
"""A score above this beside scores of at most 1 is a percentage."""

Array = NDArray[np.float64]

SHOWN = 3
"""Item ids named in a message."""


def present(kind: str, evidence: CandidateEvidence, who: str) -> Any:
    """The summary of one kind, after the checks that need no metric. Raises `Unusable`."""
    if kind in evidence.unreadable:
        raise Unusable(f"the {who}'s {kind} evidence cannot be used: {evidence.unreadable[kind]}")
    found = getattr(evidence, kind)
    if found is None:
        raise Unusable(f"there is no {kind} evidence of the {who}")
    if found.bundle != evidence.bundle:
        raise Unusable(
            f"the {who}'s {kind} evidence names bundle {str(found.bundle)[:12]}, "
            f"not {evidence.bundle[:12]}"
        )
    return found


def summary_of(evidence: CandidateEvidence, who: str) -> AccuracyEvidence | None:
    """The accuracy summary with its accounts in order; None for a plain table of scores."""
    if evidence.source == "table" and "accuracy" not in evidence.unreadable:
        return None
    found: AccuracyEvidence = present("accuracy", evidence, who)
    if found.items_scored != found.items_asked:
        raise Unusable(f"{found.items_scored} of the {who}'s {found.items_asked} items were scored")
    if found.items_scored == 0:
        raise Unusable(f"no item was asked of the {who}")
    return found


def items_of(evidence: CandidateEvidence, who: str) -> Items:
    """The rows, as many as the summary says. Raises `Unusable`."""
    summary = summary_of(evidence, who)
    if "items" in evidence.unreadable:
        raise Unusable(f"the {who}'s items cannot be used: {evidence.unreadable['items']}")
    if evidence.items is None:
        raise Unusable(f"there are no scores per item of the {who}")
    if len(evidence.items) == 0:
        raise Unusable(f"no item was scored of the {who}")
    if summary is not None and len(evidence.items) != summary.items_scored:
        raise Unusable(
            f"the {who}'s summary counts {summary.items_scored} scored items, "
            f"{evidence.items.where} has {len(evidence.items)}"
        )
    return evidence.items


def check_alike(rule: GateRule, candidate: CandidateEvidence, reference: CandidateEvidence) -> None:
    """Raises `Unusable` with everything that makes the two numbers of `rule` incomparable."""
    found = differences(rule, candidate, reference)
    if found:
        raise Unusable(f"not measured like the {rule.reference}: {'; '.join(found)}")


def differences(
    rule: GateRule, candidate: CandidateEvidence, reference: CandidateEvidence
) -> list[str]:
    """Everything that differs and must not, the candidate named first.

    Two plain tables have no settings: nothing is known, and such a pair never promotes. A
    table against evidence with settings is not comparable.
    """
    tables = [evidence.source == "table" for evidence in (candidate, reference)]
    if all(tables):
        return []
    if any(tables):
        which = "candidate" if tables[0] else rule.reference
        return [f"unknown settings of the {which}: it is a table of scores alone"]
    kind = "latency" if rule.on_latency else "accuracy"
    own, theirs = getattr(candidate, kind), getattr(reference, kind)
    found = [
        f"{name} {_shown(getattr(own, name))} against {_shown(getattr(theirs, name))}"
        for name in ALIKE[kind]
        if getattr(own, name) != getattr(theirs, name)
    ]
    unknown = [
        f"unknown settings of the {who}"
        for who, evidence in (("candidate", own), (rule.reference, theirs))
        if not evidence.settings
    ]
    if unknown:
        return found + unknown
    return found + _settings(rule, own.settings, theirs.settings)


def _settings(rule: GateRule, own: Mapping[str, Any], theirs: Mapping[str, Any]) -> list[str]:
    ours, other = _flat(own), _flat(theirs)
    # A model of another family brings its own tokenizer and its own chat template. Where nobody
    # recorded the tokenizers, that is what a teacher or a champion may be.
    same_family = rule.reference == "student" or (
        ours.get(TOKENIZER) is not None and ours.get(TOKENIZER) == other.get(TOKENIZER)
    )
    found = []
    for name in sorted(set(ours) | set(other)):
        if name.rpartition(".")[2] in MAY_DIFFER:
            continue
        if not same_family and (TEMPLATE in name or name == TOKENIZER):
            continue
        if name not in ours or name not in other or ours[name] != other[name]:
            left = _shown(ours[name]) if name in ours else "not recorded"
            right = _shown(other[name]) if name in other else "not recorded"
            found.append(f"{name} {left} against {right}")
    return found


def check_same_items(rule: GateRule, own: Items, theirs: Items) -> None:
    """The same questions on both sides. Raises `Unusable` naming some that are not."""
    who = rule.reference
    if not np.array_equal(own.ids, theirs.ids):
        parts = []
        for side, missing in (
            ("the candidate", np.setdiff1d(theirs.ids, own.ids)),
            (f"the {who}", np.setdiff1d(own.ids, theirs.ids)),
        ):
            if len(missing):
                named = ", ".join(map(_name, missing[:SHOWN]))
                parts.append(f"{len(missing)} items are missing of {side} ({named})")
        raise Unusable("; ".join(parts))
    for column in ("doc_hash", "prompt_hash"):
        if own.has(column) and theirs.has(column):
            unlike = own.labels(column) != theirs.labels(column)
            if unlike.any():
                named = ", ".join(map(str, own.ids[unlike][:SHOWN]))
                raise Unusable(
                    f"{int(unlike.sum())} items were asked with other messages than the {who}'s "
                    f"({column} of {named})"
                )
            return


def check_same_columns(rule: GateRule, own: Items, theirs: Items) -> None:
    """An item is in the same slice, stratum and cluster on both sides. Raises `Unusable`."""
    for column in dict.fromkeys([*rule.slices, rule.strata, rule.cluster]):
        if column is None or not (own.has(column) and theirs.has(column)):
            continue
        if own.frame[column].tolist() == theirs.frame[column].tolist():
            continue
        pairs = zip(own.ids, own.texts(column), theirs.texts(column), strict=True)
        unlike = [
            (name, mine, other)
            for name, mine, other in pairs
            if mine is not None and other is not None and mine != other
        ]
        if unlike:
            name, mine, other = unlike[0]
            raise Unusable(
                f"{len(unlike)} items have another {column} than the {rule.reference}'s, e.g. "
                f"{name}: {mine!r} against {other!r}"
            )


def check_same_metric(
    rule: GateRule, own: Items, theirs: Items, scores: Array, their_scores: Array
) -> None:
    """One column on both sides, not two filters of one metric; one scale. Raises `Unusable`."""
    mine, other = own.column_of(rule.metric), theirs.column_of(rule.metric)
    if mine != other:
        raise Unusable(
            f"{rule.metric} is {mine!r} of the candidate and {other!r} of the {rule.reference}: "
            "name the filter"
        )
    if rule.kind == "length":
        return
    highest = {"candidate": scores.max(), str(rule.reference): their_scores.max()}
    low, high = sorted(highest, key=lambda who: highest[who])
    within = min(scores.min(), their_scores.min()) >= 0
    if within and 0 < highest[low] <= 1 and PERCENT < highest[high] <= 100:
        raise Unusable(
            f"not on one scale: {rule.metric} goes up to {highest[high]:g} for the {high} and to "
            f"{highest[low]:g} for the {low}: a percentage against a share"
        )


def _flat(settings: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in settings.items():
        if isinstance(value, Mapping) and value:
            flat |= _flat(value, f"{prefix}{name}.")
        else:
            flat[f"{prefix}{name}"] = value
    return flat


def _name(identity: Any) -> str:
    """An item's id; quoted where its ends, or what is in it, could not be seen otherwise."""
    text = str(identity)
    return text if text.isprintable() and text == text.strip() else repr(text)


def _shown(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 32 else f"{text[:12]}..."
