"""Files that hold the text of prompts, beside the artifacts: logs, reports, copies in MLflow.

Rows of the store are found by id. Everything else that this machine keeps as text is searched for
the text itself, as it is, as JSON and HTML spell it, and as our reports do. The text is what the
person wrote, without the recipe's template: that begins every prompt with the same words.
"""

from __future__ import annotations

import html
import json
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path

from registry.artifacts import Manifest
from registry.lineage import PROMPTS, Lineage
from registry.settings import settings
from registry.store import MANIFEST
from tasks.prompt_rows import prompts_at
from tasks.prompt_template import taken_out
from tasks.reach import Found

FEWEST_CHARACTERS = 12
"""A shorter text ("ok, thanks") stands everywhere and names nobody."""

BEGINNING = 80
"""Characters that are searched for; reports cut long texts."""

LARGEST = 64 << 20
MOST_WORK = 2 << 30
"""Bytes times texts: about a second."""

_FOLDERS = ("logs", "reports", "mlartifacts", "bench")
_OF_STORE = (
    # Manifests and data cards keep a few sample answers with their prompts, the reports of the
    # prompts those that parts have in common, and rows that were left out.
    *("[!.]*/*/manifest.json", "teacher_data/*/files/data_card.*", "[!.]*/*/files/report.*"),
    *("prompts/*/files/disjointness.json", "prompts/*/files/rejects.jsonl"),
)
_TEXTS = {".json", ".jsonl", ".log", ".html", ".md", ".txt", ".csv"}


def search_texts(
    store: Lineage, found: Mapping[str, Found]
) -> tuple[list[dict[str, str]], list[str]]:
    """Files with what they hold (`how`: by id, or by text), and what was not searched."""
    texts = [
        {"path": f"store/{node.kind}/{node.key}/files/{name}", "holds": holds, "how": "id"}
        for node in store.ordered()[::-1]
        for name, holds in _row_files(node.kind, found.get(node.digest, {}))
    ]
    every = set(_prompts(store, found))
    prompts = {text for text in every if len(text) >= FEWEST_CHARACTERS}
    unseen = [
        "databases, and copies of the prompts outside of PILOTAGE_HOME, were not searched"
        + (", nor were MLflow's artifacts" if settings().mlflow_uri else "")
    ]
    if short := len(every) - len(prompts):
        unseen.append(
            f"logs and reports were not searched for {short} texts of fewer than "
            f"{FEWEST_CHARACTERS} characters, which stand everywhere"
        )
    if not prompts:
        return texts, unseen
    files, large = _files()
    if large:
        unseen.append(f"too large to be searched for the text: {', '.join(large)}")
    if sum(size for _, size in files) * len(prompts) > MOST_WORK:
        unseen.append(
            f"logs and reports were not searched for {len(prompts)} texts at once: ask for fewer"
        )
        return texts, unseen
    needles = {spelled for text in prompts for spelled in _spellings(text[:BEGINNING])}
    for path, _ in files:
        try:
            content = path.read_bytes()
        except OSError:
            continue  # removed meanwhile
        if any(needle in content for needle in needles):
            name = path.relative_to(settings().home).as_posix()
            texts.append({"path": name, "holds": "prompt", "how": "text"})
    return texts, unseen


def _row_files(kind: str, rows: Found) -> Iterator[tuple[str, str]]:
    """Files of an artifact that hold rows of the prompts, and what of them."""
    for part, places in rows.items():
        if not places:
            continue
        if kind == PROMPTS:
            yield f"{part}.jsonl", "prompt"
        elif kind == "teacher_data" and part != "set_aside":
            yield f"{part}.jsonl", "prompt and answer"
        elif kind == "accuracy":
            yield "items.parquet", "answer"
        elif kind == "latency":
            yield "raw/", "answer"
        elif kind == "draft_proof":
            yield "", "answer"
    if kind == "teacher_data" and any(rows.values()):
        yield "responses.jsonl", "answer"


def _prompts(store: Lineage, found: Mapping[str, Found]) -> Iterator[str]:
    for node in store.of_kind(PROMPTS):
        above = settings().store_dir / node.kind / node.key
        folder, template = above / "files", _template(above)
        for part, places in found.get(node.digest, {}).items():
            if places:
                for text in prompts_at(folder / f"{part}.jsonl", set(places.values())):
                    yield taken_out(template, text).strip()


def _template(folder: Path) -> str:
    """The recipe's template that prompts of the store were put into."""
    try:
        text = (folder / MANIFEST).read_text(encoding="utf-8")
        return str(Manifest.model_validate_json(text).config["prompts"]["template"])
    except (OSError, ValueError, LookupError, TypeError):
        return "{prompt}"


def _files() -> tuple[list[tuple[Path, int]], list[str]]:
    """Text files with their sizes, and the names of those that are too large."""
    files, large = [], []
    for path in _candidates():
        try:
            size = path.stat().st_size
        except OSError:
            continue
        if size > LARGEST:
            large.append(path.relative_to(settings().home).as_posix())
        else:
            files.append((path, size))
    return files, large


def _candidates() -> Iterator[Path]:
    home = settings().home
    for folder in _FOLDERS:
        for path in sorted((home / folder).rglob("*")):
            if path.suffix in _TEXTS and path.is_file():
                yield path
    for pattern in _OF_STORE:
        yield from sorted(settings().store_dir.glob(pattern))


def _spellings(text: str) -> Collection[bytes]:
    """A text as it stands in plain files, in JSON, in HTML and in our Markdown."""
    # Reports show a text in one line.
    line = " ".join(text.split())
    forms = {line.replace("|", "\\|").replace("`", "'")}
    for one in (text, line):
        escaped = html.escape(one)
        forms |= {
            one,
            json.dumps(one, ensure_ascii=False)[1:-1],
            json.dumps(one)[1:-1],
            escaped,
            # As the report's template spells quotes.
            escaped.replace("&quot;", "&#34;").replace("&#x27;", "&#39;"),
        }
    return {form.encode("utf-8") for form in forms}
