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
    "candidate": 0.71,
    "n": 2,
    "rate": 4.0,
    "flips": {"gained": 1, "lost": 0, "gained_items": ["e0"], "lost_items": []},
    "waived": None,
    "reason": "0.99 of the teacher's",
}
ACCURACY = {
    "schema_version": 2,
    "kind": "accuracy",
    "suite": "wo",
    "task": "wo",
    "task_version": "1",
    "engine": "vllm 0.32.0",
    "harness": "lm-eval 0.4.13",
    "items_digest": "e" * 64,
    "settings": {},
    "items_asked": 2,
    "items_scored": 2,
    "metrics": {"hit_rate": 0.71},
    "measured_at": "2026-11-30T05:20:00Z",
    "seconds": 3.5,
}
LATENCY = {
    "kind": "latency",
    "profile": "day",
    "hardware": "f00dfeed0000",
    "engine": "vllm 0.32.0",
    "harness": "vllm bench serve 0.32.0",
    "settings": {},
    "measured_at": "2026-11-30T05:28:12Z",
    "seconds": 30.0,
    "points": [
        {"rate": rate, "achieved_rate": rate, "failed": 0, "total": 60, "ok": 60,
         "duration_s": 15.0, "ttft_ms": {"p50": 12.0, "p99": 20.0 * rate}, "tpot_ms": {},
         "itl_ms": {}, "e2el_ms": {}, "output_tokens_per_s": 80.0, "acceptance_length": 2.5}
        for rate in (2.0, 4.0)
    ],
}  # fmt: skip


def outcome_of(made: Release, bundle: Bundle, /, **told: Any) -> dict[str, Any]:
    """The outcome of a bundle that passed; keywords replace fields."""
    return {
        "name": bundle.name,
        "bundle": bundle.digest,
        "verdict": "PASS",
        "reasons": [],
        "gates": [GATE],
        "evidence": {kind: made.refs[kind].digest for kind in ("accuracy", "latency")},
        **told,
    }


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
    documents: dict[str, Any] = {
        "bundle.json": {**bundle.model_dump(mode="json"), "digest": bundle.digest},
        "outcome.json": outcome_of(made, bundle),
        "evidence-accuracy.json": {**ACCURACY, "bundle": bundle.digest},
        "evidence-latency.json": {**LATENCY, "bundle": bundle.digest},
        **({LINEAGE_FILE: lineage_for(bundle, refs).model_dump(mode="json")} if recorded else {}),
        **(files or {}),
    }
    folder = settings().mlartifacts_dir / MODEL / str(number)
    folder.mkdir(parents=True)
    for name, document in documents.items():
        if document is not None:
            content = document if isinstance(document, str | bytes) else json.dumps(document)
            content = content.encode() if isinstance(content, str) else content
            (folder / name).write_bytes(content)
    return SimpleNamespace(
        name=MODEL,
        version=str(number),
        source=folder.as_uri(),
        run_id="r" * 32,
        tags={TAG_BUNDLE: bundle.digest, **(tags or {})},
    )
