"""What may stand in a recipe. Seven kinds, each one YAML file and one model below.

People write these files, so unknown keys are errors (`extra="forbid"`) and every field says what
it is in. Arguments of a tool keep the tool's own names and travel unchanged: `engine_args` are
vLLM's, a `recipe` is llmcompressor's, `lora` is peft's.
"""

from __future__ import annotations

import re
from datetime import date
from typing import Annotated, Any, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from recipes.serve_rules import argument_problems, variable_problems
from registry.digests import canonical_json


class Written(BaseModel):
    """Base of what people write: no unknown keys, frozen once read."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


# -- where a model comes from ----------------------------------------------------------------


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


# -- prompts ---------------------------------------------------------------------------------

Part = Literal["train", "calibration", "draft", "eval", "load"]


class ColumnMapping(Written):
    """Which column of the file is what. Columns that are not named are ignored."""

    prompt: str = "prompt"
    id: str | None = Field(default=None, description="None: numbered in file order.")
    segment: str | None = None
    reference: str | None = Field(default=None, description="Column with the right answer.")
    conversation: str | None = Field(
        default=None,
        description="Rows of one conversation depend on each other; gates allow for it.",
    )


class _PartedPrompts(Written):
    """What all sources of prompts share."""

    sizes: dict[Part, int] = Field(description="Prompts per part; the parts share none.")
    template: str = Field(
        default="{prompt}",
        description="The user message; `{prompt}` and `{labels}` are replaced.",
    )
    keep_segments: list[str] = Field(
        default_factory=list, description="Only these segments; empty: all."
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
    """A CSV, JSONL or Parquet file of the user's own, split by segment into five parts."""

    source: Literal["file"]
    path: str = Field(min_length=1)
    mapping: ColumnMapping = ColumnMapping()
    max_reject_share: float = Field(
        default=0.0,
        ge=0,
        lt=1,
        description="More bad rows than this: refused. Fewer are left out, into rejects.jsonl.",
    )


Prompts = Annotated[DemoPrompts | FilePrompts, Field(discriminator="source")]


# -- the five stages -------------------------------------------------------------------------


class Sampling(Written):
    """Sent explicitly with every request; a server's default is never relied on."""

    temperature: float = Field(default=0.0, ge=0)
    top_p: float = Field(default=1.0, gt=0, le=1)
    max_tokens: int = Field(gt=0)
    seed: int | None = None


class TeacherRecipe(Written):
    """kind: teacher. Who answers the business prompts, and how."""

    kind: Literal["teacher"]
    description: str
    model: ModelSource | None = Field(default=None, description="A local teacher, or none.")
    url: str | None = Field(default=None, description="An OpenAI-compatible URL, or none.")
    more_urls: list[str] = Field(
        default_factory=list,
        description="More URLs of the same model under the same name; the same key is sent. Who "
        "of them answered does not count: like `concurrency` they are no part of the stage's key.",
    )
    served_model: str | None = Field(default=None, description="Model name at that URL.")
    serve: str | None = Field(default=None, description="Serve recipe of a local teacher.")
    sampling: Sampling
    concurrency: int = Field(default=8, gt=0, le=1024)
    request_timeout: float = Field(
        default=120.0, gt=0, description="Seconds of one request as a whole."
    )
    max_retry_wait: float = Field(default=600.0, gt=0, description="Longest Retry-After obeyed.")
    max_truncated_share: float = Field(
        default=0.10, ge=0, le=1, description="More answers cut by length than this: refused."
    )

    max_total_tokens: int | None = Field(
        default=None,
        gt=0,
        description="Prompt and answer tokens of all answers, those of earlier tries too. Nothing "
        "more is asked once they are spent; open requests are still answered.",
    )

    @field_validator("url", "more_urls")
    @classmethod
    def _plain_url(cls, written: str | list[str] | None) -> str | list[str] | None:
        for url in [written] if isinstance(written, str) else written or []:
            if not re.fullmatch(r"https?://[^\s/?#@]+(/[^\s?#@]*)?", url):
                raise ValueError(
                    "must be http(s)://HOST/PATH; a key belongs into PILOTAGE_TEACHER_API_KEY"
                )
        return written

    @model_validator(mode="after")
    def _one_source(self) -> TeacherRecipe:
        if (self.model is None) == (self.url is None):
            raise ValueError("exactly one of `model` and `url` must be given")
        if self.url is not None and self.served_model is None:
            raise ValueError("`served_model` is needed with `url`")
        if self.url is None and self.more_urls:
            raise ValueError("`more_urls` are for a teacher with a `url`")
        if len({self.url, *self.more_urls}) <= len(self.more_urls):
            raise ValueError("a URL stands twice in `url` and `more_urls`")
        if self.model is not None and self.serve is None:
            raise ValueError("`serve` is needed with a local `model`")
        return self


