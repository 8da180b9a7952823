"""Accuracy of one model on one lm-eval task: `python -m tasks.engines.lm_eval_run JOB RESULT`.

Job (JSON):

    task_file     lm-eval YAML over local JSON lines; read unchanged but for its `data_files`
    items_file    JSON lines `{"id", "segment", "prompt", "reference", "messages"?, "tools"?}`
    items         how many of them are asked, in file order
    model         {"kind": "chat", "url", "served_name", "api_key_env": NAME of a variable} or
                  {"kind": "hf", "path", "dtype"?}: transformers in this process, for accuracy only
    sampling      {"temperature", "top_p", "max_tokens", "seed"}
    concurrency   requests in flight (chat), rows in a batch (hf)
    metrics       per-item metrics of the task; `name,filter` where the task has several filters
    tokenizer     optional: folder of the served model's, to see that its chat template shows all of
                  what the items hold
    out_dir, bundle, suite, engine, smoke, chat_template_digest?, tokenizer_digest?,
    request_timeout? (seconds)

Writes `items.parquet` and `summary.json` (`AccuracyEvidence`) into `out_dir`; the result repeats
`items_asked`, `items_scored`, `metrics`, and adds `truncated` (answers cut by length) and
`seconds`. It decides nothing.

A request that fails is never scored: lm-eval tries it three times, then this run ends with an
`InfrastructureError` and leaves no evidence. lm-eval's own behaviour where a reply holds no
message is to score the empty string; here that is a failure too.
"""

from __future__ import annotations

import importlib.metadata
import json
import math
import os
import tempfile
import time
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from registry.digests import digest_of, digest_of_folder
from registry.errors import InfrastructureError, Problem, UserError
from registry.evidence import ITEM_COLUMNS, ITEMS, AccuracyEvidence, finite, write_summary
from tasks.conversations import has_conversation
from tasks.engines.chat_templates import template_problems
from tasks.engines.lm_eval_models import (
    RequestLog,
    generation,
    reference_model,
    seed,
    served_model,
)
from tasks.engines.lm_eval_task import (
    check_conversations,
    document,
    load_task,
    task_of_items,
)
from tasks.engines.subprocesses import job_main

Row = dict[str, Any]


def run(job: Mapping[str, Any]) -> dict[str, Any]:
    """Ask, score, write the evidence. Raises `UserError`, `InfrastructureError`."""
    started = time.monotonic()
    rows = read_items(Path(job["items_file"]), job["items"])
    with tempfile.TemporaryDirectory(prefix="pilotage-lm-eval-") as scratch:
        # Every cache of the harness and of `datasets` lies in a folder of this run alone and is
        # gone afterwards: nothing another model or another file left can answer in its place.
        os.environ |= {
            "HF_HOME": scratch,
            "HF_DATASETS_CACHE": f"{scratch}/datasets",
            "HF_HUB_OFFLINE": "1",
            "HF_DATASETS_OFFLINE": "1",
            "TOKENIZERS_PARALLELISM": "false",
        }
        # torch's threads otherwise spin while they wait for each other. On two busy cores the same
        # answers took 61 s spinning and 6 s waiting (SmolLM2-135M, 8 x 12 tokens).
        os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
        asked = Path(scratch) / "items.jsonl"
        asked.write_text(
            "".join(json.dumps(document(row), ensure_ascii=False) + "\n" for row in rows),
            encoding="utf-8",
        )
        task = load_task(Path(job["task_file"]), asked)
        check_conversations(task, rows)
        check_template(job, rows)
        results = _evaluate(job, task, rows)
    items = item_rows(results["samples"][task["task"]], rows, job["metrics"], task)
    evidence = _evidence(job, rows, items, results, task["task"], time.monotonic() - started)
    out_dir = Path(job["out_dir"])
    out_dir.mkdir(parents=True, exist_ok=True)
    recorded = {
        "bundle": evidence.bundle,
        "engine": evidence.engine,
        "harness": evidence.harness,
        "seed": seed(job),
    }
    _write_items(out_dir / ITEMS, [item | recorded for item in items], job["metrics"])
    write_summary(out_dir, evidence)
    return {
        "items_asked": evidence.items_asked,
        "items_scored": evidence.items_scored,
        "metrics": evidence.metrics,
        "truncated": sum(item["finish_reason"] == "length" for item in items),
        "seconds": evidence.seconds,
    }


