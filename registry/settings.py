"""Every setting of this machine, each with one environment variable (prefix `PILOTAGE_`).

What differs between machines lives here; what differs between releases lives in recipes.
`docs/settings.md` is checked against this file by a test.
"""

from __future__ import annotations

import difflib
import os
from functools import lru_cache
from pathlib import Path
from typing import Literal

from pydantic import Field, SecretStr, ValidationError
from pydantic_settings import BaseSettings, SettingsConfigDict

from registry.errors import Problem, UserError

CHECKOUT = Path(__file__).resolve().parents[1]

LONGEST = 100_000_000.0
"""Seconds, three years. Timers refuse much longer times, in the middle of a run."""

NOT_IN_HOME = "?%#"
"""In the address of a SQLite file they end its path, or stand for other letters: the database of
`a?b` is a file `a`, beside the home and the same for all such homes."""

MLFLOW = r"^((https?|sqlite|postgresql|mysql|mssql)(\+\w+)?://\S.*)?$"
"""A tracking server or a database that MLflow can use, or none."""

DEPLOYMENT = r"^([^/]+/[^/]+)?$"
"""FLOW/DEPLOYMENT, as Prefect names one, or none."""


class Settings(BaseSettings):
    """Read from the environment when first asked for; frozen afterwards."""

    model_config = SettingsConfigDict(
        env_prefix="PILOTAGE_", env_ignore_empty=True, frozen=True, extra="ignore"
    )

    home: Path = Field(
        default=CHECKOUT / ".pilotage",
        description="Folder of everything that is made: store, databases, reports, logs.",
    )
    serve_python: Path = Field(
        default=CHECKOUT / ".venv-serve" / "bin" / "python",
        description="Python of the serve environment (the one that can `import vllm`).",
    )
    sglang_python: Path | None = Field(
        default=None,
        description="Python that can `import sglang`, for serve recipes with `engine: sglang`.",
    )
    mlflow_uri: str = Field(
        default="",
        pattern=MLFLOW,
        description="MLflow tracking URI. Empty: SQLite under PILOTAGE_HOME.",
    )
    ledger_uri: str = Field(
        default="",
        description="Database URL of the ledger. Empty: the tracking database; needed where "
        "PILOTAGE_MLFLOW_URI is a server's, which lets nobody into its database.",
    )
    store_url: str = Field(
        default="",
        description="fsspec URL of the store that machines share, e.g. s3://bucket/prefix or "
        "file:///shared/pilotage. Empty: this machine alone.",
    )
    actor: str = Field(
        default="",
        max_length=200,
        description="Who the ledger names for a promotion or a rollback. Empty: the login name.",
    )
    teacher_api_key: SecretStr = Field(
        default=SecretStr(""),
        description="API key sent to a teacher that is reached by URL. Never logged.",
    )
    judge_api_key: SecretStr = Field(
        default=SecretStr(""),
        description="API key sent to the model that judges a teacher's answers. Never logged.",
    )
    engine_start_timeout: float = Field(
        default=600.0,
        gt=0,
        le=LONGEST,
        description="Seconds a managed server may take until it has generated its first token.",
    )
    stage_timeout: float = Field(
        default=6 * 3600.0,
        gt=0,
        le=LONGEST,
        description="Seconds one heavy stage may run before its process tree is ended.",
    )
    stop_grace: float = Field(
        default=10.0,
        gt=0,
        le=LONGEST,
        description="Seconds between the polite and the hard signal when processes are ended.",
    )
    threads: int = Field(
        default=0,
        ge=0,
        description="CPU threads of a training or quantization process. 0: one per core.",
    )
    device_wait: float = Field(
        default=12 * 3600.0,
        ge=0,
        le=LONGEST,
        description="Seconds a heavy stage waits for a GPU (or the CPU) that another run holds.",
    )
    device_locks: str = Field(
        default="",
        description="Folder of the files that lock this machine's devices. Empty: /run/lock or "
        "/tmp, the first in which everybody may write.",
    )
    release_deployment: str = Field(
        default="",
        pattern=DEPLOYMENT,
        description="Deployment (release/manual) that a nightly asks for one run per recipe. "
        "Empty: its releases run in its own process, one after the other.",
    )
    candidate_deployment: str = Field(
        default="",
        pattern=DEPLOYMENT,
        description="Deployment (candidate/one) that measures a release's candidates, one run "
        "each. Empty: the release measures them itself.",
    )
    candidate_start: float = Field(
        default=1800.0,
        gt=0,
        le=LONGEST,
        description="Seconds that runs of candidates may wait for a worker while none of them "
        "runs; then the release measures these candidates itself.",
    )
    candidate_timeout: float = Field(
        default=24 * 3600.0,
        gt=0,
        le=LONGEST,
        description="Seconds that a release waits for the runs of its candidates in all.",
    )

    smoke_deployment: str = Field(
        default="",
        pattern=DEPLOYMENT,
        description="Deployment that asks a promotion's smoke prompts, e.g. smoke/on-gpu. Empty: "
        "asked in the process of the promotion.",
    )
    smoke_wait: float = Field(
        default=6 * 3600.0,
        gt=0,
        le=LONGEST,
        description="Seconds a promotion waits for PILOTAGE_SMOKE_DEPLOYMENT to answer.",
    )
    notify_url: SecretStr = Field(
        default=SecretStr(""),
        description="Webhook that is told of refusals, promotions and open questions. A secret.",
    )
    notify_kind: Literal["slack", "dingtalk", "feishu"] = Field(
        default="slack", description="What stands behind PILOTAGE_NOTIFY_URL."
    )

    prefect_port: int = Field(
        default=4200,
        ge=1,
        le=65_535,
        description="Port of the Prefect server that `pilotage up` starts, on 127.0.0.1.",
    )
    mlflow_port: int = Field(
        default=5000,
        ge=1,
        le=65_535,
        description="Port of the MLflow server that `pilotage up` starts, on 127.0.0.1.",
    )

    @property
    def store_dir(self) -> Path:
        return self.home / "store"

    @property
    def downloads_dir(self) -> Path:
        """Weights fetched out of MLflow, by digest, where the store does not have them."""
        return self.home / "downloads"

    @property
    def logs_dir(self) -> Path:
        return self.home / "logs"

    @property
    def reports_dir(self) -> Path:
        return self.home / "reports"

    @property
    def run_dir(self) -> Path:
        """Where running child processes are noted, so that a later run can end leftovers."""
        return self.home / "run"

    @property
    def tracking_uri(self) -> str:
        return self.mlflow_uri or f"sqlite:///{(self.home / 'mlflow.db').resolve()}"

    @property
    def tracking_file(self) -> Path | None:
        """MLflow's SQLite file; None where its database is no file."""
        if not self.tracking_uri.startswith("sqlite:///"):
            return None
        return Path(self.tracking_uri.removeprefix("sqlite:///"))

    @property
    def mlartifacts_dir(self) -> Path:
        return self.home / "mlartifacts"

    @property
    def prefect_home(self) -> Path:
        return self.home / "prefect"

    @property
    def cpu_threads(self) -> int:
        return self.threads or len(os.sched_getaffinity(0))


