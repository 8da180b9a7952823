"""Plots of a load test: asserted on what is drawn, not on the pixels."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from threading import current_thread
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from registry.errors import UserError
from registry.evidence import LatencyEvidence, LoadPoint, ServingEvidence, write_summary
from registry.latency_plots import (
    by_rate,
    by_speed,
    compare_plots,
    compared_by_rate,
    telling,
    timeline,
    write_plots,
)
from registry.measured_steps import Step, deciding, read_steps
from registry.settings import CHECKOUT, settings
from tasks import plotting
from tasks.judging import Measured
from tasks.plotting import (
    begin_plots,
    compared_picture,
    latency_figures,
    plot_artifacts,
    release_plots,
)
from tests.unit.load_builders import Queue

SLA = "e2el p99 2000ms"
PNG = b"\x89PNG\r\n\x1a\n"


def times(*values: float | None) -> dict[str, float | None]:
    return dict(zip(("p50", "p90", "p95", "p99"), values, strict=True))


def point(rate: float, p99: float | None, answer: str | None, **changes: Any) -> LoadPoint:
    low = times(100, 200, 300, p99)
    known: dict[str, Any] = {
        "rate": rate,
        "achieved_rate": rate,
        "total": 20,
        "ok": 20,
        "failed": 0,
        "duration_s": 20 / rate,
        "ttft_ms": low,
        "tpot_ms": times(20, 30, 40, 50),
        "itl_ms": low,
        "e2el_ms": low,
        "output_tokens_per_s": 40 * rate,
        "answer": answer,
        "values": {} if answer in (None, "void") else {SLA: p99},
        "bounds": {} if answer in (None, "void") else {SLA: p99 and p99 * 1.5},
    }
    return LoadPoint.model_validate(known | changes)


def evidence(points: list[LoadPoint], **changes: Any) -> LatencyEvidence:
    known: dict[str, Any] = {
        "bundle": "ab" * 32,
        "profile": "mock",
        "hardware": "h",
        "engine": "vllm 0.32.0",
        "harness": "computed",
        "settings": {},
        "points": points,
        "sla": [SLA],
        "measured_at": datetime(2026, 1, 31, tzinfo=UTC),
        "seconds": 1.0,
    }
    return LatencyEvidence.model_validate(known | changes)


SEARCH = [
    point(4, 500, "kept"),
    point(8, 3000, "not kept"),
    point(5.7, 900, "kept"),
    point(6.7, 1900, "undecided"),
    point(5.7, 1100, "kept"),
    point(6, 4000, "void"),
]


def folder_of(path: Path, found: LatencyEvidence, errors: float = 0.0) -> Path:
    """An evidence folder whose requests come of a queue of 10 requests/s."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    path.mkdir(parents=True, exist_ok=True)
    write_summary(path, found)
    rows, samples = [], []
    for number, one in enumerate(found.points, start=1):
        queue = Queue(service=0.1, error_share=errors, seed=number)
        rows += [row | {"rate": one.rate} for row in queue.rows(one.rate, one.total)]
        for at, waiting in ((0.0, 0.0), (1.0, None), (2.0, 3.0)):
            samples.append({"step": number, "rate": one.rate, "at_s": at, "waiting": waiting})
    pq.write_table(pa.Table.from_pylist(rows), path / "requests.parquet")
    pq.write_table(pa.Table.from_pylist(samples), path / "timeline.parquet")
    return path


def lines(axes: Any, label: str) -> list[tuple[list[float], list[float]]]:
    """All lines of that label, without those that belong to none."""
    return [
        (list(map(float, line.get_xdata())), list(map(float, line.get_ydata())))
        for line in axes.get_lines()
        if line.get_label() == label
    ]


def said(figure: Any) -> list[str]:
    (legend,) = figure.legends
    return [text.get_text().replace("\n", " ") for text in legend.get_texts()]


# -- against the rate ------------------------------------------------------------------------


