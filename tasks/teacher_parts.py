"""The teacher's answers as training rows: what is kept, what is set aside, and how many of each."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from recipes.quality_recipe import ClassRule
from recipes.schema import TeacherRecipe
from registry.errors import Problem, StageFailed
from tasks.answer_quality import RULES, Judge, Judged
from tasks.answer_scoring import Choice, choose
from tasks.conversations import messages_of, tools_of
from tasks.data_card_page import percent
from tasks.teacher_asking import PARTS, asked_rows
from tasks.teacher_reuse import response_of
from tasks.teacher_rows import AnswerFile

FIRST_IDS = 5

REMEDIES = {
    "rejected": "read the reasons in responses.jsonl: the endpoint does not take these requests",
    "content_filter": "look at these prompts, or ask a provider without that filter",
    "unknown": "ask an endpoint that says why an answer ended",
    "empty": "look at the prompts, the chat template and sampling.max_tokens",
    "reasoning_only": "raise sampling.max_tokens, or turn the teacher's reasoning off",
    "refused": "look at the prompts and at the teacher's context",
    "looping": "raise sampling.temperature, or take another teacher",
    "wrong_language": "say in the teacher's context which language to answer in",
    "wrong_format": "say in the teacher's context which format to answer in",
}

Score = Callable[[int, int, Judged, dict[str, Any]], float | None]
"""Score by row and sample number of an answer to a prompt row; None where there is none."""


@dataclass(frozen=True)
class Answered:
    """A prompt with all its answers, and the one of them that is learned."""

    part: str
    row: dict[str, Any]
    answers: list[Judged]
    kept: list[bool]
    choice: Choice

    @property
    def outcome(self) -> Judged:
        """The answer that is learned; where none is, the first."""
        return self.answers[self.choice.best or 0]

    @property
    def is_kept(self) -> bool:
        return self.choice.best is not None


def judged_rows(
    prompts: Path, answers: AnswerFile, judge: Judge, score: Score
) -> Iterator[Answered]:
    """Every prompt in order, its answers classified and the best one chosen."""
    for number, (part, row) in enumerate(asked_rows(prompts)):
        found = [judge.classify(result, row) for result in answers.samples_of(number)]
        assert len(found) == answers.samples, "every row was asked"
        kept = [judge.keeps(one) for one in found]
        scores = [
            score(number, sample, one, row) if keep else None
            for sample, (one, keep) in enumerate(zip(found, kept, strict=True))
        ]
        yield Answered(part, row, found, kept, choose(found, kept, scores))


def write_parts(folder: Path, rows: Iterable[Answered]) -> Iterator[Answered]:
    """Write the stage's files in prompt order; gives every row as it is written."""
    with ExitStack() as files:

        def out(name: str) -> TextIO:
            return files.enter_context(
                (folder / f"{name}.jsonl").open("w", encoding="utf-8", newline="\n")
            )

        parts = {part: out(part) for part in PARTS}
        responses, set_aside = out("responses"), out("set_aside")
        for answered in rows:
            for response in responses_of(answered):
                _write(responses, response)
            if answered.is_kept:
                _write(parts[answered.part], conversation(answered.row, answered.outcome))
            else:
                _write(set_aside, reason_of(answered))
            yield answered


def _write(out: TextIO, row: dict[str, Any]) -> None:
    out.write(json.dumps(row, ensure_ascii=False) + "\n")


def responses_of(answered: Answered) -> Iterator[dict[str, Any]]:
    """Every answer to a prompt with its class; `text` is the answer, `reasoning` stands apart."""
    several = len(answered.answers) > 1
    for sample, one in enumerate(answered.answers):
        made = {
            **response_of(one.result, one.text, one.reasoning),
            "id": answered.row["id"],
            "class": one.kind,
            "why": one.why,
        }
        if several:
            made |= {"sample": sample, "picked": sample == answered.choice.best}
        if answered.choice.scores[sample] is not None:
            made["score"] = answered.choice.scores[sample]
        yield made


