"""What a release leaves in MLflow: one parent run, one nested run per stage, one LoggedModel
per candidate. MLflow records; it decides nothing.

Everything is looked for by tag before it is made, and every metric carries the time of its
measurement instead of the time of writing, so that a release killed at any moment and started
again records each thing once. Runs are named by their ids: the thread's active run is not used.
"""

from __future__ import annotations

import logging
import os
import re
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from filelock import FileLock
from pydantic import BaseModel, ConfigDict, Field

from registry.bundle import Bundle
from registry.digests import digest_of
from registry.errors import InfrastructureError, UserError
from registry.evidence import LoadPoint
from registry.outcome import CandidateOutcome, ReleaseOutcome
from registry.topology import topology_words
from registry.tracking_points import (
    KeptRate,
    clean_name,
    kept_rate_metrics,
    point_metrics,
    scalar_metrics,
)

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import Metric

TAG_RELEASE = "pilotage.release"
TAG_KEY = "pilotage.key"
TAG_BUNDLE = "pilotage.bundle"
TAG_VERDICT = "pilotage.verdict"
TAG_REASONS = "pilotage.reasons"
TAG_CANDIDATE = "pilotage.candidate"
_TAG_BEGUN = "pilotage.begun"
_TAG_PARENT = "mlflow.parentRunId"

OUTCOME_FILE = "outcome.json"
BUNDLE_FILE = "bundle.json"
TAG_JUDGED = "pilotage.judged_at"
"""On a LoggedModel: when its bundle was judged last; the newest judgement counts."""
_TAG_RECORDED = "pilotage.recorded"
"""On a LoggedModel: digest of what it was filled with, so that a later judgement is seen."""
_TAG_WEIGHTS = "pilotage.weights"
"""On a LoggedModel: the bundle whose weights lie in it, whole."""

_TAG_LENGTH = 5000
"""MLflow cuts tags at 8,000 characters, some backends at 5,000."""
_LOCK_WAIT = 300.0
"""Seconds that one process waits for another that makes the tables."""

_BATCH = 100
"""Most params or tags in one call; metrics are sent in the same portions."""


class StageRecord(BaseModel):
    """What is recorded of one stage. Equal keys below one release are one nested run."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    key: str
    name: str = Field(description="For people: `quantize w8a8_int8`.")
    made_at: datetime = Field(description="When it was measured or made; stamps the metrics.")
    seconds: float = Field(ge=0, description="How long that took.")
    reused: bool
    params: dict[str, Any] = Field(default_factory=dict, description="Short ones; see `texts`.")
    metrics: dict[str, float | None] = Field(default_factory=dict)
    points: list[LoadPoint] = Field(default_factory=list)
    kept_rate: KeptRate = Field(default=None, description="Of a search, as in the evidence.")
    tags: dict[str, str] = Field(default_factory=dict)
    texts: dict[str, str] = Field(
        default_factory=dict, description="Artifacts by file name: recipes, evidence summaries."
    )
    files: list[Path] = Field(default_factory=list, description="Small files to keep as well.")


@contextmanager
def asking_mlflow(what: str, where: str = "MLflow") -> Iterator[None]:
    """Turn whatever MLflow, its database or its HTTP client raises into our errors."""
    from mlflow.exceptions import MlflowException
    from sqlalchemy.exc import SQLAlchemyError

    try:
        yield
    except ModuleNotFoundError as error:
        raise UserError.at(
            "PILOTAGE_MLFLOW_URI",
            f"{where} needs the Python package {error.name!r}",
            f"install {error.name} into the driver environment",
        ) from None
    except (MlflowException, SQLAlchemyError, OSError) as error:
        raise InfrastructureError(f"{where}: could not {what}: {_first_line(error)}") from error


def pages(search: Callable[..., Any], *arguments: Any) -> Iterator[Any]:
    """Everything that a search of MLflow's finds, page after page."""
    token = None
    while True:
        page = search(*arguments, page_token=token)
        yield from page
        token = page.token
        if not token:
            return


