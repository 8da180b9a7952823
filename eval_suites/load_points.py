"""A latency metric's number from load points, or why there is none."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from eval_suites.comparable import present
from eval_suites.policy import GateRule
from registry.evidence import LatencyEvidence, LoadPoint, Unusable

if TYPE_CHECKING:
    from registry.evidence_folders import CandidateEvidence


Array = NDArray[np.float64]


class OverEveryLimit(Exception):
    """Requests failed, and a failed request counts as slower than any limit."""


class Emulated(Exception):
    """The times are of an emulated kernel, and the load profile is one of production."""


EMULATED = (
    "the engine has no kernel of its own for this bundle on this hardware and emulated one, so its "
    "times are not the bundle's; a production profile accepts none of them"
)


class VoidStep(Exception):
    """The step at the rule's rate did not measure what it should; the text is why."""


def check_real(evidence: CandidateEvidence) -> None:
    """Raises `Emulated` where times of the candidate may decide nothing; `Unusable`.

    That is INFEASIBLE, as for a bundle that the engine cannot run at all: this hardware lacks what
    the bundle needs, and other hardware may have it. Nothing is wrong with the evidence (INVALID),
    and no time of an emulation says that the bundle is too slow (FAIL). Evidence that does not say
    (somebody else's server, an older release) is judged as it is.
    """
    found: LatencyEvidence = present("latency", evidence, "candidate")
    if not found.times_count:
        raise Emulated(f"latency: {EMULATED}")


def point_at_rate(rule: GateRule, evidence: CandidateEvidence, who: str) -> LoadPoint:
    """The one load point at the rule's rate, its accounts in order.

    Raises `Unusable`, `VoidStep`.
    """
    found: LatencyEvidence = present("latency", evidence, who)
    points = [p for p in found.points if rule.rate is not None and math.isclose(p.rate, rule.rate)]
    if not points:
        measured = ", ".join(f"{point.rate:g}" for point in found.points) or "none"
        raise Unusable(
            f"rate {rule.rate:g} requests/s was not measured for the {who} (measured: {measured})"
        )
    if len(points) > 1:
        raise Unusable(f"rate {rule.rate:g} occurs {len(points)} times in the {who}'s evidence")
    point = points[0]
    if point.ok + point.failed != point.total:
        raise Unusable(
            f"requests of the {who} do not add up: {point.ok} answered + {point.failed} failed "
            f"!= {point.total}"
        )
    if point.total == 0:
        raise Unusable(f"no request was sent to the {who} at {point.rate:g} requests/s")
    if point.answer == "void":
        raise VoidStep(f"the step at {point.rate:g} requests/s is void: {point.cause}")
    return point


def latency_of(rule: GateRule, evidence: CandidateEvidence, who: str) -> tuple[float, int]:
    """Value and number of requests of the rule's metric at its rate.

    Raises `Unusable`, or `OverEveryLimit` when failed requests decide.
    """
    metric = rule.metric.removeprefix("latency.")
    point = point_at_rate(rule, evidence, who)
    failures = f"{point.failed} of {point.total} requests failed at {point.rate:g} requests/s"
    name, percent = _percentile_of(metric)
    if percent is None:
        if point.ok == 0:
            raise OverEveryLimit(f"{failures}: nothing was answered")
        return number(_plain(point, metric), f"{who}'s {metric}"), point.total
    # Whatever number stands there, this percentile lies among the failed requests.
    if math.ceil(percent / 100 * point.total) > point.ok:
        raise OverEveryLimit(f"{failures}: the {metric} is over every limit")
    table: dict[str, float | None] = getattr(point, name)
    if f"p{percent}" not in table:
        raise Unusable(f"p{percent} of {name} is not in the {who}'s evidence")
    return number(table[f"p{percent}"], f"{who}'s {metric}"), point.total


def times_of(rule: GateRule, evidence: CandidateEvidence, who: str) -> tuple[Array, float]:
    """Times in ms in order of sending, failed requests infinite, and the percentile asked for.

    Raises `Unusable`: a percentile without the requests behind it has no bound.
    """
    name, percent = _percentile_of(rule.metric.removeprefix("latency."))
    assert percent is not None, rule.metric
    total = point_at_rate(rule, evidence, who).total
    if evidence.requests is None:
        raise Unusable(f"there are no rows per request of the {who}, so a percentile has no bound")
    import pyarrow.parquet as pq

    columns = ["rate", "start_s", "ok", name]
    try:
        frame = pq.read_table(evidence.requests, columns=columns).to_pandas()
    except (OSError, ValueError) as error:
        raise Unusable(f"{evidence.requests} cannot be read: {error}") from None
    rows = frame[np.isclose(frame["rate"], rule.rate or 0.0)].sort_values("start_s", kind="stable")
    if len(rows) != total:
        raise Unusable(
            f"{evidence.requests} has {len(rows)} requests at {rule.rate:g} requests/s, the "
            f"summary counts {total}"
        )
    answered = rows["ok"].to_numpy(bool)
    times = rows[name].to_numpy(float)
    if name == "tpot_ms":
        # An answer of one token has no time per further token.
        kept = ~answered | np.isfinite(times)
        times, answered = times[kept], answered[kept]
    if not np.isfinite(times[answered]).all():
        raise Unusable(f"{evidence.requests}: answered requests without {name}")
    return np.where(answered, times, np.inf), float(percent)


def is_percentile(rule: GateRule) -> bool:
    """Whether the rule is about a percentile of TTFT, TPOT or E2EL, which have a bound."""
    name, percent = _percentile_of(rule.metric.removeprefix("latency."))
    return rule.on_latency and percent is not None and name != "itl_ms"


def number(value: Any, what: str) -> float:
    """A finite number. Raises `Unusable`: texts, booleans and null are none."""
    if value is None:
        raise Unusable(f"the {what} has no number (null)")
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise Unusable(f"the {what} is {value!r}, which is not a number")
    if not math.isfinite(value):
        raise Unusable(f"the {what} is {value}, which is not a finite number")
    return float(value)


def _percentile_of(metric: str) -> tuple[str, int | None]:
    """`e2el_p99_ms` -> (`e2el_ms`, 99); a metric that is no percentile -> (itself, None)."""
    name, _, rest = metric.partition("_p")
    percent = rest.removesuffix("_ms")
    if name in ("ttft", "tpot", "itl", "e2el") and rest.endswith("_ms") and percent.isdecimal():
        return f"{name}_ms", int(percent)
    return metric, None


def _plain(point: LoadPoint, metric: str) -> Any:
    """A figure of a load point that is no percentile."""
    if metric == "success_rate":
        return point.ok / point.total
    plain = ("achieved_rate", "output_tokens_per_s", "acceptance_length", "prefix_cache_hit_rate")
    if metric not in plain:
        raise Unusable(f"latency evidence has no metric {metric!r}")
    return getattr(point, metric)
