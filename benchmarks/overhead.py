"""What of a release is an engine at work, and what is orchestration.

    python -m benchmarks.overhead RECIPE [--set KEY=VALUE ...] [--home FOLDER]

Runs the release in this process, as `pilotage release` does, with a clock around what it calls.
Every second of the run belongs to one row: that of the innermost call it was spent in. The
`engine` rows are processes of `run_job`, the start and the answers of a served engine, and load
tests, by stage; all others are orchestration. `prefect start` is Prefect's own: its import and the
start of its temporary server. What we import while that server starts makes nobody wait, so it is
counted with Prefect's start, as long as that takes. Waiting for a device that another run holds is
neither.

Prints a table and one JSON line. Times are those of this machine now; ratios are the result.
"""

from __future__ import annotations

import argparse
import builtins
import functools
import importlib
import inspect
import json
import os
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from threading import current_thread, main_thread
from typing import Any

CALLS = {
    "engine": [
        "tasks.engines.subprocesses:ProcessTree.wait",
        "tasks.engines.subprocesses:ProcessTree.stop",
        "tasks.engines.vllm_server:VllmServer.__enter__",
        "tasks.engines.vllm_server:VllmServer.__exit__",
        "tasks.engines.job_process:JobProcess.do",
        "tasks.engines.openai_chat:generate",
        "tasks.engines.greedy_agreement:greedy_answers",
        "tasks.engines.engine_acceptance:accepted_by_segment",
        "tasks.teacher_asking:ask_missing",
    ],
    "hashing, store": [
        "registry.digests:digest_of_file",
        "registry.store:Store.find",
        "registry.store:Store.make",
        "registry.store:Store.last_seconds",
        "registry.store:Store.remove_stale",
    ],
    "files to the disk": ["registry.store:Store._publish"],
    "plan": ["tasks.planning:plan", "tasks.planning:resolve"],
    "prefect start": ["prefect.server.api.server:SubprocessASGIServer.start"],
    "prefect": ["prefect.tasks:Task.__call__", "prefect.flows:Flow.__call__"],
    "mlflow, ledger": [
        "registry.tracking:Tracker.__init__",
        "registry.tracking:Tracker.release_run",
        "registry.tracking:Tracker.stage_runs",
        "registry.tracking:Tracker.candidates",
        "registry.tracking:Tracker.finish",
        "registry.tracking:Tracker.experiment",
        "registry.tracking:Tracker.add_weights",
        "registry.alias_moves:Aliases.settle",
        "tasks.registering:make_version",
        "tasks.recorded:recorded",
    ],
    "report": [
        "tasks.plotting:release_plots",
        "tasks.plotting:lineage_picture",
        "tasks.reporting:report_details",
        "registry.report:write_report",
    ],
    "other runs' turn": ["tasks.devices:_Wait.descriptor"],
    "judging": ["tasks.judging:judge_candidates"],
    "pages in prefect": ["tasks.run_pages:show_release"],
}
"""Row of the table: `module:name` of what is clocked. A name that is gone is an error."""

REST, MAKING = "rest", "stages' own work"
IMPORTS = {"prefect": "prefect start", "mlflow": "mlflow, ledger"}
"""Row of an import by its first package; any other is `imports`."""


class Clock:
    """Seconds by row. Only the main thread counts: it is the one that waits."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self.cpu: dict[str, float] = defaultdict(float)
        self.by_stage: dict[str, dict[str, float]] = {
            row: defaultdict(float) for row in ("engine", MAKING)
        }
        self._rows = [REST]
        self._since, self._worked = time.monotonic(), time.thread_time()

    @contextmanager
    def row(self, name: str) -> Iterator[None]:
        # Inside of an engine everything is the engine's: its driver waits for it.
        if current_thread() is not main_thread() or self._rows[-1] == "engine":
            yield
            return
        self._charge()
        self._rows.append(name)
        try:
            yield
        finally:
            self._charge()
            self._rows.pop()

    def _charge(self) -> None:
        now, worked = time.monotonic(), time.thread_time()
        row, spent = self._rows[-1], now - self._since
        self.seconds[row] += spent
        self.cpu[row] += worked - self._worked
        if row in self.by_stage:
            from tasks.run_log import mark

            self.by_stage[row][mark().doing] += spent
        self._since, self._worked = now, worked

    def now(self) -> dict[str, float]:
        """Seconds by row until now."""
        self._charge()
        return dict(self.seconds)


def clocked(clock: Clock, row: str, call: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(call)
    def run(*arguments: Any, **options: Any) -> Any:
        with clock.row(row):
            return call(*arguments, **options)

    return run


def put_clocks(clock: Clock) -> None:
    """Around every call of `CALLS`, wherever a module of ours has taken it by name."""
    for row, places in CALLS.items():
        for place in places:
            module_name, _, name = place.partition(":")
            owner: Any = importlib.import_module(module_name)
            *path, last = name.split(".")
            for part in path:
                owner = getattr(owner, part)
            before = getattr(owner, last)
            after = clocked(clock, row, before)
            setattr(owner, last, after)
            if not path:
                _everywhere(before, after)


def put_clock_on_produce(clock: Clock) -> None:
    """What a stage does itself, around its engine, is not the store's."""
    from registry.store import Store

    before = Store._produce

    def run(shelf: Store, stage: Any, produce: Any, provenance: dict[str, Any]) -> Any:
        return before(shelf, stage, clocked(clock, MAKING, produce), provenance)

    Store._produce = run  # type: ignore[method-assign]


