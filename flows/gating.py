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

_NAME = re.compile(r"([A-Za-z0-9_.-]+)=(.+)", re.DOTALL)


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
    return judge_folders(
        policy,
        named_folders("--candidate", candidates, default="candidate"),
        named_folders("--reference", references),
        repeated=[Path(folder) for folder in repeated],
        planned=planned,
        champion_policy=champion_policy,
    )


def named_folders(option: str, words: Sequence[str], default: str = "") -> dict[str, Path]:
    """`NAME=DIR` words as folders by name; a lone `DIR` is named by `default`, several by DIR."""
    found: dict[str, Path] = {}
    problems = []
    for word in words:
        named = _NAME.fullmatch(word)
        if named is not None and not Path(word).exists():
            name, folder = named[1], Path(named[2])
        else:
            folder = Path(word)
            name = (default if len(words) == 1 else folder.resolve().name) if default else ""
        if not name:
            problems.append(Problem(f"{option} {word}", "names no reference", "write NAME=DIR"))
        elif name in found:
            problems.append(
                Problem(f"{option} {word}", f"{name!r} is there already", "write NAME=DIR")
            )
        else:
            found[name] = folder
    if problems:
        raise UserError(problems)
    return found


def write_reports(outcome: GateOutcome, junit_file: Path | None, summary: Path | None) -> None:
    if junit_file is not None:
        write_text(junit_file, junit(outcome))
    if summary is not None:
        write_text(summary, markdown(outcome), append=True)


def power_of_policy(
    policy: str, evidence: Path, effect: float, reference: Path | None, candidates: int
) -> list[GatePower]:
    if not math.isfinite(effect) or effect <= 0:
        raise UserError.at("--effect", f"is {effect}", "name a share above 0, e.g. 0.95")
    return plan_power(
        load_policy(policy),
        effect,
        read_folder(evidence),
        read_folder(reference) if reference is not None else None,
        candidates=candidates,
    )


def power_text(rows: Sequence[GatePower]) -> str:
    """A table: what each gate needs, and what the evidence at hand would give."""
    from rich.table import Table
    from rich.text import Text

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
        # `Text`, because rich would take a name such as `[red]` for a colour.
        table.add_row(*map(Text, words))
    return drawn(table)
