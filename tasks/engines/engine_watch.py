"""What an OpenAI-compatible engine shows of itself while load is sent: counters, gauges, memory.

    watch = EngineWatch(url, pids=lambda: [server.pid])
    with watch.step() as seen:
        ...                     # send
    seen.growth, seen.samples, seen.summary()

The names are those of vLLM 0.32, read off a live server. Whatever is not shown is null; an
endpoint without them (another engine, a gateway) is asked once per step and then left alone.

A page of vLLM's is 50 KB and takes the process that also streams the tokens 3.8 ms of CPU to
write. Between the steps that disturbs nobody; during one only the wanted metrics are asked for,
which takes it 0.5 ms (Prometheus' `name[]`, answered by vLLM below `/metrics/` only).
"""

from __future__ import annotations

import math
import re
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx
import psutil

from registry.errors import InfrastructureError

Row = dict[str, Any]

COUNTERS = (
    "vllm:prefix_cache_queries_total",
    "vllm:prefix_cache_hits_total",
    "vllm:spec_decode_num_drafts_total",
    "vllm:spec_decode_num_draft_tokens_total",
    "vllm:spec_decode_num_accepted_tokens_total",
    "vllm:num_preemptions_total",
)
PER_POSITION = "vllm:spec_decode_num_accepted_tokens_per_pos_total"
"""Kept apart by its label: `...{position="0"}`."""
PREEMPTIONS = "vllm:num_preemptions_total"
RUNNING = "vllm:num_requests_running"
WAITING = "vllm:num_requests_waiting"
KV_CACHE = "vllm:kv_cache_usage_perc"
"""A share of 1 in spite of its name."""
STARTED = "process_start_time_seconds"
"""Of the API server; not shown where several of them share the work."""

_NAMES = frozenset({*COUNTERS, PER_POSITION, RUNNING, WAITING, KV_CACHE, STARTED})
_WANTED = {name.encode(): name for name in _NAMES}
_FILTERED = "/metrics/?" + "&".join(f"name[]={name}" for name in sorted(_NAMES))
_POSITION = re.compile(rb'position="(\d+)"')

PATIENCE = 2.0
"""Seconds for a read before and after a step; a server that accepts and is silent costs half."""
SAMPLE_PATIENCE = 10.0
"""Seconds for a read during a step, which waits for none of them."""
MOMENT = 0.5
"""Seconds that the end of a step waits for a sample that is still on its way."""
MOST_BYTES = 16 << 20
FAMILY_EVERY = 10
"""Samples between two looks for new child processes: each reads the whole process table."""


@dataclass(frozen=True)
class Shown:
    """One page: counters by name, gauges by name."""

    counters: dict[str, float]
    gauges: dict[str, float]


@dataclass
class Seen:
    """What one step showed; filled when the step ends."""

    growth: dict[str, float] = field(default_factory=dict)
    """Of vLLM's counters over the step, by their own names; empty where none are shown."""
    samples: list[Row] = field(default_factory=list)
    """`registry.evidence.TIMELINE_COLUMNS` without step and rate; `at_s` from the step's begin."""

    def summary(self) -> dict[str, float | None]:
        """For `LoadPoint.engine`: highest values of the samples; null where never shown."""
        return {
            "running_max": self._highest("running"),
            "waiting_max": self._highest("waiting"),
            "kv_cache_usage_max": self._highest("kv_cache_usage"),
            "preemptions": self.growth.get(PREEMPTIONS),
            "memory_peak_bytes": self._highest("memory_bytes"),
            "gpu_memory_peak_bytes": self._highest("gpu_memory_bytes"),
        }

    def _highest(self, column: str) -> float | None:
        values = [row[column] for row in self.samples if row[column] is not None]
        return max(values, default=None)


class EngineWatch:
    """Watches one engine, step after step.

    `url` with or without `/v1`; `every`: seconds between samples. `pids` gives the engine's
    process ids where it runs on this machine: then samples also hold the resident memory (RSS,
    pages that processes share counted in each of them) of those and all their children, and the
    memory in use on all GPUs that NVML shows, whoever uses it.
    """

    def __init__(
        self,
        url: str,
        *,
        api_key: str = "",
        every: float = 1.0,
        pids: Callable[[], list[int]] | None = None,
    ) -> None:
        self.root = _root(url)
        self.every = every
        self.api_key = api_key
        self.memory = _Memory(pids) if pids else None
        self.filtered: bool | None = None
        """Whether the engine answers for single metrics; None: not tried yet."""

    @contextmanager
    def step(self) -> Iterator[Seen]:
        """Watch while the body runs. Raises `InfrastructureError` when the engine restarted."""
        seen = Seen()
        with _client(self.root, self.api_key) as client:
            step = _Step(self, client)
            step.begin()
            try:
                yield seen
            except BaseException:
                step.halt()
                raise
            step.end(seen)


