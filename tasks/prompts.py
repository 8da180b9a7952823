"""Stage `prompts`: the business prompts, in five parts that share no prompt.

Files: train.jsonl, calibration.jsonl, draft.jsonl, eval.jsonl, load.jsonl with records
`{id, segment, prompt, reference}` (`prompt_records.py` says what else), and foreign.jsonl, text
unlike the business; rejects.jsonl (line, reason, begin of the row) where the recipe lets bad rows
be left out; report.md and disjointness.json say what the parts have in common (disjointness.py).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prefect import task

from recipes.schema import DemoPrompts, Disjointness, FilePrompts
from registry.artifacts import ArtifactRef, Stage
from registry.digests import digest_of
from registry.errors import Problem, StageFailed, UserError
from tasks import demo_data, disjointness
from tasks.conversations import with_system
from tasks.progress import LOG
from tasks.prompt_files import PARTS, write_jsonl
from tasks.prompt_formats import read_formatted
from tasks.prompt_records import all_records, sift, used_mapping
from tasks.prompt_report import write_report
from tasks.prompt_split import Split, apply_template, check_enough, labels_of, split
from tasks.prompt_tables import Table, digest_of_rows
from tasks.rejects import REJECTS, Reject, by_kind, check_share, records_of, refuse
from tasks.stages import TASK_OPTIONS, log_file, make

VERSION = 2
FOREIGN_ITEMS = 64

_ADDED = {"system": None, "split": None, "format": "auto"}
_ADDED_TO_MAPPING = ("messages", "system", "tools")
"""Later fields of the recipe: not given, the key is that of before there were any."""


def stage(
    recipe: DemoPrompts | FilePrompts,
    seed: int,
    pretrain_messages: int = 0,
    files: Mapping[str, FileFound] | None = None,
) -> Stage:
    """`pretrain_messages` of the demo's models are kept out of every part.

    `files`: what `read_files` found, where the caller has read them already.
    """
    config: dict[str, Any] = {"seed": seed, "prompts": _written(recipe)}
    if isinstance(recipe, DemoPrompts):
        config["pretrain_messages"] = pretrain_messages
        inputs = {"generator": demo_data.source_digest()}
        return Stage(name="prompts", label="demo", version=VERSION, config=config, inputs=inputs)
    # A bad row, a missing column or too few prompts are found before anything is started.
    files = read_files(recipe) if files is None else files
    records_by_file(files, recipe)
    # Where a file lies does not count, what its rows say does.
    config["prompts"].pop("path")
    config["prompts"].pop("files", None)
    if recipe.max_reject_share == 0:
        # Then nothing can be left out, and the key is that of before there was a share.
        config["prompts"].pop("max_reject_share")
    inputs = {}
    for name, found in files.items():
        inputs[".".join(filter(None, ["prompts", name]))] = digest_of_rows(found.table.rows)
        if found.rejects:
            digest = digest_of([reject.record() for reject in found.rejects])
            inputs[".".join(filter(None, ["rejects", name]))] = digest
    label = Path(recipe.path).name
    return Stage(name="prompts", label=label, version=VERSION, config=config, inputs=inputs)


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
        more: dict[str, Any] = {}
        known: dict[str, list[dict[str, Any]]] = {}
        if isinstance(recipe, DemoPrompts):
            made = demo_parts(stage, recipe)
            parts = {part: made[part] for part in PARTS}
            known = {"pretrain": made["pretrain"]} if made["pretrain"] else {}
        else:
            files = read_files(recipe)
            if recipe.max_reject_share > 0:
                write_jsonl(folder / REJECTS, _rejects_of(files))
                more["rejected"] = files[""].counts()
                more |= {f"rejected {part}": files[part].counts() for part in recipe.files}
            for name, found in files.items():
                if found.table.unused:
                    more[" ".join(filter(None, ["unused", name]))] = dict(found.table.unused)
                    LOG.info("%s: %s", _path(recipe, name), _unused(found.table))
            splits = file_parts(files, recipe, seed)
            parts = {part: splits[part if part in splits else ""].parts[part] for part in PARTS}
            more["groups"] = {_path(recipe, name).name: s.counts() for name, s in splits.items()}
        # Before the template: what it adds is common to all prompts.
        matrix = disjointness.measure({**known, **parts}, recipe.disjoint, seed)
        check_disjoint(stage, matrix, recipe.disjoint)
        counts = {
            "prompts": {part: len(rows) for part, rows in parts.items()},
            "segments": dict(Counter(row["segment"] for rows in parts.values() for row in rows)),
            **more,
        }
        write_report(folder, parts, counts, matrix, recipe.disjoint)
        labels = labels_of(row for rows in parts.values() for row in rows)
        for part in PARTS:
            rows = parts[part]
            # Where the labels are told, the references list them.
            if recipe.template != "{prompt}" or "{labels}" in (recipe.system or ""):
                rows = apply_template(rows, recipe.template, labels)
            if recipe.system is not None:
                system = recipe.system.replace("{labels}", ", ".join(labels))
                rows = [with_system(row, system) for row in rows]
            write_jsonl(folder / f"{part}.jsonl", rows)
        write_jsonl(folder / "foreign.jsonl", demo_data.foreign(seed, FOREIGN_ITEMS))
        return counts

    return make(stage, produce)


def check_disjoint(stage: Stage, matrix: disjointness.Matrix, rules: Disjointness) -> None:
    """Raise `StageFailed` with what may not be in common; all of it is written to the logs."""
    everything = log_file(stage, "in-common").with_suffix(".jsonl")
    if problems := disjointness.problems(matrix, rules, str(everything)):
        write_jsonl(everything, matrix.every_match())
        raise StageFailed(problems)


def _path(recipe: FilePrompts, name: str) -> Path:
    return Path(recipe.files[name] if name else recipe.path)  # type: ignore[index]


def _rejects_of(files: Mapping[str, FileFound]) -> Iterator[dict[str, Any]]:
    """Rejects of all files; of a part's own file they name the part."""
    for name, found in files.items():
        for record in records_of(found.rejects):
            yield {"part": name, **record} if name else record


