"""Does a model's chat template show all of a conversation? Some refuse a role, some leave it out.

A template that knows no system message, or no tools, either raises or writes a prompt without
them. The second is worse: teacher and student then answer different questions, and nobody is told.

`python -m tasks.engines.chat_templates JOB RESULT`. JOB: `model`, a folder; `files`, prompt rows as
JSONL. RESULT: nothing but that.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from registry.errors import Problem, UserError
from tasks.conversations import for_template, has_conversation, messages_of, tools_of
from tasks.engines.subprocesses import job_main

Row = Mapping[str, Any]
Render = Callable[[list[dict[str, Any]], list[dict[str, Any]]], str]
"""A function from messages and tools to the text that the model reads."""

MORE = " (and more)"
"""What is added to a message to see whether the text changes."""


def run(job: Mapping[str, Any]) -> dict[str, Any]:
    """Raises `UserError` with what the model's template cannot show of the files' rows."""

    def rows() -> Iterator[Row]:
        for file in job["files"]:
            with Path(file).open(encoding="utf-8") as lines:
                yield from filter(has_conversation, map(json.loads, lines))

    if problems := template_problems(Path(job["model"]), rows()):
        raise UserError(problems)
    return {}


def template_problems(folder: Path, rows: Iterable[Row]) -> list[Problem]:
    """What the chat template in a model's folder cannot show, once for each shape of row.

    rows: `{"id", "prompt"[, "messages"][, "tools"]}`. Raises `UserError` for a folder without a
    tokenizer and template that can be loaded.
    """
    render = renderer(folder)
    problems: list[Problem] = []
    seen: set[Any] = set()
    for row in rows:
        messages, tools = messages_of(row), tools_of(row)
        calls = [len(one.get("tool_calls") or []) for one in messages]
        shape = (bool(tools), *zip((one["role"] for one in messages), calls, strict=True))
        if shape in seen:
            continue
        seen.add(shape)
        if lost := not_shown(render, messages, tools):
            problems.append(
                Problem(
                    f"row {row['id']}",
                    f"the chat template of {folder} {lost}",
                    "take a model whose template knows it, or prompts without it",
                )
            )
    return problems


def renderer(folder: Path) -> Render:
    """A function that renders with the tokenizer's template. Raises `UserError`."""
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(
            str(folder), local_files_only=True, trust_remote_code=False
        )
    except Exception as error:  # of a broken file, whatever the libraries stumble over
        why = str(error) if isinstance(error, OSError | ValueError) else repr(error)
        raise UserError.at(
            folder, f"has no tokenizer that can be loaded: {why}", "name a model's folder"
        ) from None

    if not tokenizer.chat_template:
        raise UserError.at(folder, "has no chat template", "put its chat_template.jinja there")

    def render(messages: list[dict[str, Any]], tools: list[dict[str, Any]]) -> str:
        text: str = tokenizer.apply_chat_template(
            messages, tools=tools or None, tokenize=False, add_generation_prompt=True
        )
        return text

    return render


def not_shown(render: Render, messages: list[dict[str, Any]], tools: list[dict[str, Any]]) -> str:
    """What of a conversation is not in the rendered text; empty where all of it is."""
    from jinja2 import TemplateError

    said = for_template(messages)
    try:
        whole = render(said, tools)
        for at, message in enumerate(said):
            for changed in _changed(message):
                if render([*said[:at], changed, *said[at + 1 :]], tools) == whole:
                    calls = message.get("tool_calls") and changed["content"] == message["content"]
                    what = "tool calls" if calls else "text"
                    return f"leaves out the {what} of message {at + 1} (role {message['role']!r})"
        if tools and render(said, []) == whole:
            return "leaves out the tools"
    except (TemplateError, TypeError, ValueError) as error:
        shape = " and tools" if tools else ""
        roles = ", ".join(dict.fromkeys(one["role"] for one in said))
        return f"refuses messages of {roles}{shape}: {error}"
    return ""


def _changed(message: dict[str, Any]) -> Iterable[dict[str, Any]]:
    """The message with another text, then with another name or argument of each of its calls."""
    if message["content"]:
        yield {**message, "content": message["content"] + MORE}
    calls = message.get("tool_calls") or []
    for at, call in enumerate(calls):
        function = call["function"]
        for other in (
            {"name": function["name"] + "_other"},
            {"arguments": {**function["arguments"], "other": MORE}},
        ):
            changed = {**call, "function": {**function, **other}}
            yield {**message, "tool_calls": [*calls[:at], changed, *calls[at + 1 :]]}


if __name__ == "__main__":
    job_main(run)
