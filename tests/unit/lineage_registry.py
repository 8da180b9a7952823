"""Versions with the files that a release leaves in MLflow, weights left out; no database."""

from __future__ import annotations

import json
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

from registry.bundle import Bundle
from registry.lineage import LINEAGE_FILE
from registry.settings import settings
from registry.tracking import TAG_BUNDLE
from tasks.lineage import lineage_for
from tests.unit.lineage_builders import Release

MODEL = "wo"
GATE = {
    "name": "keeps_hits",
    "kind": "retention",
    "metric": "hit_rate",
    "tier": "critical",
    "result": "PASS",
    "estimate": 0.99,
    "bound": 0.95,
    "opposite_bound": None,
    "margin": 0.9,
    "n": 2,
    "rate": 4.0,
    "flips": {"gained": 1, "lost": 0, "gained_items": ["e0"], "lost_items": []},
    "waived": None,
    "reason": "0.99 of the teacher's",
}
LATENCY = {
    "kind": "latency",
    "profile": "day",
    "hardware": "f00dfeed0000",
    "measured_at": "2026-11-30T05:28:12Z",
    "points": [
        {"rate": rate, "failed": 0, "total": 60, "ttft_ms": {"p50": 12.0, "p99": 20.0 * rate},
         "acceptance_length": 2.5}
        for rate in (2.0, 4.0)
    ],
}  # fmt: skip


def version_of(
    made: Release,
    bundle: Bundle,
    *,
    number: int = 1,
    recorded: bool = True,
    tags: Mapping[str, str] | None = None,
    files: Mapping[str, Any] | None = None,
) -> SimpleNamespace:
    """A version as MLflow would name it, with its files; `files` replaces some (None: left out)."""
    refs = {kind: made.refs[kind] for kind in ("accuracy", "latency")}
    outcome = {
        "name": bundle.name,
        "bundle": bundle.digest,
        "verdict": "PASS",
        "gates": [GATE],
        "evidence": {kind: ref.digest for kind, ref in refs.items()},
    }
    documents: dict[str, Any] = {
        "bundle.json": {**bundle.model_dump(mode="json"), "digest": bundle.digest},
        "outcome.json": outcome,
        "evidence-accuracy.json": {"kind": "accuracy", "bundle": bundle.digest},
        "evidence-latency.json": {**LATENCY, "bundle": bundle.digest},
        **({LINEAGE_FILE: lineage_for(bundle, refs).model_dump(mode="json")} if recorded else {}),
        **(files or {}),
    }
    folder = settings().mlartifacts_dir / MODEL / str(number)
    folder.mkdir(parents=True)
    for name, document in documents.items():
        if document is not None:
            text = document if isinstance(document, str) else json.dumps(document)
            (folder / name).write_text(text, encoding="utf-8")
    return SimpleNamespace(
        name=MODEL,
        version=str(number),
        source=folder.as_uri(),
        run_id="r" * 32,
        tags={TAG_BUNDLE: bundle.digest, **(tags or {})},
    )
