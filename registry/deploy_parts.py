"""Docker Compose and Kubernetes files of a bundle whose prefill and decode engines are apart.

Each engine is a container of its own, and a proxy stands in front of them; no such container was
run. Two engines take each other for one model by the path that they are started with (vLLM 0.32's
`nixl/metadata.py` hashes it), so a bundle lies below its own digest here: engines of two bundles
refuse each other, where equal paths would pass a KV cache of other weights on without a word.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from registry.deploy_manifests import (
    BUNDLE,
    COMPOSE_KEY,
    COMPOSE_PORTS,
    PORT,
    PROBE_FILE,
    PROBE_SECONDS,
    PROBE_TIMEOUT,
    USER,
    compose_service,
    container_env,
    document_of,
    identity,
    image_notes,
    mebibytes,
    no_variables,
    pod_of,
    selector_of,
    short_digest,
)
from registry.deploy_yaml import Literal, yaml_file
from registry.deployment import GIB, Deployment, memory_of, part_of, start_budget
from registry.serve_words import serve_words
from registry.topology import ROLES, Disaggregated, Role, cpu_env, transfer_config

PROXY_NAME = "disaggregated_proxy.py"
PROXY_FILE = Path(__file__).parents[1] / "tasks" / "engines" / "in_server" / PROXY_NAME
"""A program of the serve environment, no module of ours: one file, as `probe.py` is."""

SIDE_PORT = 5600
"""vLLM's own default, where a decode engine asks for what a prefill engine keeps."""
PROXY_BYTES = GIB
"""Guessed, not measured."""

_HEALTH = (
    "import urllib.request as u; "
    f"u.build_opener(u.ProxyHandler({{}})).open('http://127.0.0.1:{PORT}/health', timeout=10)"
)


def topology_of(deployment: Deployment) -> Disaggregated:
    topology = deployment.bundle.topology
    assert topology is not None, "the bundle is served by one engine"
    return topology


def engines_of(deployment: Deployment) -> Iterator[tuple[Role, int, str]]:
    """Role, number within it and name of each engine, `prefill-0` for example."""
    for role in ROLES:
        for number in range(topology_of(deployment).engines(role)):
            yield role, number, f"{role}-{number}"


def part_arguments(deployment: Deployment, role: Role) -> dict[str, Any]:
    """An engine's arguments with what it does with the KV cache."""
    buffer = None if deployment.gpus else "cpu"
    config = transfer_config(topology_of(deployment), role, buffer)
    return {**part_of(deployment, role).bundle.engine_args, "kv-transfer-config": config}


def part_words(
    deployment: Deployment, role: Role, folder: str, port: int | str, host: str
) -> list[str]:
    """What follows `vllm` for an engine of this role, of a bundle in `folder`."""
    bundle = deployment.bundle
    return serve_words(
        f"{folder}/target",
        deployment.model,
        part_arguments(deployment, role),
        port,
        f"{folder}/draft" if bundle.draft else None,
        bundle.num_speculative_tokens or 0,
        host=host,
    )


def part_env(deployment: Deployment, *, one_host: bool = False) -> dict[str, str]:
    """What the project sets for each engine beside the gated environment, addresses apart.

    On a CPU as at the gate (`tasks/engines/disaggregated_server.py`); containers have a network
    between them instead of one loopback. By GPUs UCX finds by itself what carries the KV cache.
    """
    if deployment.gpus:
        return {}
    cores = int(deployment.hardware.get("cores") or 1)
    return cpu_env(topology_of(deployment), cores, one_host=one_host)


# -- compose ---------------------------------------------------------------------------------


def compose_parts(deployment: Deployment) -> str:
    """`compose.yaml`: all engines and the proxy on one machine, each GPU for one engine."""
    first, services = 0, {}
    for role, _, name in engines_of(deployment):
        services[name] = _compose_engine(deployment, role, name, first)
        first += part_of(deployment, role).gpus
    services["proxy"] = _compose_proxy(deployment)
    header = [
        *_head(deployment, "Docker Compose"),
        "",
        "Start:  VLLM_API_KEY=... docker compose -f deploy/compose.yaml up",
        f"The proxy listens on 127.0.0.1 (PORT, default {PORT}); the engines are reached by each "
        "other alone.",
        f"The folder above must be readable for user {USER}.",
        "Containers see no memory of each other, so UCX takes the network between them: slower "
        "than the links",
        "between GPUs that `disaggregated-serve.sh` can use, which was not measured either.",
        *image_notes(deployment, "Set VLLM_IMAGE to yours."),
    ]
    return yaml_file(header, [{"name": deployment.name, "services": services}])


