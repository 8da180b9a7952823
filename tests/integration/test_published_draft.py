"""Training from a published draft: whose it may be, and that its weights are really taken over."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from registry.errors import UserError
from tasks.engines.draft_model import draft_targets, new_draft, read_draft, save
from tasks.engines.published_draft import check_start, start_from
from tasks.engines.speculators_train import train_draft
from tests.integration.draft_target import job, make_target, plain_eagle3


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_target(tmp_path_factory.mktemp("target"), steps=1)


@pytest.fixture(scope="module")
def drafted(target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A draft of 384 tokens as speculators saves it. What it has learned does not matter here."""
    import torch

    asked = {**start_job(target), "draft_vocab_size": 384, "num_speculative_tokens": 3}
    frequencies = Counter({token: token for token in range(1, 512)})
    draft = new_draft(asked, [1, 2, 3], frequencies, [1], eager=True)
    folder = tmp_path_factory.mktemp("draft") / "published"
    save(draft, torch.bfloat16, folder)
    return folder


def start_job(target: Path) -> dict[str, Any]:
    return {"target": str(target), "num_layers": 1, "draft_vocab_size": None}


@pytest.mark.parametrize("layout", ["speculators", "plain"])
def test_a_published_draft_is_taken_over(
    drafted: Path, target: Path, tmp_path: Path, layout: str
) -> None:
    import torch
    from safetensors.torch import load_file

    published = drafted
    if layout == "plain":
        published = plain_eagle3(published, tmp_path / "published")
    draft = start_from(published, target, start_job(target), tmp_path, eager=True)
    saved, own = load_file(drafted / "model.safetensors"), draft.state_dict()
    for name, tensor in saved.items():
        assert torch.equal(own[name].to(tensor.dtype), tensor), name
    assert own["fc.weight"].dtype == torch.float32
    assert draft.config.norm_before_residual is True
    assert draft_targets(draft) == draft_targets(read_draft(drafted, target))
    trained_ones = {name for name, p in draft.named_parameters() if p.requires_grad}
    assert "fc.weight" in trained_ones
    assert not {"lm_head.weight", "embed_tokens.weight", "verifier_lm_head.weight"} & trained_ones


def test_another_students_embeddings_are_replaced(
    drafted: Path, target: Path, tmp_path: Path
) -> None:
    """A draft of the base model for a student whose embeddings were trained on."""
    import torch
    from safetensors.torch import load_file, save_file

    published = tmp_path / "published"
    shutil.copytree(drafted, published)
    weights = load_file(published / "model.safetensors")
    right = weights["embed_tokens.weight"]
    save_file({**weights, "embed_tokens.weight": right + 1}, published / "model.safetensors")
    draft = start_from(published, target, start_job(target), tmp_path, eager=True)
    assert torch.equal(draft.embed_tokens.weight.to(right.dtype), right)


def edited(published: Path, folder: Path, **changes: Any) -> Path:
    shutil.copytree(published, folder)
    config = json.loads((folder / "config.json").read_text())
    inner = {name: value for name, value in changes.items() if name in ("hidden_size",)}
    config["transformer_layer_config"] |= inner
    config |= {name: value for name, value in changes.items() if name not in inner}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize(
    ("changes", "asked", "told"),
    [
        ({"hidden_size": 64}, {}, "hidden size: the draft reads 64, the target has 128"),
        (
            {"eagle_aux_hidden_state_layer_ids": [2, 16, 29]},
            {},
            r"layer ids: the draft reads \[2, 16, 29\], the target has layers 0 to 3",
        ),
        ({}, {"num_layers": 2}, "num_layers: the draft has 1, the recipe says 2"),
        ({}, {"draft_vocab_size": 100}, "draft_vocab_size: the draft has 384, the recipe says 100"),
        (
            {"speculators_config": {"verifier": {"architectures": ["Qwen3ForCausalLM"]}}},
            {},
            "verifier: the draft was made for Qwen3ForCausalLM, this is LlamaForCausalLM",
        ),
        ({"speculators_model_type": "dflash"}, {}, "is a dflash speculator, no EAGLE3 draft"),
    ],
)
def test_a_draft_of_another_model_is_refused(
    drafted: Path,
    target: Path,
    tmp_path: Path,
    changes: dict[str, Any],
    asked: dict[str, Any],
    told: str,
) -> None:
    published = edited(drafted, tmp_path / "published", **changes)
    with pytest.raises(UserError, match=told) as caught:
        start_from(published, target, start_job(target) | asked, tmp_path, eager=True)
    assert caught.value.problems[0].where == f"init_from: {published}"


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"eagle_config": [1], "eagle_aux_hidden_state_layer_ids": None}, "eagle_config is"),
        ({"transformer_layer_config": []}, "transformer_layer_config is"),
        ({"transformer_layer_config": None}, "vocab_size is None"),
        ({"draft_vocab_size": "384"}, "draft_vocab_size is '384'"),
        ({"eagle_aux_hidden_state_layer_ids": "abc"}, "'abc', not a list"),
        ({"eagle_aux_hidden_state_layer_ids": [True, 2, 3]}, r"the draft reads \[True, 2, 3\]"),
        ({"speculators_config": None}, "names no verifier"),
        ({"speculators_config": {"verifier": "x"}}, "verifier is 'x'"),
        ({"speculators_config": {"verifier": {"architectures": [1]}}}, "made for 1, this is"),
        (
            {"speculators_config": {"verifier": {"architectures": "LlamaForCausalLM"}}},
            "speculators cannot read it",
        ),
    ],
)
def test_a_config_of_somebody_elses_making_is_a_mistake_and_no_crash(
    drafted: Path, target: Path, tmp_path: Path, changes: dict[str, Any], told: str
) -> None:
    published = tmp_path / "published"
    shutil.copytree(drafted, published)
    config = json.loads((published / "config.json").read_text())
    (published / "config.json").write_text(json.dumps(config | changes))
    with pytest.raises(UserError, match=told):
        start_from(published, target, start_job(target), tmp_path, eager=True)


