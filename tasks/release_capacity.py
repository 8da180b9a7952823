"""The plan inside of a release: what is certain about a candidate before anything of it is started.

Twice: from the student's configuration and the quantize recipe before a bit of the candidate is
made, and from the bundle's own files before its server starts. The decision is
`registry.candidate_memory`'s.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil

from recipes import loader
from recipes.schema import PathModel
from registry.bundle import Bundle
from registry.candidate_memory import MemoryPlan, not_planned
from registry.checkpoint_weights import CONFIG, config_of, weights_of_checkpoint
from registry.errors import UserError
from registry.json_files import json_object
from registry.machines import Machine
from registry.memory_floor import floor_of
from registry.model_shapes import shape_of
from registry.provenance import engine_version, hardware
from registry.role_plans import served_plan
from registry.shape_parts import ModelShape
from registry.store import Absent
from registry.weight_formats import FORMATS
from tasks.capacity_inputs import machine_of
from tasks.engines.quantization_recipe import groups_of, modifiers, pruned, quantizes, schemes_of
from tasks.planning import CandidatePlan, ReleasePlan
from tasks.stages import store

HERE = "this machine"
VLLM = "vllm"
"""The engine whose blocks and kernels are known here."""

_MIB = 1 << 20


# -- the machine -----------------------------------------------------------------------------


def release_machine(name: str) -> Machine:
    """The hardware that a release is for: the file that its load profile names, else this machine.

    Where the file describes a machine like this one, the larger memory of the two counts: what
    runs here is not refused because of a file. Raises `UserError` for a file that cannot be read.
    """
    here = this_machine()
    if name not in loader.shipped("hardware"):
        return here
    machine = machine_of(name)
    if is_here(machine, here):
        return replace(machine, memory_bytes=max(machine.memory_bytes, here.memory_bytes))
    return machine


def is_here(machine: Machine, here: Machine) -> bool:
    """Whether a hardware file describes the kind of machine that this process runs on."""
    return machine.is_cpu == here.is_cpu and (machine.is_cpu or machine.title == here.title)


def this_machine() -> Machine:
    """Its largest GPU, or the CPU with all memory and swap: more than that nothing can have.

    The capability is that of the shipped hardware file which calls itself as `nvidia-smi` does.
    """
    found = [gpu for text in hardware()["gpus"] if (gpu := _gpu(text)) is not None]
    if not found:
        size = psutil.virtual_memory().total + psutil.swap_memory().total
        return Machine(HERE, HERE, size)
    title, size = max(found, key=lambda one: one[1])
    known = [machine_of(name) for name in loader.shipped("hardware")]
    like = next((one for one in known if one.title == title), None)
    capability = like.capability if like is not None else None
    return Machine(HERE, title, size, accelerators=len(found), capability=capability)


def _gpu(text: str) -> tuple[str, int] | None:
    """Name and bytes from a line of `nvidia-smi`: `NVIDIA L20, 46068 MiB, 550.54`."""
    found = re.fullmatch(r"(.+?), (\d+) MiB, .*", text)
    return (found[1], int(found[2]) * _MIB) if found else None


# -- before its server starts ----------------------------------------------------------------


def plan_of_bundle(bundle: Bundle, hardware_name: str) -> MemoryPlan:
    """From the files of a bundle that lies here, for the hardware of its load profile."""
    if bundle.engine != VLLM:
        return not_planned(bundle.name, f"{bundle.engine} is not planned")
    try:
        machine = release_machine(hardware_name)
        shape = _shape(bundle.target.path)
        draft = _shape(bundle.draft.path) if bundle.draft is not None else None
    except UserError as error:
        return _unread(bundle.name, error)
    made = served_plan(
        bundle.name,
        shape,
        draft,
        bundle.engine_args,
        bundle.env,
        bundle.topology,
        machine,
        bundle.engine_version,
    )
    return with_files(made, bundle.target.path, shape)


def with_files(made: MemoryPlan, folder: Path, shape: ModelShape) -> MemoryPlan:
    """The plan, and beside its weights those that the files of the target hold."""
    if made.memory is None:
        return made
    try:
        found = weights_of_checkpoint(folder)
    except UserError:
        # The engine words it better, when it cannot load them.
        return made
    if not found.exact:
        return made
    counted = floor_of(shape, concurrency=1, context=1).total.weights_bytes
    memory = made.memory.model_copy(
        update={"files_counted_bytes": counted, "files_bytes": found.loaded_bytes}
    )
    return made.model_copy(update={"memory": memory})


def _shape(folder: Path) -> ModelShape:
    return shape_of(config_of(folder), str(folder / CONFIG))


def _unread(name: str, error: UserError) -> MemoryPlan:
    problem = error.problems[0]
    where = Path(problem.where.split(":")[0]).name
    return not_planned(name, f"{where}: {problem.what}")


# -- before anything of it is made -----------------------------------------------------------


def plan_before(todo: ReleasePlan, wanted: CandidatePlan) -> MemoryPlan:
    """From the student and the recipes: what the candidate will be, without its draft.

    A lower bound: what a recipe leaves in 16 bit, and a draft, only add to it. What is quantized
    already has its own configuration.
    """
    recipes = todo.resolved
    serve = recipes.serve[wanted.candidate.serve]
    if serve.engine != VLLM:
        return not_planned(wanted.name, f"{serve.engine} is not planned")
    try:
        config = student_config(todo)
        if config is None:
            return not_planned(wanted.name, "the student's configuration is not there yet")
        recipe = recipes.quantize[wanted.candidate.quantize].recipe
        made = quantized_config(wanted)
        if made is not None:
            config = made
        elif recipe is not None:
            section = quantization_config(recipe, shape_of(config, CONFIG))
            if section is None:
                return not_planned(wanted.name, "what its quantize recipe makes is not known")
            config = {**config, "quantization_config": section}
        shape = shape_of(config, CONFIG)
        machine = release_machine(recipes.load.hardware)
    except UserError as error:
        return _unread(wanted.name, error)
    return served_plan(
        wanted.name,
        shape,
        None,
        serve.engine_args,
        serve.env,
        serve.topology,
        machine,
        engine_version(),
    )


def refused_before(todo: ReleasePlan, wanted: CandidatePlan) -> str:
    """Why nothing of a candidate has to be made; empty where that is not certain.

    The reference candidate is made all the same: the others are compared with its answers, which
    another engine may give.
    """
    if wanted.name == todo.resolved.release.reference_candidate:
        return ""
    return certain_refusal(todo, wanted)


def certain_refusal(todo: ReleasePlan, wanted: CandidatePlan) -> str:
    """Why the hardware cannot serve a candidate; empty where it has, or where that is open."""
    why = plan_before(todo, wanted).refusal
    return "" if why and proved_here(todo, wanted) else why


def proved_here(todo: ReleasePlan, wanted: CandidatePlan) -> bool:
    """Whether it has been served on such a machine as the release is for: better than any plan."""
    try:
        machine = release_machine(todo.resolved.load.hardware)
        summary = store().find(wanted.serving).summary
    except (Absent, UserError):
        return False
    return bool(summary["feasible"]) and is_here(machine, this_machine())


def student_config(todo: ReleasePlan) -> dict[str, Any] | None:
    """The student's configuration, from its base: training changes no shape."""
    source = todo.resolved.distill.student
    if isinstance(source, PathModel):
        return json_object(Path(source.path) / CONFIG)
    path = store().folder(todo.student_base) / "files" / CONFIG
    return json_object(path) if path.is_file() else None


