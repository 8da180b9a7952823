"""The teacher's answers as training rows: what is kept, what is set aside, and how many of each."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, TextIO

from registry.errors import Problem, StageFailed
from tasks.conversations import messages_of
from tasks.engines.openai_chat import ChatResult
from tasks.teacher_asking import PARTS, asked_rows
from tasks.teacher_rows import AnswerFile

COMPLETE = "stop"


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
        "messages": [*messages_of(row), {"role": "assistant", "content": result.text}],
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