class Tracker:
    """Writes releases to one MLflow backend.

    uri: tracking URI, also of the model registry. artifacts_dir: where artifacts go when the
    backend is a database; a tracking server keeps its own place for them.
    """

    def __init__(self, uri: str, artifacts_dir: Path) -> None:
        self.uri = uri
        self.artifacts_dir = artifacts_dir

    @cached_property
    def client(self) -> MlflowClient:
        """Made at the first use: importing MLflow takes seconds, a new database some more."""
        quiet_mlflow()
        import mlflow

        with asking_mlflow("open the tracking backend", _without_secret(self.uri)):
            if not self.uri.startswith("sqlite:///"):
                return mlflow.MlflowClient(tracking_uri=self.uri, registry_uri=self.uri)
            database = Path(self.uri.removeprefix("sqlite:///"))
            database.parent.mkdir(parents=True, exist_ok=True)
            # Two processes that both find an empty file would both create the tables.
            with FileLock(f"{database}.lock", timeout=_LOCK_WAIT):
                if not database.exists():
                    self._create(database)
                return mlflow.MlflowClient(tracking_uri=self.uri, registry_uri=self.uri)

    @staticmethod
    def _create(database: Path) -> None:
        """Make the tables beside, then rename: one killed in between leaves no half of them."""
        import mlflow

        beside = database.with_name(f"{database.name}.new")
        beside.unlink(missing_ok=True)
        uri = f"sqlite:///{beside}"
        mlflow.MlflowClient(tracking_uri=uri, registry_uri=uri).search_experiments(max_results=1)
        beside.replace(database)

    # -- runs ------------------------------------------------------------------------------

    def experiment(self, model: str) -> str:
        """Id of the experiment of a registered model's name, made when there is none."""
        with asking_mlflow(f"find the experiment {model!r}"):
            found = self.client.get_experiment_by_name(model)
            if found is not None:
                if found.lifecycle_stage != "active":
                    self.client.restore_experiment(found.experiment_id)
                return str(found.experiment_id)
            place = None
            if not self.uri.startswith(("http:", "https:")):
                # Without a server nobody else says where artifacts go: MLflow would take the
                # working directory.
                place = (self.artifacts_dir / model).resolve().as_uri()
            return str(self.client.create_experiment(model, artifact_location=place))

    def release_run(
        self,
        model: str,
        release: str,
        name: str,
        *,
        tags: Mapping[str, str] | None = None,
        params: Mapping[str, Any] | None = None,
        texts: Mapping[str, str] | None = None,
    ) -> str:
        """Id of the one parent run of a release, found again by its digest.

        tags: provenance (git revision, tool versions, hardware, recipe digest); texts: artifacts
        by file name, such as the resolved recipe.
        """
        experiment = self.experiment(model)
        with asking_mlflow(f"record release {release[:12]}"):
            found = self.client.search_runs([experiment], f"tags.`{TAG_RELEASE}` = '{release}'")
            if found and _TAG_BEGUN in found[0].data.tags:
                return str(found[0].info.run_id)
            run = found[0] if found else None
            if run is None:
                run = self.client.create_run(experiment, run_name=name, tags={TAG_RELEASE: release})
            run_id = str(run.info.run_id)
            self._write_texts(run_id, texts or {})
            # Its own mark goes last: a run without it was left half written, and is completed.
            self._log(run_id, params=params or {}, tags={**(tags or {}), _TAG_BEGUN: "true"})
            return run_id

    def stage_runs(self, parent: str, stages: Sequence[StageRecord]) -> dict[str, str]:
        """Record stages as nested runs of `parent`; run ids by stage key."""
        with asking_mlflow("record the stages"):
            experiment = self.client.get_run(parent).info.experiment_id
            known = self._runs(experiment, f"tags.`{_TAG_PARENT}` = '{parent}'")
            return {
                stage.key: self._stage_run(experiment, parent, stage, known.get(stage.key))
                for stage in stages
            }

    def _stage_run(
        self, experiment: str, parent: str, stage: StageRecord, known: tuple[str, str] | None
    ) -> str:
        if known is not None and known[1] == "FINISHED":
            return known[0]
        ended = _milliseconds(stage.made_at)
        tags = {**stage.tags, "pilotage.reused": str(stage.reused).lower()}
        if known is None:
            # With its tags: a database writes them in one go with the run.
            run = self.client.create_run(
                experiment,
                start_time=ended - round(stage.seconds * 1000),
                run_name=stage.name,
                tags={**_clean_tags(tags), _TAG_PARENT: parent, TAG_KEY: stage.key},
            )
            run_id = str(run.info.run_id)
        else:
            run_id = known[0]
            self._log(run_id, tags=tags)
        numbers = {**stage.metrics, "seconds": stage.seconds}
        metrics = scalar_metrics(numbers, ended) + point_metrics(stage.points, ended)
        metrics += kept_rate_metrics(stage.kept_rate, ended)
        self._log(run_id, metrics=metrics, params=stage.params)
        self._write_texts(run_id, stage.texts)
        for path in stage.files:
            self.client.log_artifact(run_id, str(path))
        self.client.set_terminated(run_id, "FINISHED", end_time=ended)
        return run_id

    def finish(
        self,
        parent: str,
        outcome: ReleaseOutcome,
        report: Path | None = None,
        texts: Mapping[str, str] | None = None,
        files: Mapping[str, Sequence[Path]] | None = None,
    ) -> None:
        """Close the parent run with the release's verdict, outcome document, report and `texts`.

        `files` by their folder among the artifacts; one that is there already is written over. A
        refused release is a finished run with the verdict as a tag: refusing is its work.
        """
        with asking_mlflow("close the release's run"):
            counts = {
                f"candidates.{verdict.lower()}": float(number)
                for verdict, number in outcome.counts().items()
            }
            at = _milliseconds(outcome.finished_at)
            self._log(
                parent,
                metrics=scalar_metrics(counts, at),
                tags={
                    TAG_VERDICT: outcome.verdict.value,
                    TAG_REASONS: "\n".join(outcome.reasons),
                    "pilotage.version": str(outcome.version or ""),
                    "pilotage.promoted": outcome.promoted or "",
                },
            )
            self._write_texts(
                parent, {OUTCOME_FILE: outcome.model_dump_json(indent=1), **(texts or {})}
            )
            if report is not None:
                self.client.log_artifact(parent, str(report), "report")
            for folder, paths in (files or {}).items():
                for path in paths:
                    self.client.log_artifact(parent, str(path), folder)
            self.client.set_terminated(parent, "FINISHED")

    # -- candidates ------------------------------------------------------------------------

    def candidates(
        self,
        parent: str,
        candidates: Sequence[tuple[CandidateOutcome, Bundle]],
        evidence: Mapping[str, Mapping[str, Path]] | None = None,
        *,
        measured_at: datetime,
        texts: Mapping[str, Mapping[str, str]] | None = None,
    ) -> dict[str, str]:
        """Record each candidate, refused ones too, as a LoggedModel; model ids by name.

        A LoggedModel holds `bundle.json`, which names the store's folders and digests, the
        candidate's outcome, the evidence summaries (`evidence[name][kind]` is a file) and what
        `texts[name]` has by file name. Same bundle, same release, same judgement: the same
        LoggedModel. Judged otherwise, against a champion that is new for example, it gets one more:
        a promotion's line in the ledger holds the digest of what it read, so that must stay.
        Weights are added when it becomes a version.
        """
        with asking_mlflow("record the candidates"):
            experiment = self.client.get_run(parent).info.experiment_id
            known = self._models(experiment, parent)
            made: dict[str, str] = {}
            for outcome, bundle in candidates:
                if outcome.bundle != bundle.digest:
                    raise ValueError(f"outcome and bundle of {outcome.name} differ in digest")
                more = (texts or {}).get(outcome.name, {})
                recorded = digest_of([outcome, more])
                model = _same_judgement(known, outcome, recorded)
                if model is None:
                    model = self.client.create_logged_model(
                        experiment,
                        name=outcome.name,
                        source_run_id=parent,
                        model_type="bundle",
                        tags=_candidate_tags(outcome),
                        params=_bundle_params(bundle),
                    )
                made[outcome.name] = model.model_id
                judged = {TAG_JUDGED: datetime.now(UTC).isoformat(timespec="milliseconds")}
                self.client.set_logged_model_tags(model.model_id, judged)
                if model.status.name == "READY":
                    continue
                files = (evidence or {}).get(outcome.name, {})
                self._fill_model(
                    parent, model.model_id, outcome, bundle, files, measured_at, more, recorded
                )
            return made

    def has_weights(self, model_id: str, bundle: str) -> bool:
        """Whether the bundle's weights lie in a LoggedModel, whole."""
        with asking_mlflow("look for the weights"):
            return bool(self.client.get_logged_model(model_id).tags.get(_TAG_WEIGHTS) == bundle)

    def add_weights(self, model_id: str, bundle: str, folders: Mapping[str, Path]) -> None:
        """Put folders of weights into a LoggedModel, by name (`target`, `draft`).

        What `models:/NAME@ALIAS` downloads is then all that a server is started from. The mark that
        they are whole goes last.
        """
        with asking_mlflow("store the weights"):
            for name, folder in folders.items():
                self.client.log_model_artifacts(model_id, str(folder), name)
            self.client.set_logged_model_tags(model_id, {_TAG_WEIGHTS: bundle})

    def _fill_model(
        self,
        parent: str,
        model_id: str,
        outcome: CandidateOutcome,
        bundle: Bundle,
        evidence: Mapping[str, Path],
        measured_at: datetime,
        texts: Mapping[str, str],
        recorded: str,
    ) -> None:
        with tempfile.TemporaryDirectory(prefix="pilotage-") as folder:
            written = Path(folder)
            document = {**bundle.model_dump(mode="json"), "digest": bundle.digest}
            _write_json(written / BUNDLE_FILE, document)
            _write_json(written / OUTCOME_FILE, outcome.model_dump(mode="json"))
            for kind, path in evidence.items():
                (written / f"evidence-{kind}.json").write_bytes(path.read_bytes())
            _write_into(written, texts)
            self.client.log_model_artifacts(model_id, folder)
        at = _milliseconds(measured_at)
        metrics = scalar_metrics(outcome.metrics, at, model_id)
        metrics += point_metrics(outcome.latency, at, model_id)
        metrics += kept_rate_metrics(outcome.kept_rate, at, model_id)
        if outcome.emulated is not None:
            metrics += scalar_metrics({"latency.emulated": float(outcome.emulated)}, at, model_id)
        prefixed = [_renamed(metric, f"{outcome.name}.{metric.key}") for metric in metrics]
        self._log(parent, metrics=prefixed)
        self.client.set_logged_model_tags(
            model_id, {**_candidate_tags(outcome), _TAG_RECORDED: recorded}
        )
        self.client.finalize_logged_model(model_id, "READY")

    # -- parts -----------------------------------------------------------------------------

    def _runs(self, experiment: str, condition: str) -> dict[str, tuple[str, str]]:
        """`{stage key: (run id, status)}` of the experiment's runs that meet a condition."""
        return {
            run.data.tags.get(TAG_KEY, ""): (run.info.run_id, run.info.status)
            for run in pages(self.client.search_runs, [experiment], condition)
        }

    def _models(self, experiment: str, parent: str) -> list[Any]:
        condition = f"source_run_id = '{parent}'"
        return list(pages(self.client.search_logged_models, [experiment], condition))

    def _log(
        self,
        run_id: str,
        *,
        metrics: Sequence[Metric] = (),
        params: Mapping[str, Any] | None = None,
        tags: Mapping[str, str] | None = None,
    ) -> None:
        from mlflow.entities import Param, RunTag

        all_params = [Param(clean_name(k), str(v)) for k, v in (params or {}).items()]
        all_tags = [RunTag(name, value) for name, value in _clean_tags(tags or {}).items()]
        longest = max(len(metrics), len(all_params), len(all_tags))
        for start in range(0, longest, _BATCH):
            part = slice(start, start + _BATCH)
            self.client.log_batch(run_id, metrics[part], all_params[part], all_tags[part])

    def _write_texts(self, run_id: str, texts: Mapping[str, str]) -> None:
        if not texts:
            return
        # As one folder: MLflow asks its database where they go for every call.
        with tempfile.TemporaryDirectory(prefix="pilotage-") as folder:
            _write_into(Path(folder), texts)
            self.client.log_artifacts(run_id, folder)


