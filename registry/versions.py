"""Registered versions: found by alias, number or bundle digest, and registered once per bundle.

MLflow's search does not show aliases, so "the search shows no champion" says nothing; only
asking for the alias by name does. Three answers are told apart: there is no such model, the
model has no such alias, and the registry could not be asked.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from registry.errors import EXIT_REFUSED, EXIT_USER_ERROR, InfrastructureError, UserError
from registry.outcome import CandidateOutcome, Verdict
from registry.tracking import TAG_BUNDLE, TAG_VERDICT, asking_mlflow, pages

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities.model_registry import ModelVersion

CHAMPION = "champion"
PREVIOUS = "previous"
CANDIDATE = "candidate"

TAG_PROMOTED = "pilotage.promoted"
"""On a version: it has been the champion."""

_TAG_LINK = "mlflow.modelVersions"

_NO_SUCH_MODEL = "RESOURCE_DOES_NOT_EXIST"
_NO_SUCH_ALIAS = "INVALID_PARAMETER_VALUE"
_EXISTS_ALREADY = "RESOURCE_ALREADY_EXISTS"


class PromotionRefused(UserError):
    """Moving the alias would be a guess, or what was recorded speaks against it."""

    exit_status = EXIT_REFUSED


class NoBaseline(PromotionRefused):
    """There is no champion, and the recipe does not say that this is the first release."""

    exit_status = EXIT_USER_ERROR


@dataclass(frozen=True)
class Standing:
    """What the registry says about one alias. `version` is None when nothing holds it."""

    model_exists: bool
    version: ModelVersion | None


def standing(client: MlflowClient, model: str, alias: str = CHAMPION) -> Standing:
    """Who holds the alias. Raises `InfrastructureError` when the registry cannot be asked."""
    from mlflow.exceptions import MlflowException

    with asking_mlflow(f"read alias {alias} of {model}"):
        try:
            return Standing(True, client.get_model_version_by_alias(model, alias))
        except MlflowException as error:
            if error.error_code not in (_NO_SUCH_MODEL, _NO_SUCH_ALIAS):
                raise
        # Both codes have other causes too (a version that cannot be read); ask once more.
        try:
            registered = client.get_registered_model(model)
        except MlflowException as error:
            if error.error_code == _NO_SUCH_MODEL:
                return Standing(False, None)
            raise
    if alias in registered.aliases:
        raise InfrastructureError(
            f"MLflow: alias {alias} of {model} points to version {registered.aliases[alias]}, "
            "which cannot be read"
        )
    return Standing(True, None)


def current_champion(
    client: MlflowClient, model: str, alias: str = CHAMPION
) -> ModelVersion | None:
    """The version that holds the alias; None where the model or the alias does not exist."""
    return standing(client, model, alias).version


def numbered_version(client: MlflowClient, model: str, number: int) -> ModelVersion | None:
    """A version by its number; None where model or version does not exist."""
    from mlflow.exceptions import MlflowException

    with asking_mlflow(f"read version {number} of {model}"):
        try:
            return client.get_model_version(model, str(number))
        except MlflowException as error:
            if error.error_code == _NO_SUCH_MODEL:
                return None
            raise


def find_version(client: MlflowClient, model: str, bundle: str) -> ModelVersion | None:
    """The version registered for a bundle digest (the oldest, should there be two)."""
    found = versions_with(client, model, f"tags.`{TAG_BUNDLE}` = '{bundle}'")
    return min(found, key=lambda version: int(version.version), default=None)


def register_version(
    client: MlflowClient,
    model: str,
    outcome: CandidateOutcome,
    *,
    model_id: str,
    run_id: str,
    tags: Mapping[str, str],
) -> int:
    """The number of the bundle's version, registered when there is none yet.

    model_id: its LoggedModel; run_id: the release's run; tags: policy, release and the like.
    Only a bundle with verdict PASS becomes a version. To be called by one process at a time
    (`Ledger.lock`): two that find none would both make one.
    """
    from mlflow.exceptions import MlflowException

    if outcome.verdict is not Verdict.PASS:
        raise PromotionRefused.at(
            f"candidate {outcome.name}",
            f"its verdict is {outcome.verdict}: {'; '.join(outcome.reasons)}",
            "only a bundle that passed every critical gate becomes a version",
        )
    wanted = {
        **tags,
        **{f"pilotage.evidence.{kind}": digest for kind, digest in outcome.evidence.items()},
        "pilotage.candidate": outcome.name,
        TAG_VERDICT: outcome.verdict.value,
        TAG_BUNDLE: outcome.bundle,
    }
    found = find_version(client, model, outcome.bundle)
    with asking_mlflow(f"register {outcome.name} as a version of {model}"):
        logged = client.get_logged_model(model_id)
        if found is not None:
            # Measured again, perhaps: the version names its newest evidence.
            for name, value in wanted.items():
                if found.tags.get(name) != value:
                    client.set_model_version_tag(model, found.version, name, value)
        else:
            try:
                client.create_registered_model(model)
            except MlflowException as error:
                if error.error_code != _EXISTS_ALREADY:
                    raise
            # `models:/<id>` as the source is looked up at the process's global tracking URI, which
            # may be another backend than this client's; the location itself is not.
            found = client.create_model_version(
                model, logged.artifact_location, run_id=run_id, tags=wanted, model_id=model_id
            )
        # What `mlflow.register_model` writes; the UI links the two by it.
        link = json.dumps([{"name": model, "version": int(found.version)}])
        if found.source == logged.artifact_location and logged.tags.get(_TAG_LINK) != link:
            client.set_logged_model_tags(model_id, {_TAG_LINK: link})
        return int(found.version)


def versions_with(client: MlflowClient, model: str, condition: str) -> list[ModelVersion]:
    with asking_mlflow(f"list the versions of {model}"):
        return list(pages(client.search_model_versions, f"name = '{model}' and {condition}"))
