"""Answers that the store has already: other rules for them ask nobody again.

A stage whose rules, scorer or shares differ has another key, and the answers of the earlier one
were removed from `bench` once the store had them. They stand in its responses.jsonl, and whoever
was asked the same thing (`teacher_rows.work_folder`) takes them from there. So it is with what a
judge said of them: files `judgements-*.jsonl`, named by what decides it.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from registry.artifacts import Manifest
from registry.digests import digest_of_file
from registry.store import MANIFEST
from tasks.engines.openai_chat import ChatResult
from tasks.progress import LOG
from tasks.stages import store
from tasks.teacher_rows import AnswerFile

ASKED = "asked_as"
"""Of the stage's summary: name of the folder in which its answers were gathered."""

RESPONSES = "responses.jsonl"

JUDGEMENTS = "judgements-"
"""How the names of the judge's files begin (`answer_judge.judgements_file`)."""


def response_of(result: ChatResult, text: str, reasoning: str) -> dict[str, Any]:
    """An answer as responses.jsonl has it: what was sent stands apart where it reads otherwise."""
    made = {**result.model_dump(), "text": text, "reasoning": reasoning}
    if (text, reasoning) != (result.text, result.reasoning):
        made["as_sent"] = {"text": result.text, "reasoning": result.reasoning}
    return made


def take_over(answers: AnswerFile, asked_as: str) -> None:
    """Fill what is missing in `answers` from the artifacts that were asked for the same."""
    wanted = answers.rows * answers.samples
    for folder, manifest in _made_from(asked_as):
        missing = answers.count_missing()
        if not missing:
            return
        file = folder / "files" / RESPONSES
        if not _is_whole(file, manifest):
            continue
        # Rows that were rejected are asked for again, as after any run.
        with file.open(encoding="utf-8") as lines:
            for number, line in enumerate(lines):
                row, sample = divmod(number, answers.samples)
                # A process that was killed here has taken some of them already.
                if answers.get(row, sample) is not None:
                    continue
                result = _sent(json.loads(line))
                if result.state == "done":
                    answers.add(row, result, sample)
        if taken := missing - answers.count_missing():
            LOG.info(
                "%d of %d answers are those of teacher_data/%s", taken, wanted, folder.name[:12]
            )

        if missing == wanted:
            # Only of answers that are all from there: a judgement is of one answer.
            for name in filter(lambda name: name.startswith(JUDGEMENTS), manifest.files):
                if _is_whole(file.with_name(name), manifest):
                    shutil.copyfile(file.with_name(name), answers.path.with_name(name))


def keep_judgements(answers: AnswerFile, folder: Path) -> None:
    """Put what judges said of `answers` into the stage's folder."""
    for file in answers.path.parent.glob(f"{JUDGEMENTS}*.jsonl"):
        shutil.copyfile(file, folder / file.name)


def _is_whole(file: Path, manifest: Manifest) -> bool:
    try:
        whole = digest_of_file(file) == manifest.files[file.name].sha256
    except (OSError, KeyError):
        return False
    if not whole:
        LOG.warning("%s: was changed, and nothing is taken over from it", file)
    return whole


def _made_from(asked_as: str) -> Iterator[tuple[Path, Manifest]]:
    for path in sorted((store().root / "teacher_data").glob(f"*/{MANIFEST}")):
        try:
            manifest = Manifest.model_validate_json(path.read_bytes())
        except (OSError, ValidationError):
            continue
        if manifest.summary.get(ASKED) == asked_as:
            yield path.parent, manifest


def _sent(row: dict[str, Any]) -> ChatResult:
    fields = {name: row[name] for name in ChatResult.model_fields if name in row}
    return ChatResult.model_validate(fields | row.get("as_sent", {}))
