"""What every load generator can do: send prompts at a rate, and say what became of each.

The names are ours (`registry.evidence.REQUEST_COLUMNS`), whatever the tool behind it calls them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from eval_suites.load import LoadProfile

Row = dict[str, Any]


@dataclass(frozen=True)
class Traffic:
    """Where and how requests are sent; the same for all batches of a measurement."""

    url: str
    """Without `/v1`. Asked is `/v1/chat/completions`, streaming."""
    model: str
    tokenizer: Path
    """A folder; for tools that insist on one. Token counts in rows are the server's."""
    sampling: dict[str, Any]
    """`{"temperature", "top_p", "max_tokens", "seed"}`, sent explicitly with every request."""
    burstiness: float = 1.0
    """Shape of the gamma distribution of the gaps: 1 is a Poisson process."""
    request_timeout: float = 120.0
    """Seconds; a request that takes longer has failed."""
    count_words: bool = False
    """The endpoint reports no usage: words of the answer stand for tokens."""
    exact_counts: bool = True
    """The endpoint is an engine of ours: its token counts must fit what was asked."""

    @classmethod
    def of(
        cls,
        profile: LoadProfile,
        url: str,
        model: str,
        tokenizer: Path,
        *,
        count_words: bool = False,
        exact_counts: bool = True,
    ) -> Traffic:
        """What a load profile asks of an endpoint; `url` with or without `/v1`."""
        return cls(
            url=url.removesuffix("/v1"),
            model=model,
            tokenizer=tokenizer,
            sampling=profile.sampling.model_dump(mode="json"),
            burstiness=profile.burstiness,
            request_timeout=profile.request_timeout,
            count_words=count_words,
            exact_counts=exact_counts,
        )


@dataclass(frozen=True)
class Batch:
    """Requests that are sent together. Each prompt is sent once, in the order of the rows."""

    rows: Sequence[Row]
    """`{"id", "messages", "tools"?, "output_tokens"?, "scenario"?}`; with `output_tokens` the
    answer has exactly so many (`ignore_eos`), without it ends where the model ends it."""
    seed: int
    rate: float | None = None
    """Requests/s; None: as fast as `concurrency` allows, all at once where that is None too."""
    concurrency: int | None = None
    """At most so many requests in flight; None: no limit."""


@dataclass(frozen=True)
class Sent:
    """What became of a batch."""

    rows: list[Row]
    """`REQUEST_COLUMNS`, in order of sending; `start_s` counts from the first one's start."""
    duration: float
    """Seconds from the first request's start to the last one's end."""
    client_lag_ms: float | None = None
    """P99 of how late the tool's own clock ticked while it sent; None where it does not say."""


class LoadGenerator(Protocol):
    """A tool that sends load; `tool` is its name."""

    tool: str

    @property
    def version(self) -> str:
        """Name and version, e.g. `vllm bench serve 0.32.0`; known after the first batch."""

    def send(self, traffic: Traffic, batch: Batch, raw: Path) -> Sent:
        """Send one batch; the tool's own result is kept as the file `raw`.

        Requests that fail are rows, no error. Raises `InfrastructureError` when the tool fails or
        its result is not about what was asked.
        """
