"""What a lineage says of an artifact: a few short strings from its manifest, never a prompt.

Manifests hold more (sample answers, lists of layers); only what is named here leaves the store.
The names of settings are the recipe's own, with dots.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import urlsplit

from registry.artifacts import Manifest

LONGEST = 300
"""Characters of one fact."""

_SETTINGS: dict[str, tuple[str, ...]] = {
    "prompts": ("seed", "prompts.source", "prompts.template", "prompts.keep_segments"),
    "teacher_data": ("sampling", "samples", "pick.scorer", "max_truncated_share", "keep_truncated",
                     "engine.engine", "engine.served_model"),
    "distill": ("method", "lora", "quantize_base", "packing", "best_by", "epochs",
                "learning_rate", "batch_size", "max_length", "warmup_ratio", "held_out_share",
                "seed"),
    "quantize": ("calibration", "mixed_precision", "max_perplexity_ratio"),
    "draft": ("num_layers", "draft_vocab_size", "epochs", "learning_rate", "max_length",
              "response_tokens", "response_temperature", "num_speculative_tokens",
              "held_out_share", "states", "seed"),
    "draft_choice": ("response_tokens", "max_acceptance_gap"),
    "accuracy": ("suite.task", "suite.items", "suite.sampling", "suite.smoke", "engine", "repeat"),
    "latency": ("profile.hardware", "profile.rates", "profile.sla", "profile.sampling",
                "profile.seed", "profile.smoke"),
    "draft_proof": ("profile.hardware", "profile.sla", "tokens", "repeats"),
    "serving": (),  # its settings are the bundle's
    "model": ("source", "package", "file", "keep_layers", "role", "pretrain_messages", "seed"),
}  # fmt: skip

_COUNTS: dict[str, tuple[str, ...]] = {
    "prompts": ("prompts", "segments"),
    "teacher_data": ("asked", "answers"),
    "distill": ("rows", "train_rows", "held_out_rows", "too_long", "held_out_loss_before",
                "held_out_loss_after"),
    "quantize": ("calibration", "format", "linear_layers", "ratio", "perplexity", "mean_error",
                 "size_before", "size_after"),
    "draft": ("prompts", "held_out", "dropped", "acceptance_length", "parameters"),
    "draft_choice": ("measured", "epoch", "acceptance_length", "expected_acceptance_length"),
    "accuracy": ("items_asked", "items_scored", "metrics"),
    "latency": ("requests", "failed", "kept_rate_low", "kept_rate_high"),
    "draft_proof": ("stays", "reason", "num_speculative_tokens", "tpot_p50_ratio"),
    "serving": ("feasible", "startup_seconds", "kv_cache_tokens"),
    "model": ("parameters", "source"),
}  # fmt: skip


def facts_of(manifest: Manifest) -> dict[str, str]:
    """Settings first, then `made.*` counts, inputs, tools, and where it was made."""
    stage, config = manifest.stage, manifest.config
    facts = dict(_chosen(config, _SETTINGS.get(stage, tuple(config))))
    facts |= _special(stage, config)
    facts |= {f"made.{k}": v for k, v in _chosen(manifest.summary, _COUNTS.get(stage, ()))}
    facts |= {f"input.{name}": digest for name, digest in manifest.inputs.items()}
    facts["made_at"] = f"{manifest.made_at:%Y-%m-%dT%H:%M:%SZ}"
    facts["tools"] = _versions(manifest.tools)
    made = manifest.provenance
    facts["git"] = str(made.get("git", "unknown"))
    facts["driver"] = _versions({"python": made.get("python"), **(made.get("driver") or {})})
    facts["serve"] = _versions(made.get("serve") or {})
    facts["hardware"] = str(made.get("hardware_fingerprint", ""))
    machine = made.get("hardware") or {}
    facts["machine"] = ", ".join(map(str, [machine.get("cpu", ""), *machine.get("gpus", [])]))
    return {name: value[:LONGEST] for name, value in facts.items() if value}


def _special(stage: str, config: Mapping[str, Any]) -> dict[str, str]:
    """What is no plain setting: the teacher's address, the quantizer's recipe, the load's text."""
    if stage == "teacher_data" and "url" in config.get("engine", {}):
        return {"engine.url": _without_user(str(config["engine"]["url"]))}
    if stage == "quantize":
        return {"recipe": "; ".join(_modifiers(config.get("recipe")))}
    if stage in ("latency", "draft_proof"):
        synthetic = bool(config.get("profile", {}).get("scenarios"))
        return {"load": "synthetic" if synthetic else "prompts"}
    return {}


def _chosen(values: Mapping[str, Any], names: tuple[str, ...]) -> Iterator[tuple[str, str]]:
    """The named values as strings; a dotted name reaches into nested ones."""
    for name in names:
        value: Any = values
        for part in name.split("."):
            value = value.get(part) if isinstance(value, Mapping) else None
        yield from _flat(name, value)


def _flat(name: str, value: Any) -> Iterator[tuple[str, str]]:
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _flat(f"{name}.{key}", inner)
    elif isinstance(value, float):
        yield name, f"{value:.6g}"
    elif isinstance(value, bool):
        yield name, str(value).lower()
    elif isinstance(value, str | int):
        yield name, str(value)
    elif isinstance(value, list) and not any(isinstance(one, Mapping | list) for one in value):
        yield name, ", ".join(map(str, value))
    elif isinstance(value, list):
        yield (
            name,
            "; ".join(
                " ".join(f"{k} {v}" for k, v in _flat("", one)).replace(" .", " ").strip(" .")
                for one in value
            ),
        )


def _modifiers(recipe: Any) -> Iterator[str]:
    """Each modifier of a quantizer's recipe with its scheme or its number formats."""
    if not isinstance(recipe, Mapping):
        return
    for name, value in recipe.items():
        if not name.endswith("Modifier"):
            yield from _modifiers(value)
            continue
        inner = dict(_flat("", value))
        words = [
            f"{key.rsplit('.', 1)[-1]} {inner[key]}"
            for key in inner
            if key.rsplit(".", 1)[-1]
            in ("scheme", "num_bits", "type", "strategy", "group_size", "smoothing_strength")
        ]
        yield f"{name} ({', '.join(words)})" if words else name


def _versions(tools: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {version}" for name, version in tools.items() if version)


def _without_user(url: str) -> str:
    """A URL without user, password and query: a key may stand in any of them."""
    parts = urlsplit(url)
    return parts._replace(netloc=parts.netloc.rpartition("@")[-1], query="", fragment="").geturl()
