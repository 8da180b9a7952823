"""`deploy/`: the gated words reach the engine unchanged, and every file fits its schema."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml
from check_jsonschema.builtin_schemas import get_builtin_schema
from hypothesis import HealthCheck, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from registry.deploy_attention import Attention, attention_backend
from registry.deployables import render, write
from registry.deployment import Deployment, dns_name, memory_of, start_budget
from registry.engine_memory import PlannedMemory
from registry.errors import UserError
from registry.outcome import CandidateOutcome, Verdict
from registry.savings import Asked
from registry.serve_words import serve_words, served_env
from registry.settings import settings
from tasks.deployables import replicas_of
from tests.unit.deploy_builders import (
    ODD_ARGS,
    deployment,
    downloaded,
    fake_vllm,
    on_gpus,
    path_with,
    said,
)

GIB = 2**30
TEXT = st.text(
    st.characters(blacklist_categories=["Cs"], blacklist_characters="\0"), min_size=1, max_size=30
)
ARGS = st.dictionaries(
    st.from_regex(r"[a-z][a-z-]{0,12}", fullmatch=True),
    st.one_of(TEXT, st.booleans(), st.integers(), st.lists(TEXT, max_size=3)),
    max_size=4,
)
ENV = st.dictionaries(st.from_regex(r"[A-Z_][A-Z0-9_]{0,10}", fullmatch=True), TEXT, max_size=3)
ODD = deployment(
    'Freight\'s "best" $(touch pwned)\n; model',
    args=ODD_ARGS,
    env={
        "VLLM_LOGGING_PREFIX": "it's $HOME `id`\n- x: y",
        "OMP_NUM_THREADS": "1",
        "PATH": "/nowhere",
    },
)
CASES = {
    "cpu": deployment(peak_memory_bytes=2 * GIB, startup_seconds=18.4),
    "gpus": on_gpus(),
    "no draft": deployment(draft=False),
    "another build": deployment(version="0.32.1.dev3+gabc"),
    "odd": ODD,
}


@pytest.fixture(params=CASES.values(), ids=CASES.keys())
def case(request: pytest.FixtureRequest) -> Deployment:
    made: Deployment = request.param
    return made


# -- the scripts -----------------------------------------------------------------------------


@pytest.fixture
def place(tmp_path: Path) -> Path:
    return downloaded(tmp_path)


def start(
    place: Path, engine: Path, script: str = "vllm-serve.sh", *words: str, **env: str
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["sh", str(place / "deploy" / script), *words],
        env={"PATH": path_with(engine), **env},
        cwd=engine,
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )


def gated_words(made: Deployment, place: Path, host: str = "127.0.0.1") -> list[str]:
    draft = str(place / "draft") if made.bundle.draft else None
    return serve_words(
        str(place / "target"), made.model, made.bundle.engine_args, 8000, draft, 3, host
    )


def same_words(words: list[str], wanted: list[str]) -> bool:
    """Word for word; the draft's JSON by what it says (a path may be spelled in two ways)."""
    if "--speculative-config" in wanted:
        *words, spoken = words
        *wanted, asked = wanted
        return words == wanted and json.loads(spoken) == json.loads(asked)
    return words == wanted


def test_the_script_starts_exactly_what_was_gated(
    case: Deployment, place: Path, tmp_path: Path
) -> None:
    engine = fake_vllm(tmp_path / "bin", case.bundle.engine_version).parent
    write(case, place)
    done = start(
        place,
        engine,
        VLLM_API_KEY="secret",
        VLLM_USE_SOMETHING="1",
        OMP_NUM_THREADS="7",
        KMP_AFFINITY="x",
    )
    assert done.returncode == 0, done.stderr
    words, env = said(engine)
    assert same_words(words, gated_words(case, place))
    ours = {name: value for name, value in env.items() if name not in ("PWD", "_")}
    assert ours == {
        "PATH": path_with(engine),
        **served_env(case.bundle.env),
        "VLLM_API_KEY": "secret",
    }
    assert "secret" not in " ".join(words)
    assert not list(tmp_path.rglob("pwned*"))


