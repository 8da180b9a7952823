"""What an EAGLE3 draft learns from: the target's own answers and its hidden states on them.

Which states, read from the sources of vLLM 0.32 and speculators 0.9 and proved by
`tests/integration/test_draft_states.py`: layer id i is the output after i layers (0: the
embeddings); the last states are taken before the final norm, because speculators' model applies
the target's norm itself.

This is transformers' way; `tasks/engines/vllm_states.py` has them from a vLLM server.
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from registry.draft_binding import named_layer_ids
from registry.errors import Problem, UserError
from registry.json_files import json_object
from tasks.conversations import for_template

GENERATE_BATCH = 64
"""Prompts generated at once; they are sorted by length, so that padding stays small."""

MOST_HELD_OUT = 200
"""The engine answers them one at a time, several times over."""


@dataclass(frozen=True)
class Prompt:
    """One prompt as the server renders it."""

    id: str
    segment: str
    tokens: tuple[int, ...]
    row: dict[str, Any]
    """`messages` and, where there are some, `tools`."""


@dataclass
class Sample:
    """One prompt with the target's own answer, and its states once they are recorded."""

    id: str
    tokens: list[int]
    prompt_length: int
    finished: bool
    segment: str = ""
    states: Any = None
    """Tensor [tokens, len(layer_ids) * hidden]: outputs after those layers, ascending ids."""
    last_states: Any = None
    """Tensor [tokens, hidden]: output of the last layer, before the final norm."""
    states_file: Path | None = None
    """Where both lie as safetensors, for a sample that is not kept in memory."""

    @property
    def answer(self) -> list[int]:
        return self.tokens[self.prompt_length :]

    def recorded(self) -> tuple[Any, Any]:
        """`states` and `last_states`, read from the file where they lie in one."""
        if self.states is not None:
            return self.states, self.last_states
        from safetensors.torch import load_file

        assert self.states_file is not None, "no states were recorded"
        kept = load_file(self.states_file)
        return kept["states"], kept["last_states"]


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


def layer_ids_for(target: Path, published: Path | None = None) -> list[int]:
    """Those that a published draft names, else the default for a target of this depth."""
    config = json_object(target / "config.json")
    default = auxiliary_layers(int(config.get("text_config", config)["num_hidden_layers"]))
    if published is None:
        return default
    return named_layer_ids(json_object(published / "config.json")) or default


def render_prompts(file: Path, tokenizer: Any) -> list[Prompt]:
    """The prompts of `file`, tokenized exactly as a chat server renders their messages.

    Rows with the same prompt are taken once, so that none is both trained on and held out.
    Raises `UserError` naming every row without messages.
    """
    problems: list[Problem] = []
    prompts: dict[tuple[int, ...], Prompt] = {}
    with file.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            row = json.loads(line)
            if not row.get("messages"):
                problems.append(Problem(f"{file}:{number}", "no `messages`"))
                continue
            asked = {name: row[name] for name in ("messages", "tools") if row.get(name)}
            text = tokenizer.apply_chat_template(
                for_template(asked["messages"]),
                tools=asked.get("tools"),
                tokenize=False,
                add_generation_prompt=True,
            )
            tokens = tuple(tokenizer(text, add_special_tokens=False)["input_ids"])
            name, segment = str(row.get("id", number)), str(row.get("segment", ""))
            prompts.setdefault(tokens, Prompt(name, segment, tokens, asked))
    if problems:
        raise UserError(problems)
    return list(prompts.values())