class DistillRecipe(Written):
    """kind: distill. LoRA on the teacher's answers, loss on the assistant's tokens only."""

    kind: Literal["distill"]
    description: str
    student: ModelSource
    lora: dict[str, Any] = Field(description="peft.LoraConfig arguments, unchanged.")
    epochs: float = Field(gt=0)
    learning_rate: float = Field(gt=0)
    batch_size: int = Field(gt=0)
    max_length: int = Field(gt=0, description="Tokens of prompt and answer together.")
    warmup_ratio: float = Field(default=0.03, ge=0, lt=1)
    held_out_share: float = Field(default=0.05, gt=0, lt=0.5)
    seed: int = 0


class CalibrationSet(Written):
    """The texts a quantizer looks at."""

    source: Literal["business", "foreign"] = "business"
    samples: int = Field(gt=0)
    max_length: int = Field(default=512, gt=0)


class QuantizeRecipe(Written):
    """kind: quantize. An llmcompressor recipe, unchanged, and what must be true afterwards."""

    kind: Literal["quantize"]
    description: str
    recipe: dict[str, Any] | None = Field(
        description="llmcompressor stages and modifiers; null leaves the weights as they are."
    )
    calibration: CalibrationSet | None = None
    max_size_ratio: float | None = Field(
        default=None, gt=0, le=1, description="Quantized layers' bytes over their bytes before."
    )

    @model_validator(mode="after")
    def _complete(self) -> QuantizeRecipe:
        if self.recipe is not None and self.max_size_ratio is None:
            raise ValueError("`max_size_ratio` is needed where something is quantized")
        return self


class DraftRecipe(Written):
    """kind: draft. An EAGLE3 draft trained on the merged student's own answers."""

    kind: Literal["draft"]
    description: str
    num_layers: int = Field(default=1, gt=0)
    draft_vocab_size: int | None = Field(default=None, gt=0, description="None: the target's.")
    epochs: int = Field(gt=0)
    learning_rate: float = Field(gt=0)
    max_length: int = Field(default=512, gt=0)
    num_speculative_tokens: int = Field(default=3, ge=1, le=16)
    response_tokens: int = Field(default=128, gt=0, description="Longest own answer trained on.")
    seed: int = 0


class ServeRecipe(Written):
    """kind: serve. The engine and its arguments in production; they are part of the bundle."""

    kind: Literal["serve"]
    description: str
    engine: Literal["vllm"] = "vllm"
    engine_args: dict[str, Any] = Field(
        default_factory=dict, description="`vllm serve` arguments by their own names."
    )
    env: dict[str, str] = Field(default_factory=dict, description="Engine environment variables.")

    @field_validator("engine_args")
    @classmethod
    def _within_the_digest(cls, args: dict[str, Any]) -> dict[str, Any]:
        problems = argument_problems(args)
        if problems:
            raise ValueError("; ".join(problems))
        try:
            canonical_json(args)
        except TypeError as error:
            raise ValueError(f"cannot be written as JSON: {error}") from None
        return args

    @field_validator("env")
    @classmethod
    def _no_redirection(cls, env: dict[str, str]) -> dict[str, str]:
        problems = variable_problems(env)
        if problems:
            raise ValueError("; ".join(problems))
        return env


# -- the machine -----------------------------------------------------------------------------


class HardwareRecipe(Written):
    """kind: hardware. A machine that serves, and what an hour of it costs whoever runs it.

    A price is the user's own number: without one, costs are null and the report says why.
    """

    kind: Literal["hardware"]
    description: str
    accelerator: str | None = Field(
        default=None, min_length=1, description="Name as `nvidia-smi` shows it; null: CPU only."
    )
    accelerators: int = Field(default=0, ge=0, le=1024, description="How many of them.")
    memory_gib: float = Field(
        gt=0, description="Of one accelerator as `nvidia-smi` shows it; without, the machine's."
    )
    price_per_hour: float | None = Field(
        default=None, gt=0, description="Of the whole machine, all accelerators; null: unknown."
    )
    currency: str | None = Field(default=None, pattern=r"^[A-Z]{3}$", description="E.g. USD.")
    price_source: str | None = Field(default=None, min_length=1, description="Who says so.")
    price_as_of: date | None = Field(default=None, description="YYYY-MM-DD.")

    @model_validator(mode="after")
    def _consistent(self) -> HardwareRecipe:
        if (self.accelerator is None) != (self.accelerators == 0):
            raise ValueError("give both `accelerator` and `accelerators`, or neither for a CPU")
        about = ("currency", "price_source", "price_as_of")
        given = [name for name in about if getattr(self, name) is not None]
        if self.price_per_hour is None and given:
            raise ValueError(f"{', '.join(given)} given without a `price_per_hour`")
        missing = [name for name in about if name not in given]
        if self.price_per_hour is not None and missing:
            raise ValueError(f"a price needs {', '.join(missing)} too")
        return self


