"""Packed INT weights for which vLLM has no kernel: the plugin of requirements/vllm-cpu-unpacked.

The machine that runs this may have AVX-512. vLLM's wheel carries the AVX2 library as well, and
takes it where torch says that there is no more: `masked` makes torch say so in every process of the
server, so that vLLM is the one that an AVX2 machine has.
"""

from __future__ import annotations

import json
import math
import shutil
import subprocess
from pathlib import Path
from typing import Any

import httpx
import pytest

from registry.provenance import hardware
from registry.settings import settings
from tasks.engines import random_llama
from tasks.engines.vllm_server import VllmServer

pytestmark = pytest.mark.alone

ASK = Path(__file__).with_name("unpacked_weights.py")

MASK = """
import torch
torch.cpu._is_avx512_supported = torch.cpu._is_avx512_bf16_supported = lambda: False
"""

SCHEMES: dict[str, dict[str, Any]] = {
    "symmetric": {"strategy": "group", "group_size": 64, "symmetric": True},
    "asymmetric": {"strategy": "group", "group_size": 32, "symmetric": False},
    "channel": {"strategy": "channel", "symmetric": True},
    "static_order": {
        "strategy": "group", "group_size": 64, "symmetric": True, "actorder": "static"
    },
    "eight_bits": {"strategy": "group", "group_size": 64, "symmetric": True, "num_bits": 8},
}  # fmt: skip
"""All that decides how weights are packed; AWQ's are as "asymmetric"."""

INT4 = {"type": "int", "num_bits": 4, "strategy": "group", "group_size": 64, "symmetric": False}
FP8 = {
    "weights": {"type": "float", "num_bits": 8, "strategy": "channel", "symmetric": True},
    "input_activations": {
        "type": "float", "num_bits": 8, "strategy": "token", "dynamic": True, "symmetric": True
    },
}  # fmt: skip


def engine_has(platform: str) -> bool:
    """Whether the serve environment holds vLLM's CPU build."""
    code = "import importlib.metadata as m; print(m.version('vllm'))"
    told = subprocess.run(
        [str(settings().serve_python), "-I", "-c", code], capture_output=True, text=True, check=True
    )
    return platform in told.stdout


def quantized(base: Path, out: Path, modifiers: dict[str, Any]) -> None:
    """llmcompressor's checkpoint of a recipe; GPTQ is calibrated on a few sentences."""
    import yaml
    from datasets import Dataset
    from llmcompressor import oneshot
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(base)
    texts = [f"Where is order {number}? 运费多少？ It is on its way." for number in range(8)]
    model = AutoModelForCausalLM.from_pretrained(base, dtype="bfloat16")
    calibration = {
        "tokenizer": tokenizer,
        "dataset": Dataset.from_dict(dict(tokenizer(texts))),
        "num_calibration_samples": len(texts),
        "shuffle_calibration_samples": False,
    }
    oneshot(
        model=model,
        recipe=yaml.safe_dump({"quant_stage": {"quant_modifiers": modifiers}}),
        **(calibration if "GPTQModifier" in modifiers else {}),
    )
    model.save_pretrained(out)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(base / name, out / name)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama, its copies of every scheme, and one in INT4 and FP8."""
    if not engine_has("cpu"):
        pytest.skip("the serve environment holds another build of vLLM")
    folder = tmp_path_factory.mktemp("models")
    base = folder / "base"
    random_llama.make({"out": str(base), "seed": 0})
    for name, weights in SCHEMES.items():
        of_all = {"targets": ["Linear"], "weights": {"type": "int", "num_bits": 4, **weights}}
        how = {"config_groups": {"all": of_all}, "ignore": ["lm_head"]}
        # The order of GPTQ is what only GPTQ makes.
        modifier = "GPTQModifier" if "actorder" in weights else "QuantizationModifier"
        quantized(base, folder / name, {modifier: how})
    of_some = {
        "attention": {"targets": [r"re:.*self_attn\..*_proj$"], "weights": INT4},
        "mlp": {"targets": [r"re:.*mlp\..*_proj$"], **FP8},
    }
    how = {"config_groups": of_some, "ignore": ["lm_head"]}
    quantized(base, folder / "mixed", {"QuantizationModifier": how})
    return folder


@pytest.fixture
def masked(tmp_path: Path) -> dict[str, str]:
    """Variables with which the serve environment's torch knows no AVX-512."""
    (tmp_path / "mask").mkdir()
    (tmp_path / "mask" / "sitecustomize.py").write_text(MASK)
    return {"PYTHONPATH": str(tmp_path / "mask")}


def decompressed(model: Path) -> Any:
    """The model as transformers computes with it."""
    from transformers import AutoModelForCausalLM, CompressedTensorsConfig

    plain = CompressedTensorsConfig(run_compressed=False)
    return AutoModelForCausalLM.from_pretrained(model, quantization_config=plain, dtype="bfloat16")


