"""vLLM calls `register` in each of its processes (entry point `vllm.general_plugins`).

Nothing happens on a GPU. On a CPU the kernel stands last in vLLM's list, so a layer that one of
vLLM's own kernels can compute never comes to it.
"""

from __future__ import annotations

import os
from functools import cache

FORCED = "VLLM_CPU_UNPACKED"
"""`1`: un-pack also where vLLM has a kernel. For tests of this package."""

NATIVE = "CPUWNA16LinearKernel"
"""vLLM's own kernel. It says that it can compute a layer and does not look whether its operator
`cpu_gemm_wna16` is in the library that was loaded (0.32); the engine dies at the first token."""


@cache
def register() -> None:
    from vllm.platforms import PlatformEnum, current_platform

    if not current_platform.is_cpu():
        return
    from vllm.model_executor.kernels.linear import register_linear_kernel

    from vllm_cpu_unpacked.kernel import UnpackedLinearKernel

    register_linear_kernel(UnpackedLinearKernel, PlatformEnum.CPU, "mp")
    if os.environ.get(FORCED) == "1" or not _native_operator():
        # vLLM's own switch; processes that this one starts get it too.
        disabled = os.environ.get("VLLM_DISABLED_KERNELS", "").split(",")
        os.environ["VLLM_DISABLED_KERNELS"] = ",".join(filter(None, {*disabled, NATIVE}))


def _native_operator() -> bool:
    import torch
    from vllm.platforms import current_platform

    current_platform.import_kernels()
    return hasattr(torch.ops._C, "cpu_gemm_wna16")
