"""A draft serves what was made of its own student, every quantization of it, and nothing else."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from registry.artifacts import Stage
from registry.bundle import Bundle, Part
from registry.draft_binding import (
    acceptance_problem,
    acceptance_record,
    binding_problems,
    check_binding,
    folder_problems,
    lineage_root,
)
from registry.errors import StageFailed
from registry.evidence import LatencyEvidence
from registry.settings import settings
from registry.store import Store
from tasks.serving import bundle_of, part_of
from tests.unit.evidence_builders import latency, point

VOCAB, HIDDEN, LAYERS, DRAFT_VOCAB = 32, 8, 4, 6


def model(folder: Path, seed: int = 0, bits: int = 16, **config: Any) -> dict[str, Any]:
    """A target: only what a binding looks at is right about it."""
    folder.mkdir(parents=True, exist_ok=True)
    made = {"vocab_size": VOCAB, "hidden_size": HIDDEN, "num_hidden_layers": LAYERS,
            "eos_token_id": 2, "quantization_config": {"bits": bits}, **config}  # fmt: skip
    (folder / "config.json").write_text(json.dumps(made))
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer()))
    random = np.random.default_rng(seed)
    shape = (made["vocab_size"], made["hidden_size"])
    embeddings = random.standard_normal(shape).astype(np.float32)
    weights = np.full((4, 4), bits, dtype=np.float32)
    save_file({"model.embed_tokens.weight": embeddings, "w": weights}, folder / "m.safetensors")
    return {}


def tokenizer() -> dict[str, Any]:
    vocab = {f"t{number}": number for number in range(VOCAB)}
    return {"version": "1.0", "truncation": None, "model": {"vocab": vocab}, "added_tokens": []}


def draft(folder: Path, student: Path) -> dict[str, Any]:
    """A draft in speculators' layout, with a reduced vocabulary and its student's embeddings."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "speculators_model_type": "eagle3",
        "draft_vocab_size": DRAFT_VOCAB,
        "eagle_aux_hidden_state_layer_ids": [1, 2, LAYERS],
        "embed_requires_grad": False,
        "target_hidden_size": None,
        "transformer_layer_config": {"vocab_size": VOCAB, "hidden_size": HIDDEN},
    }
    (folder / "config.json").write_text(json.dumps(config))
    embeddings = load_file(student / "m.safetensors")["model.embed_tokens.weight"]
    flags = np.zeros(VOCAB, dtype=bool)
    flags[:DRAFT_VOCAB] = True
    tables = {"d2t": np.zeros(DRAFT_VOCAB, dtype=np.int64), "t2d": flags}
    fused = np.zeros((HIDDEN, 3 * HIDDEN), dtype=np.float32)
    save_file(
        {"embed_tokens.weight": embeddings, "fc.weight": fused, **tables},
        folder / "model.safetensors",
    )
    return {}


class Line:
    """A student, its quantizations and its draft in the store, as a release leaves them."""

    def __init__(self, seed: int = 0) -> None:
        self.store = Store(settings().store_dir)
        self.student = Stage(name="distill", version=1, config={"seed": seed})
        self.store.make(self.student, lambda folder: model(folder / "merged", seed), {})
        self.quantized = {
            bits: Stage(
                name="quantize", version=1, config={"b": bits}, parents={"student": self.student}
            )
            for bits in (8, 4)
        }
        for bits, stage in self.quantized.items():
            self.store.make(stage, lambda folder, bits=bits: model(folder, seed, bits), {})  # type: ignore[misc]
        merged = self.store.folder(self.student) / "files" / "merged"
        self.draft = Stage(name="draft", version=1, parents={"student": self.student})
        self.store.make(self.draft, lambda folder: draft(folder, merged), {})

    def targets(self) -> list[Part]:
        return [part_of(self.student, "merged"), *map(part_of, self.quantized.values())]


def test_it_serves_its_student_and_every_quantization_of_it() -> None:
    line = Line()
    root = line.targets()[0].digest
    for target in line.targets():
        check_binding(part_of(line.draft), target, line.store.root)
        assert lineage_root(target, line.store.root) == root
    assert lineage_root(part_of(line.draft), line.store.root) == root


def test_it_is_refused_for_a_target_of_another_student() -> None:
    line, other = Line(0), Line(1)
    for target in other.targets():
        with pytest.raises(StageFailed) as refusal:
            check_binding(part_of(line.draft), target, line.store.root)
        assert "trained for the student" in str(refusal.value)
        assert "the draft's copy of its student's is not what the target has" in str(refusal.value)


def test_it_is_refused_for_a_student_made_anew_with_the_same_weights() -> None:
    """The content of the root decides: the same name with another adapter is another root."""
    line = Line()
    again = Stage(name="distill", version=2, config={"seed": 0})

    def produce(folder: Path) -> dict[str, Any]:
        (folder / "adapter").write_text("another")
        return model(folder / "merged", 0)

    line.store.make(again, produce, {})
    with pytest.raises(StageFailed, match="trained for the student"):
        check_binding(part_of(line.draft), part_of(again, "merged"), line.store.root)


