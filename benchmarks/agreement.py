"""Whether the arrays of p-values that the simulation uses give the verdicts of `judge_all`."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import numpy as np

from benchmarks.deciding import (
    LEVEL,
    Asked,
    PValues,
    binary_p,
    evidence_of,
    expected_verdict,
    graded_p,
    judged,
    policy_of,
)
from benchmarks.grid import RETENTION_90, rng_of
from benchmarks.releases import SHAPES, Array, Binary
from eval_suites.bootstrap import REPLICATES
from eval_suites.statistics import PairedTable, holm_shares

Check = tuple[str, str, str]
"""What was judged, the verdict of `judge_all`, and the arrays'."""


def disagreements(binary: int = 150, graded: int = 120) -> list[str]:
    """A line for each release on which the two differ."""
    checks = [
        *binary_checks(binary),
        *graded_checks(graded),
        *holm_checks(binary // 3),
        *look_checks(binary // 3),
    ]
    return [
        f"{what}: judge_all says {theirs}, the arrays say {ours}"
        for what, theirs, ours in checks
        if theirs != ours
    ]


def scores_of(truth: Binary, releases: int, n: int, name: str) -> tuple[Array, Array]:
    """0/1 scores, a release per row."""
    rng = rng_of("agreement", name)
    own, teacher = truth.population()
    drawn = rng.integers(0, len(own), (releases, n))
    return own[drawn], teacher[drawn]


def table_of(own: Array, teacher: Array) -> PairedTable:
    right, known = own > 0, teacher > 0
    cells = (right & known, right & ~known, ~right & known, ~right & ~known)
    return PairedTable(*(cell.sum(axis=1) for cell in cells))


def binary_checks(releases: int) -> Iterator[Check]:
    """Retention and non-inferiority at truths where every verdict occurs."""
    for kind, margin, asked in (
        ("retention", 0.90, RETENTION_90.asked),
        ("non_inferiority", 0.05, Asked("difference", -0.05)),
    ):
        for own_rate in (0.66, 0.72, 0.78):
            truth = Binary(0.80, own_rate, 0.02)
            own, teacher = scores_of(truth, releases // 3, 300, f"{kind} {own_rate}")
            p = binary_p(table_of(own, teacher), asked)
            for row, (one, other) in enumerate(zip(own, teacher, strict=True)):
                evidence = evidence_of(one), evidence_of(other)
                (verdict,) = judged(policy_of(kind, margin), [evidence[0]], evidence[1])
                yield f"0/1 {kind} {row}", verdict, expected_verdict(p, row)


def graded_checks(releases: int) -> Iterator[Check]:
    """With all the replicates that the gates use, so that the draws are the same."""
    for name in ("rubric, steps and total losses", "rare catastrophe", "beta with noise"):
        for retention in (0.84, 0.95):
            rng = rng_of("agreement", name, retention)
            own, teacher = SHAPES[name].pairs(rng, releases // 6 or 1, 120, retention)
            p = graded_p(own, teacher, RETENTION_90.asked, REPLICATES)
            for row, (one, other) in enumerate(zip(own, teacher, strict=True)):
                policy = policy_of("retention", 0.90)
                (verdict,) = judged(policy, [evidence_of(one)], evidence_of(other))
                yield f"graded {name} {retention} {row}", verdict, expected_verdict(p, row)


def holm_checks(releases: int) -> Iterator[Check]:
    """Three candidates of one release: whether each passes."""
    rng = rng_of("agreement", "holm")
    for release in range(releases):
        teacher = (rng.random(300) < 0.80).astype(float)
        own = np.where(rng.random((3, 300)) < 0.05, 0.0, teacher)
        table = table_of(own, np.broadcast_to(teacher, own.shape))
        relative = (binary_p(table, RETENTION_90.asked).to_pass / LEVEL).tolist()
        shares = holm_shares(relative)
        expected = [one <= share for one, share in zip(relative, shares, strict=True)]
        candidates = [evidence_of(scores) for scores in own]
        verdicts = judged(policy_of("retention", 0.90), candidates, evidence_of(teacher))
        yield f"Holm {release}", str([one == "PASS" for one in verdicts]), str(expected)


def look_checks(releases: int) -> Iterator[Check]:
    """The second of two looks: at its share of the error."""
    looks = [{"items": 150, "share": 0.4}, {"items": 300, "share": 0.6}]
    policy = policy_of("retention", 0.90, looks=looks)
    own, teacher = scores_of(Binary(0.80, 0.75, 0.02), releases, 300, "looks")
    for n, share in ((150, 0.4), (300, 0.6)):
        p: PValues = binary_p(table_of(own[:, :n], teacher[:, :n]), RETENTION_90.asked)
        verdict_at = partial(expected_verdict, p, level=LEVEL * share)
        for row in range(releases):
            evidence = evidence_of(own[row, :n]), evidence_of(teacher[row, :n])
            (verdict,) = judged(policy, [evidence[0]], evidence[1])
            yield f"look at {n} {row}", verdict, verdict_at(row)
