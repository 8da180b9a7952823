"""The benchmark flow: a bundle that is there, or a candidate's ─► served ─► the rate it keeps.

What `pilotage bench` measures, on the machine of a worker.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from pathlib import Path

from prefect import flow

from flows.bench_rendering import bench_text
from flows.endings import PASSED, REFUSED, Ended, line, told
from flows.forms import BenchmarkRequest
from flows.making import after_student, begin, candidates_of, make_bundle, student
from flows.pages import show_page
from registry.artifacts import Stage
from registry.errors import UserError
from registry.outcome import Verdict
from tasks.bench_targets import Target, bundle_target
from tasks.benchmarking import Benchmark, bench, document
from tasks.bundles import bundle_named, remember
from tasks.engines.subprocesses import end_leftovers
from tasks.planning import ReleasePlan
from tasks.progress import LOG
from tasks.run_pages import fenced


@flow(name="benchmark", flow_run_name="benchmark-{request.load}", validate_parameters=True)
@told
def benchmark_bundle(request: BenchmarkRequest) -> Ended[str]:
    """Measure one bundle; the path of the evidence. Raises as `tasks.benchmarking.bench` does.

    Any verdict but PASS ends the run as Failed, as it ends `pilotage bench`.
    """
    target, identity = chosen(request)
    done = bench(
        target,
        identity,
        request.load,
        prompts=Path(request.prompts) if request.prompts and request.bundle else None,
        hardware=request.hardware,
        generator=request.generator,
    )
    text = bench_text(document(done))
    LOG.info("%s", text)
    show_page("benchmark", fenced(text), f"bundle {identity[:12]}")
    return ended(done, identity)


def ended(done: Benchmark, identity: str) -> Ended[str]:
    """One line that begins with the verdict. Pure."""
    kept, _ = done.evidence.kept_rate or (None, None)
    rate = f"keeps {kept:.4g} requests/s" if kept is not None else "keeps no rate"
    says = line(
        f"{done.verdict}: bundle {identity[:12]} {rate}: {', '.join(done.evidence.sla)}",
        f"; evidence {done.folder}",
    )
    if done.verdict is Verdict.PASS:
        return Ended(str(done.folder), PASSED, says)
    return Ended(str(done.folder), REFUSED, says, refused=True)


def chosen(request: BenchmarkRequest) -> tuple[AbstractContextManager[Target], str]:
    """The bundle that is named, or a candidate's, made where it is missing; not served yet."""
    if request.bundle:
        for pid in end_leftovers():
            LOG.warning("ended process %d, left behind by a run that crashed", pid)
        found = bundle_named(request.bundle)
        return bundle_target(found, request.bundle), found.digest
    if not request.candidate:
        raise UserError.at("benchmark", "names no candidate and no bundle", "name one of them")

    def wanted(todo: ReleasePlan) -> list[Stage]:
        (one,) = candidates_of(todo, request.candidate)
        return after_student(todo, one.quantize, one.draft_training, one.draft)

    todo = begin(request, wanted)
    (one,) = candidates_of(todo, request.candidate)
    student(todo)
    bundle = make_bundle(todo, one)
    remember(bundle)
    return bundle_target(bundle, f"{todo.resolved.name} {one.name}"), bundle.digest
