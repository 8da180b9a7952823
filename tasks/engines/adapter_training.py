"""Train an adapter: the model, its adapter, the trainer for the method, and the held-out looks."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from registry.errors import Problem, StageFailed
from tasks.engines import (
    adapters,
    held_out,
    logit_distillation,
    lora_merge,
    loss_mask,
    packing,
    training_loop,
    training_precision,
)
from tasks.engines.loss_mask import Example


def train(
    job: Mapping[str, Any],
    tokenizer: Any,
    data: loss_mask.Dataset,
    train_part: list[Example],
    held_out_part: list[Example],
) -> dict[str, Any]:
    """Train to the end, going on from a checkpoint of `work_dir` where there is one.

    Returns what was measured (`training_loop` explains `looks` and `curve`); the adapters lie in
    the work folder.
    """
    import torch

    precision = training_precision.here(job["precision"])
    print(f"precision: {precision.name} ({precision.why})")
    dtype = getattr(torch, precision.name)
    pad_id = tokenizer.pad_token_id
    if pad_id is None:  # only fills up batches; labels and attention never look at it
        pad_id = data.end_ids[0]
        tokenizer.pad_token_id = pad_id

    logits = job["method"] == "logits"
    teachers = _teachers_reading(job, tokenizer, data.end_ids) if logits else None
    if logits:
        logit_distillation.check_teacher(
            Path(job["base"]), Path(job["teacher"]), job["gkd"], teachers is not None
        )
    model = adapters.adapted(load_base(job, dtype), job)
    trainable = sum(part.numel() for part in model.parameters() if part.requires_grad)
    run = _Run(job, tokenizer, pad_id, model, held_out_part, teachers, precision.name)
    rows: Any = [{"input_ids": each.input_ids, "labels": each.labels} for each in train_part]
    extra: dict[str, Any] = {}
    if job["packing"]:
        rows = packing.packed(train_part, int(job["max_length"]))
        extra["packed_rows"] = len(rows)
        exact = precision.name == "float32"
        with as_trained(model, precision.name):
            extra["packing_difference"] = packing.check_apart(
                model,
                rows,
                pad_id,
                end_to_end=run.end_to_end,
                allowed=packing.LEAK if exact else packing.LEAK_BFLOAT16,
            )
    schedule = training_loop.Schedule.of(
        len(rows),
        rows_per_step(job),
        float(job["epochs"]),
        float(job["evaluate_every"]),
        job["checkpoint_steps"],
        float(job["checkpoint_minutes"]),
    )
    work = Path(job["work_dir"])
    arguments = training_loop.arguments(job, schedule, work, bf16=precision.name == "bfloat16")
    lengths = [len(row["input_ids"]) for row in rows]
    trainer = run.trainer(arguments, rows, train_part, lengths)
    training_loop.check_optimizer(trainer, schedule.total)
    keeper = training_loop.keeper(schedule, work, run.look, run.keep, better(job))
    training_loop.watch(trainer, keeper)

    checkpoint = training_loop.newest_checkpoint(work)
    if checkpoint is not None:
        training_loop.read_numbered_cpus()
        print(f"going on from {checkpoint.name}", flush=True)
    started, used = time.monotonic(), time.process_time()
    outcome = trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)
    seconds = time.monotonic() - started - keeper.looking_seconds
    processor_seconds = time.process_time() - used - keeper.looking_processor_seconds
    first = int(checkpoint.name.split("-")[1]) if checkpoint else 0
    tokens = round(sum(lengths) * float(job["epochs"]))
    own_share = (outcome.global_step - first) / schedule.total
    points = training_loop.curve(trainer.state.log_history)
    return {
        **extra,
        "looks": training_loop.looks(trainer.state.log_history),
        "curve": points,
        "train_loss": training_loop.mean_loss(points),
        "steps": int(outcome.global_step),
        "resumed_from": first,
        "tokens": tokens,
        "training_seconds": round(seconds, 2),
        "training_processor_seconds": round(processor_seconds, 2),
        "tokens_per_second": round(tokens * own_share / seconds, 1),
        "trainable_parameters": trainable,
        "compute_dtype": precision.name,
        "compute_dtype_why": precision.why,
    }


def rows_per_step(job: Mapping[str, Any]) -> int:
    """Of all processes together."""
    accumulated = int(job["training"].get("gradient_accumulation_steps", 1))
    return int(job["batch_size"]) * int(job["processes"]) * accumulated


def trained_loss(job: Mapping[str, Any]) -> str:
    """Which figure of a look is the loss that is trained."""
    return "held_out_kl" if job["method"] == "logits" else "held_out_loss"


def better(job: Mapping[str, Any]) -> training_loop.Better:
    """How looks are compared: by the recipe's metric, or by the loss that is trained."""
    name = job["best_by"]
    return training_loop.best_by(trained_loss(job) if name == "held_out_loss" else name)


