"""What a stage says of itself for a person: Markdown and JSON beside its files.

A stage may leave `report.md` and `report.json` in its folder (the teacher's data: `data_card.md`
and `data_card.json`). They go to the stage's run in MLflow as they are, and the Markdown into the
release's page.
"""

from __future__ import annotations

from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field

PAGES = ("data_card.md", "report.md")
DOCUMENTS = ("data_card.json", "report.json", "disjointness.json")

LARGEST = 1 << 20
"""Bytes of a page that are shown; what is longer stays in the store and is named there."""


class StagePage(BaseModel):
    """One page of a stage, ready for the release's page."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    stage: str
    html: str = Field(repr=False, description="Made by us from Markdown; raw HTML was escaped.")


def texts_of(folder: Path) -> dict[str, str]:
    """The pages and documents that a stage left, by file name."""
    return {name: _text(folder / name) for name in (*PAGES, *DOCUMENTS) if (folder / name).exists()}


def page_of(title: str, folder: Path) -> StagePage | None:
    """The stage's Markdown as HTML; None where it left none."""
    texts = [_text(folder / name) for name in PAGES if (folder / name).exists()]
    if not texts:
        return None
    return StagePage(stage=title, html="\n".join(as_html(text) for text in texts))


def as_html(markdown: str) -> str:
    """Markdown with tables as HTML. Whatever a prompt or a model wrote into it stays text.

    Raw HTML is escaped, and there are neither links nor pictures: a page needs no network, and a
    prompt may hold the address of anything.
    """
    from markdown_it import MarkdownIt

    rules = MarkdownIt("commonmark", {"html": False}).enable("table")
    return str(rules.disable(["link", "image", "autolink"]).render(markdown))


def _text(path: Path) -> str:
    with path.open("rb") as file:
        head = file.read(LARGEST + 1)
    if len(head) <= LARGEST:
        return head.decode("utf-8", "replace")
    return f"{path.name} has more than {LARGEST} bytes; it lies in the store."
