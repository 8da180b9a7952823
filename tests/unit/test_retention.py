"""What may go from the store: never anything that a kept artifact was made of."""

from __future__ import annotations

import json
import multiprocessing
import os
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from registry import retention
from registry.artifacts import Stage
from registry.retention import Entry, Name, plan
from registry.store import OUT, Absent, Store

NOW = datetime(2030, 5, 1, tzinfo=UTC)
OLD = NOW - timedelta(days=60)


def entry(name: str, *parents: str, used_at: datetime = OLD) -> Entry:
    return Entry(
        stage="s",
        key=name,
        digest=f"d-{name}",
        label="",
        size=1,
        made_at=OLD,
        used_at=used_at,
        parents=tuple(("s", parent) for parent in parents),
    )


LINE = [
    entry("prompts"),
    entry("student", "prompts"),
    entry("w8", "student"),
    entry("w4", "student", "prompts"),
    entry("latency-w8", "w8", "prompts"),
]


def test_what_is_referred_to_keeps_its_lineage_and_not_what_was_made_of_it() -> None:
    decided = plan(LINE, {("s", "w8"): ["m@champion"]}, NOW)
    assert {one.name[1]: one.reasons for one in decided.keep} == dict.fromkeys(
        ("prompts", "student", "w8"), ("m@champion",)
    )
    assert {one.key for one in decided.remove} == {"w4", "latency-w8"}


def test_every_reason_is_told_once() -> None:
    roots = {("s", "w8"): ["m@champion", "run"], ("s", "w4"): ["run"]}
    decided = plan(LINE, roots, NOW)
    kept = {one.name[1]: one.reasons for one in decided.keep}
    assert kept["student"] == ("m@champion", "run")
    assert kept["w4"] == ("run",)


def test_nobody_refers_to_anything() -> None:
    decided = plan(LINE, {}, NOW)
    assert decided.keep == []
    order = [one.key for one in decided.remove]
    assert order.index("latency-w8") < order.index("w8") < order.index("student")
    assert order[-1] == "prompts"


@pytest.mark.parametrize(("hours", "kept"), [(23, 3), (25, 0)])
def test_what_was_used_within_a_day_stays_with_its_lineage(hours: int, kept: int) -> None:
    entries = [*LINE[:2], entry("w8", "student", used_at=NOW - timedelta(hours=hours))]
    assert len(plan(entries, {}, NOW).keep) == kept


def test_a_reference_to_what_is_not_there_keeps_nothing() -> None:
    decided = plan(LINE, {("s", "gone"): ["m@champion"]}, NOW)
    assert len(decided.remove) == len(LINE)


def test_a_circle_that_somebody_wrote_ends() -> None:
    circle = [entry("a", "b"), entry("b", "a")]
    assert len(plan(circle, {("s", "a"): ["x"]}, NOW).keep) == 2
    assert len(plan(circle, {}, NOW).remove) == 2


@st.composite
def graphs(draw: Any) -> tuple[list[Entry], dict[Name, list[str]]]:
    """Up to 12 entries, each made of earlier ones or of ones that are gone; roots of any kind."""
    count = draw(st.integers(0, 12))
    entries = []
    for number in range(count):
        parents = draw(st.lists(st.integers(-2, number - 1), max_size=3, unique=True))
        used_at = draw(st.sampled_from([OLD, NOW]))
        entries.append(entry(str(number), *map(str, parents), used_at=used_at))
    named = draw(st.lists(st.integers(-1, count), max_size=4))
    order = draw(st.permutations(entries))
    return list(order), {("s", str(number)): ["why"] for number in named}


@given(graphs())
def test_nothing_that_a_root_can_reach_ever_goes(
    drawn: tuple[list[Entry], dict[Name, list[str]]],
) -> None:
    entries, roots = drawn
    decided = plan(entries, roots, NOW)
    gone = [one.name for one in decided.remove]
    known = {one.name: one for one in entries}
    # Whole: nothing is forgotten, nothing is told twice.
    assert sorted(gone + [one.name for one in decided.keep]) == sorted(known)
    # Sound: no root goes, nor a parent of anything that stays.
    assert not set(gone) & set(roots)
    for kept in decided.keep:
        assert kept.reasons
        assert not set(gone) & set(known[kept.name].parents)
    # No more than that: what stays is a root, or something was made of it that stays.
    made_into = {parent for kept in decided.keep for parent in known[kept.name].parents}
    for kept in decided.keep:
        fresh = NOW - known[kept.name].used_at < retention.GRACE
        assert kept.name in roots or fresh or kept.name in made_into
    # In order: what was made of something goes before it.
    for place, name in enumerate(gone):
        assert not set(known[name].parents) & set(gone[:place])


# -- the store's part ------------------------------------------------------------------------


@pytest.fixture
def shelf(tmp_path: Path) -> Store:
    return Store(tmp_path / "store")


STAGE = Stage(name="lora", version=1, label="x")


