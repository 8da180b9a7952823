"""Answers and states on a disk, between the process that asks the engine and the one that trains.

`samples.jsonl` holds a line for each sample, beside it lies a safetensors file with its states.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from tasks.engines.draft_states import Sample

INDEX = "samples.jsonl"


def write_index(folder: Path, samples: Sequence[Sample]) -> None:
    lines = [
        json.dumps(
            {
                "id": sample.id,
                "segment": sample.segment,
                "tokens": sample.tokens,
                "prompt_length": sample.prompt_length,
                "finished": sample.finished,
                "states": sample.states_file.name if sample.states_file else None,
            }
        )
        for sample in samples
    ]
    (folder / INDEX).write_text("\n".join(lines) + "\n", encoding="utf-8")


def read_samples(folder: Path) -> list[Sample]:
    """Samples whose states are read when they are needed."""
    samples = []
    with (folder / INDEX).open(encoding="utf-8") as lines:
        for line in lines:
            row = json.loads(line)
            samples.append(
                Sample(
                    id=row["id"],
                    tokens=row["tokens"],
                    prompt_length=row["prompt_length"],
                    finished=row["finished"],
                    segment=row["segment"],
                    states_file=folder / row["states"],
                )
            )
    return samples
