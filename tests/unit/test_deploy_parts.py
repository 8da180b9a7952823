"""`deploy/` of a bundle with prefill and decode apart: each engine's words, ports and devices."""

from __future__ import annotations

import json
import re
import signal
import stat
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml
from check_jsonschema.builtin_schemas import get_builtin_schema

from registry.deploy_parts import PROXY_FILE, part_env, part_words
from registry.deployables import render, write
from registry.deployment import Deployment, memory_of, part_of
from registry.serve_words import serve_words, served_env
from registry.topology import ROLES, Disaggregated, Role
from tests.unit.deploy_builders import CPU, H200, ODD_ARGS, deployment, downloaded, path_with
from tests.unit.test_deployables import after_variables

GIB = 2**30
TOPOLOGY = Disaggregated(
    prefill=2,
    decode=1,
    prefill_args={"max-num-seqs": 8},
    decode_args={"tensor-parallel-size": 4, "max-num-seqs": 64},
)


def apart(topology: Disaggregated = TOPOLOGY, **changes: Any) -> Deployment:
    made = deployment(**changes)
    bundle = made.bundle.model_copy(update={"topology": topology})
    return made.model_copy(update={"bundle": bundle})


ON_GPUS = apart(version="0.32.0", hardware=H200, args={"max-model-len": 4096}, draft=False)
ON_CPU = apart(Disaggregated(), args={"max-model-len": 512}, peak_memory_bytes=6 * GIB)
ODD = apart(
    model='Freight\'s "best" $(touch pwned)\n; model',
    args=ODD_ARGS,
    env={"VLLM_LOGGING_PREFIX": "it's $HOME `id`\n- x: y", "OMP_NUM_THREADS": "1"},
)
CASES = {"gpus": ON_GPUS, "cpu": ON_CPU, "odd": ODD}


@pytest.fixture(params=CASES.values(), ids=CASES.keys())
def case(request: pytest.FixtureRequest) -> Deployment:
    made: Deployment = request.param
    return made


def names(made: Deployment) -> list[tuple[Role, str]]:
    topology = made.bundle.topology
    assert topology is not None
    return [(role, f"{role}-{n}") for role in ROLES for n in range(topology.engines(role))]


# -- one engine ------------------------------------------------------------------------------


def test_the_words_of_an_engine_are_those_of_its_role() -> None:
    words = part_words(ON_GPUS, "decode", "/b", 8000, "0.0.0.0")
    args = {
        "max-model-len": 4096,
        "max-num-seqs": 64,
        "tensor-parallel-size": 4,
        "kv-transfer-config": json.dumps(
            {
                "kv_connector": "NixlConnector",
                "kv_role": "kv_consumer",
                "kv_load_failure_policy": "fail",
            }
        ),
    }
    assert words == serve_words("/b/target", ON_GPUS.model, args, 8000, host="0.0.0.0")
    config = part_words(ON_CPU, "prefill", "/b", 8000, "0.0.0.0")
    given = json.loads(config[config.index("--kv-transfer-config") + 1])
    assert (given["kv_role"], given["kv_buffer_device"]) == ("kv_producer", "cpu")
    # Both sides have the draft: its KV cache goes over too.
    assert "--speculative-config" in config


def test_devices_cores_and_memory_of_each_engine() -> None:
    prefill, decode = (part_of(ON_GPUS, role) for role in ROLES)
    assert (prefill.gpus, decode.gpus, ON_GPUS.gpus) == (1, 4, 2 * 1 + 4)
    assert (prefill.cores, decode.cores) == (3, 6)
    assert memory_of(prefill).request == (3 + 4 * 3) * GIB
    whole = memory_of(ON_GPUS)
    assert whole.request == (2 * (3 + 4 * 3) + (3 + 4 * 6)) * GIB
    assert whole.source.startswith("of 3 engines together; estimated")
    # What was measured on a CPU is of both engines, and both have its two cores.
    assert memory_of(part_of(ON_CPU, "decode")).request == 3 * GIB
    assert part_of(ON_CPU, "decode").cores == 1


