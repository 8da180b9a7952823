"""Remake the fully pinned lists. `make lock` runs this; needs `uv`, which it installs itself.

Versions that a list already has are kept while they satisfy the `.in` file; `make lock UPGRADE=1`
takes the newest instead. The CPU lists leave out what only a CUDA build of torch needs.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
CUDA_ONLY = r"nvidia-(?!ml-py)|cuda-"
NOTHING = r"(?!)"

LISTS = {
    # name: (source, overrides, names to leave out); xgrammar needs triton on a CPU too
    "driver-cpu": ("driver.in", "overrides-driver.txt", rf"{CUDA_ONLY}|triton=="),
    "driver-cuda": ("driver.in", "overrides-driver.txt", NOTHING),
    "serve-cpu": ("serve-cpu.in", "overrides-serve-cpu.txt", CUDA_ONLY),
    "serve-cuda": ("serve-cuda.in", None, NOTHING),
}


def main() -> None:
    subprocess.run([sys.executable, "-m", "pip", "install", "-q", "uv"], check=True)
    upgrade = ["--upgrade"] if os.environ.get("UPGRADE") else []
    for name, (source, overrides, unwanted) in LISTS.items():
        target = HERE / f"{name}.txt"
        command = [sys.executable, "-m", "uv", "pip", "compile", "-q", source, *upgrade]
        command += ["--python-version", "3.11", "--no-header", "--no-annotate"]
        if overrides:
            command += ["--override", overrides]
        # uv reads the versions to keep from the file it writes to.
        partial = target.with_suffix(".partial")
        if target.exists():
            partial.write_text(target.read_text())
        command += ["-o", str(partial)]
        subprocess.run(command, cwd=HERE, check=True, stdout=subprocess.DEVNULL)
        pins = [line for line in partial.read_text().splitlines() if "==" in line]
        partial.unlink()
        pins = [pin for pin in pins if not re.match(unwanted, pin)]
        # Drop environment markers: the lists are for Linux and Python 3.11 alone.
        pins = [pin.partition(" ;")[0].strip() for pin in pins]
        header = [
            f"# Made by `make lock` from {source}; do not edit.",
            "# Linux, Python 3.11. Installed with --no-deps: the list is complete by itself.",
        ]
        if overrides:
            header.append(f"# Left out on purpose, see {overrides}.")
        target.write_text("\n".join([*header, *pins]) + "\n")
        print(f"{target.name}: {len(pins)} packages")


if __name__ == "__main__":
    main()
