"""Recipes for GPUs that nobody here has: each is whole, says that it was not run, and fits.

That vLLM's own parser reads their arguments is tested in
tests/integration/test_format_support.py.
"""

from __future__ import annotations

import re
import shlex
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from eval_suites import loader as suites
from recipes import loader
from recipes.schema import PathModel, ReleaseRecipe, ServeRecipe
from registry.capacity_plan import plan
from registry.errors import UserError
from registry.model_shapes import ModelShape, shape_of
from registry.plan_parts import Demand, Fit, Limits, Model, Wish
from registry.settings import CHECKOUT
from registry.topology import ROLES, gpus_of
from tasks.capacity_inputs import machine_of
from tasks.capacity_parts import planned_in_parts
from tasks.engines.quantization_recipe import groups_of, modifiers
from tasks.planning import ResolvedRelease, resolve
from tasks.planning import plan as plan_release
from tests.unit.shape_builders import config, published

GIB = 2**30
NOT_RUN = "NOT RUN"

RELEASES = [
    name
    for name in loader.shipped("release")
    if loader.load(name, "release", ReleaseRecipe).run_on is None
]
SERVES = [name for name in loader.shipped("serve") if "_nvidia_" in name]
VLLM_SERVES = [name for name in SERVES if name.startswith("vllm_")]
APART = [
    name for name in VLLM_SERVES if loader.load(name, "serve", ServeRecipe).topology is not None
]
"""With prefill and decode apart."""


@cache
def resolved(name: str) -> ResolvedRelease:
    return resolve(name)


def model_name(source: Any) -> str:
    """The published configuration that stands for the folder which a user gives."""
    assert isinstance(source, PathModel)
    return Path(source.path).name


def draft_of(target: str, draft_vocab: int | None) -> ModelShape:
    """A draft of one layer, as it is trained for this target."""
    layer = config(target) | {"num_hidden_layers": 1}
    written = {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "draft_vocab_size": draft_vocab,
        "transformer_layer_config": layer,
    }
    return shape_of(written, f"draft of {target}")


def engines_of(serve: ServeRecipe) -> dict[str, dict[str, Any]]:
    """Arguments of one engine of each role; of a colocated recipe of its engine, without a name."""
    if serve.topology is None:
        return {"": serve.engine_args}
    return {role: serve.topology.arguments(role, serve.engine_args) for role in ROLES}


def fit_of(
    model: str, args: dict[str, Any], hardware: str, form: str, draft: ModelShape | None = None
) -> Fit:
    """The plan at the numbers of a serve recipe; fails where it does not fit."""
    context, tp = args["max-model-len"], args["tensor-parallel-size"]
    demand = Demand(args["max-num-seqs"], context, context)
    wish = Wish(
        formats=(form,),
        tp=tp,
        utilization=args["gpu-memory-utilization"],
        max_batched_tokens=args["max-num-batched-tokens"],
    )
    shape = Model(published(model), model, draft)
    found = plan(shape, [machine_of(hardware)], demand, wish, Limits())
    assert found.fits, found.ruled_out
    return found.fits[0]


def form_of(todo: ResolvedRelease, quantize: str) -> str:
    """A format's name, with the columns of a group that the release's quantize recipe has."""
    recipe = todo.quantize[quantize].recipe
    if recipe is None:
        return quantize
    groups = [group for _, args in modifiers(recipe) for group in groups_of(args).values()]
    sizes = {group["weights"].get("group_size") for group in groups} - {None}
    return f"{quantize}_g{sizes.pop()}" if sizes and quantize.startswith("w4a16") else quantize


def fits_of_release(name: str) -> dict[str, Fit]:
    """The plan of each engine of each candidate, and of the teacher where it is served here."""
    todo = resolved(name)
    student = model_name(todo.distill.student)
    hardware = todo.load.hardware
    fits = {}
    for one in todo.release.candidates:
        draft = None
        if one.draft:
            assert todo.draft is not None
            draft = draft_of(student, todo.draft.draft_vocab_size)
        form = form_of(todo, one.quantize)
        for role, args in engines_of(todo.serve[one.serve]).items():
            engine = f"{one.name}, {role}" if role else one.name
            fits[engine] = fit_of(student, args, hardware, form, draft)
    if todo.teacher.model is not None:
        serve = todo.serve[str(todo.teacher.serve)]
        teacher = model_name(todo.teacher.model)
        fits["teacher"] = fit_of(teacher, serve.engine_args, hardware, "auto")
    return fits


