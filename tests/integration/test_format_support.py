"""The table of formats and GPUs, against the installed engine's own choice of kernels."""

from __future__ import annotations

import json
import subprocess
from typing import Any

import pytest

from recipes import loader
from recipes.schema import ServeRecipe
from registry.capacity_plan import plan
from registry.format_support import kv_problem, support_of
from registry.json_files import json_object
from registry.machines import Machine
from registry.model_shapes import shape_of
from registry.plan_parts import Demand, Limits, Model, Wish
from registry.serve_words import engine_words
from registry.settings import CHECKOUT, settings
from registry.topology import ROLES
from tasks.capacity_inputs import machine_of

CAPABILITIES = [(7, 5), (8, 0), (8, 6), (8, 9), (9, 0), (10, 0)]

ASK = """
import json, sys, types
import torch
sys.modules.setdefault("vllm._C_stable_libtorch", types.ModuleType("vllm._C_stable_libtorch"))
from vllm.platforms import current_platform as platform
from vllm.platforms.interface import DeviceCapability, PlatformEnum
from vllm.platforms.cuda import CudaPlatformBase
from vllm import _custom_ops as ops
from vllm.model_executor.kernels import linear
from vllm.model_executor.layers.quantization.compressed_tensors import schemes
from vllm.model_executor.layers.quantization import fbgemm_fp8, modelopt
from vllm.model_executor.layers.quantization.auto_awq import AutoAWQConfig
from vllm.model_executor.layers.quantization.auto_gptq import AutoGPTQConfig
from vllm.model_executor.layers.quantization.utils import marlin_utils
from vllm.scalar_type import scalar_types

# No GPU is here: the platform is asked as if one were there.
def on(capability):
    here = DeviceCapability(*capability)
    number = here.to_int()
    kind = type(platform)
    for name, value in {
        "is_cuda": lambda *_: True, "is_cuda_alike": lambda *_: True, "is_cpu": lambda *_: False,
        "is_rocm": lambda *_: False, "is_xpu": lambda *_: False,
        "get_device_capability": classmethod(lambda *_, **__: here),
        "has_device_capability": classmethod(lambda _, asked, *__, **___: number >= (
            asked if isinstance(asked, int) else asked[0] * 10 + asked[1])),
        "is_device_capability": classmethod(lambda _, asked, *__, **___: number == asked),
        "is_device_capability_family": classmethod(
            lambda _, asked, *__, **___: number // 10 == asked // 10),
    }.items():
        setattr(kind, name, value)
    # The compiled part's answers (csrc/libtorch_stable/quantization), for CUDA 12.8 and later.
    ops.cutlass_scaled_mm_supports_fp8 = lambda cc: cc >= 89
    ops.cutlass_scaled_mm_supports_block_fp8 = lambda cc: cc >= 90
    from vllm.model_executor.layers.quantization.utils import nvfp4_utils, w8a8_utils
    nvfp4_utils.cutlass_scaled_mm_supports_fp4 = lambda cc: cc >= 100
    from vllm.model_executor.kernels.linear.scaled_mm import cutlass
    cutlass.CUTLASS_BLOCK_FP8_SUPPORTED = w8a8_utils.cutlass_block_fp8_supported()
    # FlashInfer is in the CUDA environment only.
    from vllm.model_executor.kernels.linear.mxfp4 import flashinfer
    flashinfer.has_flashinfer_cutedsl = lambda: True
    from vllm.model_executor.kernels.linear.mxfp8 import flashinfer
    flashinfer.has_flashinfer_cutedsl = lambda: True

def first(kernels, capability):
    number = capability[0] * 10 + capability[1]
    for kernel in kernels[PlatformEnum.CUDA]:
        try:
            if kernel.is_supported(number)[0]:
                return kernel.__name__
        except Exception as error:
            print(kernel.__name__, repr(error)[:200], file=sys.stderr)
    return None

def mixed(capability, types=scalar_types.uint4b8):
    number = capability[0] * 10 + capability[1]
    names = [k.__name__ for k in linear._POSSIBLE_KERNELS[PlatformEnum.CUDA]
             if k.get_min_capability() <= number]
    marlin = marlin_utils.check_marlin_supported(types, 128, device_capability=number)
    return {"names": names, "marlin": marlin}

asked = json.load(sys.stdin)
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.utils.argparse_utils import FlexibleArgumentParser
parser = make_arg_parser(FlexibleArgumentParser())
answer = {"parsed": [], "served": {}}
for recipe, words in asked["recipes"].items():
    answer["served"][recipe] = vars(parser.parse_args(["m", *words]))
for given in asked["commands"]:
    words = [word for name, value in given.items() for word in ("--" + name, str(value))]
    read = vars(parser.parse_args(["m", *words]))
    names = [name.replace("-", "_") for name in given]
    answer["parsed"].append({name: str(read[name]) for name in names})
for capability in asked["capabilities"]:
    on(capability)
    dtypes = CudaPlatformBase.supported_dtypes.fget(platform)
    answer[str(capability)] = {
        "dtypes": [str(one) for one in dtypes],
        "fp8": first(linear._POSSIBLE_FP8_KERNELS, capability),
        "fp8_block": first(linear._POSSIBLE_FP8_BLOCK_KERNELS, capability),
        "int8": first(linear._POSSIBLE_INT8_KERNELS, capability),
        "nvfp4": first(linear._POSSIBLE_NVFP4_KERNELS, capability),
        "mxfp4": first(linear._POSSIBLE_MXFP4_KERNELS, capability),
        "mxfp8": first(linear._POSSIBLE_MXFP8_KERNELS, capability),
        "w4a16": mixed(capability), "w8a16": mixed(capability, scalar_types.uint8b128),
    }
answer["minimum"] = {
    "fp8": schemes.CompressedTensorsW8A8Fp8.get_min_capability(),
    "fp8_weights": schemes.CompressedTensorsW8A16Fp8.get_min_capability(),
    "int8": schemes.CompressedTensorsW8A8Int8.get_min_capability(),
    "wNa16": schemes.CompressedTensorsWNA16.get_min_capability(),
    "nvfp4": schemes.CompressedTensorsW4A4Fp4.get_min_capability(),
    "mxfp4": schemes.CompressedTensorsW4A4Mxfp4.get_min_capability(),
    "awq": AutoAWQConfig.get_min_capability(), "gptq": AutoGPTQConfig.get_min_capability(),
    "modelopt": modelopt.ModelOptFp8Config.get_min_capability(),
    "modelopt_fp4": modelopt.ModelOptNvFp4Config.get_min_capability(),
    "modelopt_mxfp8": modelopt.ModelOptMxFp8Config.get_min_capability(),
    "fbgemm_fp8": fbgemm_fp8.FBGEMMFp8Config.get_min_capability(),
}
# What an FP8 KV cache needs: said in words by the one backend, in lists by the others.
import importlib.machinery, inspect
from unittest import mock
for name in ("flashinfer", "flashinfer.decode", "flashinfer.prefill", "flashinfer.utils"):
    spec = importlib.machinery.ModuleSpec(name, None)
    sys.modules.setdefault(name, mock.MagicMock(__spec__=spec))
from vllm.v1.attention.backends import fa_utils, flashinfer, triton_attn
on((8, 6))
fa_utils.get_flash_attn_version = lambda *_, **__: 2
answer["attention"] = {
    "triton_floor": 89 if "has_device_capability(89)" in inspect.getsource(triton_attn) else None,
    "flash_attn_2": fa_utils.flash_attn_supports_kv_cache_dtype("fp8"),
    "flashinfer_heads": flashinfer.FlashInferBackend.get_supported_head_sizes(),
}
print("ANSWER" + json.dumps(answer, default=str))
"""


