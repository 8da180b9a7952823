"""The store: an entry exists only if its manifest is complete and matches."""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from filelock import Timeout

from registry.artifacts import Stage
from registry.errors import InfrastructureError
from registry.store import Absent, Store


@pytest.fixture
def shelf(tmp_path: Path) -> Store:
    return Store(tmp_path / "store")


def a_stage(name: str = "lora", parents: dict[str, Stage] | None = None, **config: Any) -> Stage:
    return Stage(name=name, version=1, config=config, parents=parents or {})


def writing(text: str, calls: list[str] | None = None) -> Any:
    def produce(folder: Path) -> dict[str, Any]:
        if calls is not None:
            calls.append(text)
        (folder / "sub").mkdir()
        (folder / "sub" / "weights").write_text(text)
        return {"said": text}

    return produce


def test_the_key_names_the_inputs_and_not_the_label() -> None:
    one = Stage(name="lora", version=1, config={"a": 1, "b": 2})
    assert one.key == Stage(name="lora", version=1, config={"b": 2, "a": 1}, label="x").key
    others = [
        Stage(name="merge", version=1, config={"a": 1, "b": 2}),
        Stage(name="lora", version=2, config={"a": 1, "b": 2}),
        Stage(name="lora", version=1, config={"a": 1, "b": 3}),
        Stage(name="lora", version=1, config={"a": 1, "b": 2}, parents={"base": one}),
        Stage(name="lora", version=1, config={"a": 1, "b": 2}, inputs={"file": "1"}),
        Stage(name="lora", version=1, config={"a": 1, "b": 2}, tools={"peft": "1"}),
    ]
    assert len({one.key, *(other.key for other in others)}) == 7


def test_made_once_then_reused_with_its_summary(shelf: Store) -> None:
    calls: list[str] = []
    first = shelf.make(a_stage(), writing("w", calls), {})
    again = shelf.make(a_stage(), writing("w", calls), {})
    assert calls == ["w"]
    assert (first.reused, again.reused) == (False, True)
    assert again.summary == {"said": "w"}
    assert again.digest == first.digest


def test_a_failed_stage_leaves_nothing(shelf: Store) -> None:
    def produce(folder: Path) -> dict[str, Any]:
        (folder / "half").write_text("half")
        raise RuntimeError("stopped")

    with pytest.raises(RuntimeError):
        shelf.make(a_stage(), produce, {})
    assert not list((shelf.root / ".incoming").iterdir())
    with pytest.raises(Absent, match="missing"):
        shelf.find(a_stage())


def test_a_stage_without_files_is_an_error(shelf: Store) -> None:
    with pytest.raises(InfrastructureError, match="wrote no file"):
        shelf.make(a_stage(), lambda folder: {}, {})


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        ("gone", "missing"),
        ("empty", "empty"),
        ("no manifest", "no manifest"),
        ("manifest cut", "cannot be read"),
        ("flipped bit", "digest differs"),
        ("flipped bit of the digest", "manifest's digest"),
        ("parent without its key", "cannot be read"),
        ("file gone", "files differ"),
        ("file added", "files differ"),
    ],
)
def test_damage_is_named_and_the_stage_made_again(shelf: Store, damage: str, reason: str) -> None:
    ref = shelf.make(a_stage(), writing("weights"), {})
    entry, weights = ref.path.parent, ref.path / "sub" / "weights"
    if damage in ("gone", "empty"):
        shutil.rmtree(entry)
    if damage == "empty":
        entry.mkdir()
    if damage == "no manifest":
        (entry / "manifest.json").unlink()
    if damage == "manifest cut":
        (entry / "manifest.json").write_text('{"stage": "lo')
    if damage == "flipped bit":
        weights.write_text("weightt")
    if damage == "flipped bit of the digest":
        text = (entry / "manifest.json").read_text()
        other = ("0" if ref.digest[0] != "0" else "1") + ref.digest[1:]
        (entry / "manifest.json").write_text(text.replace(ref.digest, other))
    if damage == "parent without its key":
        content = json.loads((entry / "manifest.json").read_text())
        content["parents"] = {"student": {"stage": "merge"}}
        (entry / "manifest.json").write_text(json.dumps(content))
    if damage == "file gone":
        weights.unlink()
    if damage == "file added":
        (ref.path / "extra").write_text("x")
    reasons: list[str] = []
    again = shelf.make(a_stage(), writing("weights"), {}, on_absent=reasons.append)
    assert not again.reused
    assert len(reasons) == 1
    assert reason in reasons[0]
    assert reasons[0].startswith("store/lora/")
    assert shelf.make(a_stage(), writing("weights"), {}).reused


def test_a_changed_entry_is_set_aside_not_overwritten(shelf: Store) -> None:
    ref = shelf.make(a_stage(), writing("weights"), {})
    (ref.path / "sub" / "weights").write_text("by hand")
    shelf.make(a_stage(), writing("weights"), {})
    kept = list((shelf.root / ".set-aside").rglob("weights"))
    assert [path.read_text() for path in kept] == ["by hand"]


def chain(text: str = "m") -> tuple[Stage, Stage]:
    merge = a_stage("merge")
    return merge, a_stage("quantize", {"student": merge})