def _unused(table: Table) -> str:
    counted = ", ".join(f"{name} ({rows} rows)" for name, rows in table.unused.items())
    return f"not used: {counted}; the teacher recipe says how answers are sampled"


def demo_parts(stage: Stage, recipe: DemoPrompts) -> dict[str, list[dict[str, Any]]]:
    """Generated messages by part; `pretrain` is what the demo's models were trained on."""
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
        **{
            part: [row for row in made[part] if row["segment"] in kept][:size]
            for part, size in recipe.sizes.items()
        },
        "pretrain": made["pretrain"],
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
    mapping = used_mapping(table, recipe.mapping)
    if mapping.id is None and any("id" in row.columns for row in table.rows[:1]):
        LOG.info("%s: rows are numbered, its column 'id' is not used; see prompts.mapping.id", path)
    if recipe.max_reject_share == 0:
        return FileFound(table, all_records(path, table, recipe.mapping), [])
    records, rejects = sift(path, table, recipe.mapping)
    check_share(rejects, len(table), recipe.max_reject_share, path)
    return FileFound(table, records, rejects)


def read_files(recipe: FilePrompts) -> dict[str, FileFound]:
    """What the files hold, by the part that a file belongs to; the one that is split by "".

    Raises `UserError` as `read_file` does.
    """
    found = {"": read_file(recipe)}
    for part, path in recipe.files.items():
        # The split is one of `path`; a part's own is a folder within its folder.
        found[part] = read_file(recipe.model_copy(update={"path": path, "split": None}))
    return found


def file_parts(files: Mapping[str, FileFound], recipe: FilePrompts, seed: int) -> dict[str, Split]:
    """The rows of the files, dealt to the parts by segment; by file as in `read_files`."""
    return {
        name: split(
            records,
            _sizes(recipe, name),
            seed,
            str(_path(recipe, name)),
            recipe.disjoint.threshold,
        )
        for name, records in records_by_file(files, recipe).items()
    }


def records_by_file(
    files: Mapping[str, FileFound], recipe: FilePrompts
) -> dict[str, list[dict[str, Any]]]:
    """The records of the wanted segments, with ids that differ over all files.

    Raises `UserError` for an unknown segment, too few prompts, or an id in two files.
    """
    found: dict[str, list[dict[str, Any]]] = {}
    holder: dict[str, str] = {}
    problems = []
    for name, one in files.items():
        records = _of_segments(one.records, recipe, str(_path(recipe, name)))
        check_enough(records, _sizes(recipe, name), str(_path(recipe, name)))
        numbered = used_mapping(one.table, recipe.mapping).id is None
        for record in records:
            if name and numbered:
                # Every file counts its rows from one.
                record["id"] = f"{name}-{record['id']}"
            if record["id"] in holder:
                problems.append(
                    Problem(
                        f"{_path(recipe, name)}: prompts.files.{name}",
                        f"id {record['id']!r} stands in {holder[record['id']]} too",
                        "ids are unique over all files of a release",
                    )
                )
            holder[record["id"]] = str(_path(recipe, name))
        found[name] = records
    if problems:
        raise refuse(problems, Path(recipe.path))
    return found


def _sizes(recipe: FilePrompts, name: str) -> dict[str, int]:
    """Prompts by part that a file has to give."""
    return {
        part: size
        for part, size in recipe.sizes.items()
        if part == name or (not name and part not in recipe.files)
    }


def _of_segments(
    records: list[dict[str, Any]], recipe: FilePrompts, source: str
) -> list[dict[str, Any]]:
    records = [dict(record) for record in records]
    if not recipe.keep_segments:
        return records
    known = {record["segment"] for record in records}
    unknown = sorted(set(recipe.keep_segments) - known)
    if unknown:
        raise UserError.at(
            f"{source}: prompts.keep_segments",
            f"no row has segment {', '.join(unknown)}",
            f"found are {', '.join(sorted(known)[:20])}",
        )
    return [record for record in records if record["segment"] in recipe.keep_segments]