def test_percentiles_answers_limit_and_interval_are_drawn() -> None:
    figure = by_rate(evidence(SEARCH, kept_rate=(5.7, 6.7)))
    (axes,) = figure.axes
    ((x, y),) = lines(axes, "P99 of all requests")
    assert x == [4, 5.7, 6.7, 8], "void steps are no part of the line"
    assert y == [500, 1100, 1900, 3000], "through the slower of two runs at a rate"
    assert sorted(lines(axes, "kept")) == [([4], [500]), ([5.7], [900]), ([5.7], [1100])]
    assert lines(axes, "not kept") == [([8], [3000])]
    assert lines(axes, "undecided") == [([6.7], [1900])]
    assert lines(axes, "void: did not measure what it should") == [([6], [4000])]
    shapes = {line.get_label(): line.get_marker() for line in axes.get_lines()}
    assert len({shapes[one] for one in ("kept", "not kept", "undecided")}) == 3
    assert any(list(line.get_ydata()) == [2000, 2000] for line in axes.get_lines())
    assert any(text.get_text() == "limit of P99: 2000 ms" for text in axes.texts)
    (span,) = [one for one in axes.patches if "in between" in str(one.get_label())]
    assert (span.get_x(), span.get_x() + span.get_width()) == pytest.approx((5.7, 6.7))
    assert span.get_label() == "in between: kept 5.7/s, not 6.7/s"
    whiskers = [part.get_segments()[0] for part in axes.collections]
    assert sorted(float(one[1][1]) for one in whiskers) == [750, 1350, 1650, 2850, 4500]
    assert axes.get_ylabel() == "E2EL, ms"
    assert axes.get_xlabel() == "request rate, requests/s"
    assert axes.get_xscale() == "linear"


def test_more_than_a_decade_is_logarithmic() -> None:
    (axes,) = by_rate(evidence([point(1, 100, "kept"), point(11, 100, "kept")])).axes
    assert axes.get_xscale() == "log"


def test_a_percentile_among_failed_requests_is_marked_at_the_upper_edge() -> None:
    figure = by_rate(evidence([point(4, 500, "kept"), point(8, None, "not kept", failed=5)]))
    (axes,) = figure.axes
    ((x, y),) = lines(axes, "P99 of all requests")
    assert x == [4, 8]
    assert math.isnan(y[1])
    assert lines(axes, "not kept") == [([8], [1])]
    (edge,) = [one for one in axes.get_lines() if str(one.get_label()).startswith("no such time")]
    assert list(edge.get_xdata()) == [8]
    assert edge.get_transform() == axes.get_xaxis_transform()
    assert "no such time (too many failed, or none measured)" in said(figure)


def test_a_value_without_a_bound_says_so() -> None:
    figure = by_rate(evidence([point(4, 500, "undecided", bounds={SLA: None})]))
    ((x, y),) = lines(figure.axes[0], "no upper bound from these requests")
    assert x == [4, 4]
    assert y == [500, figure.axes[0].get_ylim()[1]]


def test_a_panel_for_each_metric_of_the_sla() -> None:
    sla = ["ttft p95 500ms", SLA, "ttft p99.9 900ms"]
    figure = by_rate(evidence([point(4, 500, "kept", values={sla[2]: 800.0}, bounds={})], sla=sla))
    assert [axes.get_ylabel() for axes in figure.axes] == ["TTFT, ms", "E2EL, ms"]
    assert ([4.0], [800.0]) in lines(figure.axes[0], "kept")


def test_a_line_of_one_scenario_is_drawn_and_named() -> None:
    sla = ["chat ttft p95 500ms", "report e2el p99 60000ms"]
    one = point(4.0, 900.0, "kept", values={sla[0]: 40.0, sla[1]: 700.0})
    figure = by_rate(evidence([one], sla=sla))
    found = [text.get_text() for axes in figure.axes for text in axes.texts]
    assert found == ["limit of chat P95: 500 ms", "limit of report P99: 60000 ms"]


def test_without_an_sla_it_is_the_e2el_of_what_was_measured() -> None:
    figure = by_rate(evidence([point(4, 500, None), point(8, 700, None)], sla=[]))
    assert [axes.get_ylabel() for axes in figure.axes] == ["E2EL, ms"]
    assert lines(figure.axes[0], "measured") == [([4], [500]), ([8], [700])]


