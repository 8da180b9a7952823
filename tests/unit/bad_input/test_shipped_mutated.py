"""Every shipped recipe, suite and policy, mutated anywhere: a model, or mistakes in words."""

from __future__ import annotations

import copy
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

import eval_suites.schema
import recipes.schema
from recipes import loader
from registry.errors import UserError
from tests.unit.bad_input.yaml_cases import shipped

KINDS = {**recipes.schema.KINDS, **eval_suites.schema.KINDS}
VALUES = [
    *(None, True, False, 0, -1, 1, 2**62, -(2**62), 0.5, -0.0, 1e308, 5e-324),
    *(
        "",
        " ",
        "x" * 5000,
        "../x",
        "/etc/passwd",
        "a\nb",
        "$(touch x)",
        "\u202eabc",
        "{{ x }}",
        ".",
    ),
    *([], {}, [None], [[["deep"]]], {"a": {"b": {}}}, {"": 1}, ["a", "a"], [{}] * 300),
]
"""What YAML can hold and a person or a program may write by mistake."""


def places(content: Any, at: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    inside = content.items() if isinstance(content, dict) else enumerate(content)
    return [
        place
        for key, value in inside
        for place in [
            (*at, key),
            *(places(value, (*at, key)) if isinstance(value, dict | list) else []),
        ]
    ]


def mutated(content: dict[str, Any], draw: Any) -> dict[str, Any]:
    changed = copy.deepcopy(content)
    for _ in range(draw(st.integers(1, 3))):
        found = [place for place in places(changed) if place != ("kind",)]
        if not found:
            break
        *path, key = draw(st.sampled_from(found))
        holder: Any = changed
        for part in path:
            holder = holder[part]
        how = draw(st.sampled_from(["replaced", "removed", "renamed", "added", "doubled"]))
        if how == "removed":
            del holder[key]
        elif how == "renamed" and isinstance(holder, dict):
            holder[f"{key}_"] = holder.pop(key)
        elif how == "added" and isinstance(holder, dict):
            holder[draw(st.sampled_from(["x", "Kind", "0", "__class__", "model_config"]))] = 1
        elif how == "doubled":
            holder[key] = [copy.deepcopy(holder[key])] * 2
        else:
            holder[key] = copy.deepcopy(draw(st.sampled_from(VALUES)))
    return changed


@settings(max_examples=1500, database=None)
@given(st.data())
def test_a_shipped_file_changed_anywhere_is_read_or_refused_in_words(data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(sorted(shipped())))
    content = mutated(shipped()[name], data.draw)
    kind = content["kind"]
    try:
        read = loader.validate(content, kind, KINDS[kind], source=name)
    except UserError as refused:
        assert refused.problems
        for problem in refused.problems:
            assert problem.where.startswith(name), problem
            assert problem.what and problem.remedy, problem
            assert len(str(problem)) < 3000, problem
    else:
        # What was read is what is recorded, and reads again as the same.
        again = type(read).model_validate(read.model_dump(mode="json"))
        assert again == read
