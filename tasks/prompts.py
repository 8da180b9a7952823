"""Stage `prompts`: the business prompts, in five parts that share no prompt.

Files: train.jsonl, calibration.jsonl, draft.jsonl, eval.jsonl, load.jsonl with records
`{id, segment, prompt, reference}` (`prompt_records.py` says what else), and foreign.jsonl, text
unlike the business; rejects.jsonl (line, reason, begin of the row) where the recipe lets bad rows
be left out.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prefect import task

from recipes.schema import DemoPrompts, FilePrompts
from registry.artifacts import ArtifactRef, Stage
from registry.digests import digest_of
from registry.errors import UserError
from tasks import demo_data
from tasks.conversations import with_system
from tasks.progress import LOG
from tasks.prompt_files import PARTS, write_jsonl
from tasks.prompt_formats import read_formatted
from tasks.prompt_records import all_records, sift
from tasks.prompt_split import apply_template, labels_of, split
from tasks.prompt_tables import Table, digest_of_rows
from tasks.rejects import REJECTS, Reject, by_kind, check_share, records_of
from tasks.stages import TASK_OPTIONS, make

VERSION = 1
FOREIGN_ITEMS = 64

_ADDED = {"system": None, "split": None, "format": "auto"}
_ADDED_TO_MAPPING = ("messages", "system", "tools")
"""Later fields of the recipe: not given, the key is that of before there were any."""


def stage(recipe: DemoPrompts | FilePrompts, seed: int, pretrain_messages: int = 0) -> Stage:
    """`pretrain_messages` of the demo's models are kept out of every part."""
    config: dict[str, Any] = {"seed": seed, "prompts": _written(recipe)}
    if isinstance(recipe, DemoPrompts):
        config["pretrain_messages"] = pretrain_messages
        inputs = {"generator": demo_data.source_digest()}
        return Stage(name="prompts", label="demo", version=VERSION, config=config, inputs=inputs)
    path = Path(recipe.path)
    # A bad row, a missing column or too few prompts are found before anything is started.
    found = read_file(recipe)
    file_parts(found, recipe, seed)
    # Where the file lies does not count, what its rows say does.
    config["prompts"].pop("path")
    inputs = {"prompts": digest_of_rows(found.table.rows)}
    if recipe.max_reject_share == 0:
        # Then nothing can be left out, and the key is that of before there was a share.
        config["prompts"].pop("max_reject_share")
    elif found.rejects:
        inputs["rejects"] = digest_of([reject.record() for reject in found.rejects])
    return Stage(name="prompts", label=path.name, version=VERSION, config=config, inputs=inputs)


def _written(recipe: DemoPrompts | FilePrompts) -> dict[str, Any]:
    written = recipe.model_dump(mode="json")
    mapping = written.get("mapping", {})
    for name in [name for name in _ADDED_TO_MAPPING if mapping.get(name) is None]:
        mapping.pop(name, None)
    return {
        name: value
        for name, value in written.items()
        if name not in _ADDED or value != _ADDED[name]
    }


@task(name="prompts", **TASK_OPTIONS)
def prepare_prompts(stage: Stage, recipe: DemoPrompts | FilePrompts) -> ArtifactRef:
    """Write the parts. Raises `UserError` for a bad file or too few prompts."""
    seed = stage.config["seed"]

    def produce(folder: Path) -> dict[str, Any]:
        left_out: dict[str, Any] = {}
        if isinstance(recipe, DemoPrompts):
            parts = demo_parts(stage, recipe)
        else:
            found = read_file(recipe)
            parts = file_parts(found, recipe, seed)
            if recipe.max_reject_share > 0:
                write_jsonl(folder / REJECTS, records_of(found.rejects))
                left_out = {"rejected": found.counts()}
            if found.table.unused:
                left_out["unused"] = dict(found.table.unused)
                LOG.info("%s: %s", recipe.path, _unused(found.table))
        labels = labels_of(row for rows in parts.values() for row in rows)
        for part in PARTS:
            rows = parts[part]
            if recipe.template != "{prompt}":
                rows = apply_template(rows, recipe.template, labels)
            if recipe.system is not None:
                system = recipe.system.replace("{labels}", ", ".join(labels))
                rows = [with_system(row, system) for row in rows]
            write_jsonl(folder / f"{part}.jsonl", rows)
        write_jsonl(folder / "foreign.jsonl", demo_data.foreign(seed, FOREIGN_ITEMS))
        return {
            "prompts": {part: len(rows) for part, rows in parts.items()},
            "segments": dict(Counter(row["segment"] for rows in parts.values() for row in rows)),
            **left_out,
        }

    return make(stage, produce)


def _unused(table: Table) -> str:
    counted = ", ".join(f"{name} ({rows} rows)" for name, rows in table.unused.items())
    return f"not used: {counted}; the teacher recipe says how answers are sampled"


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


@dataclass(frozen=True)
class FileFound:
    """What a prompt file holds: its rows, the records of the good ones, and the bad ones."""

    table: Table
    records: list[dict[str, Any]]
    rejects: list[Reject]

    def counts(self) -> dict[str, Any]:
        kinds = {kind: len(found) for kind, found in sorted(by_kind(self.rejects).items())}
        return {"rows": len(self.rejects), "of": len(self.table), "reasons": kinds}


def read_file(recipe: FilePrompts) -> FileFound:
    """Read a prompt file. Raises `UserError` for bad rows, or more than their share."""
    path = Path(recipe.path)
    table = read_formatted(path, recipe.format, recipe.split)
    if recipe.max_reject_share == 0:
        return FileFound(table, all_records(path, table, recipe.mapping), [])
    records, rejects = sift(path, table, recipe.mapping)
    check_share(rejects, len(table), recipe.max_reject_share, path)
    return FileFound(table, records, rejects)


def file_parts(found: FileFound, recipe: FilePrompts, seed: int) -> dict[str, list[dict[str, Any]]]:
    """The rows of a file, dealt to the parts by segment."""
    records = found.records
    if recipe.keep_segments:
        known = {record["segment"] for record in records}
        unknown = sorted(set(recipe.keep_segments) - known)
        if unknown:
            raise UserError.at(
                f"{recipe.path}: prompts.keep_segments",
                f"no row has segment {', '.join(unknown)}",
                f"found are {', '.join(sorted(known)[:20])}",
            )
        records = [record for record in records if record["segment"] in recipe.keep_segments]
    sizes: dict[str, int] = {part: recipe.sizes[part] for part in recipe.sizes}
    return split(records, sizes, seed, recipe.path)
