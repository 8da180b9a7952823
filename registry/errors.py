"""The errors a person meets, and the exit status each one ends with.

Three kinds, told apart because they ask for three different answers:

* `UserError`: something a person wrote is wrong. Never retried, never a traceback, exit 2.
* `InfrastructureError`: a machine, a disk, a network, an engine failed. Exit 4 after retries.
* `Infeasible`: this hardware cannot run what was asked. Not a failure of the release: the
  candidate gets the verdict INFEASIBLE with the engine's own reason, the others go on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from registry.redaction import redacted

EXIT_PASS = 0
EXIT_CRASH = 1
EXIT_USER_ERROR = 2
EXIT_INFRASTRUCTURE = 4
EXIT_REFUSED = 10
EXIT_INCONCLUSIVE = 11


@dataclass(frozen=True)
class Problem:
    """One mistake: where it stands, what is wrong there, and what repairs it."""

    where: str
    what: str
    remedy: str = ""

    def __post_init__(self) -> None:
        for name in ("where", "what", "remedy"):
            object.__setattr__(self, name, redacted(getattr(self, name)))

    def __str__(self) -> str:
        text = f"{self.where}: {self.what}"
        return f"{text}\n    remedy: {self.remedy}" if self.remedy else text


class PilotageError(Exception):
    """Base of every error that is reported without a traceback. Its message holds no secret."""

    exit_status = EXIT_CRASH

    def __init__(self, *arguments: object) -> None:
        super().__init__(*(redacted(one) if isinstance(one, str) else one for one in arguments))


class UserError(PilotageError):
    """One or more mistakes in what a person wrote; all mistakes of one file at once."""

    exit_status = EXIT_USER_ERROR

    def __init__(self, problems: Problem | Sequence[Problem]) -> None:
        self.problems = [problems] if isinstance(problems, Problem) else list(problems)
        super().__init__("\n".join(str(problem) for problem in self.problems))

    @classmethod
    def at(cls, where: object, what: str, remedy: str = "") -> Self:
        return cls(Problem(str(where), what, remedy))

    def __reduce__(self) -> tuple[object, ...]:
        # Exceptions pickle by their message; ours is built from the problems.
        return (type(self), (self.problems,))


class StageFailed(UserError):
    """A stage's own check refused its output (truncated answers, zero layers quantized)."""


class InfrastructureError(PilotageError):
    """A process, a disk, a network or a service failed; nothing a recipe could repair."""

    exit_status = EXIT_INFRASTRUCTURE


class Infeasible(PilotageError):
    """The engine cannot run this bundle on this hardware; the message is its reason."""

    exit_status = EXIT_REFUSED