def planned_commands() -> list[dict[str, Any]]:
    """Engine arguments of plans on a card, on two, with a float16 baseline, and on a CPU."""
    path = CHECKOUT / "tests" / "data" / "model_configs" / "llama_3_1_8b.json"
    model = Model(shape_of(json_object(path), str(path)), "llama")
    machines = [machine_of(name) for name in ("nvidia_h20", "nvidia_t4", "nvidia_a10")]
    demand = Demand(32, 8192, 8192)
    found = list(plan(model, machines, demand, Wish(), Limits()).fits)
    found += plan(model, machines, demand, Wish(kv_dtype="fp8", pp=2), Limits()).fits
    small = Demand(1, 512, 512)
    here = [machine_of("cpu_2core")]
    found += plan(model, here, small, Wish(formats=("w4a16",)), Limits()).fits
    return [fit.engine_args for fit in found]


def served_arguments() -> dict[str, dict[str, Any]]:
    """Engine arguments of every shipped serve recipe for vLLM; of each role, where they differ."""
    recipes = {name: loader.load(name, "serve", ServeRecipe) for name in loader.shipped("serve")}
    found = {}
    for name, one in recipes.items():
        if one.topology is not None:
            for role in ROLES:
                found[f"{name}, {role}"] = one.topology.arguments(role, one.engine_args)
        elif one.engine == "vllm":
            found[name] = one.engine_args
    return found


