"""What `lm_eval --output_path DIR --log_samples` leaves, read as accuracy evidence and items.

One run is one results file (`results_DATE.json`, or `NAME_DATE.json` where `--output_path` named
a file) and one `samples_TASK_DATE.jsonl` per task, in DIR or in a folder of it that is named after
the model. The samples hold one line per item and filter. The format is that of lm-eval 0.4.13; what
the files of another version lack is a reason, not a guess.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from registry.digests import digest_of
from registry.evidence import SUMMARY, AccuracyEvidence, Unusable, finite
from registry.item_files import Table, doubled_text, few, json_lines, refuse_file, shown
from registry.items import Items, make_items

_DATE = r"\d{4}-\d\d-\d\dT[\d.-]+"
_RESULTS = re.compile(rf"(?:.*_)?(?P<date>{_DATE})\.json")
_SAMPLES = re.compile(rf"samples_(?P<task>.+?)(?:_(?P<date>{_DATE}))?\.jsonl")
_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")

ONE_RUN = "name one folder per run"


@dataclass(frozen=True)
class Files:
    """Files of lm-eval in one folder, of one run or of several."""

    folder: Path
    results: list[Path]
    samples: list[Path]

    def __bool__(self) -> bool:
        return bool(self.results or self.samples)


def find_files(folder: Path) -> list[Files]:
    """The folders with files of lm-eval: `folder` itself, else those directly in it."""
    here = _files_in(folder, any_name=True)
    if here:
        return [here]
    # By name only: below a folder of models lie large JSON files of other kinds.
    below = [_files_in(path, any_name=False) for path in sorted(folder.iterdir()) if path.is_dir()]
    return [files for files in below if files]


def _files_in(folder: Path, any_name: bool) -> Files:
    paths = sorted(path for path in folder.iterdir() if path.is_file())
    return Files(
        folder,
        [path for path in paths if path.suffix == ".json" and _are_results(path, any_name)],
        [path for path in paths if _SAMPLES.fullmatch(path.name)],
    )


def _are_results(path: Path, any_name: bool) -> bool:
    if path.name.startswith("results"):
        return True
    if path.name == SUMMARY or not (any_name or _RESULTS.fullmatch(path.name)):
        return False
    try:
        content = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(content, dict) and isinstance(content.get("results"), dict)


def read_run(files: Files) -> tuple[AccuracyEvidence, Items | None]:
    """Evidence of one run, and its items where samples were logged. Raises `Unusable`.

    With samples, an item counts as scored when every filter of its task has a line for it;
    without, the results' own count is all there is.
    """
    if not files.results:
        raise Unusable(
            f"{files.folder}: {few(path.name for path in files.samples)} without a results file: "
            "name the folder that --output_path named"
        )
    if len(files.results) > 1:
        names = few(path.name for path in files.results)
        raise Unusable(f"{files.folder}: results of several runs: {names}: {ONE_RUN}")
    path = files.results[0]
    content = _content(path)
    counts = _counts(path, content)
    samples = _samples_by_task(files, path, list(counts))
    items = None
    scored, digest = sum(effective for _, effective in counts.values()), ""
    if samples:
        try:
            items, scored, digest = _read_samples(files.folder, samples)
        except OSError as error:
            raise Unusable(f"{files.folder}: cannot be read: {error.strerror}") from None
    return _evidence(content, counts, scored, digest), items


# -- results ---------------------------------------------------------------------------------


def _content(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise Unusable(f"{path}: cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise Unusable(f"{path}: not JSON: {error}") from None
    if not isinstance(content, dict) or not isinstance(content.get("results"), dict):
        raise Unusable(f"{path}: not an object with `results`")
    return content


def _counts(path: Path, content: Mapping[str, Any]) -> dict[str, tuple[int, int]]:
    """Items of each task, before and after a limit."""
    found = content.get("n-samples")
    if not isinstance(found, dict) or not found:
        raise Unusable(f"{path}: no `n-samples`: nobody knows how many items were asked")
    counts: dict[str, tuple[int, int]] = {}
    for task, entry in found.items():
        original, effective = (_mapping(entry).get(key, -1) for key in ("original", "effective"))
        if not (type(original) is int and type(effective) is int and min(original, effective) >= 0):
            raise Unusable(f"{path}: n-samples of {shown(task)} is {shown(entry)}")
        if not isinstance(content["results"].get(task), dict):
            raise Unusable(f"{path}: no results of task {shown(task)}, which n-samples lists")
        counts[task] = (original, effective)
    # A group's results are means of its tasks'; it has no items of its own.
    groups = {*_mapping(content.get("groups")), *_mapping(content.get("group_subtasks"))}
    uncounted = [name for name in content["results"] if name not in counts and name not in groups]
    if uncounted:
        raise Unusable(f"{path}: no n-samples of task {few(uncounted)}")
    return counts


def _evidence(
    content: Mapping[str, Any], counts: Mapping[str, tuple[int, int]], scored: int, digest: str
) -> AccuracyEvidence:
    config = _mapping(content.get("config"))
    versions = _mapping(content.get("versions"))
    tasks = sorted(counts)
    version = content.get("lm_eval_version")
    seconds = content.get("total_evaluation_time_seconds")
    return AccuracyEvidence(
        bundle="",
        suite=", ".join(tasks),
        task=", ".join(tasks),
        task_version=", ".join(str(versions.get(task)) for task in tasks),
        engine=str(config.get("model") or "unknown"),
        harness=f"lm-eval {version}" if version else "lm-eval, version not recorded",
        items_digest=digest,
        settings=_settings(content, tasks),
        items_asked=sum(effective for _, effective in counts.values()),
        items_scored=scored,
        metrics=_metrics(content["results"], counts),
        limited=config.get("limit") is not None
        or any(effective < original for original, effective in counts.values()),
        measured_at=_moment(content.get("date")),
        seconds=_float(seconds),
    )


def _metrics(
    results: Mapping[str, Mapping[str, Any]], counts: Mapping[str, tuple[int, int]]
) -> dict[str, float | None]:
    """Mean over all items by `name,filter`; None where a task has no finite number for it."""
    by_task = {
        task: {
            name: _mean(value)
            for name, value in results[task].items()
            if "," in name and not name.partition(",")[0].endswith("_stderr")
        }
        for task in counts
    }
    total = sum(effective for _, effective in counts.values())
    means: dict[str, float | None] = {}
    for name in sorted({name for metrics in by_task.values() for name in metrics}):
        values = [(counts[task][1], metrics.get(name)) for task, metrics in by_task.items()]
        known = [(count, value) for count, value in values if value is not None]
        if len(known) < len(values) or not total:
            means[name] = None
        elif len(known) == 1:
            # Not through a product: the number in the file, to the last bit.
            means[name] = float(known[0][1])
        else:
            means[name] = math.fsum(count * value for count, value in known) / total
    return means


def _mean(value: Any) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return _float(value)


def _settings(content: Mapping[str, Any], tasks: list[str]) -> dict[str, Any]:
    """What was asked and how; empty, which is unknown, when the file does not say.

    Not in it, because it may differ between two runs that are compared: model, its arguments,
    device, batch size, date.
    """
    shots, versions = _mapping(content.get("n-shot")), _mapping(content.get("versions"))
    if "chat_template_sha" not in content or any(
        task not in shots or task not in versions for task in tasks
    ):
        return {}
    config = _mapping(content.get("config"))
    template = content["chat_template_sha"]
    # The hash covers the rendered prompts. With a template of the model's own they differ where
    # the template may (teacher and student of two families), so it is named after the template.
    hash_name = "task_hash" if template is None else "chat_template_task_hash"
    per_task: dict[str, dict[str, Any]] = {}
    for task in tasks:
        recorded = _mapping(_mapping(content.get("configs")).get(task))
        per_task[task] = {
            "num_fewshot": shots[task],
            "generation_kwargs": recorded.get("generation_kwargs"),
            "repeats": recorded.get("repeats"),
            "scoring_digest": _scoring_digest(recorded) if recorded else None,
        }
        # Only there when samples were logged.
        task_hash = _mapping(content.get("task_hashes")).get(task)
        if task_hash is not None:
            per_task[task][hash_name] = task_hash
    return {
        "chat_template": template is not None,
        "chat_template_sha": template,
        "system_instruction_sha": content.get("system_instruction_sha"),
        # Null without a template, where it has no meaning.
        "fewshot_as_multiturn": bool(content.get("fewshot_as_multiturn")),
        "fewshot_seed": config.get("fewshot_seed"),
        "random_seed": config.get("random_seed"),
        "gen_kwargs": config.get("gen_kwargs") or None,
        "limit": config.get("limit"),
        **(per_task[tasks[0]] if len(tasks) == 1 else {"tasks": per_task}),
    }


def _scoring_digest(recorded: Mapping[str, Any]) -> str:
    """Of how answers became scores; the YAML's version number is only as good as its keeper."""
    names = ("output_type", "filter_list", "metric_list", "process_results")
    text = json.dumps([recorded.get(name) for name in names], sort_keys=True)
    # Functions without source are recorded by their address, which is another in every process.
    return hashlib.sha256(_ADDRESS.sub("", text).encode("ascii")).hexdigest()