# -- small things ----------------------------------------------------------------------------


def _renamed(metric: Metric, key: str) -> Metric:
    """The same measurement under another name: one parent run holds every candidate's."""
    from mlflow.entities import Metric

    return Metric(
        clean_name(key), metric.value, metric.timestamp, metric.step, model_id=metric.model_id
    )


def quiet_mlflow() -> None:
    """No telemetry, and no line per database migration on a person's screen."""
    os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
    os.environ.setdefault("MLFLOW_LOGGING_LEVEL", "WARNING")
    os.environ.setdefault("MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR", "false")
    # Of a server it prints two lines for every run that ends.
    os.environ.setdefault("MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT", "true")
    logging.getLogger("alembic").setLevel(logging.WARNING)
    # Of a database that is locked or full it writes a page of traceback (MLflow 3.17); the error
    # that it raises then is told by `asking_mlflow`.
    logging.getLogger("mlflow.store.db.utils").setLevel(logging.CRITICAL)


def _same_judgement(known: Iterable[Any], outcome: CandidateOutcome, recorded: str) -> Any | None:
    """The LoggedModel of this judgement, or one that a kill left unfinished; None: a new one."""
    own = [
        model
        for model in known
        if (model.tags.get(TAG_BUNDLE), model.name) == (outcome.bundle, outcome.name)
    ]
    ready = [model for model in own if model.status.name == "READY"]
    same = [model for model in ready if model.tags.get(_TAG_RECORDED) == recorded]
    unfinished = [model for model in own if model not in ready]
    return next(iter([*same, *unfinished]), None)


