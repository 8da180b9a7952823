"""The main range of a log as scenarios of a load profile."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from eval_suites.load import TIME_METRICS, Scenario
from eval_suites.traffic import MainRange
from registry.traffic_requests import Requests

MOST_SEGMENTS = 8
"""Of which a profile makes scenarios; the others are one, `other`."""

BANDS = 4
FEWEST_FOR_BANDS = 200
OUTPUTS = 20
"""Output lengths of a scenario: quantiles at equal distances."""

Array = NDArray[Any]


def percentile(ordered: Array, percent: float) -> Any:
    """The smallest value that at least `percent` % stay at or below (`eval_suites.percentiles`)."""
    rank = math.ceil(percent / 100 * len(ordered) - 1e-9)
    return ordered[max(rank, 1) - 1].item()


def inside_of(
    requests: Requests, prompt: tuple[int, int], output: tuple[int, int]
) -> NDArray[np.bool_]:
    """Both lengths at once; where no request has both, all of them."""
    inside = (requests.prompt >= prompt[0]) & (requests.prompt <= prompt[1])
    inside &= (requests.output >= output[0]) & (requests.output <= output[1])
    return inside if inside.any() else np.ones(len(requests), bool)


def scenarios_of(requests: Requests, main: MainRange, shared: Any) -> dict[str, Scenario]:
    """The main range as scenarios: prompts in bands of equal numbers, each with its own outputs.

    So long prompts keep the outputs that long prompts have. The input of a band is its mean, which
    keeps the number of tokens; outputs are quantiles, at least 1 as an engine needs.
    """
    inside = inside_of(requests, main.prompt_tokens, main.output_tokens)
    groups = _groups(requests, inside)
    found: dict[str, Scenario] = {}
    total = int(inside.sum())
    for name, mask in groups:
        prompts = np.sort(requests.prompt[mask])
        bands = BANDS if len(groups) == 1 else BANDS // 2
        bands = bands if len(prompts) >= FEWEST_FOR_BANDS else 1
        edges = sorted({percentile(prompts, 100 * (band + 1) / bands) for band in range(bands)})
        low = int(prompts[0])
        for high in edges:
            band = mask & (requests.prompt >= low) & (requests.prompt <= high)
            outputs = np.sort(requests.output[band])
            mean = float(requests.prompt[band].mean(dtype=np.float64))
            prefix = min(round(shared(band, low, high)), round(mean) - 1)
            found[_scenario_name(name, low, high, found)] = Scenario(
                weight=float(f"{band.sum() / total:.6g}"),
                prefix=max(0, prefix),
                input=max(1, round(mean) - max(0, prefix)),
                output=[max(1, int(one)) for one in _quantiles(outputs)],
            )
            low = int(high) + 1
    return found


def _quantiles(ordered: Array) -> Array:
    places = (np.arange(OUTPUTS) + 0.5) / OUTPUTS * len(ordered)
    return ordered if len(ordered) <= OUTPUTS else ordered[places.astype(int)]


def _groups(
    requests: Requests, inside: NDArray[np.bool_]
) -> Sequence[tuple[str, NDArray[np.bool_]]]:
    if requests.segment is None:
        return [("prompt", inside)]
    counts = np.bincount(requests.segment[inside], minlength=len(requests.segments))
    order = sorted(range(len(counts)), key=lambda at: (-counts[at], requests.segments[at]))
    order = [at for at in order if counts[at]]
    groups = [(requests.segments[at], inside & (requests.segment == at))
              for at in order[:MOST_SEGMENTS]]  # fmt: skip
    if order[MOST_SEGMENTS:]:
        groups.append(("other", inside & np.isin(requests.segment, order[MOST_SEGMENTS:])))
    return groups


def _scenario_name(segment: str, low: int, high: int, taken: dict[str, Scenario]) -> str:
    plain = re.sub(r"[^a-z0-9]+", "_", segment.lower()).strip("_") or "segment"
    name = f"{plain}_{low}_to_{high}"
    while name in taken or name in TIME_METRICS:
        name += "_"
    return name