# -- a step over time ------------------------------------------------------------------------


def test_a_timeline_shows_every_request(tmp_path: Path) -> None:
    window = (1.0, 4.0)
    found = evidence([point(5, 500, "kept", steady_window_s=window, cause="all well")])
    (step,) = read_steps(folder_of(tmp_path, found, errors=0.3), found)
    failed = int((~step.ok).sum())
    assert 0 < failed < 20
    figure = timeline(step)
    upper, lower = figure.axes
    ((x, y),) = lines(upper, f"TTFT of {20 - failed} requests")
    assert x == pytest.approx(step.start_s[step.ok].tolist())
    assert y == pytest.approx(step.ttft_ms[step.ok].tolist())
    ((at, heights),) = lines(upper, f"{failed} failed")
    assert at == pytest.approx(step.start_s[~step.ok].tolist())
    assert set(heights) == {1}, "ticks at the upper edge"
    ((_, counts),) = lines(lower, f"in flight (from the requests, {failed} failed not counted)")
    assert counts[0] == counts[-1] == 0
    assert max(counts) >= 1
    ((moments, waiting),) = lines(lower, "waiting (shown by the engine)")
    assert moments == [0, 1, 2]
    assert waiting[0] == 0
    assert math.isnan(waiting[1]), "a gap, no line over it"
    for axes in (upper, lower):
        (span,) = axes.patches
        assert (span.get_x(), span.get_x() + span.get_width()) == pytest.approx(window)
    assert figure.get_suptitle() == "Step 1: 5 requests/s, kept"


def test_requests_that_follow_each_other_are_never_two_in_flight() -> None:
    step = Step(
        1, point(1, 500, None), np.array([0.0, 1.0, 2.0]), np.array([True] * 3),
        np.array([9.0, math.nan, 9.0]), np.array([1000.0, 1000.0, 1000.0]),
    )  # fmt: skip
    figure = timeline(step)
    ((_, counts),) = lines(figure.axes[1], "in flight (from the requests)")
    assert max(counts) == 1
    assert lines(figure.axes[0], "1 answered without a TTFT") == [([1.0], [1.0])]


@pytest.mark.parametrize("ok", [[], [False, False]])
def test_a_step_without_answers(ok: list[bool]) -> None:
    nothing = np.full(len(ok), math.nan)
    start = np.arange(len(ok), dtype=float)
    step = Step(1, point(1, None, "not kept"), start, np.array(ok, bool), nothing, nothing)
    figure = timeline(step)
    assert ("2 failed" in said(figure)) == bool(ok)


