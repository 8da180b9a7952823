"""Logit distillation: the student learns the teacher's distribution at every token of an answer.

TRL's `GKDTrainer` (trl 1.16, Agarwal et al. 2023) trains and computes the loss. TRL's stable
`DistillationTrainer` knows only answers that the student has just written (GKD's `lmbda` = 1); the
teacher's stored answers, `lmbda` and `seq_kd` are GKD's. What is ours:

* the labels (`loss_mask`): GKD's collator renders conversations itself and needs markers in the
  chat template, so it gets another one (`collate`);
* each loss is a mean over the tokens that are there. transformers hands GKD a count that was taken
  before the student wrote its own answers, and GKD does not make up for DDP's averaging. So a
  step over several batches or processes learns the mean of their means;
* a teacher that reads a context that the student does not: the logits are gathered at the answer's
  tokens on both sides and handed to GKD's own loss function.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from registry.errors import Problem, StageFailed
from tasks.engines import loss_mask, model_files
from tasks.engines.loss_mask import IGNORE, Example

PROBE = [
    {"role": "user", "content": "Two parcels, 3.5 kg: 到哪了？"},
    {"role": "assistant", "content": "On their way, naïvely said."},
    {"role": "user", "content": "Thanks!\n"},
]


@dataclass(frozen=True)
class Pair:
    """One conversation as the student sees it and, where it differs, as the teacher does."""

    student: Example
    teacher: Example | None = None


def first_difference(student: Path, teacher: Path) -> str | None:
    """In what tokenizers, vocabularies or chat templates first differ; None where in nothing."""
    from transformers import AutoConfig, AutoTokenizer

    ours = AutoTokenizer.from_pretrained(student, trust_remote_code=False)
    theirs = AutoTokenizer.from_pretrained(teacher, trust_remote_code=False)
    by_id = [{at: token for token, at in each.get_vocab().items()} for each in (ours, theirs)]
    for at in sorted(by_id[0].keys() | by_id[1].keys()):
        one, other = (named.get(at) for named in by_id)
        if one != other:
            return f"token {at} is {one!r} for the student and {other!r} for the teacher"
    sizes = [
        AutoConfig.from_pretrained(each, trust_remote_code=False).get_text_config().vocab_size
        for each in (student, teacher)
    ]
    if sizes[0] != sizes[1]:
        return f"the student's logits have {sizes[0]} places and the teacher's {sizes[1]}"
    for message in PROBE:
        text = message["content"]
        one, other = (each(text, add_special_tokens=False)["input_ids"] for each in (ours, theirs))
        if one != other:
            return f"{text!r} is {one} for the student's tokenizer and {other} for the teacher's"
    texts = [
        each.apply_chat_template(PROBE, tokenize=False, add_generation_prompt=True)
        for each in (ours, theirs)
    ]
    for one, other in zip(*(text.split("\n") for text in texts), strict=False):
        if one != other:
            return f"the chat templates differ: {one!r} for the student, {other!r} for the teacher"
    return None if texts[0] == texts[1] else "one chat template writes more than the other"


def check_teacher(student: Path, teacher: Path, gkd: Mapping[str, Any], context: bool) -> None:
    """Raise `StageFailed` unless the two models' logits can be compared place by place."""
    model_files.check_weights(teacher, "distill")
    problems = []
    difference = first_difference(student, teacher)
    if difference is not None:
        problems.append(
            Problem(
                "method: logits",
                f"teacher and student do not share a tokenizer: {difference}",
                "`method: responses` needs no common tokenizer",
            )
        )
    if context and (gkd["lmbda"] > 0 or gkd["seq_kd"]):
        problems.append(
            Problem(
                "gkd",
                "with the teacher's own `context` only stored answers can be learned: TRL writes "
                "new ones from one prompt that both models read",
                "set lmbda: 0 and seq_kd: false, or leave the teacher's context out",
            )
        )
    if problems:
        raise StageFailed(problems)


def load_teacher(folder: Path, dtype: Any, device: Any) -> Any:
    from transformers import AutoModelForCausalLM

    teacher = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, trust_remote_code=False)
    return teacher.to(device).eval().requires_grad_(False)


def paired(
    students: Sequence[Example], teachers: Mapping[str, Example] | None, max_length: int
) -> list[Pair]:
    """Examples by name with the teacher's own reading of them.

    Raises `StageFailed` where the answers of the two are not the same tokens, or where the
    teacher's reading does not fit.
    """
    if teachers is None:
        return [Pair(example) for example in students]
    pairs, problems = [], []
    for example in students:
        read = teachers.get(example.name)
        if read is None or answer(read) != answer(example):
            problems.append(
                Problem(
                    f"row {example.name}",
                    "behind the teacher's context its answer is not the same tokens",
                    "compare the two renderings; a chat template may change what follows",
                )
            )
        elif len(read.input_ids) > max_length:
            problems.append(
                Problem(
                    f"row {example.name}",
                    f"{len(read.input_ids)} tokens with the teacher's context, more than the "
                    f"{max_length} that the teacher reads",
                )
            )
        else:
            pairs.append(Pair(example, read))
    if problems:
        raise StageFailed(problems[:20])
    return pairs


