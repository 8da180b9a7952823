"""A B A B over queues that are computed: ratios, voids and stops."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from registry.errors import InfrastructureError, UserError
from tasks.turns import Comparison, compare_bundles
from tests.unit.turn_builders import RATE, World, bundle, supply, written

A, B = bundle("a"), bundle("b")


def compared(world: World, folder: Path, repeats: int = 4, **changes: Any) -> Comparison:
    return compare_bundles(
        A, B, written(**changes), supply(), folder, repeats, RATE, serve=world.serve
    )


def test_the_ratio_survives_a_busy_host(tmp_path: Path) -> None:
    """B takes 0.7 of A's time; the host is up to twice as slow from repeat to repeat."""
    world = World({"a": 0.02, "b": 0.014}, busy=(1.0, 2.0, 1.3, 1.0))
    found = compared(world, tmp_path)
    assert world.starts == ["a", "b"] * 4
    tpot = found.ratios["tpot_p50"]
    assert tpot.low is not None
    assert tpot.high is not None
    assert tpot.low < 0.7 < tpot.high
    assert tpot.high < 0.95
    spread = found.drifts["tpot_p50"].spread
    assert spread is not None
    assert spread > 0.7
    assert set(found.ratios) >= {"ttft_p50", "tpot_p99", "e2el_p90", "output_tokens_per_s"}
    assert found.notes == []


def test_a_and_b_get_the_same_and_every_repeat_new_prompts(tmp_path: Path) -> None:
    world = World()
    compared(world, tmp_path, repeats=3)
    warmups, loads = world.batches[::2], world.batches[1::2]
    assert all(batch.rate is None for batch in warmups)
    assert [len(batch.rows) for batch in loads] == [200] * 6
    assert {batch.rate for batch in loads} == {RATE}
    for batches in (warmups, loads):
        for a, b in zip(batches[::2], batches[1::2], strict=True):
            assert a == b
    assert len({batch.seed for batch in loads}) == 3
    asked = [row["messages"][0]["content"] for batch in world.batches for row in batch.rows]
    assert len(asked) == 2 * len(set(asked))


def test_a_stop_keeps_finished_turns_and_repeats_the_broken_one(tmp_path: Path) -> None:
    whole = compared(World(busy=(1.0, 1.5)), tmp_path / "whole")
    world = World(busy=(1.0, 1.5), dies_after=7)
    with pytest.raises(InfrastructureError):
        compared(world, tmp_path / "cut")
    assert world.starts == ["a", "b", "a", "b"]
    again = World(busy=(1.5, 1.0), starts=[])
    found = compared(again, tmp_path / "cut")
    assert again.starts == ["b", "a", "b", "a", "b"]
    for mine, other in zip(found.pairs, whole.pairs, strict=True):
        assert [one.identity for one in mine] == [one.identity for one in other]
    again.starts.clear()
    assert compared(again, tmp_path / "cut").document == found.document
    assert again.starts == []


def test_more_repeats_go_on_where_fewer_ended(tmp_path: Path) -> None:
    first = compared(World(), tmp_path, repeats=1)
    assert first.ratios["tpot_p50"].low is None
    more = World()
    found = compared(more, tmp_path, repeats=3)
    assert more.starts == ["a", "b"] * 2
    assert found.ratios["tpot_p50"].low is not None


def test_another_comparison_is_not_mixed_in(tmp_path: Path) -> None:
    compared(World(), tmp_path, repeats=1)
    with pytest.raises(UserError, match="another comparison"):
        compared(World(), tmp_path, repeats=1, burstiness=2.0)
    with pytest.raises(UserError, match="another comparison"):
        compare_bundles(B, A, written(), supply(), tmp_path, 1, RATE, serve=World().serve)


def test_a_turn_with_a_warm_cache_is_void_and_its_pair_left_out(tmp_path: Path) -> None:
    world = World(hit_rates=(0.0, 0.0, 0.0, 0.6, 0.0, 0.0))
    found = compared(world, tmp_path, repeats=3)
    assert [bool(b.void) for _, b in found.pairs] == [False, True, False]
    assert found.ratios["tpot_p50"].repeats == found.usable == 2
    (note,) = found.notes
    assert "turn 02-b is void" in note
    assert "hit rate 0.6" in note


def test_a_server_that_stayed_up_is_void(tmp_path: Path) -> None:
    found = compared(World(answered_before=9), tmp_path, repeats=2)
    assert "had answered 9 requests before" in found.notes[0]
    assert found.ratios["tpot_p50"].value is None
    assert found.ratios["tpot_p50"].reason == "no repeat was measured"


def test_failed_requests_leave_no_ratio_of_the_tail(tmp_path: Path) -> None:
    found = compared(World(error_share={"b": 0.05}), tmp_path, repeats=2)
    assert found.ratios["e2el_p50"].value is not None
    assert "among failed requests" in found.ratios["e2el_p99"].reason


def test_nobody_answering_is_no_measurement(tmp_path: Path) -> None:
    with pytest.raises(InfrastructureError, match="no warm-up request"):
        compared(World(error_share={"b": 1.0}), tmp_path, repeats=1)


def test_a_drifting_host_is_reported(tmp_path: Path) -> None:
    world = World(busy=(1.0, 1.3, 1.7, 2.2, 2.9))
    found = compared(world, tmp_path, repeats=5)
    assert any("of A drifts by +" in note for note in found.notes)


def test_rows_of_all_turns_are_kept(tmp_path: Path) -> None:
    import pyarrow.parquet as pq

    compared(World(), tmp_path, repeats=2)
    frame = pq.read_table(tmp_path / "turns.parquet").to_pandas()
    assert sorted(frame["turn"].unique()) == ["01-a", "01-b", "02-a", "02-b"]
    assert len(frame) == 4 * 200
    assert set(frame["bundle"]) == {A.digest, B.digest}
    document = json.loads((tmp_path / "turns.json").read_text())
    assert len(document["turns"]) == 4
    assert document["ratios"]["tpot_p50"]["repeats"] == 2


def test_an_emulated_side_is_said(tmp_path: Path) -> None:
    found = compared(World(emulated=("b",)), tmp_path / "b", repeats=2)
    assert found.document["emulated"] is True
    assert [turn["emulated"] for turn in found.document["turns"]] == [False, True] * 2
    assert found.notes == [
        "B was computed by an emulated kernel: its times are not those of its format"
    ]
    assert compared(World(emulated=()), tmp_path / "none", repeats=2).document["emulated"] is False
    assert compared(World(), tmp_path / "unknown", repeats=2).document["emulated"] is None