def quantized_config(wanted: CandidatePlan) -> dict[str, Any] | None:
    """Of the quantized student, where it lies here."""
    if wanted.quantize is None:
        return None
    path = store().folder(wanted.quantize) / "files" / wanted.below / CONFIG
    return json_object(path) if path.is_file() else None


_WEIGHTS: dict[str, dict[str, Any]] = {
    "FP8_DYNAMIC": {"num_bits": 8, "type": "float", "strategy": "channel"},
    "FP8": {"num_bits": 8, "type": "float", "strategy": "tensor"},
    "FP8_BLOCK": {
        "num_bits": 8,
        "type": "float",
        "strategy": "block",
        "block_structure": [128, 128],
    },
    "W8A8": {"num_bits": 8, "type": "int", "strategy": "channel"},
    "INT8": {"num_bits": 8, "type": "int", "strategy": "channel"},
    "W8A16": {"num_bits": 8, "type": "int", "strategy": "channel"},
    "W4A16": {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 128},
    "NVFP4": {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16},
    "MXFP4": {"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32},
}
"""Schemes of compressed-tensors by name, their weights (its own table needs torch)."""

_SIXTEEN_BIT_INPUTS = {"W8A16", "W4A16"}


def quantization_config(recipe: Mapping[str, Any], shape: ModelShape) -> dict[str, Any] | None:
    """The section that a quantizer will write into config.json; None where that is not known.

    `group_size` is the recipe's own; of `auto` the largest that divides every matrix of `shape`.
    """
    quantizing = [args for _, args in modifiers(recipe) if quantizes(args)]
    if len(quantizing) != 1 or pruned(recipe):
        return None
    args = quantizing[0]
    groups = dict(_groups(args, _largest_group(shape)))
    if not groups or None in groups.values():
        return None
    ignore = args.get("ignore") or []
    section: dict[str, Any] = {
        "quant_method": "compressed-tensors",
        "config_groups": groups,
        "ignore": ["lm_head"] if ignore == "auto" else ignore,
    }
    if args.get("kv_cache_scheme"):
        section["kv_cache_scheme"] = args["kv_cache_scheme"]
    return section


def _largest_group(shape: ModelShape) -> int:
    widths = (weight.columns for weight in shape.weights if weight.kind == "linear")
    return FORMATS["w4a16"].fitted(widths).group


def _groups(args: Mapping[str, Any], largest: int) -> Iterator[tuple[str, dict[str, Any] | None]]:
    for name, targets in (schemes_of(args) or {}).items():
        weights = _WEIGHTS.get(name.upper())
        if weights is None:
            yield name, None
            continue
        inputs = None if name.upper() in _SIXTEEN_BIT_INPUTS else {"num_bits": weights["num_bits"]}
        if inputs is not None and name.upper() == "FP8":
            inputs["dynamic"] = False
        yield name, {"targets": targets, "weights": weights, "input_activations": inputs}
    for name, group in groups_of(args).items():
        weights = dict(group.get("weights") or {})
        if weights.get("group_size") == "auto":
            weights["group_size"] = largest
        yield name, {**group, "weights": weights} if weights else None
