"""The whole proof of a draft over queues that are computed: decisions and stops."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from registry.bundle import Bundle
from registry.errors import InfrastructureError
from registry.evidence import LatencyEvidence
from tasks.draft_proof import DraftProof, prove_draft, without_draft
from tasks.engines.load_prompts import Prompts
from tests.unit.pretend_chat import PretendChat, Top, pretending
from tests.unit.turn_builders import RATE, World, bundle, supply, written

SURE: Top = {"yes": -0.01, "no": -5.0}
OTHER: Top = {"no": -0.01, "yes": -5.0}

EAGLE = bundle("eagle", 3)
SPEED = {"eagle": 0.040, "eagle-1": 0.036, "eagle-2": 0.028, "eagle-3": 0.020, "eagle-4": 0.024,
         "eagle-5": 0.032}  # fmt: skip


@dataclass
class Searched:
    """Kept rates that are known beforehand."""

    without: tuple[float | None, float | None] | None = (RATE, 6.0)
    with_: tuple[float | None, float | None] | None = (RATE, 6.0)
    asked: list[int | None] = field(default_factory=list)
    emulated: tuple[bool | None, bool | None] = (None, None)
    """Without and with the draft."""

    def __call__(self, one: Bundle) -> LatencyEvidence:
        self.asked.append(one.num_speculative_tokens)
        return LatencyEvidence(
            bundle=one.digest, profile="p", hardware="h", engine="e", harness="h", settings={},
            points=[], measured_at=datetime.now(UTC), seconds=1.0,
            kept_rate=self.with_ if one.draft else self.without,
            emulated=self.emulated[one.draft is not None],
        )  # fmt: skip


class Everything(dict[str, list[Top]]):
    """One answer to every prompt."""

    def __missing__(self, key: str) -> list[Top]:
        return [SURE]


def proved(
    folder: Path, world: World, search: Searched, chat: PretendChat | None = None, **changes: Any
) -> DraftProof:
    with pretending(chat or PretendChat(Everything())) as url:
        world.url = url
        return prove_draft(
            EAGLE, written(), supply(), folder, search,
            repeats=3, agreement_prompts=4, serve=world.serve, **changes,
        )  # fmt: skip


def test_a_draft_that_is_faster_at_the_same_rate_stays(tmp_path: Path) -> None:
    world, search = World(SPEED), Searched()
    found = proved(tmp_path, world, search)
    assert found.stays is True, found.decision
    tries = ["eagle", *(f"eagle-{k}" for k in (1, 2, 3, 4, 5))]
    assert world.starts == [*tries, "eagle", "eagle-3", *["eagle", "eagle-3"] * 3]
    assert search.asked == [None, 3]
    assert {batch.rate for batch in world.batches} == {None, RATE}
    document = json.loads((tmp_path / "draft.json").read_text())
    assert document["stays"] is True
    assert document["num_speculative_tokens"] == 3
    assert document["kept_rate"] == {"without": [RATE, 6.0], "with": [RATE, 6.0]}
    assert document["turns"]["acceptance_length"] == pytest.approx(2.5)
    assert document["turns"]["ratios"]["tpot_p50"]["high"] < 1
    assert document["tries"]["3"][0]["tpot_p50_over_off"] < 1
    assert [one["tokens"] for one in document["tokens"]["tried"]] == [1, 2, 3, 4, 5]
    assert document["agreement"]["equal"] == 4
    assert "4 of 4 greedy answers are equal" in document["reason"]


def test_a_draft_that_gains_nothing_goes(tmp_path: Path) -> None:
    slow = {name: 0.04 if name == "eagle" else 0.1 for name in SPEED}
    found = proved(tmp_path / "slow", World(slow), Searched())
    assert found.stays is False
    assert found.decision is not None
    assert "no gain is seen" in found.decision.reason
    # Three repeats of equal queues leave room for a gain: nobody can say.
    found = proved(tmp_path / "same", World(dict.fromkeys(SPEED, 0.04)), Searched())
    assert found.stays is None
    assert found.decision is not None
    assert "too wide" in found.decision.reason


def test_a_lower_kept_rate_lets_it_go_however_fast(tmp_path: Path) -> None:
    found = proved(tmp_path, World(SPEED), Searched(with_=(3.0, 4.0)))
    assert found.stays is False
    assert found.turns is not None


def test_disagreeing_answers_end_the_proof(tmp_path: Path) -> None:
    class Changing(PretendChat):
        def reply(self, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
            self.answers = {
                body["messages"][-1]["content"]: [SURE if len(self.asked) < 6 else OTHER]
            }
            return super().reply(body)

    world, search = World(SPEED), Searched()
    found = proved(tmp_path, world, search, Changing({}))
    assert found.stays is False
    assert search.asked == [None]
    document = json.loads((tmp_path / "draft.json").read_text())
    assert len(document["agreement"]["disagreements"]) == 3
    assert document["turns"] is None
    assert document["tokens"]["tokens"] == 3


def test_no_kept_rate_leaves_nothing_to_compare_at(tmp_path: Path) -> None:
    for number, kept in enumerate([(None, 0.5), None]):
        world = World(SPEED)
        found = proved(tmp_path / str(number), world, Searched(without=kept))
        assert found.stays is None
        assert world.starts == []
        assert (tmp_path / str(number) / "draft.json").exists()


def test_numbers_the_engine_cannot_run_are_left_out(tmp_path: Path) -> None:
    world = World(SPEED | {"eagle-4": 0.01}, infeasible=("eagle-3", "eagle-5"))
    found = proved(tmp_path / "some", world, Searched())
    assert found.best is not None
    assert found.best.tokens == 4
    assert found.tries["3"] == [{"infeasible": "no kernel for eagle-3"}]
    never = World(SPEED, infeasible=tuple(f"eagle-{k}" for k in range(1, 6)))
    found = proved(tmp_path / "none", never, Searched())
    assert found.stays is False
    assert found.decision is not None
    assert found.decision.reason == "the engine cannot run it here: no kernel for eagle-1"


def test_numbers_of_tokens_can_have_several_rounds(tmp_path: Path) -> None:
    """The prompts of a round are the same for all, and new ones in the next."""
    steady = {name: SPEED[name] for name in ("eagle", "eagle-2", "eagle-4")}
    world = World(steady, busy=(1.0, 1.6, 1.0))
    found = proved(tmp_path, world, Searched(), tokens=(2, 4), rounds=3)
    assert world.starts[:9] == ["eagle", "eagle-2", "eagle-4"] * 3
    assert [len(found.tries[name]) for name in ("off", "2", "4")] == [3, 3, 3]
    assert found.best is not None
    assert found.best.tokens in (2, 4)
    loads = [batch for batch in world.batches[:18] if batch.rate is not None]
    assert [one.seed for one in loads] == [501] * 3 + [502] * 3 + [503] * 3


def test_too_few_prompts_are_found_before_the_turns(tmp_path: Path) -> None:
    """Four turns and four greedy answers take 4 * (16 + 200) + 4 prompts."""
    for count, starts in ((867, 0), (868, 14)):
        world, some = World(SPEED), iter(supply().take(count))
        with pretending(PretendChat(Everything())) as url:
            world.url = url
            found = prove_draft(
                EAGLE, written(), Prompts(some, "few", count), tmp_path / str(count), Searched(),
                repeats=3, agreement_prompts=4, serve=world.serve,
            )  # fmt: skip
        assert len(world.starts) == starts
        assert found.decision is not None
        assert ("take 868 prompts, and there are 867" in found.decision.reason) is (starts == 0)


def test_void_tries_decide_nothing(tmp_path: Path) -> None:
    found = proved(tmp_path, World(SPEED, hit_rates=(0.9,)), Searched())
    assert found.stays is None
    assert found.decision is not None
    assert "hit rate" in found.decision.reason


def test_a_proof_that_was_stopped_goes_on(tmp_path: Path) -> None:
    world = World(SPEED, dies_after=15)
    with pytest.raises(InfrastructureError):
        proved(tmp_path, world, Searched())
    assert not (tmp_path / "draft.json").exists()
    chat, again = PretendChat(Everything()), World(SPEED)
    found = proved(tmp_path, again, Searched(), chat)
    assert found.stays is not None
    assert again.starts == ["eagle-3", *["eagle", "eagle-3"] * 2]
    assert chat.asked == []


def test_a_bundle_without_its_draft_is_another_bundle() -> None:
    plain = without_draft(EAGLE)
    assert (plain.draft, plain.num_speculative_tokens) == (None, None)
    assert plain.target == EAGLE.target
    assert plain.digest != EAGLE.digest


@pytest.mark.parametrize(
    ("without", "with_", "told"),
    [(None, None, None), (False, False, False), (True, True, True), (False, True, True)],
)
def test_an_emulated_kernel_is_in_the_proof(
    tmp_path: Path, without: bool | None, with_: bool | None, told: bool | None
) -> None:
    found = proved(tmp_path, World(SPEED), Searched(emulated=(without, with_)))
    assert found.document["emulated"] is told
    assert json.loads((tmp_path / "draft.json").read_text())["emulated"] is told
    assert found.document["production"] is True