# -- what they say of themselves -------------------------------------------------------------


def test_the_pairs_that_users_asked_for() -> None:
    assert set(RELEASES) == {
        "qwen3_32b_to_8b_nvidia_h20",
        "qwen3_32b_to_8b_nvidia_l20",
        "llama_3_1_70b_to_8b_nvidia_h800",
        "qwen2_5_7b_nvidia_a10",
        "qwen2_5_32b_colocated_nvidia_h20",
        "qwen2_5_32b_disaggregated_nvidia_h20",
    }


def files_for_gpus() -> list[Path]:
    """The releases that have not run, what they name, and all that is named by a card."""
    found = {loader.find(name, "release") for name in RELEASES}
    found |= {loader.find(name, "serve") for name in SERVES}
    for name in RELEASES:
        release = loader.load(name, "release", ReleaseRecipe)
        found.add(loader.find(release.distill, "distill"))
        found.add(loader.find(release.load, "load", suites.SUITES_DIR))
        if release.draft is not None:
            found.add(loader.find(release.draft, "draft"))
        if release.teacher != "openai_url":
            found.add(loader.find(release.teacher, "teacher"))
    return sorted(found)


@pytest.mark.parametrize("path", files_for_gpus(), ids=lambda path: path.stem)
def test_header_and_description_say_that_it_was_not_run(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    header = text.partition("\nkind: ")[0]
    assert f"# {NOT_RUN}" in header
    assert loader.read_yaml(path)["description"].startswith(NOT_RUN)


@pytest.mark.parametrize("name", loader.shipped("release"))
def test_only_what_ran_says_where(name: str) -> None:
    """`run_on` and the words never disagree."""
    recipe = loader.load(name, "release", ReleaseRecipe)
    assert (recipe.run_on is None) == recipe.description.startswith(NOT_RUN)
    assert ("nvidia" in name) <= (recipe.run_on is None)


def test_the_list_of_recipes_says_where_each_release_ran() -> None:
    from flows.rendering import recipes_document, recipes_table

    document = recipes_document()
    ran = {row["name"]: row["run_on"] for row in document if "run_on" in row}
    assert set(ran) == set(loader.shipped("release"))
    assert {name for name, where in ran.items() if where is None} == set(RELEASES)
    assert "nowhere yet" in recipes_table(document)


@pytest.mark.parametrize("name", RELEASES)
def test_a_release_is_named_by_its_models_and_its_hardware(name: str) -> None:
    todo = resolved(name)
    hardware = todo.load.hardware
    assert name.endswith(f"_{hardware}")
    student = model_name(todo.distill.student)
    assert student.rpartition("_")[2] in name
    for serve in todo.serve:
        assert serve.startswith("vllm_") and serve.endswith(f"_{hardware}")
    if todo.teacher.model is not None:
        assert name.startswith(model_name(todo.teacher.model))
        assert todo.release.teacher == f"{model_name(todo.teacher.model)}_{hardware}"


# -- what they ask of a machine --------------------------------------------------------------


def header_plan(name: str) -> list[str]:
    """The words of the plan command in a serve recipe's header."""
    header = loader.find(name, "serve").read_text(encoding="utf-8").partition("\nkind: ")[0]
    text = re.sub(r"\\\n#", " ", header)
    found = re.search(r"^#\s+pilotage (plan .*)$", text, flags=re.MULTILINE)
    assert found is not None, name
    return shlex.split(found[1])


@pytest.mark.parametrize("name", sorted({*VLLM_SERVES} - {*APART}))
def test_engine_arguments_are_those_of_the_plan_in_the_header(name: str) -> None:
    words = header_plan(name)
    given = dict(zip(words[1::2], words[2::2], strict=True))
    serve = loader.load(name, "serve", ServeRecipe)
    args = serve.engine_args
    model, hardware = Path(given["--model"]).stem, given["--hardware"]
    assert (CHECKOUT / given["--model"]).is_file() and name.endswith(f"_{hardware}")
    assert [int(given[f"--{one}"]) for one in ("concurrency", "context", "tp")] == [
        args[one] for one in ("max-num-seqs", "max-model-len", "tensor-parallel-size")
    ]
    fit = fit_of(model, args, hardware, given.get("--format", "auto"))
    assert fit.engine_args == dict(list(args.items())[:5])


@pytest.mark.parametrize("name", APART)
def test_both_roles_have_the_arguments_of_the_plan_in_the_header(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(CHECKOUT)
    words = header_plan(name)
    given = dict(zip(words[1::2], words[2::2], strict=True))
    assert given["--serve"] == name and name.endswith(f"_{given['--hardware']}")
    document, status = planned_in_parts(given["--model"], name, hardware=[given["--hardware"]])
    assert status == 0
    serve = loader.load(name, "serve", ServeRecipe)
    assert serve.topology is not None
    (fit,) = document["fits"]
    for role in ROLES:
        args, found = engines_of(serve)[role], fit["roles"][role]
        assert (found["engine_args"], found["engines"]) == (args, serve.topology.engines(role))
        planned = fit_of(Path(given["--model"]).stem, args, given["--hardware"], "auto")
        assert planned.engine_args.items() <= args.items()
        assert found["per_gpu"]["floor_bytes"] == planned.floor.per_gpu.floor_bytes
    assert fit["gpus"] == gpus_of(serve.engine_args, serve.topology)


def test_the_disaggregated_case_decodes_what_the_colocated_one_serves() -> None:
    todo = resolved("qwen2_5_32b_disaggregated_nvidia_h20")
    colocated, apart = (todo.serve[one.serve] for one in todo.release.candidates)
    decode = engines_of(apart)["decode"]
    assert colocated.topology is None and colocated.engine_args.items() <= decode.items()
    assert [gpus_of(one.engine_args, one.topology) for one in (colocated, apart)] == [2, 3]


@pytest.mark.parametrize("name", RELEASES)
def test_every_candidate_fits_the_hardware_that_the_release_names(name: str) -> None:
    for candidate, fit in fits_of_release(name).items():
        budget = 0.9 * fit.machine.memory_bytes
        assert fit.floor.per_gpu.floor_bytes <= budget, candidate
        assert fit.max_concurrency >= fit.engine_args["max-num-seqs"], candidate


@pytest.mark.parametrize("name", RELEASES)
def test_the_longest_request_of_the_load_profile_fits_into_the_context(name: str) -> None:
    todo = resolved(name)
    longest = 0
    for one in todo.load.scenarios.values():
        assert one.output is not None
        outputs = one.output if isinstance(one.output, list) else [one.output]
        lengths = [length for length in outputs if isinstance(length, int)]
        assert lengths == outputs
        longest = max(longest, one.prefix + one.input + max(lengths))
    for candidate in todo.release.candidates:
        # A chat template adds its own words.
        for args in engines_of(todo.serve[candidate.serve]).values():
            assert longest + 128 <= args["max-model-len"]


@pytest.mark.parametrize("name", RELEASES)
def test_models_and_prompts_that_are_not_there_are_told_at_once(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    todo = resolve(name, prompts_file=str(tmp_path / "none.jsonl"))
    with pytest.raises(UserError) as raised:
        plan_release(todo)
    folders = {
        "distill.student.path": todo.distill.student,
        "teacher.model.path": todo.teacher.model,
    }
    told = [
        (str(source.path), f"--set {key}=FOLDER")
        for key, source in folders.items()
        if isinstance(source, PathModel)
    ]
    told.append((str(tmp_path / "none.jsonl"), ""))
    problems = raised.value.problems
    assert sorted(one.where for one in problems) == sorted(where for where, _ in told)
    for where, remedy in told:
        assert remedy in next(one.remedy for one in problems if one.where == where)


# -- the documentation -----------------------------------------------------------------------


def release_table() -> list[str]:
    """The table of docs/capacity.md: what the plan says of each candidate."""
    rows = [
        "| release | candidate | hardware | GPUs | format | sequences x tokens "
        "| floor of a GPU, GiB | may be taken | most sequences |",
        f"|{'---|' * 9}",
    ]
    for name in RELEASES:
        first = f"`{name}`"
        for candidate, fit in fits_of_release(name).items():
            args = fit.engine_args
            cells = [
                first,
                candidate,
                fit.machine.name,
                str(fit.tp),
                fit.format,
                f"{args['max-num-seqs']} x {args['max-model-len']}",
                f"{fit.floor.per_gpu.floor_bytes / GIB:.1f}",
                f"{0.9 * fit.machine.memory_bytes / GIB:.1f}",
                str(fit.max_concurrency),
            ]
            rows.append(f"| {' | '.join(cells)} |")
            first = ""
    return rows


def test_the_documentation_has_the_plans() -> None:
    text = (CHECKOUT / "docs" / "capacity.md").read_text(encoding="utf-8")
    assert "\n".join(release_table()) in text, "\n".join(release_table())