def _compose_engine(deployment: Deployment, role: Role, name: str, first: int) -> dict[str, Any]:
    part = part_of(deployment, role)
    service = compose_service(part)
    folder = f"{BUNDLE}/{deployment.label}"
    del service["ports"]
    # Its own name is in its hosts file: what it binds to, and what the others are told.
    own = {**part_env(deployment), **container_env(part), **side_channel(name)}
    service |= {
        "hostname": name,
        "command": [
            no_variables(word) for word in part_words(deployment, role, folder, PORT, "0.0.0.0")
        ],
        "environment": {
            **{key: no_variables(value) for key, value in own.items()},
            "VLLM_API_KEY": COMPOSE_KEY,
        },
        "volumes": [{"type": "bind", "source": "..", "target": folder, "read_only": True}],
        "healthcheck": {
            **service["healthcheck"],
            "test": ["CMD", "python3", "-c", _HEALTH],
        },
    }
    if part.gpus:
        # A count would give the same first GPUs to every engine.
        ids = [str(gpu) for gpu in range(first, first + part.gpus)]
        devices = {"driver": "nvidia", "device_ids": ids, "capabilities": ["gpu"]}
        service["deploy"]["resources"]["reservations"]["devices"] = [devices]
    return service


def _compose_proxy(deployment: Deployment) -> dict[str, Any]:
    service = compose_service(part_of(deployment, "decode"))
    here = f"{BUNDLE}/deploy"
    service |= {
        "entrypoint": ["python3"],
        "command": _proxy_words(deployment, f"{here}/{PROXY_NAME}", ""),
        "environment": {
            **{key: no_variables(value) for key, value in _proxy_env(deployment).items()},
            "VLLM_API_KEY": COMPOSE_KEY,
        },
        "ports": COMPOSE_PORTS,
        "volumes": [{"type": "bind", "source": ".", "target": here, "read_only": True}],
        "depends_on": [name for _, _, name in engines_of(deployment)],
        "deploy": {"resources": {"limits": {"memory": f"{mebibytes(PROXY_BYTES)}m"}}},
    }
    del service["shm_size"]
    return service


# -- kubernetes ------------------------------------------------------------------------------


def kubernetes_parts(deployment: Deployment) -> str:
    """`kubernetes.yaml`: a Deployment and a Service for each engine, and for the proxy."""
    name, own = deployment.name, engine_prefix(deployment)
    texts = {
        "probe": ("probe.py", PROBE_FILE.read_text(encoding="utf-8")),
        "proxy": (PROXY_NAME, PROXY_FILE.read_text(encoding="utf-8")),
    }
    maps = {key: f"{name}-{key}-{short_digest(text)}" for key, (_, text) in texts.items()}
    documents = [
        document_of(deployment, "v1", "ConfigMap", maps[key], data={file: Literal(text)})
        for key, (file, text) in texts.items()
    ]
    for role, _, engine in engines_of(deployment):
        selector = _engine_selector(deployment, engine)
        pod = _engine_pod(deployment, role, maps["probe"])
        documents += [
            _workload(deployment, f"{own}-{engine}", selector, pod, scraped=True),
            _service(deployment, f"{own}-{engine}", selector),
        ]
    front = {**selector_of(deployment), "app.kubernetes.io/version": deployment.label}
    documents += [
        _workload(deployment, f"{own}-proxy", front, _proxy_pod(deployment, maps), scraped=False),
        _service(deployment, name, selector_of(deployment), port=80),
        _budget(deployment, f"{own}-engines", _engine_selector(deployment)),
        _budget(deployment, name, selector_of(deployment)),
    ]
    header = [
        *_head(deployment, "Kubernetes"),
        "",
        "Before `kubectl apply -f kubernetes.yaml`:",
        f"  kubectl create secret generic {name}-api-key --from-literal=api-key=...",
        f"  a PersistentVolumeClaim {name}-bundles; this version's whole folder (target/, draft/,",
        "  deploy/, bundle.json) goes into it as a folder named by the bundle's first digits:",
        "    mlflow artifacts download --artifact-uri models:/MODEL@ALIAS "
        f"--dst-path /bundles/{deployment.label}",
        f"  readable for user {USER}, group 0.",
        "",
        "Each engine is a Deployment of one pod with a Service of its own: the proxy sends a "
        "request to the engine",
        "that has the fewest. Side channel: the pod's address, port "
        f"{SIDE_PORT}; UCX chooses further ports.",
        "RDMA between nodes: ask for your device plugin's resource in each engine's pod (not "
        "rendered).",
        "readiness of an engine: /health; of the proxy: probe.py generates a token through both "
        "roles.",
        "A new version stands beside this one, engines and all, until the old one is deleted:",
        "  kubectl delete deployment,service,poddisruptionbudget,configmap "
        f"-l app.kubernetes.io/instance={name},app.kubernetes.io/version=OLD",
        *image_notes(deployment, "Replace the image below; as it stands it cannot be pulled."),
    ]
    return yaml_file(header, documents)


