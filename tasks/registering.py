"""A bundle that passed becomes a version: weights and deployables beside its bundle.json, once."""

from __future__ import annotations

import re
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from registry.alias_moves import LOCK_WAIT
from registry.bundle import Bundle
from registry.outcome import CandidateOutcome
from registry.promotion import Backing, point_candidate
from registry.release_facts import ReleaseFacts
from registry.savings import Asked
from registry.versions import find_version, register_version
from tasks.bundles import aliases_of_model, tracker, weights_as_gated
from tasks.deployables import write_deployables
from tasks.progress import LOG

if TYPE_CHECKING:
    from mlflow.entities.model_registry import ModelVersion


def make_version(
    model: str,
    outcome: CandidateOutcome,
    bundle: Bundle,
    facts: ReleaseFacts,
    *,
    model_id: str,
    run_id: str,
    actor: str,
    startup_seconds: float | None,
    asked: Asked | None = None,
) -> int:
    """The version of a bundle that passed, made when there is none; alias `candidate` points to it.

    model_id: its LoggedModel, which gets `target/`, `draft/` and `deploy/`, so that what
    `models:/MODEL/VERSION` downloads is all that a server is started from. startup_seconds: as
    measured when it was proved to serve; None where that is not known. asked: the release's
    traffic, for the number of replicas.
    """
    client = tracker().client
    aliases = aliases_of_model(model)
    found = find_version(client, model, bundle.digest)
    # A version from before weights were kept in MLflow gets them now.
    home = (model_behind(found) if found is not None else None) or model_id
    if not tracker().has_weights(home, bundle.digest):
        weights_as_gated(bundle, f"{model} {outcome.name}")
        with TemporaryDirectory(prefix="pilotage-") as made:
            folder = Path(made)
            write_deployables(folder, model, bundle, outcome, startup_seconds, asked)
            folders = {"target": bundle.target.path, "deploy": folder / "deploy"}
            if bundle.draft is not None:
                folders["draft"] = bundle.draft.path
            tracker().add_weights(home, bundle.digest, folders)
    tags = {
        "pilotage.release": facts.release,
        "pilotage.policy": facts.policy_digest,
        "pilotage.recipe": facts.recipe_digest,
        "pilotage.prompts": facts.prompts,
    }
    with aliases.ledger.lock(model, LOCK_WAIT):
        version = register_version(
            client, model, outcome, model_id=model_id, run_id=run_id, tags=tags
        )
    backing = Backing(actor=actor, evidence=outcome.evidence, policy=facts.policy_digest)
    point_candidate(aliases, version, bundle.digest, backing)
    LOG.info("%s version %d is %s", model, version, outcome.name)
    return version


def model_behind(version: ModelVersion) -> str | None:
    """Id of the LoggedModel whose files are the version's; None where its source is another folder.

    MLflow 3.17 takes a `model_id` for a version and does not give it back; its source names it.
    """
    found = re.search(r"/models/(m-[0-9a-f]{32})/artifacts/?$", version.source or "")
    return found[1] if found else None
