"""The demo's models, made on the spot: a byte-level BPE tokenizer and two small Llamas.

Runs in a process of its own:

    python -m tasks.engines.tiny_llama JOB.json RESULT.json

Progress goes to standard output, one line per report. `Job` describes the fields.

* `teacher`: trains the tokenizer on `pretrain.jsonl`, then a Llama on its (prompt, reference
  reply) pairs, loss on the assistant's tokens.
* `student`: takes the teacher's tokenizer and trains a smaller Llama on the same kind of text
  without ever seeing a reference beside its prompt. It learns to model prompts and to echo them
  (the assistant turn repeats the user turn: how to copy), to turn filled-in forms of made-up
  values into JSON (`demo_data.form`), and to model replies that stand alone, shuffled, with no
  prompt before them (what a reply looks like). Which intent a prompt has, and which of its words
  fill which slot, is left to distillation.

Training is in float32; weights are saved in bfloat16, which is what the engine serves, and the
scores in the result are those of the rounded weights. Equal jobs give bit-equal weights on one
machine with one number of threads.
"""

from __future__ import annotations

import json
import math
import random
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from eval_suites.scoring import METRICS, score
from registry.errors import Problem, UserError
from tasks.demo_data import form, reference_reply
from tasks.engines.subprocesses import job_main

PAD, BOS, END = "<|pad|>", "<|bos|>", "<|end|>"
ROLES = {"system": "<|system|>", "user": "<|user|>", "assistant": "<|assistant|>"}
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")

CHAT_TEMPLATE = (
    "{{- bos_token }}"
    "{%- for message in messages %}"
    "{%- if message['role'] == 'assistant' %}"
    "{{- '<|assistant|>' }}"
    "{%- generation %}{{- message['content'] + '<|end|>' }}{%- endgeneration %}"
    "{%- else %}"
    "{{- '<|' + message['role'] + '|>' + message['content'] + '<|end|>' }}"
    "{%- endif %}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|assistant|>' }}{%- endif %}"
)

# JSON keys with their punctuation, and intent names, are one piece each: short replies. Digits
# and Han characters stand alone: a copied value has the same tokens wherever it stands.
_PIECES = (
    r'[{,"}]*"[a-z]+":"?'
    r"|[a-z]+(?:_[a-z]+)+"
    r"|\p{Han}"
    r"|\p{N}"
    r"| ?[\p{L}\p{M}&&[^\p{Han}]]+"
    r"| ?[^\s\p{L}\p{M}\p{N}]+"
    r"|\s+"
)


class ModelSize(BaseModel):
    """Shape of a Llama; `hidden_size` must be a multiple of `head_dim`.

    Width 128 learned to copy order numbers in fewer examples than 192 or 256 did at equal depth.
    """

    model_config = ConfigDict(extra="forbid")

    hidden_size: int = Field(default=128, ge=32)
    intermediate_size: int = Field(default=768, ge=32)
    layers: int = Field(default=4, ge=1)
    head_dim: int = Field(default=32, ge=8)
    max_positions: int = Field(default=1024, ge=64)


class Job(BaseModel):
    """What one process is asked for."""

    model_config = ConfigDict(extra="forbid")

    role: Literal["teacher", "student"]
    data_dir: Path = Field(description="Folder that holds pretrain.jsonl.")
    tokenizer_dir: Path | None = Field(
        default=None, description="Tokenizer to copy; without it one is trained (teacher only)."
    )
    out_dir: Path = Field(description="Folder for weights, tokenizer and template.")
    seed: int = 0
    threads: int = Field(default=1, ge=1)
    vocab_size: int = Field(default=2048, ge=300)
    steps: int = Field(default=850, ge=1)
    batch_size: int = Field(default=24, ge=1, description="Sequences per step.")
    learning_rate: float = Field(default=3e-3, gt=0)
    warmup: int = Field(default=30, ge=0, description="Steps of linear warm-up before the cosine.")
    prompt_weight: float = Field(
        default=0.0, ge=0, description="Weight of the loss on the teacher's prompt tokens."
    )
    echo_share: float = Field(
        default=0.2, ge=0, le=1, description="Share of echoes in the student's text."
    )
    form_share: float = Field(
        default=0.2, ge=0, le=1, description="Share of forms in either model's text."
    )
    held_out: int = Field(default=64, ge=1, description="Last records, kept out for scoring.")
    log_every: int = Field(default=25, ge=1)
    model: ModelSize = ModelSize()


