"""Whether prefill and decode apart pays: right numbers, and no claim that no interval carries."""

from __future__ import annotations

import math
from typing import Any

import pytest

from eval_suites.topology_comparison import (
    Kept,
    Quotient,
    Side,
    TopologyComparison,
    change_words,
    compare_topologies,
)
from eval_suites.turns import Pair, TurnRatio, ratio

APART = "disaggregated, 1 prefill + 1 decode (NixlConnector)"


def sides(a: Kept | None, b: Kept | None, devices: tuple[int, int] = (2, 3)) -> tuple[Side, Side]:
    return Side("one", "colocated", devices[0], a), Side("apart", APART, devices[1], b)


def row(ttft: float, tpot: float) -> dict[str, Any]:
    return {"ok": True, "ttft_ms": ttft, "tpot_ms": tpot, "itl_ms": [tpot] * 4,
            "e2el_ms": ttft + 4 * tpot}  # fmt: skip


def pair(ttft: tuple[float, float], tpot: tuple[float, float]) -> Pair:
    return [row(ttft[0], tpot[0])] * 20, [row(ttft[1], tpot[1])] * 20


def judged(a: Kept | None, b: Kept | None, **more: Any) -> TopologyComparison:
    return compare_topologies(*sides(a, b, **more), "GPU")


# -- the rate for each GPU -------------------------------------------------------------------


def test_a_rate_that_is_higher_for_each_gpu_by_all_of_the_interval_pays() -> None:
    # (18 / 3) / (10 / 2) = 1.2; worst (18 / 3) / (11 / 2), best (20 / 3) / (10 / 2).
    found = judged((10.0, 11.0), (18.0, 20.0))
    assert found.per_device is not None and found.pays is True
    assert found.per_device.value == pytest.approx(1.2)
    assert found.per_device.low == pytest.approx(6 / 5.5)
    assert found.per_device.high == pytest.approx(20 / 3 / 5)
    assert (
        "kept requests/s for each GPU: one 5, apart 6; quotient 1.20 (1.09 to 1.33)"
        in (found.words[1])
    )
    assert "a request costs 0.83 times as much (0.75 to 0.92)" in found.words[1]
    assert found.words[-1] == "apart pays: it keeps more under the same limits for each GPU"


def test_more_requests_on_more_gpus_may_be_less_for_each() -> None:
    # It keeps 30 % more, on half as many GPUs again: (13 / 3) / (10 / 2) = 0.87.
    found = judged((10.0, 10.5), (13.0, 14.0))
    assert found.per_device is not None and found.pays is False
    assert found.per_device.value == pytest.approx(13 / 15)
    assert found.per_device.high == pytest.approx(14 / 15)
    assert found.words[-1] == "apart does not pay: it gives no more for each GPU"


def test_an_interval_that_holds_one_claims_nothing() -> None:
    found = judged((10.0, 12.0), (15.5, 18.0))
    assert found.per_device is not None
    assert found.per_device.low is not None and found.per_device.low < 1
    assert found.pays is None
    assert found.words[-1] == "whether apart pays is not decided"
    assert not any("better" in words or " pays:" in words for words in found.words)


@pytest.mark.parametrize(
    ("a", "b", "quotient", "pays"),
    [
        # The search ended before A failed: A may keep more than is known.
        ((10.0, None), (30.0, 32.0), Quotient(2.0, None, 32 / 15), None),
        # B never failed: what it keeps at least decides.
        ((10.0, 11.0), (18.0, None), Quotient(1.2, 6 / 5.5, None), True),
        # B kept nothing that was tried.
        ((10.0, 11.0), (None, 9.0), Quotient(None, 0.0, 0.6), False),
        # A kept nothing: no quotient of that.
        ((None, 2.0), (18.0, 20.0), Quotient(None, 6.0, None), True),
        ((None, None), (None, None), Quotient(None, None, None), None),
    ],
)
def test_ends_that_a_search_leaves_open(
    a: Kept, b: Kept, quotient: Quotient, pays: bool | None
) -> None:
    found = judged(a, b)
    assert found.per_device is not None
    for name in ("value", "low", "high"):
        ours, theirs = getattr(found.per_device, name), getattr(quotient, name)
        assert ours == theirs if theirs is None else ours == pytest.approx(theirs), name
    assert found.pays is pays


def test_on_one_machine_without_gpus_both_have_all_of_it() -> None:
    a, b = sides((4.0, 5.0), (2.0, 3.0), devices=(1, 1))
    found = compare_topologies(a, b, "machine")
    assert (
        found.words[0]
        == f"one is colocated on the whole machine, apart {APART} on the whole machine"
    )
    assert found.pays is False


# -- times -----------------------------------------------------------------------------------


