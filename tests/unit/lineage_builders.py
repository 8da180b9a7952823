"""A small store with one release in it, made by the store itself: rows are text, weights are not.

Parts: train t0..t3 (t3's answer was set aside), calibration c0..c3 (c1's was), draft d0 d1,
eval e0..e2 (the suite asks two), load l0..l3 (l1 is the last that was sent), foreign f0 f1.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow
import pyarrow.parquet

from registry.artifacts import ArtifactRef, Manifest, Stage
from registry.bundle import Bundle, Part
from registry.lineage import digest_below
from registry.store import Store

PARTS = {
    "train": ["t0", "t1", "t2", "t3"],
    "calibration": ["c0", "c1", "c2", "c3"],
    "draft": ["d0", "d1"],
    "eval": ["e0", "e1", "e2"],
    "load": ["l0", "l1", "l2", "l3"],
    "foreign": ["f0", "f1"],
}
SET_ASIDE = ("t3", "c1")
PROVENANCE = {
    "git": "a" * 40,
    "python": "3.11.7",
    "driver": {"torch": "2.13.0", "trl": None},
    "serve": {"vllm": "0.32.0"},
    "hardware": {"cpu": "EPYC", "gpus": ["H100"]},
    "hardware_fingerprint": "f00dfeed0000",
}


class Release(NamedTuple):
    store: Store
    refs: dict[str, ArtifactRef]
    stages: dict[str, Stage]

    def manifest(self, name: str) -> Manifest:
        return self.store.manifest(self.refs[name])

    def part(self, name: str, below: str = "") -> Part:
        ref = self.refs[name]
        digest = digest_below(self.manifest(name), below)
        return Part(stage=ref.stage, key=ref.key, below=below, digest=digest)

    def bundle(self, target: str = "quantize", draft: bool = True) -> Bundle:
        return Bundle(
            name=target,
            target=self.part(target, "merged" if target == "distill" else ""),
            draft=self.part("draft") if draft else None,
            num_speculative_tokens=3 if draft else None,
            engine_version="0.32.0",
        )


def text_of(identity: str) -> str:
    return f"Wo ist meine Bestellung {identity}, «bitte» & danke?"


def release(root: Path, seed: int = 7) -> Release:
    """Everything of one release below `root`."""
    store = Store(root)
    stages = stages_of(seed)
    writers = {
        "prompts": lambda folder: _prompts(folder, seed),
        "teacher_data": lambda folder: _teacher_data(folder, seed),
        "distill": lambda folder: _weights(folder / "merged", "distill"),
        "accuracy": _accuracy,
        "latency": _latency,
    }
    refs = {}
    for name, stage in stages.items():

        def produce(folder: Path, name: str = name) -> dict[str, Any]:
            return writers.get(name, lambda at: _weights(at, name))(folder) or {"rows": 3}

        refs[name] = store.make(stage, produce, PROVENANCE)
    return Release(store, refs, stages)


def stages_of(seed: int = 7) -> dict[str, Stage]:
    prompts = Stage(name="prompts", label="wo.csv", version=1, config={"seed": seed})
    base = Stage(name="model", label="student", version=1, config={"source": "path"})
    data = Stage(
        name="teacher_data",
        version=1,
        config={"engine": {"url": "http://me:secret@teacher/v1?key=x", "served_model": "big"}},
        parents={"prompts": prompts},
    )
    student = Stage(
        name="distill",
        version=1,
        config={"lora": {"r": 8}, "seed": 0},
        parents={"base": base, "data": data},
    )

    def quantize(label: str, source: str, samples: int, of: Stage) -> Stage:
        return Stage(
            name="quantize",
            label=label,
            version=1,
            config={
                "recipe": {"stage": {"GPTQModifier": {"scheme": "W8A8"}}},
                "calibration": {"source": source, "samples": samples},
            },
            parents={"student": student, "calibration": of, "held_out": data},
        )

    draft = Stage(
        name="draft",
        version=1,
        config={"epochs": 1},
        parents={"student": student, "prompts": prompts},
    )
    target = quantize("w8a8", "business", 2, data)
    both = {"prompts": prompts, "target": target}
    return {
        "prompts": prompts,
        "model": base,
        "teacher_data": data,
        "distill": student,
        "quantize": target,
        "foreign": quantize("w8a8_foreign", "foreign", 1, prompts),
        "draft": draft,
        "accuracy": Stage(name="accuracy", version=1, config={"suite": {"items": 2}}, parents=both),
        "latency": Stage(
            name="latency", version=1, config={"profile": {"scenarios": {}}}, parents=both
        ),
    }


def _prompts(folder: Path, seed: int) -> dict[str, Any]:
    for part, names in PARTS.items():
        rows = [{"id": name, "segment": f"de{seed}", "prompt": text_of(name)} for name in names]
        _jsonl(folder / f"{part}.jsonl", rows)
    return {"prompts": {part: len(names) for part, names in PARTS.items()}}


def _teacher_data(folder: Path, seed: int) -> dict[str, Any]:
    for part in ("train", "calibration"):
        kept = [name for name in PARTS[part] if name not in SET_ASIDE]
        _jsonl(
            folder / f"{part}.jsonl", [{"id": name, "messages": [], "seed": seed} for name in kept]
        )
    asked = PARTS["train"] + PARTS["calibration"]
    _jsonl(folder / "responses.jsonl", [{"id": name, "text": "x"} for name in asked])
    _jsonl(folder / "set_aside.jsonl", [{"id": name, "reason": "length"} for name in SET_ASIDE])
    return {"asked": len(asked), "answers": {"accepted": 6, "length": 2}}


def _accuracy(folder: Path) -> None:
    table = pyarrow.table({"item_id": PARTS["eval"][:2], "response": ["a", "b"]})
    pyarrow.parquet.write_table(table, folder / "items.parquet")


def _latency(folder: Path) -> None:
    # l0 was sent for warming up, so only l1 stands among the requests.
    pyarrow.parquet.write_table(pyarrow.table({"request_id": ["l1"]}), folder / "requests.parquet")


def _weights(folder: Path, name: str) -> None:
    folder.mkdir(exist_ok=True)
    (folder / "model.safetensors").write_text(name, encoding="utf-8")


def _jsonl(path: Path, rows: list[dict[str, Any]]) -> None:
    lines = (json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    path.write_text("".join(lines), encoding="utf-8")
