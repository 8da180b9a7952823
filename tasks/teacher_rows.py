"""The teacher's answers while they come: appended to a file, so that a kill loses none of them.

    <home>/bench/answers-<key>/answers.jsonl
        {"row": number, "sample": number, ...the result...}, in any order

In memory is one number an answer: where its line begins. The folder is named by all that decides
an answer (`DECIDES`, the prompts, what serves) and nothing else, so a higher
`max_truncated_share` asks nothing again.
"""

from __future__ import annotations

import json
import os
import shutil
import time
from array import array
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Self

from filelock import FileLock, Timeout

from registry.artifacts import Stage
from registry.errors import InfrastructureError
from registry.settings import settings
from tasks.engines.openai_chat import ChatResult
from tasks.progress import LOG

ANSWERS = "answers.jsonl"
ABSENT = -1

DECIDES = ("sampling", "samples", "context", "engine")
"""Of the stage's config: what is sent, how often, and to whom. The rest judges the answers."""

ASKED_VERSION = 3
"""Of how a teacher is asked. Rules that change (the stage's own version) ask nobody again."""

SYNC_SECONDS = 1.0
"""A loss of power costs at most the answers of so long; a kill costs none that is written."""


class AnswerFile:
    """`samples` results of each row (0 to `rows` - 1); those of an earlier process are there again.

    Only answers count as there: a row that the server rejected is asked again by the next
    process, since a key or a model's name may have been put right.
    """

    def __init__(self, path: Path, rows: int, samples: int = 1) -> None:
        self.path = path
        self.rows = rows
        self.samples = samples
        self.prompt_tokens = 0
        self.completion_tokens = 0
        """Of all answers, as the server counted them."""
        self.uncounted = 0
        """Answers for which it did not."""
        self._places = array("q", [ABSENT]) * (rows * samples)
        path.parent.mkdir(parents=True, exist_ok=True)
        self._out = path.open("ab")
        self._end = self._read_again()
        self._in = path.open("rb")
        self._synced_at = time.monotonic()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._in.close()
        try:
            with self._out:
                self._out.flush()
                os.fsync(self._out.fileno())
        except OSError:
            # A full disk has been told of already, with the file's name.
            if error is None:
                raise

    @property
    def tokens(self) -> int:
        return self.prompt_tokens + self.completion_tokens

    def missing(self) -> Iterator[tuple[int, int]]:
        """Row and sample of what has no answer, in order; looked up when they are taken."""
        return (
            divmod(number, self.samples)
            for number, place in enumerate(self._places)
            if place == ABSENT
        )

    def count_missing(self) -> int:
        return self._places.count(ABSENT)

    def add(self, row: int, result: ChatResult, sample: int = 0) -> None:
        """Write one result. It is the kernel's when this returns, and on the disk soon."""
        content = {"row": row, "sample": sample, **result.model_dump()}
        line = json.dumps(content).encode("ascii") + b"\n"
        try:
            self._out.write(line)
            self._out.flush()
        except OSError as error:
            # What there is of the line is cut off by the next process.
            raise InfrastructureError(f"{self.path}: {error}") from error
        self._note(row, sample, result, self._end)
        self._end += len(line)
        if time.monotonic() - self._synced_at > SYNC_SECONDS:
            os.fsync(self._out.fileno())
            self._synced_at = time.monotonic()

    def get(self, row: int, sample: int = 0) -> ChatResult | None:
        place = self._places[row * self.samples + sample]
        if place == ABSENT:
            return None
        self._in.seek(place)
        return _parsed(self._in.readline())[2]

    def samples_of(self, row: int) -> list[ChatResult]:
        """All answers to a row, by sample number; those that are missing are left out."""
        found = (self.get(row, sample) for sample in range(self.samples))
        return [result for result in found if result is not None]

    def _note(self, row: int, sample: int, result: ChatResult, place: int) -> None:
        if not 0 <= sample < self.samples or row < 0:
            raise LookupError(f"row {row}, sample {sample}")
        self._places[row * self.samples + sample] = place
        if result.state == "done" and None in (result.prompt_tokens, result.completion_tokens):
            self.uncounted += 1
        self.prompt_tokens += result.prompt_tokens or 0
        self.completion_tokens += result.completion_tokens or 0

    def _read_again(self) -> int:
        """Where the next line begins, after what was kept; half a line at the end is cut off."""
        end = 0
        with self.path.open("rb") as lines:
            for line in lines:
                if not line.endswith(b"\n"):
                    break
                try:
                    row, sample, result = _parsed(line)
                    if result.state == "done":
                        self._note(row, sample, result, end)
                except (ValueError, LookupError, TypeError, AttributeError):
                    # A loss of power may leave blocks of zeros: that row is asked again.
                    LOG.warning("%s: an answer cannot be read and is asked for again", self.path)
                end += len(line)
        self._out.truncate(end)
        return end


def _parsed(line: bytes) -> tuple[int, int, ChatResult]:
    content = json.loads(line)
    return content.pop("row"), content.pop("sample"), ChatResult.model_validate(content)


# -- the folder ------------------------------------------------------------------------------


def work_folder(stage: Stage, prompts_digest: str) -> Path:
    """Where the answers of a stage lie until the store has them."""
    config = {name: stage.config[name] for name in DECIDES if name in stage.config}
    tools = {name: version for name, version in stage.tools.items() if name == "vllm"}
    inputs = {**stage.inputs, "prompts": prompts_digest}
    changes = {"version": ASKED_VERSION, "config": config, "inputs": inputs, "tools": tools}
    decides = stage.model_copy(update=changes)
    return settings().home / "bench" / f"answers-{decides.key[:32]}"


@contextmanager
def held(folder: Path, timeout: float = 24 * 3600.0) -> Iterator[None]:
    """One process at a time: stages that differ in a share only have one folder."""
    lock = _lock(folder, timeout)
    try:
        lock.acquire(timeout=0.0)
    except Timeout:
        LOG.info("waiting for another process, which adds to %s", folder)
        try:
            lock.acquire()
        except Timeout:
            raise InfrastructureError(
                f"another process has been adding to {folder} for {timeout:.0f} s"
            ) from None
    try:
        yield
    finally:
        lock.release()


def remove(folder: Path) -> None:
    """Remove a folder whose answers the store has, unless another process adds to it."""
    if not folder.exists():
        return
    try:
        with _lock(folder, 0.0):
            shutil.rmtree(folder, ignore_errors=True)
    except Timeout:
        LOG.info("%s is in use and stays", folder)


def _lock(folder: Path, timeout: float) -> FileLock:
    locks = settings().store_dir / ".locks"
    locks.mkdir(parents=True, exist_ok=True)
    return FileLock(locks / f"{folder.name}.lock", timeout=timeout)
