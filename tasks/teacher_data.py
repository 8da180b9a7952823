"""Stage `teacher_data`: the teacher's answers to the train and calibration prompts.

Files: train.jsonl and calibration.jsonl (accepted answers as conversations), responses.jsonl
(every answer with finish reason, token counts and sampling), set_aside.jsonl (id and reason).
What is kept is decided by the finish reason, never by the look of the text.

Answers are kept row by row as they come (`teacher_rows`): a killed run goes on with the rows that
have none. Prompts and answers are read a row at a time; memory does not grow with them.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from itertools import islice
from pathlib import Path
from typing import Any, TextIO

from prefect import task
from pydantic import SecretStr

from recipes.schema import TeacherRecipe
from registry.artifacts import ArtifactRef, Stage
from registry.errors import InfrastructureError, Problem, StageFailed, UserError
from registry.provenance import engine_version
from tasks.engines.openai_chat import ChatRequest, ChatResult, Endpoint, ask_each
from tasks.progress import LOG
from tasks.serving import Served
from tasks.stages import TASK_OPTIONS, artifact_of, make
from tasks.teacher_rows import ANSWERS, AnswerFile, held, remove, work_folder

VERSION = 1
PARTS = ("train", "calibration")
COMPLETE = "stop"

UNANSWERED_IN_A_ROW = 16
"""So many rows (or `concurrency`) without an answer, and none answered between: an outage."""


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
    prompts = artifact_of(stage.parents["prompts"])
    work = work_folder(stage, prompts.digest)

    def produce(folder: Path) -> dict[str, Any]:
        total = sum(1 for _ in asked_rows(prompts.path))
        with held(work), AnswerFile(work / ANSWERS, total) as answers:
            ask_missing(prompts.path, answers, total, recipe, served)
            try:
                results = write_parts(folder, prompts.path, answers)
                return account(results, recipe.max_truncated_share)
            except StageFailed:
                LOG.warning("the answers stay in %s; remove it to ask for them anew", work)
                raise

    ref = make(stage, produce)
    # Not before the store has them.
    remove(work)
    return ref


def asked_rows(prompts: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Part and row of every prompt that is asked, in order, read as they are taken."""
    for part in PARTS:
        with (prompts / f"{part}.jsonl").open(encoding="utf-8") as lines:
            for line in lines:
                yield part, json.loads(line)


def ask_missing(
    prompts: Path, answers: AnswerFile, total: int, recipe: TeacherRecipe, served: Served
) -> None:
    """Ask for every row that has no answer.

    Raises `InfrastructureError` where one stays without, and `UserError` where the token budget
    is spent before. What was answered is kept: another try asks for the others only.
    """
    missing = answers.count_missing()
    if not missing:
        return
    if problem := budget_problem(answers, recipe):
        raise UserError(problem)
    if missing < total:
        LOG.info("%d of %d answers are there from an earlier run", total - missing, total)
    pending: list[ChatResult] = []
    in_a_row = 0
    limit = max(UNANSWERED_IN_A_ROW, recipe.concurrency)

    def requests() -> Iterator[ChatRequest]:
        wanted = answers.missing()
        next_wanted = next(wanted, None)
        for number, (_, row) in enumerate(asked_rows(prompts)):
            if number != next_wanted:
                continue
            if in_a_row >= limit or budget_problem(answers, recipe):
                return
            yield ChatRequest(
                id=str(number),
                messages=[{"role": "user", "content": row["prompt"]}],
                sampling=recipe.sampling,
            )
            next_wanted = next(wanted, None)

    def keep(result: ChatResult) -> None:
        nonlocal in_a_row
        if result.state == "pending":
            in_a_row += 1
            if not pending:
                pending.append(result)
        else:
            in_a_row = 0
            answers.add(int(result.id), result)

    server = served.server
    ask_each(
        requests(),
        [
            Endpoint(url=url, model=server.served_name, api_key=SecretStr(server.api_key))
            for url in (server.url, *recipe.more_urls)
        ],
        keep,
        concurrency=recipe.concurrency,
        max_retry_wait=recipe.max_retry_wait,
        request_timeout=recipe.request_timeout,
    )
    if answers.count_missing() and (problem := budget_problem(answers, recipe)):
        raise UserError(problem)
    if pending:
        first = next(islice(asked_rows(prompts), int(pending[0].id), None))[1]["id"]
        raise InfrastructureError(
            f"{answers.count_missing()} of {total} prompts got no answer; "
            f"{first}: {pending[0].reason}"
        )