@hypothesis_settings(
    max_examples=25,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(TEXT, ARGS, ENV)
def test_any_name_and_value_reaches_the_engine_unchanged(
    place: Path, tmp_path: Path, model: str, args: dict[str, Any], env: dict[str, str]
) -> None:
    made = deployment(model, args=args, env=env)
    engine = fake_vllm(tmp_path / "bin").parent
    env_of_engine = {name for name in env if name not in ("PWD", "_", "IFS")}
    write(made, place)
    done = start(place, engine)
    assert done.returncode == 0, done.stderr
    words, seen = said(engine)
    assert same_words(words, gated_words(made, place))
    assert {name: seen[name] for name in env_of_engine if name != "VLLM_API_KEY"} == {
        name: made.env[name] for name in env_of_engine if name != "VLLM_API_KEY"
    }


def test_other_addresses_need_a_key(place: Path, tmp_path: Path) -> None:
    engine = fake_vllm(tmp_path / "bin").parent
    write(deployment(), place)
    refused = start(place, engine, HOST="0.0.0.0")
    assert refused.returncode == 2 and "set VLLM_API_KEY" in refused.stderr
    assert not (engine / "words").exists()
    assert start(place, engine, HOST="0.0.0.0", VLLM_API_KEY="k", PORT="9000").returncode == 0
    words, _ = said(engine)
    assert words[2:6] == ["--host", "0.0.0.0", "--port", "9000"]
    assert start(place, engine, HOST="::1").returncode == 0


def test_another_vllm_is_refused_unless_demanded(place: Path, tmp_path: Path) -> None:
    engine = fake_vllm(tmp_path / "bin", "0.33.0").parent
    write(deployment(), place)
    refused = start(place, engine)
    assert refused.returncode == 2
    assert "vllm 0.33.0 is installed, 0.32.0+cpu was gated" in refused.stderr
    assert not (engine / "words").exists()
    demanded = start(place, engine, PILOTAGE_OTHER_ENGINE="yes")
    assert demanded.returncode == 0 and "NOT GATED" in demanded.stderr


def test_the_engines_own_python_is_asked_where_there_is_one(place: Path, tmp_path: Path) -> None:
    engine = tmp_path / "bin"
    engine.mkdir()
    python = engine / "python3"
    python.write_text('#!/bin/sh\nif [ "$1" = -I ]; then echo 0.31.0; fi\n')
    (engine / "vllm").write_text(f"#!{python}\n")
    for program in (python, engine / "vllm"):
        program.chmod(0o755)
    write(deployment(), place)
    assert "vllm 0.31.0 is installed" in start(place, engine).stderr


def test_what_is_missing_is_said(place: Path, tmp_path: Path) -> None:
    write(deployment(), place)
    (tmp_path / "none").mkdir()
    missing = start(place, tmp_path / "none")
    assert missing.returncode == 2 and "there is no vllm on PATH" in missing.stderr
    (place / "draft").rmdir()
    engine = fake_vllm(tmp_path / "bin").parent
    missing = start(place, engine)
    assert missing.returncode == 2 and "draft is no folder" in missing.stderr


def test_sglang_starts_only_when_told_that_it_is_not_gated(place: Path, tmp_path: Path) -> None:
    args = {**ODD_ARGS, "tensor-parallel-size": 2, "gpu-memory-utilization": 0.9}
    write(deployment(ODD.model, args=args), place)
    engine = fake_vllm(tmp_path / "bin").parent
    python = engine / "sglang-python"
    (engine / "vllm").rename(python)
    refused = start(place, engine, "sglang-serve.sh", SGLANG_PYTHON=str(python))
    assert refused.returncode == 2 and not (engine / "words").exists()
    assert refused.stdout.splitlines()[0].startswith("NOT GATED: rendered, not run")
    started = start(place, engine, "sglang-serve.sh", "--not-gated", SGLANG_PYTHON=str(python))
    assert started.returncode == 0, started.stderr
    assert started.stdout.splitlines()[0].startswith("NOT GATED: rendered, not run")
    words, _ = said(engine)
    assert words == [
        *("-m", "sglang.launch_server", "--model-path", str(place / "target")),
        *("--host", "127.0.0.1", "--port", "30000", "--served-model-name", ODD.model),
        *("--disable-cuda-graph", "--context-length", "1024", "--tp-size", "2"),
        *("--speculative-algorithm", "EAGLE3"),
        *("--speculative-draft-model-path", str(place / "draft")),
        *("--speculative-num-steps", "3", "--speculative-eagle-topk", "1"),
        *("--speculative-num-draft-tokens", "4"),
    ]
    text = (place / "deploy" / "sglang-serve.sh").read_text()
    assert "gpu-memory-utilization" in text and "cudagraph-capture-sizes" in text


def test_scripts_are_shell(case: Deployment) -> None:
    for name, text in render(case).items():
        if name.endswith(".sh"):
            subprocess.run(["sh", "-n"], input=text, text=True, check=True)


# -- the unit --------------------------------------------------------------------------------


def test_the_unit_is_one_that_systemd_reads(case: Deployment, tmp_path: Path) -> None:
    if shutil.which("systemd-analyze") is None:
        pytest.skip("needs systemd-analyze to read the unit")
    name = f"pilotage-{case.name}.service"
    unit = tmp_path / name
    unit.write_text(render(case)[name])
    done = subprocess.run(
        ["systemd-analyze", "verify", str(unit)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    complaints = [line for line in done.stderr.splitlines() if name in line]
    assert complaints == []


# -- compose and Kubernetes ------------------------------------------------------------------


def after_variables(text: str) -> str:
    """What Compose and Kubernetes make of a text in which no variable is left."""
    assert not re.search(r"(?<!\$)(\$\$)*\$(?!\$)", text), text
    return text.replace("$$", "$")


def container_words(made: Deployment) -> list[str]:
    draft = "/bundle/draft" if made.bundle.draft else None
    args = made.bundle.engine_args
    return serve_words("/bundle/target", made.model, args, 8000, draft, 3, "0.0.0.0")


def check_compose(made: Deployment) -> dict[str, Any]:
    text = render(made)["compose.yaml"]
    assert text.splitlines()[0].startswith("# rendered, not run")
    file = yaml.safe_load(text)
    jsonschema.Draft202012Validator(get_builtin_schema("vendor.compose-spec")).validate(file)
    service: dict[str, Any] = file["services"]["vllm"]
    assert service["entrypoint"] == ["vllm"]
    assert [after_variables(word) for word in service["command"]] == container_words(made)
    for name, value in made.env.items():
        assert after_variables(service["environment"][name]) == value
    return service


def check_kubernetes(made: Deployment, *versions: str) -> dict[str, dict[str, Any]]:
    text = render(made)["kubernetes.yaml"]
    assert text.splitlines()[0].startswith("# rendered, not run")
    documents = list(yaml.safe_load_all(text))
    for version in versions:
        for document in documents:
            kubernetes_validate.validate(document, version, strict=True)
    by_kind = {document["kind"]: document for document in documents}
    container = by_kind["Deployment"]["spec"]["template"]["spec"]["containers"][0]
    assert container["command"] == ["vllm"]
    assert [after_variables(word) for word in container["args"]] == container_words(made)
    env = {item["name"]: item.get("value") for item in container["env"]}
    for name, value in made.env.items():
        assert after_variables(env[name]) == value
    for document in documents:
        assert re.fullmatch(r"[a-z]([-a-z0-9]{0,61}[a-z0-9])?", document["metadata"]["name"])
        for label in document["metadata"]["labels"].values():
            assert re.fullmatch(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?", label)
    return by_kind


def test_compose_fits_the_published_schema(case: Deployment) -> None:
    service = check_compose(case)
    assert service["ports"] == ["127.0.0.1:${PORT:-8000}:8000"]
    assert service["environment"]["VLLM_API_KEY"].startswith("${VLLM_API_KEY:?")
    assert all(volume["read_only"] for volume in service["volumes"])


@pytest.mark.parametrize("version", ["1.28", "1.33", "1.37"])
def test_kubernetes_fits_the_published_schemas(case: Deployment, version: str) -> None:
    kinds = check_kubernetes(case, version)
    assert list(kinds) == ["ConfigMap", "Deployment", "Service", "PodDisruptionBudget"]


@hypothesis_settings(max_examples=40)
@given(TEXT, ARGS, ENV)
def test_no_name_or_value_breaks_a_manifest(
    model: str, args: dict[str, Any], env: dict[str, str]
) -> None:
    made = deployment(model, args=args, env=env)
    check_compose(made)
    check_kubernetes(made)
    assert json.loads(render(made)["grafana-dashboard.json"])["title"] == f"vLLM: {model}"


def test_devices_and_image_follow_what_was_gated() -> None:
    cpu, gpus = check_compose(CASES["cpu"]), check_compose(CASES["gpus"])
    assert "devices" not in cpu["deploy"]["resources"]["reservations"]
    assert cpu["image"].startswith("${VLLM_IMAGE:?")
    assert gpus["deploy"]["resources"]["reservations"]["devices"] == [
        {"driver": "nvidia", "count": 4, "capabilities": ["gpu"]}
    ]
    assert gpus["image"] == "vllm/vllm-openai:v0.32.0"
    assert check_compose(CASES["another build"])["image"].startswith("${VLLM_IMAGE:?")

    def container(name: str) -> dict[str, Any]:
        found = check_kubernetes(CASES[name])["Deployment"]["spec"]["template"]["spec"]
        made: dict[str, Any] = found["containers"][0]
        return made

    assert container("cpu")["image"] == "set-an-image.invalid/vllm:0.32.0"
    assert container("cpu")["resources"] == {
        "requests": {"cpu": "2", "memory": "2048Mi"},
        "limits": {"memory": "2731Mi"},
    }
    assert container("gpus")["image"] == "vllm/vllm-openai:v0.32.0"
    assert container("gpus")["resources"]["limits"]["nvidia.com/gpu"] == "4"
    assert container("gpus")["resources"]["requests"]["cpu"] == "6"


def test_the_pod_is_probed_as_promised() -> None:
    kinds = check_kubernetes(CASES["cpu"])
    pod = kinds["Deployment"]["spec"]["template"]["spec"]
    container = pod["containers"][0]
    assert kinds["Deployment"]["spec"]["strategy"]["rollingUpdate"]["maxUnavailable"] == 0
    assert container["readinessProbe"]["exec"]["command"] == ["python3", "/probe/probe.py"]
    assert container["livenessProbe"]["httpGet"]["path"] == "/health"
    start_probe = container["startupProbe"]
    assert start_probe["periodSeconds"] * start_probe["failureThreshold"] == 600
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert container["securityContext"]["readOnlyRootFilesystem"] is True
    key = next(item for item in container["env"] if item["name"] == "VLLM_API_KEY")
    assert key["valueFrom"]["secretKeyRef"] == {
        "name": "freight-assistant-api-key",
        "key": "api-key",
    }
    assert kinds["ConfigMap"]["data"]["probe.py"] == render(CASES["cpu"])["probe.py"]
    assert pod["volumes"][1]["configMap"]["name"] == kinds["ConfigMap"]["metadata"]["name"]
    selector = kinds["Deployment"]["spec"]["selector"]["matchLabels"]
    labels = kinds["Deployment"]["spec"]["template"]["metadata"]["labels"]
    assert selector.items() <= labels.items()
    assert kinds["Service"]["spec"]["selector"] == selector


# -- facts -----------------------------------------------------------------------------------


def test_memory_says_where_it_comes_from() -> None:
    measured = memory_of(deployment(peak_memory_bytes=6 * GIB))
    assert (measured.request, measured.limit) == (6 * GIB, 8 * GIB)
    assert measured.source == "the load test's peak, measured"
    kept = memory_of(deployment(args={"kv-cache-memory-bytes": GIB}))
    assert kept.request == (2 * 3 + 1 + 4) * GIB and "estimated" in kept.source
    assert memory_of(deployment()).request == (2 * 3 + 4 + 4) * GIB
    assert memory_of(on_gpus()).request == (3 + 4 * 6) * GIB


def plan(**changes: Any) -> PlannedMemory:
    known = {"gpus": 0, "weights_bytes": GIB, "activation_bytes": 0, "graph_bytes": 0}
    return PlannedMemory.model_validate(known | changes)


def test_what_nobody_measured_is_planned() -> None:
    on_a_cpu = plan(peak_bytes=3 * GIB)
    planned = memory_of(deployment(planned_memory=on_a_cpu))
    assert (planned.request, planned.limit) == (3 * GIB, 4 * GIB)
    assert planned.source == "the capacity plan, an estimate; nothing measured"
    measured = memory_of(deployment(planned_memory=on_a_cpu, peak_memory_bytes=6 * GIB))
    assert measured.request == 6 * GIB
    assert measured.source == "the load test's peak, measured; the plan said 3.00 GiB"
    unknown = memory_of(deployment(planned_memory=plan()))
    assert unknown.source.endswith("nothing measured and nothing planned")


def test_a_plan_for_gpus_is_of_their_memory() -> None:
    card = plan(gpus=4, floor_bytes=20 * GIB, peak_bytes=70 * GIB)
    found = memory_of(on_gpus(planned_memory=card))
    assert found.request == (3 + 4 * 6) * GIB
    assert found.source == (
        "estimated from the weights' size, nothing measured; of each GPU by the plan: at least "
        "20.00 GiB, takes 70.00 GiB"
    )


def test_replicas_say_where_they_come_from() -> None:
    one = render(deployment())["kubernetes.yaml"]
    assert "replicas: 1; no traffic is known here." in one
    more = deployment(replicas=8, replicas_from="for 42 requests/s (log), one keeps 5.657")
    text = render(more)["kubernetes.yaml"]
    assert "replicas: 8; for 42 requests/s (log), one keeps 5.657." in text
    [spec] = [one["spec"] for one in yaml.safe_load_all(text) if one["kind"] == "Deployment"]
    assert spec["replicas"] == 8


def test_a_peak_takes_as_many_as_keep_it() -> None:
    outcome = CandidateOutcome(
        name="c", bundle="b", verdict=Verdict.PASS, reasons=[], kept_rate=(5.657, 8.0)
    )
    asked = Asked(42.0, "log.yaml, over 1 s")
    assert replicas_of(outcome, asked) == {
        "replicas": 8,
        "replicas_from": "for 42 requests/s (log.yaml, over 1 s), one keeps 5.657",
    }
    assert replicas_of(outcome, Asked()) == replicas_of(outcome, None) == {}
    tenths = outcome.model_copy(update={"kept_rate": (0.1, 0.2)})
    assert replicas_of(tenths, Asked(1.1, "log"))["replicas"] == 11
    fixed = outcome.model_copy(update={"kept_rate": None})
    assert replicas_of(fixed, asked) == {
        "replicas_from": "the peak is 42 requests/s, and no rate was sought"
    }
    emulated = outcome.model_copy(update={"times_count": False})
    assert replicas_of(emulated, asked) == {
        "replicas_from": "the peak is 42 requests/s, and no rate was kept"
    }


def test_a_start_may_take_five_times_what_it_took() -> None:
    assert start_budget(deployment()) == 1800
    assert start_budget(deployment(startup_seconds=18.4)) == 600
    assert start_budget(deployment(startup_seconds=200.5)) == 1010


def test_a_cpu_build_takes_no_gpus_of_the_machine() -> None:
    made = deployment(hardware={"gpus": ["NVIDIA L4"], "cores": 8}, version="0.32.0+cpu")
    assert (made.gpus, made.cores) == (0, 8)


@pytest.mark.parametrize(
    ("model", "name"),
    [
        ("freight-assistant", "freight-assistant"),
        ("Freight.Assistant_2", r"freight-assistant-2-[0-9a-f]{6}"),
        ("7b", r"m-7b-[0-9a-f]{6}"),
        ("a" * 99, r"a{33}-[0-9a-f]{6}"),
        ("货运", r"m-[0-9a-f]{6}"),
    ],
)
def test_names_for_kubernetes(model: str, name: str) -> None:
    assert re.fullmatch(name, dns_name(model))


@given(TEXT)
def test_every_model_has_a_dns_label(model: str) -> None:
    assert re.fullmatch(r"[a-z]([-a-z0-9]{0,38}[a-z0-9])?", dns_name(model))
    assert dns_name(model) != dns_name(model + ".")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"env": {"A B": "1"}}, "'A B': is no name of an environment variable"),
        ({"env": {"A": "1\0"}}, "'A': has a NUL character"),
        ({"args": {"a": [{"b": "\0"}]}}, "engine_args: has a NUL character"),
    ],
)
def test_what_no_command_line_carries_is_refused(change: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=said):
        render(deployment(**change))