def _candidate_tags(outcome: CandidateOutcome) -> dict[str, str]:
    return {
        TAG_BUNDLE: outcome.bundle,
        TAG_CANDIDATE: outcome.name,
        TAG_VERDICT: outcome.verdict.value,
        TAG_REASONS: "\n".join(outcome.reasons)[:_TAG_LENGTH],
    }


def _clean_tags(tags: Mapping[str, str]) -> dict[str, str]:
    return {clean_name(name): str(value)[:_TAG_LENGTH] for name, value in tags.items()}


def _bundle_params(bundle: Bundle) -> dict[str, str]:
    return {
        "engine": f"{bundle.engine} {bundle.engine_version}",
        "target": bundle.target.digest,
        "draft": bundle.draft.digest if bundle.draft else "none",
        "num_speculative_tokens": str(bundle.num_speculative_tokens or 0),
        "topology": topology_words(bundle.topology),
    }


def _write_into(folder: Path, texts: Mapping[str, str]) -> None:
    for name, text in texts.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text, encoding="utf-8")


def _write_json(path: Path, content: Any) -> None:
    import json

    path.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def _milliseconds(moment: datetime) -> int:
    return round(moment.timestamp() * 1000)


def _first_line(error: BaseException) -> str:
    # SQLAlchemy 2.0's word about its session comes before the database's own.
    own = "(raised as a result of Query-invoked autoflush"
    lines = [line for line in str(error).splitlines() if not line.startswith(own)]
    return (lines or [type(error).__name__])[0][:300]


def _without_secret(uri: str) -> str:
    """A URI that may be shown: the password of `scheme://user:password@host` is left out."""
    return re.sub(r"(://[^:/@]+):[^@]*@", r"\1:***@", uri)
