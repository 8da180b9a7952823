"""A vLLM server of our own: started, proved by a generated token, watched, ended.

This is the driver's side. vLLM itself lives in the serve environment and is reached only as a
process and over HTTP; nothing here imports it. `failure_of` turns what vLLM wrote before it died
into the right kind of error: `Infeasible` (this hardware cannot run the bundle), `UserError` (an
argument is wrong), or nothing, which the server reports as an `InfrastructureError`.
"""

from __future__ import annotations

import re
import secrets
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn, Self

import httpx
from prometheus_client.parser import text_string_to_metric_families

from registry.engine_memory import MeasuredMemory
from registry.errors import Infeasible, InfrastructureError, PilotageError, UserError
from registry.json_files import json_object
from registry.provenance import hardware
from registry.serve_words import FOREIGN_ENV, serve_words, served_env
from registry.settings import settings
from tasks.engines.engine_kernels import emulated_kernels, is_quantized, kernels_of
from tasks.engines.engine_memory import measured_memory
from tasks.engines.ports import free_port, listens
from tasks.engines.subprocesses import ProcessTree, wait_until

PORT_TRIES = 3

ANSWER_TIMEOUT = 30.0
"""Seconds for /health, /metrics and /version; an engine that takes longer counts as dead."""

LAST_WORDS_WAIT = 10.0
"""Seconds for a dying engine to write why: vLLM's front ends itself within 5."""


# -- the command line ------------------------------------------------------------------------


def command(
    python: Path | str,
    target: Path | str,
    served_name: str,
    engine_args: Mapping[str, Any],
    port: int,
    draft: Path | str | None = None,
    num_speculative_tokens: int = 0,
    host: str = "127.0.0.1",
) -> list[str]:
    """The exact `vllm serve` command of a bundle, as `registry.serve_words` spells it."""
    words = serve_words(
        str(target),
        served_name,
        engine_args,
        port,
        str(draft) if draft is not None else None,
        num_speculative_tokens,
        host,
    )
    return [str(python), "-m", "vllm.entrypoints.cli.main", *words]


# -- why it died -----------------------------------------------------------------------------

_PREFIX = re.compile(
    r"^(?:\([\w.-]+(?: pid=\d+)?\)\s)*"
    r"(?:(?:DEBUG|INFO|WARNING|ERROR|CRITICAL) \d\d-\d\d \d\d:\d\d:\d\d \[[^\]]+\] ?)?"
)
"""`(EngineCore pid=12) ERROR 11-29 21:17:06 [core.py:1510] `, any part of it."""

_RAISED = re.compile(r"^(?P<kind>(?:\w+\.)*\w*(?:Error|Exception))(?:: ?(?P<text>.*))?$")

_FOLLOW_UPS = re.compile(
    r"Engine core initialization failed|WorkerProc initialization failed|EngineCore encountered"
    r"|EngineDeadError|See stack trace|See root cause|CancelledError|Engine core proc"
)
"""Raised because something else was raised before."""

_INFEASIBLE = re.compile(
    r"_C\w*' (?:object )?has no attribute"  # a kernel that this build or this CPU lacks
    r"|NotImplementedError"
    r"|not (?:currently |yet )?supported|(?:does|do) not support|unsupported|not implemented for"
    r"|unknown quantization method|does not recognize this architecture"
    r"|no kernel image is available|(?:failed to find|no) (?:a |valid |suitable )?(?:\w+ )?kernel"
    r"|(?:minimum|compute) capability"
    r"|could not run '[\w:.]+' with arguments from"
    r"|no available memory for the cache blocks"
    r"|KV cache is needed, which is larger than the available"
    r"|larger than the maximum number of tokens that can be stored in KV cache"
    r"|out of memory|OutOfMemoryError|can't allocate memory",
    re.IGNORECASE,
)

_ILLEGAL_INSTRUCTION = re.compile(r"Failed core proc\(s\): \{[^}]*: -4\b|Illegal instruction")

_MEMORY_NOW = re.compile(
    r"(?:Available|Free) memory on .*?\([\d.]+/(?P<total>[\d.]+) GiB\) on (?:startup|kv cache"
    r" allocation) is less than .*?\((?:[\d.]+[,/] ?)?(?P<wanted>[\d.]+) GiB\)"
)

_ARGPARSE = re.compile(r"error: (?P<text>unrecognized arguments:.*|argument .*|ambiguous option.*)")

_NOISE = re.compile(
    r"nanobind: | - leaked | - \.\.\. skipped|See https://nanobind|INFO: |Route: |\s*$"
    r"|\s+warnings\.warn\(|.*UserWarning: |.*FutureWarning: |Triton is installed, but"
)
"""What vLLM writes after its last word: leak reports of libraries, one line for each route."""