def test_variables_are_those_of_the_managed_server(monkeypatch: pytest.MonkeyPatch) -> None:
    server = pytest.importorskip("tasks.engines.disaggregated_server")
    monkeypatch.setattr(server, "hardware", lambda: CPU)
    topology = ON_CPU.bundle.topology
    gate = server.part_env(topology, {}, on_cpu=True)
    own = part_env(ON_CPU, one_host=True)
    assert gate == {"VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1", **own}
    # The cache goes over loopback alone where the engines share it, and only there.
    assert {**part_env(ON_CPU), "UCX_NET_DEVICES": "lo"} == own != part_env(ON_CPU)
    assert part_env(ON_GPUS) == part_env(ON_GPUS, one_host=True) == {}


# -- compose ---------------------------------------------------------------------------------


def test_compose_has_each_engine_and_the_proxy(case: Deployment) -> None:
    text = render(case)["compose.yaml"]
    assert text.splitlines()[0].startswith("# rendered, not run")
    file = yaml.safe_load(text)
    jsonschema.Draft202012Validator(get_builtin_schema("vendor.compose-spec")).validate(file)
    services = file["services"]
    assert list(services) == [*(name for _, name in names(case)), "proxy"]
    folder = f"/bundle/{case.label}"
    for role, name in names(case):
        service = services[name]
        words = [after_variables(word) for word in service["command"]]
        assert words == part_words(case, role, folder, 8000, "0.0.0.0")
        assert "ports" not in service and service["hostname"] == name
        assert service["volumes"][0]["target"] == folder
        env = {key: after_variables(value) for key, value in service["environment"].items()
               if key != "VLLM_API_KEY"}  # fmt: skip
        wanted = {**part_env(case), **served_env(case.bundle.env)}
        assert wanted.items() <= env.items()
        assert env["VLLM_NIXL_SIDE_CHANNEL_HOST"] == name
    proxy = services["proxy"]
    assert proxy["entrypoint"] == ["python3"]
    assert proxy["command"][0] == "/bundle/deploy/disaggregated_proxy.py"
    assert proxy["command"][5:] == [
        word for role, name in names(case) for word in (f"--{role}", f"http://{name}:8000")
    ]
    assert proxy["ports"] == ["127.0.0.1:${PORT:-8000}:8000"]
    assert proxy["environment"]["PROBE_MODEL"].replace("$$", "$") == case.model
    assert "OMP_NUM_THREADS" not in proxy["environment"]


def test_no_two_engines_have_one_gpu() -> None:
    services = yaml.safe_load(render(ON_GPUS)["compose.yaml"])["services"]

    def devices(name: str) -> list[str]:
        reserved = services[name]["deploy"]["resources"]["reservations"]["devices"]
        ids: list[str] = reserved[0]["device_ids"]
        return ids

    assert devices("prefill-0") == ["0"]
    assert devices("prefill-1") == ["1"]
    assert devices("decode-0") == ["2", "3", "4", "5"]
    assert "devices" not in services["proxy"]["deploy"]["resources"].get("reservations", {})


# -- kubernetes ------------------------------------------------------------------------------


def objects(made: Deployment) -> dict[tuple[str, str], dict[str, Any]]:
    text = render(made)["kubernetes.yaml"]
    assert text.splitlines()[0].startswith("# rendered, not run")
    documents = list(yaml.safe_load_all(text))
    found = {(one["kind"], one["metadata"]["name"]): one for one in documents}
    assert len(found) == len(documents)
    return found


def container_of(document: Mapping[str, Any]) -> dict[str, Any]:
    (container,) = document["spec"]["template"]["spec"]["containers"]
    found: dict[str, Any] = container
    return found


