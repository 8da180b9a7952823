"""Weights of the part of a model that sees pictures: SigLIP, as Gemma 3 carries it."""

from __future__ import annotations

from registry.config_values import MOST_LAYERS, ConfigValues
from registry.shape_parts import Split, Weight

_PARTS = ("vision_config", "audio_config")


def vision_weights(top: ConfigValues, model_type: str, hidden: int) -> list[Weight]:
    """All of them, in 16 bit in every format; empty for a model of text alone.

    The engine loads them whether or not pictures are sent. Raises `UserError` for a tower that is
    not known.
    """
    towers = [name for name in _PARTS if top.has(name)]
    if not towers:
        return []
    tower = top.section("vision_config")
    if towers != ["vision_config"] or tower is None or model_type != "gemma3_text":
        raise top.error(
            towers[0],
            f"is given beside {model_type}: the weights of that part cannot be counted",
            "known is the tower of gemma3; serve this model with the engine and read its memory",
        )
    width, inner = tower.number("hidden_size"), tower.number("intermediate_size")
    patch, side = tower.number("patch_size"), tower.number("image_size")
    found = [
        Weight("vision.patch_embedding", width, 3 * patch * patch, kind="other"),
        Weight("vision.patch_embedding", width, kind="bias"),
        Weight("vision.position_embedding", (side // patch) ** 2, width, kind="other"),
        Weight("vision.post_layernorm", 2 * width, kind="norm"),
        Weight("multi_modal_projector", width, hidden, kind="other"),
        Weight("multi_modal_projector.norm", width, kind="norm"),
    ]
    for _ in range(tower.number("num_hidden_layers", most=MOST_LAYERS)):
        found += _with_bias("vision.qkv", 3 * width, width, "column")
        found += _with_bias("vision.out_proj", width, width, "row")
        found += _with_bias("vision.fc1", inner, width, "column")
        found += _with_bias("vision.fc2", width, inner, "row")
        found.append(Weight("vision.layer_norms", 4 * width, kind="norm"))
    return found


def _with_bias(name: str, out: int, columns: int, split: Split) -> list[Weight]:
    bias: Split = "column" if split == "column" else "none"
    return [
        Weight(name, out, columns, kind="other", split=split),
        Weight(name, out, kind="bias", split=bias),
    ]
