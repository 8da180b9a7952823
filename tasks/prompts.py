"""Stage `prompts`: the business prompts, in five parts that share no prompt.

Files: train.jsonl, calibration.jsonl, draft.jsonl, eval.jsonl, load.jsonl with records
`{id, segment, prompt, reference}`, and foreign.jsonl, text unlike the business.
"""

from __future__ import annotations

import math
from collections import Counter
from pathlib import Path
from typing import Any

from prefect import task

from recipes.schema import DemoPrompts, FilePrompts
from registry.artifacts import ArtifactRef, Stage
from registry.errors import UserError
from tasks import demo_data
from tasks.prompt_files import (
    PARTS,
    apply_template,
    digest_of_rows,
    labels_of,
    read_records,
    read_rows,
    split,
    write_jsonl,
)
from tasks.stages import TASK_OPTIONS, make

VERSION = 1
FOREIGN_ITEMS = 64


def stage(recipe: DemoPrompts | FilePrompts, seed: int, pretrain_messages: int = 0) -> Stage:
    """`pretrain_messages` of the demo's models are kept out of every part."""
    config: dict[str, Any] = {"seed": seed, "prompts": recipe.model_dump(mode="json")}
    if isinstance(recipe, DemoPrompts):
        config["pretrain_messages"] = pretrain_messages
        inputs = {"generator": demo_data.source_digest()}
        return Stage(name="prompts", label="demo", version=VERSION, config=config, inputs=inputs)
    path = Path(recipe.path)
    # A bad row, a missing column or too few prompts are found before anything is started.
    file_parts(recipe, seed)
    # Where the file lies does not count, what its rows say does.
    config["prompts"].pop("path")
    inputs = {"prompts": digest_of_rows(read_rows(path))}
    return Stage(name="prompts", label=path.name, version=VERSION, config=config, inputs=inputs)


@task(name="prompts", **TASK_OPTIONS)
def prepare_prompts(stage: Stage, recipe: DemoPrompts | FilePrompts) -> ArtifactRef:
    """Write the parts. Raises `UserError` for a bad file or too few prompts."""
    seed = stage.config["seed"]

    def produce(folder: Path) -> dict[str, Any]:
        parts = (
            demo_parts(stage, recipe)
            if isinstance(recipe, DemoPrompts)
            else file_parts(recipe, seed)
        )
        labels = labels_of(row for rows in parts.values() for row in rows)
        for part in PARTS:
            rows = parts[part]
            if recipe.template != "{prompt}":
                rows = apply_template(rows, recipe.template, labels)
            write_jsonl(folder / f"{part}.jsonl", rows)
        write_jsonl(folder / "foreign.jsonl", demo_data.foreign(seed, FOREIGN_ITEMS))
        return {
            "prompts": {part: len(rows) for part, rows in parts.items()},
            "segments": dict(Counter(row["segment"] for rows in parts.values() for row in rows)),
        }

    return make(stage, produce)


def demo_parts(stage: Stage, recipe: DemoPrompts) -> dict[str, list[dict[str, Any]]]:
    """Generated messages; what the demo's models were trained on is generated and left out."""
    kept = recipe.keep_segments or list(demo_data.SEGMENTS)
    unknown = sorted(set(kept) - set(demo_data.SEGMENTS))
    if unknown:
        raise UserError.at(
            "prompts.keep_segments",
            f"no segment {', '.join(unknown)}",
            f"one of {', '.join(demo_data.SEGMENTS)}",
        )
    # Segments take turns in the generator, so this many hold enough of those that are kept.
    share = len(demo_data.SEGMENTS) / len(kept)
    sizes: dict[str, int] = {part: math.ceil(size * share) for part, size in recipe.sizes.items()}
    sizes["pretrain"] = stage.config["pretrain_messages"]
    try:
        made = demo_data.generate(stage.config["seed"], sizes)
    except ValueError as error:
        raise UserError.at("prompts.sizes", str(error), "ask for fewer messages") from None
    return {
        part: [row for row in made[part] if row["segment"] in kept][:size]
        for part, size in recipe.sizes.items()
    }


def file_parts(recipe: FilePrompts, seed: int) -> dict[str, list[dict[str, Any]]]:
    """The rows of a file, dealt to the parts by segment."""
    records = read_records(Path(recipe.path), recipe.mapping)
    if recipe.keep_segments:
        found = {record["segment"] for record in records}
        unknown = sorted(set(recipe.keep_segments) - found)
        if unknown:
            raise UserError.at(
                f"{recipe.path}: prompts.keep_segments",
                f"no row has segment {', '.join(unknown)}",
                f"found are {', '.join(sorted(found)[:20])}",
            )
        records = [record for record in records if record["segment"] in recipe.keep_segments]
    sizes: dict[str, int] = {part: recipe.sizes[part] for part in recipe.sizes}
    return split(records, sizes, seed, recipe.path)
