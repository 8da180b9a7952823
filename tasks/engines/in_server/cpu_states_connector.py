"""Hidden states out of a vLLM server on a CPU. Loaded by vLLM, in the serve environment.

vLLM 0.32's own `ExampleHiddenStatesConnector` copies a request's states through pinned memory on a
CUDA stream; without CUDA it dies there (`pin_memory=True requires a CUDA or other accelerator
backend`). Here the same slots are read and written in place. Everything else is vLLM's: the states
it collects, their order, and the lock by which a client waits for the file.

This folder, and nothing else of the project, is on the server's PYTHONPATH.
"""

from __future__ import annotations

import fcntl
import os
from typing import Any

import torch
from safetensors.torch import save_file
from vllm.distributed.kv_transfer.kv_connector.v1.example_hidden_states_connector import (
    ExampleHiddenStatesConnector,
    extract_from_kv_cache,
)


class Written:
    """Stands where vLLM keeps a CUDA event: the copy is done when it is asked for."""

    def query(self) -> bool:
        return True


class CpuStatesConnector(ExampleHiddenStatesConnector):
    def _submit_async_write(self, pending: Any) -> None:
        blocks = torch.tensor(pending.block_ids, dtype=torch.long)
        offsets = torch.arange(self._block_size, dtype=torch.long)
        slots = (blocks[:, None] * self._block_size + offsets[None]).flatten()
        states = extract_from_kv_cache(self._kv_cache, slots, pending.token_ids.shape[0])
        lock = self._lock_fds.pop(pending.req_id, None)
        if lock is None:
            lock = os.open(pending.filename + ".lock", os.O_CREAT | os.O_WRONLY | os.O_TRUNC, 0o600)
            fcntl.flock(lock, fcntl.LOCK_EX)
        try:
            save_file(
                {"hidden_states": states.contiguous(), "token_ids": pending.token_ids},
                pending.filename,
            )
        finally:
            os.close(lock)
        self._req_copy_events[pending.req_id] = Written()
