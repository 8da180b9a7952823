"""The real tool in a home of its own, as a machine would run it, and the means to hurt it.

A home always lies at the same path: MLflow's database holds absolute ones. So there is one place
`ROOT/home`; a finished home is kept beside it and copied there for every fault.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
from prefect.client.base import PrefectHttpxSyncClient

from registry.settings import CHECKOUT
from tests.processes import gone

RECIPE = "tests/recipes/release_tiny.yaml"
PILOTAGE = [sys.executable, "-m", "flows.cli"]
WHOLE = 1500.0
"""Seconds that one release may take on a machine that others use too; a limit, no assertion."""


@dataclass
class Run:
    """One command of the tool, its output in a file."""

    process: subprocess.Popen[bytes]
    log: Path

    @property
    def text(self) -> str:
        return self.log.read_text(errors="replace")

    def wait_for(self, pattern: str, seconds: float = WHOLE) -> str:
        """The first text that matches; fails when the command ends before."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            ended = self.process.poll() is not None
            if found := re.search(pattern, self.text):
                return found[0]
            assert not ended, f"ended without {pattern!r}:\n{self.text[-3000:]}"
            time.sleep(0.1)
        raise AssertionError(f"{pattern!r} did not appear:\n{self.text[-3000:]}")

    def end(self, seconds: float = WHOLE) -> int:
        """Its exit status; negative: the signal that ended it."""
        return self.process.wait(seconds)

    def kill(self) -> int:
        """`kill -9` of this process alone, as the kernel does it when memory is short."""
        assert self.process.poll() is None, f"ended before it was killed:\n{self.text[-3000:]}"
        self.process.kill()
        return self.process.wait(30)

    @property
    def document(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.text.splitlines()[-1])
        return found

    @property
    def made(self) -> list[str]:
        return [one["name"] for one in self.document["stages"] if not one["reused"]]


