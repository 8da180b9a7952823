"""Where to ask, which of several endpoints of one model gets the next request, and when.

The one with the fewest open requests, in turn where they are equal, of those that have room: how
many each takes at once is found out by its answers (`congestion.py`). One that failed rests for a
while, twice as long each time, and then gets a single request until it answers: a dead endpoint
fails fast, and would otherwise look like the least loaded one.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta

import httpx
from pydantic import BaseModel, ConfigDict, Field, SecretStr, field_validator

from tasks.engines.congestion import Window

LOG = logging.getLogger("pilotage")

FIRST_REST = 1.0
LONGEST_REST = 60.0
"""Seconds, unless the endpoint itself asks for more."""

LOG_EVERY = timedelta(seconds=60)
"""An endpoint at its limit is cut again and again; one line a minute says so."""

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

    @field_validator("api_key")
    @classmethod
    def _as_a_header_holds_it(cls, key: SecretStr) -> SecretStr:
        """Without spaces and control characters: a key that was read from a file ends with one."""
        seen = (char for char in key.get_secret_value() if char.isprintable() and char != " ")
        return SecretStr("".join(seen))

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
    window: Window
    open: int = 0
    failures: int = 0
    """In a row; those that came while it rested count as one."""
    rests_until: datetime = _EVER
    taken: int = 0
    """When it was last chosen, as a running number: that of its last request."""
    said_at: datetime = _EVER
    """When the log last told of a smaller window; `_EVER` where it has its full one."""
    url: httpx.URL = field(init=False)
    headers: dict[bytes, bytes] = field(init=False)

    def __post_init__(self) -> None:
        # Read once, not with every request.
        self.url = httpx.URL(self.endpoint.chat_url)
        key = self.endpoint.api_key.get_secret_value()
        self.headers = {b"Authorization": f"Bearer {key}".encode()} if key else {}

    def free(self, now: datetime) -> bool:
        return self.rests_until <= now and not (self.failures and self.open)


class Replicas:
    """The endpoints of one model. `clock` gives aware times.

    At most `most` requests are open at all of them together.
    """

    def __init__(
        self, endpoints: Sequence[Endpoint], clock: Callable[[], datetime], most: int
    ) -> None:
        self._all = [Replica(endpoint, Window(most)) for endpoint in endpoints]
        self._clock = clock
        self._room = most
        self._turn = 0
        self._waiting: deque[asyncio.Future[None]] = deque()

    def __len__(self) -> int:
        return len(self._all)

    async def next(self) -> Replica:
        """The one to ask next, as soon as there is room; in the order of asking for it."""
        place = self._waiting.append
        while (chosen := self.take()) is None:
            woken = asyncio.get_running_loop().create_future()
            place(woken)
            await woken
            place = self._waiting.appendleft
        if self._room:
            # Its window may have grown by more than the one that was woken.
            self._wake()
        return chosen

    def take(self) -> Replica | None:
        """The one to ask next; where none is free, the one whose rest ends first.

        None where there is no room: then a request is open, and its end makes some.
        """
        if not self._room:
            return None
        if len(self._all) == 1:
            (chosen,) = self._all
        else:
            now = self._clock()
            free = [one for one in self._all if one.free(now)]
            with_room = [one for one in free if one.window.room(one.open)]
            if with_room:
                chosen = min(with_room, key=lambda one: (one.open, one.taken))
            elif free:
                return None
            else:
                chosen = min(self._all, key=lambda one: (one.rests_until, one.open))
        if not chosen.window.room(chosen.open):
            return None
        self._turn += 1
        self._room -= 1
        chosen.taken = self._turn
        chosen.open += 1
        return chosen

    def unused(self, replica: Replica) -> None:
        """Nothing was asked after all."""
        replica.open -= 1
        self._room += 1
        self._wake()

    def answered(self, replica: Replica, number: int, *, clean: bool = True) -> None:
        """`number` is what `taken` was when the request was sent.

        An answer is not clean where it says nothing about the load: a request that is refused for
        what it is costs a server nothing.
        """
        if clean:
            replica.window.answered(number, replica.open)
            if replica.said_at != _EVER and replica.window.full:
                LOG.info("%s takes %d requests at once again", replica.url, replica.window.most)
                replica.said_at = _EVER
        replica.failures = 0
        replica.rests_until = _EVER
        self.unused(replica)

    def failed(
        self, replica: Replica, number: int, asked: float | None, *, overload: str = ""
    ) -> None:
        """`asked` is the wait in seconds that the endpoint itself asked for.

        `overload` is its reason where fewer requests at once may help.
        """
        now = self._clock()
        if overload and replica.window.refused(number, replica.open, self._turn):
            self._tell(replica, overload, now)
        if replica.rests_until <= now:
            replica.failures += 1
        rest = min(FIRST_REST * 2 ** min(replica.failures - 1, 10), LONGEST_REST)
        try:
            until = now + timedelta(seconds=asked or rest)
        except OverflowError:
            until = datetime.max.replace(tzinfo=UTC)
        replica.rests_until = max(replica.rests_until, until)
        self.unused(replica)

    def other_free(self, replica: Replica) -> bool:
        """Whether a request that this one did not answer can be sent to another one at once."""
        now = self._clock()
        return any(one is not replica and one.free(now) for one in self._all)

    def _wake(self) -> None:
        while self._waiting:
            woken = self._waiting.popleft()
            if not woken.done():
                woken.set_result(None)
                return

    def _tell(self, replica: Replica, reason: str, now: datetime) -> None:
        if replica.said_at == _EVER or now - replica.said_at >= LOG_EVERY:
            replica.said_at = now
            LOG.info(
                "%s: %s; at most %d of %d requests are open there now, more as it answers",
                replica.url, reason, int(replica.window.size), replica.window.most,
            )  # fmt: skip