_PORT_TAKEN = re.compile(r"\[Errno 98\]|Address already in use", re.IGNORECASE)


def root_cause(log: str) -> str:
    """The engine's own words for why it died, without log prefixes; empty when it said nothing.

    That is the first exception in the log that is not the consequence of an earlier one. Of a
    pydantic error, which takes several lines, it is the sentence that says what is wrong.
    """
    return next(_causes(log), "")


def _causes(log: str) -> Iterator[str]:
    lines = [_PREFIX.sub("", line) for line in log.splitlines()]
    for index, line in enumerate(lines):
        raised = _RAISED.match(line)
        if raised is None or _FOLLOW_UPS.search(line):
            continue
        if "validation error" in line:
            yield _validation_error(lines[index : index + 4])
        elif not (raised["text"] or "").strip():
            yield f"{raised['kind']} in {_frame_above(lines, index)}"
        else:
            yield line.strip()


def _validation_error(lines: Sequence[str]) -> str:
    head, *rest = lines
    words = " ".join(line.strip() for line in rest)
    sentence = re.split(r" \[type=", words)[0]
    model = head.rpartition(" for ")[2].strip()
    return f"{model}: {sentence.removeprefix('Value error, ')}"


def _frame_above(lines: Sequence[str], index: int) -> str:
    """Function and file of the innermost frame: all that a bare exception says."""
    for line in reversed(lines[:index]):
        frame = re.match(r'\s+File "(?P<file>[^"]+)", line \d+, in (?P<function>\S+)', line)
        if frame:
            return f"{frame['function']} ({Path(frame['file']).name})"
    return "an unknown place"


def argument_error(log: str, where: str, engine: str, remedy: str) -> UserError | None:
    """What argparse said of a wrong argument, where it did. Pure."""
    argument = _ARGPARSE.search(log)
    if argument is None:
        return None
    return UserError.at(
        f"{where}: engine_args", f"{engine} says: {argument['text'].strip()}", remedy
    )


def failure_of(log: str, where: str = "serve recipe") -> Infeasible | UserError | None:
    """What the log of a dead engine says about the bundle; None when it says nothing of it.

    Pure. `where` names the recipe for the message of a wrong argument. Memory that others hold
    at the moment is no property of the bundle: only a wish beyond the whole machine is
    infeasible.
    """
    help_words = "`vllm serve --help=all` in the serve environment lists names and values"
    if wrong := argument_error(log, where, "vLLM", help_words):
        return wrong
    if _ILLEGAL_INSTRUCTION.search(log):
        return Infeasible("the engine was ended by an illegal instruction: this CPU lacks one")
    cause = root_cause(log)
    memory = _MEMORY_NOW.search(cause)
    if memory:
        wanted, total = float(memory["wanted"]), float(memory["total"])
        return Infeasible(cause) if wanted > total else None
    if _INFEASIBLE.search(cause):
        return Infeasible(cause)
    if re.match(r"\w*Config\b|\w*Args\b", cause):
        return UserError.at(f"{where}: engine_args", f"vLLM says: {cause}")
    return None


def last_words(log: str, count: int = 15) -> str:
    """The last `count` lines of a log that say something, without prefixes. Pure."""
    lines = (_PREFIX.sub("", line) for line in log.splitlines())
    return "\n".join([line for line in lines if not _NOISE.match(line)][-count:])


# -- the server ------------------------------------------------------------------------------


