"""kind: teacher."""

from __future__ import annotations

import re
from typing import Literal

from pydantic import Field, field_validator, model_validator

from recipes.model_sources import ModelSource
from recipes.quality_recipe import Pick, Quality
from recipes.written import Written


class Sampling(Written):
    """Sent explicitly with every request; a server's default is never relied on."""

    temperature: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    top_p: float = Field(default=1.0, gt=0, le=1)
    max_tokens: int = Field(gt=0)
    seed: int | None = None


class RayWorkers(Written):
    """Processes that ask for the driver, on this machine or on a cluster."""

    workers: int = Field(gt=0, le=256, description="Processes that share `concurrency`.")
    address: str | None = Field(
        default=None,
        pattern=r"^(auto|ray://[^\s/]+:\d+)$",
        description="A running cluster with this checkout and environment on its nodes: `auto` "
        "(this machine is one of them) or ray://HOST:PORT. None: processes on this machine.",
    )


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
    samples: int = Field(
        default=1,
        gt=0,
        le=64,
        description="Answers to each prompt, each a request of its own with `sampling.seed` plus "
        "its number (0, 1, ...) as its seed; without a seed none is sent.",
    )
    context: str | None = Field(
        default=None,
        description="A system prompt that only the teacher sees. Where a prompt has its own, both "
        "are sent as one: this one, an empty line, the prompt's.",
    )
    concurrency: int = Field(
        default=8,
        gt=0,
        le=1024,
        description="Requests open at most. Where an endpoint refuses or is late, fewer are, "
        "until it answers again.",
    )
    request_timeout: float = Field(
        default=120.0, gt=0, allow_inf_nan=False, description="Seconds of one request as a whole."
    )
    max_retry_wait: float = Field(
        default=600.0, gt=0, allow_inf_nan=False, description="Longest Retry-After obeyed."
    )
    max_truncated_share: float = Field(
        default=0.10, ge=0, le=1, description="More answers cut by length than this: refused."
    )
    keep_truncated: bool = Field(
        default=False,
        description="Train on answers cut by length too; their end is not learned.",
    )
    quality: Quality = Field(
        default=Quality(), description="What is kept out of the training rows, by class."
    )
    pick: Pick | None = Field(
        default=None, description="Which of several samples is learned; needed where there are."
    )
    max_total_tokens: int | None = Field(
        default=None,
        gt=0,
        description="Prompt and answer tokens of all answers, those of earlier tries too. Nothing "
        "more is asked once they are spent; open requests, `concurrency` at most, are still "
        "answered.",
    )
    price_per_million_prompt_tokens: float | None = Field(
        default=None, ge=0, allow_inf_nan=False, description="What you pay, in `currency`."
    )
    price_per_million_completion_tokens: float | None = Field(
        default=None, ge=0, allow_inf_nan=False, description="Reasoning tokens are among them."
    )
    currency: str | None = Field(
        default=None, min_length=1, max_length=8, description="Of the prices and of `max_cost`."
    )
    max_cost: float | None = Field(
        default=None,
        gt=0,
        allow_inf_nan=False,
        description="Like `max_total_tokens`, in money. What the endpoint takes for requests that "
        "it did not answer is not known and not counted.",
    )
    ray: RayWorkers | None = Field(
        default=None,
        description="Ask from several processes, where one has no more time: about 1000 answers a "
        "second. Needs the package `ray`.",
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

    @model_validator(mode="after")
    def _samples_differ(self) -> TeacherRecipe:
        if self.samples > 1 and self.sampling.temperature == 0:
            raise ValueError(
                "`samples` above 1 need sampling.temperature above 0: greedy answers are all alike"
            )
        if self.samples > 1 and self.pick is None:
            raise ValueError(
                "`samples` above 1 need `pick`: which of them is learned (scorer: reference, "
                "rubric or judge)"
            )
        if self.context is not None and not self.context.strip():
            raise ValueError("`context` is blank; leave it out")
        if self.ray is not None and self.ray.workers > self.concurrency:
            raise ValueError(
                f"`ray.workers` ({self.ray.workers}) must not be more than `concurrency` "
                f"({self.concurrency}): each asks for at least one prompt at a time"
            )
        return self

    @model_validator(mode="after")
    def _priced(self) -> TeacherRecipe:
        prices = {
            "price_per_million_prompt_tokens": self.price_per_million_prompt_tokens,
            "price_per_million_completion_tokens": self.price_per_million_completion_tokens,
            "currency": self.currency,
        }
        lacking = [f"`{name}`" for name, value in prices.items() if value is None]
        if len(lacking) < len(prices) or self.max_cost is not None:
            if lacking:
                raise ValueError(
                    f"{', '.join(lacking)} missing: the two prices and their currency belong "
                    "together, and `max_cost` needs them"
                )
            free = not (
                self.price_per_million_prompt_tokens or self.price_per_million_completion_tokens
            )
            if free and self.max_cost is not None:
                raise ValueError("`max_cost` is never reached where both prices are 0")
        return self
