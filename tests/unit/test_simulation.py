"""The gates on simulated releases: a few settings of what `make simulate` runs in full."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import pytest

from benchmarks.agreement import disagreements
from benchmarks.deciding import Rates
from benchmarks.grid import (
    LOSS_05,
    RETENTION_90,
    Cell,
    Row,
    Size,
    binary_rows,
    design_rows,
    graded_rows,
    population,
    repeated_rows,
    rng_of,
)
from benchmarks.releases import SHAPES, Clustered, Stratified, discordances
from benchmarks.simulate_gates import (
    TOLERANCE,
    cell_text,
    power_gaps,
    summary,
    tables,
    wrong_passes,
)
from benchmarks.written import BEGIN, END, write_between

SIZE = Size(releases=2000, replicates=500)


def one(rows: Iterable[Row], label: str, items: str, family: str = "") -> Row:
    wanted = (label, items)
    (found,) = (
        row for row in rows if (row.label, row.items) == wanted and family in ("", row.family)
    )
    return found


def check_level(row: Row, cells: list[Cell]) -> None:
    """A PASS where it is wrong: at most 5 % plus three standard errors."""
    found = wrong_passes([(row, cells)])
    assert found
    assert [each.text for each in found if each.excess > 3] == []


def check_power(row: Row, cells: list[Cell]) -> None:
    found = power_gaps([(row, cells)])
    assert found
    assert [each.text for each in found if abs(each.excess) > 100 * TOLERANCE] == []


BINARY = [
    (RETENTION_90, "teacher 0.6, nested", "200"),
    (RETENTION_90, "teacher 0.75, +0.02", "500"),
    (RETENTION_90, "teacher 0.75, +0.10", "1000"),
    (RETENTION_90, "teacher 0.9, nested", "100"),
    (RETENTION_90, "teacher 0.97, independent", "3000"),
    (LOSS_05, "teacher 0.6, independent", "1000"),
    (LOSS_05, "teacher 0.9, +0.02", "500"),
]


@pytest.mark.parametrize(
    ("margin", "label", "items"), BINARY, ids=[f"{m.name}, {rest}" for m, *rest in BINARY]
)
def test_right_or_wrong_answers(margin, label, items):
    row = one(binary_rows(margin), label, items)
    cells = row.compute(SIZE)
    assert [cell.loss for cell in cells] == [1.4, 1.2, 1.0, 0.8, 0.5]
    check_level(row, cells)
    check_power(row, cells)
    # The nearer to the teacher, the likelier a PASS and the rarer a FAIL.
    passed = [cell.rates.passed for cell in cells]
    failed = [cell.rates.failed for cell in cells]
    assert passed == sorted(passed)
    assert failed == sorted(failed, reverse=True)


@pytest.mark.parametrize(("shape", "items"), [("beta with noise", "200"), ("independent", "500")])
def test_graded_scores(shape, items):
    row = one(graded_rows(RETENTION_90, (1.0, 0.8), [shape]), shape, items)
    cells = row.compute(SIZE)
    check_level(row, cells)
    check_power(row, cells)


@pytest.mark.parametrize(
    "shape", ["rare catastrophe", "sparse, rare catastrophe", "rubric, full scores lost"]
)
def test_graded_scores_with_rare_large_losses(shape):
    """Where a percentile bootstrap passes twice as many as it promises, and formulas fail."""
    row = one(graded_rows(RETENTION_90, (1.0, 0.5), [shape]), shape, "200")
    cells = row.compute(SIZE)
    check_level(row, cells)
    check_power(row, cells)


def test_five_candidates_at_the_margin():
    for label, items in (
        ("0/1, teacher 0.9, nested", "400"),
        ("0/1, teacher 0.6, independent", "2000"),
        ("graded, beta with noise", "400"),
    ):
        row = one(repeated_rows(), label, items, "five, all at the margin, one look")
        check_level(row, row.compute(SIZE))


def test_candidates_at_the_margin_among_better_ones():
    group = "three at the margin, two far better, one look"
    row = one(repeated_rows(), "0/1, teacher 0.75, nested", "2000", group)
    check_level(row, row.compute(SIZE))


def test_planned_looks():
    for label, plan in (
        ("0/1, teacher 0.9, nested", "two looks"),
        ("0/1, teacher 0.6, independent", "three looks"),
        ("graded, rare catastrophe", "two looks"),
    ):
        row = one(repeated_rows(), label, "400", f"one candidate, {plan}")
        check_level(row, row.compute(SIZE))


def test_conversations_that_fail_as_a_whole():
    name = "0/1, whole conversations fail"
    row = one(design_rows(), name, "about 200 in 40")
    cells = row.compute(Size(2000, 200))
    check_level(row, cells)
    check_power(row, cells)


def test_the_simulation_decides_as_the_gates_do():
    assert disagreements(binary=45, graded=12) == []


# -- the simulation itself -------------------------------------------------------------------


@pytest.mark.parametrize("shape", list(SHAPES))
@pytest.mark.parametrize("retention", [0.86, 0.95])
def test_graded_populations_have_the_mean_they_claim(shape, retention):
    own, teacher = population(shape, retention)
    assert min(own.min(), teacher.min()) >= 0
    assert max(own.max(), teacher.max()) <= 1
    assert teacher.mean() == pytest.approx(SHAPES[shape].mean, abs=0.004)
    assert own.mean() / teacher.mean() == pytest.approx(retention, abs=0.006)


def test_discordances_keep_the_truth():
    for name, truth in discordances(0.75, 0.66):
        both, gained, lost, _ = truth.shares
        assert both + gained == pytest.approx(0.66), name
        assert both + lost == pytest.approx(0.75), name
        assert min(truth.shares) >= 0
        assert sum(truth.shares) == pytest.approx(1), name
        own, teacher = truth.population()
        assert (own.mean(), teacher.mean()) == (0.66, 0.75), name
    assert [name for name, _ in discordances(0.97, 0.92)] == ["nested", "+0.02", "independent"]


@pytest.mark.parametrize("long_fail", [0.0, 0.15])
def test_conversations_lose_what_they_should(long_fail):
    rng, kind = rng_of("test", long_fail), Clustered("x", 20_000, long_fail=long_fail)
    own, teacher, conversation = kind.release(rng, 0.9)
    assert own.sum() / teacher.sum() == pytest.approx(0.9, abs=0.02)
    assert len(np.unique(conversation)) == 20_000


def test_segments_lose_what_they_should():
    kind = Stratified("x", (0.6, 0.3, 0.1), (0.9, 0.8, 0.6), (0.0, 0.5, 0.5))
    own, teacher = kind.pairs(rng_of("test"), 2000, 200, 0.9)
    assert own.mean() / teacher.mean() == pytest.approx(0.9, abs=0.005)
    assert np.bincount(kind.segments(200)).tolist() == [120, 60, 20]


def test_broken_promises_are_named():
    row = Row("0/1", "made up", "100", lambda size: [])
    fine = [Cell(1.0, Rates(0.05, 0.05, 2000)), Cell(0.5, Rates(0.80, 0.0, 2000), 0.78)]
    assert not summary([(row, fine)], SIZE)[1]
    for cell in (Cell(1.0, Rates(0.07, 0.0, 2000)), Cell(0.5, Rates(0.70, 0.0, 2000), 0.78)):
        lines, broken = summary([(row, [cell])], SIZE)
        assert broken
        assert any("made up" in line and "(the bound)" not in line for line in lines)
    (text,) = (line for line in tables([(row, fine)]) if "made up" in line)
    assert text == "| made up | 100 | 5.0 / 5.0 | 80.0 / 0.0 (78.0) |"
    assert cell_text(None) == ""


def test_only_what_is_between_the_markers_is_written(tmp_path):
    document = tmp_path / "x.md"
    document.write_text(f"before\n{BEGIN}\nold\n{END}\nafter\n", encoding="utf-8")
    write_between(document, "new")
    assert document.read_text(encoding="utf-8") == f"before\n{BEGIN}\n\nnew\n\n{END}\nafter\n"
    document.write_text("no markers", encoding="utf-8")
    with pytest.raises(SystemExit, match="lacks the markers"):
        write_between(document, "new")
    assert document.read_text(encoding="utf-8") == "no markers"
