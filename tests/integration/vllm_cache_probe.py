"""Run by the serve environment's Python: what vLLM's own code makes of layers' cache specs.

Reads a list of cases as JSON from stdin; no engine, no model, no device. Of each case it prints the
number of layers in each group and the tokens that the engine would print.
"""

from __future__ import annotations

import json
import sys
from types import SimpleNamespace

import torch
from vllm.v1.core.kv_cache_utils import get_kv_cache_capacity, get_kv_cache_configs
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
)
from vllm.v1.kv_cache_layout import KVCacheLayout


def spec(layer, block):
    common = {"block_size": block, "head_size": layer["head"], "dtype": torch.bfloat16}
    if layer["mla"]:
        return MLAAttentionSpec(num_kv_heads=1, **common)
    if layer["state"]:
        return MambaSpec(
            block_size=block,
            shapes=((layer["state"],),),
            dtypes=(torch.bfloat16,),
            page_size_padded=layer["page"],
            mamba_cache_mode="align",
        )
    if layer["window"]:
        return SlidingWindowSpec(
            num_kv_heads=layer["heads"], sliding_window=layer["window"], **common
        )
    return FullAttentionSpec(num_kv_heads=layer["heads"], **common)


def answer(case):
    config = SimpleNamespace(
        scheduler_config=SimpleNamespace(disable_hybrid_kv_cache_manager=False),
        cache_config=SimpleNamespace(
            get_resolved_kv_cache_layout=lambda: KVCacheLayout.LBNHC,
            num_gpu_blocks_override=None,
            prefix_cache_retention_interval=None,
            mamba_cache_mode="align",
        ),
        attention_config=SimpleNamespace(hisparse_config=None),
        speculative_config=None,
        parallel_config=SimpleNamespace(
            decode_context_parallel_size=1, tensor_parallel_size=case["tp"]
        ),
        model_config=SimpleNamespace(
            max_model_len=case["max_len"], original_max_model_len=case["max_len"]
        ),
        max_in_flight_tokens=case["in_flight"],
        num_prefill_lookahead_tokens=0,
    )
    stages = [
        {f"layers.{one['index']}": spec(one, case["block"]) for one in stage}
        for stage in case["stages"]
    ]
    try:
        found = get_kv_cache_configs(config, stages, [case["budget"]] * len(stages))
    except ValueError as error:
        return {"refused": str(error)}
    groups = [
        sum(len(each.kv_cache_groups[n].layer_names) for each in found)
        for n in range(len(found[0].kv_cache_groups))
    ]
    return {"groups": sorted(groups), "tokens": get_kv_cache_capacity(config, found[0])[0]}


print(json.dumps([answer(case) for case in json.load(sys.stdin)]))
