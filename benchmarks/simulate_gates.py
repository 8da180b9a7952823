"""The gates on thousands of simulated releases whose truth is known: what `make simulate` runs.

Two promises are held against the outcome. A candidate whose truth is at the margin, or beyond it
on the wrong side, passes in at most 5 % of releases (bound: 5 % plus three standard errors of the
simulation). A candidate whose truth clears the margin passes as often as `pilotage power` says,
within 5 points. The table goes into docs/simulation.md; a broken promise is exit status 1.
"""

from __future__ import annotations

import argparse
import itertools
import math
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.agreement import disagreements
from benchmarks.deciding import LEVEL
from benchmarks.grid import BINARY_FACTOR, FAMILIES, LOSSES, SEED, Cell, Row, Size
from benchmarks.written import write_between

DOCUMENT = Path(__file__).resolve().parents[1] / "docs" / "simulation.md"
TOLERANCE = 0.05
"""Between a simulated power and the one that `pilotage power` says."""

Done = list[tuple[Row, list[Cell]]]


# -- promises --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Finding:
    """A cell with how far it is from what was promised."""

    row: Row
    cell: Cell
    excess: float

    @property
    def text(self) -> str:
        rates, where = self.cell.rates, f"{self.row.key}, loses {self.cell.loss:g} of the margin"
        if self.cell.predicted is None:
            both = f"{percent(rates.passed)} % passed"
            both += "" if math.isnan(rates.failed) else f", {percent(rates.failed)} % failed"
            return f"{where}: {both} ({self.excess:+.1f} SE over 5 %)"
        said = percent(self.cell.predicted)
        return (
            f"{where}: {percent(rates.passed)} % passed, {said} % said ({self.excess:+.1f} points)"
        )


def standard_error(releases: int, rate: float = LEVEL) -> float:
    return math.sqrt(rate * (1 - rate) / releases)


def wrong_passes(done: Done) -> list[Finding]:
    """Every cell where a PASS is wrong, worst first; the excess in standard errors over 5 %."""
    found = [
        Finding(row, cell, (cell.rates.passed - LEVEL) / standard_error(cell.rates.releases))
        for row, cells in done
        for cell in cells
        if cell.wrong_pass
    ]
    return sorted(found, key=lambda one: -one.excess)


def wrong_fails(done: Done) -> list[Finding]:
    """FAIL at the margin, as `wrong_passes`: no promise, since it promotes nothing."""
    found = [
        Finding(row, cell, (cell.rates.failed - LEVEL) / standard_error(cell.rates.releases))
        for row, cells in done
        for cell in cells
        if cell.loss == 1 and cell.rates.failed > LEVEL
    ]
    return sorted(found, key=lambda one: -one.excess)


def power_gaps(done: Done) -> list[Finding]:
    """Every cell with a predicted power, worst first; the excess in points."""
    found = [
        Finding(row, cell, 100 * (cell.rates.passed - cell.predicted))
        for row, cells in done
        for cell in cells
        if cell.predicted is not None
    ]
    return sorted(found, key=lambda one: -abs(one.excess))


# -- text ------------------------------------------------------------------------------------


def percent(share: float) -> str:
    return f"{100 * share:.1f}"


def cell_text(cell: Cell | None) -> str:
    """`PASS / FAIL`, and in brackets the power that was said; the rest is INCONCLUSIVE."""
    if cell is None:
        return ""
    rates = cell.rates
    failed = "" if math.isnan(rates.failed) else f" / {percent(rates.failed)}"
    said = "" if cell.predicted is None else f" ({percent(cell.predicted)})"
    return f"{percent(rates.passed)}{failed}{said}"


def tables(done: Done) -> Iterator[str]:
    """One Markdown table per family, its columns the truths that it has."""
    for family, group in itertools.groupby(done, key=lambda one: one[0].family):
        rows = list(group)
        losses = [loss for loss in LOSSES if any(c.loss == loss for _, cs in rows for c in cs)]
        yield f"### {family[0].upper()}{family[1:]}\n"
        yield f"| Releases | Items |{''.join(f' {loss:g} |' for loss in losses)}"
        yield "| --- | --- |" + " --- |" * len(losses)
        for row, cells in rows:
            by_loss = {cell.loss: cell for cell in cells}
            texts = "".join(f" {cell_text(by_loss.get(loss))} |" for loss in losses)
            yield f"| {row.label} | {row.items} |{texts}"
        yield ""


