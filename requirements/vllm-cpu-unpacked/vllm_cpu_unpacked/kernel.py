"""The kernel that is none: packed INT weights become plain ones when they are loaded."""

from __future__ import annotations

import torch
from compressed_tensors.compressors.pack_quantized.helpers import unpack_from_int32
from compressed_tensors.quantization.lifecycle.forward import dequantize
from vllm.logger import init_logger
from vllm.model_executor.kernels.linear import MPLinearKernel, MPLinearLayerConfig
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.platforms import current_platform

# Below `vllm`, whose logger is the one that writes.
logger = init_logger("vllm.cpu_unpacked")

BITS = (2, 4, 8)
"""Those that fill 32 bits without a rest: vLLM and compressed-tensors pack others differently."""


class UnpackedLinearKernel(MPLinearKernel):
    """The numbers of the packed layer in the dtype of its scales, and vLLM's plain matmul.

    compressed-tensors' own functions un-pack, as transformers has it: the weights are equal to
    those that transformers computes with. Memory and time are those of a model that was never
    quantized. Symmetric and asymmetric, by group and by channel; rows in the order of the GPTQ
    ("static" order), since vLLM itself refuses any other.
    """

    @classmethod
    def get_min_capability(cls) -> int:
        return -1

    @classmethod
    def can_implement(cls, c: MPLinearLayerConfig) -> tuple[bool, str | None]:
        if not current_platform.is_cpu():
            return False, "un-packing is for CPUs"
        if not c.weight_type.is_integer() or c.weight_type.size_bits not in BITS:
            return False, f"un-packs integers of {BITS} bits, not {c.weight_type}"
        return True, None

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        # The second line that a reader of the log looks for; the first is vLLM's own.
        logger.warning_once(
            "Using UnpackedLinearKernel: vLLM has no kernel for these weights on this CPU, so they "
            "were un-packed. Answers are those of the quantized model; times are not."
        )
        bits = self.config.weight_type.size_bits
        packed, scale, zero_point = self._by_rows(layer)
        # Of a layer that is split among workers, this worker's part.
        columns, rows = self.config.partition_weight_shape
        weight = dequantize(
            unpack_from_int32(packed, bits, torch.Size((rows, columns))),
            scale,
            unpack_from_int32(zero_point, bits, scale.shape, packed_dim=0)
            if zero_point is not None
            else None,
        )
        for name in (self.w_q_name, self.w_s_name, self.w_zp_name):
            if name is not None and hasattr(layer, name):
                delattr(layer, name)
        layer.weight = torch.nn.Parameter(weight.to(scale.dtype), requires_grad=False)
        self._plain = UnquantizedLinearMethod()
        self._plain.process_weights_after_loading(layer)

    def _by_rows(
        self, layer: torch.nn.Module
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Packed weight [rows, columns / factor], scale [rows, groups], zero point [rows / factor,
        groups] or None. AutoGPTQ and AWQ keep them the other way round.
        """
        packed, scale, zero_point = self._get_weight_params(layer)
        # Both packed along the columns, which vLLM sees to before a kernel gets them.
        assert packed.input_dim == packed.packed_dim, "packed along the rows"
        if not self.config.zero_points:
            zero_point = None
        if packed.input_dim == 0:
            packed = packed.t()
        if scale.output_dim == 1:
            scale = scale.t()
        if zero_point is not None and zero_point.output_dim == 1:
            zero_point = zero_point.t()
        contiguous = (one.contiguous() if one is not None else None for one in (scale, zero_point))
        return packed.contiguous(), *contiguous

    def apply_weights(
        self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        return self._plain.apply(layer, x, bias)