def _moment(value: Any) -> datetime | None:
    try:
        if isinstance(value, str):
            moment = datetime.fromisoformat(value)
            return moment if moment.tzinfo else moment.replace(tzinfo=UTC)
        return datetime.fromtimestamp(value, UTC)
    except (TypeError, ValueError, OverflowError, OSError):
        return None


def _float(value: Any) -> float | None:
    """A number, or the text of one, where it is finite."""
    try:
        return finite(float(value))
    except (TypeError, ValueError, OverflowError):
        return None


def _mapping(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


# -- samples ---------------------------------------------------------------------------------


def _samples_by_task(files: Files, results: Path, tasks: list[str]) -> dict[str, Path]:
    """The samples of the run that `results` is of; none, or those of every task."""
    dated = _RESULTS.fullmatch(results.name)
    found: dict[str, Path] = {}
    dates = set()
    for path in files.samples:
        match = _SAMPLES.fullmatch(path.name)
        assert match  # by `_files_in`
        date = match["date"]
        dates.add(date)
        if (dated and date and date != dated["date"]) or len(dates) > 1:
            raise Unusable(
                f"{files.folder}: {path.name} is of another run than {results.name}: {ONE_RUN}"
            )
        if match["task"] not in tasks:
            raise Unusable(f"{path}: {results.name} has no task {shown(match['task'])}")
        found[match["task"]] = path
    absent = [task for task in tasks if task not in found]
    if found and absent:
        raise Unusable(f"{files.folder}: no samples of task {few(absent)}: measure again")
    return found


def _read_samples(folder: Path, paths: Mapping[str, Path]) -> tuple[Items, int, str]:
    """Items, how many have a line under every filter, digest of the questions."""
    rows: list[dict[str, Any]] = []
    places: list[int] = []
    scored = 0
    for task, path in sorted(paths.items()):
        prefix = f"{task}:" if len(paths) > 1 else ""
        task_rows, lines, filters = _read_task(path, task, prefix)
        scored += sum(len(row.pop("filters")) == filters for row in task_rows)
        rows += task_rows
        places += lines
    names = dict.fromkeys(name for row in rows for name in row)
    columns = {name: [row.get(name) for row in rows] for name in names}
    where = next(iter(paths.values())) if len(paths) == 1 else folder
    items = make_items(Table(str(where), columns, places))
    questions = sorted((row["item_id"], row["doc_hash"]) for row in rows)
    return items, scored, digest_of(questions)


def _read_task(path: Path, task: str, prefix: str) -> tuple[list[dict[str, Any]], list[int], int]:
    """One row per item of a samples file, the line each begins at, the number of filters."""
    problems: list[str] = []
    rows: dict[str, dict[str, Any]] = {}
    lines: list[int] = []
    doubled: dict[str, list[int]] = {}
    filters = set()
    for line, sample in json_lines(path, problems):
        fault = _fault(sample)
        if fault:
            problems.append(f"line {line}: {fault}")
            continue
        name, kept = str(sample["doc_id"]), sample["filter"]
        row = rows.get(name)
        if row is None:
            row = rows[name] = _first_columns(sample, task, prefix + name)
            lines.append(line)
        if row["doc_hash"] != sample["doc_hash"]:
            problems.append(f"line {line}: doc_id {name} has another doc_hash than before")
        first = row["filters"].setdefault(kept, line)
        if first != line:
            doubled.setdefault(f"{name} under {kept}", [first]).append(line)
        filters.add(kept)
        for metric in sample["metrics"]:
            value = sample.get(metric)
            # Some tasks score with true and false; their mean in the results counts them as 1, 0.
            row[f"{metric},{kept}"] = float(value) if isinstance(value, bool) else value
    if doubled:
        problems.insert(0, doubled_text(doubled, "line"))
    if not rows and not problems:
        problems.append("holds no samples")
    if problems:
        refuse_file(str(path), problems)
    return list(rows.values()), lines, len(filters)


def _first_columns(sample: Mapping[str, Any], task: str, identity: str) -> dict[str, Any]:
    """An item's columns that are no metric of a filter, and the lines of its filters so far."""
    doc = _mapping(sample.get("doc"))
    segment = doc.get("segment")
    row = {
        "item_id": identity,
        "segment": task if segment in (None, "") else segment,
        "prompt_hash": sample.get("prompt_hash"),
        "doc_hash": sample["doc_hash"],
        "filters": {},
    }
    row |= {"conversation": doc["conversation"]} if "conversation" in doc else {}
    return row | ({"output_tokens": sample["output_tokens"]} if "output_tokens" in sample else {})


def _fault(sample: Mapping[str, Any]) -> str:
    """Why a line is no sample of lm-eval, or nothing."""
    lacking = [key for key in ("doc_id", "doc_hash", "filter", "metrics") if key not in sample]
    if lacking:
        return f"no {few(lacking)}, which lm-eval 0.4.13 writes: measure again"
    if isinstance(sample["doc_id"], bool) or not isinstance(sample["doc_id"], int | str):
        return f"doc_id is {shown(sample['doc_id'])}"
    if not isinstance(sample["doc_hash"], str) or not isinstance(sample["filter"], str):
        return "doc_hash or filter is no text"
    metrics = sample["metrics"]
    if not isinstance(metrics, list) or not all(isinstance(metric, str) for metric in metrics):
        return f"metrics is {shown(metrics)}, not a list of names"
    return ""
