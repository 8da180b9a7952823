"""The vocabulary map's rules: nine checkpoints, each with its verdict, in memory and on disk."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from registry.errors import UserError
from tasks.engines.draft_vocab import check_draft, end_of_turn_ids, first_fault

TARGET_VOCAB, DRAFT_VOCAB, END_OF_TURN = 16, 6, 15
DRAFTABLE = (0, 1, 3, 7, 8, 15)


def flags(*true: int) -> list[bool]:
    return [token in true for token in range(TARGET_VOCAB)]


# Source of the fault: https://github.com/NVIDIA-NeMo/Automodel/pull/2447
CHECKPOINTS: dict[str, tuple[dict[str, Any], str]] = {
    "good": ({"d2t": [0, 0, 1, 4, 4, 10], "t2d": flags(*DRAFTABLE)}, ""),
    "no_map": ({}, "reduced draft vocabulary without a mapping"),
    "zeros": (
        {"d2t": [0, 0, 0, 0, 0, 0], "t2d": flags(*DRAFTABLE)},
        "d2t and t2d disagree: draft id 2 -> 2 by d2t, -> 3 by t2d",
    ),
    "absolute": (
        {"d2t": [0, 1, 3, 7, 8, 15], "t2d": flags(*DRAFTABLE)},
        "target id 20 outside 0..15: draft id 5 -> target id 20",
    ),
    "out_of_range": (
        {"d2t": [0, 0, 1, 4, 4, 11], "t2d": flags(*DRAFTABLE)},
        "target id 16 outside 0..15",
    ),
    "not_increasing": (
        {"d2t": [0, 0, 1, 4, 3, 10], "t2d": flags(*DRAFTABLE)},
        "target ids repeat or are out of order: draft id 3 -> 7, draft id 4 -> 7",
    ),
    "mask_disagrees": (
        {"d2t": [0, 0, 1, 4, 4, 10], "t2d": flags(0, 1, 3, 7, 9, 15)},
        "d2t and t2d disagree: draft id 4 -> 8 by d2t, -> 9 by t2d",
    ),
    "stop_token_lost": (
        {"d2t": [0, 0, 1, 4, 4, 4], "t2d": flags(0, 1, 3, 7, 8, 9)},
        "end-of-turn token 15 cannot be drafted",
    ),
    "full_vocab": ({"draft_vocab_size": TARGET_VOCAB}, ""),
    # Beyond the case: half a map, a mask with one more token, tables of another vocabulary.
    "only_d2t": ({"d2t": [0, 0, 1, 4, 4, 10]}, "without a mapping: no t2d"),
    "mask_longer": (
        {"d2t": [0, 0, 1, 4, 4, 10], "t2d": flags(0, 1, 3, 7, 8, 14, 15)},
        "d2t and t2d disagree: draft id 5 -> 15 by d2t, -> 14 by t2d",
    ),
    "other_vocabulary": ({"d2t": [0], "t2d": flags(0)}, "d2t has 1 entries and t2d 16"),
}


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_rules(name: str) -> None:
    checkpoint, verdict = CHECKPOINTS[name]
    fault = first_fault(
        checkpoint.get("d2t"),
        checkpoint.get("t2d"),
        draft_vocab_size=checkpoint.get("draft_vocab_size", DRAFT_VOCAB),
        target_vocab_size=TARGET_VOCAB,
        end_of_turn_ids=[END_OF_TURN],
    )
    assert (verdict in (fault or "")) if verdict else fault is None


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_map_is_read_from_the_weights(name: str, tmp_path: Path) -> None:
    checkpoint, verdict = CHECKPOINTS[name]
    draft, target = folders(tmp_path, checkpoint)
    # A right map in a side file must not help: the server never looks at it.
    good = CHECKPOINTS["good"][0]
    np.save(draft / "d2t.npy", np.array(good["d2t"]))
    if not verdict:
        check_draft(draft, target)
        return
    with pytest.raises(UserError) as caught:
        check_draft(draft, target)
    assert verdict in str(caught.value)
    assert str(draft) in str(caught.value)


def test_one_of_several_end_tokens_is_enough() -> None:
    good = CHECKPOINTS["good"][0]
    fault = first_fault(
        good["d2t"],
        good["t2d"],
        draft_vocab_size=DRAFT_VOCAB,
        target_vocab_size=TARGET_VOCAB,
        end_of_turn_ids=[14, 15],
    )
    assert fault is None


def test_folder_without_weights_is_refused(tmp_path: Path) -> None:
    draft, target = folders(tmp_path, {})
    (draft / "model.safetensors").unlink()
    with pytest.raises(UserError, match=r"no \*\.safetensors"):
        check_draft(draft, target)


def test_generation_config_wins(tmp_path: Path) -> None:
    _, target = folders(tmp_path, {})
    (target / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 3]}))
    assert end_of_turn_ids(target) == [3, 7]


def folders(root: Path, checkpoint: dict[str, Any]) -> tuple[Path, Path]:
    """A draft with the checkpoint's tables among its weights, and its target's configuration."""
    draft, target = root / "draft", root / "target"
    draft.mkdir()
    target.mkdir()
    tensors = {"fc.weight": np.zeros((2, 6), dtype=np.float32)}
    if "d2t" in checkpoint:
        tensors["d2t"] = np.array(checkpoint["d2t"], dtype=np.int64)
    if "t2d" in checkpoint:
        tensors["t2d"] = np.array(checkpoint["t2d"], dtype=bool)
    save_file(tensors, draft / "model.safetensors")
    size = checkpoint.get("draft_vocab_size", DRAFT_VOCAB)
    (draft / "config.json").write_text(json.dumps({"draft_vocab_size": size}))
    (target / "config.json").write_text(
        json.dumps({"vocab_size": TARGET_VOCAB, "eos_token_id": END_OF_TURN})
    )
    return draft, target
