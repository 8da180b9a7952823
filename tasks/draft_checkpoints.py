"""Stage `draft_choice`: the checkpoint of a draft of whose proposals the engine accepts most.

Every kept checkpoint is served with the target as in production and asked the held-out prompts,
greedily and one at a time; the server without a draft is asked them too. Files: `draft/` (the
chosen checkpoint), `answers/` (what each server said), `report.md` and `report.json`.

It is a stage of its own, so that whatever happens to a server costs no training. Its key has the
engine and the hardware; a target that cannot be served here gets the best by held-out loss, and
the reason.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from prefect import task

from eval_suites.draft_checkpoints import (
    Acceptance,
    MeasuredCheckpoint,
    best_checkpoint,
    faults,
)
from recipes.schema import DraftRecipe
from registry.artifacts import ArtifactRef, Stage
from registry.bundle import Bundle, Part
from registry.errors import Infeasible, Problem, StageFailed, UserError
from registry.provenance import engine_tools, engine_version, hardware_fingerprint
from tasks import serving
from tasks.draft_proof import without_draft
from tasks.draft_reports import choice_text, write_report
from tasks.engines.engine_acceptance import accepted_by_segment, by_segment
from tasks.engines.greedy_agreement import (
    Agreement,
    Answer,
    compare,
    greedy_answers,
    write_answers,
)
from tasks.progress import LOG
from tasks.prompt_files import read_jsonl
from tasks.serving import ServedBundle, bundle_of, part_of
from tasks.stages import TASK_OPTIONS, artifact_of, make

VERSION = 1
CHOSEN = "draft"
"""The folder of the chosen checkpoint within the artifact."""

Serve = Callable[[Bundle], AbstractContextManager[ServedBundle]]


def stage(
    name: str,
    recipe: DraftRecipe,
    training: Stage,
    student: Stage,
    target: Stage,
    config: dict[str, Any],
) -> Stage:
    """`config`: of the candidate's bundle. Raises `UserError` for an engine that cannot choose."""
    if config.get("engine") == "sglang":
        raise UserError.at(
            f"candidate {name}: draft",
            "is served by SGLang, which shows no acceptance by position, and by that a draft is "
            "chosen and judged",
            "serve this candidate with `engine: vllm`, or without a draft",
        )
    return Stage(
        name="draft_choice",
        label=name,
        version=VERSION,
        config={
            "bundle": config,
            "response_tokens": recipe.response_tokens,
            "max_acceptance_gap": recipe.max_acceptance_gap,
        },
        parents={"draft": training, "student": student, "target": target},
        inputs={"hardware": hardware_fingerprint()},
        tools=engine_tools(),
    )


@task(name="draft_choice", **TASK_OPTIONS)
def choose_checkpoint(stage: Stage, target: Part, serve: Serve = ServedBundle) -> ArtifactRef:
    """Measure, choose, compare. Starts servers of its own: no other one may run.

    Raises `StageFailed` when hardly a proposal is accepted, when training expected another
    acceptance length than the engine reports, or when the draft changes answers beyond near-ties.
    """

    def produce(folder: Path) -> dict[str, Any]:
        training = artifact_of(stage.parents["draft"])
        rows = by_segment(read_jsonl(training.path / "held_out.jsonl"))
        answers = folder / "answers"
        answers.mkdir()
        asking = Asking(stage, target, rows, answers, serve)
        try:
            measured = [asking.measured(training, e) for e in training.summary["kept_epochs"]]
            chosen = best_checkpoint(measured)
            agreement = asking.agreement(chosen.epoch)
        except Infeasible as reason:
            return unmeasured(folder, training, str(reason))
        same = trained_for(stage)
        judged = judgement(chosen, stage.config["max_acceptance_gap"], same)
        text = choice_text(measured, chosen, len(rows), agreement.words, judged)
        document = {
            "chosen": chosen.epoch,
            "checkpoints": [spelled(one) for one in measured],
            "max_acceptance_gap": stage.config["max_acceptance_gap"],
            "trained_for_this_target": same,
            "agreement": agreement.model_dump(mode="json"),
            "engine": f"vllm {engine_version()}",
        }
        write_report(folder, text + "\n", document)
        for line in text.splitlines():
            LOG.info("%s", line)
        problems = faults(chosen, stage.config["max_acceptance_gap"])
        if agreement.agrees is not True:
            problems.append(f"the draft must not change greedy answers: {agreement.words}")
        if problems:
            remedy = REMEDY if same else f"{OTHER_WEIGHTS}; or {REMEDY}"
            raise StageFailed([Problem(stage.title, one, remedy) for one in problems])
        shutil.copytree(training.path / checkpoint(chosen.epoch), folder / CHOSEN)
        return {
            "measured": True,
            "epoch": chosen.epoch,
            "acceptance_length": round(chosen.engine.length, 6),
            "acceptance": [round(share, 6) for share in chosen.engine.shares],
            "expected_acceptance_length": chosen.expected,
            "drafts": chosen.engine.drafts,
            "by_segment": {
                name: round(counts.length, 6) for name, counts in chosen.by_segment.items()
            },
            "greedy_answers": {
                "asked": agreement.asked,
                "equal": agreement.equal,
                "near_ties": len(agreement.near_ties),
            },
        }

    return make(stage, produce, fresh=lambda ref: not short_of_memory(ref.summary), heavy=True)


