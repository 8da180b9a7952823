"""Which checkpoint is served, when none may be, and what the stage keeps of it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from pydantic import ValidationError

from eval_suites.draft_checkpoints import (
    Acceptance,
    MeasuredCheckpoint,
    best_checkpoint,
    faults,
)
from recipes.schema import DraftRecipe
from registry.artifacts import ArtifactRef, Stage
from registry.bundle import Bundle, Part
from registry.errors import Infeasible, InfrastructureError, StageFailed
from registry.store import Absent
from tasks import draft_checkpoints, speculation
from tasks.engines.engine_acceptance import accepted_by_segment, by_segment
from tasks.engines.greedy_agreement import Answer, Token
from tasks.serving import part_of
from tasks.stages import begin_run, make, store

# -- the decisions -------------------------------------------------------------------------------


def acceptance(accepted: int, drafts: int = 100, proposed: int = 300) -> Acceptance:
    left, places = accepted, []
    for _ in range(3):
        places.append(min(left, drafts))
        left -= places[-1]
    return Acceptance(drafts=drafts, proposed=proposed, accepted=accepted, per_position=places)


def measured(epoch: int, accepted: int, loss: float = 1.0, **told: Any) -> MeasuredCheckpoint:
    engine = acceptance(accepted)
    fields = {"expected": engine.length, "by_segment": {"": engine}} | told
    return MeasuredCheckpoint(epoch=epoch, held_out_loss=loss, engine=engine, **fields)


def test_ratios_are_the_engines() -> None:
    counts = Acceptance(drafts=40, proposed=120, accepted=70, per_position=[34, 22, 14])
    assert counts.length == 2.75
    assert counts.shares == [0.85, 0.55, 0.35]
    both = Acceptance.total([counts, acceptance(50)])
    assert (both.drafts, both.proposed, both.accepted) == (140, 420, 120)
    assert both.per_position == [84, 22, 14]


def test_nothing_drafted_is_a_length_of_one() -> None:
    none = Acceptance(drafts=0, proposed=0, accepted=0, per_position=[0, 0])
    assert (none.length, none.shares, none.dead) == (1.0, [0.0, 0.0], False)


def test_the_longest_acceptance_wins_whatever_the_loss_says() -> None:
    best = best_checkpoint([measured(3, 150, loss=1.0), measured(5, 160, loss=2.0)])
    assert best.epoch == 5


def test_equal_acceptance_goes_to_the_lower_loss() -> None:
    best = best_checkpoint([measured(3, 150, loss=1.5), measured(5, 150, loss=1.0)])
    assert best.epoch == 5


@pytest.mark.parametrize(
    ("proposed", "accepted", "dead"),
    [(200, 2, True), (200, 3, False), (199, 0, False), (300, 0, True), (1000, 10, True)],
)
def test_at_most_one_in_a_hundred_of_two_hundred_is_a_broken_draft(
    proposed: int, accepted: int, dead: bool
) -> None:
    assert acceptance(accepted, 100, proposed).dead is dead


def test_a_broken_draft_is_told_with_its_counts() -> None:
    (told,) = faults(measured(1, 3, expected=1.03), 0.15)
    assert told.startswith("the engine accepted 3 of 300 proposals: the draft is broken")


@pytest.mark.parametrize(("expected", "kept"), [(2.65, True), (2.35, True), (2.66, False)])
def test_expected_and_counted_must_agree(expected: float, kept: bool) -> None:
    told = faults(measured(1, 150, expected=expected), 0.1500001)
    assert (told == []) is kept
    if not kept:
        assert "2.660, the engine reports 2.500" in told[0]


def test_no_number_is_no_expectation() -> None:
    with pytest.raises(ValidationError):
        measured(1, 150, expected=float("nan"))


# -- the counters --------------------------------------------------------------------------------


class Server:
    """Answers with five tokens, four of which came from two drafts; counts late by one look."""

    served_name, api_key, url = "m", "", "http://127.0.0.1:1/v1"

    def __init__(self, miscount: int = 0) -> None:
        self.miscount = miscount
        self.asked: list[str] = []
        self.counts = {"drafts": 7, "proposed": 21, "accepted": 5, "generated": 100}
        self.late = dict(self.counts)
        self.places = {0: 4, 1: 1, 2: 0}

    def ask(self, url: str, key: str, model: str, rows: Sequence[Any], most: int) -> list[Answer]:
        assert (url, key, model, most) == (self.url, "", "m", 64)
        self.late = dict(self.counts)
        for row in rows:
            self.asked.append(row["id"])
            self.counts["drafts"] += 2
            self.counts["proposed"] += 6
            self.counts["accepted"] += 3
            self.counts["generated"] += 5 + self.miscount
            self.places[0] += 2
            self.places[1] += 1
        return [Answer(id=row["id"], tokens=[Token(token="t")] * 5) for row in rows]

    def metrics(self, by: str | None = None) -> dict[str, float]:
        if by == "position":
            name = "vllm:spec_decode_num_accepted_tokens_per_pos_total"
            return {f'{name}{{position="{place}"}}': n for place, n in self.places.items()}
        shown, self.late = self.late, self.counts
        return {
            "vllm:spec_decode_num_drafts_total": shown["drafts"],
            "vllm:spec_decode_num_draft_tokens_total": shown["proposed"],
            "vllm:spec_decode_num_accepted_tokens_total": shown["accepted"],
            "vllm:generation_tokens_total": shown["generated"],
        }


ROWS = [
    {"id": "1", "segment": "b", "messages": []},
    {"id": "2", "segment": "a", "messages": []},
    {"id": "3", "segment": "b", "messages": []},
]


def test_counts_are_read_for_each_segment() -> None:
    server = Server()
    answers, counts = accepted_by_segment(server, ROWS, 64, 3, ask=server.ask)
    assert server.asked == ["2", "1", "3"] == [row["id"] for row in by_segment(ROWS)]
    assert [answer.id for answer in answers] == ["2", "1", "3"]
    one = Acceptance(drafts=2, proposed=6, accepted=3, per_position=[2, 1, 0])
    two = Acceptance(drafts=4, proposed=12, accepted=6, per_position=[4, 2, 0])
    assert counts == {"a": one, "b": two}


def test_counters_that_somebody_else_moves_are_no_measurement() -> None:
    server = Server(miscount=1)
    with pytest.raises(InfrastructureError, match="106 generated tokens, its answers make 105"):
        accepted_by_segment(server, ROWS, 64, 3, ask=server.ask)


def test_a_server_without_a_draft_counts_nothing() -> None:
    server = Server()
    server.places = {}
    with pytest.raises(InfrastructureError, match="does not count"):
        accepted_by_segment(server, ROWS, 64, 3, ask=server.ask)


@pytest.mark.parametrize("drafts", [0, 1])
def test_an_engine_that_does_not_use_the_draft_is_no_short_acceptance(drafts: int) -> None:
    """With no draft the length is 1.0, and a gap of 0.15 allows that for a weak draft."""
    server = Server()

    def ask(*asked: Any) -> list[Answer]:
        before = dict(server.counts)
        said = server.ask(*asked)
        server.counts |= {**before, "generated": server.counts["generated"]}
        server.counts["drafts"] += drafts
        return said

    with pytest.raises(StageFailed, match="it does not use the draft") as caught:
        accepted_by_segment(server, ROWS, 64, 3, ask=ask)
    told = caught.value.problems[0].what
    assert f"drafted {2 * drafts} times and accepted 0 tokens" in told
    assert "answers have 12 after" in told


def test_a_server_with_fewer_positions_is_told() -> None:
    server = Server()
    with pytest.raises(InfrastructureError, match="per_pos_total 3"):
        accepted_by_segment(server, ROWS, 64, 4, ask=server.ask)


# -- the stage -----------------------------------------------------------------------------------

RECIPE = DraftRecipe(kind="draft", description="", epochs=3, learning_rate=1e-3)
CONFIG = {"engine": "vllm", "engine_args": {}, "env": {}, "num_speculative_tokens": 3}
LENGTHS = {2: 150, 3: 160}
"""Accepted of 100 drafts with each epoch's checkpoint."""


