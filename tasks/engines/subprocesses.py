"""Start, watch and end process trees; run a heavy stage as one process with JSON in and out.

Every child is started in its own session and noted in a file under `PILOTAGE_HOME/run` with its
creation time. Ending it is polite first (SIGTERM to the whole tree), hard after `stop_grace`
seconds, and reaches children that were orphaned by a parent that died first. Those are found by
the marker that each of our processes carries in its environment, or, because a process that sets
its own title (vLLM's engine does) overwrites its environment, by being in our session and writing
to our log. What a killed run leaves behind its guards end (`guards.py`), or, when they were killed
too, a later run; and only that.
"""

from __future__ import annotations

import atexit
import json
import logging
import os
import subprocess
import sys
import time
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import psutil

from registry.errors import InfrastructureError, Problem, StageFailed, UserError
from registry.redaction import blot, redact_logs, secret_values, without_secrets
from registry.settings import CHECKOUT, settings
from registry.whole_files import write_whole
from tasks.engines.guards import Guard, grace, open_files
from tasks.engines.log_following import ENGINE_LOG, Following

LOG = logging.getLogger("pilotage")

MARKER = "PILOTAGE_PROCESS"
"""Environment variable that names the tree a process belongs to; inherited by every child."""


EXIT_WAIT = 60.0
"""Seconds for the exit of a process with a result: threads of a library may keep it for ever."""


class TimeLimit(InfrastructureError):
    """A process did not end in the time that it had, and was ended."""


class ProcessTree:
    """A command and everything it starts. Use as a context manager: leaving it ends the tree."""

    def __init__(
        self,
        command: Sequence[str],
        *,
        log: Path,
        env: Mapping[str, str] | None = None,
        cwd: Path = CHECKOUT,
        without: Sequence[str] = (),
        with_secrets: bool = False,
    ) -> None:
        """`without`: variables of our own environment, by prefix, that the command must not see.

        Secrets (`registry.redaction`) it does not see either, but for those in `env`. Only a
        service that is this project itself, a worker for example, is started `with_secrets`.
        """
        self.command = [str(word) for word in command]
        self.log = log
        self.marker = uuid.uuid4().hex
        ours = dict(os.environ) if with_secrets else without_secrets(os.environ)
        kept = {name: value for name, value in ours.items() if not name.startswith(tuple(without))}
        self._env = {**kept, **(env or {}), MARKER: self.marker}
        # What it was handed it may say in its log: aiohttp's errors hold a request's headers.
        self._handed = secret_values(env or {})
        self._cwd = cwd
        self._note = settings().run_dir / f"{self.marker}.json"
        self.process: subprocess.Popen[bytes] | None = None
        self._following: Following | None = None
        self._guard: Guard | None = None
        self._root: psutil.Process | None = None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()

    def start(self) -> None:
        self.log.parent.mkdir(parents=True, exist_ok=True)
        self._note.parent.mkdir(parents=True, exist_ok=True)
        # Noted before the start: a crash between the two leaves a note that matches nothing.
        self._write_note()
        try:
            self._guard = Guard(self._note, identity(os.getpid()), MARKER, self._handed)
            with self.log.open("ab") as out:
                written = out.tell()
                self.process = subprocess.Popen(
                    self.command,
                    stdin=subprocess.DEVNULL,
                    stdout=out,
                    stderr=subprocess.STDOUT,
                    env=self._env,
                    cwd=self._cwd,
                    start_new_session=True,
                    pass_fds=open_files(),
                )
            if ENGINE_LOG.isEnabledFor(logging.INFO):
                self._following = Following(self.log, written, self._env)
            self._root = psutil.Process(self.process.pid)
            self._write_note()
        except BaseException:
            # No such program, a full disk, a signal: nobody will leave a tree that was not entered.
            self.stop()
            raise

    def _write_note(self) -> None:
        session = self.process.pid if self.process else None
        _write_note(self._note, self.marker, session, str(self.log.resolve()))

    @property
    def pid(self) -> int:
        assert self.process is not None, "not started"
        return self.process.pid

    def poll(self) -> int | None:
        """The exit status of the front process; None while it runs."""
        assert self.process is not None, "not started"
        return self.process.poll()

    def wait(self, timeout: float, result: Path | None = None) -> int | None:
        """Wait for the front process; its status. Raises `TimeLimit` after `timeout` s.

        With the file of its `result` there it has done its work: one that does not end within
        `EXIT_WAIT` seconds is left to `stop`, and has no status.
        """

        def ended() -> bool:
            return self.poll() is not None

        def done() -> bool:
            return ended() or (result is not None and result.exists())

        if not wait_until(done, timeout, every=0.05):
            self.stop()
            raise TimeLimit(
                f"{self.command[0]} did not end within {timeout:.0f} s; its log is {self.log}"
            )
        wait_until(ended, EXIT_WAIT, every=0.05)
        return self.poll()

    def memory_bytes(self) -> int:
        """Resident memory of the whole tree now, in bytes."""
        total = 0
        for member in self._members():
            try:
                total += member.memory_info().rss
            except psutil.Error:
                continue
        return total

    def stop(self) -> None:
        """End the whole tree and return when nothing of it is alive. Safe to call twice.

        Raises `InfrastructureError` where the hard signal does not end one: the kernel keeps a
        process whose device hangs, and whoever comes next would find it there.
        """
        if self.process is not None:
            self._end(self.process)
        self._note.unlink(missing_ok=True)
        if self._guard is not None:
            self._guard.dismiss()

    def _end(self, front: subprocess.Popen[bytes]) -> None:
        # What ended before it was asked to, and not well, has something to say.
        failed = bool(front.poll())
        if self._following is not None and front.poll() is None:
            self._following.ends_here()
        end_processes(self._members(), grace())
        # Children that were started while the tree was being ended.
        left = end_processes(self._members(), grace())
        if not left:
            front.wait()
        blot(self.log, self._handed)
        if self._following is not None:
            self._following.close(failed)
        if left:
            raise InfrastructureError(
                f"{self.command[0]}: process {', '.join(str(one.pid) for one in left)} outlives "
                "SIGKILL: its device or disk hangs, and it may still hold memory there; its log "
                f"is {self.log}"
            )

    def _members(self) -> list[psutil.Process]:
        """The front, its descendants, and whatever else is ours by `marked`."""
        session = self.process.pid if self.process else None
        found = marked(self.marker, session, str(self.log.resolve()))
        tree = {process.pid: process for process in found}
        # A front that ended and was waited for has given its process id back: whoever has it
        # now is not ours. psutil compares the creation time.
        if self._root is not None and self._root.is_running():
            try:
                tree |= {child.pid: child for child in self._root.children(recursive=True)}
                tree[self._root.pid] = self._root
            except psutil.NoSuchProcess:
                pass
        return list(tree.values())


