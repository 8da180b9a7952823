"""`pilotage profile` from logs to JSON, YAML, a load profile and pictures."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

import tasks.traffic
from eval_suites.loader import load_profile
from eval_suites.percentiles import Percentile
from eval_suites.traffic import TrafficProfile
from flows.cli import app
from flows.rendering import validate_files
from recipes import loader
from registry.errors import UserError
from registry.traffic_prefix import shared_tokens
from registry.traffic_requests import Text
from tasks.profiling import profile_logs
from tasks.traffic_columns import read_mapping
from tasks.traffic_scenarios import percentile
from tests.unit.traffic_builders import write_csv

T0 = 1_760_000_400
"""2025-10-09 09:00 UTC."""


def run(*words: Any) -> Any:
    return CliRunner().invoke(app, ["profile", *map(str, words)])


def rows(count: int, seed: int = 0, step: float = 1.0) -> list[str]:
    drawn = np.random.default_rng(seed)
    prompt = 50 + drawn.lognormal(5, 1, count).astype(int)
    # Long prompts have short answers.
    output = 1 + (20_000 / prompt * drawn.uniform(0.5, 1.5, count)).astype(int)
    return [
        f"{T0 + n * step:.3f},{prompt[n]},{output[n]},{0.5 + 0.02 * output[n]:.3f}"
        for n in range(count)
    ]


# -- the contract -----------------------------------------------------------------------------


def test_json_of_a_log_worked_out_by_hand(tmp_path: Path) -> None:
    """Ten requests, one a minute, each of 90 s: two in flight nearly always."""
    log = write_csv(tmp_path / "log.csv", [f"{T0 + 60 * n},{100 * (n + 1)},{n + 1},90"
                                           for n in range(10)])  # fmt: skip
    done = run(log, "--json")
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["requests"] == 10
    # Of ten, P50 is the fifth, P90 the ninth, P95 and P99 the tenth.
    assert {key: found["prompt_tokens"][key] for key in ("p50", "p90", "p95", "p99", "max")} == {
        "p50": 500, "p90": 900, "p95": 1000, "p99": 1000, "max": 1000,
    }  # fmt: skip
    assert found["output_tokens"]["p50"] == 5 and found["output_tokens"]["mean"] == 5.5
    assert found["peak_concurrency"] == 2
    # 10 * 90 s in 630 s; in 300 s from the second arrival on (60 s) 60-90: 2, 90-120: 1, ...
    assert found["concurrency"]["mean"] == pytest.approx(900 / 630, rel=1e-5)
    assert found["stable_peak_concurrency"] == pytest.approx((5 * 30 * 2 + 5 * 30 * 1) / 300)
    # 540 s from first to last arrival, all in hour 9.
    assert found["rate_by_hour"]["9"] == pytest.approx(10 / 540, rel=1e-5)
    assert found["rate_by_hour"]["10"] is None and len(found["rate_by_hour"]) == 24
    assert found["mean_rate"] == pytest.approx(10 / 540, rel=1e-5)
    # Windows of 300 s that hold five arrivals, or six with the last at the edge of its step.
    assert found["peak_rate"] == pytest.approx(5 / 300, rel=1e-5)


def test_without_an_end_nothing_is_in_flight_unless_assumed(tmp_path: Path) -> None:
    log = write_csv(tmp_path / "log.csv", [f"{T0 + n},10,100" for n in range(600)],
                    "arrived,prompt_tokens,output_tokens")  # fmt: skip
    found = profile_logs([log]).profile
    assert found.peak_concurrency is None and found.stable_peak_concurrency is None
    assert (
        found.concurrency.missing is not None and "--columns latency" in found.concurrency.missing
    )
    assumed = profile_logs([log], ttft=1.0, seconds_per_token=0.02).profile
    # Each takes 3 s, one a second.
    assert assumed.peak_concurrency == 3
    assert assumed.stable_peak_concurrency == pytest.approx(3, abs=0.02)
    assert assumed.concurrency.latency_from.startswith("ASSUMED")
    assert any("not by measurement" in note for note in assumed.notes)


def test_one_row_and_one_instant(tmp_path: Path) -> None:
    one = profile_logs([write_csv(tmp_path / "one.csv", [f"{T0},10,100,5"])]).profile
    assert (one.requests, one.peak_concurrency, one.stable_peak_concurrency) == (1, 1, 1.0)
    assert (one.mean_rate, one.peak_rate, set(one.rate_by_hour.values())) == (None, None, {None})
    log = write_csv(tmp_path / "instant.csv", [f"{T0},10,100,0"] * 7)
    instant = profile_logs([log]).profile
    assert (instant.peak_concurrency, instant.stable_peak_concurrency) == (0, 0.0)
    with pytest.raises(UserError, match="has no rate"):
        profile_logs([log], load=tmp_path / "load.yaml", out=tmp_path / "out.yaml")
    # What was asked for is written as a whole or not at all.
    assert not (tmp_path / "out.yaml").exists()


def test_a_time_of_another_decade_makes_no_endless_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = write_csv(tmp_path / "log.csv", [f"{T0},10,100,5", "700000000,10,100,5"])
    with pytest.raises(UserError, match=r"300: is too short for a log from 1992-03-07 to 2025"):
        profile_logs([log])
    monkeypatch.setattr(tasks.traffic, "MOST_STEPS", 100_000)
    with pytest.raises(UserError) as caught:
        profile_logs([log])
    enough = int(str(caught.value).split("take ")[1].split()[0])
    assert profile_logs([log], window_s=enough).profile.requests == 2


def test_mistakes_end_with_a_message(tmp_path: Path) -> None:
    log = write_csv(tmp_path / "log.csv", rows(20))
    for words, said in {
        ("--columns", "arrived"): "is not FIELD=COLUMN",
        ("--columns", "arived=ts"): "no such field",
        ("--columns", "arrived=a,arrived=b"): "the field stands twice",
        ("--time-unit", "h"): "is no unit",
        ("--ttft", "1"): "one is given without the other",
        ("--timezone", "Nowhere"): "is no time zone",
    }.items():
        with pytest.raises(UserError, match=said):
            raise run(log, *words).exception or AssertionError(words)


def test_columns_from_a_file(tmp_path: Path) -> None:
    (tmp_path / "map.yaml").write_text("arrived: ts\nprompt_tokens: in_len\n")
    assert read_mapping([str(tmp_path / "map.yaml"), "output_tokens=out_len,id=key"]) == {
        "arrived": "ts", "prompt_tokens": "in_len", "output_tokens": "out_len", "id": "key",
    }  # fmt: skip


def test_the_command_as_a_process_says_what_it_read(tmp_path: Path) -> None:
    log = write_csv(tmp_path / "log.csv", [*rows(300), f"{T0},0,1,1"])
    done = subprocess.run(
        [sys.executable, "-m", "flows.cli", "profile", str(log), "--timezone", "Asia/Shanghai"],
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "301 read, 300 kept, 1 left out" in done.stdout
    assert f"{log}: line 302: prompt_tokens = '0'" in done.stdout
    assert "Asia/Shanghai (--timezone)" in done.stdout and "17h 1" in done.stdout
    none = subprocess.run(
        [sys.executable, "-m", "flows.cli", "profile", str(tmp_path / "none.csv")],
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert none.returncode == 2 and "none.csv: does not exist" in none.stderr


# -- what others read -------------------------------------------------------------------------


def test_the_written_files_are_read_by_those_they_are_for(tmp_path: Path) -> None:
    log = write_csv(tmp_path / "log.csv", rows(2000))
    out, load = tmp_path / "o" / "traffic.yaml", tmp_path / "o" / "load.yaml"
    made = profile_logs([log], out=out, load=load, plots=tmp_path / "plots")
    assert made.written[:2] == [load, out]
    read = loader.load(str(out), "traffic", TrafficProfile)
    assert read == made.profile
    profile = load_profile(str(load))
    assert profile.scenarios == made.profile.scenarios
    assert profile.rates[0] == pytest.approx(1, rel=0.01)
    assert sum(one.weight for one in profile.scenarios.values()) == pytest.approx(1, abs=1e-4)
    # The scenarios have the tokens of the main range, and long prompts their short answers.
    prompts = sum(one.weight * one.input for one in profile.scenarios.values())
    main = made.profile.main_range
    whole = made.profile.prompt_tokens.mean * main.share_of_prompt_tokens / main.share_of_requests
    assert prompts == pytest.approx(whole, rel=0.01)
    ordered = [np.mean(one.output) for one in profile.scenarios.values()]
    assert ordered == sorted(ordered, reverse=True) and len(ordered) == 4
    for name in ("traffic_lengths", "traffic_hours", "traffic_in_flight"):
        assert (tmp_path / "plots" / f"{name}.png").read_bytes()[:4] == b"\x89PNG"


def test_the_schema_refuses_what_it_does_not_know(tmp_path: Path) -> None:
    out = tmp_path / "traffic.yaml"
    profile_logs([write_csv(tmp_path / "log.csv", rows(20))], out=out)
    content = yaml.safe_load(out.read_text())
    assert validate_files([out]) == 1
    out.write_text(yaml.safe_dump({**content, "peak_concurency": 3}))
    with pytest.raises(UserError, match=r"peak_concurency: unknown key\n.*peak_concurrency"):
        loader.load(str(out), "traffic", TrafficProfile)


def test_even_arrivals_are_as_even_as_a_load_profile_can_be(tmp_path: Path) -> None:
    log = write_csv(tmp_path / "log.csv", [f"{T0 + n / 2},10,10,1" for n in range(4000)])
    found = profile_logs([log]).profile.burstiness
    assert (found.load, found.load_from) == (100, "gap_cv")


def test_segments_make_scenarios(tmp_path: Path) -> None:
    lines = [f"{T0 + n},{100 if n % 4 else 1000},{10 if n % 4 else 99},1,{'a b' if n % 4 else '客'}"
             for n in range(40)]  # fmt: skip
    log = write_csv(tmp_path / "log.csv", lines,
                    "arrived,prompt_tokens,output_tokens,latency_s,segment")  # fmt: skip
    found = profile_logs([log]).profile
    assert [(one.name, one.share, one.prompt_tokens.p50) for one in found.segments] == [
        ("a b", 0.75, 100), ("客", 0.25, 1000),
    ]  # fmt: skip
    assert {name: (one.weight, one.input) for name, one in found.scenarios.items()} == {
        "a_b_100_to_100": (0.75, 100), "segment_1000_to_1000": (0.25, 1000),
    }  # fmt: skip


# -- prefixes ---------------------------------------------------------------------------------


def test_shared_beginnings_by_hand() -> None:
    texts = [
        Text(0, "system: freight. order 1", 24, 12),
        Text(1, "system: freight. order 2", 24, 12),
        Text(2, "system: finance", 15, 5),
        Text(3, "hello", 5, 2),
        Text(4, "hello", 5, 2),
    ]
    # 23 of 24 characters; "system: f", 9 of 15; all of the twins.
    assert shared_tokens(texts) == pytest.approx([12 * 23 / 24] * 2 + [5 * 9 / 15, 2, 2])


def test_prefixes_of_prompts_numbers_and_ids(tmp_path: Path) -> None:
    system = "You answer for a freight company. " * 10
    path = tmp_path / "log.jsonl"
    path.write_text("\n".join(
        json.dumps({"arrived": T0 + n, "prompt_tokens": 400, "output_tokens": 5,
                    "prompt": system + f"{random.Random(n).getrandbits(64):020} " + "x" * 39})
        for n in range(500)
    ))  # fmt: skip
    prefix = profile_logs([path]).profile.shared_prefix
    assert prefix is not None and prefix.tokens is not None and prefix.requests == 500
    # 340 of 400 characters, and the few digits that neighbours share by chance.
    assert 340 <= prefix.tokens.p50 <= 345
    header = "arrived,prompt_tokens,output_tokens,prefix_tokens"
    numbers = write_csv(
        tmp_path / "n.csv", [f"{T0},100,1,{32 * (n % 2)}" for n in range(4)], header
    )
    prefix = profile_logs([numbers]).profile.shared_prefix
    assert prefix is not None
    assert (prefix.share_of_requests, prefix.share_of_prompt_tokens) == (0.5, 0.16)
    ids = write_csv(tmp_path / "i.csv", [f"{T0},100,1,{one}" for one in ("a", "a", "b", "")],
                    header.replace("prefix_tokens", "prefix_id"))  # fmt: skip
    prefix = profile_logs([ids]).profile.shared_prefix
    assert prefix is not None and (prefix.share_of_requests, prefix.tokens) == (0.5, None)


# -- properties -------------------------------------------------------------------------------


@given(st.lists(st.integers(1, 50), min_size=1, max_size=60), st.sampled_from([5, 50, 90, 95, 99]))
def test_percentiles_are_the_projects_own(tokens: list[int], percent: int) -> None:
    own = Percentile(np.array(tokens, float), percent).value
    assert percentile(np.sort(np.array(tokens)), percent) == own


@settings(
    max_examples=6, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(st.integers(1, 300), st.integers(0, 99))
def test_the_order_of_rows_and_files_changes_nothing(tmp_path: Path, count: int, seed: int) -> None:
    lines = rows(count, seed, step=7.3)
    one = write_csv(tmp_path / "one.csv", lines)
    mixed = list(lines)
    random.Random(seed).shuffle(mixed)
    other = write_csv(tmp_path / "other.csv", mixed)
    parts = [write_csv(tmp_path / f"part{n}.csv", mixed[n::2]) for n in range(2) if mixed[n::2]]
    own = {"description", "sources", "rows"}
    first = profile_logs([one]).profile.model_dump(exclude=own)
    assert profile_logs([other]).profile.model_dump(exclude=own) == first
    assert profile_logs(parts).profile.model_dump(exclude=own) == first


def test_a_log_is_never_written_over(tmp_path: Path) -> None:
    log = write_csv(tmp_path / "log.csv", rows(20))
    before = log.read_bytes()
    (tmp_path / "link.csv").symlink_to(log)
    for words in (["--out", log], ["--write-load", tmp_path / "link.csv"], ["--out", tmp_path]):
        done = run(log, *words)
        assert isinstance(done.exception, UserError), words
    assert log.read_bytes() == before
    same = ["--out", tmp_path / "one.yaml", "--write-load", tmp_path / "one.yaml"]
    assert isinstance(run(log, *same).exception, UserError)
    assert not (tmp_path / "one.yaml").exists()
    assert isinstance(run(log, "--plots", log).exception, UserError)


def test_places_that_cannot_be_written_are_told_at_once_and_before_the_read(
    tmp_path: Path,
) -> None:
    # A log that would be an error of its own if it were read.
    log = write_csv(tmp_path / "log.csv", ["no time,10,100,5"] * 9)
    long = tmp_path / f"{'x' * 300}.yaml"
    done = run(log, "--out", "/proc/out.yaml", "--write-load", long, "--plots", log / "plots")
    assert isinstance(done.exception, UserError)
    assert [(one.where, one.what.split(":")[0]) for one in done.exception.problems] == [
        ("--out /proc/out.yaml", "cannot be written"),
        (f"--write-load {long}", "cannot be written"),
        (f"--plots {log / 'plots'}", "cannot be written"),
    ]
    assert all("where you may write" in one.remedy for one in done.exception.problems)
    assert [path.name for path in tmp_path.iterdir()] == ["log.csv"]


@pytest.mark.parametrize(
    ("place", "value", "said"),
    [
        ("stable_peak_concurrency", -5, "stable_peak_concurrency: Input should be greater"),
        ("stable_peak_concurrency", 1e9, "stable_peak_concurrency 1e+09 is above the peak, 2"),
        ("peak_concurrency", 21, "peak_concurrency 21 is above the 20 requests"),
        ("prompt_tokens.max", -3, "prompt_tokens.max: Input should be greater"),
        ("prompt_tokens.p95", 10**9, "prompt_tokens: p95 is above p99"),
        ("output_tokens.mean", 0, "output_tokens: mean is not between min and max"),
        ("main_range.prompt_tokens", [500, 10], "main_range: prompt_tokens: 500 to 10 is no range"),
        ("main_range.prompt_tokens", [0, 0], "a prompt has at least one token"),
        ("main_range.prompt_tokens", [1, 10**9], "main_range.prompt_tokens ends at 1000000000"),
        ("main_range.percents", [5, 200], "main_range.percents.1: Input should be less"),
        ("peak_rate", -2, "peak_rate: Input should be greater"),
        ("rate_by_hour.25", 1, "rate_by_hour.25"),
        ("rate_by_hour.3", -1, "rate_by_hour.3: Input should be greater"),
    ],
)
def test_a_profile_corrected_by_hand_is_checked(
    tmp_path: Path, place: str, value: Any, said: str
) -> None:
    out = tmp_path / "traffic.yaml"
    profile_logs([write_csv(tmp_path / "log.csv", rows(20))], out=out)
    content = yaml.safe_load(out.read_text())
    *above, last = place.split(".")
    at = content
    for name in above:
        at = at[name]
    at[last] = value
    if place.endswith("concurrency"):
        content |= {"peak_concurrency": 2} if place.startswith("stable") else {}
    out.write_text(yaml.safe_dump(content))
    with pytest.raises(UserError) as caught:
        loader.load(str(out), "traffic", TrafficProfile)
    assert str(out) in str(caught.value) and said in str(caught.value)
    assert all(one.remedy for one in caught.value.problems)


def test_an_hour_without_quotes_is_named(tmp_path: Path) -> None:
    """Beside '4', which is a text in YAML, 3 is a number."""
    out = tmp_path / "traffic.yaml"
    out.write_text("kind: traffic\nrate_by_hour: {3: 1.0, '4': 1.0}\n")
    with pytest.raises(UserError, match=r"rate_by_hour\.3: is a key without quotes, 3,"):
        loader.load(str(out), "traffic", TrafficProfile)
