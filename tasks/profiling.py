"""`pilotage profile`: read logs, make the profile, write what was asked for."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from eval_suites.traffic import TrafficProfile
from registry.errors import Problem, UserError
from registry.whole_files import unwritable
from tasks.traffic import Assumed, latency_of, profile_of
from tasks.traffic_columns import UNITS, read_mapping
from tasks.traffic_files import found
from tasks.traffic_logs import Options, ReadLog, read_log
from tasks.traffic_times import zone_of
from tasks.traffic_writing import write_load, write_profile

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Profiled:
    profile: TrafficProfile
    written: list[Path]


def profile_logs(
    paths: Sequence[Path],
    *,
    columns: Sequence[str] = (),
    timezone: str | None = None,
    time_unit: str | None = None,
    latency_unit: str | None = None,
    bad_rows: float = 0.01,
    window_s: float = 300.0,
    ttft: float | None = None,
    seconds_per_token: float | None = None,
    out: Path | None = None,
    load: Path | None = None,
    plots: Path | None = None,
) -> Profiled:
    """Raises `UserError` for mistakes in options and logs, before anything is written."""
    problems = [
        Problem(f"{name} {unit}", "is no unit", f"one of {', '.join(UNITS)}")
        for name, unit in (("--time-unit", time_unit), ("--latency-unit", latency_unit))
        if unit is not None and unit not in UNITS
    ]
    if (ttft is None) != (seconds_per_token is None):
        problems.append(
            Problem("--ttft and --seconds-per-token", "one is given without the other", "give both")
        )
    problems += _places(paths, out, load, plots)
    if problems:
        raise UserError(problems)
    asked = read_mapping(columns)
    options = Options(asked, timezone, time_unit, latency_unit, bad_rows)
    read = read_log(paths, options)
    log.info("profile: %d rows read, %d kept", read.read, len(read.requests))
    assumed = (
        Assumed(ttft, seconds_per_token)
        if ttft is not None and seconds_per_token is not None
        else None
    )
    profile = profile_of(read, window_s=window_s, assumed=assumed)
    written = []
    if load is not None:
        write_load(profile, load)
        written.append(load)
    if out is not None:
        write_profile(profile, out)
        written.append(out)
    if plots is not None:
        written += _draw(read, profile, assumed, plots)
    return Profiled(profile, written)


def _places(
    logs: Sequence[Path], out: Path | None, load: Path | None, plots: Path | None
) -> list[Problem]:
    """What is wrong with the places of the results, before a log of an hour's reading is read.

    A log must never be written over.
    """
    read = {file.resolve() for file in found(logs)}
    problems = []
    for name, path in (("--out", out), ("--write-load", load)):
        if path is None:
            continue
        if why := unwritable(path):
            what = f"cannot be written: {why}"
            problems.append(Problem(f"{name} {path}", what, "name a file where you may write"))
        elif path.is_dir():
            problems.append(Problem(f"{name} {path}", "is a folder", "name a file"))
        elif path.resolve() in read:
            problems.append(Problem(f"{name} {path}", "is a log that is read", "name another file"))
    if out is not None and load is not None and out.resolve() == load.resolve():
        what = "is written twice, by --out and --write-load"
        problems.append(Problem(f"--out {out}", what, "name two files"))
    if plots is not None and (why := unwritable(plots / "plot.png")):
        what = f"cannot be written: {why}"
        problems.append(Problem(f"--plots {plots}", what, "name a folder where you may write"))
    return problems


def _draw(
    read: ReadLog, profile: TrafficProfile, assumed: Assumed | None, folder: Path
) -> list[Path]:
    from registry.traffic_plots import Drawn, write_plots

    main, flight = profile.main_range, profile.concurrency
    what = Drawn(
        about=f"{profile.requests} requests, {profile.period.first:%Y-%m-%d %H:%M} to "
        f"{profile.period.last:%Y-%m-%d %H:%M} {profile.period.timezone}",
        main_prompt=main.prompt_tokens,
        main_output=main.output_tokens,
        rates=[profile.rate_by_hour[hour] for hour in range(24)],
        dispersions=[one.dispersion for one in profile.hours],
        zone=zone_of(profile.period.timezone),
        zone_name=profile.period.timezone,
        peak=profile.peak_concurrency,
        peak_at=flight.peak_at,
        stable=profile.stable_peak_concurrency,
        stable_at=flight.stable_peak_at,
        window_s=flight.window_s,
        latency_from=flight.latency_from,
    )
    return write_plots(read.requests, latency_of(read.requests, assumed), what, folder)
