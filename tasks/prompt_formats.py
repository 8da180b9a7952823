"""JSONL files of two tools, turned into columns that a mapping can name.

An OpenAI batch: lines `{custom_id, method, url, body}`, each the body of one chat completion. Its
conversation and tools are the prompt; how to sample is the teacher recipe's matter, so `model`,
`temperature` and their like are counted and change nothing.

Samples of lm-eval 0.4.13 (`--log_samples`): one line per item *and filter*, `doc` the item as its
dataset has it, `target` what was expected. `arguments` holds what was sent to one model: rendered
with that model's chat template, few-shot examples included, so it is no prompt for another one;
the columns of `doc` are.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from registry.errors import UserError
from tasks.chat_rows import kind_of
from tasks.prompt_tables import Row, Table, read_table
from tasks.rejects import Reject, begin_of

CHAT_URL = "/v1/chat/completions"

_BATCH = {"custom_id", "method", "url", "body"}
_SAMPLE = {"doc", "doc_id", "arguments", "filtered_resps"}

_SAID_ELSEWHERE = ("messages", "tools", "metadata")


def read_formatted(path: Path, form: str = "auto", split: str | None = None) -> Table:
    """A file's rows as columns. `form`: `auto`, `plain`, `openai_batch` or `lm_eval`.

    A file is taken for a batch or for samples when one of its rows has their fields; then rows
    without them are bad ones. Raises `UserError` where the file as a whole is wrong.
    """
    table = read_table(path, split)
    if path.is_dir() or path.suffix.lower() not in (".jsonl", ".ndjson"):
        if form in ("openai_batch", "lm_eval"):
            raise UserError.at(path, f"is no JSONL file, so no {form}", "correct prompts.format")
        return table
    keys = [row.columns.keys() for row in table.rows]
    if form == "openai_batch" or (form == "auto" and any(one >= _BATCH for one in keys)):
        return _batch(table)
    if form == "lm_eval" or (form == "auto" and any(one >= _SAMPLE for one in keys)):
        return _samples(table)
    return table


# -- OpenAI batch ----------------------------------------------------------------------------


def _batch(table: Table) -> Table:
    rows: list[Row] = []
    rejects: list[Reject] = []
    unused: Counter[str] = Counter()
    for row in table.rows:
        body = row.columns.get("body")
        if kind := _not_chat(row.columns):
            rejects.append(Reject(row.line, "no chat completion", kind, begin_of(row.columns)))
            continue
        assert isinstance(body, dict)
        unused.update(key for key in body if key not in _SAID_ELSEWHERE)
        rows.append(Row(row.line, {**body, "custom_id": row.columns.get("custom_id")}))
    known = {"messages": "messages", "id": "custom_id"}
    if any("tools" in row.columns for row in rows):
        known["tools"] = "tools"
    rejects = sorted([*table.rejects, *rejects], key=lambda one: one.line)
    return replace(table, rows=rows, rejects=rejects, known=known, unused=dict(unused))


def _not_chat(line: Mapping[str, Any]) -> str:
    """Why a line of a batch asks no chat completion; empty where it does."""
    if line.get("method") != "POST":
        return f"method is {line.get('method')!r}, not 'POST'"
    if line.get("url") != CHAT_URL:
        return f"url is {line.get('url')!r}, not {CHAT_URL!r}"
    if not isinstance(line.get("body"), dict):
        return f"body is {kind_of(line.get('body'))}, not an object"
    return ""


# -- lm-eval's samples -----------------------------------------------------------------------


def _samples(table: Table) -> Table:
    rows: list[Row] = []
    rejects: list[Reject] = []
    repeats = 0
    first_filter: dict[str, Any] = {}
    for row in table.rows:
        sample = row.columns
        doc = sample.get("doc")
        if not isinstance(doc, dict):
            reason = f"doc is {kind_of(doc)}, not an object"
            rejects.append(Reject(row.line, "no lm-eval sample", reason, begin_of(sample)))
            continue
        item = json.dumps([sample.get("doc_id"), doc], sort_keys=True)
        name = sample.get("filter")
        # The same item seen through another of the task's filters. Through the same one it stands
        # twice, which is for the ids to find.
        if first_filter.setdefault(item, name) != name:
            repeats += 1
            continue
        own = {"doc_id": sample.get("doc_id"), "target": sample.get("target")}
        rows.append(Row(row.line, own | doc))
    rejects = sorted([*table.rejects, *rejects], key=lambda one: one.line)
    unused = {"other filters of an item": repeats} if repeats else {}
    return replace(table, rows=rows, rejects=rejects, known={"id": "doc_id"}, unused=unused)
