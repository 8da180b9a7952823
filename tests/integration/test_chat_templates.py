"""A chat template that refuses or drops what a row holds is found before anyone is asked."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from registry.errors import UserError
from tasks.engines.chat_templates import template_problems
from tasks.engines.load_prompts import word_tokenizer

WHOLE = """
{%- if tools %}[{% for tool in tools %}{{ tool.function | tojson }}{% endfor %}]{% endif -%}
{%- for m in messages %}<{{ m.role }}>{{ m.content }}
{%- for call in m.tool_calls or [] %}
{{- call.function.name }} {{ call.function.arguments | tojson }}{% endfor -%}
{% endfor %}<assistant>"""
NO_SYSTEM = """
{%- if messages[0].role == "system" %}{{ raise_exception("System role not supported") }}{% endif -%}
{%- for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<assistant>"""
DROPS_SYSTEM = """
{%- for m in messages if m.role != "system" %}<{{ m.role }}>{{ m.content }}
{%- endfor %}<assistant>"""
ONE_CALL = WHOLE.replace("m.tool_calls or []", "(m.tool_calls or [])[:1]")
REFUSES_TWO = (
    "{%- for m in messages if (m.tool_calls or []) | length > 1 %}"
    '{{ raise_exception("one call at a time") }}{% endfor -%}' + WHOLE
)
NO_ARGUMENTS = WHOLE.replace("{{ call.function.arguments | tojson }}", "")
LOST_CALLS = "leaves out the tool calls of message 2 (role 'assistant')"
LAST_ONLY = "<{{ messages[-1].role }}>{{ messages[-1].content }}<assistant>"

USER = {"role": "user", "content": "hello"}
SYSTEM = {"role": "system", "content": "Be brief."}
FUNCTION = {"name": "track", "arguments": '{"order": "FT1"}'}
CALLS: dict[str, Any] = {
    "role": "assistant",
    "content": None,
    "tool_calls": [{"id": "c", "type": "function", "function": FUNCTION}],
}
RESULT = {"role": "tool", "content": "Wuhan", "tool_call_id": "c"}
TOOL = {"type": "function", "function": {"name": "track", "parameters": {"type": "object"}}}

PLAIN: dict[str, Any] = {"id": "plain", "prompt": "hello"}
BRIEF: dict[str, Any] = {"id": "brief", "prompt": "hello", "messages": [SYSTEM, USER]}
OTHER_BRIEF = {**BRIEF, "id": "of the same shape"}
TURNS = {
    "id": "turns",
    "prompt": "hello",
    "messages": [USER, {"role": "assistant", "content": "hi"}, USER],
}
WITH_TOOLS = {"id": "tools", "prompt": "hello", "tools": [TOOL]}
CALLED = {**WITH_TOOLS, "id": "called", "messages": [USER, CALLS, RESULT]}
TWICE = {
    **WITH_TOOLS,
    "id": "twice",
    "messages": [
        USER,
        {**CALLS, "tool_calls": [{**CALLS["tool_calls"][0], "id": one} for one in "cd"]},
        RESULT,
        {**RESULT, "tool_call_id": "d"},
    ],
}
ALL = [PLAIN, BRIEF, OTHER_BRIEF, TURNS, WITH_TOOLS, CALLED]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return word_tokenizer(tmp_path / "model")


@pytest.mark.parametrize(
    ("template", "found"),
    [
        (WHOLE, {}),
        (
            NO_SYSTEM,
            {
                "brief": "refuses messages of system, user: System role not supported",
                "tools": "leaves out the tools",
                "called": LOST_CALLS,
            },
        ),
        (
            DROPS_SYSTEM,
            {
                "brief": "leaves out the text of message 1 (role 'system')",
                "tools": "leaves out the tools",
                "called": LOST_CALLS,
            },
        ),
        (
            LAST_ONLY,
            {
                "brief": "leaves out the text of message 1 (role 'system')",
                "turns": "leaves out the text of message 1 (role 'user')",
                "tools": "leaves out the tools",
                "called": "leaves out the text of message 1 (role 'user')",
            },
        ),
    ],
    ids=["whole", "no system", "drops system", "last only"],
)
def test_what_a_template_does_not_show(folder: Path, template: str, found: dict[str, str]) -> None:
    (folder / "chat_template.jinja").write_text(template, encoding="utf-8")
    problems = template_problems(folder, ALL)
    assert {problem.where: problem.what for problem in problems} == {
        f"row {name}": f"the chat template of {folder} {what}" for name, what in found.items()
    }


@pytest.mark.parametrize(
    ("template", "found"),
    [
        (ONE_CALL, {"twice": LOST_CALLS}),
        (REFUSES_TWO, {"twice": "refuses messages of user, assistant, tool and tools: one call"}),
        (
            NO_ARGUMENTS,
            dict.fromkeys(
                ("called", "twice"), "leaves out the tool calls of message 2 (role 'assistant')"
            ),
        ),
    ],
    ids=["one call", "refuses two", "no arguments"],
)
def test_every_call_and_its_arguments_are_looked_for(
    folder: Path, template: str, found: dict[str, str]
) -> None:
    (folder / "chat_template.jinja").write_text(template, encoding="utf-8")
    problems = template_problems(folder, [*ALL, TWICE])
    assert {one.where.removeprefix("row ") for one in problems} == set(found)
    for one in problems:
        assert found[one.where.removeprefix("row ")] in one.what


def test_a_folder_without_a_template_or_a_tokenizer(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="has no chat template"):
        template_problems(folder, ALL)
    (tmp_path / "none").mkdir()
    with pytest.raises(UserError, match="has no tokenizer"):
        template_problems(tmp_path / "none", ALL)


@pytest.mark.parametrize(
    ("name", "content"),
    [("tokenizer.json", b"{}"), ("tokenizer.json", b"\xff"), ("tokenizer_config.json", b"[]")],
)
def test_a_broken_tokenizer_is_named(folder: Path, name: str, content: bytes) -> None:
    (folder / "chat_template.jinja").write_text(WHOLE, encoding="utf-8")
    (folder / name).write_bytes(content)
    with pytest.raises(UserError, match="has no tokenizer that can be loaded: "):
        template_problems(folder, ALL)