# -- what is asked ---------------------------------------------------------------------------


def read_items(path: Path, count: int) -> list[Row]:
    """The first `count` rows. Raises `UserError` with every mistake: none may be asked in part."""
    problems: list[Problem] = []
    rows: list[Row] = []
    seen: dict[str, int] = {}
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except OSError as error:
        raise UserError.at(path, f"cannot be read: {error.strerror}") from None
    for number, line in enumerate(lines, start=1):
        if not line.strip() or len(rows) == count:
            continue
        try:
            row = json.loads(line)
        except ValueError as error:
            problems.append(Problem(f"{path}:{number}", f"not JSON: {error}"))
            continue
        lacking = [key for key in ("id", "prompt", "reference") if not row.get(key)]
        if lacking:
            problems.append(Problem(f"{path}:{number}", f"has no {', '.join(lacking)}"))
        elif str(row["id"]) in seen:
            problems.append(
                Problem(
                    f"{path}:{number}",
                    f"id {row['id']!r} stands in line {seen[str(row['id'])]} already",
                    "give every item an id of its own",
                )
            )
        seen.setdefault(str(row.get("id")), number)
        rows.append(row)
    if len(rows) < count:
        problems.append(
            Problem(
                str(path),
                f"holds {len(rows)} items, the suite asks {count}",
                "lower `items` of the suite or raise the size of the eval part",
            )
        )
    if problems:
        raise UserError(problems)
    return rows


def check_template(job: Mapping[str, Any], rows: Sequence[Row]) -> None:
    """Raises `UserError` for items of which the chat template leaves something out."""
    folder = job.get("tokenizer") or job["model"].get("path")
    own = [row for row in rows if has_conversation(row)]
    if folder and own and (problems := template_problems(Path(folder), own)):
        raise UserError(problems)


# -- asking ----------------------------------------------------------------------------------


def _evaluate(job: Mapping[str, Any], task: dict[str, Any], rows: Sequence[Row]) -> dict[str, Any]:
    """lm-eval's own result with its samples."""
    import aiohttp
    import requests
    from lm_eval import evaluator
    from lm_eval.tasks import TaskManager

    # It imports torch and runs `pip list` and `lscpu`, longer than 40 answers take; versions and
    # hardware are recorded by the store's manifest.
    evaluator.add_env_info = lambda _: None

    model = job["model"]
    make = {"chat": served_model, "hf": reference_model}[model["kind"]]
    requests_log = RequestLog.start(job)
    try:
        results = evaluator.simple_evaluate(
            model=make(job),
            # A class of its own reads its items itself.
            tasks=[task if task.get("class") else task_of_items(task, rows)],
            # Without the defaults it reads no YAML of the harness's thousands of tasks.
            task_manager=TaskManager(include_defaults=False),
            gen_kwargs=generation(job["sampling"], model["kind"]),
            apply_chat_template=True,
            fewshot_as_multiturn=True,
            use_cache=None,
            cache_requests=False,
            bootstrap_iters=0,
            log_samples=True,
            # Seeding torch would import it; only transformers uses it here.
            torch_random_seed=seed(job) if model["kind"] == "hf" else None,
        )
    except (aiohttp.ClientError, requests.RequestException, TimeoutError) as error:
        raise InfrastructureError(
            f"{model.get('url')}: a request failed in all its attempts: "
            # Not its repr, which holds the headers and so the key.
            f"{requests_log.said or f'{type(error).__name__} {error}'}"
        ) from None
    return dict(results)


# -- what comes back -------------------------------------------------------------------------


