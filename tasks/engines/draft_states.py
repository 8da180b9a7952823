"""What an EAGLE3 draft learns from: the target's own greedy answers and its hidden states on them.

Which states, read from the sources of vLLM 0.32 and speculators 0.9 and proved by
`tests/integration/test_speculators_train.py`: layer id i is the output after i layers (0: the
embeddings); the last states are taken before the final norm, because speculators' model applies
the target's norm itself. All stays in memory: 4 x hidden size numbers per token.
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from registry.errors import Problem, UserError

GENERATE_BATCH = 64
"""Prompts generated at once; they are sorted by length, so that padding stays small."""


@dataclass
class Sample:
    """One prompt with the target's own answer; `states` are filled by `record_states`."""

    id: str
    tokens: list[int]
    prompt_length: int
    finished: bool
    states: Any = None
    """Tensor [tokens, len(layer_ids) * hidden]: outputs after those layers, ascending ids."""
    last_states: Any = None
    """Tensor [tokens, hidden]: output of the last layer, before the final norm."""

    @property
    def answer(self) -> list[int]:
        return self.tokens[self.prompt_length :]


def auxiliary_layers(num_layers: int) -> list[int]:
    """The three layer ids whose outputs the draft sees, ascending, for a target of any depth.

    vLLM's and speculators' default is (2, n // 2, n - 3): `get_eagle3_default_aux_hidden_state_
    layers` and `resolve_target_layer_ids`. Below seven layers its ids repeat or run backwards
    (n = 6: 2, 3, 3), and vLLM collects states in ascending order once per id. There: the last,
    and two below it at equal distance. vLLM reads the ids from the draft's config and always
    expects three. Raises `UserError` for a target of one layer.
    """
    if num_layers < 2:
        raise UserError.at("target", "has one layer; EAGLE3 needs three different hidden states")
    if num_layers >= 7:
        return [2, num_layers // 2, num_layers - 3]
    step = max(1, num_layers // 3)
    return [num_layers - 2 * step, num_layers - step, num_layers]


def render_prompts(file: Path, tokenizer: Any) -> list[tuple[str, list[int]]]:
    """(id, prompt tokens) of each row, exactly as a chat server renders its messages.

    Rows with the same prompt are taken once, so that none is both trained on and held out.
    Raises `UserError` naming every row without messages.
    """
    problems: list[Problem] = []
    prompts: dict[tuple[int, ...], str] = {}
    with file.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            row = json.loads(line)
            if not row.get("messages"):
                problems.append(Problem(f"{file}:{number}", "no `messages`"))
                continue
            text = tokenizer.apply_chat_template(
                row["messages"], tokenize=False, add_generation_prompt=True
            )
            tokens = tokenizer(text, add_special_tokens=False)["input_ids"]
            prompts.setdefault(tuple(tokens), str(row.get("id", number)))
    if problems:
        raise UserError(problems)
    return [(name, list(tokens)) for tokens, name in prompts.items()]


def own_answers(
    target: Any, prompts: Sequence[tuple[str, list[int]]], end_ids: list[int], job: dict[str, Any]
) -> tuple[list[Sample], int]:
    """The greedy answer of `target` to each prompt, end-of-turn token included; count of dropped.

    Prompts that leave no room in `max_length` and answers below two tokens (nothing to draft)
    are dropped. The checkpoint's own sampling defaults are replaced, not merged.
    """
    import torch
    from transformers import GenerationConfig

    max_length, longest = int(job["max_length"]), int(job["response_tokens"])
    fitting = sorted((p for p in prompts if len(p[1]) + 2 <= max_length), key=lambda p: len(p[1]))
    greedy = GenerationConfig(
        do_sample=False,
        max_new_tokens=longest,
        eos_token_id=end_ids,
        pad_token_id=end_ids[0],
    )
    samples: list[Sample] = []
    for first in range(0, len(fitting), GENERATE_BATCH):
        batch = fitting[first : first + GENERATE_BATCH]
        width = max(len(tokens) for _, tokens in batch)
        padded = [[end_ids[0]] * (width - len(tokens)) + tokens for _, tokens in batch]
        mask = [[0] * (width - len(tokens)) + [1] * len(tokens) for _, tokens in batch]
        with torch.inference_mode():
            output = target.generate(
                input_ids=torch.tensor(padded, device=target.device),
                attention_mask=torch.tensor(mask, device=target.device),
                generation_config=greedy,
            )
        for (name, prompt), row in zip(batch, output[:, width:].tolist(), strict=True):
            ends = [i for i, token in enumerate(row) if token in end_ids]
            answer = row[: ends[0] + 1] if ends else row
            tokens = (prompt + answer)[:max_length]
            finished = bool(ends) and len(tokens) == len(prompt) + len(answer)
            sample = Sample(name, tokens, len(prompt), finished)
            if len(sample.answer) >= 2:
                samples.append(sample)
        print(f"answers: {first + len(batch)} of {len(fitting)} prompts", flush=True)
    return samples, len(prompts) - len(samples)


def record_states(target: Any, samples: Sequence[Sample], layer_ids: Sequence[int]) -> None:
    """Fill `states` and `last_states` of every sample from one forward pass each, on the CPU.

    transformers' own list of hidden states ends with the *normed* last state; the one before
    the norm is caught at the norm's input.
    """
    import torch

    decoder = target.get_decoder()
    caught: list[Any] = []
    hook = decoder.norm.register_forward_pre_hook(lambda _, args: caught.append(args[0]))
    ordered = sorted(samples, key=lambda sample: len(sample.tokens))
    try:
        for first in range(0, len(ordered), GENERATE_BATCH):
            batch = ordered[first : first + GENERATE_BATCH]
            width = max(len(sample.tokens) for sample in batch)
            # Padding on the right is never attended to by what stands before it.
            padded = [s.tokens + [0] * (width - len(s.tokens)) for s in batch]
            with torch.inference_mode():
                output = decoder(
                    input_ids=torch.tensor(padded, device=target.device),
                    output_hidden_states=True,
                    use_cache=False,
                )
            layers = [*output.hidden_states[:-1], caught.pop()]
            chosen = torch.cat([layers[layer] for layer in layer_ids], dim=-1).cpu()
            last = layers[-1].cpu()
            for row, sample in enumerate(batch):
                sample.states = chosen[row, : len(sample.tokens)].clone()
                sample.last_states = last[row, : len(sample.tokens)].clone()
    finally:
        hook.remove()


def split(samples: list[Sample], share: float, seed: int) -> tuple[list[Sample], list[Sample]]:
    """A seeded random part of the samples for training, the rest (at least one) held out."""
    shuffled = sorted(samples, key=lambda sample: sample.id)
    random.Random(seed).shuffle(shuffled)
    count = min(max(1, round(len(samples) * share)), len(samples) - 1)
    return shuffled[count:], shuffled[:count]