# -- the release -----------------------------------------------------------------------------


class Candidate(Written):
    """One bundle of a release: a quantization, how it is served, with or without the draft."""

    name: str = Field(pattern=r"^[a-z0-9][a-z0-9_.-]*$", max_length=64)
    quantize: str
    serve: str
    draft: bool = False


Axis = Literal["accuracy", "kept_rate", "latency", "memory", "cost"]
"""What passing candidates are compared by; `kept_rate` of a search, `latency` of fixed rates."""


class Promotion(Written):
    """What happens to the best passing candidate: by one objective, or by weights over several."""

    objective: Literal["fastest", "most_accurate", "cheapest", "smallest", "weights"] = "fastest"
    weights: dict[Axis, Annotated[float, Field(gt=0)]] = Field(
        default_factory=dict,
        description="In proportion: with accuracy 4 and kept_rate 1, 1 % of accuracy is worth 4 % "
        "of rate.",
    )
    first_release: bool = Field(
        default=False, description="May go on where no version of the model was ever promoted."
    )

    @model_validator(mode="before")
    @classmethod
    def _weights_alone(cls, written: object) -> object:
        if isinstance(written, dict) and written.get("weights") and "objective" not in written:
            return {**written, "objective": "weights"}
        return written

    @model_validator(mode="after")
    def _one_way(self) -> Promotion:
        if (self.objective == "weights") != bool(self.weights):
            raise ValueError("give an `objective`, or `weights` with `objective: weights` or none")
        return self


class ProveDraft(Written):
    """A draft has to pay. `load` has a search; `tokens` are numbers of speculative tokens tried."""

    load: str
    tokens: list[Annotated[int, Field(ge=1, le=16)]] = Field(default=[1, 2, 3], min_length=1)
    repeats: int = Field(default=5, ge=2, le=100)


class ReleaseRecipe(Written):
    """kind: release. Names the other recipes, the suites, and the candidates."""

    kind: Literal["release"]
    description: str
    model: str = Field(description="Name in the registry.")
    prompts: Prompts
    teacher: str
    distill: str
    draft: str | None = None
    candidates: list[Candidate] = Field(min_length=1)
    reference_candidate: str = Field(description="The unquantized student among the candidates.")
    accuracy: str = Field(description="Accuracy suite.")
    load: str = Field(description="Load profile.")
    policy: str = Field(description="Policy with the gates.")
    promotion: Promotion = Promotion()
    prove_draft: ProveDraft | None = Field(default=None, description="None: no draft is proved.")
    seed: int = Field(default=0, ge=0)

    @field_validator("model")
    @classmethod
    def _model_name(cls, name: str) -> str:
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,99}", name):
            raise ValueError(
                f"{name!r} cannot be a registered model's name; allowed are letters, digits, "
                "'_', '.' and '-', starting with a letter or digit"
            )
        return name

    @model_validator(mode="after")
    def _consistent(self) -> ReleaseRecipe:
        names = [candidate.name for candidate in self.candidates]
        doubled = sorted({name for name in names if names.count(name) > 1})
        if doubled:
            raise ValueError(f"candidate names occur twice: {', '.join(doubled)}")
        if self.reference_candidate not in names:
            raise ValueError(f"reference_candidate {self.reference_candidate!r} is no candidate")
        if self.draft is None and any(candidate.draft for candidate in self.candidates):
            raise ValueError("a candidate has `draft: true` but the release names no draft recipe")
        return self


Recipe = (
    TeacherRecipe
    | DistillRecipe
    | QuantizeRecipe
    | DraftRecipe
    | ServeRecipe
    | HardwareRecipe
    | ReleaseRecipe
)

KINDS: dict[str, type[Written]] = {
    "teacher": TeacherRecipe,
    "distill": DistillRecipe,
    "quantize": QuantizeRecipe,
    "draft": DraftRecipe,
    "serve": ServeRecipe,
    "hardware": HardwareRecipe,
    "release": ReleaseRecipe,
}
