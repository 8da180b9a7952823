"""Lists that were copied from the installed vLLM, compared with its source. Nothing is imported."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

from registry.model_shapes import ANSWERS, LENGTHENED, OLDER_KINDS, ROPE_KINDS
from registry.modelopt_configs import ALGORITHMS, MIXED
from registry.quantization_configs import NOT_COUNTED, READERS
from registry.settings import settings


@cache
def source(path: str) -> str:
    """Of a file of the package `vllm` in the serve environment."""
    folder = settings().serve_python.parent.parent
    found = next(iter(folder.glob("lib/python*/site-packages/vllm")), None)
    if found is None:
        pytest.skip("no serve environment: `make env` builds it")
    return (Path(found) / path).read_text(encoding="utf-8")


def assigned(path: str, name: str) -> ast.expr:
    """What a file assigns to a name of its top level."""
    for node in ast.parse(source(path)).body:
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        if any(isinstance(one, ast.Name) and one.id == name for one in targets):
            assert isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None
            return node.value
    raise AssertionError(f"{path} assigns nothing to {name}")


def texts(node: ast.AST) -> list[str]:
    return [
        one.value
        for one in ast.walk(node)
        if isinstance(one, ast.Constant) and isinstance(one.value, str)
    ]


def test_every_quantization_method_is_counted_or_refused_by_name() -> None:
    path = "model_executor/layers/quantization/__init__.py"
    methods = set(texts(assigned(path, "QuantizationMethods")))
    # Weights in 16 bit that the engine quantizes as it loads them: asked of it by an argument,
    # which a plan of memory does not know (registry/candidate_memory.py), not by a checkpoint.
    online = {"fp8_per_tensor", "fp8_per_block", "fp8_per_channel",
              "int8_per_channel_weight_only", "nvfp4_per_token"}  # fmt: skip
    assert methods - online <= set(READERS) | set(NOT_COUNTED)
    # What it is said to load it loads, and the other way round.
    names = re.search(r"method_to_config: .*?\n    }", source(path), re.DOTALL)
    assert names is not None
    loads = set(re.findall(r'^        "([\w-]+)":', names[0], re.MULTILINE))
    # Two names under which it keeps a method itself, once it has read the checkpoint's.
    assert set(READERS) - {"gpt_oss_mxfp4"} <= loads | {"gptq_marlin"}
    told = {name for name, why in NOT_COUNTED.items() if why.endswith("does not load it")}
    assert not told & loads
    assert set(NOT_COUNTED) - told <= loads


def test_every_algorithm_of_modelopt_is_counted() -> None:
    path = "model_executor/layers/quantization/modelopt.py"
    rows = assigned(path, "LINEAR_ALGOS")
    assert isinstance(rows, ast.Dict)
    assert {text for key in rows.keys if key is not None for text in texts(key)} == set(ALGORITHMS)
    assert f'QUANT_ALGOS = [*LINEAR_ALGOS, "{MIXED}"]' in source(path)


def test_no_kind_of_rope_is_missing() -> None:
    text = source("model_executor/layers/rotary_embedding/__init__.py")
    kinds = set(re.findall(r'scaling_type == "(\w+)"', text))
    for group in re.findall(r"scaling_type in \[([^\]]+)\]", text):
        kinds |= set(re.findall(r'"(\w+)"', group))
    assert {"yarn", "deepseek_llama_scaling", "llama3", "longrope"} <= kinds
    assert kinds == set(ROPE_KINDS)
    older = re.findall(
        r'if rope_parameters\["rope_type"\] == "([\w-]+)":.*?\["rope_type"\] = "(\w+)"',
        source("transformers_utils/config.py"),
        re.DOTALL,
    )
    assert dict(older) == OLDER_KINDS


def test_which_kinds_leave_the_length_as_it_is() -> None:
    text = source("config/model.py").partition("def _get_and_verify_max_len(")[2]
    names = re.search(r"if rope_type not in \(([^)]+)\)", text)
    assert names is not None
    assert set(re.findall(r'"(\w+)"', names[1])) == set(LENGTHENED)


def test_architectures_that_generate() -> None:
    rows = assigned("config/model.py", "_SUFFIX_TO_DEFAULTS")
    assert isinstance(rows, ast.List)
    found = {one[0]: one[1] for one in (texts(row) for row in rows.elts)}
    assert {suffix for suffix, runner in found.items() if runner == "generate"} == set(ANSWERS)
    assert found["ForSequenceClassification"] == found["RewardModel"] == "pooling"
