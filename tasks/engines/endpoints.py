"""Where to ask, and which of several endpoints of one model gets the next request.

The one with the fewest open requests, in turn where they are equal. One that failed rests for a
while, twice as long each time, and then gets a single request until it answers: a dead endpoint
fails fast, and would otherwise look like the least loaded one.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta

import httpx
from pydantic import BaseModel, ConfigDict, Field, SecretStr, field_validator

FIRST_REST = 1.0
LONGEST_REST = 60.0
"""Seconds, unless the endpoint itself asks for more."""

_EVER = datetime.min.replace(tzinfo=UTC)


class Endpoint(BaseModel):
    """Where to ask. The key is shown by no `repr`, no message and no log."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    url: str = Field(description="Base URL, with or without `/v1`.")
    model: str = Field(min_length=1, description="Model name at that URL.")
    api_key: SecretStr = SecretStr("")

    @field_validator("url")
    @classmethod
    def _http(cls, url: str) -> str:
        if not re.match(r"https?://[^/\s]+", url):
            raise ValueError("must start with http:// or https:// and name a host")
        return url

    @property
    def chat_url(self) -> str:
        base = self.url.rstrip("/").removesuffix("/chat/completions")
        if not re.search(r"/v\d+\w*(/openai)?$", base):
            base += "/v1"
        return f"{base}/chat/completions"


@dataclass
class Replica:
    """An endpoint in use."""

    endpoint: Endpoint
    open: int = 0
    failures: int = 0
    """In a row; those that came while it rested count as one."""
    rests_until: datetime = _EVER
    taken: int = 0
    """When it was last chosen, as a running number."""
    url: httpx.URL = field(init=False)
    headers: dict[str, str] = field(init=False)

    def __post_init__(self) -> None:
        # Read once, not with every request.
        self.url = httpx.URL(self.endpoint.chat_url)
        key = self.endpoint.api_key.get_secret_value()
        self.headers = {"Authorization": f"Bearer {key}"} if key else {}

    def free(self, now: datetime) -> bool:
        return self.rests_until <= now and not (self.failures and self.open)


class Replicas:
    """The endpoints of one model. `clock` gives aware times."""

    def __init__(self, endpoints: Sequence[Endpoint], clock: Callable[[], datetime]) -> None:
        self._all = [Replica(endpoint) for endpoint in endpoints]
        self._clock = clock
        self._turn = 0

    def __len__(self) -> int:
        return len(self._all)

    def take(self) -> Replica:
        """The one to ask next; where none is free, the one whose rest ends first."""
        if len(self._all) == 1:
            chosen = self._all[0]
        else:
            now = self._clock()
            free = [one for one in self._all if one.free(now)]
            chosen = (
                min(free, key=lambda one: (one.open, one.taken))
                if free
                else min(self._all, key=lambda one: (one.rests_until, one.open))
            )
        self._turn += 1
        chosen.taken = self._turn
        chosen.open += 1
        return chosen

    def answered(self, replica: Replica) -> None:
        replica.open -= 1
        replica.failures = 0
        replica.rests_until = _EVER

    def failed(self, replica: Replica, asked: float | None) -> None:
        """`asked` is the wait in seconds that the endpoint itself asked for."""
        replica.open -= 1
        now = self._clock()
        if replica.rests_until <= now:
            replica.failures += 1
        rest = min(FIRST_REST * 2 ** min(replica.failures - 1, 10), LONGEST_REST)
        try:
            until = now + timedelta(seconds=asked or rest)
        except OverflowError:
            until = datetime.max.replace(tzinfo=UTC)
        replica.rests_until = max(replica.rests_until, until)

    def other_free(self, replica: Replica) -> bool:
        """Whether a request that this one did not answer can be sent to another one at once."""
        now = self._clock()
        return any(one is not replica and one.free(now) for one in self._all)
