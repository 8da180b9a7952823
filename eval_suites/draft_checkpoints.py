"""Which checkpoint of a draft is served, and whether it may be: by what the engine accepted. Pure.

Acceptance length is vLLM's: tokens per step of the target, 1 + accepted / drafts.
"""

from __future__ import annotations

from collections.abc import Sequence

from pydantic import BaseModel, ConfigDict

from registry.draft_binding import DEAD_PROPOSALS, DEAD_SHARE


class _Measured(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class Acceptance(_Measured):
    """What the engine counted while it answered some prompts."""

    drafts: int
    proposed: int
    accepted: int
    per_position: list[int]

    @property
    def length(self) -> float:
        return 1.0 + self.accepted / self.drafts if self.drafts else 1.0

    @property
    def shares(self) -> list[float]:
        """By position: the share of all drafts whose proposal there was accepted."""
        return [count / self.drafts if self.drafts else 0.0 for count in self.per_position]

    @property
    def dead(self) -> bool:
        return self.proposed >= DEAD_PROPOSALS and self.accepted <= DEAD_SHARE * self.proposed

    @classmethod
    def total(cls, parts: Sequence[Acceptance]) -> Acceptance:
        return cls(
            drafts=sum(part.drafts for part in parts),
            proposed=sum(part.proposed for part in parts),
            accepted=sum(part.accepted for part in parts),
            per_position=[
                sum(counts) for counts in zip(*(part.per_position for part in parts), strict=True)
            ],
        )


class MeasuredCheckpoint(_Measured):
    """One epoch's draft, as training expects it and as the engine serves it."""

    epoch: int
    held_out_loss: float
    expected: float
    """Acceptance length on the same prompts, from recorded states."""
    engine: Acceptance
    by_segment: dict[str, Acceptance]

    @property
    def gap(self) -> float:
        """Engine minus expected; negative: training promised more."""
        return self.engine.length - self.expected


def best_checkpoint(measured: Sequence[MeasuredCheckpoint]) -> MeasuredCheckpoint:
    """The longest acceptance; of equal ones that with the lower held-out loss."""
    return max(measured, key=lambda one: (round(one.engine.length, 6), -one.held_out_loss))


def faults(chosen: MeasuredCheckpoint, max_gap: float) -> list[str]:
    """Why the chosen checkpoint must not be served; empty for one that may be."""
    engine = chosen.engine
    if engine.dead:
        return [
            f"the engine accepted {engine.accepted} of {engine.proposed} proposals: the draft is "
            f"broken (at most {DEAD_SHARE:.0%} of {DEAD_PROPOSALS} or more)"
        ]
    if abs(chosen.gap) > max_gap:
        return [
            f"training expects an acceptance length of {chosen.expected:.3f}, the engine reports "
            f"{engine.length:.3f} on the same prompts; they may differ by {max_gap}"
        ]
    return []
