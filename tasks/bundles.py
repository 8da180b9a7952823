"""Bundles by name: what was ever served here is known by its digest, what was promoted by alias."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

from pydantic import ValidationError

from registry.alias_moves import Aliases
from registry.bundle import Bundle, Part
from registry.digests import digest_of_folder
from registry.errors import UserError
from registry.ledger import Ledger
from registry.provenance import engine_version, sglang_version
from registry.serve_words import served_env
from registry.settings import settings
from registry.shared_store import SharedStore, open_store
from registry.store import Store
from registry.tracking import BUNDLE_FILE, TAG_BUNDLE, Tracker, asking_mlflow
from registry.versions import current_champion, numbered_version
from registry.whole_files import write_whole
from tasks.engines.vllm_server import command
from tasks.progress import LOG

if TYPE_CHECKING:
    from mlflow.entities.model_registry import ModelVersion

FEWEST_DIGITS = 8


def remember(bundle: Bundle) -> None:
    """Keep what a bundle consists of, so that `--bundle DIGEST` finds it."""
    folder = _folder()
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / f"{bundle.digest}.json"
    if not file.exists():
        write_whole(file, bundle.model_dump_json(indent=1))


def bundle_named(reference: str) -> Bundle:
    """By MODEL@ALIAS, MODEL@VERSION, or the first digits of a digest. Raises `UserError`."""
    if "@" in reference:
        return promoted_bundle(reference)
    if not re.fullmatch(rf"[0-9a-f]{{{FEWEST_DIGITS},64}}", reference):
        raise UserError.at(
            f"--bundle {reference}",
            f"is neither MODEL@ALIAS nor at least {FEWEST_DIGITS} digits of a bundle's digest",
            "the report and `pilotage release --json` show the digests",
        )
    files = sorted(_folder().glob(f"{reference}*.json"))
    if len(files) != 1:
        known = ", ".join(file.stem[:12] for file in sorted(_folder().glob("*.json"))) or "none"
        what = "several bundles begin so" if files else "no such bundle was served here"
        remedy = "name one of them by more digits" if files else "name a known one, or MODEL@ALIAS"
        raise UserError.at(f"--bundle {reference}", f"{what} (known: {known})", remedy)
    try:
        bundle = Bundle.model_validate_json(files[0].read_text(encoding="utf-8"))
    except (ValidationError, ValueError) as error:
        raise UserError.at(files[0], f"cannot be read: {error}", "run the release again") from None
    if bundle.digest != files[0].stem:
        raise UserError.at(files[0], "is not the bundle of its name", "run the release again")
    return bundle


def _folder() -> Path:
    return settings().home / "bundles"


# -- what was promoted -----------------------------------------------------------------------


def tracker() -> Tracker:
    return Tracker(settings().tracking_uri, settings().mlartifacts_dir)


def check_text(words: Mapping[str, str]) -> None:
    """Raises `UserError` for a word that is no UTF-8; a terminal hands over whatever it gets."""
    for where, word in words.items():
        try:
            word.encode("utf-8")
        except UnicodeEncodeError:
            raise UserError.at(where, f"{word!a} is no text", "write it in UTF-8") from None


def check_model_name(model: str) -> None:
    """Raises `UserError` for what cannot be a registered model's name."""
    check_text({"model": model})
    if not model.strip() or set("/:@") & set(model):
        raise UserError.at(
            f"model {model!a}",
            "is no name of a registered model",
            "the name alone, without alias or version, e.g. freight-assistant",
        )


def aliases_of_model(model: str) -> Aliases:
    check_model_name(model)
    return Aliases(tracker().client, Ledger(settings().ledger_uri), model)


@dataclass(frozen=True)
class Named:
    """A version that somebody asked for; `alias` None: by its number."""

    model: str
    alias: str | None
    version: ModelVersion


def version_named(reference: str) -> Named:
    """The version behind MODEL@ALIAS or MODEL@VERSION. Raises `UserError` when there is none."""
    model, _, wanted = reference.partition("@")
    check_text({"reference": reference})
    if not model or not wanted or set("/:") & set(model):
        raise UserError.at(reference, "is not MODEL@ALIAS", "e.g. freight-assistant@champion")
    database = settings().home / "mlflow.db"
    if not settings().mlflow_uri and not database.exists():
        raise UserError.at(database, "no such database", "run `pilotage release` first")
    client = tracker().client
    alias = None if wanted.isdecimal() and len(wanted) < 10 else wanted
    version = (
        current_champion(client, model, alias)
        if alias is not None
        else numbered_version(client, model, int(wanted))
    )
    if version is None:
        raise UserError.at(
            reference, "no such model, alias or version", "run `pilotage release` first"
        )
    return Named(model, alias, version)


