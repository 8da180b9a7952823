"""Training goes on from a published draft: checked against the target, converted, taken over.

Two layouts are read: speculators' own, and plain EAGLE3 checkpoints as vLLM serves them
(`LlamaForCausalLMEagle3`, weights under `midlayer.`), which speculators' converter turns into its
own. What that converter (speculators 0.9) lets pass is closed here: tensors that it does not know
are dropped with a warning, missing ones are left at random, a missing `draft_vocab_size` becomes
32000, and `rope_parameters` are not read.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from registry.draft_binding import folder_problems, named_layer_ids, positive, section
from registry.errors import Problem, UserError
from registry.json_files import json_object
from tasks.engines.draft_model import Job, read_draft
from tasks.engines.draft_vocab import check_draft

REMEDY = "name a draft that was made for this target's own base model"


def check_start(published: Path, target: Path, job: Job) -> None:
    """Raise `UserError` with every reason why training cannot go on from `published`."""
    where = f"init_from: {published}"
    if not published.is_dir():
        raise UserError.at(where, "no such folder", "give the folder of a published draft")
    problems = [
        Problem(where, what, REMEDY)
        for what in folder_problems(published, target, embeddings=False)
    ]
    try:
        check_draft(published, target)
    except UserError as error:
        problems += [Problem(where, one.what, one.remedy) for one in error.problems]
    try:
        if not problems:
            problems = [Problem(where, what, REMEDY) for what in _unlike(published, target, job)]
    except UserError as error:
        problems = [Problem(where, f"{one.where}: {one.what}", REMEDY) for one in error.problems]
    if problems:
        raise UserError(problems)


def start_from(published: Path, target: Path, job: Job, scratch: Path, *, eager: bool) -> Any:
    """The published draft for `target`, float32, checked, with all of its weights.

    Its own copy of frozen embeddings is replaced by the target's. Raises `UserError`.
    """
    check_start(published, target, job)
    folder = published
    if "speculators_model_type" not in json_object(published / "config.json"):
        folder = _converted(published, target, scratch)
    try:
        draft = read_draft(folder, target, eager=eager)
    except ValueError as error:
        raise UserError.at(
            f"init_from: {published}", f"speculators cannot read it: {error}", REMEDY
        ) from None
    _check_taken_over(draft, published)
    if not draft.config.embed_requires_grad:
        _use_embeddings_of(target, draft)
    return draft


def _unlike(published: Path, target: Path, job: Job) -> Iterator[str]:
    config, given = json_object(published / "config.json"), json_object(target / "config.json")
    inner = section(config, "transformer_layer_config") or config
    text = section(given, "text_config") or given
    if inner["hidden_size"] != text["hidden_size"]:
        yield (
            f"hidden size: the draft works with {inner['hidden_size']} values, the target with "
            f"{text['hidden_size']}; speculators trains equal ones only"
        )
    layers = positive(inner, "num_hidden_layers", 1)
    if layers != int(job["num_layers"]):
        yield f"num_layers: the draft has {layers}, the recipe says {job['num_layers']}"
    size = config.get("draft_vocab_size") or inner["vocab_size"]
    if job.get("draft_vocab_size") not in (None, size):
        yield f"draft_vocab_size: the draft has {size}, the recipe says {job['draft_vocab_size']}"
    verifier = section(section(config, "speculators_config"), "verifier")
    made_for, served = _names(verifier), _names(given)
    if made_for and served and not set(made_for) & set(served):
        yield f"verifier: the draft was made for {', '.join(made_for)}, this is {served[0]}"
    if "speculators_model_type" in config and not verifier:
        yield "speculators_config: names no verifier, without which speculators does not read it"
    algorithm = config.get("speculators_model_type", "eagle3")
    if algorithm != "eagle3":
        yield f"is a {algorithm} speculator, no EAGLE3 draft"


def _names(config: dict[str, Any]) -> list[str]:
    """`architectures`, which some write as one name."""
    found = config.get("architectures") or []
    return [str(name) for name in found] if isinstance(found, list) else [str(found)]


def _converted(published: Path, target: Path, scratch: Path) -> Path:
    """A plain EAGLE3 checkpoint in speculators' format."""
    from speculators.convert.eagle.eagle3_converter import Eagle3Converter

    config = json_object(published / "config.json")
    config.setdefault("draft_vocab_size", config["vocab_size"])
    rope = config.get("rope_parameters") or {}
    if rope.get("rope_theta") is not None:
        config.setdefault("rope_theta", rope["rope_theta"])
    if rope.get("rope_type", "default") != "default":
        config.setdefault("rope_scaling", rope)
    told = scratch / "plain"
    told.mkdir()
    (told / "config.json").write_text(json.dumps(config), encoding="utf-8")
    for file in published.glob("*.safetensors*"):
        (told / file.name).symlink_to(file.resolve())
    inner = config.get("eagle_config") or {}
    Eagle3Converter().convert(
        told,
        scratch / "converted",
        str(target),
        validate=False,
        norm_before_residual=bool(config.get("norm_before_residual", False)),
        norm_before_fc=bool(inner.get("norm_before_fc", False)),
        eagle_aux_hidden_state_layer_ids=named_layer_ids(config),
    )
    return scratch / "converted"


def _check_taken_over(draft: Any, published: Path) -> None:
    """Every tensor of the checkpoint is in the model, and nothing trained is left at random."""
    import torch
    from safetensors.torch import load_file

    saved: dict[str, Any] = {}
    for file in sorted(published.glob("*.safetensors")):
        saved |= load_file(file)
    wanted = {name.replace("midlayer.", "layers.0."): tensor for name, tensor in saved.items()}
    own = draft.state_dict()
    half = torch.bfloat16
    numbers = {name: tensor for name, tensor in wanted.items() if tensor.is_floating_point()}
    broken = sorted(name for name, tensor in numbers.items() if not tensor.isfinite().all())
    lost = sorted(
        name
        for name, tensor in wanted.items()
        # A full vocabulary needs no map, and a checkpoint may bring one all the same.
        if (name in own or name not in ("d2t", "t2d"))
        and name not in broken
        and (
            name not in own
            or own[name].shape != tensor.shape
            or not torch.equal(own[name].to(half), tensor.to(half))
        )
    )
    trained = {name for name, parameter in draft.named_parameters() if parameter.requires_grad}
    absent = sorted(trained - set(wanted))
    problems = [
        Problem(f"init_from: {published}", f"{what}: {', '.join(names[:5])}", REMEDY)
        for what, names in (
            (f"{len(broken)} of its tensors hold NaN or infinity", broken),
            (f"{len(lost)} of its tensors are none of an EAGLE3 draft", lost),
            (f"{len(absent)} trained tensors are not in it", absent),
        )
        if names
    ]
    if problems:
        raise UserError(problems)


def _use_embeddings_of(target: Path, draft: Any) -> None:
    import torch
    from speculators.utils.loading import load_model_layers

    own = load_model_layers(["embed_tokens.weight"], str(target))["embed_tokens.weight"]
    with torch.no_grad():
        draft.embed_tokens.weight.copy_(own)