def engine_prefix(deployment: Deployment) -> str:
    """What the names of a version's own objects begin with."""
    return f"{deployment.name}-{deployment.label[:8]}"


def _engine_selector(deployment: Deployment, engine: str = "") -> dict[str, str]:
    """Not the labels that clients' Service selects."""
    found = {
        **selector_of(deployment),
        "app.kubernetes.io/name": "pilotage-engine",
        "app.kubernetes.io/version": deployment.label,
    }
    return {**found, "app.kubernetes.io/component": engine} if engine else found


def _engine_pod(deployment: Deployment, role: Role, probe_name: str) -> dict[str, Any]:
    part = part_of(deployment, role)
    pod = pod_of(part, probe_name)
    (container,) = pod["containers"]
    folder = f"{BUNDLE}/{deployment.label}"
    extra: list[dict[str, Any]] = [
        {"name": key, "value": value}
        for key, value in part_env(deployment).items()
        if key not in deployment.bundle.env
    ]
    # The pod's own address: what it binds to, and what the decode engines are told.
    address = {"fieldRef": {"fieldPath": "status.podIP"}}
    extra += [
        {"name": "VLLM_NIXL_SIDE_CHANNEL_HOST", "valueFrom": address},
        {"name": "VLLM_NIXL_SIDE_CHANNEL_PORT", "value": str(SIDE_PORT)},
    ]
    container["args"] = [
        no_variables(word) for word in part_words(deployment, role, folder, PORT, "0.0.0.0")
    ]
    container["env"] += extra
    container["ports"].append({"name": "nixl", "containerPort": SIDE_PORT})
    container["readinessProbe"] = {
        "httpGet": {"path": "/health", "port": "http"},
        "periodSeconds": PROBE_SECONDS,
        "timeoutSeconds": PROBE_TIMEOUT,
        "failureThreshold": 3,
    }
    container["volumeMounts"] = [
        {**mount, "mountPath": folder, "subPath": deployment.label}
        if mount["name"] == "bundles"
        else mount
        for mount in container["volumeMounts"]
        if mount["name"] != "probe"
    ]
    pod["volumes"] = [volume for volume in pod["volumes"] if volume["name"] != "probe"]
    return pod


