"""Secrets in every variable that holds one, a real release, then a search of all that was left."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Self

import pytest

from registry.settings import CHECKOUT
from tests import planted
from tests.planted import ALL, WORDS, leaks, leaks_below, processes_that_know, tables_text
from tests.planted_teacher import teacher

pytest_plugins = ["tests.postgres"]
pytestmark = [pytest.mark.fault, pytest.mark.alone, pytest.mark.timeout(2400)]

RECIPE = "tests/recipes/release_tiny.yaml"
SMALL = [
    "draft=null",
    "prompts.sizes={train: 40, calibration: 8, draft: 8, eval: 24, load: 24}",
    "candidates=[{name: bf16, quantize: bf16, serve: vllm_cpu_2core}]",
    "teacher.model=null",
    "teacher.serve=null",
    "teacher.served_model=m",
    "accuracy.items=24",
    "load.rates=[1.0, 2.0, 3.0]",
]
MAY_KNOW = ("flows.cli", "prefect.server", "uvicorn", "pytest")
"""The driver itself and Prefect's temporary server, which it starts as its own child."""


class Watch:
    """Looks at every process of a home, several times a second, while a command runs."""

    def __init__(self, home: Path) -> None:
        self.seen: dict[str, str] = {}
        self.looks = 0
        self._home, self._end = home, threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._thread.join()

    def _look(self) -> None:
        while not self._end.wait(0.3):
            self.seen |= processes_that_know(self._home, trusted=MAY_KNOW)
            self.looks += 1


@pytest.fixture
def world(tmp_path: Path, postgres_uri: str) -> Iterator[tuple[Path, dict[str, str], str]]:
    home = tmp_path / "home"

    def with_password(word: str) -> str:
        return postgres_uri.replace("postgres@", f"postgres:{word}@")

    env = planted.planted(
        {
            "PILOTAGE_HOME": str(home),
            "PILOTAGE_MLFLOW_URI": with_password(planted.IN_MLFLOW_URI),
            "PILOTAGE_LEDGER_URI": with_password(planted.IN_LEDGER_URI),
            "PILOTAGE_NOTIFY_URL": f"https://hooks.example.com/{planted.IN_NOTIFY_URL}",
            "TMPDIR": str(tmp_path / "tmp"),
        }
    )
    (tmp_path / "tmp").mkdir()
    yield home, env, postgres_uri


def pilotage(
    env: dict[str, str], *words: str, seconds: float = 1500
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "flows.cli", *words],
        cwd=CHECKOUT, env=env, capture_output=True, text=True, timeout=seconds,
    )  # fmt: skip


def student(folder: Path) -> Path:
    """A base of a few training steps: a teacher behind a URL has no tokenizer to share."""
    from tasks import demo_data
    from tasks.engines.subprocesses import run_job
    from tasks.prompt_files import write_jsonl

    corpus = folder / "corpus"
    corpus.mkdir(parents=True)
    write_jsonl(corpus / "pretrain.jsonl", demo_data.generate(0, {"pretrain": 300})["pretrain"])
    job = {"role": "teacher", "seed": 0, "data_dir": str(corpus), "tokenizer_dir": None,
           "steps": 5, "batch_size": 8, "out_dir": str(folder / "model"), "threads": 1,
           "model": {"hidden_size": 128, "intermediate_size": 256, "layers": 3}}  # fmt: skip
    run_job("tasks.engines.tiny_llama", job, log=folder / "log")
    return folder / "model"


def release(url: str, base: Path) -> list[str]:
    given = [*SMALL, f"teacher.url={url}", f"distill.student={{source: path, path: {base}}}"]
    sets = [word for one in given for word in ("--set", one)]
    return ["release", RECIPE, *sets]


def nothing_left(tmp_path: Path, said: subprocess.CompletedProcess[str], database: str) -> None:
    assert leaks((said.stdout + said.stderr).encode()) == []
    assert leaks_below(tmp_path) == []
    assert leaks(tables_text(database)) == []


def test_a_release_and_its_failures_leave_no_secret_anywhere(
    tmp_path: Path, world: tuple[Path, dict[str, str], str]
) -> None:
    home, env, database = world
    base = student(tmp_path / "student")
    with teacher(key=WORDS["PILOTAGE_TEACHER_API_KEY"]) as endpoint:
        # First it refuses the key and says it back, as some do.
        endpoint.refuses = True
        refused = pilotage(env, *release(endpoint.url, base))
        assert refused.returncode == 4, refused.stderr[-3000:]
        assert "Incorrect API key provided: ***" in refused.stderr
        nothing_left(tmp_path, refused, database)

        endpoint.refuses = False
        with Watch(home) as watch:
            done = pilotage(env, *release(endpoint.url, base))
        assert done.returncode in (0, 10, 11), done.stdout[-2000:] + done.stderr[-4000:]
        assert endpoint.answered >= 40, "the teacher was asked with its key"
        assert watch.looks > 10
        assert watch.seen == {}
        assert list(home.glob("reports/*")), "the release ended with a report"
        nothing_left(tmp_path, done, database)


def test_a_backend_that_is_gone_is_named_without_its_password(
    tmp_path: Path, world: tuple[Path, dict[str, str], str]
) -> None:
    _home, env, database = world
    for uri in (
        f"postgresql://postgres:{planted.IN_MLFLOW_URI}@127.0.0.1:9/none",
        f"http://someone:{planted.IN_MLFLOW_URI}@127.0.0.1:9",
        f"mysql+pymysql://someone:{planted.IN_MLFLOW_URI}@127.0.0.1:9/none",
    ):
        gone = {**env, "PILOTAGE_MLFLOW_URI": uri, "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0"}
        said = pilotage(gone, "ledger", "tiny-assistant", seconds=300)
        said_too = pilotage(gone, "promote", "tiny-assistant@candidate", seconds=300)
        for one in (said, said_too):
            assert one.returncode in (0, 2, 4), one.stderr
            assert "Traceback" not in one.stderr
            nothing_left(tmp_path, one, database)


def test_the_search_finds_what_is_there(tmp_path: Path) -> None:
    import base64
    import gzip

    word = ALL[0]
    for number, content in enumerate(
        [
            word.encode(),
            gzip.compress(b"x" + word.encode()),
            *(base64.b64encode(b"y" * n + word.encode() + b"zz") for n in range(3)),
        ]
    ):
        (tmp_path / str(number)).write_bytes(content)
    assert len(leaks_below(tmp_path)) == 5
    process = subprocess.Popen(["sleep", "30"], env={"A": str(tmp_path), "B": word})
    try:
        time.sleep(0.2)
        assert list(processes_that_know(tmp_path).values()) == [f"in its environment: {[word]}"]
    finally:
        process.kill()
        process.wait()
