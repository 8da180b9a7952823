"""Bundles, their records and registered versions, as a release would have left them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from registry.alias_moves import Aliases
from registry.bundle import Bundle, Part
from registry.digests import digest_of, digest_of_folder
from registry.evidence import (
    AccuracyEvidence,
    Evidence,
    LatencyEvidence,
    LoadPoint,
    ServingEvidence,
)
from registry.ledger import verify
from registry.outcome import CandidateOutcome, GateResult, Verdict
from registry.promotion import Backing, Moved, confirm, promote
from registry.provenance import hardware_fingerprint
from registry.release_facts import RELEASE_FILE, ReleaseFacts
from registry.settings import settings
from registry.tracking import Tracker
from registry.versions import CHAMPION, register_version

MODEL = "support-student"
BY = Backing(actor="release demo", evidence={"accuracy": "acc"}, policy="p1")
SMOKE = [{"role": "user", "content": "Where is container MSKU 4?"}]
POLICY: dict[str, Any] = {
    "kind": "policy",
    "description": "for a test",
    "gates": [{"name": "hits", "kind": "floor", "metric": "hit_rate", "margin": 0.5}],
}


# -- bare versions: enough for the registry's own moves --------------------------------------


def bundle(number: int) -> Bundle:
    part = Part(stage="quantize", key=f"k{number}", digest=f"d{number}")
    return Bundle(name=f"c{number}", target=part, engine_version="0.32.0")


def passed(number: int) -> CandidateOutcome:
    return CandidateOutcome(
        name=f"c{number}",
        bundle=bundle(number).digest,
        verdict=Verdict.PASS,
        reasons=[],
        evidence={"accuracy": f"acc{number}"},
    )


def registered(tracker: Tracker, *numbers: int) -> None:
    """Versions of the bundles, each from a release of its own."""
    for number in numbers:
        parent = tracker.release_run(MODEL, f"r{number}", "demo")
        made = tracker.candidates(
            parent, [(passed(number), bundle(number))], measured_at=datetime(2030, 1, 2, tzinfo=UTC)
        )
        version = register_version(
            tracker.client,
            MODEL,
            passed(number),
            model_id=made[f"c{number}"],
            run_id=parent,
            tags={"pilotage.policy": "demo"},
        )
        assert version == number


def promoted(aliases: Aliases, *numbers: int) -> list[Moved]:
    """The versions promoted one after another, each confirmed."""
    done = []
    for number in numbers:
        now = aliases.settle().aliases.get(CHAMPION)
        moved = promote(aliases, number, bundle(number).digest, BY, expected=now)
        confirm(aliases, moved)
        done.append(moved)
    return done


def held(aliases: Aliases) -> dict[str, int]:
    found = aliases.client.get_registered_model(MODEL).aliases
    return {name: int(version) for name, version in found.items()}


def is_sound(aliases: Aliases) -> None:
    """The chain is whole, the anchor covers it, MLflow has what it says; nothing is left to do."""
    lines = len(aliases.ledger.entries(MODEL))
    state = aliases.settle()
    assert len(state.entries) == lines
    assert state.finished is None
    assert verify(state.entries, state.head) is None
    assert aliases.tags()["pilotage.ledger.length"] == str(state.head.length)
    assert aliases.tags()["pilotage.ledger.head"] == state.head.hash
    assert state.aliases == held(aliases)


# -- whole candidates: with evidence, facts and weights in the store -------------------------


def stored_bundle(number: int) -> Bundle:
    """A bundle whose weights, a few bytes, lie in this home's store."""
    folder = settings().store_dir / "quantize" / f"k{number}" / "files"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "model.safetensors").write_bytes(bytes([number]) * 64)
    (folder / "config.json").write_text(json.dumps({"vocab_size": 16}))
    target = Part(stage="quantize", key=f"k{number}", digest=digest_of_folder(folder))
    return Bundle(name=f"c{number}", target=target, engine_version="0.32.0")


