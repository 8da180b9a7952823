"""Where the business prompts come from, and how they are split into parts."""

from __future__ import annotations

from os.path import normpath
from typing import Annotated, Literal, get_args

from pydantic import Field, field_validator, model_validator

from recipes.disjoint_recipe import Disjointness
from recipes.written import Written

Part = Literal["train", "calibration", "draft", "eval", "load"]


class ColumnMapping(Written):
    """Which column of the file is what. Columns that are not named are ignored.

    A name that is no column and has dots goes into objects and lists: `metadata.segment`,
    `turns.0`.
    """

    prompt: str = Field(default="prompt", description="Column with the user's message.")
    messages: str | None = Field(
        default=None,
        description="Instead of `prompt`: a list of {role, content}, or its JSON text, whose last "
        "message is the user's or a tool's.",
    )
    system: str | None = Field(
        default=None, description="Column with the row's system prompt; may be empty."
    )
    tools: str | None = Field(
        default=None,
        description="Column with the functions that may be called, as OpenAI's chat completions "
        "take them: a list, or its JSON text; may be empty.",
    )
    id: str | None = Field(default=None, description="None: numbered in file order.")
    segment: str | None = None
    reference: str | None = Field(default=None, description="Column with the right answer.")
    conversation: str | None = Field(
        default=None,
        description="Rows of one conversation depend on each other; gates allow for it.",
    )

    @model_validator(mode="after")
    def _one_source(self) -> ColumnMapping:
        if self.messages is not None and self.prompt != "prompt":
            raise ValueError("name `prompt` or `messages`, not both")
        return self


class _PartedPrompts(Written):
    """What all sources of prompts share."""

    sizes: dict[Part, int] = Field(description="Prompts per part; the parts share none.")
    template: str = Field(
        default="{prompt}",
        description="The last user message; `{prompt}` and `{labels}` are replaced.",
    )
    system: str | None = Field(
        default=None,
        min_length=1,
        description="System prompt of all rows, for teacher and student; `{labels}` is replaced. "
        "A row's own stands after it, in the same message.",
    )
    keep_segments: list[str] = Field(
        default_factory=list, description="Only these segments; empty: all."
    )
    disjoint: Disjointness = Field(
        default=Disjointness(), description="What the parts may have in common."
    )

    @field_validator("sizes")
    @classmethod
    def _complete(cls, sizes: dict[Part, int]) -> dict[Part, int]:
        odd = [part for part in get_args(Part) if sizes.get(part, 0) < 1]
        if odd:
            raise ValueError(f"every part needs at least one prompt; missing: {', '.join(odd)}")
        return sizes

    @field_validator("template")
    @classmethod
    def _has_prompt(cls, template: str) -> str:
        if "{prompt}" not in template:
            raise ValueError("the template must contain {prompt}")
        return template


class DemoPrompts(_PartedPrompts):
    """Messages from the seeded generator of a freight company's customers and drivers."""

    source: Literal["demo"]


class FilePrompts(_PartedPrompts):
    """A file of the user's own, split by segment into five parts."""

    source: Literal["file"]
    path: str = Field(
        min_length=1,
        description="CSV, JSONL or Parquet, or a folder that `datasets` has saved.",
    )
    split: str | None = Field(
        default=None, description="Which split of a folder that holds several."
    )
    format: Literal["auto", "plain", "openai_batch", "lm_eval"] = Field(
        default="auto",
        description="Of a JSONL file; auto: an OpenAI batch or lm-eval's samples are known by "
        "their fields. Of a batch `messages`, `tools` and the id need no mapping, of samples the "
        "columns of `doc` and `target` are mapped.",
    )
    mapping: ColumnMapping = ColumnMapping()
    max_reject_share: float = Field(
        default=0.0,
        ge=0,
        lt=1,
        description="More bad rows than this: refused. Fewer are left out, into rejects.jsonl.",
    )
    files: dict[Part, str] = Field(
        default_factory=dict,
        description="Parts with a file of their own, read like `path`, which is split into the "
        "rest. Of a folder with several splits: the folder within it, `prompts/test`.",
    )

    @field_validator("files")
    @classmethod
    def _some_left(cls, files: dict[Part, str]) -> dict[Part, str]:
        if len(files) == len(get_args(Part)):
            raise ValueError("leave a part to be taken from `path`")
        if empty := [part for part, path in files.items() if not path]:
            raise ValueError(f"no file is named for {', '.join(empty)}")
        return files

    @model_validator(mode="after")
    def _a_file_each(self) -> FilePrompts:
        holder = {normpath(self.path): "`path`"}
        for part, path in self.files.items():
            if (other := holder.setdefault(normpath(path), part)) != part:
                raise ValueError(
                    f"files.{part} is the file of {other} too, and would share its prompts; leave "
                    "both to `path`, or give each its own rows"
                )
        return self


Prompts = Annotated[DemoPrompts | FilePrompts, Field(discriminator="source")]