def last_lines(log: Path, count: int = 15) -> str:
    """The last `count` non-empty lines of a text file; empty when it cannot be read."""
    try:
        with log.open("rb") as handle:
            handle.seek(max(0, os.fstat(handle.fileno()).st_size - 64 * 1024))
            text = handle.read().decode("utf-8", errors="replace")
    except OSError:
        return ""
    return "\n".join([line for line in text.splitlines() if line.strip()][-count:])


def end_of(log: Path) -> str:
    """For the end of an error message: the last lines below the log's name."""
    lines = last_lines(log)
    return f"the end of {log}:\n{lines}" if lines else f"nothing stands in {log}"


def run_job(
    module: str,
    job: Mapping[str, Any],
    *,
    log: Path,
    python: Path | str = sys.executable,
    timeout: float | None = None,
    env: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """Run `python -m module JOB RESULT` in a process of its own and return its result.

    `job` is written as JSON beside the log; the module writes its result as one JSON object.
    A result `{"error": {"problems": [...]}}` is a mistake of a person and raised as
    `StageFailed`; a process that ends otherwise without a result is an `InfrastructureError`
    with the last lines of its log.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    job_file = log.with_suffix(".job.json")
    result_file = log.with_suffix(".result.json")
    result_file.unlink(missing_ok=True)
    job_file.write_text(json.dumps(job, ensure_ascii=False, indent=1), encoding="utf-8")
    command = [str(python), "-m", module, str(job_file), str(result_file)]
    # Threads that spin while they wait take a small machine from whoever has work: the same
    # run took 61 s with other work beside it, and 6 s with passive waiting.
    quiet = {"OMP_WAIT_POLICY": os.environ.get("OMP_WAIT_POLICY", "PASSIVE")}
    with ProcessTree(command, log=log, env={**quiet, **(env or {})}) as tree:
        status = tree.wait(timeout or settings().stage_timeout, result_file)
    if not result_file.exists():
        raise InfrastructureError(
            f"{module} ended with status {status} and no result; {end_of(log)}"
        )
    result: dict[str, Any] = json.loads(result_file.read_text(encoding="utf-8"))
    if "error" in result:
        raise StageFailed([Problem(**problem) for problem in result["error"]["problems"]])
    return result


def job_main(run: Any) -> None:
    """The `__main__` of an engine module: read the job, call `run(job)`, write the result.

    The result is written atomically; a `UserError` becomes a result too, so that the flow can
    raise it again with its problems intact. Anything else leaves its traceback in the log.
    """
    redact_logs()
    job_file, result_file = Path(sys.argv[1]), Path(sys.argv[2])
    job = json.loads(job_file.read_text(encoding="utf-8"))
    try:
        result = run(job)
    except UserError as error:
        result = {"error": {"problems": [vars(problem) for problem in error.problems]}}
    write_whole(result_file, json.dumps(result, ensure_ascii=False, indent=1))


def end_processes(processes: Sequence[psutil.Process], grace: float) -> list[psutil.Process]:
    """SIGTERM to all, SIGKILL after `grace` seconds to those that are still there.

    Those that are there even `grace` seconds after that: usually none.
    """
    alive = [process for process in processes if _signal(process, hard=False)]

    def gone() -> bool:
        return not any(map(_lives, alive))

    if not wait_until(gone, grace, every=0.05):
        for process in filter(_lives, alive):
            _signal(process, hard=True)
        wait_until(gone, grace, every=0.05)
    return list(filter(_lives, alive))


def _lives(process: psutil.Process) -> bool:
    """One that ended is dead also where nobody has waited for it: in a container often nobody will.

    psutil's own wait would take our child's status, and the front's would read as 0.
    """
    return process.is_running() and identity(process.pid) is not None


def own_children() -> None:
    """Note this process as the owner of all that it starts without a `ProcessTree`.

    That is Prefect's temporary server: Prefect ends it, but not when this process is killed.
    """
    marker = uuid.uuid4().hex
    note = settings().run_dir / f"{marker}.json"
    note.parent.mkdir(parents=True, exist_ok=True)
    os.environ[MARKER] = marker
    _write_note(note, marker, None, "")
    atexit.register(Guard(note, identity(os.getpid()), MARKER).dismiss)
    atexit.register(note.unlink, missing_ok=True)


def _write_note(note: Path, marker: str, session: int | None, log: str) -> None:
    content = {
        "owner": identity(os.getpid()),
        "marker": marker,
        "session": session,
        "log": log,
    }
    # Renamed into place: another run that looks for leftovers removes a half-written note.
    write_whole(note, json.dumps(content))


def end_leftovers() -> list[int]:
    """End the trees of runs that are no longer alive; the process ids that were ended."""
    return end_noted(sorted(settings().run_dir.glob("*.json")))


def end_noted(notes: Sequence[Path], words: Sequence[str] = ()) -> list[int]:
    """End the trees of those notes whose owner is gone, all at once: they share one grace.

    `words`, and the secrets of this process, are blotted out of their logs. The note of what does
    not end stays: the next run tries again.
    """
    trees: dict[Path, list[psutil.Process]] = {}
    logs: dict[Path, Path] = {}
    for note in notes:
        try:
            content = json.loads(note.read_text())
            marker, session, log = content["marker"], content["session"], content["log"]
            owner_lives = identity(content["owner"]["pid"]) == content["owner"]
        except (OSError, ValueError, KeyError, TypeError):
            note.unlink(missing_ok=True)
            continue
        if not owner_lives:
            trees[note], logs[note] = marked(marker, session, log), Path(log)
    leftovers = [process for tree in trees.values() for process in tree]
    left = set(end_processes(leftovers, settings().stop_grace) if leftovers else [])
    for note, tree in trees.items():
        try:
            blot(logs[note], [*words, *secret_values(os.environ)])
        except OSError as error:
            LOG.warning("%s: keys that it may hold were not removed: %s", logs[note], error)
        if not left & set(tree):
            note.unlink(missing_ok=True)
    return [process.pid for process in leftovers if process not in left]


def identity(pid: int) -> dict[str, float | int] | None:
    """Process id with its start in clock ticks since boot: ids are used again, the pair is not.

    None for a process that ended, also while nobody has waited for it yet.
    """
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else {"pid": pid, "start": int(fields[19])}


def marked(marker: str, session: int | None, log: str) -> list[psutil.Process]:
    """Every live process of a tree, whoever its parent is now.

    The session is the process id of the tree's front: it is not given to another process while
    anything lives in the session. Being in it counts only together with our log as output.
    """
    wanted = f"{MARKER}={marker}".encode()
    found = []
    for process in psutil.process_iter():
        if process.pid == os.getpid():
            continue
        try:
            if wanted in Path(f"/proc/{process.pid}/environ").read_bytes().split(b"\0") or (
                session is not None
                and os.getsid(process.pid) == session
                and log in {str(Path(f"/proc/{process.pid}/fd/{n}").readlink()) for n in (1, 2)}
            ):
                found.append(process)
        except OSError:
            continue
    return found


def _signal(process: psutil.Process, *, hard: bool) -> bool:
    try:
        if hard:
            process.kill()
        else:
            process.terminate()
    except psutil.NoSuchProcess:
        return False
    return True


def wait_until(condition: Any, timeout: float, every: float = 0.5) -> bool:
    """Poll `condition()` until it is true; False after `timeout` seconds."""
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(every)
    return False
