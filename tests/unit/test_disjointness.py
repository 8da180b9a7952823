"""What parts have in common: every measure by its right count, and what stops a release."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest

from recipes.schema import ColumnMapping, DemoPrompts, Disjointness, FilePrompts
from registry.errors import StageFailed, UserError
from tasks import prompts
from tasks.disjointness import Cell, lines_of, measure, problems

RULES = Disjointness(n=5)


def rows(prefix: str, *texts: str) -> list[dict[str, Any]]:
    return [
        {"id": f"{prefix}{n}", "segment": "a", "prompt": text, "reference": None}
        for n, text in enumerate(texts)
    ]


PARTS = {
    "train": rows(
        "t",
        "Where is my card?",
        "How do I reset my PIN",
        "I would like to know why my last transfer to Spain has not arrived yet",
        "你好，我的包裹三天没有动了，请帮我查一下",
        "completely different words here",
    ),
    "calibration": rows("c", "nothing in common with those"),
    "eval": rows(
        "e",
        "Where is my card?",
        "how do i reset my pin?!",
        "I would like to know why my last transfer to Spain hasn't arrived yet",
        "你好 我的包裹五天没有动了 请帮我查一下谢谢",
        "Where is my card?",
        "short one",
    ),
}


def cells(parts: dict[str, list[dict[str, Any]]], rules: Disjointness = RULES) -> dict[Any, Cell]:
    return {(*cell.parts, cell.measure): cell for cell in measure(parts, rules, seed=0).cells}


def test_each_prompt_counts_in_the_first_measure_that_finds_it() -> None:
    found = cells(PARTS)
    assert len(found) == 3 * 4
    assert found["train", "eval", "exact"].prompts == [1, 2]
    assert found["train", "eval", "normalized"].prompts == [1, 1]
    assert found["train", "eval", "near_duplicate"].prompts == [1, 1]
    # The four-word question is too short for five in a row, all others share a run.
    assert found["train", "eval", "ngram"].prompts == [3 + 0, 3]
    (near,) = found["train", "eval", "near_duplicate"].matches
    assert near.ids == ("t2", "e2") and 0.85 <= (near.similarity or 0) < 1
    assert [match.ids for match in found["train", "eval", "exact"].matches] == [
        ("t0", "e0"),
        ("t0", "e4"),
    ]
    assert not any(cell.prompts != [0, 0] for key, cell in found.items() if "calibration" in key)
    # Either order of the parts says the same.
    turned = cells({name: PARTS[name] for name in ("eval", "train", "calibration")})
    for name in ("exact", "normalized", "near_duplicate", "ngram"):
        assert turned["eval", "train", name].prompts == found["train", "eval", name].prompts[::-1]


def test_prompts_that_are_too_short_for_an_ngram_are_counted() -> None:
    matrix = measure(PARTS, RULES, seed=0)
    assert matrix.too_short == {"train": 2, "calibration": 0, "eval": 3}
    text = "\n".join(lines_of(matrix, RULES))
    assert "| train, eval | **1 + 2** | **1 + 1** | **1 + 1** | 3 + 3 |" in text
    assert "t2: I would like to know" in text


def test_conversations_are_compared_by_all_that_the_user_says() -> None:
    def chat(name: str, *said: str) -> dict[str, Any]:
        answer = {"role": "assistant", "content": "Yes, of course I can help you with this today."}
        messages = [m for text in said for m in ({"role": "user", "content": text}, answer)][:-1]
        one = rows(name, said[-1])[0]
        return {**one, "messages": [{"role": "system", "content": "Be kind."}, *messages]}

    found = cells(
        {
            "train": [chat("a", "my card is lost", "yes please"), chat("b", "other", "thanks")],
            "eval": [chat("c", "what is a PIN", "yes please"), chat("d", "other", "thanks")],
        }
    )
    assert found["train", "eval", "exact"].prompts == [1, 1]
    assert found["train", "eval", "exact"].matches[0].ids == ("b0", "d0")
    assert found["train", "eval", "ngram"].prompts == [0, 0], "answers are nobody's prompt"


def test_what_blocks_is_the_recipes_decision() -> None:
    matrix = measure(PARTS, RULES, seed=0)
    found = problems(matrix, RULES, "all.jsonl")
    assert [problem.where for problem in found] == ["prompts train and eval"] * 3
    assert "1 of 5 of train, 2 of 6 of eval" in found[0].what
    assert "train t2: I would like to know" in found[2].what
    assert "eval e2: I would like to know" in found[2].what
    assert "all.jsonl" in found[2].remedy
    assert "prompts.disjoint.near_duplicate=report" in found[2].remedy
    lenient = Disjointness(exact="report", normalized="report", near_duplicate="report")
    assert problems(measure(PARTS, lenient, 0), lenient, "x") == []
    strict = Disjointness(n=5, ngram="block")
    assert len(problems(measure(PARTS, strict, 0), strict, "x")) == 4


def test_parts_that_both_teach_may_be_alike_but_not_the_same() -> None:
    both = {"train": PARTS["train"], "draft": PARTS["eval"]}
    found = problems(measure(both, RULES, seed=0), RULES, "x")
    assert ["the same text" in problem.what for problem in found] == [True]
    # The demo models' own messages are learned from, and no part.
    known = {"pretrain": PARTS["train"], "train": PARTS["eval"]}
    assert problems(measure(known, RULES, seed=0), RULES, "x") == []
    known = {"pretrain": PARTS["train"], "eval": PARTS["eval"]}
    assert len(problems(measure(known, RULES, seed=0), RULES, "x")) == 3


# -- the stage -------------------------------------------------------------------------------


SIZES = {"train": 12, "calibration": 2, "draft": 2, "eval": 4, "load": 2}
WORDS = [
    "apple",
    "river",
    "stone",
    "cloud",
    "engine",
    "paper",
    "window",
    "garden",
    "silver",
    "salt",
]


def write(path: Path, texts: list[str]) -> Path:
    with path.open("w", encoding="utf-8", newline="") as out:
        csv.writer(out).writerows([["text", "label"], *([text, "a"] for text in texts)])
    return path


def texts(count: int, start: int = 0) -> list[str]:
    return [
        f"{WORDS[n % 10]} {WORDS[n // 10 % 10]} {chr(97 + n % 26) * 4} question {n * 7919}"
        for n in range(start, start + count)
    ]


def recipe(path: Path, **more: Any) -> FilePrompts:
    mapping = ColumnMapping(prompt="text", reference="label")
    return FilePrompts(source="file", path=str(path), sizes=SIZES, mapping=mapping, **more)


def test_a_part_from_a_file_of_its_own(tmp_path: Path) -> None:
    main = write(tmp_path / "main.csv", texts(40))
    own = write(tmp_path / "eval.csv", texts(10, start=50))
    of = recipe(main, files={"eval": str(own)})
    stage = prompts.stage(of, seed=0)
    assert set(stage.inputs) == {"prompts", "prompts.eval"}
    ref = prompts.prepare_prompts.fn(stage, of)
    found = [json.loads(line) for line in (ref.path / "eval.jsonl").read_text().splitlines()]
    assert len(found) == 4 and {one["prompt"] for one in found} <= set(texts(10, start=50))
    assert all(one["id"].startswith("eval-row-") for one in found), "both files count from one"
    report = (ref.path / "report.md").read_text(encoding="utf-8")
    assert "| train, eval | **0** | **0** | **0** | 0 |" in report
    matrix = json.loads((ref.path / "disjointness.json").read_text(encoding="utf-8"))
    assert len(matrix["cells"]) == 10 * 4 and matrix["prompts"]["train"] == 12
    # Where the file lies does not count, what it says does.
    moved = write(tmp_path / "moved.csv", texts(10, start=50))
    assert prompts.stage(recipe(main, files={"eval": str(moved)}), 0).key == stage.key
    write(moved, texts(10, start=51))
    assert prompts.stage(recipe(main, files={"eval": str(moved)}), 0).key != stage.key
    assert prompts.stage(recipe(main, files={"load": str(own)}), 0).key != stage.key


def test_a_leak_stops_the_stage_and_shows_both_sides(tmp_path: Path) -> None:
    main = write(tmp_path / "main.csv", texts(18))
    own = write(tmp_path / "eval.csv", [text.upper() + "!" for text in texts(4)])
    of = recipe(main, files={"eval": str(own)})
    with pytest.raises(StageFailed) as caught:
        prompts.prepare_prompts.fn(prompts.stage(of, seed=0), of)
    assert "equal but for case, space and punctuation" in str(caught.value)
    assert "eval-row-1: APPLE APPLE AAAA QUESTION 0!" in str(caught.value)
    listed = Path(caught.value.problems[0].remedy.split("all are in ")[1].split(")")[0])
    every = [json.loads(line) for line in listed.read_text(encoding="utf-8").splitlines()]
    leaked = {name for one in every for name in one["ids"] if name.startswith("eval-")}
    assert leaked == {f"eval-row-{n}" for n in (1, 2, 3, 4)}
    of = recipe(main, files={"eval": str(own)}, disjoint=Disjointness(normalized="report"))
    ref = prompts.prepare_prompts.fn(prompts.stage(of, seed=0), of)
    assert ref.summary["prompts"]["eval"] == 4


def test_mistakes_of_files_are_found_before_anything_starts(tmp_path: Path) -> None:
    main = write(tmp_path / "main.csv", texts(40))
    few = write(tmp_path / "few.csv", texts(3, start=50))
    with pytest.raises(UserError, match=r"few\.csv: 4 different prompts .* the file has 3"):
        prompts.stage(recipe(main, files={"eval": str(few)}), seed=0)
    with pytest.raises(UserError, match=r"gone\.csv: no such file"):
        prompts.stage(recipe(main, files={"eval": str(tmp_path / "gone.csv")}), seed=0)
    mapping = ColumnMapping(prompt="text", id="text")
    copied = write(tmp_path / "copied.csv", texts(40))
    same = recipe(main, files={"eval": str(copied)}).model_copy(update={"mapping": mapping})
    with pytest.raises(UserError, match=r"stands in .*main\.csv too"):
        prompts.stage(same, seed=0)
    with pytest.raises(ValueError, match="leave a part"):
        recipe(main, files=dict.fromkeys(SIZES, "x.csv"))
    with pytest.raises(ValueError, match=r"files\.load is the file of eval too"):
        recipe(main, files={"eval": "x/t.csv", "load": "./x//t.csv"})
    with pytest.raises(ValueError, match=r"files\.eval is the file of `path` too"):
        recipe(main, files={"eval": f"{main.parent}/./main.csv"})


@pytest.mark.parametrize("seed", [0, 1])
def test_the_demo_leaks_nothing_into_what_it_is_measured_on(seed: int) -> None:
    sizes = {"train": 400, "calibration": 40, "draft": 60, "eval": 120, "load": 60}
    of = DemoPrompts(source="demo", sizes=sizes)
    ref = prompts.prepare_prompts.fn(prompts.stage(of, seed, pretrain_messages=800), of)
    matrix = json.loads((ref.path / "disjointness.json").read_text(encoding="utf-8"))
    assert matrix["prompts"] == {"pretrain": 800, **sizes}
    crossed = [
        cell
        for cell in matrix["cells"]
        if cell["parts"][0] not in ("eval", "load") and cell["parts"][1] in ("eval", "load")
    ]
    assert len(crossed) == 8 * 4
    assert all(cell["prompts"] == [0, 0] for cell in crossed if cell["measure"] != "ngram")
    assert not (ref.path / "pretrain.jsonl").exists()