@pytest.mark.parametrize("kept", [0, 1000, -5000])
def test_weights_that_were_cut_are_a_mistake_and_no_crash(
    drafted: Path, target: Path, tmp_path: Path, kept: int
) -> None:
    published = tmp_path / "published"
    shutil.copytree(drafted, published)
    file = published / "model.safetensors"
    file.write_bytes(file.read_bytes()[:kept])
    with pytest.raises(UserError, match="cannot be read as safetensors"):
        check_start(published, target, start_job(target))


def test_nan_and_a_map_of_no_integers_are_told(drafted: Path, target: Path, tmp_path: Path) -> None:
    import torch
    from safetensors.torch import load_file, save_file

    published = tmp_path / "published"
    shutil.copytree(drafted, published)
    weights = load_file(published / "model.safetensors")
    half = {**weights, "d2t": weights["d2t"].to(torch.bfloat16)}
    save_file(half, published / "model.safetensors")
    with pytest.raises(UserError, match="d2t holds BF16, not integers"):
        check_start(published, target, start_job(target))
    weights["norm.weight"][3] = float("nan")
    save_file(weights, published / "model.safetensors")
    with pytest.raises(UserError, match=r"1 of its tensors hold NaN or infinity: norm\.weight"):
        start_from(published, target, start_job(target), tmp_path, eager=True)


def test_a_wrong_map_is_refused_before_anything_is_trained(
    drafted: Path, target: Path, tmp_path: Path
) -> None:
    from safetensors.torch import load_file, save_file

    published = tmp_path / "published"
    shutil.copytree(drafted, published)
    weights = load_file(published / "model.safetensors")
    save_file({**weights, "d2t": weights["d2t"] * 0}, published / "model.safetensors")
    asked = job(target, tmp_path, init_from=str(published), draft_vocab_size=None)
    with pytest.raises(UserError, match="d2t and t2d disagree"):
        train_draft(asked)
    assert not list(Path(asked["out_dir"]).iterdir())


@pytest.mark.parametrize(
    ("renamed", "told"),
    [
        ({"fc.weight": "fc2.weight"}, "1 of its tensors are none of an EAGLE3 draft: fc2.weight"),
        ({"norm.weight": None}, "1 trained tensors are not in it: norm.weight"),
    ],
)
def test_weights_that_were_not_taken_over_are_named(
    drafted: Path,
    target: Path,
    tmp_path: Path,
    renamed: dict[str, str | None],
    told: str,
) -> None:
    """speculators' converter only warns of both, and trains on from random numbers."""
    from safetensors.torch import load_file, save_file

    published = plain_eagle3(drafted, tmp_path / "published")
    weights = load_file(published / "model.safetensors")
    for old, new in renamed.items():
        tensor = weights.pop(old)
        if new is not None:
            weights[new] = tensor
    save_file(weights, published / "model.safetensors")
    with pytest.raises(UserError, match=told):
        start_from(published, target, start_job(target), tmp_path, eager=True)
