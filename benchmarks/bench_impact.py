"""How long `pilotage impact` takes on a store of a million prompts, as a whole process.

    python -m benchmarks.bench_impact [--prompts 1000000] [--ids 1000] [--repeats 3]

Makes a store with manifests in a temporary folder (prompts, teacher's answers, adapter, a
quantization, a draft, evidence) and a registry with versions that have a lineage, then starts the
command anew for every figure. Prints seconds, and how long each way of finding an id takes.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from registry.artifacts import ArtifactRef, Stage
from registry.bundle import Bundle, Part
from registry.lineage import LINEAGE_FILE, digest_below
from registry.settings import settings
from registry.store import Store
from registry.tracking import TAG_BUNDLE, Tracker
from tasks.lineage import lineage_for
from tasks.prompt_rows import find_ids, find_rows, ids_of

SHARES = {"train": 0.8, "calibration": 0.05, "draft": 0.05, "eval": 0.05, "load": 0.05}
PROMPT = (
    "客服你好，查一下订单 {0} 到哪了，比较着急，麻烦快点；we need it by noon, order {0}, thank you"
)
ANSWER = (
    '{{"intent":"track_order","slots":{{"order":"{0}"}},"reply":"您好，正在为您查询订单{0}。"}}'
)
MODELS, VERSIONS = 2, 5


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--prompts", type=int, default=1_000_000)
    parser.add_argument("--ids", type=int, default=1000, help="Ids in the file that is asked.")
    parser.add_argument("--repeats", type=int, default=3)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="pilotage-impact-") as home:
        os.environ["PILOTAGE_HOME"] = home
        settings.cache_clear()
        size = build(asked.prompts)
        print(f"{asked.prompts} prompts, {size >> 20} MiB in the store, "
              f"{MODELS * VERSIONS} versions, {os.cpu_count()} cores")  # fmt: skip
        ids = Path(home) / "ids.txt"
        step = max(1, asked.prompts // asked.ids)
        ids.write_text("\n".join(f"p{n}" for n in range(0, asked.prompts, step)), encoding="utf-8")
        for what, word in (
            ("one training prompt", "p0"),
            ("one eval prompt", f"p{int(asked.prompts * 0.92)}"),
            ("an id that is nowhere", "nobody"),
            (f"a file of {asked.ids} ids", str(ids)),
        ):
            times = sorted(timed(word) for _ in range(asked.repeats))
            print(f"{what:24} {times[len(times) // 2]:6.2f} s  (of {asked.repeats}: "
                  f"{', '.join(f'{one:.2f}' for one in times)})")  # fmt: skip
        searches(asked.prompts)


def timed(word: str) -> float:
    """Seconds of the command as a process of its own, its start included."""
    began = time.monotonic()
    subprocess.run([sys.executable, "-m", "flows.cli", "impact", word, "--json"], check=True,
                   stdout=subprocess.DEVNULL)  # fmt: skip
    return time.monotonic() - began


def searches(prompts: int) -> None:
    """The ways to find one id in the largest file: the two that are used, and the plain one."""
    file = next((settings().store_dir / "prompts").glob("*/files/train.jsonl"))
    last = f"p{int(prompts * SHARES['train']) - 1}"

    def by_bytes() -> None:
        assert find_rows(file, {last})

    def by_lines() -> None:
        with file.open(encoding="utf-8") as lines:
            assert any(json.loads(line)["id"] == last for line in lines)

    def by_column() -> None:
        assert find_ids(ids_of(file), {last})

    print(f"one id in {file.stat().st_size >> 20} MiB:")
    for name, search in (("bytes (a few ids)", by_bytes), ("column of ids (many)", by_column),
                         ("json.loads of each line", by_lines)):  # fmt: skip
        began = time.monotonic()
        search()
        print(f"  {name:24} {time.monotonic() - began:6.2f} s")


# -- the store -------------------------------------------------------------------------------


def build(prompts: int) -> int:
    """A home with one release and its versions. Returns the bytes of the store's files."""
    store = Store(settings().store_dir)
    data = Stage(name="prompts", label="million.jsonl", version=1)
    answers = Stage(name="teacher_data", version=1, parents={"prompts": data})
    student = Stage(name="distill", version=1, parents={"data": answers})
    calibration = {"calibration": {"source": "business", "samples": 512}}
    target = Stage(name="quantize", label="w8a8", version=1, config=calibration,
                   parents={"student": student, "calibration": answers})  # fmt: skip
    draft = Stage(name="draft", version=1, parents={"student": student, "prompts": data})
    evidence = Stage(name="accuracy", version=1, parents={"prompts": data, "target": target})
    bounds = list(_bounds(prompts))
    refs = {
        "prompts": _make(store, data, lambda folder: _prompts(folder, bounds)),
        "answers": _make(store, answers, lambda folder: _answers(folder, bounds)),
    }
    for name, stage in (("student", student), ("target", target), ("draft", draft)):
        refs[name] = _make(store, stage, _weights)
    refs["accuracy"] = _make(store, evidence, lambda folder: _items(folder, bounds))
    _register(store, refs)
    return sum(path.stat().st_size for path in store.root.rglob("*") if path.is_file())