def test_batches_that_begin_anew_lie_after_each_other(tmp_path: Path) -> None:
    """As evidence of version 0.1 has them."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    found = evidence([point(1, 500, "kept", total=4)])
    write_summary(tmp_path, found)
    rows = [
        {"rate": 1.0, "start_s": start, "ok": True, "ttft_ms": 1.0, "e2el_ms": 500.0}
        for start in (0.0, 1.0, 0.0, 1.0)
    ]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "requests.parquet")
    (step,) = read_steps(tmp_path, found)
    assert step.start_s.tolist() == [0, 1, 1.5, 2.5]


def test_two_runs_at_one_rate_keep_their_own_requests(tmp_path: Path) -> None:
    found = evidence(SEARCH)
    steps = read_steps(folder_of(tmp_path, found), found)
    assert [step.number for step in steps] == [1, 2, 3, 4, 5, 6]
    assert all(len(step.ok) == 20 for step in steps)
    assert steps[2].start_s.tolist() != steps[4].start_s.tolist()


def test_the_steps_that_decided(tmp_path: Path) -> None:
    found = evidence(SEARCH, kept_rate=(5.7, 8))
    steps = read_steps(folder_of(tmp_path, found), found)
    assert [step.number for step in deciding(found, steps)] == [5, 2], "the second run at 5.7"
    fixed = evidence([point(rate, 100, None) for rate in (3, 1, 2, 5, 4)], sla=[])
    steps = read_steps(folder_of(tmp_path / "fixed", fixed), fixed)
    assert [step.point.rate for step in deciding(fixed, steps)] == [1, 5]
    assert len(deciding(fixed, steps[:4])) == 4


# -- throughput ------------------------------------------------------------------------------


def test_throughput_against_speed() -> None:
    points = [point(4, 500, "kept"), point(8, 900, "not kept", tpot_ms=times(25, 30, 40, 50))]
    figure = by_speed({"": evidence(points)})
    (axes,) = figure.axes
    assert lines(axes, "kept") == [([50], [160])]
    assert lines(axes, "not kept") == [([40], [320])]
    assert [text.get_text() for text in axes.texts] == ["4/s", "8/s"]


def test_steps_without_a_speed_are_named() -> None:
    none = times(None, None, None, None)
    points = [
        point(4, 500, "kept", concurrency=16),
        point(8, 500, "kept", tpot_ms=none),
        point(9, 500, "kept", output_tokens_per_s=None),
    ]
    (axes,) = by_speed({"": evidence(points)}).axes
    assert axes.get_title("left") == "not drawn, no median TPOT or throughput: 8/s, 9/s"
    assert [text.get_text() for text in axes.texts] == ["16 in flight"]
    (axes,) = by_speed({"": evidence(points[1:])}).axes
    assert len(axes.texts) == 0


def test_labels_cover_neither_each_other_nor_a_dot() -> None:
    near = [point(10 + n, 500, "kept", tpot_ms=times(20 + 0.05 * n, 30, 40, 50)) for n in range(9)]
    figure = by_speed({"": evidence(near)})
    (axes,) = figure.axes
    from matplotlib.text import Text

    boxes = [Text.get_window_extent(text) for text in axes.texts]
    assert len(boxes) == 9
    assert not any(a.overlaps(b) for i, a in enumerate(boxes) for b in boxes[:i])


# -- several ---------------------------------------------------------------------------------


def test_candidate_over_reference() -> None:
    one = evidence(SEARCH, kept_rate=(5.7, 6.7))
    other = evidence([point(2, 700, None), point(3, None, None)], sla=[], kept_rate=(None, 2))
    figure = compared_by_rate({"int8": one, "bf16": other})
    (axes,) = figure.axes
    assert axes.get_ylabel() == "P99 of E2EL, ms"
    assert lines(axes, "int8: kept 5.7/s, not 6.7/s")[0][1] == [500, 1100, 1900, 3000]
    ((x, y),) = lines(axes, "bf16: none kept, not 2/s")
    assert (x, y[0]) == ([2, 3], 700)
    assert math.isnan(y[1])
    bars = [line for line in axes.get_lines() if line.get_linewidth() == 5]
    assert list(bars[0].get_xdata()) == [5.7, 6.7]
    assert bars[1].get_xdata()[0] == axes.get_xlim()[0], "open where no rate was kept"
    speed = by_speed({"int8": one, "bf16": other})
    assert said(speed) == ["int8", "bf16"]
    assert len(speed.axes[0].texts) == 8


def test_percentiles_that_not_all_have_are_not_compared() -> None:
    rare = "e2el p99.9 2000ms"
    one = evidence([point(4, 500, "kept", values={rare: 800.0})], sla=[rare])
    (axes,) = compared_by_rate({"a": one}).axes
    assert axes.get_ylabel() == "P99.9 of E2EL, ms"
    (axes,) = compared_by_rate({"a": one, "b": evidence([point(4, 600, None)], sla=[])}).axes
    assert axes.get_ylabel() == "P99 of E2EL, ms"
    assert lines(axes, "a") == [([4], [500])]


# -- files -----------------------------------------------------------------------------------


def test_a_folder_is_drawn_and_drawn_again_the_same(tmp_path: Path) -> None:
    found = evidence(SEARCH, kept_rate=(5.7, 8), profile="100 $ a $ day")
    folder = folder_of(tmp_path, found, errors=0.2)
    (folder / "plots").mkdir()
    (folder / "plots" / "timeline_step009_1_per_s.png").write_bytes(b"of an earlier search")
    written = write_plots(folder)
    assert [path.name for path in written] == [
        "latency_by_rate.png",
        "throughput_by_speed.png",
        "timeline_step005_5.7_per_s.png",
        "timeline_step002_8_per_s.png",
    ]
    assert sorted(written) == sorted((folder / "plots").iterdir())
    before = [path.read_bytes() for path in written]
    assert all(content.startswith(PNG) and len(content) < 400_000 for content in before)
    assert [path.read_bytes() for path in write_plots(folder)] == before
    compared = compare_plots({"a": folder, "b": folder}, tmp_path / "out")
    assert all(path.read_bytes().startswith(PNG) for path in compared)


def test_an_emulated_kernel_is_said_on_every_plot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names: list[list[str]] = []
    monkeypatch.setattr(
        "registry.latency_plots.compared_by_rate",
        lambda found: names.append(list(found)) or compared_by_rate(found),
    )
    real = folder_of(tmp_path / "real", evidence(SEARCH))
    emulated = evidence(SEARCH, emulated=True)
    compare_plots({"a": real, "b": folder_of(tmp_path / "b", emulated)}, tmp_path / "out")
    assert names == [["a", "b (emulated)"]]
    assert "emulated kernel" in by_rate(emulated).axes[0].get_title(loc="left")


def test_the_folder_of_the_evidence_can_be_left_alone(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "evidence", evidence(SEARCH, kept_rate=(5.7, 8)))
    before = sorted(folder.iterdir())
    written = write_plots(folder, tmp_path / "out" / "bf16")
    assert sorted(written) == sorted((tmp_path / "out" / "bf16").iterdir())
    assert sorted(folder.iterdir()) == before


@pytest.mark.parametrize(
    ("points", "kept_rate", "titles"),
    [
        (SEARCH, (5.7, 8), ["step 5 over time: 5.7/s, kept", "step 2 over time: 8/s, not kept"]),
        (SEARCH[:2], (4, None), ["step 1 over time: 4/s, kept"]),
        (
            SEARCH[4:],
            (None, None),
            ["step 1 over time: 5.7/s, kept", "step 2 over time: 6/s, void"],
        ),
        (
            [point(3, 1, None), point(9, 1, None), point(6, 1, None)],
            None,
            ["step 2 over time: 9/s"],
        ),
        ([], None, []),
    ],
)
def test_the_plots_that_say_most_are_written(
    tmp_path: Path, points: list[LoadPoint], kept_rate: Any, titles: list[str]
) -> None:
    found = evidence(points, kept_rate=kept_rate)
    shown = telling(found)
    assert list(shown.values()) == ["latency against request rate", *titles]
    if points:
        names = {path.name for path in write_plots(folder_of(tmp_path, found))}
        assert set(shown) <= names


def test_a_void_step_is_hollow_where_several_are_compared() -> None:
    figure = compared_by_rate({"a": evidence(SEARCH), "b": evidence([point(9, 9, "void")])})
    (axes,) = figure.axes
    hollow = [one for one in axes.get_lines() if one.get_markerfacecolor() == "white"]
    assert [list(one.get_xdata()) for one in hollow] == [[6], [9]]
    assert axes.get_title("left").endswith("hollow: void")
    nothing = compared_by_rate({"b": evidence([point(9, 9, "void")], kept_rate=(None, None))})
    assert "b: no rate was decided" in said(nothing)


def test_few_failed_requests_keep_their_colour(tmp_path: Path) -> None:
    """The palette must not lose what is only a few pixels."""
    from PIL import Image

    found = evidence([point(5, 500, "kept", total=400)])
    folder = folder_of(tmp_path, found, errors=0.004)
    (step,) = read_steps(folder, found)
    assert 0 < (~step.ok).sum() <= 3
    (picture,) = [path for path in write_plots(folder) if path.name.startswith("timeline")]
    with Image.open(picture) as image:
        assert image.mode == "P"
        pixels = np.asarray(image.convert("RGB")).reshape(-1, 3).astype(int)
    vermilion = np.array([0xD5, 0x5E, 0x00])
    assert (np.abs(pixels - vermilion).max(axis=1) < 8).sum() > 3


# -- of a release ----------------------------------------------------------------------------


@pytest.fixture
def measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    """Two candidates with a load test and one without, in a home of their own."""
    monkeypatch.setenv("PILOTAGE_HOME", str(tmp_path / "home"))
    found = evidence(SEARCH, kept_rate=(5.7, 8), sustained=True, notes=["a note"])
    yield {
        name: Measured(name, latency=ref(folder_of(tmp_path / "store" / name, found)))
        for name in ("bf16", "int8")
    } | {"never": Measured("never")}


def ref(folder: Path) -> Any:
    return SimpleNamespace(path=folder, reused=False)


def test_the_plots_of_a_release_are_drawn_once(measured: dict[str, Any]) -> None:
    plots = release_plots("ab" * 32, list(measured.values()))
    assert {name: len(files) for name, files in plots.items()} == {
        "bf16": 4, "int8": 4, "_compared": 2,
    }  # fmt: skip
    root = settings().reports_dir / "plots" / "abababababab"
    assert {path.name for path in root.iterdir()} == set(plots)
    assert set(plot_artifacts(plots)) == {"plots/bf16", "plots/int8", "plots/_compared"}
    times = {path: path.stat().st_mtime_ns for files in plots.values() for path in files}
    # What a kill in the middle leaves.
    (root / ".int8.partial").mkdir()
    assert release_plots("ab" * 32, list(measured.values())) == plots
    assert all(path.stat().st_mtime_ns == time for path, time in times.items())


def test_a_release_killed_in_the_middle_draws_the_rest(
    measured: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def dies(folder: Path, out: Path) -> None:
        if folder.name == "int8":
            out.mkdir(parents=True)
            (out / "latency_by_rate.png").write_bytes(b"half")
            raise KeyboardInterrupt
        write_plots(folder, out)

    with monkeypatch.context() as patched:
        patched.setattr(plotting, "write_plots", dies)
        with pytest.raises(KeyboardInterrupt):
            release_plots("ab" * 32, list(measured.values()))
    plots = release_plots("ab" * 32, list(measured.values()))
    assert [len(files) for files in plots.values()] == [4, 4, 2]
    assert all(path.read_bytes().startswith(PNG) for path in plots["int8"])


def test_what_was_begun_is_what_is_drawn_and_is_drawn_once(
    measured: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    everyone = list(measured.values())
    expected = {
        name: [path.read_bytes() for path in files]
        for name, files in release_plots("ab" * 32, everyone).items()
    }
    seen: list[str] = []

    def counted(folder: Path, out: Path) -> None:
        seen.append(f"{folder.name} by {current_thread().name}")
        write_plots(folder, out)

    monkeypatch.setattr(plotting, "write_plots", counted)
    measured["int8"].latency.reused = True
    for one in everyone:
        begin_plots([one])
    begin_plots(everyone)
    plots = release_plots("cd" * 32, everyone)
    # What is reused is drawn for the release where that has no picture of it.
    assert sorted(seen) == ["bf16 by plots", "int8 by plots"]
    drawn = {name: [path.read_bytes() for path in files] for name, files in plots.items()}
    assert drawn == expected


def test_nothing_is_begun_for_what_is_reused(measured: dict[str, Any]) -> None:
    for one in measured.values():
        if one.latency is not None:
            one.latency.reused = True
    begin_plots(list(measured.values()))
    assert not [
        key for key in plotting._begun if measured["bf16"].latency.path in dict(key).values()
    ]


ENDS = """
import sys, time
from pathlib import Path
from threading import Event
from types import SimpleNamespace
from tasks import plotting
from tasks.judging import Measured

