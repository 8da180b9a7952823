"""`why` and `impact` on a real registry: aliases that no search shows, files from MLflow."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from registry.errors import UserError
from registry.ledger import Draft, Ledger, Move
from registry.settings import settings
from registry.tracking import Tracker
from tasks.impact import impact
from tasks.why import why
from tests.unit.lineage_builders import Release, release
from tests.unit.lineage_registry import MODEL, version_of


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Making MLflow's tables takes seconds, copying them does not."""
    database = tmp_path_factory.mktemp("mlflow") / "mlflow.db"
    assert Tracker(f"sqlite:///{database}", database.parent).client.search_experiments()
    return database


@pytest.fixture
def made(template: Path, home: Path) -> Release:
    """Versions 1 (no draft) and 2 (with one) of a model, and version 1 of another one."""
    home.mkdir(exist_ok=True)
    shutil.copy(template, home / "mlflow.db")
    made = release(home / "store")
    client = Tracker(settings().tracking_uri, settings().mlartifacts_dir).client
    for model, drafts in ((MODEL, (False, True)), ("it's another", (False,))):
        client.create_registered_model(model)
        for number, draft in enumerate(drafts, start=1):
            shutil.rmtree(settings().mlartifacts_dir / MODEL / "9", ignore_errors=True)
            told = version_of(made, made.bundle(draft=draft), number=9)
            folder = settings().mlartifacts_dir / f"{len(model)}-{number}"
            shutil.move(settings().mlartifacts_dir / MODEL / "9", folder)
            client.create_model_version(model, folder.as_uri(), tags=told.tags)
    client.set_registered_model_alias(MODEL, "champion", "2")
    client.set_registered_model_alias(MODEL, "previous", "1")
    client.set_registered_model_alias("it's another", "canary", "1")
    return made


def test_impact_names_every_alias_of_every_model(made: Release) -> None:
    def aliases(name: str) -> set[tuple[str, str, str]]:
        found = impact([name]).document["aliases"]
        return {(one["model"], one["alias"], one["used_for"]) for one in found}

    everything = {(MODEL, "champion"), (MODEL, "previous"), ("it's another", "canary")}
    assert aliases("t1") == {(*one, "weights") for one in everything}
    assert aliases("d0") == {(MODEL, "champion", "weights")}
    assert aliases("e1") == {(*one, "evidence") for one in everything}
    assert aliases("t3") == set()


def test_why_answers_by_alias_and_number(made: Release) -> None:
    Ledger(settings().ledger_uri).append(
        MODEL,
        Draft(
            actor="kim",
            action="promote",
            moves={
                "champion": Move(before=1, after=2),
                "previous": Move(before=None, after=1),
            },
            bundle=made.bundle().digest,
            reason="faster",
        ),
        Ledger(settings().ledger_uri).head(MODEL),
    )
    # A line that promotes version 2 also moves `previous`, to another bundle.
    champion = why(f"{MODEL}@champion")
    assert champion.document["problems"] == []
    assert champion.document["moved"]["by"] == "kim"
    assert champion.document["chain"][-1]["digest"] == made.refs["prompts"].digest
    assert why(f"{MODEL}@2").document["bundle"] == champion.document["bundle"]
    previous = why(f"{MODEL}@previous").document
    assert (previous["version"], previous["problems"]) == (1, [])
    assert previous["moved"]["sequence"] == 1
    for wrong in (f"{MODEL}@9", f"{MODEL}@nobody", "nothing@champion"):
        with pytest.raises(UserError, match="no such"):
            why(wrong)


def test_why_needs_no_store(made: Release) -> None:
    shutil.rmtree(made.store.root)
    answer = why(f"{MODEL}@champion")
    assert answer.explained
    assert [link["kind"] for link in answer.document["chain"]][-1] == "prompts"
