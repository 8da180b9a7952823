"""A process that is started early and does one job after the other, over files beside its log.

Imports of load generators take long, so they happen while a server still starts. The process polls
for `BASE.0.job.json`, answers with `BASE.0.result.json`, then for job 1, until it is ended.
"""

from __future__ import annotations

import glob
import json
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from registry.errors import InfrastructureError
from registry.whole_files import write_whole
from tasks.engines.subprocesses import ProcessTree, end_of, wait_until


class JobProcess:
    """`python script BASE`, BASE being the log without its suffix. A context manager."""

    def __init__(
        self,
        tool: str,
        python: Path,
        script: Path,
        log: Path,
        env: Mapping[str, str],
        **options: Any,
    ) -> None:
        self.tool, self._base, self._jobs = tool, log.resolve().with_suffix(""), 0
        self._tree = ProcessTree(
            [str(python), str(script), str(self._base)],
            log=log,
            # Our modules beside the script must not stand in for the tool's imports.
            env={**env, "PYTHONSAFEPATH": "1", "HF_HUB_OFFLINE": "1"},
            **options,
        )

    def __enter__(self) -> Self:
        self._remove_jobs()
        self._tree.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._tree.stop()
        self._remove_jobs()

    def do(self, order: Mapping[str, Any], limit: float) -> dict[str, Any]:
        """Have one job done within `limit` seconds; its answer. Raises `InfrastructureError`."""
        job, result_file = (
            Path(f"{self._base}.{self._jobs}.{kind}.json") for kind in ("job", "result")
        )
        self._jobs += 1
        write_whole(job, json.dumps(order, ensure_ascii=False))
        wait_until(lambda: result_file.exists() or self._tree.poll() is not None, limit, every=0.05)
        if not result_file.exists():
            status = self._tree.poll()
            how = (
                f"ended with status {status}" if status is not None else f"gave none in {limit:g} s"
            )
            raise InfrastructureError(f"{self.tool} {how}; {end_of(self._tree.log)}")
        result: dict[str, Any] = json.loads(result_file.read_text(encoding="utf-8"))
        return result

    def _remove_jobs(self) -> None:
        for kind in ("job", "result"):
            for file in self._base.parent.glob(f"{glob.escape(self._base.name)}.*.{kind}.json"):
                file.unlink(missing_ok=True)
