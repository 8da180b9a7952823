"""The student learns the teacher's distribution, by TRL's own trainer and loss."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from registry.errors import StageFailed
from tasks.engines import logit_distillation, lora, loss_mask
from tests.integration.distill_builders import conversation, job, questions, student, write

GKD = {"lmbda": 0.0, "beta": 0.5, "temperature": 0.9, "seq_kd": False, "max_new_tokens": 8}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return student(tmp_path_factory.mktemp("base"))


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Another random model of the same tokenizer: its distributions are its own."""
    return student(tmp_path_factory.mktemp("teacher"), seed=1)


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("rows") / "train.jsonl", questions())


def logits_job(base: Path, rows: Path, out: Path, teacher: Path, **changes: Any) -> dict[str, Any]:
    gkd = {**GKD, **changes.pop("gkd", {})}
    settings = {"method": "logits", "teacher": str(teacher), "gkd": gkd}
    return job(base, rows, out, **settings, **changes)


def loaded(folder: Path) -> Any:
    import torch
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def examples(base: Path, rows: Path) -> list[loss_mask.Example]:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(base)
    return loss_mask.load(rows, tokenizer, [tokenizer.eos_token_id], 64).examples


def pairs(base: Path, rows: Path) -> list[logit_distillation.Pair]:
    return [logit_distillation.Pair(example) for example in examples(base, rows)]


def test_a_student_that_is_its_teacher_has_nothing_to_learn(base: Path, rows: Path) -> None:
    """TRL's loss over our labels: 0 for the same model, not 0 for another one."""
    trainer = logit_distillation.trainer_class()
    part = pairs(base, rows)[:4]
    batch = logit_distillation.collate(0)(logit_distillation.rows_of(part).to_list())
    model = loaded(base)
    same = model(batch["input_ids"], attention_mask=batch["attention_mask"]).logits
    labels = batch["labels"][:, 1:]
    for beta in (0.0, 0.5, 1.0):
        loss = trainer.generalized_jsd_loss(same[:, :-1], same[:, :-1], labels, beta=beta)  # type: ignore[attr-defined]
        assert abs(loss.item()) < 1e-6
    assert logit_distillation.divergence(model, model, part, 0, 2) == pytest.approx(0, abs=1e-6)