class _Run:
    """What trainer and looks share: the model, its rows, and how they are compared."""

    def __init__(
        self,
        job: Mapping[str, Any],
        tokenizer: Any,
        pad_id: int,
        model: Any,
        held_out_part: list[Example],
        teachers: dict[str, Example] | None,
        precision: str,
    ) -> None:
        self.job, self.tokenizer, self.pad_id, self.model = job, tokenizer, pad_id, model
        self.held_out, self.teachers, self.precision = held_out_part, teachers, precision
        self.batch_size = int(job["batch_size"])
        self.end_to_end = job["attention"] == "flash_attention_2"
        self.teacher: Any = None
        self.pairs: list[logit_distillation.Pair] = []
        self.scored: list[tuple[dict[str, Any], Example]] = []
        self.score: held_out.Score | None = None
        if job["suite"] is not None:
            self.score = held_out.scorer(Path(job["suite"]["task_file"]))
            self.scored = _rows_with_reference(job, held_out_part)

    def trainer(
        self,
        arguments: dict[str, Any],
        rows: Any,
        examples: list[Example],
        lengths: Sequence[int],
    ) -> Any:
        from transformers import Trainer, TrainingArguments

        seed = int(self.job["seed"])
        per_step = rows_per_step(self.job)
        if self.job["method"] != "logits":
            ordered = training_loop.ordered(Trainer, lengths, per_step, seed)
            partial = loss_mask.takes_positions(self.model)

            def collate(batch: list[Any]) -> dict[str, Any]:
                if self.job["packing"]:
                    return packing.tensors(
                        batch, self.pad_id, end_to_end=self.end_to_end, partial=partial
                    )
                part = [Example("", row["input_ids"], row["labels"]) for row in batch]
                return loss_mask.tensors(part, self.pad_id, partial=partial)

            with training_loop.of_training():
                given = TrainingArguments(**arguments)
            return ordered(model=self.model, args=given, train_dataset=rows, data_collator=collate)
        from trl.experimental.gkd import GKDConfig

        longest = _room(self.model)
        pairs = logit_distillation.paired(examples, self.teachers, longest)
        self.pairs = logit_distillation.paired(self.held_out, self.teachers, longest)
        kept = next(self.model.parameters())
        self.teacher = logit_distillation.load_teacher(
            Path(self.job["teacher"]), kept.dtype, kept.device
        )
        with training_loop.of_training():
            config = GKDConfig(
                **{"gradient_checkpointing": False, **arguments}, **self.job["gkd"], max_length=None
            )
        ordered = training_loop.ordered(logit_distillation.trainer_class(), lengths, per_step, seed)
        return ordered(
            model=self.model,
            teacher_model=self.teacher,
            args=config,
            train_dataset=logit_distillation.rows_of(pairs),
            processing_class=self.tokenizer,
            data_collator=logit_distillation.collate(self.pad_id),
        )

    def look(self, model: Any) -> dict[str, float]:
        """What a look at the held-out rows measures."""
        with as_trained(model, self.precision):
            return self._look(model)

    def keep(self, model: Any, folder: Path) -> None:
        """Save the adapter with what it scores on the rows that its merge is compared on."""
        model.save_pretrained(folder)
        with as_trained(model, self.precision):
            loss = held_out.loss(
                model, self.held_out[: lora_merge.MERGE_PROMPTS], self.pad_id, self.batch_size
            )
        (folder / lora_merge.TRAINED).write_text(json.dumps({"loss": loss}))

    def _look(self, model: Any) -> dict[str, float]:
        found = {"held_out_loss": held_out.loss(model, self.held_out, self.pad_id, self.batch_size)}
        if self.pairs:
            found["held_out_kl"] = logit_distillation.divergence(
                model, self.teacher, self.pairs, self.pad_id, self.batch_size
            )
        if self.score is not None:
            suite = self.job["suite"]
            found |= held_out.metrics(
                model,
                self.tokenizer,
                [row for row, _ in self.scored],
                [example for _, example in self.scored],
                self.score,
                suite["metrics"],
                int(suite["max_tokens"]),
                self.batch_size,
            )
        return found


