"""The rules a draft's vocabulary map must keep, read from the weights that the server loads.

A draft with a reduced vocabulary numbers its tokens 0..D-1 and carries two tables beside its
weights: `d2t` (D integers, `target_id = draft_id + d2t[draft_id]`) and `t2d` (one boolean per
target token: can it be drafted). A server without a right table takes draft ids for the first
ids of the target's vocabulary: nothing fails, nearly every proposal is rejected, serving is only
slower. Source of the rules: `vllm/model_executor/models/llama_eagle3.py` (`compute_logits`,
`load_weights`) and `speculators/train/vocab_mapping.py`.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import zip_longest
from pathlib import Path

from registry.draft_binding import positive, section
from registry.errors import UserError
from registry.json_files import json_object

REMEDY = "train the draft again; a draft with the target's full vocabulary needs no map"

_WHOLE = ("BOOL", "I8", "U8", "I16", "U16", "I32", "U32", "I64", "U64")
"""safetensors' names of the types that a table may have."""


def first_fault(
    d2t: Sequence[int] | None,
    t2d: Sequence[bool] | None,
    *,
    draft_vocab_size: int,
    target_vocab_size: int,
    end_of_turn_ids: Collection[int],
) -> str | None:
    """The first rule that the map breaks, with the first wrong pair; None when all hold.

    `d2t` has `draft_vocab_size` offsets and `t2d` has `target_vocab_size` flags; None stands for
    a table that the checkpoint does not have. At least one of `end_of_turn_ids` must be
    draftable: a model may list ids that its chat template never uses.
    """
    if d2t is None and t2d is None and draft_vocab_size == target_vocab_size:
        return None
    if d2t is None or t2d is None:
        missing = " and ".join(n for n, t in (("d2t", d2t), ("t2d", t2d)) if t is None)
        return f"reduced draft vocabulary without a mapping: no {missing} in the weights"
    if (len(d2t), len(t2d)) != (draft_vocab_size, target_vocab_size):
        return (
            f"d2t has {len(d2t)} entries and t2d {len(t2d)}, "
            f"the vocabularies have {draft_vocab_size} (draft) and {target_vocab_size} (target)"
        )
    targets = [draft_id + offset for draft_id, offset in enumerate(d2t)]
    for draft_id, target in enumerate(targets):
        if not 0 <= target < target_vocab_size:
            return (
                f"target id {target} outside 0..{target_vocab_size - 1}: "
                f"draft id {draft_id} -> target id {target}"
            )
    for draft_id in range(1, len(targets)):
        if targets[draft_id] <= targets[draft_id - 1]:
            return (
                "target ids repeat or are out of order: "
                f"draft id {draft_id - 1} -> {targets[draft_id - 1]}, "
                f"draft id {draft_id} -> {targets[draft_id]}"
            )
    draftable = [target for target, flag in enumerate(t2d) if flag]
    if targets != draftable:
        both = list(zip_longest(targets, draftable, fillvalue="nothing"))
        first = next(i for i, (by_d2t, by_t2d) in enumerate(both) if by_d2t != by_t2d)
        by_d2t, by_t2d = both[first]
        return f"d2t and t2d disagree: draft id {first} -> {by_d2t} by d2t, -> {by_t2d} by t2d"
    if not set(end_of_turn_ids) & set(targets):
        ids = ", ".join(str(token) for token in sorted(end_of_turn_ids))
        return f"end-of-turn token {ids} cannot be drafted"
    return None


def read_map(draft: Path) -> tuple[list[int] | None, list[bool] | None]:
    """`d2t` and `t2d` as they stand in the safetensors files of `draft`; None where absent.

    Raises `UserError` when the folder has no safetensors file, or one that cannot be read, and for
    a table of anything but integers.
    """
    from safetensors import SafetensorError, safe_open

    files = sorted(draft.glob("*.safetensors"))
    if not files:
        raise UserError.at(draft, "no *.safetensors file", "give the folder of a trained draft")
    tables: dict[str, list[int]] = {}
    for file in files:
        try:
            with safe_open(file, framework="np") as tensors:
                for name in tensors.keys():  # noqa: SIM118 - not a dict
                    # vLLM matches by substring, whatever module the buffer hangs on.
                    table = next((t for t in ("d2t", "t2d") if t in name), None)
                    if table is None:
                        continue
                    kind = tensors.get_slice(name).get_dtype()
                    if kind not in _WHOLE:
                        raise UserError.at(file, f"{name} holds {kind}, not integers", REMEDY)
                    tables[table] = tensors.get_tensor(name).tolist()
        except (OSError, SafetensorError) as error:
            raise UserError.at(file, f"cannot be read as safetensors: {error}") from None
    d2t, t2d = tables.get("d2t"), tables.get("t2d")
    return d2t, None if t2d is None else [bool(flag) for flag in t2d]


def check_draft(draft: Path, target: Path) -> None:
    """Check the map of the draft in `draft` against the target in `target`.

    Both are folders in Hugging Face format, the draft in speculators' or EAGLE's own config
    layout. Raises `UserError` with the rule that failed and the first wrong pair.
    """
    target_config = json_object(target / "config.json")
    target_vocab_size = positive(
        section(target_config, "text_config") or target_config, "vocab_size"
    )
    draft_config = json_object(draft / "config.json")
    draft_vocab_size = positive(draft_config, "draft_vocab_size", target_vocab_size)
    d2t, t2d = read_map(draft)
    fault = first_fault(
        d2t,
        t2d,
        draft_vocab_size=draft_vocab_size,
        target_vocab_size=target_vocab_size,
        end_of_turn_ids=end_of_turn_ids(target),
    )
    if fault:
        raise UserError.at(draft, fault, REMEDY)


def end_of_turn_ids(target: Path) -> list[int]:
    """The token ids at which the target's generation ends, ascending.

    `generation_config.json` wins over `config.json`, as in transformers and vLLM. Raises
    `UserError` when neither names one.
    """
    for name in ("generation_config.json", "config.json"):
        path = target / name
        found = json_object(path).get("eos_token_id") if path.exists() else None
        if found is not None:
            return sorted(found) if isinstance(found, list) else [int(found)]
    raise UserError.at(target, "no eos_token_id in generation_config.json or config.json")
