"""Ask the teacher for every prompt that has no answer yet, within the recipe's budget."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from pydantic import SecretStr

from recipes.schema import TeacherRecipe
from registry.errors import InfrastructureError, Problem, UserError
from tasks.conversations import messages_of
from tasks.engines.openai_chat import ChatRequest, ChatResult, Endpoint, ask_each
from tasks.progress import LOG
from tasks.serving import Served
from tasks.teacher_rows import AnswerFile

PARTS = ("train", "calibration")

UNANSWERED_IN_A_ROW = 16
"""So many rows (or `concurrency`) without an answer, and none answered between: an outage."""


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
                messages=messages_of(row),
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