def test_it_comes_nearer_to_its_teacher(
    base: Path, teacher: Path, rows: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    result = lora.run(logits_job(base, rows, out, teacher, epochs=8))
    looks = result["looks"]
    assert result["chosen"]["held_out_kl"] < 0.5 * looks[0]["held_out_kl"]
    # What is served is the merged model: nearer to the teacher on rows that it has seen too.
    seen = pairs(base, rows)
    wanted = loaded(teacher)
    before = logit_distillation.divergence(loaded(base), wanted, seen, 0, 8)
    after = logit_distillation.divergence(loaded(out / "merged"), wanted, seen, 0, 8)
    assert after < 0.5 * before
    assert result["merge"]["float32"]["token_agreement"] == 1.0
    assert result["chosen"]["held_out_kl"] == min(look["held_out_kl"] for look in looks[1:])


@pytest.mark.parametrize("gkd", [{"lmbda": 1.0}, {"seq_kd": True, "beta": 1.0}], ids=str)
def test_answers_may_be_written_while_it_trains(
    base: Path, teacher: Path, rows: Path, tmp_path: Path, gkd: dict[str, Any]
) -> None:
    result = lora.run(logits_job(base, rows, tmp_path / "out", teacher, gkd=gkd, epochs=3))
    assert result["chosen"]["held_out_kl"] < result["looks"][0]["held_out_kl"]


def test_batches_gathered_into_a_step_weigh_what_one_batch_does(
    base: Path, teacher: Path, rows: Path, tmp_path: Path
) -> None:
    """Three batches of three rows: the mean of their losses, not the sum."""
    whole = lora.run(logits_job(base, rows, tmp_path / "whole", teacher, epochs=2))
    gathered = {"batch_size": 3, "training": {"gradient_accumulation_steps": 3}}
    parts = lora.run(logits_job(base, rows, tmp_path / "parts", teacher, epochs=2, **gathered))
    assert parts["steps"] == whole["steps"]
    assert [loss for _, loss in parts["curve"]] == pytest.approx(
        [loss for _, loss in whole["curve"]], rel=0.1
    )
    assert parts["chosen"]["held_out_kl"] == pytest.approx(whole["chosen"]["held_out_kl"], rel=0.1)


def test_a_run_that_was_killed_writes_the_same_answers_again(
    base: Path, teacher: Path, rows: Path, tmp_path: Path
) -> None:
    """Half of the batches are sampled from the student: the random states are in a checkpoint."""
    changes: dict[str, Any] = {"gkd": {"lmbda": 0.5}, "epochs": 3, "checkpoint_steps": 2}
    asked = logits_job(base, rows, tmp_path / "out", teacher, **changes)
    whole = lora.run(asked)
    saved = Path(asked["work_dir"]) / "checkpoints"
    shutil.rmtree(saved / f"checkpoint-{whole['steps']}")
    shutil.rmtree(tmp_path / "out")
    again = lora.run(asked)
    assert 0 < again["resumed_from"] < whole["steps"]
    assert again["curve"] == whole["curve"]
    assert again["looks"] == whole["looks"]


def test_the_teacher_alone_reads_its_context(
    base: Path, teacher: Path, rows: Path, tmp_path: Path
) -> None:
    context = {"role": "system", "content": "Answer as the desk does."}
    read = write(
        tmp_path / "read.jsonl",
        [{**row, "messages": [context, *row["messages"]]} for row in questions()],
    )
    result = lora.run(
        logits_job(base, rows, tmp_path / "out", teacher, teacher_file=str(read), epochs=8)
    )
    assert result["chosen"]["held_out_kl"] < 0.6 * result["looks"][0]["held_out_kl"]

    # The same figure by hand: behind the context on one side, without it on the other.
    theirs = {example.name: example for example in examples(base, read)}
    ours = examples(base, rows)
    assert all(len(theirs[one.name].input_ids) > len(one.input_ids) for one in ours)
    made = logit_distillation.paired(ours, theirs, 512)
    student, wanted = loaded(tmp_path / "out" / "merged"), loaded(teacher)
    by_hand = [one_by_one(student, wanted, pair) for pair in made]
    mean = sum(total for total, _ in by_hand) / sum(count for _, count in by_hand)
    found = logit_distillation.divergence(student, wanted, made, 0, 4)
    assert found == pytest.approx(mean, rel=1e-4)

    with pytest.raises(StageFailed, match="only stored answers"):
        lora.run(
            logits_job(
                base, rows, tmp_path / "no", teacher, teacher_file=str(read), gkd={"lmbda": 0.5}
            )
        )


def one_by_one(student: Any, teacher: Any, pair: logit_distillation.Pair) -> tuple[float, int]:
    import torch

    tables = []
    for model, example in ((student, pair.student), (teacher, pair.teacher)):
        assert example is not None
        with torch.no_grad():
            logits = model(torch.tensor([example.input_ids])).logits[0]
        places = [at - 1 for at, label in enumerate(example.labels) if label != loss_mask.IGNORE]
        tables.append(torch.log_softmax(logits[places], dim=-1))
    found, wanted = tables
    return float((wanted.exp() * (wanted - found)).sum()), len(found)


def test_answers_that_are_other_tokens_behind_the_context_are_refused() -> None:
    one = loss_mask.build("r", [("user", [1]), ("assistant", [5, 2])], [2])
    other = loss_mask.build("r", [("user", [1, 1]), ("assistant", [6, 2])], [2])
    longer = loss_mask.build("r", [("user", [1] * 50), ("assistant", [5, 2])], [2])
    assert logit_distillation.paired([one], {"r": longer}, 60)[0].teacher == longer
    for theirs, message in (({"r": other}, "not the same tokens"), ({}, "not the same tokens")):
        with pytest.raises(StageFailed, match=message):
            logit_distillation.paired([one], theirs, 60)
    with pytest.raises(StageFailed, match="52 tokens"):
        logit_distillation.paired([one], {"r": longer}, 40)


def changed(base: Path, folder: Path, **files: tuple[str, str]) -> Path:
    shutil.copytree(base, folder)
    for name, (old, new) in files.items():
        path = folder / name.replace("__", ".")
        text = path.read_text()
        assert old in text
        path.write_text(text.replace(old, new))
    return folder


def test_the_first_difference_of_two_tokenizers_is_named(base: Path, tmp_path: Path) -> None:
    assert logit_distillation.first_difference(base, base) is None
    token = changed(base, tmp_path / "token", tokenizer__json=('"<|system|>"', '"<|helper|>"'))
    found = logit_distillation.first_difference(base, token)
    assert found == "token 1 is '<|system|>' for the student and '<|helper|>' for the teacher"
    size = changed(base, tmp_path / "size", config__json=('"vocab_size": 512', '"vocab_size": 600'))
    found = logit_distillation.first_difference(base, size)
    assert found == "the student's logits have 512 places and the teacher's 600"
    template = changed(base, tmp_path / "template", chat_template__jinja=("<|end|>", "<|end|> "))
    found = logit_distillation.first_difference(base, template)
    assert found is not None and found.startswith("the chat templates differ: ")


def test_a_teacher_of_another_vocabulary_is_refused(base: Path, rows: Path, tmp_path: Path) -> None:
    other = changed(base, tmp_path / "other", tokenizer__json=('"<|system|>"', '"<|helper|>"'))
    with pytest.raises(StageFailed, match=r"token 1 is .*\n.*needs no common tokenizer"):
        lora.run(logits_job(base, rows, tmp_path / "out", other))


def test_an_answer_of_several_turns_is_compared_at_all_of_them(base: Path, tmp_path: Path) -> None:
    turns = conversation("two", "hi", "yo")
    turns["messages"] += [{"role": "user", "content": "so"}, {"role": "assistant", "content": "ok"}]
    path = write(tmp_path / "rows.jsonl", [turns])
    batch = logit_distillation.collate(0)(logit_distillation.rows_of(pairs(base, path)).to_list())
    assert int((batch["labels"] != loss_mask.IGNORE).sum()) == len("yo") + len("ok") + 2
