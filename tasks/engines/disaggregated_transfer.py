"""A decode engine's counters of transfers, read off its metrics page. Pure.

The names are those of vLLM 0.32 with NixlConnector, read off a live server.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from registry.errors import InfrastructureError
from registry.transfer import Transfer
from tasks.engines.vllm_server import sum_samples

BY_SOURCE = "vllm:prompt_tokens_by_source_total"
BYTES = "vllm:nixl_bytes_transferred"
FAILED = "vllm:nixl_num_failed_transfers_total"
PREEMPTED = "vllm:num_preemptions_total"
CONFIG = "vllm:cache_config_info"


def transfer_of(page: str) -> Transfer:
    """Raises `InfrastructureError` where the page does not count what is needed."""
    total, by_source = sum_samples(page), sum_samples(page, "source")
    sizes = [
        name.partition('"')[2].rstrip('"}')
        for name in sum_samples(page, "block_size")
        if name.startswith(f"{CONFIG}{{")
    ]
    sources = {
        source: f'{BY_SOURCE}{{source="{source}"}}'
        for source in ("external_kv_transfer", "local_cache_hit", "local_compute")
    }
    missing = [name for name in sources.values() if name not in by_source]
    needed = (f"{BYTES}_sum", f"{BYTES}_count", FAILED, PREEMPTED)
    missing += [name for name in needed if name not in total]
    if missing or len(sizes) != 1:
        raise InfrastructureError(
            f"a decode engine does not count {', '.join(missing) or CONFIG}: whether its prompts "
            "are transferred is not to be seen"
        )
    return Transfer(
        transferred_tokens=round(by_source[sources["external_kv_transfer"]]),
        cached_tokens=round(by_source[sources["local_cache_hit"]]),
        computed_tokens=round(by_source[sources["local_compute"]]),
        transfers=round(total[f"{BYTES}_count"]),
        bytes_moved=round(total[f"{BYTES}_sum"]),
        failed=round(total[FAILED]),
        preempted=round(total[PREEMPTED]),
        block_size=int(sizes[0]),
    )


def keeps_whole_prompts(config: Mapping[str, Any]) -> bool:
    """Whether each layer of a model keeps the KV cache of the whole prompt: no window, no state."""
    text = config.get("text_config")
    inner = text if isinstance(text, Mapping) else config
    kinds = inner.get("layer_types")
    if kinds is not None:
        return set(kinds) == {"full_attention"}
    window = inner.get("sliding_window")
    return window is None or inner.get("use_sliding_window") is False