class _Step:
    """One step: a page before, samples by a thread, a page after."""

    def __init__(self, watch: EngineWatch, client: httpx.Client) -> None:
        self.watch, self.client = watch, client
        self.began = 0.0
        self.first: Shown | None = None
        self.last: Shown | None = None
        self.restarted = False
        self.rows: list[Row] = []
        self.stop = threading.Event()
        self.thread: threading.Thread | None = None

    def begin(self) -> None:
        self.first = self.last = self._page("/metrics", PATIENCE)
        self.began = time.monotonic()
        self._add(self.first)
        if self.first is not None or self.watch.memory is not None:
            self.thread = threading.Thread(target=self._run, name="engine-watch", daemon=True)
            self.thread.start()

    def halt(self) -> None:
        self.stop.set()
        if self.thread is not None:
            # One that hangs is left to its own time limit.
            self.thread.join(MOMENT)

    def end(self, seen: Seen) -> None:
        self.halt()
        first = self.first
        last = None
        if first is not None:
            last = self._read(PATIENCE) or self._page("/metrics", PATIENCE)
            self._compare(last)
        self._add(last)
        seen.samples = list(self.rows)
        if self.restarted:
            raise InfrastructureError(
                f"the engine at {self.watch.root} restarted while load was sent (its counters "
                "began anew), or several engines answer there in turn"
            )
        if first is not None and last is not None:
            seen.growth = {
                name: value - first.counters.get(name, 0.0) for name, value in last.counters.items()
            }

    def _run(self) -> None:
        every, number = self.watch.every, 1
        while not self.stop.wait(max(0.0, self.began + number * every - time.monotonic())):
            try:
                self._sample()
            except Exception:
                # The step has ended and closed the connection, or this machine showed something
                # nobody has seen yet: a sample less, never a measurement less.
                if self.stop.is_set():
                    return
            number = int((time.monotonic() - self.began) / every) + 1

    def _sample(self) -> None:
        shown = None
        if self.first is not None:
            if self.watch.filtered is None:
                shown = self._page(_FILTERED, SAMPLE_PATIENCE)
                self.watch.filtered = shown is not None and _names(shown) == _names(self.first)
            if not self.watch.filtered or shown is None:
                shown = self._read(SAMPLE_PATIENCE)
            self._compare(shown)
        self._add(shown)

    def _compare(self, shown: Shown | None) -> None:
        """Look for counters that went down; between samples too, as they may grow past again."""
        if shown is None or self.last is None:
            return
        before, after = self.last, shown
        self.restarted |= any(
            after.counters.get(name, value) < value for name, value in before.counters.items()
        )
        # The same process says the same of its start, to the last digit.
        started = before.gauges.get(STARTED)
        self.restarted |= after.gauges.get(STARTED, started) != started
        self.last = shown

    def _add(self, shown: Shown | None) -> None:
        memory, gpu = self.watch.memory.now() if self.watch.memory else (None, None)
        if shown is None and memory is None and gpu is None:
            return
        preemptions = None
        if shown is not None and self.first is not None and PREEMPTIONS in shown.counters:
            preemptions = shown.counters[PREEMPTIONS] - self.first.counters.get(PREEMPTIONS, 0.0)
        gauges = shown.gauges if shown is not None else {}
        row: Row = {
            "at_s": round(time.monotonic() - self.began, 3),
            "running": gauges.get(RUNNING),
            "waiting": gauges.get(WAITING),
            "kv_cache_usage": gauges.get(KV_CACHE),
            "preemptions": preemptions,
            "memory_bytes": memory,
            "gpu_memory_bytes": gpu,
        }
        self.rows.append(row)

    def _read(self, patience: float) -> Shown | None:
        return self._page(_FILTERED if self.watch.filtered else "/metrics", patience)

    def _page(self, path: str, patience: float) -> Shown | None:
        """What the engine shows at `path`; None where it is no such page or does not come."""
        deadline = time.monotonic() + patience
        page = bytearray()
        try:
            with self.client.stream("GET", self.watch.root + path, timeout=patience / 2) as reply:
                if reply.status_code != 200:
                    return None
                for part in reply.iter_bytes():
                    page += part
                    if time.monotonic() > deadline or len(page) > MOST_BYTES:
                        return None
        except (httpx.HTTPError, httpx.InvalidURL, OSError):
            return None
        return shown_on(bytes(page))