def _everywhere(before: Any, after: Any) -> None:
    for name, module in list(sys.modules.items()):
        if name.split(".")[0] in ("flows", "tasks", "registry", "eval_suites"):
            for key, value in list(vars(module).items()):
                if value is before:
                    setattr(module, key, after)


def put_clock_on_tasks(clock: Clock) -> None:
    """What a task or flow calls is not Prefect's: back to the row of who called Prefect."""
    from prefect.flows import Flow
    from prefect.tasks import Task

    for module in list(sys.modules.values()):
        if not getattr(module, "__name__", "").startswith(("flows", "tasks")):
            continue
        for value in list(vars(module).values()):
            if isinstance(value, Task | Flow) and not hasattr(value.fn, "clocked"):
                run = clocked(clock, REST, value.fn)
                # Prefect reads the annotations, which are names of the function's own module.
                run.__signature__ = inspect.signature(value.fn, eval_str=True)  # type: ignore[attr-defined]
                run.clocked = True  # type: ignore[attr-defined]
                value.fn = run


def put_clock_on_imports(clock: Clock) -> None:
    before = builtins.__import__

    def imported(name: str, *arguments: Any, **options: Any) -> Any:
        if name in sys.modules:
            return before(name, *arguments, **options)
        with clock.row(IMPORTS.get(name.split(".")[0], "imports")):
            return before(name, *arguments, **options)

    builtins.__import__ = imported


def measure(recipe: str, overrides: Sequence[str], in_turn: bool) -> dict[str, Any]:
    """Run the release; where its seconds went. in_turn: server and imports one after the other."""
    clock = Clock()
    started = time.monotonic()
    put_clock_on_imports(clock)
    from flows.prefect_home import prepare_prefect

    prepare_prefect()
    from tasks.planning import plan, resolve

    plan(resolve(recipe, list(overrides)))
    from tasks.engines.subprocesses import own_children

    own_children()
    from flows import quick_start

    if in_turn:
        quick_start.server_meanwhile = nullcontext  # type: ignore[assignment]
    ready, start = quick_start.server_meanwhile, quick_start._start
    begun, ended = [0.0], [0.0]
    beside = 0.0

    def timed_start(server: object) -> None:
        begun[0] = time.monotonic()
        start(server)
        ended[0] = time.monotonic()

    @contextmanager
    def then_clocks() -> Iterator[None]:
        nonlocal beside
        with ready():
            before = clock.now()
            yield
            after, imported = clock.now(), time.monotonic()
            put_clocks(clock)
            put_clock_on_tasks(clock)
            put_clock_on_produce(clock)
            waiting = clock.row("prefect start")
            waiting.__enter__()
        waiting.__exit__(None, None, None)
        own = after.get("prefect start", 0.0) - before.get("prefect start", 0.0)
        beside = max(0.0, min(ended[0], imported) - begun[0] - own)

    quick_start._start = timed_start
    quick_start.server_meanwhile = then_clocks
    outcome = quick_start.run_release(recipe, overrides)
    clock.now()
    wall = time.monotonic() - started
    rows = {name: round(seconds, 2) for name, seconds in sorted(clock.seconds.items())}
    engine, waiting = rows.get("engine", 0.0), rows.get("prefect start", 0.0)
    waited = rows.get("other runs' turn", 0.0)
    orchestration = wall - engine - waiting - beside - waited
    return {
        "recipe": outcome.name,
        "verdict": outcome.verdict.value,
        "made": sum(not stage.reused for stage in outcome.stages),
        "reused": sum(stage.reused for stage in outcome.stages),
        "wall_s": round(wall, 2),
        "engine_s": engine,
        "prefect_start_s": round(waiting + beside, 2),
        "beside_prefect_start_s": round(beside, 2),
        "waited_s": waited,
        "orchestration_s": round(orchestration, 2),
        "orchestration_share": round(orchestration / wall, 4),
        "rows": rows,
        "cpu": {name: round(seconds, 2) for name, seconds in sorted(clock.cpu.items())},
        "by_stage": {
            row: {name: round(seconds, 2) for name, seconds in stages.items()}
            for row, stages in clock.by_stage.items()
        },
    }


def table(found: dict[str, Any]) -> str:
    wall = found["wall_s"]
    lines = [f"{found['recipe']}: {found['made']} stages made, {found['reused']} reused"]
    for name, seconds in sorted(found["rows"].items(), key=lambda row: -row[1]):
        cpu = found["cpu"][name]
        share = 100 * seconds / wall
        lines.append(f"  {name:<22}{seconds:>9.2f} s{share:>7.1f} %{cpu:>9.2f} s of this thread")
        stages = sorted(found["by_stage"].get(name, {}).items(), key=lambda row: -row[1])
        lines += [f"    {stage:<28}{spent:>8.2f} s" for stage, spent in stages if spent >= 0.05]
    lines.append(
        f"Prefect's own start: {found['prefect_start_s']:.1f} s; "
        f"{found['beside_prefect_start_s']:.1f} s of our imports were beside it"
    )
    lines.append(
        f"orchestration beyond Prefect's start: {found['orchestration_s']:.1f} s of {wall:.1f} s "
        f"({100 * found['orchestration_share']:.1f} %)"
    )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("recipe")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--home", help="PILOTAGE_HOME of the run.")
    parser.add_argument(
        "--in-turn", action="store_true", help="Prefect's server and our imports do not overlap."
    )
    asked = parser.parse_args()
    if asked.home:
        os.environ["PILOTAGE_HOME"] = asked.home
    found = measure(asked.recipe, asked.set, asked.in_turn)
    print(table(found))
    print(json.dumps(found, ensure_ascii=False))


if __name__ == "__main__":
    main()
