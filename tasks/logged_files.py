"""The small files of a LoggedModel: what a release recorded of a bundle, read back and checked."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from eval_suites.policy import Policy
from registry.bundle import Bundle
from registry.errors import UserError
from registry.evidence import SUMMARY, Evidence, read_summary
from registry.lineage import LINEAGE_FILE, Lineage
from registry.outcome import CandidateOutcome
from registry.release_facts import RELEASE_FILE, ReleaseFacts
from registry.settings import settings
from registry.tracking import BUNDLE_FILE, OUTCOME_FILE, asking_mlflow, quiet_mlflow

Model = TypeVar("Model", bound=BaseModel)


class ModelFiles:
    """The small files of one LoggedModel; each is read when it is asked for.

    A reader gives None for a file that is not there. It raises `ValueError`, in a few words, for
    one that is not what its name says.
    """

    def __init__(self, source: str, title: str) -> None:
        self.source = source.rstrip("/")
        self.title = title

    @cached_property
    def names(self) -> set[str]:
        """Files at the top of the folder. Raises `InfrastructureError` when it cannot be asked."""
        quiet_mlflow()
        import mlflow

        mlflow.set_tracking_uri(settings().tracking_uri)
        with asking_mlflow(f"list the files of {self.title}"):
            found = mlflow.artifacts.list_artifacts(artifact_uri=self.source)
        return {item.path.rsplit("/", 1)[-1] for item in found if not item.is_dir}

    def text(self, name: str) -> str | None:
        if name not in self.names:
            return None
        from mlflow.artifacts import download_artifacts

        # MLflow's own `load_text` makes a failed download of bytes that are no UTF-8.
        with (
            asking_mlflow(f"read {name} of {self.title}"),
            TemporaryDirectory(prefix="pilotage-") as folder,
        ):
            content = Path(download_artifacts(f"{self.source}/{name}", dst_path=folder))
            return content.read_bytes().decode("utf-8")

    def document(self, name: str) -> dict[str, Any] | None:
        """A JSON object of numbers and texts that JSON can hold."""
        text = self.text(name)
        if text is None:
            return None
        try:
            document = json.loads(text)
            # Escaped halves of characters are read without a word, and no digest takes them.
            json.dumps(document, ensure_ascii=False).encode("utf-8")
            place = next(no_numbers(document), None)
        except RecursionError:
            raise ValueError("is nested too deeply") from None
        if place is not None:
            raise ValueError(f"{place} is no number")
        if not isinstance(document, dict):
            raise ValueError("is no JSON object")
        return document

    def read_bundle(self) -> tuple[Bundle, str] | None:
        """What was gated, and the digest that its file names."""
        document = self.document(BUNDLE_FILE)
        if document is None:
            return None
        named = str(document.pop("digest", ""))
        return _parsed(Bundle, document), named

    def read_outcome(self) -> CandidateOutcome | None:
        document = self.document(OUTCOME_FILE)
        return _parsed(CandidateOutcome, document) if document is not None else None

    def read_facts(self) -> tuple[ReleaseFacts, Policy] | None:
        """How it was judged; None for a version from before releases recorded that."""
        document = self.document(RELEASE_FILE)
        if document is None:
            return None
        facts = _parsed(ReleaseFacts, document)
        return facts, _parsed(Policy, facts.policy)

    def read_evidence(self, kind: str) -> Evidence | None:
        """The summary of accuracy, latency or serving evidence."""
        name = f"evidence-{kind}.json"
        document = self.document(name)
        if document is None:
            return None
        with TemporaryDirectory(prefix="pilotage-") as folder:
            place = Path(folder) / SUMMARY
            place.write_text(json.dumps(document), encoding="utf-8")
            try:
                found = read_summary(place.parent)
            except UserError as error:
                problem = error.problems[0]
                where = problem.where.removeprefix(str(place)).lstrip(": ")
                told = f"{where}: {problem.what}" if where else problem.what
                raise ValueError(told) from None
        if found.kind != kind:
            raise ValueError(f"it is {found.kind} evidence")
        return found

    def read_lineage(self) -> Lineage | None:
        document = self.document(LINEAGE_FILE)
        if document is None:
            return None
        lineage = _parsed(Lineage, document)
        if flaw := lineage.flaw():
            raise ValueError(flaw)
        return lineage


def no_numbers(content: Any, place: str = "") -> Iterator[str]:
    """Where NaN or infinity stands, which JSON does not have and Python reads all the same."""
    if isinstance(content, float) and not math.isfinite(content):
        yield place
    if isinstance(content, list | tuple):
        content = dict(enumerate(content))
    if isinstance(content, dict):
        for name, part in content.items():
            yield from no_numbers(part, f"{place}.{name}" if place else str(name))


def _parsed(kind: type[Model], document: Any) -> Model:
    try:
        return kind.model_validate(document)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"])
        raise ValueError(f"{place}: {first['msg']}" if place else first["msg"]) from None