def item_rows(
    samples: Sequence[Mapping[str, Any]],
    rows: Sequence[Row],
    metrics: Sequence[str],
    task: Mapping[str, Any],
) -> list[Row]:
    """One row per item: `ITEM_COLUMNS` and a value or None for each metric.

    lm-eval logs an item once per filter, its metrics side by side with the sample's own keys.
    """
    asked = {str(row["id"]): row for row in rows}
    items: dict[str, Row] = {}
    found: dict[str, dict[str, Any]] = {}
    for sample in samples:
        doc = sample["doc"]
        identity = str(doc.get("id"))
        if identity not in asked:
            raise UserError.at(
                task["task"],
                f"the task shows an item with id {identity!r} that was not asked",
                "let its process_docs keep the column id",
            )
        # A class of its own reads the items with Arrow, which could change types.
        if not task.get("process_docs") and doc.get("reference") != asked[identity]["reference"]:
            raise InfrastructureError(f"item {identity}: its reference changed while loading")
        answer = sample["resps"][0][0]
        items.setdefault(
            identity,
            {
                "item_id": identity,
                "segment": str(asked[identity].get("segment") or ""),
                "conversation": asked[identity].get("conversation"),
                "prompt_hash": sample["prompt_hash"],
                "response": str(answer),
                "finish_reason": getattr(answer, "finish_reason", None),
                "output_tokens": getattr(answer, "output_tokens", None),
            },
        )
        values = found.setdefault(identity, {})
        values |= {f"{name},{sample['filter']}": sample[name] for name in sample["metrics"]}
    for identity, values in found.items():
        for metric in metrics:
            names = [name for name in values if metric in (name, name.partition(",")[0])]
            if len(names) != 1:
                what = "is computed by several filters" if names else "is not computed by the task"
                raise UserError.at(
                    f"metric {metric}", what, f"choose among: {', '.join(sorted(values))}"
                )
            items[identity][metric] = _number(values[names[0]])
    return list(items.values())


def _number(value: Any) -> float | None:
    """A per-item number, or None for anything else (some metrics only exist as a whole)."""
    try:
        return finite(float(value))
    except (TypeError, ValueError):
        return None


def mean(values: Sequence[float | None]) -> float | None:
    """None when a single value is missing: the mean over the others is of another sample."""
    if not values or any(value is None for value in values):
        return None
    return math.fsum(value for value in values if value is not None) / len(values)


def _evidence(
    job: Mapping[str, Any],
    rows: Sequence[Row],
    items: Sequence[Row],
    results: Mapping[str, Any],
    task: str,
    seconds: float,
) -> AccuracyEvidence:
    names = job["metrics"]
    complete = [item for item in items if all(item[name] is not None for name in names)]
    all_there = len(items) == len(rows)
    return AccuracyEvidence(
        bundle=job["bundle"],
        suite=job["suite"],
        task=task,
        task_version=str(results["versions"][task]),
        engine=job["engine"],
        harness=f"lm-eval {importlib.metadata.version('lm_eval')}",
        items_digest=digest_of(list(rows)),
        settings={
            "sampling": {**job["sampling"], "seed": seed(job)},
            "num_fewshot": results["n-shot"][task],
            "fewshot_as_multiturn": True,
            "chat_template": True,
            "chat_template_digest": job.get("chat_template_digest"),
            "tokenizer_digest": job.get("tokenizer_digest"),
            # The YAML alone would miss a change in the functions beside it.
            "task_digest": digest_of_folder(
                Path(job["task_file"]).parent,
                [
                    path
                    for path in Path(job["task_file"]).parent.iterdir()
                    if path.suffix in (".yaml", ".py")
                ],
            ),
            "concurrency": job["concurrency"],
        },
        items_asked=len(rows),
        items_scored=len(complete),
        metrics={
            name: mean([item[name] for item in items]) if all_there else None for name in names
        },
        smoke=job.get("smoke", False),
        measured_at=datetime.now(UTC),
        seconds=round(seconds, 3),
    )


def _write_items(path: Path, items: Sequence[Row], metrics: Sequence[str]) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    whole = ("output_tokens", "seed")
    types = {name: pa.int64() if name in whole else pa.string() for name in ITEM_COLUMNS}
    types |= {name: pa.float64() for name in metrics}
    pq.write_table(pa.Table.from_pylist(list(items), schema=pa.schema(list(types.items()))), path)


if __name__ == "__main__":
    job_main(run)