def _bounds(prompts: int) -> Iterator[tuple[str, range]]:
    begin = 0
    for part, share in SHARES.items():
        end = begin + int(prompts * share)
        yield part, range(begin, end)
        begin = end


def _make(store: Store, stage: Stage, write: Any) -> ArtifactRef:
    def produce(folder: Path) -> dict[str, Any]:
        write(folder)
        return {}

    return store.make(stage, produce, {})


def _prompts(folder: Path, bounds: list[tuple[str, range]]) -> None:
    for part, numbers in bounds:
        _jsonl(folder / f"{part}.jsonl", (
            {"id": f"p{n}", "segment": "all", "prompt": PROMPT.format(f"WL{n}"),
             "reference": {"intent": "track_order"}}
            for n in numbers
        ))  # fmt: skip


def _answers(folder: Path, bounds: list[tuple[str, range]]) -> None:
    asked = dict(bounds[:2])
    for part, numbers in asked.items():
        _jsonl(folder / f"{part}.jsonl", (
            {"id": f"p{n}", "segment": "all", "messages": [
                {"role": "user", "content": PROMPT.format(f"WL{n}")},
                {"role": "assistant", "content": ANSWER.format(f"WL{n}")},
            ]}
            for n in numbers if n % 100
        ))  # fmt: skip
    everyone = [n for numbers in asked.values() for n in numbers]
    _jsonl(folder / "responses.jsonl", (
        {"id": f"p{n}", "state": "done", "text": ANSWER.format(f"WL{n}")} for n in everyone
    ))  # fmt: skip
    _jsonl(folder / "set_aside.jsonl", (
        {"id": f"p{n}", "reason": "length"} for n in everyone if n % 100 == 0
    ))  # fmt: skip


def _weights(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(b"weights")


def _items(folder: Path, bounds: list[tuple[str, range]]) -> None:
    import pyarrow
    from pyarrow import parquet

    names = [f"p{n}" for n in dict(bounds)["eval"]]
    parquet.write_table(pyarrow.table({"item_id": names}), folder / "items.parquet")


def _jsonl(path: Path, rows: Iterable[dict[str, Any]]) -> None:
    with path.open("w", encoding="utf-8") as out:
        out.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


def _register(store: Store, refs: dict[str, ArtifactRef]) -> None:
    """Versions of two models, all made of these prompts, each with its lineage."""
    client = Tracker(settings().tracking_uri, settings().mlartifacts_dir).client

    def part(name: str) -> Part:
        manifest = store.manifest(refs[name])
        return Part(stage=manifest.stage, key=manifest.key, digest=digest_below(manifest, ""))

    for model in (f"model-{number}" for number in range(MODELS)):
        client.create_registered_model(model)
        for number in range(VERSIONS):
            bundle = Bundle(name="w8a8", target=part("target"), draft=part("draft"),
                            engine_version=str(number))  # fmt: skip
            folder = settings().mlartifacts_dir / model / str(number)
            folder.mkdir(parents=True)
            lineage = lineage_for(bundle, {"accuracy": refs["accuracy"]})
            (folder / LINEAGE_FILE).write_text(lineage.model_dump_json(), encoding="utf-8")
            client.create_model_version(model, folder.as_uri(), tags={TAG_BUNDLE: bundle.digest})
        client.set_registered_model_alias(model, "champion", str(VERSIONS))


if __name__ == "__main__":
    main()