def a_file(folder: Path) -> dict[str, Any]:
    (folder / "file").write_text("x")
    return {}


class Shelf:
    """A trained draft in the store, and servers that count what they are told to."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        begin_run(0)
        monkeypatch.setattr(draft_checkpoints, "engine_tools", lambda: {"vllm": "0"})
        monkeypatch.setattr(draft_checkpoints, "engine_version", lambda: "0")
        self.student = self.made(Stage(name="distill", version=1), self._merged)
        prompts = Stage(name="prompts", version=1)
        monkeypatch.setattr(speculation, "hardware", lambda: {"gpus": []})
        self.training = self.made(
            speculation.stage(RECIPE, self.student, prompts), self._train, prompts
        )
        self.choice = draft_checkpoints.stage(
            "bf16-eagle3", RECIPE, self.training, self.student, self.student, CONFIG
        )
        self.served: list[str] = []
        self.accepted = dict(LENGTHS)
        self.change_answers = False
        self.infeasible = ""
        monkeypatch.setattr(draft_checkpoints, "bundle_of", self._bundle_of)
        monkeypatch.setattr(draft_checkpoints, "accepted_by_segment", self._accepted)
        monkeypatch.setattr(draft_checkpoints, "greedy_answers", self._plain)

    def made(self, stage: Stage, produce: Callable[[Path], dict[str, Any]], *first: Stage) -> Stage:
        for parent in first:
            make(parent, a_file)
        make(stage, produce)
        return stage

    def _merged(self, folder: Path) -> dict[str, Any]:
        (folder / "merged").mkdir()
        (folder / "merged" / "config.json").write_text("{}")
        return {}

    def _train(self, folder: Path) -> dict[str, Any]:
        for epoch in LENGTHS:
            kept = folder / "checkpoints" / f"epoch-{epoch}"
            kept.mkdir(parents=True)
            (kept / "config.json").write_text(json.dumps({"epoch": epoch}))
        (folder / "held_out.jsonl").write_text("\n".join(json.dumps(row) for row in ROWS))
        return {
            "kept_epochs": [2, 3],
            "best_epoch": 2,
            "held_out_loss": [3.0, 1.0, 1.1],
            "expected": {"2": {"acceptance_length": 2.45}, "3": {"acceptance_length": 2.55}},
        }

    def _bundle_of(self, name: str, target: Part, draft: Part, config: Mapping[str, Any]) -> Bundle:
        return Bundle(name=name, target=target, draft=draft, engine_version="0", **config)

    @contextmanager
    def serve(self, bundle: Bundle) -> Iterator[Any]:
        self.served.append(bundle.name)
        if self.infeasible:
            raise Infeasible(self.infeasible)
        yield SimpleNamespace(server=SimpleNamespace(url="", api_key="", served_name=bundle.name))

    def _accepted(
        self, server: Any, rows: Sequence[Any], most: int, steps: int
    ) -> tuple[list[Answer], dict[str, Acceptance]]:
        epoch = int(server.served_name[-1])
        assert (most, steps) == (RECIPE.response_tokens, 3)
        return self._say(rows, "changed" if self.change_answers else "same"), {
            "a": acceptance(self.accepted[epoch])
        }

    def _plain(self, url: str, key: str, model: str, rows: Sequence[Any], _: int) -> list[Answer]:
        return self._say(rows, "same")

    def _say(self, rows: Sequence[Any], text: str) -> list[Answer]:
        token = Token(token=text, logprob=-0.1, top={text: -0.1})
        return [Answer(id=row["id"], text=text, tokens=[token]) for row in rows]

    def choose(self) -> ArtifactRef:
        target = part_of(self.student, "merged")
        chosen: ArtifactRef = draft_checkpoints.choose_checkpoint.fn(
            self.choice, target, self.serve
        )
        return chosen


@pytest.fixture
def shelf(monkeypatch: pytest.MonkeyPatch) -> Shelf:
    return Shelf(monkeypatch)


def test_what_the_engine_accepts_most_of_is_served(shelf: Shelf) -> None:
    """Not epoch 2, whose loss is the lowest."""
    ref = shelf.choose()
    assert shelf.served == ["bf16-eagle3-epoch-2", "bf16-eagle3-epoch-3", "bf16-eagle3-plain"]
    assert json.loads((ref.path / "draft" / "config.json").read_text()) == {"epoch": 3}
    assert ref.summary["epoch"] == 3
    assert ref.summary["acceptance_length"] == 2.6
    assert ref.summary["expected_acceptance_length"] == 2.55
    assert ref.summary["greedy_answers"] == {"asked": 3, "equal": 3, "near_ties": 0}
    document = json.loads((ref.path / "report.json").read_text())
    assert [one["epoch"] for one in document["checkpoints"]] == [2, 3]
    assert document["checkpoints"][1]["gap"] == 0.05
    text = (ref.path / "report.md").read_text()
    assert "| **3** | 1.100 | 2.550 | 2.600 | +0.050 | 100 | 1.000 | 0.600 | 0.000 |" in text
    assert "3 of 3 greedy answers are equal" in text
    kept = sorted(path.name for path in (ref.path / "answers").iterdir())
    assert kept == ["epoch-2.json", "epoch-3.json", "plain.json"]


def refused(shelf: Shelf, told: str) -> None:
    with pytest.raises(StageFailed, match=told):
        shelf.choose()
    with pytest.raises(Absent):
        store().find(shelf.choice)


def test_a_gap_ends_the_stage_with_both_numbers(shelf: Shelf) -> None:
    shelf.accepted = {2: 100, 3: 110}
    refused(shelf, r"expects an acceptance length of 2\.550, the engine reports 2\.100")


def test_a_broken_draft_ends_the_stage(shelf: Shelf) -> None:
    shelf.accepted = {2: 0, 3: 2}
    refused(shelf, "the engine accepted 2 of 300 proposals: the draft is broken")


def test_a_draft_that_changes_answers_ends_the_stage(shelf: Shelf) -> None:
    shelf.change_answers = True
    refused(shelf, "must not change greedy answers: 0 of 3 greedy answers are equal, 3 disagree")


def test_what_cannot_be_served_here_keeps_the_best_by_loss_and_the_reason(shelf: Shelf) -> None:
    shelf.infeasible = "no kernel for it"
    ref = shelf.choose()
    assert ref.summary == {"measured": False, "epoch": 2, "reason": "no kernel for it"}
    assert json.loads((ref.path / "draft" / "config.json").read_text()) == {"epoch": 2}
    assert "not measured: no kernel for it" in (ref.path / "report.md").read_text()


def test_want_of_memory_is_not_remembered(shelf: Shelf) -> None:
    """The engine's reason of one hour; another one stands until the key changes."""
    shelf.infeasible = "No available memory for the cache blocks"
    assert shelf.choose().summary["measured"] is False
    begin_run(0)
    shelf.infeasible = ""
    assert shelf.choose().summary["measured"] is True

    begin_run(0)
    shelf.choice = shelf.choice.model_copy(update={"version": 9})
    shelf.infeasible = "no kernel for it"
    assert shelf.choose().summary["measured"] is False
    begin_run(0)
    shelf.infeasible = ""
    assert shelf.choose().summary["measured"] is False


def test_with_other_weights_than_it_was_trained_for_the_remedy_is_its_own_draft(
    shelf: Shelf,
) -> None:
    quantized = shelf.made(
        Stage(name="quantize", version=1, parents={"student": shelf.student}), a_file
    )
    shelf.choice = draft_checkpoints.stage(
        "w8a8-eagle3", RECIPE, shelf.training, shelf.student, quantized, CONFIG
    )
    ref = shelf.choose()
    text = (ref.path / "report.md").read_text()
    assert "reports 2.600 with other weights than it was trained for; they may differ" in text
    assert json.loads((ref.path / "report.json").read_text())["trained_for_this_target"] is False

    begin_run(0)
    shelf.accepted = {2: 100, 3: 110}
    shelf.choice = shelf.choice.model_copy(update={"version": 2})
    with pytest.raises(StageFailed, match="set `target: candidate`"):
        shelf.choose()