def reason_of(answered: Answered) -> dict[str, Any]:
    """Why nothing of a prompt is learned: the class of its first answer."""
    first = answered.outcome
    reason = {"id": answered.row["id"], "reason": first.kind}
    return reason | ({"also": first.flaw} if first.flaw else {})


def conversation(row: dict[str, Any], answer: Judged) -> dict[str, Any]:
    """The training row: what the student is to see, and the answer. Reasoning is no part of it.

    `truncated`: the answer was cut, so its end is not to be learned (`engines/loss_mask.py`).
    """
    said: dict[str, Any] = {"role": "assistant", "content": answer.text}
    if answer.result.tool_calls:
        said["tool_calls"] = answer.result.tool_calls
    made: dict[str, Any] = {
        "id": row["id"],
        "segment": row["segment"],
        "messages": [*messages_of(row), said],
    }
    if tools_of(row):
        made["tools"] = tools_of(row)
    if row.get("reference") is not None:
        made["reference"] = row["reference"]
    return made | ({"truncated": True} if answer.truncated else {})


def account(rows: Iterable[Answered], recipe: TeacherRecipe) -> dict[str, Any]:
    """Counts by class; they add up to the prompts asked. Raises `StageFailed` over a share.

    `answers` counts each prompt once, by its outcome. Shares are of all answers, so with several
    samples of all samples.
    """
    outcomes: Counter[str] = Counter()
    classes: Counter[str] = Counter()
    tokens: Counter[str] = Counter()
    first: dict[str, list[str]] = defaultdict(list)
    kept = 0
    for answered in rows:
        outcomes[answered.outcome.kind] += 1
        kept += answered.is_kept
        for one in answered.answers:
            classes[one.kind] += 1
            tokens["prompt"] += one.result.prompt_tokens or 0
            tokens["completion"] += one.result.completion_tokens or 0
            ids = first[one.kind]
            if len(ids) < FIRST_IDS and answered.row["id"] not in ids:
                ids.append(answered.row["id"])
    problems = share_problems(classes, first, recipe)
    if not kept:
        said = ", ".join(f"{name} {count}" for name, count in sorted(classes.items()))
        problems.append(
            Problem("teacher_data", f"no answer was usable: {said}", "see data_card.md")
        )
    if problems:
        raise StageFailed(problems)
    summary: dict[str, Any] = {
        "asked": outcomes.total(),
        "answers": dict(sorted(outcomes.items())),
        "kept": kept,
        "prompt_tokens": tokens["prompt"],
        "completion_tokens": tokens["completion"],
    }
    if recipe.samples > 1:
        summary["samples"] = dict(sorted(classes.items()))
    return summary


def share_problems(
    classes: Counter[str], first: dict[str, list[str]], recipe: TeacherRecipe
) -> list[Problem]:
    """Every class of which there are more answers than the recipe allows."""
    asked = classes.total()
    problems = []
    for kind, count in sorted(classes.items()):
        if kind == "accepted":
            continue
        if kind == "length":
            name, allowed = "max_truncated_share", recipe.max_truncated_share
            what = "were cut at the token limit"
            remedy = "raise sampling.max_tokens"
        else:
            # A left-over tag and a bad call are wrong formats without a rule of the recipe, too.
            allowed = (getattr(recipe.quality, RULES[kind]) or ClassRule()).max_share
            name = f"quality.{RULES[kind]}.max_share"
            what, remedy = f"are of the class {kind}", REMEDIES[kind]
        # Not `allowed * asked`: 0.29 * 100 is a little less than 29.
        if count / asked > allowed:
            problems.append(
                Problem(
                    "teacher_data",
                    f"{count} of {asked} answers ({percent(count / asked)}) {what}, more than "
                    f"{name} {percent(allowed)}; first: {', '.join(first[kind])}",
                    f"{remedy}, or the share in the teacher recipe",
                )
            )
    return problems