def test_another_engine_has_no_deployables() -> None:
    made = deployment()
    other = made.model_copy(update={"bundle": made.bundle.model_copy(update={"engine": "openai"})})
    with pytest.raises(UserError, match="'openai' has no deployables"):
        render(other)


# -- what every file says of itself ----------------------------------------------------------


def test_what_was_not_run_says_so_at_its_head(case: Deployment) -> None:
    files = render(case)
    unit = f"pilotage-{case.name}.service"
    for name in ("sglang-serve.sh", unit, "compose.yaml", "kubernetes.yaml"):
        assert any("rendered, not run" in line for line in files[name].splitlines()[:2]), name
    assert "rendered, not run" in json.loads(files["grafana-dashboard.json"])["description"]
    assert "rendered, not run" in files["attention-backends.md"].splitlines()[2]
    assert "as it was gated and run" in files["vllm-serve.sh"].splitlines()[1]
    for name in files:
        assert f"`{name}`" in files["README.md"] or name == "README.md"
    assert case.bundle.digest in files["README.md"]


# -- the dashboard ---------------------------------------------------------------------------


def queries(made: Deployment) -> Iterator[str]:
    board = json.loads(render(made)["grafana-dashboard.json"])
    for panel in board["panels"]:
        for target in panel["targets"]:
            yield target["expr"]
    for variable in board["templating"]["list"]:
        yield str(variable["query"])


