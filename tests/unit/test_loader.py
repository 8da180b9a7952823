"""Recipes and suites: every mistake at once, with file, place, value and remedy."""

from __future__ import annotations

from pathlib import Path

import pytest

from recipes import loader
from recipes.schema import DistillRecipe, ReleaseRecipe, ServeRecipe
from registry.errors import UserError

GOOD = """
kind: distill
description: d
student: {source: path, path: /models/x}
lora: {r: 8, target_modules: all-linear}
epochs: 1
learning_rate: 1e-3
batch_size: 8
max_length: 128
"""


def written(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "r.yaml"
    path.write_text(text)
    return path


def problems(tmp_path: Path, text: str, kind: str = "distill") -> list[str]:
    path = written(tmp_path, text)
    with pytest.raises(UserError) as caught:
        loader.load(str(path), kind, DistillRecipe)
    return [f"{p.where.removeprefix(str(path))} {p.what}" for p in caught.value.problems]


def test_numbers_written_like_people_write_them(tmp_path: Path) -> None:
    recipe = loader.load(str(written(tmp_path, GOOD)), "distill", DistillRecipe)
    assert recipe.learning_rate == 0.001


def test_every_mistake_at_once(tmp_path: Path) -> None:
    text = GOOD.replace("epochs: 1", "epochs: -1").replace("batch_size: 8", "batchsize: 8")
    found = problems(tmp_path, text)
    assert found == [
        ": epochs Input should be greater than 0 (found -1)",
        ": batch_size is missing",
        ": batchsize unknown key",
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("kind: distil\n", "kind is 'distil', expected 'distill'"),
        ("- a\n", "holds list, not a mapping"),
        ("", "holds NoneType, not a mapping"),
        ("kind: distill\nkind: draft\n", "key 'kind' stands here twice"),
        ("kind: [\n", "not YAML"),
        ("kind: !!python/object:os.system x\n", "not YAML"),
        ("? [a]\n: b\n", "a key must be plain text"),
        ("a: &a [*a]\nkind: distill\n", "a value that no recipe can have"),
        ("kind: distill\nlora: {r: .inf}\n", "a value that no recipe can have"),
    ],
)
def test_what_is_no_recipe(tmp_path: Path, text: str, message: str) -> None:
    assert any(message in found for found in problems(tmp_path, text))


@pytest.mark.parametrize(
    "text",
    ["x: !!int ''", "x: !!bool maybe", "x: !!timestamp soon", 'x: "\\UFFFFFFFF"', 'x: "\\ud800"'],
)
def test_values_that_yaml_itself_stumbles_over(tmp_path: Path, text: str) -> None:
    with pytest.raises(UserError):
        loader.read_yaml(written(tmp_path, text))


def test_aliases_of_aliases_do_not_multiply(tmp_path: Path) -> None:
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 10)]
    with pytest.raises(UserError, match="with its aliases in full it has more than"):
        loader.read_yaml(written(tmp_path, "\n".join(lines)))


def test_few_aliases_of_a_long_text_do_not_multiply_either(tmp_path: Path) -> None:
    lines = [f"a0: &a0 {'x' * 400_000}"]
    lines += [f"a{n}: &a{n} [*a{n - 1}, *a{n - 1}, *a{n - 1}]" for n in range(1, 9)]
    with pytest.raises(UserError, match=r":4:5: not YAML: with its aliases in full"):
        loader.read_yaml(written(tmp_path, "\n".join(lines)))
    with pytest.raises(UserError, match="value is not YAML that a recipe can hold"):
        loader.parse_overrides(["a=[" + ", ".join(line[4:] for line in lines) + "]"])


def test_small_aliases_may_be_many(tmp_path: Path) -> None:
    text = "pool: &pool {name: gpu}\nall:\n" + "  - <<: *pool\n" * 200
    assert loader.read_yaml(written(tmp_path, text))["all"] == [{"name": "gpu"}] * 200


@pytest.mark.parametrize("word", ["1:30", "010", "1:30.5"])
def test_what_yaml_1_1_alone_calls_a_number_is_none(tmp_path: Path, word: str) -> None:
    assert loader.read_yaml(written(tmp_path, f"x: {word}")) == {"x": word}


@pytest.mark.parametrize(
    ("word", "number"),
    [("0", 0), ("-3", -3), ("0x1F", 31), ("1_000", 1000), ("1e-3", 0.001), ("1.5E3", 1500.0),
     (".5", 0.5)],
)  # fmt: skip
def test_numbers_are_read_as_people_write_them(tmp_path: Path, word: str, number: float) -> None:
    read = loader.read_yaml(written(tmp_path, f"x: {word}"))["x"]
    assert (read, type(read)) == (number, type(number))