def test_it_is_refused_for_the_teacher() -> None:
    line = Line()
    teacher = Stage(name="model", version=1, label="teacher")
    line.store.make(teacher, lambda folder: model(folder, 7), {})
    with pytest.raises(
        StageFailed, match=r"no record that model .* was made from a merged student"
    ):
        check_binding(part_of(line.draft), part_of(teacher), line.store.root)


def test_without_a_record_of_its_student_it_is_refused() -> None:
    line = Line()
    alone = Stage(name="draft", version=2)
    line.store.make(alone, lambda folder: draft(folder, line.targets()[0].path), {})
    with pytest.raises(StageFailed, match="no record of the student that draft"):
        check_binding(part_of(alone), line.targets()[0], line.store.root)


def test_a_bundle_is_checked_when_it_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tasks.serving.engine_version", lambda: "0.32.0")
    line, other = Line(0), Line(1)
    config = {"num_speculative_tokens": 3}
    made = bundle_of("c", line.targets()[1], part_of(line.draft), config)
    assert made.root == line.targets()[0].digest
    assert binding_problems(made) == []
    with pytest.raises(StageFailed):
        bundle_of("c", other.targets()[1], part_of(line.draft), config)
    plain = bundle_of("c", other.targets()[1], None, {})
    assert plain.root == other.targets()[0].digest
    assert binding_problems(plain) == []


@pytest.mark.parametrize("name", ["draft", "draft_choice"])
def test_a_draft_made_for_quantized_weights_serves_no_other(name: str) -> None:
    """Trained for them, or chosen by serving it with them: the manifest names a target."""
    line = Line()
    merged = line.targets()[0].path
    parents = {"student": line.student, "target": line.quantized[8]}
    own = Stage(name=name, version=1, parents=parents)
    line.store.make(own, lambda folder: draft(folder / "d", merged), {})
    check_binding(part_of(own, "d"), part_of(line.quantized[8]), line.store.root)
    for other in (part_of(line.quantized[4]), line.targets()[0]):
        with pytest.raises(StageFailed, match=r"made for quantize .* this is") as told:
            check_binding(part_of(own, "d"), other, line.store.root)
        assert len(told.value.problems) == 1


def test_a_choice_for_the_student_itself_is_bound_to_it() -> None:
    line = Line()
    merged = line.targets()[0].path
    parents = {"student": line.student, "target": line.student}
    own = Stage(name="draft_choice", version=1, parents=parents)
    line.store.make(own, lambda folder: draft(folder / "d", merged), {})
    check_binding(part_of(own, "d"), line.targets()[0], line.store.root)
    with pytest.raises(StageFailed, match=r"made for distill .* this is quantize"):
        check_binding(part_of(own, "d"), part_of(line.quantized[8]), line.store.root)


def test_training_may_put_the_targets_embeddings_into_a_draft() -> None:
    """So where training starts from a published draft, its copy may be another student's."""
    line, other = Line(0), Line(1)
    drafted, target = part_of(line.draft).path, other.targets()[0].path
    (told,) = folder_problems(drafted, target)
    assert "the draft's copy of its student's is not what the target has" in told
    assert folder_problems(drafted, target, embeddings=False) == []


# -- folders alone ---------------------------------------------------------------------------


def rewritten(change: Callable[[dict[str, Any]], Any]) -> Callable[[Path], None]:
    def write(file: Path) -> None:
        content = json.loads(file.read_text())
        change(content)
        file.write_text(json.dumps(content))

    return write


CONFIG, WEIGHTS = "config.json", "model.safetensors"


def narrow_input(file: Path) -> None:
    found = load_file(file)
    save_file({**found, "fc.weight": found["fc.weight"][:, :-1].copy()}, file)


@pytest.mark.parametrize(
    ("side", "file", "change", "reason"),
    [
        ("target", CONFIG, rewritten(lambda c: c.update(vocab_size=33)), "has 32 tokens, this 33"),
        ("target", CONFIG, rewritten(lambda c: c.update(hidden_size=16)), "reads 8, the target"),
        ("target", CONFIG, rewritten(lambda c: c.update(num_hidden_layers=3)), "layers 0 to 3"),
        ("target", CONFIG, rewritten(lambda c: c.pop("vocab_size")), "vocab_size is None"),
        ("target", CONFIG, Path.unlink, "cannot be read"),
        ("target", CONFIG, lambda file: file.write_text("[]"), "not a JSON object"),
        ("draft", CONFIG, rewritten(lambda c: c.update(draft_vocab_size=64)), "proposes 64 tokens"),
        ("draft", CONFIG, rewritten(lambda c: c.update(draft_vocab_size=7)), "d2t has (6,)"),
        ("draft", CONFIG, rewritten(lambda c: c.update(target_hidden_size=16)), "reads 16"),
        (
            "draft",
            CONFIG,
            rewritten(lambda c: c.update(eagle_aux_hidden_state_layer_ids=[2, 2, 3])),
            "[2, 2, 3] are not 3 different ones",
        ),
        (
            "draft",
            CONFIG,
            rewritten(lambda c: c.update(eagle_aux_hidden_state_layer_ids=[-1, 2, 3])),
            "the draft reads [-1, 2, 3]",
        ),
        (
            "draft",
            CONFIG,
            rewritten(lambda c: c.update(eagle_aux_hidden_state_layer_ids="1,2")),
            "not a list",
        ),
        ("draft", WEIGHTS, narrow_input, "reads 23 values, 3 states of the target have 24"),
        ("draft", WEIGHTS, Path.unlink, "no *.safetensors file"),
        ("draft", WEIGHTS, lambda file: file.write_bytes(b"\xff" * 20), "cannot be read as safet"),
    ],
)
def test_what_the_folders_alone_say(
    tmp_path: Path, side: str, file: str, change: Callable[[Path], Any], reason: str
) -> None:
    model(tmp_path / "target")
    draft(tmp_path / "draft", tmp_path / "target")
    assert folder_problems(tmp_path / "draft", tmp_path / "target") == []
    change(tmp_path / side / file)
    problems = folder_problems(tmp_path / "draft", tmp_path / "target")
    assert any(reason in problem for problem in problems), problems


