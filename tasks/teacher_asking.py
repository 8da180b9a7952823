"""Ask the teacher for every prompt that has no answer yet, within the recipe's budget."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from pydantic import SecretStr

from recipes.schema import TeacherRecipe
from registry.errors import InfrastructureError, UserError
from registry.settings import settings
from tasks.conversations import messages_of, system_first, tools_of
from tasks.engines.openai_chat import ChatRequest, ChatResult, Endpoint, ask_each
from tasks.engines.ray_askers import ask_sharded
from tasks.progress import LOG
from tasks.serving import Served
from tasks.teacher_budget import budget_problem
from tasks.teacher_rows import AnswerFile

PARTS = ("train", "calibration")

NONE_LEFT = (-1, -1)

UNANSWERED_IN_A_ROW = 16
"""So many rows (or `concurrency`) without an answer, and none answered between: an outage. So many
that are the first ones and are all refused with the same words: a recipe that cannot work."""


def asked_rows(prompts: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Part and row of every prompt that is asked, in order, read as they are taken."""
    for part in PARTS:
        with (prompts / f"{part}.jsonl").open(encoding="utf-8") as lines:
            for line in lines:
                yield part, json.loads(line)


def ask_missing(
    prompts: Path, answers: AnswerFile, total: int, recipe: TeacherRecipe, served: Served
) -> None:
    """Ask for every sample of every row that has no answer.

    Raises `InfrastructureError` where one stays without, and `UserError` where a budget is
    spent before or every request is refused alike. What was answered is kept: another try asks for
    the others only.
    """
    missing = answers.count_missing()
    wanted_in_all = total * recipe.samples
    of_what = "prompts" if recipe.samples == 1 else "samples"
    if not missing:
        return
    if problem := budget_problem(answers, recipe):
        raise UserError(problem)
    if there := wanted_in_all - missing:
        LOG.info("%d of %d answers are there from an earlier run", there, wanted_in_all)
    pending: list[ChatResult] = []
    in_a_row = 0
    limit = max(UNANSWERED_IN_A_ROW, recipe.concurrency)
    refused = _AllRefused(limit, over=missing < wanted_in_all)

    def may_ask() -> bool:
        return in_a_row < limit and not refused and budget_problem(answers, recipe) is None

    def requests() -> Iterator[ChatRequest]:
        wanted = answers.missing()
        row, sample = next(wanted, NONE_LEFT)
        for number, (_, content) in enumerate(asked_rows(prompts)):
            while number == row:
                if not may_ask():
                    return
                yield request_for(content, row, sample, recipe)
                row, sample = next(wanted, NONE_LEFT)

    def keep(result: ChatResult) -> None:
        nonlocal in_a_row
        refused.look_at(result)
        if result.state == "pending":
            in_a_row += 1
            if not pending:
                pending.append(result)
        else:
            in_a_row = 0
            row, sample = map(int, result.id.split())
            answers.add(row, result, sample)

    server = served.server
    shards: dict[str, Any] = {}
    ask: Callable[..., None] = ask_each
    if recipe.ray is not None:
        ask, shards = ask_sharded, {**recipe.ray.model_dump(), "scratch": settings().home}
    ask(
        requests(),
        [
            Endpoint(url=url, model=server.served_name, api_key=SecretStr(server.api_key))
            for url in (server.url, *recipe.more_urls)
        ],
        keep,
        may_ask=may_ask,
        concurrency=recipe.concurrency,
        max_retry_wait=recipe.max_retry_wait,
        request_timeout=recipe.request_timeout,
        **shards,
    )
    if answers.count_missing() and (problem := budget_problem(answers, recipe)):
        raise UserError(problem)
    if answers.count_missing() and refused:
        raise UserError.at(
            "teacher_data",
            f"the teacher refused the first {refused.count} requests, all with: {refused.reason}",
            "look at served_model, sampling, context and tools: nothing more was asked",
        )
    if pending:
        row = int(pending[0].id.split()[0])
        first = next(islice(asked_rows(prompts), row, None))[1]["id"]
        raise InfrastructureError(
            f"{answers.count_missing()} of {wanted_in_all} {of_what} got no answer; "
            f"{first}: {pending[0].reason}"
        )


@dataclass
class _AllRefused:
    """True when `limit` requests were refused in the same words, and none answered before."""

    limit: int
    over: bool
    """Something else came, so that it is not the recipe."""
    count: int = 0
    reason: str = ""

    def look_at(self, result: ChatResult) -> None:
        if result.state == "rejected" and result.reason == (self.reason or result.reason):
            self.count += 1
            self.reason = result.reason
        elif result.state != "pending":
            self.over = True

    def __bool__(self) -> bool:
        return not self.over and self.count >= self.limit


def request_for(
    content: dict[str, Any], row: int, sample: int, recipe: TeacherRecipe
) -> ChatRequest:
    """What the teacher is asked for one sample of a row; it is named by both numbers."""
    sampling = recipe.sampling
    if sampling.seed is not None:
        sampling = sampling.model_copy(update={"seed": sampling.seed + sample})
    return ChatRequest(
        id=f"{row} {sample}",
        messages=in_context(messages_of(content), recipe.context),
        sampling=sampling,
        tools=tools_of(content),
    )


def in_context(messages: list[dict[str, Any]], context: str | None) -> list[dict[str, Any]]:
    """`messages` with the teacher's own system prompt first, where it has one."""
    return messages if context is None else system_first(messages, context)