def test_a_pruned_parent_does_not_make_the_child_run(shelf: Store) -> None:
    merge, quantize = chain()
    ref = shelf.make(merge, writing("m"), {})
    shelf.make(quantize, writing("q"), {})
    shutil.rmtree(ref.path.parent)
    assert shelf.find(quantize).reused


def test_a_parent_made_again_with_the_same_content_changes_nothing(shelf: Store) -> None:
    merge, quantize = chain()
    ref = shelf.make(merge, writing("m"), {})
    shelf.make(quantize, writing("q"), {})
    shutil.rmtree(ref.path.parent)
    shelf.make(merge, writing("m"), {})
    assert shelf.find(quantize).reused


def test_a_parent_made_again_with_other_content_makes_the_child_run(shelf: Store) -> None:
    merge, quantize = chain()
    ref = shelf.make(merge, writing("m"), {})
    shelf.make(quantize, writing("q"), {})
    shutil.rmtree(ref.path.parent)
    shelf.make(merge, writing("another"), {})
    with pytest.raises(Absent, match="parent student has changed"):
        shelf.find(quantize)


def test_a_copy_that_somebody_made_is_no_entry(shelf: Store) -> None:
    ref = shelf.make(a_stage(), writing("w"), {})
    copy = ref.path.parent.with_name("before-i-try-something")
    shutil.copytree(ref.path.parent, copy)
    entries, odd = shelf.entries()
    assert ([entry.key for entry in entries], odd) == ([ref.key], [copy])


def test_a_wait_within_a_stage_is_not_taken_for_a_wait_for_its_entry(shelf: Store) -> None:
    def produce(folder: Path) -> dict[str, Any]:
        raise Timeout("another lock")

    with pytest.raises(Timeout, match="another lock"):
        shelf.make(a_stage(), produce, {})


def test_evidence_that_is_too_old_is_measured_again(shelf: Store) -> None:
    shelf.make(a_stage(), writing("w"), {})
    reasons: list[str] = []
    again = shelf.make(
        a_stage(), writing("w"), {}, fresh=lambda ref: False, on_absent=reasons.append
    )
    assert not again.reused
    assert "too old" in reasons[0]


def _make_in_process(root: Path, log: Path) -> None:
    def produce(folder: Path) -> dict[str, Any]:
        with log.open("a") as out:
            out.write(f"{os.getpid()}\n")
        (folder / "w").write_text("w")
        return {}

    Store(root).make(a_stage(), produce, {})


def test_two_processes_make_one_key_once(shelf: Store, tmp_path: Path) -> None:
    log = tmp_path / "log"
    context = multiprocessing.get_context("fork")
    workers = [context.Process(target=_make_in_process, args=(shelf.root, log)) for _ in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(30)
    assert [worker.exitcode for worker in workers] == [0, 0, 0, 0]
    assert len(log.read_text().splitlines()) == 1


def _begin_and_die(root: Path) -> None:
    def produce(folder: Path) -> dict[str, object]:
        (folder / "half").write_text("half")
        os._exit(9)

    Store(root).make(a_stage(), produce, {})


def test_a_dead_writers_folder_goes_with_the_next_run_a_live_ones_stays(shelf: Store) -> None:
    context = multiprocessing.get_context("fork")
    writer = context.Process(target=_begin_and_die, args=(shelf.root,))
    writer.start()
    writer.join(30)
    assert writer.exitcode == 9
    (left,) = (shelf.root / ".incoming").iterdir()
    found: list[list[Path]] = []

    def produce(folder: Path) -> dict[str, object]:
        (folder / "whole").write_text("whole")
        # A stage may take days.
        os.utime(folder.parent, (1, 1))
        # Another run of this machine begins while this one writes.
        looking = context.Process(target=lambda: os._exit(len(Store(shelf.root).remove_stale())))
        looking.start()
        looking.join(30)
        assert looking.exitcode == 0, "what is being written was removed"
        found.append(list((shelf.root / ".incoming").iterdir()))
        return {}

    assert shelf.remove_stale() == [left]
    shelf.make(a_stage(), produce, {})
    assert len(found[0]) == 1


def test_what_a_crashed_writer_left_is_never_seen_and_is_removed_when_stale(shelf: Store) -> None:
    left = shelf.root / ".incoming" / "lora-123"
    left.mkdir(parents=True)
    assert shelf.remove_stale(older_than=3600) == []
    os.utime(left, (1, 1))
    assert shelf.remove_stale(older_than=3600) == [left]
    assert not left.exists()


def test_a_flipped_bit_is_found_also_where_files_are_hashed_beside_each_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("registry.digests.WORTH_THREADS", 0)
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: range(4))
    names = [f"{number}.safetensors" for number in range(6)]

    def produce(folder: Path) -> dict[str, Any]:
        for name in names:
            (folder / name).write_bytes(name.encode() * 100)
        return {}

    store = Store(tmp_path)
    stage = Stage(name="weights", version=1)
    made = store.make(stage, produce, {})
    files = store.manifest(made).files
    assert {name: files[name].sha256 for name in names} == {
        name: hashlib.sha256(name.encode() * 100).hexdigest() for name in names
    }
    assert store.find(stage).digest == made.digest
    content = bytearray((made.path / names[4]).read_bytes())
    content[50] ^= 1
    (made.path / names[4]).write_bytes(bytes(content))
    with pytest.raises(Absent, match=r"digest differs \(4.safetensors was changed\)"):
        store.find(stage)
