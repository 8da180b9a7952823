"""How many requests an endpoint is given at once: as many as it takes.

Additive increase, multiplicative decrease: the rule by which TCP finds a capacity that nobody
tells it. Chiu and Jain (Computer Networks and ISDN Systems 17, 1989) show that of the linear rules
this one converges, from any start and for any number of clients that share a server, to full use
in equal shares. The rest is from the RFCs, with requests for segments and answers for
acknowledgements:

* A refusal cuts the window to 0.7 of what is open (RFC 9438, 4.6: less is lost at a fixed limit
  than by halving), and once for all requests that were sent before it (RFC 5681, 3.2).
* A clean answer adds 1 up to the size that the cut left, and 1 / window after it, so 1 a
  round (RFC 5681, 3.1). Cuts without an answer in between, an outage, leave that size as it was: a
  server that is back gets its load back in a few rounds.
* A window of which no more than half is used does not grow (RFC 7661, 4.2): that proves nothing.

It begins at the most that is allowed, not at 1: an endpoint that takes what the recipe says, which
is the rule, never sees a smaller window, and one that does not refuses a single burst.
"""

from __future__ import annotations

from dataclasses import dataclass, field

DECREASE = 0.7


@dataclass
class Window:
    """Requests that may be open at once, 1 to `most`. Requests are numbered as they are sent."""

    most: int
    size: float = field(init=False)
    _quick_until: float = field(init=False)
    _cut_at: int = field(default=0, init=False)
    """Number of the last request that was sent before the last cut."""
    _answered: bool = field(default=True, init=False)
    """Whether one that was sent after it has been answered."""

    def __post_init__(self) -> None:
        self.size = self._quick_until = float(self.most)

    @property
    def full(self) -> bool:
        """Whether it has its first size."""
        return self.size >= self.most

    def room(self, opened: int) -> bool:
        return opened < int(self.size)

    def answered(self, number: int, opened: int) -> None:
        """Request `number` has a clean answer; `opened` were open, itself among them."""
        if self.full or number <= self._cut_at:
            return
        self._answered = True
        if 2 * opened > self.size:
            step = 1.0 if self.size < self._quick_until else 1.0 / self.size
            self.size = min(self.size + step, float(self.most))

    def refused(self, number: int, opened: int, newest: int) -> bool:
        """Request `number` was too much; `newest` is the last one sent. Whether that cut it."""
        if number <= self._cut_at:
            return False
        self.size = max(1.0, min(self.size, opened) * DECREASE)
        if self._answered:
            self._quick_until = self.size
        self._answered = False
        self._cut_at = newest
        return True
