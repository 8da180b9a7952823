"""The speculators script that a specialist would write by hand: answers, states, Trainer.

    python -m benchmarks.bare_draft TARGET PROMPTS.jsonl OUT [--epochs 5] [--learning-rate 1e-3] ...

PROMPTS holds one `{"messages": [...]}` a line; the last tenth is held out. Prints one JSON line:
seconds of each part and of the whole process, its CPU seconds, and the largest resident memory in
bytes. On a
machine without an accelerator it patches the two places of speculators 0.9 that need one.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import time
from pathlib import Path
from typing import Any
from unittest import mock

STARTED = time.monotonic()
LAPS: dict[str, float] = {}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("target")
    parser.add_argument("prompts", type=Path)
    parser.add_argument("out")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument("--batch-tokens", type=int, default=256)
    parser.add_argument("--response-tokens", type=int, default=128)
    parser.add_argument("--num-speculative-tokens", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    asked = parser.parse_args()
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    torch.set_num_threads(asked.threads)
    torch.manual_seed(asked.seed)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    tokenizer = AutoTokenizer.from_pretrained(asked.target, padding_side="left")
    target = AutoModelForCausalLM.from_pretrained(asked.target, dtype="auto").to(device).eval()
    count = target.config.num_hidden_layers
    layers = [2, count // 2, count - 3] if count >= 7 else [count - 2, count - 1, count]
    lap("load")
    rows = [json.loads(line)["messages"] for line in asked.prompts.open(encoding="utf-8")]
    samples = answered(target, tokenizer, rows, asked.response_tokens)
    lap("answers")
    record(target, samples, layers)
    del target
    lap("states")
    train(samples, layers, device, asked)
    lap("train")
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    whole = {
        "seconds": round(time.monotonic() - STARTED, 2),
        "cpu_seconds": round(time.process_time(), 2),
        "peak_bytes": peak,
    }
    print(json.dumps({**LAPS, **whole}))


def lap(name: str) -> None:
    LAPS[name] = round(time.monotonic() - STARTED - sum(LAPS.values()), 2)


def answered(target: Any, tokenizer: Any, rows: list[Any], longest: int) -> list[dict[str, Any]]:
    import torch

    texts = [
        tokenizer.apply_chat_template(row, tokenize=False, add_generation_prompt=True)
        for row in rows
    ]
    samples = []
    for first in range(0, len(texts), 64):
        batch = tokenizer(
            texts[first : first + 64], add_special_tokens=False, padding=True, return_tensors="pt"
        ).to(target.device)
        with torch.inference_mode():
            output = target.generate(
                input_ids=batch["input_ids"],
                attention_mask=batch["attention_mask"],
                do_sample=False,
                max_new_tokens=longest,
            )
        width = batch["input_ids"].shape[1]
        for row, mask in zip(output.tolist(), batch["attention_mask"].tolist(), strict=True):
            answer = row[width:]
            if tokenizer.eos_token_id in answer:
                answer = answer[: answer.index(tokenizer.eos_token_id) + 1]
            prompt = row[width - sum(mask) : width]
            samples.append({"tokens": prompt + answer, "prompt": len(prompt)})
    return samples


def record(target: Any, samples: list[dict[str, Any]], layers: list[int]) -> None:
    import torch

    decoder, caught = target.get_decoder(), []
    decoder.norm.register_forward_pre_hook(lambda _, args: caught.append(args[0]))
    for sample in samples:
        ids = torch.tensor([sample["tokens"]], device=target.device)
        with torch.inference_mode():
            output = decoder(input_ids=ids, output_hidden_states=True, use_cache=False)
        states = [*output.hidden_states[:-1], caught.pop()]
        sample["states"] = torch.cat([states[layer][0] for layer in layers], dim=-1).cpu()
        sample["last"] = states[-1][0].cpu()


def row_of(sample: dict[str, Any]) -> dict[str, Any]:
    import torch
    from speculators.models.eagle3 import shift_batch

    length = len(sample["tokens"])
    mask = torch.zeros(length, dtype=torch.bool)
    mask[sample["prompt"] : length - 1] = True
    row: dict[str, Any] = shift_batch(
        {
            "hidden_states": sample["states"],
            "input_ids": torch.tensor(sample["tokens"]),
            "verifier_last_hidden_states": sample["last"],
            "loss_mask": mask,
            "lengths": torch.tensor([length]),
            "position_ids": torch.arange(length),
        }
    )
    return row


def train(samples: list[Any], layers: list[int], device: str, asked: argparse.Namespace) -> None:
    import torch
    from speculators.models.eagle3 import Eagle3DraftModel
    from speculators.train.cli import create_transformer_layer_config
    from speculators.train.data import CollateFn
    from speculators.train.distributed_batch_sampler import MultipackDistributedBatchSamplerV2
    from speculators.train.trainer import Trainer, TrainerConfig
    from torch.utils.data import DataLoader

    config = create_transformer_layer_config(asked.target, 1, "llama", None, 0, [0])
    config.sliding_window = None
    cuda = device == "cuda"
    draft = Eagle3DraftModel.from_training_args(
        verifier_config=config,
        target_layer_ids=layers,
        verifier_name_or_path=asked.target,
        draft_vocab_size=config.vocab_size,
        norm_before_residual=True,
        ttt_steps=asked.num_speculative_tokens,
        draft_attn_impl="simple_flex_attention" if cuda else "sdpa",
    ).to(device, torch.float32)
    dtype = torch.bfloat16 if cuda else torch.float32
    pack = max(asked.batch_tokens, *(len(sample["tokens"]) for sample in samples))

    def loader(part: list[Any]) -> Any:
        sampler = MultipackDistributedBatchSamplerV2(
            batch_max_length=pack,
            lengths=[len(sample["tokens"]) - 1 for sample in part],
            num_replicas=1,
            rank=0,
            seed=asked.seed,
        )
        rows = [row_of(sample) for sample in part]
        collate = CollateFn(pack, draft.hidden_size, dtype=dtype)
        return DataLoader(rows, batch_sampler=sampler, collate_fn=collate)

    held_out = len(samples) // 10
    train_kwargs, val_kwargs = draft.get_trainer_kwargs(
        loss_fn="kl_div",
        loss_implementation="fused" if cuda else "eager",
        ttt_steps=asked.num_speculative_tokens,
        ttt_step_loss_decay=1.0,
    )
    settings = TrainerConfig(
        lr=asked.learning_rate,
        num_epochs=asked.epochs,
        save_path=asked.out,
        train_call_kwargs=train_kwargs,
        val_call_kwargs=val_kwargs,
        scheduler_type="cosine",
        scheduler_warmup_ratio=0.05,
        save_best=True,
        hidden_states_dtype=dtype,
    )
    with (
        mock.patch("speculators.train.trainer.get_local_rank", lambda: 0 if cuda else "cpu"),
        mock.patch("torch.accelerator.synchronize", torch.cuda.synchronize if cuda else _nothing),
    ):
        trainer = Trainer(draft, settings, loader(samples[held_out:]), loader(samples[:held_out]))
        trainer.run_training()


def _nothing() -> None:
    pass


if __name__ == "__main__":
    main()
