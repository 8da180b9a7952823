"""What of the teacher's answers is good enough to be learned, and which of several is the best."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from recipes.written import Written

REASONING_TAGS = (
    ("<think>", "</think>"),
    ("<thinking>", "</thinking>"),
    ("<thought>", "</thought>"),
    ("<reasoning>", "</reasoning>"),
    ("<|begin_of_thought|>", "<|end_of_thought|>"),
    ("[THINK]", "[/THINK]"),
    ("◁think▷", "◁/think▷"),
    ("<|channel|>analysis<|message|>", "<|channel|>final<|message|>"),
)
"""DeepSeek, Qwen and most others; Claude; older Gemini; prompts; Sky-T1; Magistral; Kimi; gpt-oss
served without its parser."""


def _checked_pattern(pattern: str) -> str:
    try:
        re.compile(pattern)
    except re.error as error:
        raise ValueError(f"{pattern!r} is no regular expression: {error}") from None
    return pattern


def _is_language(code: str) -> bool:
    """Whether the detector of tasks/engines/languages.py knows it; nothing is loaded for it."""
    from lingua import IsoCode639_1

    try:
        return bool(code.islower() and IsoCode639_1.from_str(code))
    except ValueError:
        return False


class ClassRule(Written):
    """How many answers of a class may be there before the stage fails."""

    max_share: float = Field(
        default=0.5, ge=0, le=1, description="More of all answers than this: the stage fails."
    )


class KeptRule(ClassRule):
    keep: bool = Field(default=False, description="Train on them all the same; they are counted.")


class RefusedRule(KeptRule):
    patterns: list[str] = Field(
        default_factory=list,
        description="More regular expressions that are looked for at the start of a short answer.",
    )

    @field_validator("patterns")
    @classmethod
    def _regular(cls, patterns: list[str]) -> list[str]:
        return [_checked_pattern(pattern) for pattern in patterns]


class LanguageRule(KeptRule):
    """An answer that is surely in another language is `wrong_language`."""

    expect: Literal["as_prompt"] | list[str] = Field(
        description="ISO 639-1 codes such as [zh, en], or as_prompt: the prompt's own language."
    )

    @field_validator("expect")
    @classmethod
    def _codes(cls, expect: str | list[str]) -> str | list[str]:
        if isinstance(expect, list):
            if not expect:
                raise ValueError("at least one language is needed")
            odd = [code for code in expect if not _is_language(code)]
            if odd:
                raise ValueError(f"no ISO 639-1 code of a language: {', '.join(odd)}")
        return expect


class FormatRule(KeptRule):
    """An answer that its consumer could not read is `wrong_format`."""

    kind: Literal["json", "json_schema", "regex", "structured", "label"] = Field(
        description="`structured` and `label` are the format checks of the evaluation's metrics "
        "(`format_valid` of eval_suites/scoring.py)."
    )
    json_schema: dict[str, Any] | None = Field(
        default=None, description="Draft 2020-12; references within the schema only."
    )
    pattern: str | None = Field(default=None, description="The whole answer has to match it.")

    @field_validator("pattern")
    @classmethod
    def _regular(cls, pattern: str | None) -> str | None:
        return None if pattern is None else _checked_pattern(pattern)

    @field_validator("json_schema")
    @classmethod
    def _schema(cls, schema: dict[str, Any] | None) -> dict[str, Any] | None:
        if schema is None:
            return None
        from jsonschema import Draft202012Validator, SchemaError
        from referencing import Registry
        from referencing.exceptions import Unresolvable
        from referencing.jsonschema import DRAFT202012

        try:
            Draft202012Validator.check_schema(schema)
        except SchemaError as error:
            raise ValueError(f"is no JSON schema: {error.message}") from None
        references = _references(schema)
        outside = [ref for ref in references if not ref.startswith("#")]
        if outside:
            raise ValueError(f"refers to something outside: {', '.join(outside)}")
        resolver = Registry().resolver_with_root(DRAFT202012.create_resource(schema))
        for reference in references:
            try:
                resolver.lookup(reference)
            except Unresolvable:
                raise ValueError(f"there is nothing at {reference}") from None
        return schema

    @model_validator(mode="after")
    def _complete(self) -> FormatRule:
        for kind, value in (("json_schema", self.json_schema), ("regex", self.pattern)):
            name = "pattern" if kind == "regex" else kind
            if (value is None) == (self.kind == kind):
                raise ValueError(f"`{name}` is given with `kind: {kind}`, and only with it")
        return self


class Quality(Written):
    """What is kept out of the training rows, by class (tasks/answer_quality.py), and the limits.

    Answers without text, and those whose finish reason does not say that they are complete, are
    never kept; for cut ones see `keep_truncated`.
    """

    reasoning_tags: list[tuple[str, str]] = Field(
        default=list(REASONING_TAGS),
        description="Opening and closing tag of what a model writes before its answer.",
    )
    rejected: ClassRule = ClassRule()
    content_filter: ClassRule = ClassRule()
    unknown: ClassRule = ClassRule()
    empty: ClassRule = ClassRule()
    reasoning_only: ClassRule = ClassRule()
    refused: RefusedRule = RefusedRule()
    looping: KeptRule = KeptRule()
    language: LanguageRule | None = Field(default=None, description="None: not looked at.")
    format: FormatRule | None = Field(default=None, description="None: not looked at.")

    @field_validator("reasoning_tags")
    @classmethod
    def _tags(cls, tags: list[tuple[str, str]]) -> list[tuple[str, str]]:
        if any(not mark.strip() for pair in tags for mark in pair):
            raise ValueError("a tag is empty")
        return tags


class ReferencePick(Written):
    """The answer that agrees most with the row's reference; rows without one keep the first."""

    scorer: Literal["reference"]