def split(prompts: Sequence[Prompt], share: float, seed: int) -> tuple[list[Prompt], list[Prompt]]:
    """For training, and held out: every segment has its share in both.

    At least one and at most `MOST_HELD_OUT` are held out. Seeded; the same for the same prompts
    in any order.
    """
    shuffled = sorted(prompts, key=lambda prompt: prompt.id)
    random.Random(seed).shuffle(shuffled)
    shuffled.sort(key=lambda prompt: prompt.segment)
    total = len(shuffled)
    count = max(0, min(max(1, round(total * share)), MOST_HELD_OUT, total - 1))
    # Equal steps through prompts that are sorted by segment.
    chosen = {(2 * place + 1) * total // (2 * count) for place in range(count)}
    held_out = [prompt for place, prompt in enumerate(shuffled) if place in chosen]
    train = [prompt for place, prompt in enumerate(shuffled) if place not in chosen]
    return train, held_out


def fitting(prompts: Sequence[Prompt], max_length: int) -> list[Prompt]:
    """Those that leave room for an answer of two tokens, shortest first."""
    room = [prompt for prompt in prompts if len(prompt.tokens) + 2 <= max_length]
    return sorted(room, key=lambda prompt: len(prompt.tokens))


def sample_of(
    prompt: Prompt, answer: Sequence[int], finished: bool, max_length: int
) -> Sample | None:
    """Prompt and answer, cut at `max_length`; None below two answer tokens: nothing to draft."""
    tokens = [*prompt.tokens, *answer][:max_length]
    if len(tokens) < len(prompt.tokens) + 2:
        return None
    whole = len(tokens) == len(prompt.tokens) + len(answer)
    return Sample(prompt.id, tokens, len(prompt.tokens), finished and whole, prompt.segment)


def load_target(folder: Path | str, device: str = "cpu") -> Any:
    """The target in the dtype it is stored in, quantized or not, ready for its decoder alone.

    transformers 5.17 keeps compressed weights until the first pass of the whole model; its decoder
    called before that multiplies packed integers (or refuses to).
    """
    import torch
    from transformers import AutoModelForCausalLM

    target = (
        AutoModelForCausalLM.from_pretrained(folder, dtype="auto", trust_remote_code=False)
        .to(device)
        .eval()
    )
    if getattr(target.config, "quantization_config", None) is not None:
        with torch.inference_mode():
            target(input_ids=torch.zeros((1, 1), dtype=torch.long, device=device))
    return target


def own_answers(
    target: Any,
    prompts: Sequence[Prompt],
    end_ids: list[int],
    *,
    max_length: int,
    response_tokens: int,
    temperature: float = 0.0,
) -> list[Sample]:
    """The answer of `target` to each prompt that gives one, end-of-turn token included.

    Greedy at temperature 0, else sampled from torch's generator. The checkpoint's own sampling
    defaults are replaced, not merged.
    """
    import torch
    from transformers import GenerationConfig

    sampling: dict[str, Any] = {"do_sample": False}
    if temperature > 0:
        sampling = {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0}
    config = GenerationConfig(
        **sampling,
        max_new_tokens=response_tokens,
        eos_token_id=end_ids,
        pad_token_id=end_ids[0],
    )
    asked = fitting(prompts, max_length)
    samples: list[Sample] = []
    for first in range(0, len(asked), GENERATE_BATCH):
        batch = asked[first : first + GENERATE_BATCH]
        width = max(len(prompt.tokens) for prompt in batch)
        padded = [[end_ids[0]] * (width - len(p.tokens)) + [*p.tokens] for p in batch]
        mask = [[0] * (width - len(p.tokens)) + [1] * len(p.tokens) for p in batch]
        with torch.inference_mode():
            output = target.generate(
                input_ids=torch.tensor(padded, device=target.device),
                attention_mask=torch.tensor(mask, device=target.device),
                generation_config=config,
            )
        for prompt, row in zip(batch, output[:, width:].tolist(), strict=True):
            ends = [i for i, token in enumerate(row) if token in end_ids]
            answer = row[: ends[0] + 1] if ends else row
            sample = sample_of(prompt, answer, bool(ends), max_length)
            if sample is not None:
                samples.append(sample)
        print(f"answers: {first + len(batch)} of {len(asked)} prompts", flush=True)
    return samples


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