@lru_cache(maxsize=1)
def settings() -> Settings:
    """The settings of this process. Tests call `settings.cache_clear()` after changing them."""
    if misspelt := _misspelt():
        raise UserError(misspelt)
    try:
        loaded = Settings()
    except ValidationError as error:
        raise UserError(
            [
                Problem(
                    f"PILOTAGE_{str(one['loc'][0]).upper()}", one["msg"], "see docs/settings.md"
                )
                for one in error.errors()
            ]
        ) from None
    try:
        home = loaded.home.expanduser().resolve()
        _check_home(str(home))
        home.mkdir(parents=True, exist_ok=True)
    except (OSError, RuntimeError) as error:
        raise UserError.at(
            f"PILOTAGE_HOME={loaded.home}", str(error), "name a folder that can be written"
        ) from None
    loaded = loaded.model_copy(update={"home": home})
    return loaded.model_copy(update={"ledger_uri": loaded.ledger_uri or loaded.tracking_uri})


def _check_home(path: str) -> None:
    odd = sorted({one for one in path if one in NOT_IN_HOME or not one.isprintable()})
    if odd:
        what = f"holds {', '.join(map(ascii, odd))}, which the address of a database cannot"
        raise UserError.at(f"PILOTAGE_HOME={path!a}", what, "name another folder")


def _misspelt() -> list[Problem]:
    """Variables that are almost a setting: PILOTAGE_MLFLOW_URL would be ignored without a word."""
    known = {f"PILOTAGE_{name.upper()}" for name in Settings.model_fields}
    problems = []
    for name in sorted(os.environ):
        near = difflib.get_close_matches(name, known, n=1, cutoff=0.9)
        if name.startswith("PILOTAGE_") and near and near[0] != name:
            problems.append(Problem(name, "is no setting", f"did you mean {near[0]}?"))
    return problems