@dataclass
class World:
    """`ROOT/home` and the commands that work in it."""

    root: Path
    recipe: str = RECIPE
    extra: dict[str, str] = field(default_factory=dict)
    _started: list[Run] = field(default_factory=list)

    @property
    def home(self) -> Path:
        return self.root / "home"

    @property
    def store(self) -> Path:
        return self.home / "store"

    @property
    def database(self) -> Path:
        return self.home / "mlflow.db"

    @property
    def environment(self) -> dict[str, str]:
        kept = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("PREFECT_", "MLFLOW_"))
        }
        return kept | {
            "PILOTAGE_HOME": str(self.home),
            "PYTHONPATH": str(CHECKOUT),
            "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
            "MLFLOW_DISABLE_TELEMETRY": "true",
            "HF_HUB_OFFLINE": "1",
            # A release of somebody else on this machine is none of these tests' faults.
            "PILOTAGE_DEVICE_LOCKS": str(self.root / "device-locks"),
            **self.extra,
        }

    # -- commands --------------------------------------------------------------------------

    def start(self, *words: str, env: dict[str, str] | None = None) -> Run:
        """A release in the background."""
        return self.command("release", self.recipe, "--json", *words, env=env)

    def command(
        self, *words: str, env: dict[str, str] | None = None, before: list[str] | None = None
    ) -> Run:
        """Any command; `before` are words that come before it (a wrapper)."""
        log = self.root / "logs" / f"{len(list((self.root / 'logs').glob('*'))):03d}-{words[0]}.log"
        for folder in (log.parent, self.root / "device-locks"):
            folder.mkdir(parents=True, exist_ok=True)
        with log.open("wb") as out:
            process = subprocess.Popen(
                [*(before or []), *PILOTAGE, *words],
                cwd=CHECKOUT,
                env={**self.environment, **(env or {})},
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self._started.append(Run(process, log))
        return self._started[-1]

    def release(self, *words: str, status: int = 0, env: dict[str, str] | None = None) -> Run:
        """A release to its end, with the exit status that it must have."""
        run = self.start(*words, env=env)
        assert run.end() == status, run.text[-5000:]
        return run

    def answer(self, *words: str) -> Any:
        """What a command prints with `--json`."""
        run = self.command(*words, "--json")
        assert run.end(300) == 0, run.text[-3000:]
        return json.loads(run.text.splitlines()[-1])

    def stop_all(self) -> None:
        """End what a failed test left: what it started and everything of this home."""
        for run in self._started:
            if run.process.poll() is None:
                run.process.kill()
                run.process.wait(30)
        for process in self.processes():
            _signal(process, signal.SIGCONT)
            _signal(process, signal.SIGKILL)
        self._started.clear()

    # -- processes -------------------------------------------------------------------------

    def processes(self) -> list[psutil.Process]:
        """Live processes that belong to this home; vLLM's engine is known by its log alone."""
        home = str(self.home)
        wanted = f"PILOTAGE_HOME={home}".encode()
        found = []
        for process in psutil.process_iter():
            try:
                words = process.cmdline()
                environment = Path(f"/proc/{process.pid}/environ").read_bytes().split(b"\0")
                outputs = [str(Path(f"/proc/{process.pid}/fd/{n}").readlink()) for n in (1, 2)]
                ours = wanted in environment or any(home in word for word in [*words, *outputs])
                if ours and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
            except (psutil.Error, OSError):
                continue
        return found

    def process(self, pattern: str, seconds: float = 300.0, settled: float = 0.0) -> psutil.Process:
        """The process whose command line or title matches, once it has lived `settled` seconds."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            for process in self.processes():
                try:
                    line = " ".join([process.name(), *process.cmdline()])
                    old = time.time() - process.create_time() >= settled
                except psutil.Error:
                    continue
                if re.search(pattern, line) and old:
                    return process
            time.sleep(0.1)
        raise AssertionError(f"no process {pattern!r}: {self.command_lines()}")

    def command_lines(self) -> list[str]:
        lines = []
        for process in self.processes():
            try:
                lines.append(" ".join(process.cmdline())[:200])
            except psutil.Error:
                continue
        return lines

    def no_process_left(self, seconds: float = 15.0) -> None:
        assert until(lambda: not self.processes(), seconds), self.command_lines()

    # -- the store -------------------------------------------------------------------------

    def entries(self, stage: str, label: str | None = None) -> list[Path]:
        """Folders of finished entries of a stage."""
        found = []
        for manifest in sorted((self.store / stage).glob("*/manifest.json")):
            if label is None or json.loads(manifest.read_text())["label"] == label:
                found.append(manifest.parent)
        return found

    def entry(self, stage: str, label: str | None = None) -> Path:
        (found,) = self.entries(stage, label)
        return found

    def forget(self, stage: str, label: str | None = None) -> None:
        """Remove a stage's entries, so that the next release makes them again."""
        found = self.entries(stage, label)
        assert found, f"no entry of {stage} {label}"
        for folder in found:
            shutil.rmtree(folder)

    def unregister(self) -> None:
        """As before the first release was recorded: the store is whole, MLflow is not there."""
        for name in ("mlflow.db", "mlartifacts", "bundles", "reports"):
            path = self.home / name
            shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink()


def ask_prefect(api: str, method: str, path: str, body: Any = None) -> Any:
    """What Prefect's server answers; changes need the token that its own client asks for."""
    with PrefectHttpxSyncClient(
        base_url=api, enable_csrf_support=True, timeout=60, trust_env=False
    ) as client:
        answer = client.request(method, path, json=body)
    return answer.json() if answer.content else None


def kill(process: psutil.Process) -> None:
    """`kill -9`, and wait until it is gone."""
    process.kill()
    assert until(lambda: gone(process), 30), process


def until(condition: Callable[[], Any], seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(0.1)
    return False


def _signal(process: psutil.Process, number: int) -> None:
    try:
        process.send_signal(number)
    except psutil.Error:
        return
