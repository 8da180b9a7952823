"""What a person should read of the prompts: report.md, report.json and disjointness.json."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from recipes.schema import Disjointness
from tasks.disjointness import Matrix, lines_of
from tasks.prompt_files import PARTS

MATRIX = "disjointness.json"


def write_report(
    folder: Path,
    parts: Mapping[str, Sequence[Mapping[str, Any]]],
    counts: Mapping[str, Any],
    matrix: Matrix,
    rules: Disjointness,
) -> None:
    """`counts` is what the stage tells of itself; `parts` are rows by name."""
    segments = {part: Counter(row["segment"] for row in parts[part]) for part in PARTS}
    _write_json(folder / MATRIX, matrix.record(rules))
    _write_json(folder / "report.json", {**counts, "segments_by_part": segments})
    lines = ["# Prompts", "", f"| segment | {' | '.join(PARTS)} |", "|---|" + "--:|" * len(PARTS)]
    for segment in sorted(set().union(*segments.values())):
        cells = " | ".join(str(segments[part][segment]) for part in PARTS)
        lines.append(f"| {segment} | {cells} |")
    lines.append(f"| all | {' | '.join(str(len(parts[part])) for part in PARTS)} |")
    for source, found in counts.get("groups", {}).items():
        lines += [
            "",
            f"{source}: of {found['prompts']} different prompts {found['in_groups']} stand in "
            f"{found['groups']} groups that stay in one part (near-duplicates, rows of one "
            f"conversation), the largest of {found['largest']}.",
        ]
        if not found["stratified"]:
            lines.append("They are too large to keep the segments in their shares as well.")
    lines += ["", *lines_of(matrix, rules)]
    (folder / "report.md").write_text("\n".join(lines) + "\n", encoding="utf-8")


def _write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, ensure_ascii=False, indent=2) + "\n", encoding="utf-8")
