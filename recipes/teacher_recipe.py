"""kind: teacher."""

from __future__ import annotations

import re
from typing import Literal

from pydantic import Field, field_validator, model_validator

from recipes.model_sources import ModelSource
from recipes.written import Written


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