def gate(**changes: Any) -> GateResult:
    fields: dict[str, Any] = {
        "name": "hits",
        "kind": "floor",
        "metric": "hit_rate",
        "tier": "critical",
        "result": Verdict.PASS,
        "estimate": 0.9,
        "margin": 0.5,
        "candidate": 0.9,
        "n": 400,
        "reason": "above the floor",
    }
    return GateResult.model_validate({**fields, **changes})


def outcome(of: Bundle, **changes: Any) -> CandidateOutcome:
    fields: dict[str, Any] = {
        "name": of.name,
        "bundle": of.digest,
        "verdict": Verdict.PASS,
        "reasons": [],
        "gates": [gate()],
        "evidence": {"accuracy": "a" * 64, "latency": "b" * 64, "serving": "c" * 64},
    }
    return CandidateOutcome.model_validate({**fields, **changes})


def facts(policy: dict[str, Any] | None = None, **changes: Any) -> ReleaseFacts:
    from eval_suites.policy import Policy

    written = Policy.model_validate(policy or POLICY)
    fields: dict[str, Any] = {
        "release": "r",
        "recipe": "demo",
        "recipe_digest": "rd",
        "model": MODEL,
        "policy_name": "demo",
        "policy": written.model_dump(mode="json"),
        "policy_digest": digest_of(written),
        "suite": "freight",
        "profile": "steady",
        "champion": None,
        "first_release": True,
        "prompts": "p" * 64,
        "smoke": SMOKE,
    }
    return ReleaseFacts.model_validate({**fields, **changes})


def evidence(digest: str, at: datetime | None = None) -> dict[str, Evidence]:
    """What was measured of a bundle on this machine, just now unless said otherwise."""
    at = at or datetime.now(UTC)
    times: dict[str, float | None] = {"p50": 1.0, "p90": 2.0, "p95": 2.0, "p99": 3.0}
    point = LoadPoint(
        rate=2.0, achieved_rate=2.0, total=40, ok=40, failed=0, duration_s=20.0, ttft_ms=times,
        tpot_ms=times, itl_ms=times, e2el_ms=times, output_tokens_per_s=100.0,
    )  # fmt: skip
    here = hardware_fingerprint()
    return {
        "accuracy": AccuracyEvidence(
            bundle=digest, suite="freight", task="freight.yaml", task_version="1",
            engine="vllm 0.32.0", harness="lm-eval 0.4.13", items_digest="i", settings={},
            items_asked=400, items_scored=400, metrics={"hit_rate": 0.9}, measured_at=at,
            seconds=1.0,
        ),
        "latency": LatencyEvidence(
            bundle=digest, profile="steady", hardware=here, engine="vllm 0.32.0",
            harness="vllm bench", settings={}, points=[point], measured_at=at, seconds=1.0,
        ),
        "serving": ServingEvidence(
            bundle=digest, hardware=here, engine="vllm 0.32.0", feasible=True,
            startup_seconds=4.0, measured_at=at,
        ),
    }  # fmt: skip


def judged(
    tracker: Tracker,
    number: int,
    release: str = "",
    *,
    without: Sequence[str] = (),
    told: ReleaseFacts | None = None,
    **changes: Any,
) -> tuple[Bundle, str]:
    """A candidate as a release records it, no version yet: its bundle and its LoggedModel's id.

    without: kinds of evidence that are missing; told: its facts; changes: to its outcome.
    """
    of = stored_bundle(number)
    release = release or f"release {number}"
    told = told or facts(release=release)
    run = tracker.release_run(MODEL, release, "demo")
    place = settings().home / "summaries" / release / of.name
    place.mkdir(parents=True, exist_ok=True)
    files: dict[str, Path] = {}
    for kind, one in evidence(of.digest).items():
        if kind not in without:
            files[kind] = place / f"{kind}.json"
            files[kind].write_text(one.model_dump_json())
    made = tracker.candidates(
        run,
        [(outcome(of, **changes), of)],
        {of.name: files},
        measured_at=datetime.now(UTC),
        texts={of.name: {RELEASE_FILE: told.model_dump_json()}},
    )
    return of, made[of.name]
