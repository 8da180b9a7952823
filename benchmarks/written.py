"""What a run writes into the documentation: the part between two markers, and nothing else."""

from __future__ import annotations

from pathlib import Path

BEGIN = "<!-- written by the run: begin -->"
END = "<!-- written by the run: end -->"


def write_between(document: Path, text: str) -> None:
    """Replace what stands between the markers of `document`."""
    before, begin, rest = document.read_text(encoding="utf-8").partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end):
        raise SystemExit(f"{document} lacks the markers {BEGIN} and {END}")
    document.write_text(f"{before}{BEGIN}\n\n{text}\n\n{END}{after}", encoding="utf-8")