def test_the_dashboard_is_one_of_grafanas_model() -> None:
    from grafana_foundation_sdk.models.dashboard import Dashboard

    board = Dashboard.from_json(json.loads(render(CASES["cpu"])["grafana-dashboard.json"]))
    titles = [panel.title for panel in board.panels or [] if panel.title]  # type: ignore[union-attr]
    for topic in ("TTFT", "TPOT", "E2EL", "waiting", "KV cache", "Prefix cache", "Acceptance"):
        assert any(topic in title for title in titles), topic
    places = [(panel.grid_pos.x, panel.grid_pos.y) for panel in board.panels or []]  # type: ignore[union-attr]
    assert len(set(places)) == len(places) == 12


def test_the_dashboard_asks_for_metrics_that_the_engine_has() -> None:
    package = settings().serve_python.parent.parent / "lib"
    sources = [
        path
        for name in ("v1/metrics/loggers.py", "v1/spec_decode/metrics.py")
        for path in package.glob(f"python3*/site-packages/vllm/{name}")
    ]
    if not sources:
        pytest.skip("needs the serve environment's vLLM to read its metrics")
    text = "\n".join(path.read_text() for path in sources)
    exposed: dict[str, str] = {}
    for kind, name in re.findall(r'(gauge|counter|histogram)_cls\(\s*name="(vllm:\w+)"', text):
        suffix = {"gauge": "", "counter": "_total", "histogram": "_bucket"}[kind]
        exposed[name + suffix] = kind
    for name in re.findall(r'\("(vllm:spec_decode\w+)", "', text):
        exposed[f"{name}_total"] = "counter"
    asked = {name for query in queries(CASES["cpu"]) for name in re.findall(r"vllm:\w+", query)}
    assert len(asked) >= 14
    assert asked - exposed.keys() == set()


# -- attention -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("capability", "taken"),
    [
        ((7, 5), Attention("TRITON_ATTN")),
        ((8, 0), Attention("FLASH_ATTN", 2)),
        ((8, 9), Attention("FLASH_ATTN", 2)),
        ((9, 0), Attention("FLASH_ATTN", 3)),
        ((10, 0), Attention("FLASHINFER")),
        ((12, 0), Attention("FLASH_ATTN", 2)),
    ],
)
def test_attention_by_generation(capability: tuple[int, int], taken: Attention) -> None:
    assert attention_backend(capability) == taken


def test_older_gpus_have_no_attention() -> None:
    with pytest.raises(ValueError, match="older than Turing"):
        attention_backend((7, 0))


def test_a_gated_attention_backend_is_named() -> None:
    chosen = render(on_gpus())["attention-backends.md"]
    assert "has no argument for it: vLLM chooses. It was gated on NVIDIA H200" in chosen
    forced = render(deployment(args={"attention-backend": "TRITON_ATTN"}))
    assert "sets it by attention-backend" in forced["attention-backends.md"]
    assert "--attention-backend TRITON_ATTN" in forced["vllm-serve.sh"]
    assert "--attention" not in render(deployment())["vllm-serve.sh"]
