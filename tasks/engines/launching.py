"""One training job in several processes: `accelerate launch`, one process per GPU or CPU share.

The first process writes the result; the others help to train and end. Their launch line is printed
and stands in the result, so that it can be run by hand.
"""

from __future__ import annotations

import json
import os
import resource
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from registry.errors import InfrastructureError, Problem, StageFailed, UserError
from tasks.engines.ports import free_port
from tasks.engines.subprocesses import job_main

LINE = "PILOTAGE_LAUNCH_LINE"
"""Environment variable by which the processes know how they were started."""


REPORT_SECONDS = 30.0
"""How long a process that met a mistake leaves the first one to report it."""


def is_worker() -> bool:
    """Whether this process is one of several that were launched together."""
    return int(os.environ.get("WORLD_SIZE", "1")) > 1 and LINE in os.environ


def is_first() -> bool:
    return os.environ.get("RANK", "0") == "0"


def launch_line() -> str | None:
    """How the processes of this job were started; None where there is one only."""
    return os.environ.get(LINE) if is_worker() else None


def has_gpu() -> bool:
    from registry.provenance import hardware

    return bool(hardware()["gpus"])


def command(module: str, processes: int, port: int, files: list[str]) -> list[str]:
    """The launch of `module` with the job's and the result's file. Pure."""
    return [
        sys.executable,
        "-m",
        "accelerate.commands.launch",
        "--num_processes",
        str(processes),
        "--num_machines",
        "1",
        "--mixed_precision",
        "no",  # the job says it
        "--dynamo_backend",
        "no",
        "--main_process_port",
        str(port),
        # Means "several processes here"; the job itself says whether they use GPUs.
        "--multi_gpu",
        "--module",
        module,
        *files,
    ]


def launched(module: str, job: Mapping[str, Any], processes: int) -> dict[str, Any]:
    """Run the job in `processes` processes and return the first one's result."""
    on_gpu = has_gpu()
    if on_gpu:
        from registry.provenance import hardware

        gpus = len(hardware()["gpus"])
        if processes > gpus:
            raise StageFailed(
                Problem(
                    "processes", f"{processes} asked for and {gpus} GPUs here", f"at most {gpus}"
                )
            )
    with tempfile.TemporaryDirectory(prefix="pilotage-launch-") as folder:
        files = [str(Path(folder) / name) for name in ("job.json", "result.json")]
        Path(files[0]).write_text(json.dumps(job, ensure_ascii=False), encoding="utf-8")
        words = command(module, processes, free_port(), files)
        line = shlex.join(words)
        print(line, flush=True)
        env = {**os.environ, LINE: line, "OMP_NUM_THREADS": str(job["threads"])}
        if not on_gpu:
            env["ACCELERATE_USE_CPU"] = "true"
        status = subprocess.run(words, env=env, check=False).returncode
        if not Path(files[1]).exists():
            raise InfrastructureError(f"{line} ended with status {status} and no result")
        result: dict[str, Any] = json.loads(Path(files[1]).read_text(encoding="utf-8"))
    if "error" in result:
        raise StageFailed([Problem(**problem) for problem in result["error"]["problems"]])
    return result


def main(run: Callable[[Mapping[str, Any]], dict[str, Any]]) -> None:
    """`job_main`, but only the first of several processes writes a result.

    A process that ends with a mistake ends with status 1: the launcher ends the others only then,
    and on GPUs they would wait in their next collective for as long as it may take.
    """
    if is_first():
        job_main(run)
        result = json.loads(Path(sys.argv[2]).read_text(encoding="utf-8"))
        if is_worker() and "error" in result:
            sys.exit(1)
        return
    try:
        run(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")))
    except UserError as error:
        # The first process mostly meets the same mistake: it has a while to write that down.
        print(f"process {os.environ['RANK']}: {error}", flush=True)
        time.sleep(REPORT_SECONDS)
        sys.exit(1)


def one_gpu_a_process() -> None:
    """A single process trains on one GPU: without a launcher transformers would wrap the model in
    `DataParallel` over all that it sees. Must come before CUDA is first asked."""
    if is_worker():
        return
    seen = os.environ.get("CUDA_VISIBLE_DEVICES")
    os.environ["CUDA_VISIBLE_DEVICES"] = (seen or "0").split(",")[0] if seen != "" else ""


def peak_memory() -> dict[str, float | None]:
    """Largest resident memory of this process and memory on its GPU so far, in GiB."""
    import torch

    kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    gpu = torch.cuda.max_memory_allocated() / 2**30 if torch.cuda.is_available() else None
    return {
        "peak_memory_gib": round(kib / 2**20, 3),
        "peak_gpu_memory_gib": None if gpu is None else round(gpu, 3),
    }