def as_trained(model: Any, precision: str) -> Any:
    """A context in which the model computes as it does in a training step."""
    import torch

    dtype = getattr(torch, precision)
    return torch.autocast(model.device.type, dtype=dtype, enabled=dtype != torch.float32)


def load_base(job: Mapping[str, Any], dtype: Any) -> Any:
    """The student on the device it is trained on; in four bits where the recipe says so."""
    import os

    import torch
    from transformers import AutoModelForCausalLM

    device = f"cuda:{os.environ.get('LOCAL_RANK', '0')}" if torch.cuda.is_available() else "cpu"
    given: dict[str, Any] = {
        "dtype": dtype,
        "trust_remote_code": False,
        "attn_implementation": job["attention"],
    }
    if not job["quantize_base"]:
        return AutoModelForCausalLM.from_pretrained(job["base"], **given).to(device)
    import peft
    from transformers import BitsAndBytesConfig

    # Dettmers et al. 2023: NormalFloat of 4 bits, its scales quantized once more.
    quantization = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type=job["quantize_base"],
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=dtype,
    )
    model = AutoModelForCausalLM.from_pretrained(
        job["base"], quantization_config=quantization, device_map={"": device}, **given
    )
    return peft.prepare_model_for_kbit_training(model, use_gradient_checkpointing=False)


def _room(model: Any) -> int:
    """Tokens that the model can read at most."""
    config = model.get_base_model().config.get_text_config()
    return int(getattr(config, "max_position_embeddings", None) or 2**31)


def _teachers_reading(
    job: Mapping[str, Any], tokenizer: Any, end_ids: Sequence[int]
) -> dict[str, Example] | None:
    """The rows as the teacher read them, by name; None where it read what the student reads."""
    if job["teacher_file"] is None:
        return None
    read = loss_mask.load(Path(job["teacher_file"]), tokenizer, end_ids, max_length=2**31)
    read.check(job["teacher_file"], 0.0)
    return {example.name: example for example in read.examples}


def _rows_with_reference(
    job: Mapping[str, Any], examples: Sequence[Example]
) -> list[tuple[dict[str, Any], Example]]:
    """Held-out rows that the suite can score, `held_out_answers` at most, in held-out order."""
    by_name = {example.name: example for example in examples}
    found = {}
    with Path(job["train_file"]).open(encoding="utf-8") as lines:
        for line in lines:
            row = json.loads(line)
            if str(row["id"]) in by_name and row.get("reference") is not None:
                found[str(row["id"])] = row
    if not found:
        raise StageFailed(
            Problem(
                job["train_file"],
                "no held-out row has a reference to score an answer by",
                "write `best_by: held_out_loss`, or give the prompts references",
            )
        )
    names = [example.name for example in examples if example.name in found]
    return [(found[name], by_name[name]) for name in names[: int(job["held_out_answers"])]]
