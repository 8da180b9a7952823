"""Other machines of the shared store's tests: each in a process, which imports little."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from registry.artifacts import Stage
from registry.remote_store import RemoteStore
from registry.shared_store import SharedStore

FILES = 120


def a_stage(name: str = "lora", **config: Any) -> Stage:
    return Stage(name=name, version=1, config=config)


def write_at_once(root: Path, url: str, number: int, barrier: Any, results: Any) -> None:
    def produce(folder: Path) -> dict[str, Any]:
        (folder / "measured").write_text(f"{number}" * 100_000)
        barrier.wait(60)
        return {"number": number}

    ref = SharedStore(root, RemoteStore(url)).make(a_stage(), produce, {})
    content = (ref.path / "measured").read_text()
    results.put((ref.digest, ref.summary["number"], content[:1], len(content)))


def upload_many(root: Path, url: str) -> None:
    def produce(folder: Path) -> dict[str, Any]:
        for number in range(FILES):
            (folder / f"{number:03d}").write_bytes(os.urandom(2000))
        return {}

    SharedStore(root, RemoteStore(url)).make(a_stage(), produce, {})
