"""A page of a run in Prefect's UI; a server that has no room for it changes nothing of the run."""

from __future__ import annotations

from prefect.artifacts import create_markdown_artifact

from tasks.progress import LOG


def show_page(key: str, markdown: str, description: str) -> None:
    """`key`: letters, digits and dashes; later pages of one key are its newer versions."""
    try:
        create_markdown_artifact(key=key, markdown=markdown, description=description)
    except Exception as error:
        # Whatever the server or the way to it says: a night's work does not depend on a page.
        LOG.warning("the page %r is not shown in Prefect: %s", key, error)