def _proxy_pod(deployment: Deployment, maps: dict[str, str]) -> dict[str, Any]:
    pod = pod_of(part_of(deployment, "decode"), maps["probe"])
    (container,) = pod["containers"]
    key = next(item for item in container["env"] if item["name"] == "VLLM_API_KEY")
    memory = f"{mebibytes(PROXY_BYTES)}Mi"
    container |= {
        "name": "proxy",
        "command": ["python3"],
        "args": _proxy_words(deployment, f"/proxy/{PROXY_NAME}", f"{engine_prefix(deployment)}-"),
        "env": [
            *(
                {"name": name, "value": no_variables(value)}
                for name, value in _proxy_env(deployment).items()
            ),
            key,
        ],
        "resources": {"requests": {"cpu": "1", "memory": memory}, "limits": {"memory": memory}},
        # It is well as long as it listens: engines that are not yet there are no fault of it.
        "livenessProbe": {
            "tcpSocket": {"port": "http"},
            "periodSeconds": 10,
            "timeoutSeconds": 10,
            "failureThreshold": 6,
        },
        "volumeMounts": [
            {"name": "probe", "mountPath": "/probe", "readOnly": True},
            {"name": "proxy", "mountPath": "/proxy", "readOnly": True},
            {"name": "tmp", "mountPath": "/tmp"},
        ],
    }
    pod["volumes"] = [
        *(volume for volume in pod["volumes"] if volume["name"] in ("probe", "tmp")),
        {"name": "proxy", "configMap": {"name": maps["proxy"]}},
    ]
    return pod


def _workload(
    deployment: Deployment,
    called: str,
    selector: dict[str, str],
    pod: dict[str, Any],
    *,
    scraped: bool,
) -> dict[str, Any]:
    """A Deployment of one pod. The proxy's page repeats the engines': only theirs are read."""
    annotations = {
        "pilotage/model": deployment.model,
        "pilotage/bundle": deployment.bundle.digest,
        "pilotage/gated-on": deployment.gated_on,
        "prometheus.io/scrape": "true" if scraped else "false",
        "prometheus.io/port": str(PORT),
        "prometheus.io/path": "/metrics",
    }
    labels = {**selector, "app.kubernetes.io/version": deployment.label}
    spec = {
        "replicas": 1,
        # An engine is replaced, not doubled: its GPUs are its own.
        "strategy": {"type": "Recreate" if scraped else "RollingUpdate"},
        "progressDeadlineSeconds": start_budget(deployment) + 300,
        "selector": {"matchLabels": selector},
        "template": {"metadata": {"labels": labels, "annotations": annotations}, "spec": pod},
    }
    return document_of(deployment, "apps/v1", "Deployment", called, spec=spec)


def _service(
    deployment: Deployment, called: str, selector: dict[str, str], port: int = PORT
) -> dict[str, Any]:
    spec = {
        "type": "ClusterIP",
        "selector": selector,
        "ports": [{"name": "http", "port": port, "targetPort": "http"}],
    }
    return document_of(deployment, "v1", "Service", called, spec=spec)


def _budget(deployment: Deployment, called: str, selector: dict[str, str]) -> dict[str, Any]:
    spec = {"maxUnavailable": 1, "selector": {"matchLabels": selector}}
    return document_of(deployment, "policy/v1", "PodDisruptionBudget", called, spec=spec)


# -- what both say ---------------------------------------------------------------------------


def side_channel(host: str, number: int = 0) -> dict[str, str]:
    """Where an engine tells others of its KV cache; `number` among those with one address."""
    return {
        "VLLM_NIXL_SIDE_CHANNEL_HOST": host,
        "VLLM_NIXL_SIDE_CHANNEL_PORT": str(SIDE_PORT + number),
    }


def _proxy_words(deployment: Deployment, program: str, prefix: str) -> list[str]:
    """What follows `python3`; the engines' hosts are their names behind `prefix`."""
    words = [program, "--host", "0.0.0.0", "--port", str(PORT)]
    for role, _, name in engines_of(deployment):
        words += [f"--{role}", f"http://{prefix}{name}:{PORT}"]
    return words


def _proxy_env(deployment: Deployment) -> dict[str, str]:
    """What the probe asks through it. No engine runs there."""
    env = container_env(deployment)
    return {
        "HOME": "/tmp",
        **{name: value for name, value in env.items() if name.startswith("PROBE_")},
    }


def _head(deployment: Deployment, what: str) -> list[str]:
    topology = topology_of(deployment)
    memory = memory_of(deployment)
    return [
        f"rendered, not run: {what} around the `vllm serve` commands of a server in parts.",
        *identity(deployment),
        f"{topology.words}; {deployment.gpus or 'no'} GPUs in all",
        f"memory: {memory.source}; the proxy's is guessed",
        "The engine's image must have the package `nixl` (vLLM's requirements/kv_connectors.txt).",
    ]
