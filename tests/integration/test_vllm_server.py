"""A managed server from start to end: against a pretend engine for every fault, and a real one.

The pretend engine is a Python script that stands in for the serve environment's Python; it gets
exactly the command line that vLLM would get.
"""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from pydantic import SecretStr

from recipes.schema import Sampling
from registry.errors import Infeasible, InfrastructureError, UserError
from registry.settings import settings
from tasks.engines import vllm_server
from tasks.engines.openai_chat import ChatRequest, Endpoint, generate
from tasks.engines.ports import free_port
from tasks.engines.subprocesses import run_job, wait_until
from tasks.engines.vllm_server import VllmServer
from tests.processes import gone

pytestmark = pytest.mark.alone

PRETEND = """#!{python}
import http.server, json, os, sys, time
words = sys.argv[1:]
assert words[:3] == ["-m", "vllm.entrypoints.cli.main", "serve"], words
port, mode = int(words[words.index("--port") + 1]), os.environ["PRETEND"]
key = os.environ["VLLM_API_KEY"]
assert os.environ["HF_HUB_OFFLINE"] == os.environ["VLLM_NO_USAGE_STATS"] == "1"
if mode == "argument":
    sys.exit("main.py: error: unrecognized arguments: --no-such-arg 3")
if mode == "silent":
    time.sleep(600)
if mode == "crash":
    sys.exit("OSError: [Errno 28] No space left on device")
print("(EngineCore pid=1) INFO 11-29 21:20:21 [k.py:1] CPU KV cache size: 524,288 tokens, Max")
sys.stdout.flush()
class Handler(http.server.BaseHTTPRequestHandler):
    dead = False
    def answer(self, status, content):
        body = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
    def do_GET(self):
        if self.path == "/health":
            self.answer(503 if Handler.dead else 200, b"")
        elif self.path == "/version":
            self.answer(200, dict(version="0.32.0"))
        elif self.path == "/metrics":
            self.answer(200, b"# TYPE asked_total counter\\nasked_total 1.0\\n")
        elif self.path == "/die":
            Handler.dead = True
            self.answer(200, b"")
    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        if self.headers["Authorization"] != f"Bearer {{key}}":
            return self.answer(401, dict(error="Unauthorized"))
        if mode == "no_template" and self.path == "/v1/chat/completions":
            return self.answer(400, dict(error=dict(message="no chat template")))
        if mode == "no_kernel":
            Handler.dead = True
            print("AttributeError: '_OpNamespace' '_C' object has no attribute 'cpu_gemm_wna16'")
            sys.stdout.flush()
            return self.answer(500, dict(error="EngineCore encountered an issue"))
        if mode == "no_token":
            return self.answer(200, dict(choices=[], usage=dict(completion_tokens=0)))
        self.answer(200, dict(usage=dict(completion_tokens=1)))
    def log_message(self, *args):
        pass
http.server.ThreadingHTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""


@pytest.fixture(autouse=True)
def _own_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("PILOTAGE_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(vllm_server, "LAST_WORDS_WAIT", 5.0)
    settings.cache_clear()
    yield
    settings.cache_clear()


@pytest.fixture
def pretend(tmp_path: Path) -> Path:
    script = tmp_path / "python"
    script.write_text(PRETEND.format(python=sys.executable))
    script.chmod(0o755)
    return script


def server(pretend: Path, mode: str) -> VllmServer:
    return VllmServer(
        pretend.parent,
        log=pretend.parent / "server.log",
        served_name="m",
        env={"PRETEND": mode, "HF_HUB_OFFLINE": "0"},
        python=pretend,
    )


def left_over(pretend: Path) -> list[int]:
    """Processes that still run the pretend engine."""
    return [
        process.pid
        for process in psutil.process_iter(["cmdline"])
        if str(pretend) in (process.info["cmdline"] or [])
    ]


@pytest.mark.parametrize("mode", ["well", "no_template"])
def test_ready_means_a_token(pretend: Path, mode: str) -> None:
    with server(pretend, mode) as running:
        assert running.kv_cache_tokens == 524_288
        assert running.engine_version == "0.32.0"
        assert running.startup_seconds > 0
        assert running.url == f"http://127.0.0.1:{running.port}/v1"
        assert running.metrics() == {"asked_total": 1.0}
        running.check_alive()
        shown = subprocess.run(["ps", "-ewwo", "args"], capture_output=True, text=True).stdout
        assert str(running.port) in shown
        assert running.api_key not in shown + repr(running)
        assert running.api_key not in running.log.read_text()
    assert left_over(pretend) == []
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind(("127.0.0.1", running.port))


@pytest.mark.parametrize(
    ("mode", "kind", "said"),
    [
        ("no_kernel", Infeasible, r"^AttributeError: .*'cpu_gemm_wna16'$"),
        ("argument", UserError, r"unrecognized arguments: --no-such-arg"),
        ("crash", InfrastructureError, r"No space left on device(.|\n)*server\.log"),
        ("no_token", InfrastructureError, r"generated no token"),
    ],
)
def test_a_failed_start_says_whose_fault_it_is(
    pretend: Path, mode: str, kind: type[Exception], said: str
) -> None:
    with pytest.raises(kind) as failure, server(pretend, mode):
        pass
    assert re.search(said, str(failure.value))
    assert left_over(pretend) == []


def test_a_server_that_never_answers_is_given_up(
    pretend: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PILOTAGE_ENGINE_START_TIMEOUT", "1.5")
    settings.cache_clear()
    started = time.monotonic()
    with pytest.raises(InfrastructureError, match="not ready after 2 s"), server(pretend, "silent"):
        pass
    assert time.monotonic() - started < 30
    assert left_over(pretend) == []


def test_an_engine_that_dies_later_is_noticed(pretend: Path) -> None:
    with server(pretend, "well") as running:
        running._get("/die")
        with pytest.raises(InfrastructureError, match="no longer healthy"):
            running.check_alive()
    with server(pretend, "well") as running:
        os.kill(running._started.pid, signal.SIGKILL)
        assert wait_until(lambda: running._started.poll() is not None, 10)
        with pytest.raises(InfrastructureError, match="ended"):
            running.check_alive()


def test_a_port_taken_in_between_is_replaced(
    pretend: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.socket() as stranger:
        stranger.bind(("127.0.0.1", 0))
        stranger.listen()
        taken = stranger.getsockname()[1]
        ports = iter([taken, free_port()])
        monkeypatch.setattr(vllm_server, "free_port", lambda: next(ports))
        with server(pretend, "well") as running:
            assert running.port != taken


def test_a_port_taken_each_time_is_an_infrastructure_fault(
    pretend: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.socket() as stranger:
        stranger.bind(("127.0.0.1", 0))
        stranger.listen()
        monkeypatch.setattr(vllm_server, "free_port", lambda: stranger.getsockname()[1])
        with (
            pytest.raises(InfrastructureError, match="Address already in use"),
            server(pretend, "well"),
        ):
            pass
    assert left_over(pretend) == []


def test_a_missing_serve_environment_is_named(tmp_path: Path) -> None:
    missing = VllmServer(
        tmp_path, log=tmp_path / "x.log", served_name="m", python=tmp_path / "nowhere"
    )
    with pytest.raises(UserError, match="make env"), missing:
        pass


# -- the real engine -------------------------------------------------------------------------

QUICK = {
    "enforce-eager": True,
    "max-model-len": 256,
    "kv-cache-memory-bytes": 64 * 2**20,
    "distributed-executor-backend": "uni",
}
QUICK_ENV = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "OMP_NUM_THREADS": "1"}


@pytest.fixture(scope="module")
def random_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("random_llama")
    run_job("tasks.engines.random_llama", {"out": str(folder / "model")}, log=folder / "job.log")
    return folder / "model"


def test_real_engine_serves_counts_and_leaves_nothing(random_llama: Path, tmp_path: Path) -> None:
    running = VllmServer(
        random_llama, log=tmp_path / "vllm.log", served_name="m", engine_args=QUICK, env=QUICK_ENV
    )
    with running:
        family = psutil.Process(running._started.pid).children(recursive=True)
        assert running.engine_version
        # 2 (K, V) x 2 layers x 2 heads x 32 values x 2 bytes, in whole blocks.
        assert running.kv_cache_tokens == 64 * 2**20 // 512
        before = running.metrics()["vllm:generation_tokens_total"]
        requests = [
            ChatRequest(
                id=str(number),
                messages=[{"role": "user", "content": f"order {number}"}],
                sampling=Sampling(max_tokens=4, seed=1),
            )
            for number in range(6)
        ]
        endpoint = Endpoint(url=running.url, model="m", api_key=SecretStr(running.api_key))
        results = generate(
            requests, endpoint, concurrency=3, max_retry_wait=5.0, request_timeout=60.0
        )
        assert {result.state for result in results} == {"done"}
        asked = sum(result.completion_tokens or 0 for result in results)
        assert running.metrics()["vllm:generation_tokens_total"] - before == asked

        stranger = endpoint.model_copy(update={"api_key": SecretStr("wrong")})
        refused = generate(
            requests[:1], stranger, concurrency=1, max_retry_wait=5.0, request_timeout=60.0
        )
        # No fault of the row: it is asked again when the key is right, and not again with this one.
        assert (refused[0].state, refused[0].attempts) == ("pending", 1)
        assert "HTTP 401" in refused[0].reason

        # The engine overwrites its environment with its title, and its front is gone: it is
        # still found. (Stopped first, so that it cannot end by itself.)
        engine = next(child for child in family if "EngineCore" in child.name())
        engine.suspend()
        os.kill(running._started.pid, signal.SIGKILL)
        assert wait_until(lambda: running._started.poll() is not None, 10)
        with pytest.raises(InfrastructureError, match="ended"):
            running.check_alive()
        assert engine.is_running()
    assert all(map(gone, family))


def test_real_engine_names_what_it_cannot_do(random_llama: Path, tmp_path: Path) -> None:
    args = {**QUICK, "kv-cache-memory-bytes": 4096}
    running = VllmServer(
        random_llama, log=tmp_path / "vllm.log", served_name="m", engine_args=args, env=QUICK_ENV
    )
    with pytest.raises(Infeasible, match="No available memory for the cache blocks"), running:
        pass
