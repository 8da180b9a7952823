"""Folders of measurements in turn: a stopped one goes on, a finished one is put aside."""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from eval_suites.load import LoadProfile
from recipes.loader import short_name
from registry.bundle import Bundle
from registry.digests import digest_of
from registry.errors import UserError
from registry.settings import settings
from registry.whole_files import write_whole
from tasks.bundles import as_served_here, bundle_named
from tasks.engines.load_prompts import read_prompts
from tasks.progress import LOG

IDENTITY = "identity.json"


def begun(folder: Path, finished: str | None, identity: Mapping[str, Any]) -> Path:
    """The folder, empty or with the same measurement that was stopped.

    One that holds the file `finished` is put aside; None: it is added to, never done. Raises
    `UserError` where the folder holds another measurement that was stopped, or anything else.
    """
    if finished is not None:
        put_aside(folder, finished)
    file = folder / IDENTITY
    try:
        folder.mkdir(parents=True, exist_ok=True)
        known = json.loads(file.read_text(encoding="utf-8")) if file.exists() else None
        # Left by a stop while the first file was written.
        for left in folder.glob(f"{file.stem}.*.partial"):
            left.unlink(missing_ok=True)
        strange = known is None and any(folder.iterdir())
    except (FileExistsError, NotADirectoryError):
        raise UserError.at(folder, "is no folder", "name another one with --out") from None
    except ValueError as error:
        raise UserError.at(file, f"cannot be read: {error}", "remove the folder") from None
    if strange:
        raise UserError.at(
            folder, "holds something else than a measurement", "name another folder with --out"
        )
    if known is not None and known != identity:
        odd = ", ".join(sorted(key for key in identity if known.get(key) != identity[key]))
        raise UserError.at(
            folder,
            f"holds another measurement that was not finished (of another {odd})",
            "name another folder with --out, or remove it",
        )
    write_whole(file, json.dumps(identity, ensure_ascii=False, indent=1))
    return folder


def put_aside(folder: Path, finished: str) -> None:
    """Rename a folder that holds the file of a finished measurement."""
    if (folder / finished).exists():
        stamp = datetime.now(UTC).strftime("%Y%m%dT%H%M%S")
        aside = folder.with_name(f"{folder.name}-until-{stamp}")
        folder.rename(aside)
        LOG.info("the finished measurement is now %s", aside)


def default_folder(kind: str, load: str, identity: Mapping[str, Any]) -> Path:
    return settings().home / kind / f"{short_name(load)}-{digest_of(identity)[:12]}"


def prompts_digest(profile: LoadProfile, prompts: Path | None) -> str:
    """Of a file's messages; empty for a profile's synthetic ones. Raises `UserError`."""
    if prompts is not None:
        return digest_of(read_prompts(prompts))
    if profile.scenarios:
        return ""
    raise UserError.at(
        "--prompts", "none are named, and the profile has no `scenarios`",
        "name a JSONL file with `id` and `prompt` or `messages`",
    )  # fmt: skip


def measurable(reference: str) -> Bundle:
    """A bundle as this machine's engine serves it, its weights as gated. Raises `UserError`."""
    return as_served_here(bundle_named(reference), reference)
