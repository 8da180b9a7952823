"""From the words of `pilotage gate` and `pilotage power` to folders, and back to files."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from pathlib import Path

from eval_suites.gating import judge_folders
from eval_suites.loader import load_policy
from eval_suites.power_plan import GatePower, plan_power
from registry.errors import Problem, UserError
from registry.evidence_folders import read_folder
from registry.gate_outcome import GateOutcome
from registry.gate_report import drawn, junit, markdown, number, write_text

_NAME = re.compile(r"([A-Za-z0-9_.-]+)=(.*)", re.DOTALL)


def gate_folders(
    policy: str,
    candidates: Sequence[str],
    references: Sequence[str],
    repeated: Sequence[str] = (),
    planned: int = 0,
    champion_policy: str | None = None,
) -> GateOutcome:
    """Judge what the command line names. Raises `UserError` for words that name nothing."""
    if len(repeated) not in (0, 2):
        raise UserError.at("--aa", f"given {len(repeated)} times", "name the folders of two runs")
    pair = [folder_of("--aa", folder) for folder in repeated]
    if pair and pair[0].resolve() == pair[1].resolve():
        # No noise would be found, and every margin be above it.
        raise UserError.at(
            f"--aa {repeated[1]}", "is the first run once more", "name the folders of two runs"
        )
    return judge_folders(
        policy,
        named_folders("--candidate", candidates, default="candidate"),
        named_folders("--reference", references),
        repeated=pair,
        planned=planned,
        champion_policy=champion_policy,
    )


def named_folders(option: str, words: Sequence[str], default: str = "") -> dict[str, Path]:
    """`NAME=DIR` words as folders by name; a lone `DIR` is named by `default`, several by DIR.

    Where there is no default the name must be there, whatever folders there are.
    """
    found: dict[str, Path] = {}
    problems = []
    for word in words:
        named = _NAME.fullmatch(word)
        if named is not None and not (default and _exists(word)):
            name, folder = named[1], folder_of(f"{option} {named[1]}=DIR", named[2])
        elif default:
            folder = _unnamed(option, word)
            name = default if len(words) == 1 else folder.resolve().name
        else:
            name = ""
        if not name:
            what = "has no name" if default else "names no reference"
            problems.append(Problem(f"{option} {word}", what, "write NAME=DIR"))
        elif name in found:
            problems.append(
                Problem(f"{option} {word}", f"{name!r} is there already", "write NAME=DIR")
            )
        else:
            found[name] = folder
    if problems:
        raise UserError(problems)
    return found


def _unnamed(option: str, word: str) -> Path:
    """A `DIR` without a name, or a name that is none. Raises `UserError`."""
    name, equals, folder = word.partition("=")
    if equals and not _exists(word) and folder and _exists(folder):
        raise UserError.at(
            f"{option} {word}",
            f"{name!r} is no name",
            "a name has letters, digits, dots, dashes and underscores of ASCII",
        )
    return folder_of(option, word)


def folder_of(option: str, word: str) -> Path:
    """The folder that a word of the command line names. Raises `UserError` for no words."""
    if not word.strip():
        # `Path("")` would be the working directory, whatever lies there.
        raise UserError.at(f"{option} {word!r}", "is empty", "name a folder with evidence")
    return Path(word)


def _exists(word: str) -> bool:
    try:
        return Path(word).exists()
    except (OSError, ValueError):
        return False


def write_reports(outcome: GateOutcome, junit_file: Path | None, summary: Path | None) -> None:
    if junit_file is not None:
        write_text(junit_file, junit(outcome))
    if summary is not None:
        write_text(summary, markdown(outcome), append=True)


def power_of_policy(
    policy: str, evidence: str, effect: float, reference: str | None, candidates: int
) -> list[GatePower]:
    if not math.isfinite(effect) or effect <= 0:
        raise UserError.at("--effect", f"is {effect}", "name a share above 0, e.g. 0.95")
    return plan_power(
        load_policy(policy),
        effect,
        read_folder(folder_of("--evidence", evidence)),
        read_folder(folder_of("--reference", reference)) if reference is not None else None,
        candidates=candidates,
    )


def power_text(rows: Sequence[GatePower]) -> str:
    """A table: what each gate needs, and what the evidence at hand would give."""
    from rich.table import Table

    table = Table(title="items each gate needs if the effect is the truth")
    for column in ("gate", "metric", "reference", "truth", "items for 80 %", "power", "note"):
        table.add_column(column, overflow="fold")
    for row in rows:
        where = f"\n{row.slice}" if row.slice else ""
        power = "" if row.power is None else f"{row.power:.2f} on {row.evidence_items}"
        words = (
            row.name,
            row.metric + where,
            number(row.reference),
            number(row.truth),
            number(row.items),
            power,
            row.note,
        )
        table.add_row(*words)
    return drawn(table)
