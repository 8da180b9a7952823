"""The plots of a release: drawn from the store's evidence into a folder beside the report.

They lie in `reports/plots/RELEASE/NAME/`, the candidates over each other in `.../_compared/`. A
folder that is there is whole and is not drawn again, so a release that is run again shows and logs
the same files; to draw anew, remove it.

A picture takes a fifth of a second of processor: `begin_plots` draws in a thread what was measured
just now, while an engine works on what is next.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Lock, Thread, main_thread
from typing import Any

from registry.latency_plots import BY_RATE, PLOTS, compare_plots, telling, write_plots
from registry.lineage_picture import svg
from registry.measured_steps import read_latency
from registry.report_latency import LatencyFigures, Picture
from registry.settings import settings
from tasks.judging import Measured
from tasks.lineage import lineage_for
from tasks.progress import LOG

COMPARED = "_compared"
"""No candidate can be called so."""

Plots = Mapping[str, Sequence[Path]]
"""PNG files by candidate, and of all together as `_compared`."""


@dataclass(frozen=True)
class _Job:
    """A folder of plots: what it is called, the evidence that is read, and how it is drawn."""

    name: str
    evidence: tuple[tuple[str, Path], ...]
    draw: Callable[[Path], Any]


_drawing = Lock()
"""One picture at a time: nobody promises more of the library that draws."""

_begun: dict[tuple[tuple[str, Path], ...], Future[TemporaryDirectory[str]]] = {}
"""What is being drawn, or is drawn, by its evidence; kept until a release takes it."""


def begin_plots(measured: Sequence[Measured], release: str = "") -> None:
    """Draw in the background what `release_plots` will ask for.

    While it is not known which release that will be, only where a part of it was measured anew.
    """
    new = {one.name for one in measured if one.latency is not None and not one.latency.reused}
    for job in _jobs(measured):
        there = _root(release) / job.name
        wanted = not there.exists() if release else bool(new & {name for name, _ in job.evidence})
        if wanted and job.evidence not in _begun:
            _begun[job.evidence] = _aside(job.draw)


def release_plots(release: str, measured: Sequence[Measured]) -> dict[str, list[Path]]:
    """Plots of every candidate with a load test. What cannot be drawn is logged and left out.

    The evidence was judged without them, so a plot that fails refuses nothing.
    """
    begin_plots(measured, release)
    found = {job.name: _drawn(_root(release), job) for job in _jobs(measured)}
    return {name: files for name, files in found.items() if files}


def plot_artifacts(plots: Plots) -> dict[str, list[Path]]:
    """The same files by their folder among the artifacts of the release's run."""
    return {f"{PLOTS}/{name}": list(files) for name, files in plots.items()}


def latency_figures(
    measured: Sequence[Measured], plots: Plots, pictured: Sequence[str | None]
) -> dict[str, LatencyFigures]:
    """What the report says of each load test; plots only of the `pictured`, to keep it small."""
    found = {}
    for one in measured:
        if one.latency is None:
            continue
        evidence = read_latency(one.latency.path)
        files = {path.name: path for path in plots.get(one.name, ())}
        titles = telling(evidence) if one.name in pictured else {}
        found[one.name] = LatencyFigures(
            sla=evidence.sla,
            sustained=evidence.sustained,
            notes=evidence.notes,
            pictures=[
                Picture(title=f"{one.name}: {title}", png=files[name].read_bytes())
                for name, title in titles.items()
                if name in files
            ],
        )
    return found


def compared_picture(plots: Plots) -> list[Picture]:
    """All candidates over each other: latency against the rate."""
    files = [path for path in plots.get(COMPARED, ()) if path.name == BY_RATE]
    title = "latency against request rate, all candidates"
    return [Picture(title=title, png=path.read_bytes()) for path in files]


def lineage_picture(measured: Measured | None) -> str:
    """The lineage of a candidate as SVG; empty where there is none, or it cannot be drawn."""
    if measured is None or measured.bundle is None:
        return ""
    try:
        return svg(lineage_for(measured.bundle, measured.refs()), title=measured.name)
    except Exception as error:
        # As with the plots: the release ends as it was judged.
        LOG.warning("no picture of the lineage of %s: %s", measured.name, error)
        return ""


def _jobs(measured: Sequence[Measured]) -> list[_Job]:
    evidence = {one.name: one.latency.path for one in measured if one.latency is not None}
    jobs = [
        _Job(name, ((name, folder),), partial(write_plots, folder))
        for name, folder in evidence.items()
    ]
    if len(evidence) > 1:
        jobs.append(_Job(COMPARED, tuple(evidence.items()), partial(compare_plots, evidence)))
    return jobs


def _root(release: str) -> Path:
    return settings().reports_dir / PLOTS / release[:12]


def _drawn(root: Path, job: _Job) -> list[Path]:
    folder, incoming = root / job.name, root / f".{job.name}.partial"
    begun = _begun.pop(job.evidence, None)
    try:
        if begun is not None:
            with begun.result() as drawn:
                if not folder.exists():
                    shutil.rmtree(incoming, ignore_errors=True)
                    shutil.copytree(Path(drawn, PLOTS), incoming)
                    incoming.rename(folder)
    except Exception as error:
        # Whatever a drawing library raises: the release was judged, and ends as it was judged.
        LOG.warning("no plots of %s: %s", job.name, error)
        return []
    return sorted(folder.glob("*.png"))


def _aside(draw: Callable[[Path], Any]) -> Future[TemporaryDirectory[str]]:
    """Plots in a folder of their own, which does not outlive this process.

    A run that is cancelled waits for the folder that is being drawn, and for no other. (To leave
    it in the middle would abort the process: the library that draws has C++ on its stack.)
    """
    found: Future[TemporaryDirectory[str]] = Future()

    def run() -> None:
        with _drawing:
            try:
                if not main_thread().is_alive():
                    raise RuntimeError("the process is ending")
                found.set_result(_in_new_folder(draw))
            except BaseException as error:
                found.set_exception(error)

    Thread(target=run, name="plots").start()
    return found


def _in_new_folder(draw: Callable[[Path], Any]) -> TemporaryDirectory[str]:
    folder = TemporaryDirectory(prefix="pilotage-plots-")
    try:
        draw(Path(folder.name, PLOTS))
    except BaseException:
        folder.cleanup()
        raise
    return folder
