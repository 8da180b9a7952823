"""Prompts with tools need an engine that is told to take them."""

from __future__ import annotations

from typing import Any

from recipes.schema import ServeRecipe
from tasks.tool_calling import mismatches

TOOL = {"type": "function", "function": {"name": "track"}}
PLAIN: dict[str, Any] = {"id": "a", "prompt": "x"}
WITH_TOOLS = {"id": "b", "prompt": "y", "tools": [TOOL]}


def serving(**args: Any) -> ServeRecipe:
    names = {name.replace("_", "-"): value for name, value in args.items()}
    return ServeRecipe(kind="serve", description="d", engine_args=names)


def test_each_engine_that_would_refuse_tools_is_named() -> None:
    serve = {
        "ready": serving(enable_auto_tool_choice=True, tool_call_parser="hermes"),
        "half": serving(tool_call_parser="hermes"),
        "off": serving(enable_auto_tool_choice=False),
    }
    assert mismatches([PLAIN], serve) == []
    found = {one.where: one.what for one in mismatches([PLAIN, WITH_TOOLS], serve)}
    assert found == {
        "serve recipe half: engine_args": "prompt b comes with tools, and enable-auto-tool-choice "
        "is not set: the engine would refuse it",
        "serve recipe off: engine_args": "prompt b comes with tools, and enable-auto-tool-choice "
        "and tool-call-parser is not set: the engine would refuse it",
    }