@pytest.mark.parametrize("version", ["1.28", "1.33", "1.37"])
def test_kubernetes_fits_the_published_schemas(case: Deployment, version: str) -> None:
    for (_, name), document in objects(case).items():
        kubernetes_validate.validate(document, version, strict=True)
        assert re.fullmatch(r"[a-z]([-a-z0-9]{0,61}[a-z0-9])?", name)
        for label in document["metadata"]["labels"].values():
            assert re.fullmatch(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?", label)


def test_the_longest_name_is_still_one() -> None:
    made = apart(Disaggregated(prefill=64, decode=1), model="a" * 99)
    assert max(len(name) for _, name in objects(made)) <= 63


def test_each_engine_has_a_deployment_an_address_and_a_side_channel(case: Deployment) -> None:
    found = objects(case)
    folder, own = f"/bundle/{case.label}", f"{case.name}-{case.label[:8]}"
    for role, name in names(case):
        deployed = found["Deployment", f"{own}-{name}"]
        container = container_of(deployed)
        words = [after_variables(word) for word in container["args"]]
        assert words == part_words(case, role, folder, 8000, "0.0.0.0")
        ports = {port["name"]: port["containerPort"] for port in container["ports"]}
        assert ports == {"http": 8000, "nixl": 5600}
        env = {item["name"]: item for item in container["env"]}
        assert len(env) == len(container["env"])
        host = env["VLLM_NIXL_SIDE_CHANNEL_HOST"]["valueFrom"]["fieldRef"]["fieldPath"]
        assert host == "status.podIP"
        assert env["VLLM_NIXL_SIDE_CHANNEL_PORT"]["value"] == "5600"
        for key, value in {**part_env(case), **served_env(case.bundle.env)}.items():
            assert after_variables(env[key]["value"]) == value
        gpus = part_of(case, role).gpus
        assert container["resources"]["limits"].get("nvidia.com/gpu") == (
            str(gpus) if gpus else None
        )
        assert container["readinessProbe"]["httpGet"]["path"] == "/health"
        mount = next(one for one in container["volumeMounts"] if one["name"] == "bundles")
        assert (mount["mountPath"], mount["subPath"]) == (folder, case.label)
        labels = deployed["spec"]["template"]["metadata"]["labels"]
        assert found["Service", f"{own}-{name}"]["spec"]["selector"].items() <= labels.items()


def test_clients_reach_the_proxy_alone(case: Deployment) -> None:
    found = objects(case)
    own = f"{case.name}-{case.label[:8]}"
    front = found["Service", case.name]["spec"]["selector"]
    for (kind, name), document in found.items():
        if kind == "Deployment":
            labels = document["spec"]["template"]["metadata"]["labels"]
            assert (front.items() <= labels.items()) == (name == f"{own}-proxy"), name
    proxy = container_of(found["Deployment", f"{own}-proxy"])
    assert proxy["command"] == ["python3"]
    assert proxy["args"][5:] == [
        word for role, name in names(case) for word in (f"--{role}", f"http://{own}-{name}:8000")
    ]
    assert proxy["readinessProbe"]["exec"]["command"] == ["python3", "/probe/probe.py"]
    assert proxy["livenessProbe"]["tcpSocket"] == {"port": "http"}
    maps = {
        file: text for (kind, _), one in found.items() if kind == "ConfigMap"
        for file, text in one["data"].items()
    }  # fmt: skip
    assert maps["disaggregated_proxy.py"] == PROXY_FILE.read_text()
    assert maps["probe.py"] == render(case)["probe.py"]
    assert "nvidia.com/gpu" not in proxy["resources"]["limits"]


def test_engines_of_two_bundles_take_no_kv_cache_from_each_other() -> None:
    """vLLM compares the paths of the models, so a path must say which bundle it is."""
    other = apart(version="0.32.0", hardware=H200, args={"max-model-len": 2048}, draft=False)
    paths = {
        part_words(one, "decode", f"/bundle/{one.label}", 1, "h")[1] for one in (ON_GPUS, other)
    }
    assert len(paths) == 2
    shared = {name for kind, name in objects(ON_GPUS)} & {name for kind, name in objects(other)}
    own = [name for name in shared if "-proxy" not in name and "-probe" not in name]
    assert own == [ON_GPUS.name]


# -- the script ------------------------------------------------------------------------------

FAKE_ENGINE = """#!/bin/sh
here=${0%/*}
[ "$1" != --version ] || { echo 0.32.0+cpu; exit; }
name=$(printf '%s' "$*" | sed 's/.*--port \\([0-9]*\\).*/\\1/')
for word in "$@"; do printf '%s\\0' "$word"; done > "$here/words-$name"
/usr/bin/env -0 > "$here/env-$name"
exec sleep 60
"""


@pytest.fixture
def engine(tmp_path: Path) -> Path:
    folder = tmp_path / "bin"
    folder.mkdir()
    for name in ("vllm", "python3"):
        (folder / name).write_text(FAKE_ENGINE)
        (folder / name).chmod(0o755 | stat.S_IXUSR)
    return folder


def said(engine: Path, port: int) -> tuple[list[str], dict[str, str]]:
    words = (engine / f"words-{port}").read_bytes().decode().split("\0")[:-1]
    pairs = (engine / f"env-{port}").read_bytes().decode().split("\0")[:-1]
    return words, dict(pair.split("=", 1) for pair in pairs)


def started(place: Path, engine: Path, count: int, **env: str) -> subprocess.Popen[str]:
    script = subprocess.Popen(
        ["sh", str(place / "deploy" / "disaggregated-serve.sh")],
        env={"PATH": path_with(engine), **env},
        cwd=engine,
        stderr=subprocess.PIPE,
        text=True,
    )
    deadline = time.monotonic() + 30
    while len(list(engine.glob("env-*"))) < count and time.monotonic() < deadline:
        time.sleep(0.05)
    return script


@pytest.fixture
def place(tmp_path: Path) -> Path:
    return downloaded(tmp_path)


def test_the_script_starts_all_parts_and_ends_them(place: Path, engine: Path) -> None:
    made = apart(env={"OMP_NUM_THREADS": "3"}, args={"hf-overrides": {"a": "it's $(id)"}})
    write(made, place)
    script = started(place, engine, 4, VLLM_API_KEY="secret", UCX_TLS="all", OMP_NUM_THREADS="7")
    try:
        for number, (role, _) in enumerate(names(made)):
            words, env = said(engine, 8100 + number)
            wanted = part_words(made, role, str(place), 8100 + number, "127.0.0.1")
            *words, spoken = words
            *wanted, asked = wanted
            assert words == wanted and json.loads(spoken) == json.loads(asked)
            own = part_env(made, one_host=True) | served_env(made.bundle.env)
            assert own.items() <= env.items()
            assert env["VLLM_API_KEY"] == "secret" and env["OMP_NUM_THREADS"] == "3"
            assert env["VLLM_NIXL_SIDE_CHANNEL_PORT"] == str(5600 + number)
        words, env = said(engine, 8000)
        assert words == [
            str(place / "deploy" / "disaggregated_proxy.py"),
            *("--host", "127.0.0.1", "--port", "8000"),
            *("--prefill", "http://127.0.0.1:8100", "--prefill", "http://127.0.0.1:8101"),
            *("--decode", "http://127.0.0.1:8102"),
        ]
    finally:
        script.send_signal(signal.SIGTERM)
        assert script.wait(timeout=30) == 143
    assert not list(place.parent.rglob("pwned*"))


def test_by_gpus_each_engine_is_shown_its_own(place: Path, engine: Path) -> None:
    for name in ("vllm", "python3"):
        text = (engine / name).read_text().replace("0.32.0+cpu", "0.32.0")
        (engine / name).write_text(text)
    write(ON_GPUS, place)
    script = started(place, engine, 4)
    script.send_signal(signal.SIGTERM)
    assert script.wait(timeout=30) == 143
    shown = [said(engine, port)[1]["CUDA_VISIBLE_DEVICES"] for port in (8100, 8101, 8102)]
    assert shown == ["0", "1", "2,3,4,5"]


def test_one_part_that_ends_takes_the_others_with_it(place: Path, engine: Path) -> None:
    (engine / "python3").write_text("#!/bin/sh\nexit 7\n")
    write(ON_CPU, place)
    script = started(place, engine, 2)
    assert script.wait(timeout=30) == 1
    assert script.stderr is not None and "has ended, so all do" in script.stderr.read()


def test_scripts_and_what_files_say_of_themselves(case: Deployment) -> None:
    files = render(case)
    for name, text in files.items():
        if name.endswith(".sh"):
            subprocess.run(["sh", "-n"], input=text, text=True, check=True)
        assert f"`{name}`" in files["README.md"] or name == "README.md"
    unit = f"pilotage-{case.name}.service"
    for name in ("disaggregated-serve.sh", unit, "compose.yaml", "kubernetes.yaml"):
        assert any("rendered, not run" in line for line in files[name].splitlines()[:2]), name
    assert "/deploy/disaggregated-serve.sh" in files[unit]
    assert "vllm-serve.sh" not in files and "sglang-serve.sh" not in files