def budget_problem(answers: AnswerFile, recipe: TeacherRecipe) -> Problem | None:
    """Why no more may be asked under the recipe's token budget; None where it is not spent."""
    budget = recipe.max_total_tokens
    if budget is None:
        return None
    if answers.uncounted:
        return Problem(
            "teacher_data: max_total_tokens",
            f"the teacher does not say how many tokens {answers.uncounted} of its answers took",
            "a budget needs an endpoint that sends `usage`; remove max_total_tokens",
        )
    if answers.tokens < budget:
        return None
    return Problem(
        "teacher_data: max_total_tokens",
        f"the budget of {budget} tokens is spent ({answers.tokens}), and "
        f"{answers.count_missing()} prompts have no answer yet",
        "raise it in the teacher recipe: the next run asks for these only",
    )


def write_parts(folder: Path, prompts: Path, answers: AnswerFile) -> Iterator[ChatResult]:
    """Write the stage's files in prompt order; gives every result as it is written."""
    with ExitStack() as files:

        def out(name: str) -> TextIO:
            return files.enter_context(
                (folder / f"{name}.jsonl").open("w", encoding="utf-8", newline="\n")
            )

        parts = {part: out(part) for part in PARTS}
        responses, set_aside = out("responses"), out("set_aside")
        for number, (part, row) in enumerate(asked_rows(prompts)):
            found = answers.get(number)
            assert found is not None, "every row was asked"
            result = found.model_copy(update={"id": row["id"]})
            _write(responses, result.model_dump())
            kind = classify(result)
            if kind == "accepted":
                _write(parts[part], conversation(row, result))
            else:
                _write(set_aside, {"id": result.id, "reason": kind})
            yield result


def _write(out: TextIO, row: dict[str, Any]) -> None:
    out.write(json.dumps(row, ensure_ascii=False) + "\n")


def conversation(row: dict[str, Any], result: ChatResult) -> dict[str, Any]:
    return {
        "id": row["id"],
        "segment": row["segment"],
        "messages": [
            {"role": "user", "content": row["prompt"]},
            {"role": "assistant", "content": result.text},
        ],
    }


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


def account(results: Iterable[ChatResult], max_truncated_share: float) -> dict[str, Any]:
    """Counts by class; they add up to the number asked. Raises `StageFailed` over the share."""
    counts: Counter[str] = Counter()
    tokens: Counter[str] = Counter()
    first_truncated: list[str] = []
    for result in results:
        kind = classify(result)
        counts[kind] += 1
        tokens["prompt"] += result.prompt_tokens or 0
        tokens["completion"] += result.completion_tokens or 0
        if kind == "length" and len(first_truncated) < 5:
            first_truncated.append(result.id)
    asked, truncated = counts.total(), counts["length"]
    share = truncated / asked if asked else 0.0
    if share > max_truncated_share:
        raise StageFailed(
            Problem(
                "teacher_data",
                f"{truncated} of {asked} answers ({share:.0%}) were cut at the token "
                f"limit, more than max_truncated_share {max_truncated_share:.0%}; "
                f"first: {', '.join(first_truncated)}",
                "raise sampling.max_tokens, or the share in the teacher recipe",
            )
        )
    if not counts["accepted"]:
        raise StageFailed(
            Problem("teacher_data", f"no answer was usable: {dict(counts)}", "read the logs")
        )
    return {
        "asked": asked,
        "answers": dict(sorted(counts.items())),
        "prompt_tokens": tokens["prompt"],
        "completion_tokens": tokens["completion"],
    }
