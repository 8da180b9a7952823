"""Where a model comes from."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, field_validator

from recipes.written import Written


class DemoModel(Written):
    """A small Llama trained on the spot on the demo's freight messages."""

    source: Literal["demo"]
    role: Literal["teacher", "student"]
    pretrain_messages: int = Field(gt=0, description="Generated messages it is trained on.")
    training: dict[str, Any] = Field(
        default_factory=dict, description="Settings of tasks/engines/tiny_llama.py, unchanged."
    )


class PathModel(Written):
    """A local folder in Hugging Face format (safetensors, tokenizer, chat template)."""

    source: Literal["path"]
    path: str = Field(min_length=1)


class PackagedGguf(Written):
    """A GGUF file inside an installed Python package, de-quantized to safetensors."""

    source: Literal["package_gguf"]
    package: str = Field(pattern=r"^[A-Za-z0-9_.]+$", description="Import name of the package.")
    file: str = Field(pattern=r"^[A-Za-z0-9_.-]+\.gguf$")


class PrunedModel(Written):
    """The teacher with only some of its decoder layers: a student base without a download."""

    source: Literal["depth_pruned"]
    keep_layers: list[int] = Field(min_length=1, description="Indices of the layers that stay.")

    @field_validator("keep_layers")
    @classmethod
    def _increasing(cls, layers: list[int]) -> list[int]:
        if layers != sorted(set(layers)) or layers[0] < 0:
            raise ValueError("layer indices must be distinct, increasing and not negative")
        return layers


ModelSource = Annotated[
    DemoModel | PathModel | PackagedGguf | PrunedModel, Field(discriminator="source")
]