class VllmServer:
    """`vllm serve` on a free loopback port with a random key. Use as a context manager.

    Entering returns when the server has generated one token, or raises: `Infeasible`,
    `UserError` (see `failure_of`), or `InfrastructureError` with the end of the log, also after
    `settings().engine_start_timeout` seconds. Leaving ends every process of it.

    `tasks/engines/sglang_server.py` overrides what another engine spells in another way.
    """

    name = "vLLM"
    ready_path = "/health"
    """Answers 200 once the server takes requests; then one token has to come."""
    foreign_env: tuple[str, ...] = FOREIGN_ENV
    start_requests = 2
    """Requests that it may have answered when it is handed over: its start's proof."""

    def __init__(
        self,
        target: Path,
        *,
        log: Path,
        served_name: str,
        engine_args: Mapping[str, Any] | None = None,
        env: Mapping[str, str] | None = None,
        draft: Path | None = None,
        num_speculative_tokens: int = 0,
        python: Path | None = None,
        where: str = "serve recipe",
        api_key: str | None = None,
    ) -> None:
        """`api_key`: None makes one; the parts of one server share theirs."""
        self.target = target.resolve()
        self.draft = draft.resolve() if draft else None
        self.log = log
        self.served_name = served_name
        self.api_key = api_key or secrets.token_urlsafe(32)
        self.port = 0
        self.startup_seconds = 0.0
        self.kv_cache_tokens: int | None = None
        self.quantized = False
        self.kernels: list[str] | None = None
        self.emulated_kernels: list[str] | None = None
        self.engine_version = ""
        self._engine_args = dict(engine_args or {})
        self._env = {**served_env(env or {}), "VLLM_API_KEY": self.api_key}
        self._num_speculative_tokens = num_speculative_tokens
        self._python = python or self._own_python()
        self._where = where
        self._tree: ProcessTree | None = None
        self._log_start = 0
        # No proxy from the environment stands between this machine and itself, and plain HTTP
        # needs no certificates (loading them took longer than the request).
        self._client = httpx.Client(
            trust_env=False,
            verify=False,
            headers={"Authorization": f"Bearer {self.api_key}"},
        )

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.served_name!r}, {self.url!r})"

    @property
    def url(self) -> str:
        """Base URL with `/v1`, as OpenAI clients want it."""
        return f"{self._root}/v1"

    @property
    def _root(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def command(self) -> list[str]:
        return command(
            self._python,
            self.target,
            self.served_name,
            self._engine_args,
            self.port,
            self.draft,
            self._num_speculative_tokens,
        )

    def __enter__(self) -> Self:
        self._check_python()
        started = time.monotonic()
        deadline = started + settings().engine_start_timeout
        try:
            for tries_left in reversed(range(PORT_TRIES)):
                self._start()
                if self._wait_until_listening(deadline, retry_port=tries_left > 0):
                    break
                self.stop()
            self._generate_one_token(deadline)
        except BaseException:
            self.stop()
            raise
        self.startup_seconds = round(time.monotonic() - started, 3)
        self._read_engine(self._own_log())
        return self

    def _read_engine(self, log: str) -> None:
        """What a started engine says of itself."""
        self.engine_version = str(self._get("/version").json()["version"])
        config = self.target / "config.json"
        self.quantized = is_quantized(
            json_object(config) if config.is_file() else {}, self._engine_args
        )
        self.kernels = kernels_of(log, self.quantized)
        self.emulated_kernels = emulated_kernels(log, hardware()["flags"], self.quantized)
        sizes = re.findall(r"KV cache size: ([\d,]+) tokens", log)
        self.kv_cache_tokens = int(sizes[-1].replace(",", "")) if sizes else None

    def _own_python(self) -> Path:
        return settings().serve_python

    def _check_python(self) -> None:
        if shutil.which(self._python) is None:
            raise UserError.at(
                "PILOTAGE_SERVE_PYTHON",
                f"{self._python} is no Python that can be run",
                "`make env` builds the serve environment",
            )

    def _failure(self, log: str) -> PilotageError | None:
        return failure_of(log, self._where)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()

    def stop(self) -> None:
        """End every process of the server. Safe to call twice."""
        if self._tree is not None:
            self._tree.stop()

    @property
    def pid(self) -> int:
        """Of its first process; the others are its children."""
        return self._started.pid

    @property
    def pids(self) -> list[int]:
        """The first process of each of its parts."""
        return [self.pid]

    @property
    def emulated(self) -> bool | None:
        """Whether a kernel is emulated, so that times say nothing; None: the log does not tell."""
        return None if self.emulated_kernels is None else bool(self.emulated_kernels)

    def memory_bytes(self) -> int:
        """Resident memory of all its processes now, in bytes."""
        return self._started.memory_bytes()

    def memory(self) -> MeasuredMemory:
        """Of all its processes and the GPUs now, and what its log says of its start."""
        return measured_memory(self.pids, self._own_log())

    def metrics(self, by: str | None = None) -> dict[str, float]:
        """Counters and gauges of `/metrics` by name, summed over their labels.

        Histograms are there as `..._sum` and `..._count`. With `by`, only the samples that carry
        this label, kept apart by it: `name{position="0"}`. Raises as `check_alive` does.
        """
        try:
            text = self._get("/metrics").text
        except httpx.HTTPError:
            self.check_alive()
            raise InfrastructureError(f"{self!r} gives no metrics") from None
        return sum_samples(text, by)

    def check_alive(self) -> None:
        """Raise when the server cannot answer any more, with the reason it left in its log.

        A front process whose engine is dead counts as dead. Raises as on entering.
        """
        if self._started.poll() is not None:
            self._raise_death("ended")
        if not self._healthy():
            wait_until(lambda: self._started.poll() is not None, LAST_WORDS_WAIT)
            self._raise_death("is no longer healthy")

    def check_answers(self, limit: float) -> None:
        """Raise as `check_alive` does, also where no token comes within `limit` seconds.

        An engine that hangs still calls itself healthy: vLLM's /health (0.32) only sees death.
        """
        self.check_alive()
        self._generate_one_token(time.monotonic() + limit)

    # -- parts -----------------------------------------------------------------------------

    @property
    def _started(self) -> ProcessTree:
        assert self._tree is not None, "not started"
        return self._tree

    def _choose_port(self) -> int:
        return free_port()

    def _start(self) -> None:
        self.port = self._choose_port()
        self.log.parent.mkdir(parents=True, exist_ok=True)
        self._log_start = self.log.stat().st_size if self.log.exists() else 0
        # Not from the checkout: `python -m` would put our packages before vLLM's own imports.
        # A variable of the caller's shell would change what is measured and be in no bundle.
        tree = ProcessTree(
            self.command,
            log=self.log,
            env=self._env,
            cwd=self.log.parent,
            without=self.foreign_env,
        )
        tree.start()
        self._tree = tree

    def _own_log(self) -> str:
        """What this start wrote; the file may hold earlier ones."""
        with self.log.open("rb") as handle:
            handle.seek(self._log_start)
            return handle.read().decode("utf-8", errors="replace")

    def _get(self, path: str, timeout: float = ANSWER_TIMEOUT) -> httpx.Response:
        return self._client.get(f"{self._root}{path}", timeout=timeout)

    def _healthy(self, timeout: float = ANSWER_TIMEOUT, path: str = "/health") -> bool:
        try:
            return self._get(path, timeout).status_code == 200
        except httpx.HTTPError:
            return False

    def _wait_until_listening(self, deadline: float, *, retry_port: bool) -> bool:
        """True when `ready_path` answers 200; False when another process took the port first."""
        while True:
            if self._started.poll() is not None:
                if retry_port and _PORT_TAKEN.search(root_cause(self._own_log())):
                    return False
                self._raise_death("ended while it started")
            # Short: whoever has the port in our place may never answer.
            if self._healthy(2.0, self.ready_path) and listens(self._started.pid, self.port):
                return True
            if time.monotonic() > deadline:
                self._raise_death(
                    f"was not ready after {settings().engine_start_timeout:.0f} s "
                    "(PILOTAGE_ENGINE_START_TIMEOUT)"
                )
            time.sleep(0.2)

    def _generate_one_token(self, deadline: float) -> None:
        common = {"model": self.served_name, "max_tokens": 1, "temperature": 0.0}
        asked: list[tuple[str, dict[str, Any]]] = [
            ("/chat/completions", {"messages": [{"role": "user", "content": "Hello"}]}),
            # A model without a chat template answers 400 to the first.
            ("/completions", {"prompt": "Hello"}),
        ]
        for path, body in asked:
            try:
                response = self._client.post(
                    f"{self.url}{path}",
                    json={**common, **body},
                    timeout=max(1.0, deadline - time.monotonic()),
                )
            except httpx.HTTPError:
                break
            if response.status_code == 200 and _completion_tokens(response) >= 1:
                return
            if response.status_code not in (400, 404):
                break
        wait_until(lambda: self._started.poll() is not None, LAST_WORDS_WAIT)
        self._raise_death("answered /health but generated no token")

    def _raise_death(self, what: str) -> NoReturn:
        log = self._own_log()
        reason = self._failure(log)
        if reason is not None:
            raise reason
        cause = root_cause(log)
        raise InfrastructureError(
            f"the {self.name} server of {self.target} {what}"
            f"{f'; it says: {cause}' if cause else ''}; the end of {self.log}:\n{last_words(log)}"
        )


def _completion_tokens(response: httpx.Response) -> int:
    try:
        return int(response.json()["usage"]["completion_tokens"])
    except (ValueError, KeyError, TypeError):
        return 0


def sum_samples(text: str, by: str | None = None) -> dict[str, float]:
    """Samples of a Prometheus page, summed over labels; see `VllmServer.metrics`. Pure."""
    sums: dict[str, float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.name.endswith(("_bucket", "_created")):
                continue
            name = sample.name
            if by is not None:
                if by not in sample.labels:
                    continue
                name = f'{name}{{{by}="{sample.labels[by]}"}}'
            sums[name] = sums.get(name, 0.0) + sample.value
    return sums
