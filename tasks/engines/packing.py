"""Several conversations in one row, none of which sees another.

TRL's best-fit-decreasing packing joins whole examples up to a length. In a packed row the position
ids begin at 0 with every example and no attention mask is given: from that transformers 5.17 makes
a block-diagonal mask (`masking_utils.find_packed_sequence_indices`), row by row. It does so only
without a cache, and flash attention only for a batch of one row; so rows are laid end to end for
flash attention, with the sequence lengths that its variable-length kernel reads. Whether a model
really keeps examples apart is asked of the model itself, once, before training.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from registry.errors import Problem, StageFailed
from tasks.engines.loss_mask import IGNORE, Example, shifted

LEAK = 1e-3
"""Largest difference of a packed example's logits from its own alone, relative to their spread, in
float32. Measured 2e-6; a leaking mask gives 0.1 and more."""

LEAK_BFLOAT16 = 0.1
"""The same in bfloat16, where another length alone changes the order of additions."""

Row = Mapping[str, list[int]]
"""`input_ids`, `labels` and `seq_lengths` (tokens of each example in it)."""


def packed(examples: Sequence[Example], max_length: int) -> list[dict[str, list[int]]]:
    """Rows of at most `max_length` tokens; no example is cut, none may be longer."""
    from datasets import Dataset, disable_progress_bars
    from trl import pack_dataset

    disable_progress_bars()
    table = Dataset.from_dict(
        {
            "input_ids": [example.input_ids for example in examples],
            "labels": [example.labels for example in examples],
        }
    )
    rows: list[dict[str, list[int]]] = pack_dataset(table, max_length, "bfd").to_list()
    return rows


def batch(rows: Sequence[Row], pad_id: int) -> dict[str, list[list[int]]]:
    """`input_ids`, `labels`, `position_ids`, each rows x longest row, filled on the right.

    The filling is a sequence of its own. No example's first token is a target, so nothing is
    predicted across a boundary.
    """
    width = max(len(row["input_ids"]) for row in rows)
    found: dict[str, list[list[int]]] = {"input_ids": [], "labels": [], "position_ids": []}
    for row in rows:
        fill = width - len(row["input_ids"])
        labels, positions = list(row["labels"]), list[int]()
        for length in row["seq_lengths"]:
            labels[len(positions)] = IGNORE
            positions += range(length)
        found["input_ids"].append([*row["input_ids"], *[pad_id] * fill])
        found["labels"].append([*labels, *[IGNORE] * fill])
        found["position_ids"].append([*positions, *range(fill)])
    return found


def tensors(
    rows: Sequence[Row], pad_id: int, *, end_to_end: bool, partial: bool = False
) -> dict[str, Any]:
    """`batch` as int64 tensors; `end_to_end` in one row, as flash attention wants it.

    `shift_labels` and `partial` as in `loss_mask.tensors`.
    """
    import torch

    if not end_to_end:
        filled = {name: torch.tensor(values) for name, values in batch(rows, pad_id).items()}
        return shifted(filled, partial=partial)
    from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

    collate = DataCollatorForLanguageModeling(pad_token_id=pad_id, padding_free=True)
    laid: dict[str, Any] = collate([dict(row) for row in rows])
    return shifted(laid, partial=partial)


def check_apart(
    model: Any, rows: Sequence[Row], pad_id: int, *, end_to_end: bool, allowed: float = LEAK
) -> float:
    """The largest relative difference between an example alone and behind another one.

    `allowed` is `LEAK` or `LEAK_BFLOAT16`. Raises `StageFailed` where the model's attention
    reaches over the boundary.
    """
    import torch

    row = next((row for row in rows if len(row["seq_lengths"]) > 1), None)
    if row is None:
        return 0.0
    first, second = row["seq_lengths"][:2]
    ids = row["input_ids"][: first + second]
    together = tensors(
        [{"input_ids": ids, "labels": ids, "seq_lengths": [first, second]}],
        pad_id,
        end_to_end=end_to_end,
    )
    del together["labels"], together["shift_labels"]
    device = model.device
    was_training = model.training
    model.eval()
    with torch.inference_mode():
        given = {
            name: value.to(device) if torch.is_tensor(value) else value
            for name, value in together.items()
        }
        behind = model(**given, use_cache=False).logits[0, first:].float()
        alone = model(input_ids=torch.tensor([ids[first:]], device=device), use_cache=False)
        wanted = alone.logits[0].float()
    model.train(was_training)
    difference = float((behind - wanted).abs().max() / wanted.std())
    if not difference <= allowed:
        raise StageFailed(
            Problem(
                "packing",
                f"this model's attention reaches from one packed row into the next: logits move "
                f"by {difference:.3g} standard deviations, {allowed:g} is rounding",
                "leave `packing` out, or use another `attention`",
            )
        )
    return difference
