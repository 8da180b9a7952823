"""Promotions as production has them: MLflow behind a server, the ledger in a database beside it."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from eval_suites.loader import load_policy
from registry.alias_moves import Aliases
from registry.errors import InfrastructureError, UserError
from registry.ledger import Ledger
from registry.settings import CHECKOUT, settings
from registry.versions import CANDIDATE, CHAMPION, PREVIOUS
from tasks.bundles import aliases_of_model, tracker, weights_as_gated
from tasks.champion import RECIPE_FILE, recorded_policy
from tests.pretend_smoke import Engine, back, candidate, promoting
from tests.promotion_builders import MODEL, held, is_sound


@dataclass
class Server:
    """`mlflow server` on a port of 127.0.0.1, which can be killed and started again."""

    folder: Path
    port: int
    process: subprocess.Popen[bytes] | None = None

    @property
    def uri(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        words = ["server", "--host", "127.0.0.1", "--port", str(self.port), "--workers", "1",
                 "--backend-store-uri", f"sqlite:///{self.folder / 'server.db'}",
                 "--artifacts-destination", str(self.folder / "artifacts")]  # fmt: skip
        with (self.folder / "log").open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "mlflow", *words],
                cwd=self.folder, stdout=log, stderr=log, start_new_session=True,
                env={**os.environ, "PYTHONPATH": str(CHECKOUT)},
            )  # fmt: skip
        deadline = time.monotonic() + 120
        while True:
            try:
                with urllib.request.urlopen(f"{self.uri}/health", timeout=5):
                    return
            except OSError:
                told = (self.folder / "log").read_text(errors="replace")[-2000:]
                assert self.process.poll() is None, told
                assert time.monotonic() < deadline, told
                time.sleep(0.2)

    def kill(self) -> None:
        if self.process is not None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
            self.process = None


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with socket.socket() as tried:
        tried.bind(("127.0.0.1", 0))
        port = tried.getsockname()[1]
    made = Server(tmp_path_factory.mktemp("server"), port)
    try:
        made.start()
        yield made
    finally:
        made.kill()


def test_promoted_rolled_back_and_fetched_through_a_server(
    server: Server, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PILOTAGE_MLFLOW_URI", server.uri)
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    settings.cache_clear()
    engine = Engine()
    monkeypatch.setattr("flows.promote.ask_smoke", engine)
    monkeypatch.setattr("flows.rollback.ask_smoke", engine)
    one = candidate(1)
    with pytest.raises(UserError, match="PILOTAGE_LEDGER_URI") as refused:
        promoting(one.digest)
    assert "postgresql://" in refused.value.problems[0].remedy
    assert engine.asked == []
    assert not tracker().client.search_registered_models()

    monkeypatch.setenv("PILOTAGE_LEDGER_URI", f"sqlite:///{home / 'ledger.db'}")
    settings.cache_clear()
    aliases = aliases_of_model(MODEL)
    assert promoting(one.digest).version == 1
    two = candidate(2)
    assert promoting(two.digest).before == 1
    assert held(aliases) == {CANDIDATE: 2, CHAMPION: 2, PREVIOUS: 1}
    is_sound(aliases)
    assert_downloads(2)

    # The store is gone: what was promoted is fetched out of the server.
    shutil.rmtree(home / "store")
    engine.then = lambda reference: weights_as_gated(one, reference)
    assert back().version == 1
    assert (one.target.path / "model.safetensors").read_bytes() == bytes([1]) * 64
    engine.then = lambda reference: None

    assert_killed_server_is_told(server, aliases, engine, monkeypatch)


def test_the_policy_of_a_run_is_read_through_a_server_that_mlflow_was_not_told_of(
    server: Server, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    import mlflow

    monkeypatch.setenv("PILOTAGE_MLFLOW_URI", server.uri)
    settings.cache_clear()
    policy = load_policy("tests/recipes/policy_tiny.yaml")
    client = tracker().client
    run = client.create_run(client.create_experiment("policies")).info.run_id
    mlflow.set_tracking_uri(f"sqlite:///{tmp_path / 'another.db'}")
    assert recorded_policy(run) is None
    client.log_text(run, json.dumps({"policy": policy.model_dump(mode="json")}), RECIPE_FILE)
    assert recorded_policy(run) == policy


def assert_downloads(number: int) -> None:
    import mlflow

    mlflow.set_tracking_uri(tracker().uri)
    got = Path(mlflow.artifacts.download_artifacts(f"models:/{MODEL}@{CHAMPION}"))
    assert (got / "target/model.safetensors").read_bytes() == bytes([number]) * 64
    assert (got / "bundle.json").is_file()
    assert any((got / "deploy").iterdir())


def assert_killed_server_is_told(
    server: Server, aliases: Aliases, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before the line nothing is decided; after it the next one finishes."""
    three = candidate(3)
    engine.then = lambda reference: server.kill()
    with pytest.raises(InfrastructureError):
        promoting(three.digest, reason="at night")
    assert aliases.ledger.entries(MODEL)[-1].action == "register"
    server.start()
    engine.then = lambda reference: None

    whole = Ledger.append

    def last_thing_seen(*words: object) -> object:
        done = whole(*words)  # type: ignore[arg-type]
        server.kill()
        return done

    with monkeypatch.context() as patched:
        patched.setattr(Ledger, "append", last_thing_seen)
        with pytest.raises(InfrastructureError, match="could not"):
            promoting(three.digest, reason="at night")
    server.start()
    assert held(aliases)[CHAMPION] == 1
    engine.asked = []
    done = promoting(three.digest, reason="at night")
    assert (done.version, done.before, done.changed) == (3, 1, False)
    assert engine.asked == [f"{MODEL}@{CHAMPION}"]
    assert held(aliases)[CHAMPION] == 3
    is_sound(aliases)
