"""The benchmark flow: a bundle that is there, or a candidate's ─► served ─► the rate it keeps.

What `pilotage bench` measures, on the machine of a worker.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from pathlib import Path

from prefect import flow

from flows.bench_rendering import bench_text
from flows.forms import BenchmarkRequest
from flows.making import begin, candidates_of, inputs_of, make_bundle, student
from flows.pages import show_page
from registry.artifacts import Stage
from registry.errors import UserError
from tasks.bench_targets import Target, bundle_target
from tasks.benchmarking import bench, document
from tasks.bundles import bundle_named, remember
from tasks.engines.subprocesses import end_leftovers
from tasks.planning import ReleasePlan
from tasks.progress import LOG


@flow(name="benchmark", validate_parameters=True)
def benchmark_bundle(request: BenchmarkRequest) -> str:
    """Measure one bundle; the path of the evidence. Raises as `tasks.benchmarking.bench` does."""
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
    show_page("benchmark", f"```\n{text}\n```", f"bundle {identity[:12]}")
    return str(done.folder)


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
        stages = [one.quantize, one.draft_training, one.draft]
        return [*inputs_of(todo), todo.distill, *(stage for stage in stages if stage is not None)]

    todo = begin(request, wanted)
    (one,) = candidates_of(todo, request.candidate)
    student(todo)
    bundle = make_bundle(todo, one)
    remember(bundle)
    return bundle_target(bundle, f"{todo.resolved.name} {one.name}"), bundle.digest
