"""Deployments for tests, and what a container engine and a shell make of a rendered file."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import Any

from registry.bundle import Bundle, Part
from registry.deployment import Deployment

CPU = {"cpu": "AMD EPYC 9454", "cores": 2, "memory_gib": 16, "gpus": []}
H200 = {
    "cpu": "Intel Xeon 8592+",
    "cores": 64,
    "memory_gib": 512,
    "gpus": ["NVIDIA H200, 143771 MiB, 570.86"] * 8,
}
ODD_ARGS: dict[str, Any] = {
    "hf-overrides": {"a": ["it's", '"$HOME"', "$(id)", "`id`"], "b": "\\ ; & | > #"},
    "override-generation-config": {"temperature": 0.5},
    "chat-template": "/a b/it's $(touch pwned).jinja",
    "enforce-eager": True,
    "enable-prefix-caching": False,
    "max-model-len": 1024,
    "cudagraph-capture-sizes": [1, 2, 4],
}
"""Values that mean something to a shell, to Compose, to Kubernetes and to YAML."""


def downloaded(parent: Path) -> Path:
    """A downloaded version's folder, in a place with a difficult name."""
    folder = parent / 'it\'s "a" \\ $HOME é'
    for part in ("target", "draft"):
        (folder / part).mkdir(parents=True)
    return folder


def deployment(
    model: str = "freight-assistant",
    *,
    version: str = "0.32.0+cpu",
    args: dict[str, Any] | None = None,
    env: dict[str, str] | None = None,
    draft: bool = True,
    hardware: dict[str, Any] | None = None,
    **more: Any,
) -> Deployment:
    bundle = Bundle(
        name="w8a8-eagle3",
        target=Part(stage="quantize", key="a" * 64, digest="b" * 64),
        draft=Part(stage="draft", key="c" * 64, digest="d" * 64) if draft else None,
        num_speculative_tokens=3 if draft else None,
        engine_version=version,
        engine_args=args or {},
        env=env or {},
    )
    facts = {"weights_bytes": 3 * 2**30, "hardware": hardware or CPU, **more}
    return Deployment(model=model, bundle=bundle, **facts)


def on_gpus(**more: Any) -> Deployment:
    args = {"tensor-parallel-size": 2, "pipeline-parallel-size": 2, "max-model-len": 4096}
    return deployment(version="0.32.0", hardware=H200, args=args, **more)


def fake_vllm(folder: Path, version: str = "0.32.0+cpu") -> Path:
    """A `vllm` that writes its words and environment to `folder/words` and `folder/env`."""
    folder.mkdir(exist_ok=True)
    script = folder / "vllm"
    script.write_text(
        "#!/bin/sh\n"
        f"if [ \"$1\" = --version ]; then echo 'a warning'; echo '{version}'; exit; fi\n"
        'here=${0%/*}\nfor word in "$@"; do printf "%s\\0" "$word"; done > "$here/words"\n'
        '/usr/bin/env -0 > "$here/env"\n'
    )
    script.chmod(script.stat().st_mode | stat.S_IXUSR)
    return script


def said(folder: Path) -> tuple[list[str], dict[str, str]]:
    """Words and environment that `fake_vllm` was started with."""
    words = (folder / "words").read_bytes().decode().split("\0")[:-1]
    pairs = (folder / "env").read_bytes().decode().split("\0")[:-1]
    return words, dict(pair.split("=", 1) for pair in pairs)


def path_with(folder: Path) -> str:
    return f"{folder}{os.pathsep}/usr/bin{os.pathsep}/bin"
