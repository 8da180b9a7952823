"""`deploy/` beside what will read it: the installed engine's parser, and a server to be probed."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
import yaml

from registry.deploy_attention import GENERATIONS, attention_backend
from registry.deploy_parts import part_words
from registry.deployables import render, write
from registry.settings import settings
from registry.topology import ROLES
from tests.mock_server import MockServer, serving
from tests.unit.deploy_builders import deployment, fake_vllm, on_gpus, path_with, said
from tests.unit.test_deploy_parts import ON_CPU

PARSE = """
import json, sys
from vllm.entrypoints.launchers.cli_args import make_arg_parser, validate_parsed_serve_args
from vllm.utils.argparse_utils import FlexibleArgumentParser
parser = make_arg_parser(FlexibleArgumentParser())
asked = json.load(sys.stdin)
found = []
for words in asked["commands"]:
    args = parser.parse_args(words)
    args.model = args.model_tag
    validate_parsed_serve_args(args)
    found.append({name: getattr(args, name) for name in asked["names"]})
attention = [parser.parse_args(["m", *words]).attention_config for words in asked["attention"]]
backends = [parser.parse_args(["m", *words]).attention_backend for words in asked["attention"]]

# Choosing needs no GPU: the platform is asked as if one were there.
import importlib.machinery, types
from unittest import mock
sys.modules.setdefault("vllm._C_stable_libtorch", types.ModuleType("vllm._C_stable_libtorch"))
from vllm.platforms import cuda
from vllm.platforms.interface import DeviceCapability
from vllm.v1.attention.backends import fa_utils
from vllm.v1.attention.backends.registry import AttentionBackendEnum
AttentionBackendEnum.FLASH_ATTN.get_class()
for name in ("flashinfer", "flashinfer.decode", "flashinfer.prefill", "flashinfer.utils"):
    if name not in sys.modules:
        sys.modules[name] = mock.MagicMock(__spec__=importlib.machinery.ModuleSpec(name, None))
interface = types.ModuleType("vllm.vllm_flash_attn.flash_attn_interface")
interface.fa_version_unsupported_reason = str
sys.modules["vllm.vllm_flash_attn.flash_attn_interface"] = interface
chosen = []
for major, minor in asked["capabilities"]:
    capability = DeviceCapability(major, minor)
    backend = next(
        backend
        for backend in cuda._get_backend_priorities(False, capability)
        if backend.get_class().supports_compute_capability(capability)
    )
    version = None
    if backend is AttentionBackendEnum.FLASH_ATTN:
        platform = mock.Mock()
        platform.is_xpu.return_value = platform.is_rocm.return_value = False
        platform.get_device_capability.return_value = capability
        have = {2: major >= 8, 3: major == 9, 4: major in (9, 10, 11)}
        interface.is_fa_version_supported = have.__getitem__
        with mock.patch.object(fa_utils, "current_platform", platform):
            version = fa_utils.get_flash_attn_version(head_size=128)
    chosen.append([backend.name, version])
json.dump({"found": found, "attention": list(map(str, attention)),
           "backends": list(map(str, backends)), "chosen": chosen}, sys.stdout, default=str)