def write(folder: Path) -> dict[str, Any]:
    (folder / "weights").write_text("w")
    return {}


def aged(shelf: Store, stage: Stage, days: float = 60) -> None:
    """Make an entry look as if it was made and last used that long ago."""
    file = shelf.folder(stage) / "manifest.json"
    then = datetime.now(UTC) - timedelta(days=days)
    content = json.loads(file.read_text())
    file.write_text(json.dumps({**content, "made_at": then.isoformat()}))
    os.utime(file, (then.timestamp(), then.timestamp()))


def test_an_entry_is_what_its_manifest_says(shelf: Store) -> None:
    child = Stage(name="merge", version=1, parents={"adapter": STAGE})
    shelf.make(STAGE, write, {})
    made = shelf.make(child, write, {})
    (shelf.root / "merge" / "broken").mkdir()
    (one, other), odd = shelf.entries()
    assert (one.stage, other.stage) == ("lora", "merge")
    assert other.parents == (("lora", STAGE.key),)
    assert other.digest == made.digest
    assert other.size > len("w")
    assert odd == [shelf.root / "merge" / "broken"]


def test_finding_an_entry_is_using_it(shelf: Store) -> None:
    shelf.make(STAGE, write, {})
    aged(shelf, STAGE)
    (before,), _ = shelf.entries()
    assert before.used_at < datetime.now(UTC) - timedelta(days=59)
    shelf.find(STAGE)
    (after,), _ = shelf.entries()
    assert after.used_at > datetime.now(UTC) - timedelta(minutes=5)
    assert after.made_at == before.made_at
    shelf.mark_used("lora", "gone")


def test_what_was_withdrawn_is_gone_and_is_made_anew(shelf: Store) -> None:
    shelf.make(STAGE, write, {})
    aged(shelf, STAGE)
    (one,), _ = shelf.entries()
    out = shelf.withdraw(one)
    assert (out / "files" / "weights").exists()
    with pytest.raises(Absent, match="missing"):
        shelf.find(STAGE)
    with pytest.raises(Absent):
        shelf.withdraw(one)
    assert shelf.leftovers(NOW) == [out]
    # However young it is: nobody finds it again.
    assert shelf.remove_stale() == [out]
    assert shelf.make(STAGE, write, {}).reused is False


def test_what_was_used_or_made_anew_meanwhile_stays(shelf: Store) -> None:
    shelf.make(STAGE, write, {})
    aged(shelf, STAGE)
    (planned,), _ = shelf.entries()
    shelf.find(STAGE)
    with pytest.raises(Absent, match="used meanwhile"):
        shelf.withdraw(planned)
    aged(shelf, STAGE)
    file = shelf.folder(STAGE) / "manifest.json"
    (planned,), _ = shelf.entries()
    content = json.loads(file.read_text())
    file.write_text(json.dumps({**content, "digest": "another"}))
    with pytest.raises(Absent, match="made anew"):
        shelf.withdraw(planned)
    assert file.exists()


def test_what_is_withdrawn_while_it_is_read_is_absent(
    shelf: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    shelf.make(STAGE, write, {})
    aged(shelf, STAGE)
    (planned,), _ = shelf.entries()

    def digests_of_files(paths: Sequence[Path]) -> list[str]:
        os.utime(shelf.folder(STAGE) / "manifest.json", (0, 0))
        shelf.withdraw(planned)
        return [str(path.stat()) for path in paths]

    monkeypatch.setattr("registry.store.digests_of_files", digests_of_files)
    with pytest.raises(Absent, match="removed while it was read"):
        shelf.find(STAGE)


def make_slowly(root: Path, started: Any, go_on: Any) -> None:
    def produce(folder: Path) -> dict[str, Any]:
        started.set()
        go_on.wait(30)
        return write(folder)

    Store(root).make(STAGE, produce, {}, fresh=lambda ref: False)


def test_what_another_process_is_making_stays(shelf: Store) -> None:
    shelf.make(STAGE, write, {})
    aged(shelf, STAGE)
    (planned,), _ = shelf.entries()
    context = multiprocessing.get_context("fork")
    started, go_on = context.Event(), context.Event()
    maker = context.Process(target=make_slowly, args=(shelf.root, started, go_on))
    maker.start()
    try:
        assert started.wait(30)
        with pytest.raises(Absent, match="another process is making it"):
            shelf.withdraw(planned)
    finally:
        go_on.set()
        maker.join(30)
    assert maker.exitcode == 0
    shelf.find(STAGE)


def test_what_was_set_aside_long_ago_is_a_leftover(shelf: Store) -> None:
    shelf.make(STAGE, write, {})
    (shelf.folder(STAGE) / "files" / "weights").write_text("changed")
    shelf.make(STAGE, write, {})
    now = datetime.now(UTC)
    assert shelf.leftovers(now - timedelta(days=1)) == []
    (aside,) = shelf.leftovers(now + timedelta(minutes=1))
    assert aside.parent.name == ".set-aside"
    assert not aside.name.startswith(OUT)
