"""Prompts from every source that is known: one mapping, one kind of record, bad rows by line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from recipes.schema import ColumnMapping, FilePrompts
from registry.errors import UserError
from tasks import prompts, stages
from tasks.prompt_files import PARTS, read_jsonl
from tasks.prompt_formats import read_formatted
from tasks.prompt_records import all_records, sift
from tasks.prompt_tables import read_table

SIZES = {"train": 2, "calibration": 1, "draft": 1, "eval": 1, "load": 1}
SYSTEM = {"role": "system", "content": "Be brief."}
TOOLS = [{"type": "function", "function": {"name": "track", "parameters": {"type": "object"}}}]


def turns(number: int) -> list[dict[str, Any]]:
    return [
        SYSTEM,
        {"role": "user", "content": f"Where is FT{number}?"},
        {"role": "assistant", "content": "In Wuhan."},
        {"role": "user", "content": f"And when does it arrive? {number}"},
    ]


def batch_line(number: int, **body: Any) -> dict[str, Any]:
    return {
        "custom_id": f"b{number}",
        "method": "POST",
        "url": "/v1/chat/completions",
        "body": {
            "model": "gpt-x",
            "messages": turns(number),
            "temperature": 0.2,
            "metadata": {"intent": "arrival", "who": "customer"},
            **body,
        },
    }


def write(path: Path, rows: list[Any]) -> Path:
    lines = [row if isinstance(row, str) else json.dumps(row, ensure_ascii=False) for row in rows]
    # As Windows saves it.
    path.write_bytes(b"\xef\xbb\xbf" + "\r\n\r\n".join(lines).encode())
    return path


def records(path: Path, mapping: ColumnMapping, **options: Any) -> list[dict[str, Any]]:
    return all_records(path, read_formatted(path, **options), mapping)


def recipe(path: Path, **changes: Any) -> FilePrompts:
    written = {"source": "file", "path": str(path), "sizes": SIZES}
    return FilePrompts.model_validate({**written, **changes})


# -- an OpenAI batch -------------------------------------------------------------------------


def test_a_batch_needs_no_mapping(tmp_path: Path) -> None:
    path = write(tmp_path / "batch.jsonl", [batch_line(1), batch_line(2, tools=TOOLS)])
    mapping = ColumnMapping(reference="metadata.intent", segment="metadata.who")
    first, second = records(path, mapping)
    assert first == {
        "id": "b1",
        "segment": "customer",
        "prompt": "And when does it arrive? 1",
        "reference": {"intent": "arrival"},
        "messages": turns(1),
    }
    assert (second["id"], second["tools"], second["messages"]) == ("b2", TOOLS, turns(2))
    assert read_formatted(path).unused == {"model": 2, "temperature": 2}
    named = ColumnMapping(id="metadata.who", prompt="model")
    with pytest.raises(UserError, match="id 'customer' stands on lines 1, 3"):
        records(path, named)


def test_bad_lines_of_a_batch_are_named(tmp_path: Path) -> None:
    path = write(
        tmp_path / "batch.jsonl",
        [
            batch_line(0),
            {**batch_line(1), "url": "/v1/embeddings"},
            {**batch_line(2), "method": "GET"},
            {**batch_line(3), "body": [1]},
            batch_line(4, messages=[SYSTEM]),
            batch_line(5, messages=[{"role": "developer", "content": "x"}]),
            batch_line(6, tools="track"),
            {"prompt": "of another file"},
            "{cut",
            batch_line(0),
            {**batch_line(8), "custom_id": None},
            batch_line(9, messages=[{"role": "user", "content": "nul \0"}]),
            batch_line(10, messages=[{"role": "user", "content": "x" * 10_000_000}]),
        ],
    )
    path.write_bytes(path.read_bytes() + b'\n{"custom_id": "half", "method": "POST", "url": ')
    good, rejects = sift(path, read_formatted(path), ColumnMapping())
    assert good == []
    assert [(reject.line, reject.reason[:54]) for reject in rejects] == [
        (1, "id 'b0' stands on lines 1, 19"),
        (3, "url is '/v1/embeddings', not '/v1/chat/completions'"),
        (5, "method is 'GET', not 'POST'"),
        (7, "body is a list, not an object"),
        (9, "messages has no user message"),
        (11, "messages[0] has role 'developer'; known are system, us"),
        (13, "tools is a text, but not JSON: Expecting value: line 1"),
        (15, "method is None, not 'POST'"),
        (17, "not JSON: Expecting property name enclosed in double q"),
        (19, "id 'b0' stands on lines 1, 19"),
        (21, "custom_id is missing, not a text"),
        (23, "messages holds a lone surrogate or NUL"),
        (25, "is 10000218 characters long, at most 8388608 are read"),
        (26, "not JSON: Expecting value: line 1 column 48 (char 47)"),
    ]


def test_a_file_is_what_the_recipe_says(tmp_path: Path) -> None:
    path = write(tmp_path / "p.jsonl", [{"prompt": "x", "custom_id": 1, "body": "b"}])
    assert records(path, ColumnMapping())[0]["prompt"] == "x", "no batch without method and url"
    with pytest.raises(UserError, match="method is None"):
        records(path, ColumnMapping(), form="openai_batch")
    path = write(tmp_path / "b.jsonl", [{"prompt": "x", **batch_line(1)}])
    assert records(path, ColumnMapping())[0]["id"] == "b1"
    assert records(path, ColumnMapping(), form="plain")[0]["prompt"] == "x"
    path = write(tmp_path / "q.jsonl", [{"prompt": "x"}])
    with pytest.raises(UserError, match="doc is missing, not an object"):
        records(path, ColumnMapping(), form="lm_eval")
    (tmp_path / "q.csv").write_text("prompt\nx\n")
    with pytest.raises(UserError, match="is no JSONL file, so no openai_batch"):
        read_formatted(tmp_path / "q.csv", "openai_batch")


# -- lm-eval's samples -----------------------------------------------------------------------


def sample(number: int, name: str = "none", **doc: Any) -> dict[str, Any]:
    """As lm-eval 0.4.13 writes one (`EvaluationTracker.save_results_samples`)."""
    return {
        "doc_id": number,
        "doc": {"question": f"Is {number} even?", "topic": "sums", **doc},
        "target": "yes",
        "arguments": {"gen_args_0": {"arg_0": "<s>shots Q: Is it?", "arg_1": {"until": []}}},
        "resps": [["yes"]],
        "filtered_resps": ["yes"],
        "filter": name,
        "metrics": ["exact_match"],
        "doc_hash": "h",
        "prompt_hash": "p",
        "target_hash": "t",
        "exact_match": 1.0,
    }


def test_samples_give_the_columns_of_their_items_once(tmp_path: Path) -> None:
    rows = [sample(0), sample(1), sample(0, "strict"), sample(1, "strict")]
    path = write(tmp_path / "samples_sums_2026.jsonl", rows)
    mapping = ColumnMapping(prompt="question", segment="topic", reference="target")
    assert records(path, mapping) == [
        {
            "id": str(number),
            "segment": "sums",
            "prompt": f"Is {number} even?",
            "reference": {"intent": "yes"},
        }
        for number in (0, 1)
    ]
    assert read_formatted(path).unused == {"other filters of an item": 2}
    with pytest.raises(UserError, match="no column 'prompt'; it has doc_id, question, target"):
        records(path, ColumnMapping())


def test_an_item_that_stands_twice_in_samples_is_no_filter(tmp_path: Path) -> None:
    # A second run appended to the file.
    path = write(tmp_path / "samples.jsonl", [sample(0), sample(0), sample(1, target="own")])
    good, rejects = sift(path, read_formatted(path), ColumnMapping(prompt="question"))
    assert [row["id"] for row in good] == ["1"]
    assert [reject.reason for reject in rejects] == ["id '0' stands on lines 1, 3"] * 2
    with pytest.raises(UserError, match="doc is a text, not an object"):
        path = write(tmp_path / "other.jsonl", [sample(0), {**sample(1), "doc": "x"}])
        records(path, ColumnMapping(prompt="question"))


# -- messages in columns ---------------------------------------------------------------------


def test_nulls_that_arrow_fills_in_are_no_part_of_a_tool(tmp_path: Path) -> None:
    import pyarrow.parquet

    def tool(name: str, **parameters: Any) -> dict[str, Any]:
        function = {"name": name, "parameters": {"type": "object", "properties": parameters}}
        return {"type": "function", "function": function}

    given = [
        [tool("a", city={"type": "string"})],
        [tool("b", count={"type": "integer", "minimum": 1}), tool("c", city={"enum": ["x"]})],
    ]
    rows = [{"prompt": f"p{n}", "tools": tools} for n, tools in enumerate(given)]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "p.parquet")
    found = records(tmp_path / "p.parquet", ColumnMapping(tools="tools"))
    assert [row["tools"] for row in found] == given


def test_a_name_with_dots_is_a_column_first(tmp_path: Path) -> None:
    path = write(
        tmp_path / "p.jsonl",
        [{"a.b": "column", "a": {"b": "inside", "c": "deep"}, "turns": ["first", "second"]}],
    )
    assert records(path, ColumnMapping(prompt="a.b"))[0]["prompt"] == "column"
    assert records(path, ColumnMapping(prompt="a.c"))[0]["prompt"] == "deep"
    assert records(path, ColumnMapping(prompt="turns.1"))[0]["prompt"] == "second"
    with pytest.raises(UserError, match=r"no column 'a\.d', 'a\.c\.e', 'turns\.2'"):
        records(path, ColumnMapping(prompt="a.d", id="a.c.e", segment="turns.2"))


def test_values_of_a_wrong_kind_are_bad_rows(tmp_path: Path) -> None:
    rows = [
        {"prompt": "a", "s": {"x": 1}, "r": "ok"},
        {"prompt": "b", "s": "s", "r": ["one", "two"]},
        {"prompt": "c", "s": "s", "r": "ok", "sys": 3},
        {"prompt": "d", "s": 4, "r": {"intent": "ok"}, "sys": " "},
    ]
    path = write(tmp_path / "p.jsonl", rows)
    mapping = ColumnMapping(segment="s", reference="r", system="sys")
    good, rejects = sift(path, read_table(path), mapping)
    assert [reject.reason for reject in rejects] == [
        "s is an object, not a text",
        "r is a list, not a text or an object",
        "sys is a number, not a text",
    ]
    assert good == [
        {"id": "row-4", "segment": "4", "prompt": "d", "reference": {"intent": "ok"}},
    ]


def test_prompt_and_messages_are_not_both_named() -> None:
    with pytest.raises(ValidationError, match="name `prompt` or `messages`, not both"):
        ColumnMapping(prompt="text", messages="turns")
    with pytest.raises(ValidationError):
        recipe(Path("x"), system="")


# -- the stage -------------------------------------------------------------------------------


@pytest.mark.parametrize("template", ["> {prompt}", "{prompt}"])
def test_a_batch_becomes_parts_with_the_houses_system_prompt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, template: str
) -> None:
    monkeypatch.setattr(stages, "provenance", dict)
    lines = [batch_line(number, tools=TOOLS) for number in range(6)]
    path = write(tmp_path / "batch.jsonl", lines)
    of = recipe(
        path,
        mapping={"reference": "metadata.intent"},
        system="One of {labels}.",
        template=template,
    )
    stages.begin_run(1)
    ref = prompts.prepare_prompts.fn(prompts.stage(of, seed=0), of)
    assert ref.summary["unused"] == {"model": 6, "temperature": 6}
    rows = [row for part in PARTS for row in read_jsonl(ref.path / f"{part}.jsonl")]
    assert len(rows) == 6
    for row in rows:
        number = int(row["id"].removeprefix("b"))
        first, *middle, last = row["messages"]
        assert first == {"role": "system", "content": "One of arrival.\n\nBe brief."}
        assert middle == turns(number)[1:-1]
        asked = template.replace("{prompt}", f"And when does it arrive? {number}")
        assert last == {"role": "user", "content": asked}
        assert row["reference"] == {"intent": "arrival", "labels": ["arrival"]}
        assert row["prompt"] == last["content"]
        assert row["tools"] == TOOLS
        assert list(row) == ["id", "segment", "prompt", "reference", "messages", "tools"]
    foreign = read_jsonl(ref.path / "foreign.jsonl")
    assert not any("messages" in row for row in foreign)


def test_what_is_new_in_a_recipe_changes_no_key_of_before(tmp_path: Path) -> None:
    path = write(tmp_path / "p.jsonl", [{"prompt": f"p{n}", "s": "x"} for n in range(8)])
    plain = prompts.stage(recipe(path), seed=0)
    written = plain.config["prompts"]
    assert not {"system", "split", "format"} & set(written)
    assert set(written["mapping"]) == {"prompt", "id", "segment", "reference", "conversation"}
    others = [
        recipe(path, system="Be brief."),
        recipe(path, mapping={"system": "s"}),
        recipe(path, format="plain"),
    ]
    assert len({plain.key, *(prompts.stage(one, seed=0).key for one in others)}) == 4
