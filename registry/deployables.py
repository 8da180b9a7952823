"""The folder `deploy/` of a registered version, rendered from its bundle.

It lies beside `bundle.json`, `target/` and, with a draft, `draft/`, and starts from there wherever
the folder is. The gated command is `vllm-serve.sh`; everything else was rendered and never run,
and says so in its own first lines. Names and values that come from people are quoted for the
shell, or are values of YAML and JSON; nothing of them is pasted into a text that is then read.
"""

from __future__ import annotations

import os
import shlex
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from registry.deploy_attention import attention_page
from registry.deploy_manifests import PROBE_FILE, compose, kubernetes
from registry.deploy_parts import (
    PROXY_FILE,
    PROXY_NAME,
    compose_parts,
    engines_of,
    kubernetes_parts,
    part_arguments,
    part_env,
    side_channel,
)
from registry.deployment import Deployment, check, memory_of, one_line, part_of
from registry.grafana import dashboard
from registry.serve_words import FOREIGN_ENV, SGLANG_FOREIGN_ENV, argument, speculative_config

if TYPE_CHECKING:
    from jinja2 import Environment

FOLDER = "deploy"

SGLANG_NAMES = {
    "max-model-len": "context-length",
    "tensor-parallel-size": "tp-size",
    "pipeline-parallel-size": "pp-size",
    "dtype": "dtype",
}
"""Engine arguments that mean the same to both, by vLLM's name and SGLang's."""

_DRAFT = "<draft>"


def render(deployment: Deployment) -> dict[str, str]:
    """The files of `deploy/` by their names in it. Pure.

    Raises `UserError` for what no command line or environment can carry.
    """
    check(deployment)
    if deployment.bundle.engine == "sglang":
        return {
            "README.md": _fill("README-sglang.md.j2", deployment),
            "sglang-serve.sh": _own_sglang_script(deployment),
        }
    unit = f"pilotage-{deployment.name}.service"
    if deployment.bundle.topology is not None:
        return _in_parts(deployment, unit)
    return {
        "README.md": _fill("README.md.j2", deployment, unit=unit),
        "vllm-serve.sh": _vllm_script(deployment),
        "sglang-serve.sh": _sglang_script(deployment),
        unit: _fill("pilotage.service.j2", deployment, script="vllm-serve.sh"),
        "compose.yaml": compose(deployment),
        "kubernetes.yaml": kubernetes(deployment),
        "probe.py": PROBE_FILE.read_text(encoding="utf-8"),
        "grafana-dashboard.json": dashboard(deployment),
        "attention-backends.md": attention_page(deployment),
    }


def _in_parts(deployment: Deployment, unit: str) -> dict[str, str]:
    """Of a bundle with prefill and decode apart: nothing of it was run as it stands here."""
    script = "disaggregated-serve.sh"
    return {
        "README.md": _fill(
            "README-disaggregated.md.j2", deployment, unit=unit, topology=deployment.bundle.topology
        ),
        script: _parts_script(deployment),
        PROXY_NAME: PROXY_FILE.read_text(encoding="utf-8"),
        unit: _fill("pilotage.service.j2", deployment, script=script),
        "compose.yaml": compose_parts(deployment),
        "kubernetes.yaml": kubernetes_parts(deployment),
        "probe.py": PROBE_FILE.read_text(encoding="utf-8"),
        "grafana-dashboard.json": dashboard(deployment),
        "attention-backends.md": attention_page(deployment),
    }


def write(deployment: Deployment, folder: Path) -> list[Path]:
    """Write `folder/deploy/`; the scripts can be executed. Raises as `render` does."""
    files = render(deployment)
    below = folder / FOLDER
    below.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        path = below / name
        path.write_text(text, encoding="utf-8")
        if name.endswith(".sh"):
            path.chmod(0o755)
    return [below / name for name in files]


def _vllm_script(deployment: Deployment) -> str:
    return _fill(
        "vllm-serve.sh.j2",
        deployment,
        arguments=_arguments(deployment.bundle.engine_args),
        speculative=_speculative(deployment),
        foreign=FOREIGN_ENV,
    )


def _parts_script(deployment: Deployment) -> str:
    """Every engine with GPUs and ports of its own, and the proxy in front of them."""
    topology, parts, gpu = deployment.bundle.topology, [], 0
    for number, (role, _, name) in enumerate(engines_of(deployment)):
        part = part_of(deployment, role)
        own = part_env(deployment, one_host=True) | deployment.env
        own |= side_channel("127.0.0.1", number)
        if part.gpus:
            own["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, range(gpu, gpu + part.gpus)))
            gpu += part.gpus
        arguments = _arguments(part_arguments(deployment, role))
        parts.append({"name": name, "role": role, "env": own, "arguments": arguments})
    return _fill(
        "disaggregated-serve.sh.j2",
        deployment,
        topology=topology,
        parts=parts,
        speculative=_speculative(deployment),
        foreign=FOREIGN_ENV,
    )


def _speculative(deployment: Deployment) -> list[str]:
    """vLLM's words for the draft, before and behind its folder; none without a draft."""
    if deployment.bundle.draft is None:
        return []
    return speculative_config(_DRAFT, deployment.bundle.num_speculative_tokens or 0).split(_DRAFT)


def _sglang_script(deployment: Deployment) -> str:
    bundle = deployment.bundle
    translated, left_out = {}, []
    for name, value in bundle.engine_args.items():
        if name in SGLANG_NAMES:
            translated[SGLANG_NAMES[name]] = value
        elif name == "enforce-eager" and value is True:
            translated["disable-cuda-graph"] = True
        else:
            left_out.append(name)
    left_out += sorted(bundle.env)
    return _fill(
        "sglang-serve.sh.j2",
        deployment,
        own=False,
        arguments=_arguments(translated),
        left_out=left_out,
        num_speculative_tokens=bundle.num_speculative_tokens,
    )


def _own_sglang_script(deployment: Deployment) -> str:
    """Of a bundle that was made for SGLang: its own words, as its server is started with."""
    bundle = deployment.bundle
    return _fill(
        "sglang-serve.sh.j2",
        deployment,
        own=True,
        arguments=_arguments(bundle.engine_args),
        foreign=SGLANG_FOREIGN_ENV,
        num_speculative_tokens=bundle.num_speculative_tokens,
    )


def _arguments(engine_args: dict[str, Any]) -> list[list[str]]:
    """The words of each argument; those without words left out."""
    return [words for name, value in engine_args.items() if (words := argument(name, value))]


def _fill(template: str, deployment: Deployment, **more: Any) -> str:
    bundle = deployment.bundle
    return (
        _environment()
        .get_template(template)
        .render(
            model=deployment.model,
            name=deployment.name,
            label=deployment.label,
            digest=bundle.digest,
            draft=bundle.draft is not None,
            version=bundle.engine_version,
            engine=f"{bundle.engine} {bundle.engine_version}",
            hardware=deployment.gated_on,
            memory=memory_of(deployment),
            env=deployment.env,
            **more,
        )
    )


@cache
def _environment() -> Environment:
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    made = Environment(
        loader=FileSystemLoader(os.fspath(Path(__file__).parent / "deploy")),
        autoescape=False,  # shell and Markdown, no HTML; every value has a filter of its own
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    made.filters.update(sh=shlex.quote, comment=one_line)
    return made
