"""A traffic profile as YAML, and the load profile that sends such traffic."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path

import yaml

from eval_suites.load import LoadProfile, Scenario
from eval_suites.traffic import TrafficProfile
from recipes.teacher_recipe import Sampling
from registry.errors import InfrastructureError, UserError
from registry.whole_files import write_whole

LARGEST_RATE = 10_000.0
BLOCK = 16
"""Tokens of a cache block: of a prefix only whole ones are found again."""

SECONDS_PER_RATE = 300.0


def write_profile(profile: TrafficProfile, path: Path) -> None:
    head = f"# pilotage plan --model DIR --traffic {shlex.quote(str(path))}\n"
    _write(path, head + _yaml(profile.model_dump(mode="json")))


def write_load(profile: TrafficProfile, path: Path) -> LoadProfile:
    """Raises `UserError` where the log has no rate."""
    load, main = load_of(profile), profile.main_range
    head = (
        f"# pilotage bench --bundle MODEL@ALIAS --load {shlex.quote(str(path))}\n"
        "# Made by `pilotage profile` from a log: lengths of its main range, mean and peak rate.\n"
        f"# That range holds {main.share_of_requests:.1%} of the requests, "
        f"{main.share_of_prompt_tokens:.1%} of prompt and "
        f"{main.share_of_output_tokens:.1%} of output tokens.\n"
        "# It has no limits: write your `sla`, and a `search` instead of `rates` if you like.\n"
    )
    _write(path, head + _yaml(load.model_dump(mode="json", exclude_defaults=True)))
    return load


def load_of(profile: TrafficProfile) -> LoadProfile:
    rates = [rate for rate in (profile.mean_rate, profile.peak_rate) if rate]
    if not rates:
        raise UserError.at(
            "--write-load",
            "the log has no rate: all its requests arrived within a second",
            "profile a longer log",
        )
    longest = max(length for one in profile.scenarios.values() for length in _outputs(one))
    return LoadProfile(
        kind="load",
        description=profile.description,
        hardware="any",
        rates=sorted({min(rate, LARGEST_RATE) for rate in rates}),
        seconds_per_rate=SECONDS_PER_RATE,
        scenarios=profile.scenarios,
        cache_band=_cache_band(profile.scenarios),
        sampling=Sampling(temperature=0.0, top_p=1.0, max_tokens=longest, seed=0),
        burstiness=profile.burstiness.load,
    )


def _outputs(one: Scenario) -> Sequence[int]:
    return one.output if isinstance(one.output, list) else []


def _cache_band(scenarios: dict[str, Scenario]) -> tuple[float, float]:
    """Around the share of prompt tokens that lie in whole blocks of a scenario's prefix."""
    held = sum(one.weight * (one.prefix // BLOCK * BLOCK) for one in scenarios.values())
    total = sum(one.weight * (one.prefix + one.input) for one in scenarios.values())
    share = held / total
    return round(max(0.0, share - 0.05), 3), round(min(1.0, share + 0.05), 3)


def _yaml(content: object) -> str:
    text: str = yaml.safe_dump(
        content, sort_keys=False, allow_unicode=True, width=100, default_flow_style=None
    )
    return text


def _write(path: Path, text: str) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, text)
    except OSError as error:
        raise InfrastructureError(f"{path}: cannot be written ({error.strerror})") from None