class RubricRule(Written):
    """One thing that a good answer fulfils. Exactly one of the checks is given."""

    weight: float = Field(default=1.0, gt=0, allow_inf_nan=False)
    has: str | None = Field(default=None, description="Regular expression found in the answer.")
    has_not: str | None = Field(default=None, description="Regular expression found nowhere.")
    shortest: int | None = Field(default=None, ge=0, description="Characters at least.")
    longest: int | None = Field(default=None, ge=0, description="Characters at most.")
    json_valid: Literal[True] | None = Field(default=None, description="One strict JSON value.")
    has_reference: Literal[True] | None = Field(
        default=None, description="Share of the reference's values that stand in the answer."
    )

    @field_validator("has", "has_not")
    @classmethod
    def _regular(cls, pattern: str | None) -> str | None:
        return None if pattern is None else _checked_pattern(pattern)

    @property
    def check(self) -> tuple[str, Any]:
        """Name and value of the check that is given."""
        ((name, value),) = self.model_dump(exclude_none=True, exclude={"weight"}).items()
        return name, value

    @model_validator(mode="after")
    def _one_check(self) -> RubricRule:
        given = self.model_dump(exclude_none=True, exclude={"weight"})
        if len(given) != 1:
            raise ValueError(f"exactly one check is needed, here are {len(given)}")
        return self


class RubricPick(Written):
    """The answer that fulfils most of a list of weighted rules."""

    scorer: Literal["rubric"]
    rules: list[RubricRule] = Field(min_length=1)


class JudgePick(Written):
    """The answer to which another model gives the highest number."""

    scorer: Literal["judge"]
    url: str = Field(
        pattern=r"^https?://[^\s/?#@]+(/[^\s?#@]*)?$",
        description="An OpenAI-compatible URL; its key, if any, is PILOTAGE_JUDGE_API_KEY.",
    )
    served_model: str = Field(description="Model name at that URL.")
    prompt: str = Field(
        description="What the judge is asked; {prompt}, {answer} and {reference} are replaced. It "
        "must be told to answer with a number alone."
    )
    lowest: float = Field(
        default=1.0, allow_inf_nan=False, description="A number below is no judgement."
    )
    highest: float = Field(
        default=10.0, allow_inf_nan=False, description="A number above is no judgement."
    )
    max_tokens: int = Field(default=8, gt=0)
    max_unreadable_share: float = Field(
        default=0.1,
        ge=0,
        le=1,
        description="More of the judge's answers than this are no such number: the stage fails.",
    )
    max_total_tokens: int | None = Field(
        default=None, gt=0, description="The judge's own budget, as the teacher's."
    )
    concurrency: int = Field(default=8, gt=0, le=1024)

    @model_validator(mode="after")
    def _asks_about_the_answer(self) -> JudgePick:
        if "{answer}" not in self.prompt:
            raise ValueError("`prompt` must contain {answer}")
        if self.lowest >= self.highest:
            raise ValueError("`lowest` must be below `highest`")
        return self


Pick = Annotated[ReferencePick | RubricPick | JudgePick, Field(discriminator="scorer")]


def _references(schema: Any) -> list[str]:
    """Every `$ref` in a JSON schema, nested ones too."""
    if isinstance(schema, list):
        return [ref for part in schema for ref in _references(part)]
    if not isinstance(schema, dict):
        return []
    own = [schema["$ref"]] if isinstance(schema.get("$ref"), str) else []
    return own + [ref for part in schema.values() for ref in _references(part)]