@pytest.fixture(scope="module")
def engine() -> dict[str, Any]:
    """One process of the serve environment for all of it: its imports take ten seconds."""
    python = settings().serve_python
    if not python.exists():
        pytest.skip("no serve environment: `make env` builds it")
    done = subprocess.run(
        [python, "-c", ASK],
        input=json.dumps(
            {
                "capabilities": CAPABILITIES,
                "commands": planned_commands(),
                "recipes": {name: engine_words(args) for name, args in served_arguments().items()},
            }
        ),
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert "ANSWER" in done.stdout, done.stderr[-3000:]
    answer: dict[str, Any] = json.loads(done.stdout.partition("ANSWER")[2])
    return answer


def gpu(capability: tuple[int, int]) -> Machine:
    return Machine("gpu", "GPU", 1, accelerators=1, capability=capability)


UNITS = {
    "CutlassFP8ScaledMMLinearKernel": "fp8",
    "CutlassFp8BlockScaledMMKernel": "fp8",
    "CutlassInt8ScaledMMLinearKernel": "int8",
    "CutlassNvFp4LinearKernel": "fp4",
    "FlashInferMxFp4LinearKernel": "fp4",
    "FlashInferCutedslMxfp8LinearKernel": "fp8",
}
"""What a kernel multiplies; the Marlin ones widen the weights to 16 bit."""

ASKED = {
    "fp8_dynamic": "fp8",
    "fp8_static": "fp8",
    "fp8_block": "fp8_block",
    "w8a8_int8": "int8",
    "nvfp4": "nvfp4",
    "mxfp4": "mxfp4",
    "mxfp8": "mxfp8",
}


@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize("format", ASKED)
def test_kernels_are_those_that_the_engine_takes(
    engine: dict[str, Any], format: str, capability: tuple[int, int]
) -> None:
    found = support_of(format, gpu(capability))
    kernel = engine[str(list(capability))][ASKED[format]]
    sixteen = "bf16" if capability >= (8, 0) else "fp16"
    if format == "w8a8_int8" and capability >= (10, 0):
        # It takes CUTLASS, whose compiled part refuses: this test says when that has changed.
        assert kernel == "CutlassInt8ScaledMMLinearKernel" and found.unit is None
        return
    if format == "mxfp4" and capability < (8, 0):
        # The scheme is refused before a kernel is looked for.
        assert engine["minimum"]["mxfp4"] == 80 and found.unit is None
        return
    if format == "mxfp8" and capability < (8, 0):
        assert engine["minimum"]["modelopt_mxfp8"] == 80 and found.unit is None
        return
    assert found.unit == UNITS.get(kernel, sixteen), (kernel, found)
    assert ("Marlin" in kernel) == (found.kernel == "Marlin")


@pytest.mark.parametrize("capability", CAPABILITIES)
def test_sixteen_bit_and_integer_weights(
    engine: dict[str, Any], capability: tuple[int, int]
) -> None:
    told = engine[str(list(capability))]
    machine = gpu(capability)
    for format, dtype in (("bf16", "bfloat16"), ("fp16", "float16"), ("fp32", "float32")):
        assert (support_of(format, machine).unit is not None) == (
            f"torch.{dtype}" in told["dtypes"]
        )
    for format in ("w4a16", "w4a16_gptq", "w4a16_awq", "awq", "gptq", "w8a16"):
        assert support_of(format, machine).unit is not None
        assert told["w8a16" if format == "w8a16" else "w4a16"]["marlin"]
    # Machete goes before Marlin, from 9.0 on; what it can do it says to be on 9.0 only.
    machete = "MacheteLinearKernel" in told["w4a16"]["names"]
    assert machete == (capability >= (9, 0))


def test_least_capabilities(engine: dict[str, Any]) -> None:
    least = engine["minimum"]
    assert least == {"fp8": 89, "fp8_weights": 75, "int8": 75, "wNa16": 75, "nvfp4": 75,
                     "mxfp4": 80, "awq": 75, "gptq": 60, "modelopt": 80, "modelopt_fp4": 75,
                     "modelopt_mxfp8": 80, "fbgemm_fp8": 80}  # fmt: skip


def test_an_fp8_kv_cache(engine: dict[str, Any]) -> None:
    """By the attention backend that vLLM takes: Triton's and FlashInfer's own floors."""
    for capability, problem in ((7, 5), True), ((8, 6), False), ((8, 9), False), ((9, 0), False):
        assert bool(kv_problem("fp8", gpu(capability), mla=False, head_dim=128)) == problem
    assert kv_problem("fp8", gpu((8, 6)), mla=False, head_dim=96)
    assert kv_problem("fp8", gpu((8, 6)), mla=True, head_dim=576)
    assert not kv_problem("fp8", gpu((8, 9)), mla=True, head_dim=576)
    assert engine["attention"]["triton_floor"] == 89
    assert engine["attention"]["flash_attn_2"] is False
    assert engine["attention"]["flashinfer_heads"] == [64, 128, 256, 512]


def test_the_engine_reads_the_planned_arguments(engine: dict[str, Any]) -> None:
    commands = planned_commands()
    names = set().union(*commands)
    assert {"dtype", "kv-cache-dtype", "pipeline-parallel-size", "kv-cache-memory-bytes"} <= names
    for given, read in zip(commands, engine["parsed"], strict=True):
        assert read == {name.replace("-", "_"): str(value) for name, value in given.items()}


def test_the_engine_reads_the_arguments_of_every_serve_recipe(engine: dict[str, Any]) -> None:
    """Also of those for GPUs, which nobody here could start."""
    recipes = served_arguments()
    assert any("_nvidia_" in name for name in recipes)
    for name, args in recipes.items():
        read = engine["served"][name]
        for argument, value in args.items():
            assert read[argument.replace("-", "_")] == value, (name, argument)
