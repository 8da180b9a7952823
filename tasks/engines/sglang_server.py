"""An SGLang server of our own: a vLLM server with another spelling.

Process, port, key, readiness by one token, memory and end are those of `VllmServer`. Other are the
command line, where the key stands, and what the engine says of itself. Names and paths are those of
sglang 0.5.23, read in its source: no GPU was here, and **nothing of this was run**.
"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

from registry.errors import PilotageError, UserError
from registry.json_files import json_object
from registry.serve_words import SGLANG_FOREIGN_ENV, sglang_words
from registry.settings import settings
from tasks.engines.engine_kernels import is_quantized
from tasks.engines.vllm_server import VllmServer, argument_error


class SglangServer(VllmServer):
    """`python -m sglang.launch_server` on a free loopback port with a random key.

    SGLang reads its key from an argument, which every user of the machine could see in the process
    table; its file of arguments (`--config`) can be read by this user alone.
    """

    name = "SGLang"
    # Its /health generates a token of its own and takes a second; this one only says when.
    ready_path = "/ready"
    foreign_env = SGLANG_FOREIGN_ENV

    @property
    def key_file(self) -> Path:
        """Beside the log; gone once the server is ready, or when it is stopped."""
        return self.log.with_name(f".{self.log.name}-{os.getpid()}-{id(self):x}.yaml")

    @property
    def command(self) -> list[str]:
        draft = str(self.draft) if self.draft is not None else None
        words = sglang_words(
            str(self.target),
            self.served_name,
            self._engine_args,
            self.port,
            draft,
            self._num_speculative_tokens,
        )
        config = ["--config", str(self.key_file)]
        return [str(self._python), "-m", "sglang.launch_server", *words, *config]

    def stop(self) -> None:
        """End every process of the server, and take its key away. Safe to call twice."""
        super().stop()
        self.key_file.unlink(missing_ok=True)

    def _start(self) -> None:
        self.log.parent.mkdir(parents=True, exist_ok=True)
        self.key_file.unlink(missing_ok=True)
        handle = os.open(self.key_file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            # JSON is YAML, and the key is quoted whatever it begins with.
            json.dump({"api-key": self.api_key}, file)
        super()._start()

    def _own_python(self) -> Path:
        return settings().sglang_python or Path("sglang-python")

    def _check_python(self) -> None:
        if shutil.which(self._python) is None:
            raise UserError.at(
                "PILOTAGE_SGLANG_PYTHON",
                f"{self._python} is no Python that can be run",
                "name the Python of an environment that has SGLang",
            )

    def _read_engine(self, log: str) -> None:
        """Its version. Its log names no kernel that we know, so times of quantized targets stay
        unproven: `check_times_count` says what that means."""
        self.key_file.unlink(missing_ok=True)
        self.engine_version = str(self._get("/server_info").json()["version"])
        config = self.target / "config.json"
        self.quantized = is_quantized(
            json_object(config) if config.is_file() else {}, self._engine_args
        )
        self.kernels = None
        self.emulated_kernels = None if self.quantized else []

    def _failure(self, log: str) -> PilotageError | None:
        """Only what argparse says is known; anything else is told by the end of the log."""
        help_words = "`python -m sglang.launch_server --help` lists names and values"
        return argument_error(log, self._where, self.name, help_words)