def asked(env: dict[str, str], *words: str) -> str:
    """Run unpacked_weights.py in the serve environment."""
    done = subprocess.run(
        [str(settings().serve_python), str(ASK), *words],
        env={"PATH": "/usr/bin:/bin", **env}, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_weights_are_those_of_transformers(models: Path, tmp_path: Path) -> None:
    """To the last bit, in both layouts; one matrix of every scheme."""
    import torch
    from safetensors.torch import load_file

    names = list(SCHEMES)
    out = tmp_path / "weights.safetensors"
    asked({"VLLM_CPU_UNPACKED": "1"}, str(models), str(out), *names)
    found = load_file(out)
    for name in names:
        layer = decompressed(models / name).model.layers[0].mlp.down_proj
        assert found[f"{name}.rows"].dtype is torch.bfloat16
        assert torch.equal(found[f"{name}.rows"], layer.weight), name
        # As AutoGPTQ and AWQ keep them.
        assert torch.equal(found[f"{name}.columns"], layer.weight), name
        assert f"{name}.left" not in found
        x = torch.linspace(-1, 1, 3 * layer.in_features).reshape(3, -1).to(torch.bfloat16)
        torch.testing.assert_close(found[f"{name}.output"], layer(x), rtol=2e-2, atol=2e-3)


def test_what_vllm_can_compute_is_left_to_it() -> None:
    """On this machine as it is."""
    if not engine_has("cpu"):
        pytest.skip("the serve environment holds another build of vLLM")
    found = json.loads(asked({}, "choose").splitlines()[-1])
    assert found["operator"] is ("avx512f" in hardware()["flags"])
    native = "CPUWNA16LinearKernel"
    assert found["kernel"] == (native if found["operator"] else "UnpackedLinearKernel")


def test_without_the_plugin_the_engine_has_no_kernel(masked: dict[str, str]) -> None:
    """When this fails, vLLM's AVX2 library has the kernel, and the package can go.

    vLLM chooses its kernel and calls an operator that is not there: "has no attribute
    'cpu_gemm_wna16'", which `failure_of` knows as INFEASIBLE (tests/unit/test_vllm_server.py).
    """
    if not engine_has("cpu"):
        pytest.skip("the serve environment holds another build of vLLM")
    found = json.loads(asked({"VLLM_PLUGINS": "", **masked}, "choose").splitlines()[-1])
    assert found == {"kernel": "CPUWNA16LinearKernel", "operator": False}


def test_with_it_answers_are_those_of_transformers(
    models: Path, masked: dict[str, str], tmp_path: Path
) -> None:
    """Greedy tokens and their log-probabilities, each given what the server had said before.

    INT4 in one half of the layers and FP8 in the other, on a machine without AVX-512.
    """
    import torch

    model = decompressed(models / "mixed").float()
    prompt = [5, 80, 100, 200, 31, 77]
    running = VllmServer(
        models / "mixed",
        log=tmp_path / "vllm.log",
        served_name="m",
        engine_args={
            "enforce-eager": True,
            "max-model-len": 256,
            "kv-cache-memory-bytes": 64 * 2**20,
            "distributed-executor-backend": "uni",
        },
        env={"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "OMP_NUM_THREADS": "1", **masked},
    )
    with running:
        assert running.quantized is True
        assert running.kernels is not None
        fp8, int4 = running.kernels
        assert int4 == "UnpackedLinearKernel"
        assert fp8.endswith("TorchFP8ScaledMMLinearKernel")
        # Without AMX, torch computes FP8 by plain operations.
        amx = "amx_int8" in hardware()["flags"]
        assert running.emulated_kernels == ([int4] if amx else [fp8, int4])
        assert running.emulated is True
        reply = httpx.post(
            f"{running.url}/completions",
            headers={"Authorization": f"Bearer {running.api_key}"},
            json={
                "model": "m", "prompt": prompt, "max_tokens": 12, "temperature": 0, "logprobs": 1,
                "ignore_eos": True, "return_tokens_as_token_ids": True,
            },
            timeout=60,
        ).json()  # fmt: skip
    assert "un-packed" in running.log.read_text()
    said = reply["choices"][0]["logprobs"]
    tokens = [int(text.removeprefix("token_id:")) for text in said["tokens"]]
    assert len(tokens) == 12
    with torch.no_grad():
        logits = model(torch.tensor([[*prompt, *tokens]])).logits[0, len(prompt) - 1 : -1]
    expected = torch.log_softmax(logits, dim=-1)
    for place, (token, probability) in enumerate(zip(tokens, said["token_logprobs"], strict=True)):
        assert math.isclose(probability, float(expected[place, token]), abs_tol=0.05)
        # bfloat16 there, float32 here: the best there is within the rounding of the best here.
        assert float(expected[place].max() - expected[place, token]) < 0.05
