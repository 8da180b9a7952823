"""The registered model: versions by bundle digest, and the alias that means production.

MLflow's search does not show aliases, so "the search shows no champion" says nothing; only
asking for the alias by name does. Three answers are told apart: there is no such model, the
model has no such alias, and the registry could not be asked. Only the first two can mean a
first release, and only where no version was ever promoted.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from registry.errors import InfrastructureError, UserError
from registry.outcome import CandidateOutcome, Champion, Verdict
from registry.tracking import TAG_BUNDLE, TAG_VERDICT, asking_mlflow

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities.model_registry import ModelVersion

CHAMPION = "champion"
PREVIOUS = "previous"
CANDIDATE = "candidate"

TAG_PROMOTED = "pilotage.promoted"
"""On a version: it has been the champion."""
TAG_LAST_CHAMPION = "pilotage.last_champion"
"""On the registered model: number of the last champion. It outlives a deleted version."""

_NO_SUCH_MODEL = "RESOURCE_DOES_NOT_EXIST"
_NO_SUCH_ALIAS = "INVALID_PARAMETER_VALUE"
_EXISTS_ALREADY = "RESOURCE_ALREADY_EXISTS"


class PromotionRefused(UserError):
    """The registry is in a state in which moving the alias would be a guess."""


@dataclass(frozen=True)
class Standing:
    """What the registry says about one alias. `version` is None when nothing holds it."""

    model_exists: bool
    version: ModelVersion | None


@dataclass(frozen=True)
class Promotion:
    """A promotion that was read back."""

    champion: Champion
    previous: Champion | None
    changed: bool


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
    found = _versions(client, model, f"tags.`{TAG_BUNDLE}` = '{bundle}'")
    return min(found, key=lambda version: int(version.version), default=None)


def check_promotable(client: MlflowClient, model: str, *, first_release: bool) -> Standing:
    """Whether a promotion could go on. Ask before the work, not after a night of it.

    Raises `PromotionRefused` when a promoted version exists and the alias is gone, and when
    there is no champion and this is not said to be the first release.
    """
    now = standing(client, model)
    if now.version is not None:
        return now
    if now.model_exists:
        _refuse_lost_alias(client, model)
    if not first_release:
        what = "has no champion" if now.model_exists else "does not exist"
        raise PromotionRefused.at(
            f"models:/{model}@{CHAMPION}",
            f"registered model {model!r} {what}, so there is no baseline",
            "for the first release set `promotion.first_release: true` in the release recipe",
        )
    return now


def register_candidate(
    client: MlflowClient,
    model: str,
    outcome: CandidateOutcome,
    *,
    model_id: str,
    run_id: str,
    tags: Mapping[str, str],
) -> int:
    """Register the bundle as a version (once) and point alias `candidate` to it.

    model_id: its LoggedModel; run_id: the release's run; tags: policy, release and the like.
    Returns the version. Only a bundle with verdict PASS becomes a version.
    """
    version = _register(client, model, outcome, model_id, run_id, tags)
    _point(client, model, CANDIDATE, version)
    return version


def promote(
    client: MlflowClient,
    model: str,
    outcome: CandidateOutcome,
    *,
    model_id: str,
    run_id: str,
    tags: Mapping[str, str],
    first_release: bool,
) -> Promotion:
    """Make the bundle the champion, and the champion `previous`.

    Both aliases are read back before success. The same bundle again changes no alias and makes
    no version. The mark "was promoted" is written after the alias, so that a run killed in
    between can be repeated. Raises `PromotionRefused` (see `check_promotable`).
    """
    before = check_promotable(client, model, first_release=first_release).version
    version = _register(client, model, outcome, model_id, run_id, tags)
    if before is not None and int(before.version) == version:
        _mark_promoted(client, model, version)
        return Promotion(
            _champion(before, CHAMPION), _holder(client, model, PREVIOUS), changed=False
        )
    if before is not None:
        _mark_promoted(client, model, int(before.version))
        _point(client, model, PREVIOUS, int(before.version))
    _point(client, model, CHAMPION, version)
    _mark_promoted(client, model, version)
    return Promotion(
        Champion(version=version, bundle=outcome.bundle),
        _champion(before, PREVIOUS) if before is not None else None,
        changed=True,
    )


# -- parts -----------------------------------------------------------------------------------


def _register(
    client: MlflowClient,
    model: str,
    outcome: CandidateOutcome,
    model_id: str,
    run_id: str,
    tags: Mapping[str, str],
) -> int:
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
        if found is not None:
            # Measured again, perhaps: the version names its newest evidence.
            for name, value in wanted.items():
                if found.tags.get(name) != value:
                    client.set_model_version_tag(model, found.version, name, value)
            return int(found.version)
        try:
            client.create_registered_model(model)
        except MlflowException as error:
            if error.error_code != _EXISTS_ALREADY:
                raise
        # `models:/<id>` as the source is looked up at the process's global tracking URI, which
        # may be another backend than this client's; the location itself is not.
        logged = client.get_logged_model(model_id)
        made = client.create_model_version(
            model, logged.artifact_location, run_id=run_id, tags=wanted, model_id=model_id
        )
        # What `mlflow.register_model` writes; the UI links the two by it.
        link = [{"name": model, "version": int(made.version)}]
        client.set_logged_model_tags(model_id, {"mlflow.modelVersions": json.dumps(link)})
        return int(made.version)


def _refuse_lost_alias(client: MlflowClient, model: str) -> None:
    promoted = _versions(client, model, f"tags.`{TAG_PROMOTED}` = 'true'")
    with asking_mlflow(f"read {model}"):
        last = client.get_registered_model(model).tags.get(TAG_LAST_CHAMPION)
    numbers = sorted(
        {int(version.version) for version in promoted} | ({int(last)} if last else set())
    )
    if not numbers:
        return
    listed = ", ".join(str(number) for number in numbers)
    raise PromotionRefused.at(
        f"models:/{model}@{CHAMPION}",
        f"version {listed} was promoted, but no version holds the alias {CHAMPION!r}: "
        "somebody removed the alias, or deleted the version that held it",
        "give the alias back to the version that is in production "
        f"(MlflowClient.set_registered_model_alias({model!r}, {CHAMPION!r}, VERSION)), "
        "then release again",
    )


def _versions(client: MlflowClient, model: str, condition: str) -> list[ModelVersion]:
    found: list[ModelVersion] = []
    token = None
    with asking_mlflow(f"list the versions of {model}"):
        while True:
            page = client.search_model_versions(
                f"name = '{model}' and {condition}", page_token=token
            )
            found += page
            token = page.token
            if not token:
                return found


def _point(client: MlflowClient, model: str, alias: str, version: int) -> None:
    """Move an alias and read it back."""
    now = standing(client, model, alias).version
    if now is None or int(now.version) != version:
        with asking_mlflow(f"set alias {alias} of {model}"):
            client.set_registered_model_alias(model, alias, str(version))
        now = standing(client, model, alias).version
    if now is None or int(now.version) != version:
        held = f"version {now.version}" if now is not None else "nothing"
        raise InfrastructureError(
            f"MLflow: alias {alias} of {model} was set to version {version} and reads as {held}"
        )


def _mark_promoted(client: MlflowClient, model: str, version: int) -> None:
    with asking_mlflow(f"mark version {version} of {model}"):
        client.set_model_version_tag(model, str(version), TAG_PROMOTED, "true")
        client.set_registered_model_tag(model, TAG_LAST_CHAMPION, str(version))


def _holder(client: MlflowClient, model: str, alias: str) -> Champion | None:
    version = standing(client, model, alias).version
    return _champion(version, alias) if version is not None else None


def _champion(version: ModelVersion, alias: str) -> Champion:
    return Champion(
        version=int(version.version), bundle=version.tags.get(TAG_BUNDLE, ""), alias=alias
    )
