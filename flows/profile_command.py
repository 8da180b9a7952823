"""The command `profile`: what traffic a request log holds."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from flows.console import Json, show

if TYPE_CHECKING:
    from eval_suites.traffic import Lengths, TrafficProfile

SHOWN = ("mean", "p50", "p90", "p95", "p99", "max")


def profile(
    logs: Annotated[
        list[Path],
        typer.Argument(metavar="LOG", help="CSV, JSONL, Parquet, a .log of vLLM; or folders."),
    ],
    columns: Annotated[
        list[str] | None,
        typer.Option(help="FIELD=COLUMN[,...], or a YAML file of such pairs."),
    ] = None,
    timezone: Annotated[
        str | None, typer.Option(help="Whose hours count, and the zone of times without one.")
    ] = None,
    time_unit: Annotated[
        str | None, typer.Option(help="s, ms, us or ns of numeric times; without, by their size.")
    ] = None,
    latency_unit: Annotated[
        str | None,
        typer.Option(help="s, ms, us or ns; without, by the column's name, else s."),
    ] = None,
    bad_rows: Annotated[
        float, typer.Option(min=0, max=1, help="More than this share of bad rows is an error.")
    ] = 0.01,
    window: Annotated[
        float, typer.Option(min=1, max=86_400, help="Seconds of the stable peak's windows.")
    ] = 300.0,
    ttft: Annotated[
        float | None, typer.Option(min=0, help="Assume this TTFT (s) where there is no latency.")
    ] = None,
    seconds_per_token: Annotated[
        float | None, typer.Option(min=0, help="Assume this time per output token, with --ttft.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Write the profile as YAML.")] = None,
    write_load: Annotated[
        Path | None, typer.Option(help="Write a load profile that sends such traffic.")
    ] = None,
    plots: Annotated[Path | None, typer.Option(help="Draw PNG files into this folder.")] = None,
    as_json: Json = False,
) -> None:
    """Say what traffic request logs hold: lengths, rates by hour, requests in flight."""
    from tasks.profiling import profile_logs

    made = profile_logs(
        logs,
        columns=columns or [],
        timezone=timezone,
        time_unit=time_unit,
        latency_unit=latency_unit,
        bad_rows=bad_rows,
        window_s=window,
        ttft=ttft,
        seconds_per_token=seconds_per_token,
        out=out,
        load=write_load,
        plots=plots,
    )
    show(made.profile.model_dump(mode="json") if as_json else
         profile_text(made.profile, made.written), as_json)  # fmt: skip


def profile_text(profile: TrafficProfile, written: list[Path]) -> str:
    """What a person reads first: rows, lengths, rates, in flight, and what the log does not say."""
    period, rows = profile.period, profile.rows
    lines = [
        f"{profile.requests} requests from {period.first:%Y-%m-%d %H:%M:%S} to "
        f"{period.last:%Y-%m-%d %H:%M:%S}, {period.timezone} ({period.timezone_from}), "
        f"{period.days} days with requests, {period.gap_days} without",
        f"rows: {rows.read} read, {rows.kept} kept, {rows.read - rows.kept} left out",
        *(f"  {count:>9}  {reason}" for reason, count in rows.left_out.items()),
        *(f"    {example}" for example in rows.examples),
        "",
        f"{'':<15}" + "".join(f"{name:>10}" for name in SHOWN),
        _row("prompt tokens", profile.prompt_tokens),
        _row("output tokens", profile.output_tokens),
    ]
    if profile.latency_s:
        lines.append(_row("latency, s", profile.latency_s))
    if profile.ttft_s:
        lines.append(_row("TTFT, s", profile.ttft_s))
    main = profile.main_range
    lines += [
        f"main range P{main.percents[0]:g} to P{main.percents[1]:g}: prompts "
        f"{main.prompt_tokens[0]} to {main.prompt_tokens[1]}, outputs {main.output_tokens[0]} to "
        f"{main.output_tokens[1]} tokens; {main.share_of_requests:.1%} of the requests, "
        f"{main.share_of_prompt_tokens:.1%} of prompt and {main.share_of_output_tokens:.1%} of "
        "output tokens",
        "",
        f"requests/s: mean {_said(profile.mean_rate)}, peak {_said(profile.peak_rate)} "
        f"(window of {profile.concurrency.window_s:g} s); burstiness: gaps' CV "
        f"{_said(profile.burstiness.gap_cv)}, index of dispersion "
        f"{_said(profile.burstiness.dispersion)} (Poisson: 1)",
        *_hours(profile),
        "",
        *_in_flight(profile),
    ]
    if profile.shared_prefix:
        shared = profile.shared_prefix
        tokens = shared.tokens
        lines.append(
            f"shared prefixes ({shared.source}): {shared.share_of_requests:.1%} of the requests"
            + (f", {shared.share_of_prompt_tokens:.1%} of their prompt tokens"
               if shared.share_of_prompt_tokens is not None else "")
            + (f"; tokens P50 {tokens.p50:g}, P95 {tokens.p95:g}" if tokens else "")
        )  # fmt: skip
    lines += [
        f"segment {one.name or '(none)'}: {one.share:.1%}, prompt P50 {one.prompt_tokens.p50:g}, "
        f"output P50 {one.output_tokens.p50:g}"
        for one in profile.segments
    ]
    lines += [f"note: {note}" for note in profile.notes]
    lines += [f"written: {path}" for path in written]
    return "\n".join(lines)


def _row(name: str, values: Lengths) -> str:
    return f"{name:<15}" + "".join(f"{getattr(values, one):>10.6g}" for one in SHOWN)


def _said(value: float | None) -> str:
    return "unknown" if value is None else f"{value:.4g}"


def _hours(profile: TrafficProfile) -> list[str]:
    """Two lines of twelve hours."""
    lines = []
    for first in (0, 12):
        cells = [
            f"{hour:02d}h {_said(rate) if rate is not None else '-'}"
            for hour, rate in profile.rate_by_hour.items()
            if first <= hour < first + 12
        ]
        lines.append("  " + "  ".join(cells))
    return ["by hour of the day:", *lines]


def _in_flight(profile: TrafficProfile) -> list[str]:
    one = profile.concurrency
    if profile.peak_concurrency is None:
        return [f"requests in flight: {one.missing}"]
    lines = [
        f"requests in flight ({one.latency_from}): peak {profile.peak_concurrency} at "
        f"{one.peak_at:%Y-%m-%d %H:%M:%S}, stable peak {_said(profile.stable_peak_concurrency)}, "
        f"mean {_said(one.mean)}",
        f"  stable peak: {one.definition}",
        f"  Little's law (rate x mean latency): mean {_said(one.littles_law)}, in the busiest "
        f"window {_said(one.littles_law_peak)}",
    ]
    return lines
