"""An EAGLE3 draft as speculators builds, reads and saves it."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from registry.errors import UserError

Job = dict[str, Any]


def new_draft(
    job: Job,
    layer_ids: list[int],
    frequencies: Counter[int],
    end_ids: list[int],
    *,
    eager: bool,
) -> Any:
    """speculators' Eagle3 draft model, fresh, float32, with the target's embeddings and head.

    `eager`: without flex attention, which is slow where it is not compiled.
    """
    import torch
    from speculators.models.eagle3 import Eagle3DraftModel
    from speculators.train.cli import create_transformer_layer_config
    from speculators.train.vocab_mapping import build_vocab_mappings_from_distribution

    layers = int(job["num_layers"])
    config = create_transformer_layer_config(
        verifier_name_or_path=job["target"],
        num_layers=layers,
        draft_arch="llama",
        hidden_act=None,
        sliding_window=0,
        full_attention_indices=list(range(layers)),
    )
    config.sliding_window = None
    size = int(job["draft_vocab_size"] or config.vocab_size)
    if size > config.vocab_size:
        raise UserError.at(
            "draft_vocab_size", f"{size} is more than the target's {config.vocab_size} tokens"
        )
    d2t = t2d = None
    if size < config.vocab_size:
        counts = dict(frequencies)
        # A draft that cannot propose the end of a turn loses a step at every answer's end.
        counts |= {token: 1 + max(counts.values()) for token in end_ids}
        d2t, t2d = build_vocab_mappings_from_distribution(counts, size, config.vocab_size)
    draft = Eagle3DraftModel.from_training_args(
        verifier_config=config,
        t2d=t2d,
        d2t=d2t,
        target_layer_ids=layer_ids,
        verifier_name_or_path=job["target"],
        draft_vocab_size=size,
        norm_before_residual=True,
        ttt_steps=int(job["num_speculative_tokens"]),
        draft_attn_impl=attention(eager),
    )
    return draft.to(torch.float32)


def attention(eager: bool) -> str:
    return "sdpa" if eager else "simple_flex_attention"


def read_draft(folder: Path, target: Path, *, eager: bool = True) -> Any:
    """A saved draft of `target` in float32; `eager` takes sequences of any length."""
    import torch
    from speculators.models.eagle3 import Eagle3DraftModel, Eagle3SpeculatorConfig

    config = Eagle3SpeculatorConfig.from_pretrained(folder)
    config.speculators_config.verifier.name_or_path = str(target)
    # Not stored in the config; the default (flex attention) takes whole blocks of tokens only.
    config.transformer_layer_config._attn_implementation = attention(eager)
    return Eagle3DraftModel.from_pretrained(folder, config=config).to(torch.float32).eval()


def draft_targets(draft: Any) -> list[int]:
    """Target token id of each draft token id."""
    if draft.d2t is None:
        return list(range(draft.draft_vocab_size))
    return [token + offset for token, offset in enumerate(draft.d2t.tolist())]


def target_agreement(draft: Any, samples: Sequence[Any]) -> float:
    """Share of answer tokens that the draft's copy of the target's norm and head gives back.

    Of greedy answers; those that the draft cannot propose are not asked.
    """
    import torch

    targets = torch.tensor(draft_targets(draft))
    same = asked = 0
    for sample in samples:
        last_states = sample.recorded()[1][sample.prompt_length - 1 : -1]
        with torch.inference_mode():
            states = last_states.to(draft.device, draft.dtype)
            best = draft.verifier_lm_head(draft.verifier_norm(states)).argmax(-1).cpu()
        answer = torch.tensor(sample.answer)
        draftable = torch.isin(answer, targets)
        same += int((targets[best] == answer)[draftable].sum())
        asked += int(draftable.sum())
    return same / asked if asked else 0.0


def save(draft: Any, dtype: Any, out_dir: Path) -> None:
    """Write config.json and model.safetensors in the target's own dtype, and nothing else.

    Two things that speculators adds are left out. The path of the target would make the same
    draft another artifact on every machine; vLLM is given target and draft side by side and does
    not ask for it, speculators does (see `read_draft`). A copy of the config class's source
    (with `auto_map`) is code, which no server of ours runs.
    """
    draft.config.speculators_config.verifier.name_or_path = None
    draft.to(dtype).save_pretrained(out_dir)
    for code in out_dir.glob("*.py"):
        code.unlink()
    config_file = out_dir / "config.json"
    config = json.loads(config_file.read_text(encoding="utf-8"))
    config.pop("auto_map", None)
    config_file.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")