def shown_on(page: bytes) -> Shown | None:
    """What a Prometheus page says of a vLLM engine; None when it says nothing. Pure.

    Only the lines that are wanted are looked at: 0.1 ms for a page of 50 KB, of which
    prometheus_client's parser makes 7.5. Counters are summed over engines, as are requests; of
    the KV-cache's shares the highest is taken. Numbers that are not finite are left out.
    """
    counters: dict[str, float] = {}
    gauges: dict[str, float] = {}
    for line in page.split(b"\n"):
        name = _WANTED.get(line.partition(b"{")[0].partition(b" ")[0])
        if name is None:
            continue
        labels, _, rest = line.rpartition(b"}")
        try:
            # Behind the number there may be a time.
            value = float((rest if labels else line.partition(b" ")[2]).split()[0])
        except (ValueError, IndexError):
            continue
        if not math.isfinite(value):
            continue
        if name == PER_POSITION:
            position = _POSITION.search(labels)
            if position is not None:
                name = f'{PER_POSITION}{{position="{position[1].decode()}"}}'
                counters[name] = counters.get(name, 0.0) + value
        elif name in (KV_CACHE, STARTED):
            gauges[name] = max(gauges.get(name, value), value)
        elif name in COUNTERS:
            counters[name] = counters.get(name, 0.0) + value
        else:
            gauges[name] = gauges.get(name, 0.0) + value
    # Every Python process shows its start: alone it says nothing of an engine.
    return Shown(counters, gauges) if counters or gauges.keys() - {STARTED} else None


def reset_prefix_cache(url: str, api_key: str = "") -> bool:
    """Empty the engine's prefix cache; whether it is empty now. Raises nothing.

    vLLM has this only with VLLM_SERVER_DEV_MODE=1, and refuses while a request holds blocks:
    asked three times within a second. False: not there, refused, or no answer.
    """
    root = _root(url)
    with _client(root, api_key) as client:
        for pause in (0.3, 0.6, 0.0):
            try:
                reply = client.post(f"{root}/reset_prefix_cache", timeout=SAMPLE_PATIENCE)
                if reply.status_code != 200:
                    return False
                # Older ones answer 200 with an empty body.
                if not reply.content or reply.json().get("success") is True:
                    return True
            except (httpx.HTTPError, httpx.InvalidURL, OSError, ValueError, AttributeError):
                return False
            time.sleep(pause)
    return False


# -- parts -----------------------------------------------------------------------------------


class _Memory:
    """Memory of processes and of the GPUs, in bytes."""

    def __init__(self, pids: Callable[[], list[int]]) -> None:
        self._pids = pids
        self._family: list[psutil.Process] = []
        self._looks = 0
        self._gpus = gpu_handles()

    def now(self) -> tuple[int | None, int | None]:
        """Resident memory of the processes, and memory in use on the GPUs; None: not known.

        RSS, because PSS makes the kernel walk the engine's pages: 23 ms for one of 1.3 GB, more
        for a larger one, with the lock that its own allocations wait for.
        """
        if self._looks % FAMILY_EVERY == 0:
            self._family = self._look()
        self._looks += 1
        found = []
        for process in self._family:
            try:
                found.append(process.memory_info().rss)
            except psutil.Error:
                continue
        return (sum(found) if found else None), gpu_memory(self._gpus)

    def _look(self) -> list[psutil.Process]:
        family: dict[int, psutil.Process] = {}
        for pid in self._pids():
            try:
                process = psutil.Process(pid)
                family |= {child.pid: child for child in process.children(recursive=True)}
                family[pid] = process
            except psutil.Error:
                continue
        return list(family.values())


def gpu_memory(gpus: Sequence[Any]) -> int | None:
    """Bytes in use on the GPUs of these handles, whoever uses them; None: not known."""
    if not gpus:
        return None
    import pynvml

    try:
        return sum(pynvml.nvmlDeviceGetMemoryInfo(gpu).used for gpu in gpus)
    except pynvml.NVMLError:
        return None


def gpu_handles() -> list[Any]:
    """NVML's handles; empty without the package, the driver or a GPU."""
    try:
        import pynvml

        pynvml.nvmlInit()
        return [
            pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())
        ]
    except Exception:
        return []


def _names(shown: Shown) -> set[str]:
    return {*shown.counters, *shown.gauges}


def _root(url: str) -> str:
    return url.rstrip("/").removesuffix("/v1").rstrip("/")


def _client(root: str, api_key: str) -> httpx.Client:
    """No proxy between this machine and itself, and no certificates for plain HTTP."""
    here = re.match(r"https?://(localhost|127\.[\d.]+|\[::1\])(:|/|$)", root) is not None
    # The engine would compress what it then writes into the same machine's memory.
    headers = {"Accept-Encoding": "identity"}
    if api_key:
        headers["Authorization"] = f"Bearer {api_key}"
    return httpx.Client(trust_env=not here, verify=root.startswith("https:"), headers=headers)
