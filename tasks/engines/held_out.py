"""What a student in training does on held-out rows: its loss, and the suite's own metrics.

The metrics are of greedy answers by transformers, scored by the suite's task, item by item, as the
harness will score the served bundle. They are for choosing a checkpoint, never evidence.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from registry.errors import Problem, StageFailed
from tasks.engines import loss_mask

Score = Callable[[dict[str, Any], list[str]], dict[str, float]]


def loss(model: Any, examples: list[loss_mask.Example], pad_id: int, batch_size: int) -> float:
    """Mean negative log-likelihood in nat per supervised token, over all examples."""
    import torch

    model.eval()
    total, count = 0.0, 0
    for batch in batches(examples, pad_id, batch_size, model):
        labels = batch.pop("shift_labels")
        with torch.inference_mode():
            logits = model(**batch, use_cache=False).logits
        total += float(
            torch.nn.functional.cross_entropy(
                logits.float().flatten(0, 1),
                labels.flatten(),
                ignore_index=loss_mask.IGNORE,
                reduction="sum",
            )
        )
        count += int((labels != loss_mask.IGNORE).sum())
    return total / count


def batches(examples: Sequence[loss_mask.Example], pad_id: int, batch_size: int, model: Any) -> Any:
    """Batches by length on the model's device, with `shift_labels` and without `labels`."""
    ordered = sorted(examples, key=lambda example: len(example.input_ids))
    partial = loss_mask.takes_positions(model)
    for at in range(0, len(ordered), batch_size):
        batch = loss_mask.tensors(ordered[at : at + batch_size], pad_id, partial=partial)
        del batch["labels"]
        yield {name: value.to(model.device) for name, value in batch.items()}


def scorer(task_file: Path) -> Score:
    """The task's own scoring of one item. Raises `StageFailed` for a task that has none."""
    from tasks.engines.lm_eval_run import load_task

    task = load_task(task_file, task_file)
    score = task.get("process_results")
    if not callable(score) or task.get("filter_list"):
        raise StageFailed(
            Problem(
                str(task_file),
                "scores by the harness's own metrics or filters, which need the harness",
                "write `best_by: held_out_loss`, or a task with `process_results`",
            )
        )
    found: Score = score
    return found


def metrics(
    model: Any,
    tokenizer: Any,
    rows: Sequence[Mapping[str, Any]],
    examples: Sequence[loss_mask.Example],
    score: Score,
    names: Sequence[str],
    max_new_tokens: int,
    batch_size: int,
) -> dict[str, float]:
    """Means of the suite's metrics over greedy answers; `ended` is the share that stopped.

    `rows` are of the teacher's file, with `reference`; `examples` the same rows as tokens.
    """
    answers, ended = answered(
        model, tokenizer, [example.prompt_ids for example in examples], max_new_tokens, batch_size
    )
    totals = dict.fromkeys(names, 0.0)
    for row, answer in zip(rows, answers, strict=True):
        prompt = next(
            message["content"] for message in reversed(row["messages"]) if message["role"] == "user"
        )
        found = score({**row, "prompt": prompt}, [answer])
        for name in names:
            if name not in found:
                raise StageFailed(
                    Problem("best_by", f"the suite's task computes no {name!r}: {sorted(found)}")
                )
            try:
                totals[name] += float(found[name])
            except (TypeError, ValueError):
                raise StageFailed(
                    Problem(
                        "best_by",
                        f"the suite's task gives no number for {name!r} of one item, so only the "
                        "harness can sum it up",
                        "write `best_by: held_out_loss`",
                    )
                ) from None
    return {name: value / len(rows) for name, value in totals.items()} | {
        "ended": ended / len(rows)
    }


def answered(
    model: Any,
    tokenizer: Any,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    batch_size: int,
) -> tuple[list[str], int]:
    """Greedy answers as text, in the order of `prompts`, and how many ended by themselves."""
    import torch

    model.eval()
    ends = set(end_ids(model, tokenizer))
    filling = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else min(ends)
    order = sorted(range(len(prompts)), key=lambda at: len(prompts[at]))
    texts, ended = [""] * len(prompts), 0
    for begin in range(0, len(order), batch_size):
        places = order[begin : begin + batch_size]
        width = max(len(prompts[at]) for at in places)
        ids = [[filling] * (width - len(prompts[at])) + list(prompts[at]) for at in places]
        seen = [[0] * (width - len(prompts[at])) + [1] * len(prompts[at]) for at in places]
        with torch.inference_mode():
            written = model.generate(
                input_ids=torch.tensor(ids, device=model.device),
                attention_mask=torch.tensor(seen, device=model.device),
                max_new_tokens=max_new_tokens,
                do_sample=False,
                temperature=None,
                top_p=None,
                top_k=None,
                eos_token_id=sorted(ends),
                pad_token_id=filling,
                use_cache=True,
            )[:, width:].tolist()
        for at, tokens in zip(places, written, strict=True):
            end = next((place for place, token in enumerate(tokens) if token in ends), None)
            ended += end is not None
            texts[at] = tokenizer.decode(tokens[:end], skip_special_tokens=True)
    return texts, ended


def end_ids(model: Any, tokenizer: Any) -> list[int]:
    """Token ids that end an answer, as the model's generation config has them."""
    found = model.generation_config.eos_token_id
    if found is None:
        found = tokenizer.eos_token_id
    return [found] if isinstance(found, int) else list(found)