def answer(example: Example) -> list[int]:
    return [label for label in example.labels if label != IGNORE]


def collate(pad_id: int) -> Callable[[Sequence[Mapping[str, Any]]], dict[str, Any]]:
    """Batches as GKD reads them: `prompts` on the left side are what new answers start from."""

    def batch(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        import torch

        examples = [Example("", row["input_ids"], row["labels"]) for row in rows]
        found = loss_mask.tensors(examples, pad_id)
        del found["shift_labels"]
        prompts = [example.prompt_ids for example in examples]
        width = max(map(len, prompts))
        found["prompts"] = torch.tensor([[pad_id] * (width - len(ids)) + ids for ids in prompts])
        found["prompt_attention_mask"] = torch.tensor(
            [[0] * (width - len(ids)) + [1] * len(ids) for ids in prompts]
        )
        if "teacher_input_ids" in rows[0]:
            read = [Example("", row["teacher_input_ids"], row["teacher_labels"]) for row in rows]
            theirs = loss_mask.tensors(read, pad_id)
            found |= {
                f"teacher_{name}": theirs[name]
                for name in ("input_ids", "attention_mask", "labels")
            }
        return found

    return batch


def rows_of(pairs: Sequence[Pair]) -> Any:
    """The `datasets.Dataset` that TRL asks for."""
    from datasets import Dataset

    rows = []
    for pair in pairs:
        row = {"input_ids": pair.student.input_ids, "labels": pair.student.labels}
        if pair.teacher is not None:
            row |= {
                "teacher_input_ids": pair.teacher.input_ids,
                "teacher_labels": pair.teacher.labels,
            }
        rows.append(row)
    return Dataset.from_list(rows)


def trainer_class() -> type:
    """TRL's `GKDTrainer` with the two changes that the head of this module explains."""
    from trl.experimental.gkd import GKDTrainer

    class LogitTrainer(GKDTrainer):
        # Every loss is a mean of its own batch: gathered over several batches it must be divided.
        loss_is_scaled_for_ga = False

        def compute_loss(
            self,
            model: Any,
            inputs: dict[str, Any],
            return_outputs: bool = False,
            num_items_in_batch: Any = None,
        ) -> Any:
            if "teacher_input_ids" not in inputs:
                return super().compute_loss(model, inputs, return_outputs=return_outputs)
            outputs = model(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"])
            found = at_answers(outputs.logits, inputs["labels"])
            loss = self.generalized_jsd_loss(
                found, at_answers(self.read(inputs), inputs["teacher_labels"]), beta=self.beta
            )
            return (loss, outputs) if return_outputs else loss

        def read(self, inputs: dict[str, Any]) -> Any:
            import torch

            self.teacher_model.eval()
            with torch.no_grad():
                return self.teacher_model(
                    input_ids=inputs["teacher_input_ids"],
                    attention_mask=inputs["teacher_attention_mask"],
                ).logits

    return LogitTrainer


def at_answers(logits: Any, labels: Any) -> Any:
    """Logits that predict a supervised token, row by row: shape (supervised tokens, vocabulary)."""
    return logits[:, :-1][labels[:, 1:] != IGNORE]


def divergence(
    student: Any, teacher: Any, pairs: Sequence[Pair], pad_id: int, batch_size: int
) -> float:
    """Mean KL(teacher, student) in nat per supervised token: 0 where the two are one model."""
    import torch

    student.eval()
    total, count = 0.0, 0
    for at in range(0, len(pairs), batch_size):
        part = pairs[at : at + batch_size]
        seen = [pair.student for pair in part]
        read = [pair.teacher or pair.student for pair in part]
        with torch.inference_mode():
            found, wanted = (
                torch.log_softmax(_logits(model, examples, pad_id).float(), dim=-1)
                for model, examples in ((student, seen), (teacher, read))
            )
            total += float((wanted.exp() * (wanted - found)).sum())
            count += len(found)
    return total / count


def _logits(model: Any, examples: list[Example], pad_id: int) -> Any:
    batch = loss_mask.tensors(examples, pad_id)
    logits = model(
        input_ids=batch["input_ids"].to(model.device),
        attention_mask=batch["attention_mask"].to(model.device),
        use_cache=False,
    ).logits
    return at_answers(logits, batch["labels"].to(model.device))