def test_yes_and_off_are_no_numbers(tmp_path: Path) -> None:
    path = written(tmp_path, GOOD.replace("epochs: 1", "epochs: yes"))
    with pytest.raises(UserError, match=r"r\.yaml: epochs: is True, no number"):
        loader.load(str(path), "distill", DistillRecipe)
    with pytest.raises(UserError, match=r"prompts\.sizes\.eval: is True"):
        loader.load(
            "freight_demo", "release", ReleaseRecipe, overrides={"prompts.sizes.eval": True}
        )


def test_overrides_that_lead_too_deep_or_too_far() -> None:
    with pytest.raises(UserError, match=r"--set a\.a\..*is not KEY"):
        loader.parse_overrides([".".join("a" * 5000) + "=1"])
    with pytest.raises(UserError, match="no item '9999"):
        loader.load("freight_demo", "release", ReleaseRecipe,
                    overrides={f"candidates.{'9' * 5000}.name": "x"})  # fmt: skip


def test_a_file_in_another_encoding(tmp_path: Path) -> None:
    path = tmp_path / "r.yaml"
    path.write_bytes("kind: distill # caf\xe9".encode("latin-1"))
    with pytest.raises(UserError, match="not UTF-8"):
        loader.load(str(path), "distill", DistillRecipe)


def test_unknown_names_come_with_the_nearest(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="did you mean 'freight_demo'"):
        loader.find("freight_dmo", "release")
    with pytest.raises(UserError, match="no such file"):
        loader.find(str(tmp_path / "none.yaml"), "release")


def test_overrides_reach_into_mappings_and_lists(tmp_path: Path) -> None:
    path = written(tmp_path, GOOD)
    overrides = loader.parse_overrides(["lora.r=4", "epochs=2", "student.path=/m"])
    recipe = loader.load(str(path), "distill", DistillRecipe, overrides=overrides)
    assert (recipe.lora["r"], recipe.epochs) == (4, 2.0)
    changed = loader._with({"a": [{"b": 1}, 2]}, ["a", "0", "b"], 3, "a.0.b")
    assert changed == {"a": [{"b": 3}, 2]}


@pytest.mark.parametrize("assignment", ["epochs", "=1", "a..b=1", "a=["])
def test_a_bad_assignment_is_named(assignment: str) -> None:
    with pytest.raises(UserError, match="--set"):
        loader.parse_overrides([assignment])


def test_arguments_that_the_project_sets_itself() -> None:
    content = {"kind": "serve", "description": "d", "engine_args": {"port": 1, "max-model-len": 2}}
    with pytest.raises(UserError, match="port: is set by the project, not by a recipe"):
        loader.validate(content, "serve", ServeRecipe, source="x")


@pytest.mark.parametrize("name", ["team/assistant", "a:b", "", "a b", "../x", "a" * 101])
def test_a_model_name_that_the_registry_would_refuse(name: str) -> None:
    content = loader.read_yaml(loader.find("freight_demo", "release"))
    with pytest.raises(UserError, match="cannot be a registered model's name"):
        loader.validate({**content, "model": name}, "release", ReleaseRecipe, source="x")


def test_a_place_is_named_as_it_is_written_without_the_kind_that_was_chosen(tmp_path: Path) -> None:
    recipe = tmp_path / "r.yaml"
    text = (Path("recipes/release") / "smollm2_banking77.yaml").read_text(encoding="utf-8")
    recipe.write_text(text.replace("  path: train.csv", "  path: train.csv\n  mappin: {}"))
    with pytest.raises(UserError) as refused:
        loader.load(str(recipe), "release", ReleaseRecipe, overrides={"prompts.seed": 1})
    places = [problem.where.removeprefix(f"{recipe}: ") for problem in refused.value.problems]
    assert places == ["prompts.mappin", "prompts.seed"]


def test_an_endless_value_within_a_reason_is_shown_cut(tmp_path: Path) -> None:
    """pydantic writes an unknown `source` into its own sentence, whole."""
    path = tmp_path / "d.yaml"
    text = Path("recipes/distill/lora_r16_qwen3_8b.yaml").read_text(encoding="utf-8")
    path.write_text(text.replace("source: path", f"source: {'x' * 9000}"), encoding="utf-8")
    with pytest.raises(UserError, match="student: Input tag 'xxx") as told:
        loader.load(str(path), "distill", DistillRecipe)
    assert "expected tags: 'demo'" in str(told.value) and len(str(told.value)) < 3000
