"""A draft serves the targets that were made from the student it was trained for, and no other.

Three witnesses are asked, and everything that any of them says against the pair is told:

* the manifests: draft and target name the same merged student, by the digest of its content;
* the configs: vocabulary, hidden size and auxiliary layers of the draft fit the target;
* the weights: the draft's own copy of the student's embeddings is the target's, and its input
  layer is as wide as the target's hidden states are.

A downloaded version has no manifests; then the other two speak. The vocabulary map's content is
checked where the draft is made (`tasks/engines/draft_vocab.py`); the digest keeps it since.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from registry.artifacts import Manifest
from registry.bundle import Bundle, Part
from registry.digests import digest_of_file
from registry.errors import Problem, StageFailed, UserError
from registry.evidence import LatencyEvidence
from registry.json_files import json_object
from registry.lineage import digest_below
from registry.safetensors_headers import Tensor, tensors
from registry.settings import settings
from registry.store import MANIFEST

STUDENT_STAGE = "distill"
MERGED = "merged"
AUX_LAYERS = 3
"""Hidden states that an EAGLE3 draft is fed with."""

DEAD_SHARE, DEAD_PROPOSALS = 0.01, 200
"""A draft of whose proposals, this many or more, at most this share is accepted is broken: a map
between the vocabularies, a layer or a norm is not what the engine takes it for."""

REMEDY = "train a draft for this target's own student; a draft fits no other model"

_LAYER_IDS = "eagle_aux_hidden_state_layer_ids"
_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json", "merges.txt", "tekken.json")
_NOT_TOKENS = ("version", "truncation", "padding")
"""Sections of tokenizer.json that give no token another number."""


@dataclass(frozen=True)
class Student:
    """The lineage root: an artifact of stage `distill`, and the digest of its content."""

    key: str
    digest: str


def check_binding(draft: Part, target: Part, store_root: Path) -> None:
    """Raise `StageFailed` with every reason why the draft is not one for this target."""
    problems = lineage_problems(draft, target, store_root)
    problems += folder_problems(_folder(draft, store_root), _folder(target, store_root))
    if problems:
        where = f"draft {draft.key[:12]} for {target.stage} {target.key[:12]}"
        raise StageFailed([Problem(where, problem, REMEDY) for problem in problems])


def binding_problems(bundle: Bundle) -> list[str]:
    """What speaks against a bundle's pair; empty for one that fits, and without a draft.

    What the store no longer records of the pair is not asked (a downloaded version).
    """
    if bundle.draft is None:
        return []
    root = settings().store_dir
    recorded = all(_manifest(part, root) for part in (bundle.draft, bundle.target))
    lineage = lineage_problems(bundle.draft, bundle.target, root) if recorded else []
    return lineage + folder_problems(bundle.draft.path, bundle.target.path)


def acceptance_record(evidence: LatencyEvidence) -> float | None:
    """Mean tokens per target step of the pair that was measured, over all its answered requests.

    None where no load point says any: nobody knows then whether the draft does anything.
    """
    told = [
        (point.acceptance_length, point.ok)
        for point in evidence.points
        if point.acceptance_length is not None and point.ok > 0
    ]
    answered = sum(ok for _, ok in told)
    return sum(length * ok for length, ok in told) / answered if answered else None


def acceptance_problem(evidence: LatencyEvidence, speculative_tokens: int) -> str | None:
    """What the load test's own acceptance says against the draft; None: nothing.

    A draft of whose proposals next to none is accepted is broken, not slow, whatever the rest of
    the load test says. Tokens that were generated, divided by the acceptance length, are drafts.
    """
    length = acceptance_record(evidence)
    if length is None:
        return "no acceptance length is recorded for this draft on this target"
    tokens = sum((p.output_tokens_per_s or 0.0) * p.duration_s for p in evidence.points if p.ok)
    proposed = speculative_tokens * tokens / length
    share = (length - 1.0) / speculative_tokens
    if proposed >= DEAD_PROPOSALS and share <= DEAD_SHARE:
        return (
            f"of about {proposed:.0f} proposals of its draft {share:.2%} were accepted under load; "
            "at most 1 % means that the draft is broken"
        )
    return None


# -- the manifests ---------------------------------------------------------------------------


def lineage_root(part: Part, store_root: Path) -> str:
    """Digest of the folder of the merged student behind a part; empty where none is recorded."""
    student = student_of(part, store_root)
    if student is None:
        return ""
    manifest = _read(store_root / STUDENT_STAGE / student.key / MANIFEST)
    if manifest is None or manifest.digest != student.digest:
        return ""
    return digest_below(manifest, MERGED)


def student_of(part: Part, store_root: Path) -> Student | None:
    """The student that a target was made from, or a draft was trained for; None: no record."""
    manifest = _manifest(part, store_root)
    if manifest is None:
        return None
    if manifest.stage == STUDENT_STAGE:
        return Student(manifest.key, manifest.digest)
    parent = manifest.parents.get("student")
    return Student(parent["key"], parent["digest"]) if parent else None


def lineage_problems(draft: Part, target: Part, store_root: Path) -> list[str]:
    """Whether both come from one student, by what their manifests say.

    A draft has no tokenizer of its own: it speaks its student's, so the target has to as well.
    A draft that names a target (trained for quantized weights, or chosen by serving it with them)
    is one for these weights only.
    """
    problems = []
    trained_for, made_from = student_of(draft, store_root), student_of(target, store_root)
    if trained_for is None:
        problems.append(f"no record of the student that draft {draft.key[:12]} was trained for")
    if made_from is None:
        name = f"{target.stage} {target.key[:12]}"
        problems.append(f"no record that {name} was made from a merged student")
    if trained_for and made_from and trained_for.digest != made_from.digest:
        problems.append(
            f"the draft was trained for the student {_student(trained_for)}, "
            f"the target was made from {_student(made_from)}"
        )
    own, given = _manifest(draft, store_root), _manifest(target, store_root)
    bound = own.parents.get("target") if own else None
    if bound and given and bound["digest"] != given.digest:
        problems.append(
            f"the draft was made for {bound['stage']} {bound['key'][:12]} with content "
            f"{bound['digest'][:12]}, this is {given.stage} {given.key[:12]} with "
            f"{given.digest[:12]}"
        )
    if trained_for is not None:
        spoken = store_root / STUDENT_STAGE / trained_for.key / "files" / MERGED
        problems += _tokenizer_problems(spoken, _folder(target, store_root), "its student")
    return problems


def _student(student: Student) -> str:
    return f"{student.key[:12]} with content {student.digest[:12]}"


def _folder(part: Part, store_root: Path) -> Path:
    return store_root / part.stage / part.key / "files" / part.below


def _manifest(part: Part, store_root: Path) -> Manifest | None:
    return _read(store_root / part.stage / part.key / MANIFEST)


def _read(path: Path) -> Manifest | None:
    try:
        return Manifest.model_validate_json(path.read_bytes())
    except (OSError, ValidationError):
        return None


# -- the folders -----------------------------------------------------------------------------


def folder_problems(draft: Path, target: Path, *, embeddings: bool = True) -> list[str]:
    """What configs, tokenizers and weights of the two folders say against the pair.

    Of the draft both layouts are known, speculators' and EAGLE's own. Without `embeddings` its
    copy of them may be another's: training puts the target's there.
    """
    try:
        wanted = _DraftShape.read(json_object(draft / "config.json"))
        given = _TargetShape.read(json_object(target / "config.json"))
        return [
            *_shape_problems(wanted, given),
            *_weight_problems(wanted, given, _weights(draft), _weights(target), embeddings),
            *_tokenizer_problems(draft, target, "the draft"),
        ]
    except UserError as error:
        return [f"{problem.where}: {problem.what}" for problem in error.problems]


@dataclass(frozen=True)
class _TargetShape:
    vocab: int
    hidden: int
    layers: int

    @classmethod
    def read(cls, config: dict[str, Any]) -> _TargetShape:
        text = section(config, "text_config") or config
        return cls(*(positive(text, name) for name in
                     ("vocab_size", "hidden_size", "num_hidden_layers")))  # fmt: skip


@dataclass(frozen=True)
class _DraftShape:
    vocab: int
    target_vocab: int
    target_hidden: int
    aux_layers: list[Any] | None
    frozen_embeddings: bool

    @classmethod
    def read(cls, config: dict[str, Any]) -> _DraftShape:
        inner = section(config, "transformer_layer_config") or config
        vocab, hidden = positive(inner, "vocab_size"), positive(inner, "hidden_size")
        return cls(
            vocab=positive(config, "draft_vocab_size", vocab),
            target_vocab=vocab,
            target_hidden=positive(config, "target_hidden_size", hidden),
            aux_layers=named_layer_ids(config),
            frozen_embeddings=config.get("embed_requires_grad") is False,
        )


def _shape_problems(draft: _DraftShape, target: _TargetShape) -> Iterator[str]:
    if draft.target_vocab != target.vocab:
        yield f"vocabulary: the draft's target has {draft.target_vocab} tokens, this {target.vocab}"
    if draft.vocab > target.vocab:
        yield f"vocabulary: the draft proposes {draft.vocab} tokens, the target has {target.vocab}"
    if draft.target_hidden != target.hidden:
        yield f"hidden size: the draft reads {draft.target_hidden}, the target has {target.hidden}"
    ids = draft.aux_layers
    if ids is None:
        return
    # 0 is the embeddings' output, `layers` the last layer's; vLLM collects them in rising order.
    usable = all(type(one) is int and 0 <= one <= target.layers for one in ids)
    if not usable:
        yield f"layer ids: the draft reads {ids}, the target has layers 0 to {target.layers}"
    elif len(ids) != AUX_LAYERS or ids != sorted(set(ids)):
        yield f"layer ids: {ids} are not {AUX_LAYERS} different ones in rising order"


def _weights(folder: Path) -> dict[str, Tensor]:
    found = tensors(folder)
    if not found:
        raise UserError.at(folder, "has no *.safetensors file with weights")
    return found


def _weight_problems(
    draft: _DraftShape,
    target: _TargetShape,
    drafts: dict[str, Tensor],
    targets: dict[str, Tensor],
    embeddings: bool,
) -> Iterator[str]:
    fused = drafts.get("fc.weight")
    reads = AUX_LAYERS * target.hidden
    if fused is not None and fused.shape[-1] != reads:
        yield (
            f"hidden size: the draft's input layer reads {fused.shape[-1]} values, "
            f"{AUX_LAYERS} states of the target have {reads}"
        )
    for name, entries in (("d2t", draft.vocab), ("t2d", target.vocab)):
        for table in (tensor for found, tensor in drafts.items() if name in found):
            if table.shape != (entries,):
                yield f"vocabulary: {name} has {table.shape} entries, {entries} are needed"
    copied = _embeddings(drafts)
    own = _embeddings(targets)
    if copied is None or own is None or not (embeddings and draft.frozen_embeddings):
        return
    if copied.shape != own.shape:
        yield f"embeddings: the draft has {copied.shape}, the target {own.shape}"
    elif copied.dtype == own.dtype and not _same_bytes(copied, own):
        yield "embeddings: the draft's copy of its student's is not what the target has"


def _embeddings(found: dict[str, Tensor]) -> Tensor | None:
    return next((t for name, t in found.items() if name.endswith("embed_tokens.weight")), None)


def _same_bytes(one: Tensor, other: Tensor, portion: int = 1 << 24) -> bool:
    if one.size != other.size:
        return False
    with one.file.open("rb") as first, other.file.open("rb") as second:
        first.seek(one.start)
        second.seek(other.start)
        left = one.size
        while left:
            read = min(portion, left)
            if first.read(read) != second.read(read):
                return False
            left -= read
    return True


def _tokenizer_problems(spoken: Path, target: Path, whose: str) -> Iterator[str]:
    """`spoken`: the folder whose tokens a draft proposes; without a tokenizer it says nothing."""
    for name in _TOKENIZERS:
        if (spoken / name).is_file() and _token_table(spoken / name) != _token_table(target / name):
            yield f"tokenizer: {name} of {whose} is not the target's"


def _token_table(file: Path) -> Any:
    """What decides a token's number; None where there is no such file."""
    if not file.is_file():
        return None
    if file.name != "tokenizer.json":
        return digest_of_file(file)
    return {name: part for name, part in json_object(file).items() if name not in _NOT_TOKENS}


def named_layer_ids(config: dict[str, Any]) -> list[Any] | None:
    """The target's layers that a draft reads, in both layouts; None: the engine's default."""
    ids = config.get(_LAYER_IDS)
    if ids is None:
        ids = section(config, "eagle_config").get(_LAYER_IDS)
    if ids is not None and not isinstance(ids, list):
        raise UserError.at("config.json", f"{_LAYER_IDS} is {ids!r}, not a list")
    return ids


def section(config: dict[str, Any], name: str) -> dict[str, Any]:
    """An object within a config of somebody else's making; empty where there is none."""
    found = config.get(name)
    if found is None:
        return {}
    if not isinstance(found, dict):
        raise UserError.at("config.json", f"{name} is {found!r}, not an object")
    return found


def positive(config: dict[str, Any], name: str, default: int | None = None) -> int:
    value = config.get(name)
    if value is None and default is not None:
        return default
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise UserError.at("config.json", f"{name} is {value!r}, not a positive number")
    return value