"""
NAMES = [
    "model",
    "host",
    "port",
    "served_model_name",
    "max_model_len",
    "enforce_eager",
    "enable_prefix_caching",
    "hf_overrides",
    "tensor_parallel_size",
    "kv_cache_memory_bytes",
    "speculative_config",
    "kv_transfer_config",
]
CAPABILITIES = [
    tuple(int(digit) for digit in capability.split("."))
    for _, capabilities, _ in GENERATIONS
    for capability in capabilities.split(", ")
]


def test_the_installed_engine_reads_every_command(tmp_path: Path) -> None:
    """One process of the serve environment for all of it: its imports take ten seconds."""
    args = {
        "max-model-len": 512,
        "enforce-eager": True,
        "enable-prefix-caching": False,
        "hf-overrides": {"rope_scaling": {"type": 'it\'s "linear" $HOME'}},
        "kv-cache-memory-bytes": 2**29,
    }
    cases = [deployment("Freight's $(best)", args=args), on_gpus(draft=False)]
    commands = []
    for number, case in enumerate(cases):
        place, engine = tmp_path / f"it's {number}", tmp_path / f"bin{number}"
        for part in ("target", "draft"):
            (place / part).mkdir(parents=True)
        write(case, place)
        fake_vllm(engine, case.bundle.engine_version)
        script = place / "deploy" / "vllm-serve.sh"
        subprocess.run([script], env={"PATH": path_with(engine)}, check=True, timeout=30)
        commands.append(said(engine)[0][1:])
    compose = yaml.safe_load(render(cases[0])["compose.yaml"])["services"]["vllm"]
    commands.append([word.replace("$$", "$") for word in compose["command"][1:]])
    commands += [part_words(ON_CPU, role, "/bundle/x", 8000, "0.0.0.0")[1:] for role in ROLES]
    taken = [attention_backend(capability) for capability in CAPABILITIES]
    asked = {
        "commands": commands,
        "names": NAMES,
        "attention": [one.words.split() for one in taken],
        "capabilities": CAPABILITIES,
    }
    done = subprocess.run(
        [settings().serve_python, "-c", PARSE],
        input=json.dumps(asked),
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    answer = json.loads(done.stdout[done.stdout.index('{"found"') :])
    script, gpus, container, *parts = answer["found"]
    for part, role in zip(parts, ("kv_producer", "kv_consumer"), strict=True):
        transfer = part["kv_transfer_config"]
        for said_of in ("NixlConnector", role, "kv_buffer_device='cpu'", "policy='fail'"):
            assert said_of in transfer
        assert part["speculative_config"]["model"] == "/bundle/x/draft"
    assert script["model"] == str(tmp_path / "it's 0" / "target")
    assert script["served_model_name"] == ["Freight's $(best)"]
    assert (script["host"], script["port"]) == ("127.0.0.1", 8000)
    assert (script["max_model_len"], script["enforce_eager"]) == (512, True)
    assert script["enable_prefix_caching"] is False
    assert script["hf_overrides"] == args["hf-overrides"]
    assert script["kv_cache_memory_bytes"] == 2**29
    assert script["speculative_config"] == {
        "method": "eagle3",
        "model": str(tmp_path / "it's 0" / "draft"),
        "num_speculative_tokens": 3,
    }
    assert (gpus["tensor_parallel_size"], gpus["speculative_config"]) == (2, None)
    assert container["model"] == "/bundle/target" and container["host"] == "0.0.0.0"
    assert container["speculative_config"]["model"] == "/bundle/draft"
    assert {**container, **{name: script[name] for name in ("model", "host")}} == {
        **script,
        "speculative_config": container["speculative_config"],
    }
    assert answer["chosen"] == [[one.backend, one.flash_attn_version] for one in taken]
    for one, config, backend in zip(taken, answer["attention"], answer["backends"], strict=True):
        assert one.backend in config + backend
        if one.flash_attn_version:
            assert f"flash_attn_version={one.flash_attn_version}" in config


# -- the probe -------------------------------------------------------------------------------


def probe(url: str, folder: Path, **env: str) -> tuple[int, str]:
    """Exit status and last line of the rendered probe."""
    file = folder / "probe.py"
    file.write_text(render(deployment())["probe.py"])
    done = subprocess.run(
        [sys.executable, "-I", str(file)],
        env={
            "PROBE_URL": url,
            "PROBE_MODEL": "m",
            "PROBE_STATE": str(folder / "state"),
            "PROBE_CGROUP": str(folder / "cgroup"),
            "PROBE_TIMEOUT": "5",
            "HTTP_PROXY": "http://127.0.0.1:9",
            **env,
        },
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.stderr == ""
    return done.returncode, done.stdout.strip()


@pytest.fixture(scope="module")
def healthy() -> Iterator[str]:
    with serving(MockServer(service=0.001, exponential=False, tokens=1)) as url:
        yield url


@contextmanager
def answering(answers: dict[str, tuple[int, Any]]) -> Iterator[tuple[str, list[str]]]:
    """A server with fixed answers by path, and the keys that it was sent."""
    keys: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def answer(self) -> None:
            self.rfile.read(int(self.headers.get("Content-Length") or 0))
            keys.append(self.headers.get("Authorization", ""))
            status, content = answers.get(self.path, (404, {}))
            body = content if isinstance(content, bytes) else json.dumps(content).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        do_GET = do_POST = answer

        def log_message(self, *args: object) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", keys
    finally:
        server.shutdown()
        server.server_close()
        thread.join(10)


ONE_TOKEN = b'data: {"choices": [], "usage": {"completion_tokens": 1}}\n\ndata: [DONE]\n\n'


def test_a_server_that_generates_a_token_is_ready(healthy: str, tmp_path: Path) -> None:
    assert probe(healthy, tmp_path) == (0, "ready")


def test_a_server_without_a_token_is_not_ready(tmp_path: Path) -> None:
    with serving(MockServer(service=0.001, exponential=False, tokens=0)) as url:
        assert probe(url, tmp_path) == (1, "not ready: the engine answered without a token")
    with serving(MockServer(error_share=1.0)) as url:
        assert probe(url, tmp_path) == (1, "not ready: /v1/chat/completions answered 503")
    status, line = probe("http://127.0.0.1:9", tmp_path)
    assert status == 1 and "URLError" in line
    with serving(MockServer(service=30, exponential=False)) as url:
        status, line = probe(url, tmp_path, PROBE_TIMEOUT="0.5")
    assert status == 1 and "timed out" in line


def test_a_model_without_a_chat_template_is_asked_to_go_on(tmp_path: Path) -> None:
    answers = {"/v1/chat/completions": (400, {}), "/v1/completions": (200, ONE_TOKEN)}
    with answering(answers) as (url, keys):
        assert probe(url, tmp_path, VLLM_API_KEY="k") == (0, "ready")
    assert keys == ["Bearer k", "Bearer k"]
    with answering({}) as (url, _):
        assert probe(url, tmp_path) == (1, "not ready: /v1/completions answered 404")


def test_another_engine_version_is_not_ready(tmp_path: Path) -> None:
    answers = {"/version": (200, {"version": "0.32.0"}), "/v1/chat/completions": (200, ONE_TOKEN)}
    with answering(answers) as (url, _):
        assert probe(url, tmp_path, PROBE_VERSION="0.32.0+cpu") == (0, "ready")
        status, line = probe(url, tmp_path, PROBE_VERSION="0.33.0")
    assert (status, line) == (1, "not ready: vLLM 0.32.0 answers, 0.33.0 was gated")


def fill(
    folder: Path, used: int, *, limit: str = "1000", cached: int = 0, old: bool = False
) -> None:
    """The cgroup files of a container, version 2 or the old one."""
    cgroup = folder / "cgroup"
    place = cgroup / "memory" if old else cgroup
    place.mkdir(parents=True, exist_ok=True)
    names = ("memory.usage_in_bytes", "memory.limit_in_bytes", "total_")
    current, most, prefix = names if old else ("memory.current", "memory.max", "")
    (place / current).write_text(f"{used}\n")
    (place / most).write_text(f"{limit}\n")
    half = cached // 2
    (place / "memory.stat").write_text(
        f"anon {used - cached}\n{prefix}inactive_file {half}\n{prefix}active_file {cached - half}\n"
    )


@pytest.mark.parametrize("old", [False, True], ids=["cgroup v2", "cgroup v1"])
def test_full_memory_takes_the_pod_out_only_when_it_stays(
    healthy: str, tmp_path: Path, old: bool
) -> None:
    patience = {"PROBE_MEMORY_SECONDS": "1.5"}
    fill(tmp_path, 950, old=old)
    assert probe(healthy, tmp_path, **patience) == (0, "ready")
    fill(tmp_path, 900, old=old)  # exactly the share that is allowed
    time.sleep(1.6)
    assert probe(healthy, tmp_path, **patience) == (0, "ready")
    fill(tmp_path, 950, old=old)
    assert probe(healthy, tmp_path, **patience) == (0, "ready")  # counted from now, not before
    time.sleep(1.6)
    status, line = probe(healthy, tmp_path, **patience)
    assert status == 1 and line.startswith("not ready: memory is at 95% for ")
    fill(tmp_path, 500, old=old)
    assert probe(healthy, tmp_path, **patience) == (0, "ready")


@pytest.mark.parametrize("old", [False, True], ids=["cgroup v2", "cgroup v1"])
def test_what_the_kernel_can_take_back_is_no_full_memory(
    healthy: str, tmp_path: Path, old: bool
) -> None:
    fill(tmp_path, 990, cached=200, old=old)
    assert probe(healthy, tmp_path, PROBE_MEMORY_SECONDS="0") == (0, "ready")
    fill(tmp_path, 990, cached=50, old=old)
    assert probe(healthy, tmp_path, PROBE_MEMORY_SECONDS="0")[0] == 1
    unlimited = str(2**63 - 4096) if old else "max"
    fill(tmp_path, 990, limit=unlimited, old=old)
    assert probe(healthy, tmp_path, PROBE_MEMORY_SECONDS="0") == (0, "ready")


def test_a_note_from_before_the_last_start_counts_for_nothing(healthy: str, tmp_path: Path) -> None:
    fill(tmp_path, 950)
    for note in (repr(time.monotonic() + 1e6), "no number"):
        (tmp_path / "state").write_text(note)
        assert probe(healthy, tmp_path) == (0, "ready")
        assert float((tmp_path / "state").read_text()) <= time.monotonic()
