"""Ask another model which of several answers is the best: a number for each.

Only where a prompt has two answers that are kept, and for those. The judge's answers are kept row
by row like the teacher's own, in a file named by what decides them: a killed run asks for the
others only.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from pydantic import SecretStr

from recipes.quality_recipe import REASONING_TAGS, JudgePick
from recipes.schema import Sampling, TeacherRecipe
from registry.digests import digest_of
from registry.errors import InfrastructureError, Problem, StageFailed, UserError
from registry.settings import settings
from tasks.answer_quality import Judge, Judged
from tasks.answer_text import split_reasoning
from tasks.conversations import messages_of
from tasks.engines.openai_chat import ChatRequest, ChatResult, Endpoint, ask_each
from tasks.progress import LOG
from tasks.teacher_asking import UNANSWERED_IN_A_ROW, asked_rows
from tasks.teacher_reuse import JUDGEMENTS
from tasks.teacher_rows import AnswerFile

FIRST = 5

_NUMBER = re.compile(r"-?\d+(?:\.\d+)?")


def judgements_file(work: Path, pick: JudgePick, judge: Judge) -> Path:
    """Where the judge's answers lie, beside the teacher's."""
    decides = pick.model_dump(
        include={"url", "served_model", "prompt", "max_tokens"}, mode="json"
    ) | {"tags": judge.quality.reasoning_tags}
    return work / f"{JUDGEMENTS}{digest_of(decides)[:16]}.jsonl"


def ask_judge(
    prompts: Path, answers: AnswerFile, judgements: AnswerFile, judge: Judge, recipe: TeacherRecipe
) -> None:
    """Ask for every number that is missing.

    Raises `UserError` where the budget is spent before, `InfrastructureError` where the judge does
    not answer, and `StageFailed` where too many of its answers are no number.
    """
    pick = recipe.pick
    assert isinstance(pick, JudgePick)
    pending = in_a_row = 0
    why = ""
    limit = max(UNANSWERED_IN_A_ROW, pick.concurrency)

    def requests() -> Iterator[ChatRequest]:
        for number, sample, row, judged in compared(prompts, answers, judge):
            if judgements.get(number, sample) is not None:
                continue
            if in_a_row >= limit or budget_problem(judgements, pick):
                return
            yield ChatRequest(
                id=f"{number} {sample}",
                messages=[{"role": "user", "content": question(pick, row, judged)}],
                sampling=Sampling(max_tokens=pick.max_tokens),
            )

    def keep(result: ChatResult) -> None:
        nonlocal in_a_row, pending, why
        if result.state == "pending":
            in_a_row += 1
            pending += 1
            why = why or result.reason
        else:
            in_a_row = 0
            row, sample = map(int, result.id.split())
            judgements.add(row, result, sample)

    key = settings().judge_api_key.get_secret_value()
    ask_each(
        requests(),
        [Endpoint(url=pick.url, model=pick.served_model, api_key=SecretStr(key))],
        keep,
        concurrency=pick.concurrency,
        max_retry_wait=recipe.max_retry_wait,
        request_timeout=recipe.request_timeout,
    )
    if pending:
        raise InfrastructureError(
            f"the judge at {pick.url} did not judge {pending} answers or more: {why}"
        )
    _check(prompts, answers, judgements, judge, pick)


def _check(
    prompts: Path, answers: AnswerFile, judgements: AnswerFile, judge: Judge, pick: JudgePick
) -> None:
    asked = missing = unreadable = 0
    first: list[str] = []
    for number, sample, row, _ in compared(prompts, answers, judge):
        said = judgements.get(number, sample)
        asked += 1
        missing += said is None
        if said is not None and number_said(said, pick) is None:
            unreadable += 1
            if len(first) < FIRST:
                first.append(f"{row['id']}: {(said.text or said.reason)[:60]!r}")
    if missing:
        problem = budget_problem(judgements, pick)
        raise (
            UserError(problem)
            if problem
            else InfrastructureError(f"the judge gave no number for {missing} of {asked} answers")
        )
    if asked and unreadable / asked > pick.max_unreadable_share:
        raise StageFailed(
            Problem(
                "teacher_data: pick.max_unreadable_share",
                f"{unreadable} of {asked} answers of the judge are no number from "
                f"{pick.lowest:g} to {pick.highest:g}; first: {'; '.join(first)}",
                "ask for a number alone in pick.prompt, or raise pick.max_tokens",
            )
        )
    if unreadable:
        LOG.warning("%d of %d answers of the judge are no number", unreadable, asked)


def compared(
    prompts: Path, answers: AnswerFile, judge: Judge
) -> Iterator[tuple[int, int, dict[str, Any], Judged]]:
    """Row and sample number, prompt row and answer of all that a judge has to tell apart."""
    for number, (_, row) in enumerate(asked_rows(prompts)):
        judged = [judge.classify(result, row) for result in answers.samples_of(number)]
        kept = [(sample, one) for sample, one in enumerate(judged) if judge.keeps(one)]
        if len(kept) > 1:
            for sample, one in kept:
                yield number, sample, row, one


def question(pick: JudgePick, row: Mapping[str, Any], judged: Judged) -> str:
    """The judge's prompt. What it is filled with is not looked through for braces."""
    messages = messages_of(row)
    whole = "\n\n".join(f"{one['role']}: {_said(one)}" for one in messages)
    reference = row.get("reference")
    parts = {
        "prompt": row["prompt"] if len(messages) == 1 else whole,
        "answer": _said({"content": judged.text, "tool_calls": judged.result.tool_calls}),
        "reference": json.dumps(reference, ensure_ascii=False) if reference else "",
    }
    return re.sub(r"\{(prompt|answer|reference)\}", lambda name: parts[name[1]], pick.prompt)


def _said(message: Mapping[str, Any]) -> str:
    calls = (json.dumps(call, ensure_ascii=False) for call in message.get("tool_calls") or ())
    return "\n".join(filter(None, (message.get("content"), *calls)))


def number_said(said: ChatResult, pick: JudgePick) -> float | None:
    """The judge's number; None where it said anything else, or was cut within it."""
    text = split_reasoning(said.text, REASONING_TAGS)[0].strip()
    if said.state != "done" or said.finish_reason != "stop" or not _NUMBER.fullmatch(text):
        return None
    return float(text) if pick.lowest <= float(text) <= pick.highest else None


def budget_problem(judgements: AnswerFile, pick: JudgePick) -> Problem | None:
    """Why the judge may not be asked for more; None where it may."""
    where = "teacher_data: pick.max_total_tokens"
    if pick.max_total_tokens is None:
        return None
    if judgements.uncounted:
        return Problem(
            where,
            f"the judge does not say how many tokens {judgements.uncounted} of its answers took",
            "a budget needs an endpoint that sends `usage`; remove max_total_tokens",
        )
    if judgements.tokens < pick.max_total_tokens:
        return None
    return Problem(
        where,
        f"the budget of {pick.max_total_tokens} tokens is spent ({judgements.tokens})",
        "raise it in the teacher recipe: the next run asks for the rest only",
    )


def judge_scores(
    judgements: AnswerFile, pick: JudgePick
) -> Callable[[int, int, Judged, Mapping[str, Any]], float | None]:
    """The judge's number by row and sample; None where it was not asked or said none."""

    def score(number: int, sample: int, answer: Judged, row: Mapping[str, Any]) -> float | None:
        said = judgements.get(number, sample)
        return None if said is None else number_said(said, pick)

    return score