def test_words_of_a_change_follow_the_interval() -> None:
    assert change_words("tpot_p95", TurnRatio(0.79, 0.73, 0.85, 5)) == (
        "TPOT P95 21 % better (15 to 27 %)"
    )
    assert change_words("ttft_p95", TurnRatio(1.08, 1.02, 1.14, 5)) == (
        "TTFT P95 8 % worse (2 to 14 %)"
    )
    assert change_words("itl_p95", TurnRatio(0.97, 0.9, 1.05, 5)) == (
        "ITL P95: not decided (-10 % to +5 %)"
    )
    assert "one repeat" in change_words("itl_p95", TurnRatio(0.5, repeats=1))
    assert change_words("itl_p95", TurnRatio(None, reason="no repeat was measured")) == (
        "ITL P95: not known, no repeat was measured"
    )


def test_times_come_from_the_pairs_of_turns() -> None:
    pairs = [pair((100, 110), (20, 15)), pair((100, 112), (20, 16)), pair((100, 108), (20, 15.5))]
    a, b = sides(None, None)
    found = compare_topologies(a, b, "GPU", pairs)
    wanted = ratio([(20, 15), (20, 16), (20, 15.5)])
    assert found.times["tpot_p95"] == wanted and found.times["itl_p95"] == wanted
    assert found.times["ttft_p95"].value == pytest.approx(
        math.exp((math.log(1.1) + math.log(1.12) + math.log(1.08)) / 3)
    )
    assert found.words[1].startswith("TTFT P95 10 % worse")
    assert found.words[2].startswith("TPOT P95 23 % better")
    assert found.words[-2] == (
        "at the same load apart takes 1.5 times the GPUs; the rate that each keeps was not "
        "measured here"
    )
    assert found.pays is None


def test_worse_times_on_no_fewer_gpus_do_not_pay() -> None:
    pairs = [pair((100, 150), (20, 30)), pair((100, 151), (20, 30.1))]
    a, b = sides(None, None)
    found = compare_topologies(a, b, "GPU", pairs)
    assert found.pays is False
    assert found.words[-1] == (
        "apart does not pay: every time is worse, and it takes no fewer GPUs"
    )
    # On fewer GPUs worse times may well be worth it.
    assert compare_topologies(*sides(None, None, devices=(4, 3)), "GPU", pairs).pays is None


def test_one_repeat_decides_nothing() -> None:
    found = compare_topologies(*sides(None, None), "GPU", [pair((100, 150), (20, 30))])
    assert found.pays is None
    assert not any("worse" in words or "better" in words for words in found.words)


# -- on the page of a release ----------------------------------------------------------------


def arranged(monkeypatch: pytest.MonkeyPatch, gpus: list[str]) -> tuple[Any, dict[str, Any]]:
    from registry.bundle import Bundle, Part
    from registry.topology import Disaggregated
    from tasks import topologies
    from tasks.judging import Measured
    from tests.unit.test_report import found, release

    monkeypatch.setattr(topologies, "hardware", lambda: {"gpus": gpus})
    two = {"tensor-parallel-size": 2}
    split = Disaggregated(prefill_args={"tensor-parallel-size": 1})
    made = [("one", None, (10.0, 11.0)), ("apart", split, (18.0, 20.0))]
    target = Part(stage="distill", key="k", digest="t")
    everyone = {
        name: Measured(
            name,
            bundle=Bundle(
                name=name, target=target, engine_version="0", engine_args=two, topology=topology
            ),
        )
        for name, topology, _ in made
    }
    candidates = [found(name, kept) for name, _, kept in made]
    candidates = [one.model_copy(update={"emulated": False}) for one in candidates]
    return release().model_copy(update={"candidates": candidates}), everyone


def test_the_report_sets_both_beside_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    from registry.report import render
    from tasks.topologies import topology_tables
    from tests.unit.test_report import details, page_of

    outcome, everyone = arranged(monkeypatch, ["NVIDIA H20, 97871 MiB, 550"] * 3)
    (table,) = topology_tables(outcome, everyone)
    assert [(row.name, row.devices, row.each) for row in table.rows] == [
        ("one", "2 GPUs", "5"),
        ("apart", "3 GPUs", "6"),
    ]
    assert table.words[-1] == "apart pays: it keeps more under the same limits for each GPU"
    shown = details().model_copy(update={"topologies": [table]})
    text = " ".join(" ".join(page_of(render(outcome, shown)).text).split())
    assert "Prefill and decode apart" in text and "Apart pays: it keeps more" in text
    assert "Prefill and decode apart" not in render(outcome, details())


def test_no_table_of_other_weights_or_of_one_topology(monkeypatch: pytest.MonkeyPatch) -> None:
    from tasks.topologies import topology_tables

    outcome, everyone = arranged(monkeypatch, [])
    (table,) = topology_tables(outcome, everyone)
    assert [row.devices for row in table.rows] == ["the whole machine"] * 2
    other = everyone["apart"].bundle
    part = other.target.model_copy(update={"digest": "another"})
    alone = {**everyone, "apart": _with(everyone["apart"], other, target=part)}
    assert topology_tables(outcome, alone) == []
    plain = {**everyone, "apart": _with(everyone["apart"], other, topology=None)}
    assert topology_tables(outcome, plain) == []


def _with(measured: Any, bundle: Any, **changes: Any) -> Any:
    from dataclasses import replace

    return replace(measured, bundle=bundle.model_copy(update=changes))
