"""From gate results to the verdict of a candidate and of a release."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from registry.outcome import GateResult, Verdict

REFUSALS = (
    Verdict.INFEASIBLE,
    Verdict.INVALID,
    Verdict.ANOMALOUS,
    Verdict.FAIL,
    Verdict.INCONCLUSIVE,
)
"""A candidate's verdict is the first of these that one of its critical gates has."""

RELEASE_ORDER = (
    Verdict.INCONCLUSIVE,
    Verdict.FAIL,
    Verdict.ANOMALOUS,
    Verdict.INVALID,
    Verdict.INFEASIBLE,
)
"""A release without a promotion has the best of its candidates' verdicts, in this order."""


def verdict_of(results: Sequence[GateResult]) -> Verdict:
    """The verdict of one candidate. Without a critical gate nothing was judged: INVALID."""
    critical = {result.result for result in results if result.decides}
    if not critical:
        return Verdict.INVALID
    return next((verdict for verdict in REFUSALS if verdict in critical), Verdict.PASS)


def reasons_of(results: Sequence[GateResult]) -> list[str]:
    """Why a candidate is not PASS: its critical refusals, those that set the verdict first."""
    critical = [result for result in results if result.decides]
    if not critical:
        waived = [result.name for result in results if result.waived and result.tier == "critical"]
        if waived:
            return [f"every critical gate is waived ({', '.join(waived)}): nothing was judged"]
        return ["no critical gate was judged"]
    refused = [result for result in critical if result.result is not Verdict.PASS]
    texts = [
        result.reason
        if result.result is Verdict.INFEASIBLE
        else f"{result.name} {result.result}: {result.reason}"
        for result in sorted(refused, key=lambda result: REFUSALS.index(result.result))
    ]
    # One engine's reason stands behind every gate of a candidate that cannot be served.
    return list(dict.fromkeys(texts))


def release_verdict(verdicts: Iterable[Verdict], promoted: bool) -> Verdict:
    """The verdict of a release from its candidates' own.

    `promoted`: a candidate that passed is now the champion (or awaits approval). A release
    whose candidates all passed but of which none was promoted has decided nothing: INCONCLUSIVE.
    """
    present = set(verdicts)
    if not present:
        return Verdict.INVALID
    if Verdict.PASS in present and promoted:
        return Verdict.PASS
    return next((v for v in RELEASE_ORDER if v in present), Verdict.INCONCLUSIVE)