began = Event()

def draw(folder, out):
    print(folder.name, flush=True)
    began.set()
    time.sleep(0.3)

plotting.write_plots = draw
everyone = [
    Measured(name, latency=SimpleNamespace(path=Path(name), reused=False)) for name in "abcd"
]
for one in everyone:
    plotting.begin_plots([one])
began.wait()
sys.exit(7)
"""


def test_a_process_that_ends_draws_no_further_plots(tmp_path: Path) -> None:
    environment = {**os.environ, "PILOTAGE_HOME": str(tmp_path), "TMPDIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", ENDS], env=environment, capture_output=True, text=True, timeout=120
    )
    assert (done.returncode, len(done.stdout.split()), done.stderr) == (7, 1, "")
    assert not list(tmp_path.glob("pilotage-plots-*"))


def test_for_a_release_what_it_lacks_is_begun(measured: dict[str, Any]) -> None:
    everyone = list(measured.values())
    for one in everyone:
        if one.latency is not None:
            one.latency.reused = True
    first = release_plots("ab" * 32, everyone[:1])
    begin_plots(everyone, "ab" * 32)
    ours = {one.latency.path for one in everyone if one.latency is not None}
    begun = [[name for name, _ in key] for key in plotting._begun if {*dict(key).values()} <= ours]
    assert begun == [["int8"], ["bf16", "int8"]]
    plots = release_plots("ab" * 32, everyone)
    assert plots["bf16"] == first["bf16"] and [len(files) for files in plots.values()] == [4, 4, 2]


def test_what_cannot_be_drawn_refuses_nothing(
    measured: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    (measured["int8"].latency.path / "requests.parquet").write_bytes(b"no parquet")
    plots = release_plots("ab" * 32, list(measured.values()))
    assert set(plots) == {"bf16", "_compared"}


def test_what_the_report_says_of_a_load_test(measured: dict[str, Any]) -> None:
    plots = release_plots("ab" * 32, list(measured.values()))
    figures = latency_figures(list(measured.values()), plots, pictured=("int8", None))
    assert set(figures) == {"bf16", "int8"}
    assert figures["bf16"].pictures == []
    assert (figures["bf16"].sustained, figures["bf16"].notes) == (True, ["a note"])
    assert figures["bf16"].sla == [SLA]
    assert [picture.title for picture in figures["int8"].pictures] == [
        "int8: latency against request rate",
        "int8: step 5 over time: 5.7/s, kept",
        "int8: step 2 over time: 8/s, not kept",
    ]
    (picture,) = compared_picture(plots)
    assert picture.png == plots["_compared"][0].read_bytes()
    assert latency_figures(list(measured.values()), {}, ("int8",))["int8"].pictures == []


def test_a_folder_with_the_summary_alone(tmp_path: Path) -> None:
    write_summary(tmp_path, evidence(SEARCH))
    assert len(write_plots(tmp_path)) == 2


def test_no_points_at_all(tmp_path: Path) -> None:
    write_summary(tmp_path, evidence([], kept_rate=(None, None)))
    assert len(write_plots(tmp_path)) == 2


def test_what_cannot_be_drawn_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no such evidence"):
        write_plots(tmp_path)
    write_summary(tmp_path, evidence(SEARCH))
    (tmp_path / "requests.parquet").write_bytes(b"no parquet")
    with pytest.raises(UserError, match=r"requests\.parquet: cannot be read"):
        write_plots(tmp_path)
    serving = ServingEvidence(
        bundle="b", hardware="h", engine="e", feasible=True, measured_at=datetime.now(UTC)
    )
    write_summary(tmp_path, serving)
    with pytest.raises(UserError, match="holds serving evidence"):
        write_plots(tmp_path)


def test_importing_is_light_and_pyplot_is_not_touched(tmp_path: Path) -> None:
    write_summary(tmp_path, evidence(SEARCH))
    asked = (
        "import sys; import registry.latency_plots as p; from pathlib import Path\n"
        "assert 'matplotlib' not in sys.modules\n"
        f"p.write_plots(Path({str(tmp_path)!r}))\n"
        "assert 'matplotlib.pyplot' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", asked], check=True, cwd=CHECKOUT, timeout=120)
