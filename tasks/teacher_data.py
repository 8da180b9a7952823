"""Stage `teacher_data`: the teacher's answers to the train and calibration prompts.

Files: train.jsonl and calibration.jsonl (accepted answers as conversations), responses.jsonl
(every answer with finish reason, token counts and sampling), set_aside.jsonl (id and reason).
What is kept is decided by the finish reason, never by the look of the text.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from prefect import task
from pydantic import SecretStr

from recipes.schema import TeacherRecipe
from registry.artifacts import ArtifactRef, Stage
from registry.errors import InfrastructureError, Problem, StageFailed
from registry.provenance import engine_version
from tasks.engines.openai_chat import ChatRequest, ChatResult, Endpoint, generate
from tasks.prompt_files import read_jsonl, write_jsonl
from tasks.serving import Served
from tasks.stages import TASK_OPTIONS, folder_of, make

VERSION = 1
PARTS = ("train", "calibration")
COMPLETE = "stop"


def stage(
    recipe: TeacherRecipe, prompts: Stage, parents: dict[str, Stage], config: dict[str, Any]
) -> Stage:
    """`parents` hold the model's stage where it is local; `config` says what serves it."""
    return Stage(
        name="teacher_data",
        version=VERSION,
        config={
            **recipe.model_dump(
                mode="json",
                include={"sampling", "max_truncated_share"},
            ),
            "engine": config,
        },
        parents={"prompts": prompts, **parents},
        tools={"vllm": engine_version()} if parents else {},
    )


@task(name="teacher_data", **TASK_OPTIONS)
def generate_teacher_data(stage: Stage, recipe: TeacherRecipe, served: Served) -> ArtifactRef:
    """Ask the teacher. Raises `StageFailed` when too many answers were cut at the token limit."""

    def produce(folder: Path) -> dict[str, Any]:
        prompts = folder_of(stage.parents["prompts"])
        rows = {part: read_jsonl(prompts / f"{part}.jsonl") for part in PARTS}
        asked = [row for part in PARTS for row in rows[part]]
        server = served.server
        results = generate(
            [
                ChatRequest(
                    id=row["id"],
                    messages=[{"role": "user", "content": row["prompt"]}],
                    sampling=recipe.sampling,
                )
                for row in asked
            ],
            Endpoint(url=server.url, model=server.served_name, api_key=SecretStr(server.api_key)),
            concurrency=recipe.concurrency,
            max_retry_wait=recipe.max_retry_wait,
            request_timeout=recipe.request_timeout,
        )
        answers = {result.id: result for result in results}
        pending = [result for result in results if result.state == "pending"]
        if pending:
            raise InfrastructureError(
                f"{len(pending)} of {len(asked)} prompts got no answer; "
                f"{pending[0].id}: {pending[0].reason}"
            )
        summary = account(results, recipe.max_truncated_share)
        for part in PARTS:
            write_jsonl(folder / f"{part}.jsonl", accepted_rows(rows[part], answers))
        write_jsonl(folder / "responses.jsonl", (answers[row["id"]].model_dump() for row in asked))
        write_jsonl(
            folder / "set_aside.jsonl",
            (
                {"id": result.id, "reason": classify(result)}
                for result in results
                if classify(result) != "accepted"
            ),
        )
        return summary

    return make(stage, produce)


def classify(result: ChatResult) -> str:
    """`accepted`, `length`, `content_filter`, `rejected`, `empty` or `unknown`.

    A missing finish reason is unknown, not complete.
    """
    if result.state == "rejected":
        return "rejected"
    if result.finish_reason in ("length", "content_filter"):
        return result.finish_reason
    if result.finish_reason != COMPLETE:
        return "unknown"
    return "accepted" if (result.text or "").strip() else "empty"


def account(results: Sequence[ChatResult], max_truncated_share: float) -> dict[str, Any]:
    """Counts by class; they add up to the number asked. Raises `StageFailed` over the share."""
    counts = Counter(classify(result) for result in results)
    truncated = [result.id for result in results if classify(result) == "length"]
    share = len(truncated) / len(results) if results else 0.0
    if share > max_truncated_share:
        raise StageFailed(
            Problem(
                "teacher_data",
                f"{len(truncated)} of {len(results)} answers ({share:.0%}) were cut at the token "
                f"limit, more than max_truncated_share {max_truncated_share:.0%}; "
                f"first: {', '.join(truncated[:5])}",
                "raise sampling.max_tokens, or the share in the teacher recipe",
            )
        )
    if not counts["accepted"]:
        raise StageFailed(
            Problem("teacher_data", f"no answer was usable: {dict(counts)}", "read the logs")
        )
    return {
        "asked": len(results),
        "answers": dict(sorted(counts.items())),
        "prompt_tokens": sum(result.prompt_tokens or 0 for result in results),
        "completion_tokens": sum(result.completion_tokens or 0 for result in results),
    }


def accepted_rows(
    rows: Iterable[dict[str, Any]], answers: dict[str, ChatResult]
) -> list[dict[str, Any]]:
    """Conversations of the accepted answers, in prompt order."""
    return [
        {
            "id": row["id"],
            "segment": row["segment"],
            "messages": [
                {"role": "user", "content": row["prompt"]},
                {"role": "assistant", "content": answers[row["id"]].text},
            ],
        }
        for row in rows
        if classify(answers[row["id"]]) == "accepted"
    ]
