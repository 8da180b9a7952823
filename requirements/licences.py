"""Write docs/licences.md: what is installed in both environments, and under which licence.

    .venv/bin/python requirements/licences.py     (make licences)

The names come from the lock files, the licences from what the packages say of themselves.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LOCKS = {"driver": "driver-cpu.txt", "serve": "serve-cpu.txt"}
PYTHONS = {"driver": ".venv/bin/python", "serve": ".venv-serve/bin/python"}

SAID_IN_THEIR_FILES = {
    "huey": "MIT",
    "oss-harmony": "Apache-2.0",
    "setuptools": "MIT",
    "skops": "MIT",
}
"""Packages whose metadata names no licence: read in the LICENSE file that comes with them."""

ASK = """
import importlib.metadata as m, json
def licence(d):
    said = d.metadata.get("License-Expression") or ""
    named = [c.split(" :: ")[-1] for c in d.metadata.get_all("Classifier") or ()
             if c.startswith("License ::") and not c.endswith("OSI Approved")]
    first = next(iter((d.metadata.get("License") or "").strip().splitlines()), "")
    return said or "; ".join(named) or first[:80]
print(json.dumps({d.metadata["Name"]: [d.version, licence(d)] for d in m.distributions()}))
"""


def canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def locked(file: Path) -> dict[str, str]:
    """`{name: version}` of a lock file."""
    pins = re.findall(r"^([A-Za-z0-9_.-]+)(?:\[[^\]]*\])?==([^\s;]+)", file.read_text(), re.M)
    return {canonical(name): version for name, version in pins}


def installed(python: str) -> dict[str, tuple[str, str]]:
    answer = subprocess.run(
        [str(ROOT / python), "-I", "-c", ASK], capture_output=True, text=True, check=True
    )
    return {canonical(name): tuple(found) for name, found in json.loads(answer.stdout).items()}


def document() -> str:
    rows: dict[tuple[str, str], tuple[str, set[str]]] = {}
    for environment, lock in LOCKS.items():
        found = installed(PYTHONS[environment])
        for name, version in locked(ROOT / "requirements" / lock).items():
            there, said = found.get(name, ("", ""))
            # Another version's licence says nothing; a build (`+cpu`) is no other version.
            same = version in (there, there.partition("+")[0])
            known = said.replace("|", "/") or SAID_IN_THEIR_FILES.get(name, "says none")
            licence = known if same else ""
            rows.setdefault((name, version), (licence, set()))[1].add(environment)
    stale = [f"{name} {version}" for (name, version), (licence, _) in rows.items() if not licence]
    if stale:
        sys.exit(f"not installed as locked: {', '.join(stale)}; `make env` first")
    lines = [f"| {name} | {version} | {' '.join(sorted(where))} | {licence} |"
             for (name, version), (licence, where) in sorted(rows.items())]  # fmt: skip
    return HEAD + "\n".join(lines) + "\n" + CUDA.format(names=", ".join(only_for_cuda()))


def only_for_cuda() -> list[str]:
    """`NAME VERSION` of what only the lock files for CUDA name, by whatever version."""
    names = {name for lock in LOCKS.values() for name in locked(ROOT / "requirements" / lock)}
    more = {
        f"{name} {version}"
        for lock in LOCKS.values()
        for name, version in locked(ROOT / "requirements" / lock.replace("-cpu", "-cuda")).items()
        if name not in names
    }
    return sorted(more)


HEAD = """# Licences

Every package of the lock files for CPUs, and the licence that it names itself. Written by
`make licences`; a test compares names and versions with `requirements/*.txt`.

| package | version | environment | licence |
|---|---|---|---|
"""

CUDA = """
## Only in the lock files for CUDA

Not installed where this list was written, so nothing is said of their licences. Libraries of NVIDIA
come under licences of its own in part: read them before you pass an image on.

{names}
"""

if __name__ == "__main__":
    (ROOT / "docs" / "licences.md").write_text(document(), encoding="utf-8")
    sys.exit(0)
