"""A managed SGLang from start to end, against a pretend engine.

The pretend engine is a Python script that gets exactly the command line that SGLang would get, and
answers at the paths that sglang 0.5.23 has in its source. It proves this side alone: no SGLang is
here, and none was started.
"""

from __future__ import annotations

import json
import stat
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from registry.errors import InfrastructureError, UserError
from registry.settings import settings
from tasks.engines import vllm_server
from tasks.engines.sglang_server import SglangServer

pytestmark = pytest.mark.alone

PRETEND = """#!{python}
import http.server, json, os, sys
words = sys.argv[1:]
assert words[:2] == ["-m", "sglang.launch_server"], words
mode, config = os.environ["PRETEND"], words[words.index("--config") + 1]
assert oct(os.stat(config).st_mode & 0o777) == "0o600" and "SGLANG_FOREIGN" not in os.environ
key = json.load(open(config))["api-key"]
assert key not in " ".join(words) and "--enable-metrics" in words
if mode == "argument":
    sys.exit("sglang serve: error: unrecognized arguments: --no-such-arg 3")
if mode == "crash":
    sys.exit("RuntimeError: no accelerator is there")
class Handler(http.server.BaseHTTPRequestHandler):
    def answer(self, status, content):
        body = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
    def do_GET(self):
        known = dict.fromkeys(["/ready", "/health", "/server_info"], dict(version="0.5.23"))
        self.answer(200 if self.path in known else 404, known.get(self.path))
    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        if self.headers["Authorization"] != f"Bearer {{key}}":
            return self.answer(401, None)
        self.answer(200, dict(usage=dict(completion_tokens=0 if mode == "no_token" else 1)))
    def log_message(self, *args):
        pass
port = int(words[words.index("--port") + 1])
http.server.ThreadingHTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""


@pytest.fixture(autouse=True)
def _own_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("PILOTAGE_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("SGLANG_FOREIGN", "1")
    monkeypatch.setattr(vllm_server, "LAST_WORDS_WAIT", 5.0)
    settings.cache_clear()
    yield
    settings.cache_clear()


@pytest.fixture
def pretend(tmp_path: Path) -> Path:
    script = tmp_path / "python"
    script.write_text(PRETEND.format(python=sys.executable))
    script.chmod(script.stat().st_mode | stat.S_IXUSR)
    return script


def server(pretend: Path, mode: str) -> SglangServer:
    folder = pretend.parent
    (folder / "config.json").write_text(json.dumps({"model_type": "llama"}))
    return SglangServer(
        folder,
        log=folder / "server.log",
        served_name="m",
        env={"PRETEND": mode},
        python=pretend,
        draft=folder,
        num_speculative_tokens=3,
    )


def test_ready_means_a_token_and_the_key_is_gone_from_the_disk(pretend: Path) -> None:
    with server(pretend, "well") as running:
        running.check_alive()
        assert running.engine_version == "0.5.23"
        assert running.emulated is False and running.quantized is False
        assert not running.key_file.exists()
        pid = running.pid
    assert not psutil.pid_exists(pid)
    assert running.api_key not in running.log.read_text()


@pytest.mark.parametrize(
    ("mode", "error", "why"),
    [
        ("argument", UserError, "SGLang says: unrecognized arguments: --no-such-arg"),
        ("crash", InfrastructureError, "the SGLang server of .* no accelerator is there"),
        ("no_token", InfrastructureError, "generated no token"),
    ],
)
def test_why_it_did_not_start(pretend: Path, mode: str, error: type[Exception], why: str) -> None:
    made = server(pretend, mode)
    with pytest.raises(error, match=f"(?s){why}"), made:
        pass
    assert not made.key_file.exists()


def test_times_of_quantized_targets_stay_unproven(pretend: Path) -> None:
    made = server(pretend, "well")
    quantized = {"model_type": "llama", "quantization_config": {"quant_method": "fp8"}}
    (pretend.parent / "config.json").write_text(json.dumps(quantized))
    with made as running:
        assert running.quantized and running.emulated is None