def test_another_student_is_found_out_without_manifests(tmp_path: Path) -> None:
    model(tmp_path / "target", seed=0)
    model(tmp_path / "other", seed=1)
    draft(tmp_path / "draft", tmp_path / "other")
    (problem,) = folder_problems(tmp_path / "draft", tmp_path / "target")
    assert problem.startswith("embeddings:")


def test_a_layout_of_eagle_itself_is_read(tmp_path: Path) -> None:
    model(tmp_path / "target", num_hidden_layers=3)
    draft(tmp_path / "draft", tmp_path / "target")
    config = {
        "vocab_size": VOCAB,
        "hidden_size": HIDDEN,
        "draft_vocab_size": DRAFT_VOCAB,
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 2, 4]},
    }
    (tmp_path / "draft" / CONFIG).write_text(json.dumps(config))
    (problem,) = folder_problems(tmp_path / "draft", tmp_path / "target")
    assert "[1, 2, 4]" in problem


def test_another_tokenizer_is_refused_and_another_truncation_is_not() -> None:
    line = Line()
    target = line.targets()[1]
    file = target.path / "tokenizer.json"
    file.write_text(json.dumps({**tokenizer(), "truncation": {"max_length": 9}}))
    check_binding(part_of(line.draft), target, line.store.root)
    swapped = tokenizer()
    swapped["model"]["vocab"] |= {"t3": 4, "t4": 3}
    file.write_text(json.dumps(swapped))
    with pytest.raises(StageFailed, match=r"tokenizer\.json of its student is not the target's"):
        check_binding(part_of(line.draft), target, line.store.root)


def test_a_version_without_manifests_is_checked_by_its_folders() -> None:
    line, other = Line(0), Line(1)
    for stage in (line.student, line.draft, other.student, *other.quantized.values()):
        (line.store.folder(stage) / "manifest.json").unlink()
    drafted = Part(stage="draft", key=line.draft.key, digest="d")

    def pair(stage: Stage) -> Bundle:
        target = Part(stage=stage.name, key=stage.key, digest="t")
        return Bundle(name="c", target=target, draft=drafted, engine_version="0")

    assert binding_problems(pair(line.quantized[8])) == []
    assert binding_problems(pair(other.quantized[8])) != []
    shutil.rmtree(line.store.folder(line.draft))
    (problem,) = binding_problems(pair(line.quantized[8]))
    assert "cannot be read" in problem


# -- the pair's own measurement --------------------------------------------------------------


def measured(*points: tuple[float | None, int]) -> LatencyEvidence:
    told = [{"acceptance_length": length, "ok": ok} for length, ok in points]
    return latency("b", *(point().model_copy(update=one) for one in told))


def test_the_acceptance_record_is_a_mean_over_requests() -> None:
    assert acceptance_record(measured((2.0, 30), (3.0, 10))) == pytest.approx(2.25)
    assert acceptance_record(measured((None, 30), (3.0, 10), (9.0, 0))) == 3.0
    assert acceptance_record(measured((None, 30))) is None
    assert acceptance_record(measured((2.0, 0))) is None
    assert acceptance_record(measured()) is None


@pytest.mark.parametrize(
    ("length", "tokens_per_s", "told"),
    [
        (1.02, 50.0, "of about 588 proposals of its draft 0.67% were accepted under load"),
        (1.02, 10.0, None),
        (1.04, 50.0, None),
        (2.5, 50.0, None),
        (None, 50.0, "no acceptance length is recorded for this draft on this target"),
    ],
)
def test_next_to_nothing_accepted_under_load_is_a_broken_draft(
    length: float | None, tokens_per_s: float, told: str | None
) -> None:
    """At most 1 % of 200 proposals or more: 4 s of so many tokens, three proposals a step."""
    one = point().model_copy(
        update={
            "acceptance_length": length,
            "ok": 10,
            "output_tokens_per_s": tokens_per_s,
            "duration_s": 4.0,
        }
    )
    found = acceptance_problem(latency("b", one), 3)
    assert (found is None) if told is None else (found or "").startswith(told)