def promoted_bundle(reference: str) -> Bundle:
    """The bundle behind MODEL@ALIAS or MODEL@VERSION. Raises `UserError` when there is none."""
    version = version_named(reference).version
    with asking_mlflow(f"read {BUNDLE_FILE} of {reference}"):
        import mlflow

        mlflow.set_tracking_uri(settings().tracking_uri)
        text = mlflow.artifacts.load_text(f"{version.source.rstrip('/')}/{BUNDLE_FILE}")
    try:
        document = json.loads(text)
        named = document.pop("digest")
        bundle = Bundle.model_validate(document)
    except (ValueError, KeyError, AttributeError):
        raise UserError.at(
            reference, f"its {BUNDLE_FILE} cannot be read", "release again"
        ) from None
    if bundle.digest != named or named != version.tags.get(TAG_BUNDLE):
        raise UserError.at(
            reference, "bundle.json is not the bundle that was gated", "release again"
        )
    return bundle


def gated_bundle(reference: str) -> Bundle:
    """What an alias points to, ready to be served by vLLM here as it was gated.

    Every file of target and draft is compared with the digest that was gated first.
    """
    bundle = promoted_bundle(reference)
    if bundle.engine != "vllm":
        raise UserError.at(
            reference,
            f"was made for {bundle.engine}, and `pilotage serve` starts vLLM alone",
            "start deploy/sglang-serve.sh of the version's folder (docs/deployables.md)",
        )
    if engine_version() != bundle.engine_version:
        raise UserError.at(
            f"PILOTAGE_SERVE_PYTHON={settings().serve_python}",
            f"has {bundle.engine} {engine_version()}; {reference} was gated with "
            f"{bundle.engine_version}",
            "install the version that was gated, or release again with this one",
        )
    weights_as_gated(bundle, reference)
    return bundle


def serve_command(bundle: Bundle, reference: str, port: int) -> tuple[list[str], dict[str, str]]:
    """The command line and environment that were gated, of a bundle that one engine serves."""
    words = command(
        settings().serve_python,
        bundle.target.path,
        reference.partition("@")[0],
        bundle.engine_args,
        port,
        bundle.draft.path if bundle.draft else None,
        bundle.num_speculative_tokens or 0,
    )
    return words, served_env(bundle.env)


def as_served_here(bundle: Bundle, reference: str) -> Bundle:
    """A bundle as this machine's engine serves it, its weights as gated. Raises `UserError`."""
    here = sglang_version() if bundle.engine == "sglang" else engine_version()
    if bundle.engine_version != here:
        LOG.warning("%s was made for %s %s; measured with %s", reference, bundle.engine,
                    bundle.engine_version, here)  # fmt: skip
        bundle = bundle.model_copy(update={"engine_version": here})
    weights_as_gated(bundle, reference)
    return bundle


# -- the weights -----------------------------------------------------------------------------


def weights_as_gated(bundle: Bundle, reference: str) -> None:
    """Compare every file of target and draft with the digest that was gated. Raises `UserError`.

    A folder that this machine's store does not have is fetched from the store that machines share,
    or out of MLflow, where a version's weights lie; one that is there and differs is refused, not
    replaced.
    """
    for name, part in (("target", bundle.target), ("draft", bundle.draft)):
        if part is None:
            continue
        remedy = "run the release again: it is made anew, or restored from a backup of the store"
        if not part.path.is_dir() and not (_share(part) or _fetch(part, name, bundle)):
            raise UserError.at(
                part.path, f"is missing, and MLflow has no {name} of {reference}", remedy
            )
        # In use: `pilotage prune` leaves it alone while its server is not there yet.
        Store(settings().store_dir).mark_used(part.stage, part.key)
        if digest_of_folder(part.path) != part.digest:
            raise UserError.at(part.path, f"is not what was gated as {reference}", remedy)


def _share(part: Part) -> bool:
    """Whether the store that machines share had these weights; they lie at `part.path` then."""
    shelf = open_store(LOG.info)
    return isinstance(shelf, SharedStore) and shelf.fetch_part(
        part.stage, part.key, part.below, part.digest
    )


def _fetch(part: Part, name: str, bundle: Bundle) -> bool:
    """Whether some version of the bundle had the folder in MLflow; it lies at `part.path` then."""
    kept = settings().downloads_dir / part.digest
    records = tracker()
    with asking_mlflow(f"fetch the {name} of bundle {bundle.digest[:12]}"):
        from mlflow.artifacts import download_artifacts, list_artifacts

        found = records.client.search_model_versions(f"tags.`{TAG_BUNDLE}` = '{bundle.digest}'")
        for version in found:
            source = version.source.rstrip("/")
            held = list_artifacts(source, tracking_uri=records.uri)
            if name not in [PurePosixPath(one.path).name for one in held]:
                continue
            LOG.info("fetching the %s of bundle %s out of MLflow", name, bundle.digest[:12])
            incoming = kept.with_name(f".{part.digest}-{os.getpid()}")
            try:
                fetched = download_artifacts(
                    f"{source}/{name}", dst_path=str(incoming), tracking_uri=records.uri
                )
                if digest_of_folder(Path(fetched)) != part.digest:
                    where = f"{source}/{name}"
                    raise UserError.at(where, "is not what was gated", "release it again")
                with suppress(OSError):  # another process was first
                    Path(fetched).rename(kept)
            finally:
                shutil.rmtree(incoming, ignore_errors=True)
            return True
    return False
