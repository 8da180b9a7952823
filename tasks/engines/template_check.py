"""A model folder's chat template and tokenizer, tried in a process that may take little.

A template is a program of somebody else's. Jinja's sandbox keeps it from everything outside, but
not from memory and time: `x ~ x` in a loop fills any machine. A tokenizer file is read by a library
that may end its process. Whatever either does, this process gets an answer.

`python -m tasks.engines.template_check FOLDER BYTES SECONDS` writes problems as JSON.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

from registry.errors import InfrastructureError, Problem, StageFailed
from registry.redaction import without_secrets
from registry.settings import CHECKOUT
from tasks.engines.model_files import check_template

MEMORY = 2 << 30
"""Bytes of address space; Python with a vocabulary of 250 000 words takes below 1 GiB."""
SECONDS = 10
"""Of a processor; a template takes milliseconds."""
WAIT = 300.0
ALONE = {"TOKENIZERS_PARALLELISM": "false", "RAYON_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "1"}
"""Every further thread would ask for address space, used or not."""

_REMEDY = "take the files that came with the model"


def check_apart(root: Path) -> None:
    """Raises `StageFailed` for what `check_template` refuses or a tokenizer that cannot be read."""
    try:
        ended = subprocess.run(
            [sys.executable, "-m", __name__, str(root.absolute()), str(MEMORY), str(SECONDS)],
            cwd=CHECKOUT,
            env={**without_secrets(os.environ), **ALONE},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=WAIT,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise InfrastructureError(f"{root}: nobody read its template within {WAIT:.0f} s") from None
    if ended.returncode == 0:
        problems = [Problem(**one) for one in json.loads(ended.stdout)]
    elif ended.returncode == -signal.SIGXCPU:
        what = f"its chat template or tokenizer takes more than {SECONDS} s"
        problems = [Problem(str(root), what, _REMEDY)]
    elif ended.returncode in (-signal.SIGABRT, -signal.SIGSEGV):
        name = signal.Signals(-ended.returncode).name
        what = f"its chat template or tokenizer ended the process that read it ({name})"
        problems = [Problem(str(root), what, _REMEDY)]
    else:
        last = ended.stderr.decode(errors="replace").strip().splitlines()[-1:]
        raise InfrastructureError(
            f"{root}: its template was not read, status {ended.returncode}: {''.join(last)}"
        )
    if problems:
        raise StageFailed(problems)


def _problems(root: Path) -> list[Problem]:
    try:
        check_template(root)
        return _tokenizer(root / "tokenizer.json")
    except StageFailed as refused:
        return refused.problems
    except MemoryError:
        what = "its chat template or tokenizer takes more memory than any should"
        return [Problem(str(root), what, _REMEDY)]


def _tokenizer(file: Path) -> list[Problem]:
    if not file.is_file():
        return []
    from tokenizers import Tokenizer

    try:
        Tokenizer.from_file(str(file))
    except MemoryError:
        raise
    except BaseException as error:  # its panics are no `Exception`
        return [Problem(str(file), f"is no tokenizer: {str(error)[:200]}", _REMEDY)]
    return []


def _limit(memory: int, seconds: int) -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 5))


if __name__ == "__main__":
    _limit(int(sys.argv[2]), int(sys.argv[3]))
    print(json.dumps([asdict(one) for one in _problems(Path(sys.argv[1]))]))
