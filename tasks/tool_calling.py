"""Can the engines of a release be asked with tools? vLLM refuses such requests unless told."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from recipes.schema import ServeRecipe
from registry.errors import Problem
from tasks.conversations import tools_of

NEEDED = ("enable-auto-tool-choice", "tool-call-parser")
"""Arguments without which vLLM 0.32 answers a request with tools with status 400.

SGLang knows the second alone.
"""


def mismatches(
    records: Iterable[Mapping[str, Any]], serve: Mapping[str, ServeRecipe]
) -> list[Problem]:
    """One problem per serve recipe that could not be asked what the prompts hold.

    records: prompt records; serve: serve recipes by their names.
    """
    first = next((record for record in records if tools_of(record)), None)
    if first is None:
        return []
    problems = []
    for name, recipe in serve.items():
        given = {key.replace("_", "-"): value for key, value in recipe.engine_args.items()}
        needed = NEEDED if recipe.engine == "vllm" else NEEDED[1:]
        if missing := [one for one in needed if not given.get(one)]:
            problems.append(
                Problem(
                    f"serve recipe {name}: engine_args",
                    f"prompt {first['id']} comes with tools, and {' and '.join(missing)} is not "
                    "set: the engine would refuse it",
                    "set both (the parser is that of the model's family), or leave out "
                    "prompts.mapping.tools",
                )
            )
    return problems