def short_of_memory(summary: dict[str, Any]) -> bool:
    """A server that found too little memory may find it the next time (see `tasks.serving`)."""
    return serving.short_of_memory({**summary, "feasible": summary["measured"]})


REMEDY = (
    "compare layer ids, norms and vocabulary map of the draft's config with what the server's log "
    "says it takes; a small gap may be allowed by `max_acceptance_gap`"
)


OTHER_WEIGHTS = "it was trained for other weights: set `target: candidate` in the draft recipe"


class Asking:
    """The servers of one choice, one after the other."""

    def __init__(
        self, stage: Stage, target: Part, rows: Sequence[Any], answers: Path, serve: Serve
    ) -> None:
        self.stage, self.target, self.rows = stage, target, rows
        self.answers, self.serve = answers, serve
        self._said: dict[int, list[Answer]] = {}

    def bundle(self, epoch: int) -> Bundle:
        draft = part_of(self.stage.parents["draft"], checkpoint(epoch))
        name = f"{self.stage.label}-epoch-{epoch}"
        return bundle_of(name, self.target, draft, self.stage.config["bundle"])

    def measured(self, training: ArtifactRef, epoch: int) -> MeasuredCheckpoint:
        bundle = self.bundle(epoch)
        LOG.info("the engine answers %d held-out prompts with epoch %d", len(self.rows), epoch)
        with self.serve(bundle) as served:
            said, counts = accepted_by_segment(
                served.server,
                self.rows,
                self.stage.config["response_tokens"],
                bundle.num_speculative_tokens or 0,
            )
        self._said[epoch] = said
        write_answers(self.answers / f"epoch-{epoch}.json", said)
        return MeasuredCheckpoint(
            epoch=epoch,
            held_out_loss=training.summary["held_out_loss"][epoch - 1],
            expected=training.summary["expected"][str(epoch)]["acceptance_length"],
            engine=Acceptance.total(list(counts.values())),
            by_segment=counts,
        )

    def agreement(self, epoch: int) -> Agreement:
        """The answers with this epoch's draft against those without one."""
        plain = without_draft(self.bundle(epoch)).model_copy(
            update={"name": f"{self.stage.label}-plain"}
        )
        with self.serve(plain) as served:
            server = served.server
            said = greedy_answers(
                server.url,
                server.api_key,
                server.served_name,
                self.rows,
                self.stage.config["response_tokens"],
            )
        write_answers(self.answers / "plain.json", said)
        return compare(said, self._said[epoch])


def checkpoint(epoch: int) -> str:
    return f"checkpoints/epoch-{epoch}"


def trained_for(stage: Stage) -> bool:
    """Whether training's answers and states are this target's own."""
    training = stage.parents["draft"]
    own = training.parents.get("target", training.parents["student"])
    return own.key == stage.parents["target"].key


def judgement(chosen: MeasuredCheckpoint, max_gap: float, same: bool) -> str:
    """A sentence. The gap counts with other weights too: measured on the demo's student, its draft
    lost nothing in front of its W8A8 and W4A16 (2.93 of 2.92 expected)."""
    weights = "" if same else " with other weights than it was trained for"
    return (
        f"Training expected {chosen.expected:.3f}, the engine reports "
        f"{chosen.engine.length:.3f}{weights}; they may differ by {max_gap}."
    )


def spelled(one: MeasuredCheckpoint) -> dict[str, Any]:
    """A checkpoint with the ratios that people compare."""
    counts = {"engine": one.engine, **{f"by_segment.{n}": c for n, c in one.by_segment.items()}}
    return {
        **one.model_dump(mode="json"),
        "gap": round(one.gap, 6),
        "acceptance_length": {name: round(part.length, 6) for name, part in counts.items()},
    }


def unmeasured(folder: Path, training: ArtifactRef, reason: str) -> dict[str, Any]:
    """The best by held-out loss, for a bundle that this hardware cannot serve."""
    epoch = training.summary["best_epoch"]
    shutil.copytree(training.path / checkpoint(epoch), folder / CHOSEN)
    text = f"# Draft\n\nEpoch {epoch} by held-out loss, not measured: {reason}\n"
    write_report(folder, text, {"chosen": epoch, "not_measured": reason})
    return {"measured": False, "epoch": epoch, "reason": reason}