@dataclass(frozen=True)
class Tokens:
    """Token ids and, for each, the weight of the loss of predicting it."""

    ids: list[int]
    weights: list[float]


def run(job: Mapping[str, Any]) -> dict[str, Any]:
    """`make` for a job as JSON gives it. Raises UserError naming every wrong field."""
    try:
        checked = Job.model_validate(job)
    except ValidationError as error:
        raise UserError(
            [
                Problem(".".join(map(str, each["loc"])) or "job", each["msg"])
                for each in error.errors()
            ]
        ) from None
    return make(checked)


def make(job: Job) -> dict[str, Any]:
    """Make the model of `job` in `job.out_dir`.

    Returns `loss` (mean of the last tenth of the steps), `held_out_loss`, `tokens` seen,
    `parameters`, `seconds` by phase, and `scores` (mean of each business metric of greedy
    replies to the held-out prompts). Raises UserError for a wrong job or data file.
    """
    import torch

    started = time.monotonic()
    torch.set_num_threads(job.threads)
    torch.use_deterministic_algorithms(True)
    records = _records(job)
    train, held_out = records[: -job.held_out], records[-job.held_out :]
    job.out_dir.mkdir(parents=True, exist_ok=True)
    if job.tokenizer_dir is not None:
        copy_tokenizer(job.tokenizer_dir, job.out_dir)
        tokenizer = load_tokenizer(job.out_dir)
    else:
        texts = (text for record in train for text in (record["prompt"], reference_reply(record)))
        tokenizer = train_tokenizer(texts, job.vocab_size, job.out_dir)
    tokenized = time.monotonic()
    print(f"tokenizer: {len(tokenizer)} tokens, {tokenized - started:.1f} s", flush=True)

    rng = random.Random(job.seed)
    sequences = teacher_sequences if job.role == "teacher" else student_sequences
    model = build_model(job, tokenizer)
    losses, tokens = fit(model, sequences(job, tokenizer, train, rng), job, rng)
    trained = time.monotonic()
    # Rounded to what is served before anything is measured.
    model = model.to(torch.bfloat16)
    save(model, tokenizer, job.out_dir)
    model = model.float().eval()
    held_out_loss = mean_loss(model, sequences(job, tokenizer, held_out, rng), job)
    scores = greedy_scores(model, tokenizer, held_out)
    tail = losses[-max(1, len(losses) // 10) :]
    return {
        "role": job.role,
        "loss": sum(tail) / len(tail),
        "held_out_loss": held_out_loss,
        "tokens": tokens,
        "parameters": sum(weight.numel() for weight in model.parameters()),
        "vocabulary": len(tokenizer),
        "scores": scores,
        "seconds": {
            "tokenizer": round(tokenized - started, 2),
            "training": round(trained - tokenized, 2),
            "scoring": round(time.monotonic() - trained, 2),
        },
    }


# -- tokenizer -----------------------------------------------------------------------------


def train_tokenizer(texts: Iterator[str], vocab_size: int, out_dir: Path) -> Any:
    """Train a byte-level BPE on `texts`, save it with its chat template, return it loaded.

    Every Unicode text survives encoding and decoding. Special tokens: pad, bos, end of turn
    (the eos) and one per role.
    """
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    specials = [PAD, BOS, END, *ROLES.values()]
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_PIECES), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    bpe.decoder = decoders.ByteLevel()
    bpe.train_from_iterator(
        texts,
        trainers.BpeTrainer(
            vocab_size=vocab_size,
            min_frequency=2,
            special_tokens=specials,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        pad_token=PAD,
        bos_token=BOS,
        eos_token=END,
        additional_special_tokens=list(ROLES.values()),
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.save_pretrained(out_dir)
    return load_tokenizer(out_dir)


def load_tokenizer(folder: Path) -> Any:
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast.from_pretrained(folder)


def copy_tokenizer(source: Path, target: Path) -> None:
    """Copy the tokenizer's files. Raises UserError when one is missing."""
    missing = [name for name in TOKENIZER_FILES if not (source / name).is_file()]
    if missing:
        raise UserError.at(source, f"no {', '.join(missing)}", "give the teacher's folder")
    for name in TOKENIZER_FILES:
        shutil.copyfile(source / name, target / name)


# -- sequences -----------------------------------------------------------------------------


def teacher_sequences(
    job: Job, tokenizer: Any, records: Sequence[dict[str, Any]], rng: random.Random
) -> list[Tokens]:
    """Each record's prompt with its reference reply; forms in place of some."""
    frame = Frame(tokenizer)
    return [
        frame.turns(*form(rng), 0.0)
        if rng.random() < job.form_share
        else frame.turns(record["prompt"], reference_reply(record), job.prompt_weight)
        for record in records
    ]


def student_sequences(
    job: Job, tokenizer: Any, records: Sequence[dict[str, Any]], rng: random.Random
) -> list[Tokens]:
    """Echoed prompts, forms, and replies that stand alone; no reply stands beside a prompt."""
    frame = Frame(tokenizer)
    sequences = []
    replies = [reference_reply(record) for record in records]
    rng.shuffle(replies)
    for record, reply in zip(records, replies, strict=True):
        kind = rng.random()
        if kind < job.echo_share:
            sequences.append(frame.turns(record["prompt"], record["prompt"], 0.2))
        elif kind < job.echo_share + job.form_share:
            sequences.append(frame.turns(*form(rng), 0.0))
        else:
            sequences.append(frame.alone(reply))
    return sequences


class Frame:
    """Token ids of chat turns; the same ids as the chat template gives."""

    def __init__(self, tokenizer: Any) -> None:
        def one(token: str) -> int:
            return int(tokenizer.convert_tokens_to_ids(token))

        self._tokenizer = tokenizer
        self.bos, self.end = one(BOS), one(END)
        self.user, self.assistant = one(ROLES["user"]), one(ROLES["assistant"])

    def text(self, text: str) -> list[int]:
        return list(self._tokenizer(text, add_special_tokens=False)["input_ids"])

    def turns(self, user: str, assistant: str, user_weight: float) -> Tokens:
        asked = [self.bos, self.user, *self.text(user), self.end, self.assistant]
        answer = [*self.text(assistant), self.end]
        return Tokens(
            asked + answer,
            [0.0, 0.0] + [user_weight] * (len(asked) - 2) + [1.0] * len(answer),
        )

    def alone(self, assistant: str) -> Tokens:
        answer = [*self.text(assistant), self.end]
        return Tokens([self.bos, self.assistant, *answer], [0.0, 0.0] + [1.0] * len(answer))


# -- model ---------------------------------------------------------------------------------


def build_model(job: Job, tokenizer: Any) -> Any:
    """A fresh Llama in float32, embeddings and head untied."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    size = job.model
    if size.hidden_size % size.head_dim:
        raise UserError.at(
            "model.hidden_size",
            f"{size.hidden_size} is no multiple of head_dim {size.head_dim}",
            "choose a multiple",
        )
    heads = size.hidden_size // size.head_dim
    torch.manual_seed(job.seed)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=math.ceil(len(tokenizer) / 64) * 64,
            hidden_size=size.hidden_size,
            intermediate_size=size.intermediate_size,
            num_hidden_layers=size.layers,
            num_attention_heads=heads,
            num_key_value_heads=heads,
            head_dim=size.head_dim,
            max_position_embeddings=size.max_positions,
            tie_word_embeddings=False,
            pad_token_id=tokenizer.pad_token_id,
            bos_token_id=tokenizer.bos_token_id,
            eos_token_id=tokenizer.eos_token_id,
            initializer_range=0.04,
        )
    )
    with torch.no_grad():
        # A head that starts as the embedding lets attention copy tokens from the first step on:
        # copying an order number is what takes a small model longest to learn.
        model.model.embed_tokens.weight.mul_(1.5)
        model.lm_head.weight.copy_(model.model.embed_tokens.weight)
    return model


def fit(
    model: Any, sequences: Sequence[Tokens], job: Job, rng: random.Random
) -> tuple[list[float], int]:
    """Train in place. Returns the loss of each step and the number of tokens seen."""
    import torch

    optimizer = torch.optim.AdamW(
        model.parameters(), lr=job.learning_rate, betas=(0.9, 0.98), weight_decay=0.01, fused=True
    )
    model.train()
    losses: list[float] = []
    tokens = 0
    started = time.monotonic()
    batches = _batches(sequences, job.batch_size, rng)
    for step in range(job.steps):
        batch = next(batches)
        for group in optimizer.param_groups:
            group["lr"] = job.learning_rate * _schedule(step, job)
        loss = _loss(model, batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(float(loss.detach()))
        tokens += sum(len(sequence.ids) for sequence in batch)
        if (step + 1) % job.log_every == 0 or step + 1 == job.steps:
            recent = losses[-job.log_every :]
            print(
                f"step {step + 1}/{job.steps} loss {sum(recent) / len(recent):.4f} "
                f"elapsed {time.monotonic() - started:.1f} s",
                flush=True,
            )
    return losses, tokens


def mean_loss(model: Any, sequences: Sequence[Tokens], job: Job) -> float:
    """Mean loss over `sequences`, nothing trained."""
    import torch

    with torch.inference_mode():
        parts = [
            float(_loss(model, sequences[at : at + job.batch_size]))
            for at in range(0, len(sequences), job.batch_size)
        ]
    return sum(parts) / len(parts)


def greedy_replies(
    model: Any, tokenizer: Any, prompts: Sequence[str], max_new_tokens: int = 120
) -> list[str]:
    """The model's greedy answer to each prompt, through its chat template."""
    import torch

    texts = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": prompt}], tokenize=False, add_generation_prompt=True
        )
        for prompt in prompts
    ]
    replies: list[str] = []
    for at in range(0, len(texts), 64):
        inputs = tokenizer(
            texts[at : at + 64],
            add_special_tokens=False,
            padding=True,
            padding_side="left",
            return_tensors="pt",
            return_token_type_ids=False,
        )
        with torch.inference_mode():
            output = model.generate(**inputs, do_sample=False, max_new_tokens=max_new_tokens)
        fresh = output[:, inputs["input_ids"].shape[1] :]
        replies.extend(tokenizer.batch_decode(fresh, skip_special_tokens=True))
    return replies


def greedy_scores(
    model: Any, tokenizer: Any, records: Sequence[dict[str, Any]]
) -> dict[str, float]:
    """Mean of each business metric over greedy replies to the records' prompts."""
    replies = greedy_replies(model, tokenizer, [record["prompt"] for record in records])
    rows = [
        score(reply, record["reference"], record["prompt"])
        for reply, record in zip(replies, records, strict=True)
    ]
    return {metric: sum(row[metric] for row in rows) / len(rows) for metric in METRICS}


def save(model: Any, tokenizer: Any, folder: Path) -> None:
    """Safetensors, tokenizer, template and a greedy generation configuration."""
    from transformers import GenerationConfig

    model.generation_config = GenerationConfig(
        do_sample=False,
        max_new_tokens=120,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


# -- parts ---------------------------------------------------------------------------------


def _records(job: Job) -> list[dict[str, Any]]:
    path = job.data_dir / "pretrain.jsonl"
    if not path.is_file():
        raise UserError.at(path, "no such file", "write the demo's data first")
    records = [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n") if line]
    if len(records) <= job.held_out:
        raise UserError.at(
            path, f"{len(records)} records, {job.held_out} of them held out", "give more records"
        )
    if job.role == "student" and job.tokenizer_dir is None:
        raise UserError.at("tokenizer_dir", "missing", "give the teacher's folder")
    return records


def _batches(sequences: Sequence[Tokens], size: int, rng: random.Random) -> Iterator[list[Tokens]]:
    """Endless batches of sequences of near-equal length, in a new order each time round."""
    window = size * 16
    while True:
        order = list(sequences)
        rng.shuffle(order)
        batches: list[list[Tokens]] = []
        for at in range(0, len(order), window):
            bucket = sorted(order[at : at + window], key=lambda sequence: len(sequence.ids))
            batches.extend(bucket[i : i + size] for i in range(0, len(bucket), size))
        rng.shuffle(batches)
        yield from batches


def _schedule(step: int, job: Job) -> float:
    if step < job.warmup:
        return (step + 1) / job.warmup
    done = (step - job.warmup) / max(1, job.steps - job.warmup)
    return 0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * done))


def _loss(model: Any, batch: Sequence[Tokens]) -> Any:
    """Weighted mean cross-entropy. Padding stands on the right, where a causal model cannot see
    it from earlier positions, so no attention mask is needed; the head runs only where a token
    counts."""
    import torch

    length = max(len(sequence.ids) for sequence in batch)
    ids = torch.zeros(len(batch), length, dtype=torch.long)
    weights = torch.zeros(len(batch), length)
    for row, sequence in enumerate(batch):
        ids[row, : len(sequence.ids)] = torch.tensor(sequence.ids)
        weights[row, : len(sequence.ids)] = torch.tensor(sequence.weights)
    hidden = model.model(input_ids=ids, use_cache=False).last_hidden_state[:, :-1]
    counted = weights[:, 1:] > 0
    logits = model.lm_head(hidden[counted])
    each = torch.nn.functional.cross_entropy(logits, ids[:, 1:][counted], reduction="none")
    weight = weights[:, 1:][counted]
    return (each * weight).sum() / weight.sum()


if __name__ == "__main__":
    job_main(run)
