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
LAST_ONLY = "<{{ messages[-1].role }}>{{ messages[-1].content }}<assistant>"

USER = {"role": "user", "content": "hello"}
SYSTEM = {"role": "system", "content": "Be brief."}
FUNCTION = {"name": "track", "arguments": '{"order": "FT1"}'}
CALLS = {
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
                "called": "leaves out the tool calls of message 2 (role 'assistant')",
            },
        ),
        (
            DROPS_SYSTEM,
            {
                "brief": "leaves out the text of message 1 (role 'system')",
                "tools": "leaves out the tools",
                "called": "leaves out the tool calls of message 2 (role 'assistant')",
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


def test_a_folder_without_a_template_or_a_tokenizer(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="has no chat template"):
        template_problems(folder, ALL)
    (tmp_path / "none").mkdir()
    with pytest.raises(UserError, match="has no tokenizer"):
        template_problems(tmp_path / "none", ALL)