def listed(title: str, found: Sequence[Finding], most: int = 25) -> list[str]:
    lines = [f"{title}: {len(found) or 'none'}", ""]
    lines += [f"- {one.text}" for one in found[:most]]
    if len(found) > most:
        lines.append(f"- and {len(found) - most} more")
    return [*lines, ""] if found else lines


def summary(done: Done, size: Size) -> tuple[list[str], bool]:
    """What was promised and what came out, and whether a promise was broken."""
    passes, gaps = wrong_passes(done), power_gaps(done)
    at_margin = [one for one in passes if one.cell.loss == 1]
    over_two = [one for one in passes if one.excess > 2]
    broken = [one for one in passes if one.excess > 3]
    off = [one for one in gaps if abs(one.excess) > 100 * TOLERANCE]
    lines = [
        f"Seed {SEED}. {size.releases:,} releases per setting, {size.releases * BINARY_FACTOR:,} "
        f"where 0/1 scores need no bootstrap; {size.replicates:,} bootstrap replicates.",
        "",
        f"{len(passes)} settings where a PASS is wrong, {len(at_margin)} of them with a candidate "
        f"at the margin. By chance alone one in 741 is more than three standard errors over its "
        f"rate, and one in 44 more than two.",
        "",
        *listed("More than 5 % plus three standard errors (the bound)", broken),
        *listed("More than 5 % plus two standard errors", over_two),
        *listed("The highest rates at the margin", at_margin[:5]),
        *listed(
            "FAIL at the margin in more than 5 % plus three standard errors (no bound: a FAIL "
            "promotes nothing)",
            [one for one in wrong_fails(done) if one.excess > 3],
        ),
        f"{len(gaps)} settings with a power that was said beforehand.",
        "",
        *listed("More than 5 points from it (the bound)", off),
    ]
    return lines, bool(broken or off)


# -- running ---------------------------------------------------------------------------------


def run(names: Sequence[str], size: Size, deadline: float) -> Done | None:
    """Every row of the families; None when time ran out."""
    done: Done = []
    for name in names:
        began, count = time.monotonic(), 0
        for row in FAMILIES[name]():
            if time.monotonic() > deadline:
                progress(f"time is up before {row.key}")
                return None
            done.append((row, row.compute(size)))
            count += 1
            if count % 20 == 0:
                progress(f"{name}: {count} rows in {time.monotonic() - began:.0f} s")
        progress(f"{name}: all {count} rows in {time.monotonic() - began:.0f} s")
    return done


def progress(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def options_of(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--families", nargs="+", choices=list(FAMILIES), default=list(FAMILIES))
    parser.add_argument("--releases", type=int, default=Size().releases, help="per setting")
    parser.add_argument("--replicates", type=int, default=Size().replicates, help="of a bootstrap")
    parser.add_argument("--minutes", type=float, default=60.0, help="give up after these")
    parser.add_argument("--no-write", action="store_true", help="leave docs/simulation.md alone")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    options = options_of(arguments)
    size, started = Size(options.releases, options.replicates), time.monotonic()
    unlike = disagreements()
    progress(f"judge_all and the arrays used here: {len(unlike)} verdicts differ")
    done = run(options.families, size, started + 60 * options.minutes)
    if done is None:
        return 2
    lines, broken = summary(done, size)
    print("\n".join([*lines, *unlike]))
    whole = options.families == list(FAMILIES) and size == Size()
    if whole and not options.no_write:
        write_between(DOCUMENT, "\n".join([*lines, *tables(done)]).rstrip())
    progress(f"{len(done)} rows in {(time.monotonic() - started) / 60:.1f} minutes")
    return int(broken or bool(unlike))


if __name__ == "__main__":
    sys.exit(main())
