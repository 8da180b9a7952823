"""Stage `draft_proof`: whether a candidate's draft pays on this machine.

Keyed as latency is, and as old as the policy lets latency be. A proof that was killed goes on from
its finished turns and searches, which lie outside of the store until it ends.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from prefect import task

from eval_suites.schema import LoadProfile
from recipes.loader import short_name
from recipes.schema import ProveDraft
from registry.artifacts import ArtifactRef, Stage
from registry.bundle import Bundle
from registry.provenance import engine_tools, hardware_fingerprint
from registry.settings import settings
from tasks.draft_measuring import measure_draft
from tasks.latency import young_enough
from tasks.stages import TASK_OPTIONS, folder_of, make

VERSION = 2
"""2: whether a kernel was emulated."""


def stage(
    name: str,
    asked: ProveDraft,
    profile: LoadProfile,
    prompts: Stage,
    parents: dict[str, Stage],
    config: dict[str, Any],
) -> Stage:
    return Stage(
        name="draft_proof",
        label=name,
        version=VERSION,
        config={
            "profile": profile.model_dump(mode="json", exclude={"description"}),
            "tokens": sorted(set(asked.tokens)),
            "repeats": asked.repeats,
            "bundle": config,
        },
        parents={"prompts": prompts, **parents},
        inputs={"hardware": hardware_fingerprint()},
        tools=engine_tools(),
    )


@task(name="draft_proof", **TASK_OPTIONS)
def prove_candidate(
    stage: Stage, asked: ProveDraft, profile: LoadProfile, max_age_days: float, bundle: Bundle
) -> ArtifactRef:
    """Every server is started for it alone: no other one may run. Raises as `prove_draft` does."""
    prompts = folder_of(stage.parents["prompts"]) / "load.jsonl"
    # Weights that were made anew under the same keys are another bundle.
    work = settings().home / "bench" / f"draft-{stage.key[:24]}-{bundle.digest[:12]}"

    def produce(folder: Path) -> dict[str, Any]:
        work.mkdir(parents=True, exist_ok=True)
        proof = measure_draft(
            bundle,
            profile,
            short_name(asked.load),
            None if profile.scenarios else prompts,
            work,
            stage.config["tokens"],
            stage.config["repeats"],
        )
        shutil.copytree(work, folder, dirs_exist_ok=True)
        tpot = proof.turns.ratios["tpot_p50"].value if proof.turns else None
        return {
            "stays": proof.stays,
            "reason": proof.decision.reason if proof.decision else "",
            "num_speculative_tokens": proof.best.tokens if proof.best else None,
            "tpot_p50_ratio": tpot,
        }

    ref = make(stage, produce, fresh=young_enough(max_age_days), heavy=True)
    # Not before the store has it: a stop in between would lose hours.
    shutil.rmtree(work, ignore_errors=True)
    return ref
