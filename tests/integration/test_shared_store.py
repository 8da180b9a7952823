"""The store that machines share, on a real S3 server and in a folder. A home is a machine here."""

from __future__ import annotations

import json
import multiprocessing
import os
import shutil
import signal
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from registry.artifacts import ArtifactRef, Stage
from registry.bundle import Bundle, Part
from registry.digests import digest_of_folder, digest_of_listing
from registry.errors import InfrastructureError, UserError
from registry.remote_store import RemoteStore
from registry.settings import settings
from registry.shared_store import SharedStore, open_store
from registry.store import Absent
from tasks.bundles import weights_as_gated
from tests.shared_writers import FILES, a_stage, upload_many, write_at_once

pytest_plugins = ["tests.s3"]

Produce = Callable[[Path], dict[str, Any]]


@pytest.fixture(params=["file", "s3"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "s3":
        return str(request.getfixturevalue("s3_url"))
    folder = tmp_path / "shared folder"
    folder.mkdir()
    return f"file://{folder}"


class Home:
    """One machine: a store of its own and what it told people."""

    def __init__(self, root: Path, url: str, patience: float = 5.0) -> None:
        self.told: list[str] = []
        self.store = SharedStore(root, RemoteStore(url, patience), self.told.append)

    def make(self, stage: Stage, text: str = "weights", **more: Any) -> ArtifactRef:
        return self.store.make(stage, writing(text), {}, **more)

    def text(self, stage: Stage) -> str:
        return (self.store.folder(stage) / "files" / "sub" / "a b#1.txt").read_text()


@pytest.fixture
def homes(tmp_path: Path, url: str) -> tuple[Home, Home]:
    return Home(tmp_path / "one", url), Home(tmp_path / "two", url)


def writing(text: str) -> Produce:
    def produce(folder: Path) -> dict[str, Any]:
        (folder / "sub").mkdir()
        (folder / "sub" / "a b#1.txt").write_text(text)
        (folder / ".hidden").write_text("h")
        return {"said": text}

    return produce


def never(folder: Path) -> dict[str, Any]:
    raise AssertionError("an engine ran")


def objects(home: Home, stage: Stage) -> dict[str, bytes]:
    """What lies at the remote for a key, read past our own code."""
    remote = home.store.remote
    at = f"{remote._root}/{stage.name}/{stage.key}"
    found = remote._fs.find(at)
    return {name.removeprefix(f"{at}/"): remote._fs.cat_file(name) for name in found}


def damage(home: Home, stage: Stage, name: str, content: bytes | None) -> None:
    remote = home.store.remote
    (at,) = [
        f"{remote._root}/{stage.name}/{stage.key}/{one}"
        for one in objects(home, stage)
        if one.endswith(name)
    ]
    if content is None:
        remote._fs.rm_file(at)
    else:
        remote._fs.pipe_file(at, content)


# -- in line ---------------------------------------------------------------------------------


def test_what_one_machine_made_another_one_fetches(homes: tuple[Home, Home]) -> None:
    one, two = homes
    made = one.make(a_stage())
    found = two.store.make(a_stage(), never, {})
    assert (made.reused, found.reused) == (False, True)
    assert found.model_copy(update={"path": made.path, "reused": False}) == made
    assert two.text(a_stage()) == "weights"
    assert (two.store.folder(a_stage()) / "files" / ".hidden").read_text() == "h"
    assert sorted(objects(one, a_stage())) == [
        "000001.json", f"{made.digest}/.hidden", f"{made.digest}/sub/a b#1.txt", "used",
    ]  # fmt: skip
    # Found here and there: nothing travels.
    two.told.clear()
    assert two.store.find(a_stage()).digest == made.digest
    assert two.told == []
    assert not list((two.store.root / ".incoming").iterdir())


def test_a_look_at_the_plan_fetches_nothing(homes: tuple[Home, Home]) -> None:
    one, two = homes
    assert "missing" in str(two.store.peek(a_stage()))
    assert not two.store.is_there(a_stage())
    digest = one.make(a_stage()).digest
    assert two.store.peek(a_stage()) is None
    assert two.store.is_there(a_stage())
    assert two.store.recorded_digest(a_stage()) == digest
    assert not two.store.folder(a_stage()).exists()


def test_what_was_made_before_there_was_a_shared_store_is_uploaded_when_it_is_used(
    homes: tuple[Home, Home],
) -> None:
    one, two = homes
    super(SharedStore, one.store)._produce(a_stage(), writing("old"), {})
    with pytest.raises(Absent):
        two.store.find(a_stage())
    one.store.find(a_stage())
    assert two.store.find(a_stage()).summary == {"said": "old"}


def test_one_content_for_a_key_that_two_machines_measured(homes: tuple[Home, Home]) -> None:
    one, two = homes
    super(SharedStore, two.store)._produce(a_stage(), writing("measured on two"), {})
    first = one.make(a_stage(), "measured on one")
    found = two.store.find(a_stage())
    assert found.digest == first.digest
    assert two.text(a_stage()) == "measured on one"
    (aside,) = (two.store.root / ".set-aside").iterdir()
    assert (aside / "files" / "sub" / "a b#1.txt").read_text() == "measured on two"


def test_the_same_content_made_twice_travels_once(homes: tuple[Home, Home]) -> None:
    one, two = homes
    super(SharedStore, two.store)._produce(a_stage(), writing("weights"), {"host": "two"})
    first = one.make(a_stage())
    assert two.store.find(a_stage()).made_at == first.made_at
    assert two.told == []


def test_an_old_entry_is_made_anew_for_all(homes: tuple[Home, Home]) -> None:
    one, two = homes
    old = one.make(a_stage(), "old")
    two.store.find(a_stage())

    def young(ref: ArtifactRef) -> bool:
        return ref.made_at - old.made_at > timedelta(0)

    new = two.make(a_stage(), "new", fresh=young)
    assert not new.reused
    again = one.store.make(a_stage(), never, {}, fresh=young)
    assert again.digest == new.digest
    assert one.text(a_stage()) == "new"
    assert {"000001.json", "000002.json"} <= set(objects(one, a_stage()))


def test_a_child_of_another_content_of_its_parent_is_made_anew(homes: tuple[Home, Home]) -> None:
    one, two = homes
    parent = a_stage("data")
    child = Stage(name="lora", version=1, parents={"data": parent})
    super(SharedStore, two.store)._produce(parent, writing("two"), {})
    super(SharedStore, two.store)._produce(child, writing("of two"), {})
    one.make(parent, "one")
    two.store.find(parent)
    with pytest.raises(Absent, match="parent data has changed"):
        two.store.find(child)
    two.make(child, "of one")
    assert one.store.find(child).summary == {"said": "of one"}


def test_weights_that_are_not_here_are_fetched_before_they_are_served(
    url: str, homes: tuple[Home, Home], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = homes[0].make(a_stage())
    gated = Part(
        stage="lora", key=made.key, below="sub", digest=digest_of_folder(made.path / "sub")
    )
    bundle = Bundle(name="one", target=gated, engine_version="0")
    monkeypatch.setenv("PILOTAGE_STORE_URL", url)
    settings.cache_clear()
    assert not gated.path.exists()
    weights_as_gated(bundle, "model@champion")
    assert (gated.path / "a b#1.txt").read_text() == "weights"
    assert gated.path.is_relative_to(settings().store_dir)
    # Content that was not gated is not taken for it.
    other = gated.model_copy(update={"digest": "0" * 64})
    shutil.rmtree(settings().store_dir)
    shelf = open_store()
    assert isinstance(shelf, SharedStore)
    assert not shelf.fetch_part(other.stage, other.key, other.below, other.digest)
    assert not other.path.exists()


# -- damage ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("b#1.txt", b"weighty", "differs from its manifest"),
        ("b#1.txt", None, "is missing"),
        ("000001.json", b'{"schema_version": 1, "stage"', "missing"),
    ],
    ids=["flipped", "gone", "cut"],
)
def test_a_damaged_entry_is_told_and_made_anew_for_all(
    homes: tuple[Home, Home], name: str, content: bytes | None, reason: str
) -> None:
    one, two = homes
    one.make(a_stage())
    damage(one, a_stage(), name, content)
    with pytest.raises(Absent) as absent:
        two.store.find(a_stage())
    assert reason in f"{two.told} {absent.value}"
    assert not two.store.folder(a_stage()).exists()
    two.make(a_stage())
    shutil.rmtree(one.store.root)
    assert one.store.make(a_stage(), never, {}).reused
    assert one.text(a_stage()) == "weights"


@pytest.mark.parametrize("name", ["../../../out", "/out", "a\0b", "", ".", "./a", "a//b", "sub"])
def test_a_manifest_whose_names_cannot_be_files_of_its_folder_is_none(
    homes: tuple[Home, Home], name: str
) -> None:
    one, two = homes
    one.make(a_stage())
    document = json.loads(objects(one, a_stage())["000001.json"])
    document["files"][name] = document["files"].pop(".hidden")
    listed = {name: file["sha256"] for name, file in document["files"].items()}
    document["digest"] = digest_of_listing(listed)
    damage(one, a_stage(), "000001.json", json.dumps(document).encode())
    with pytest.raises(Absent, match="missing"):
        two.store.find(a_stage())


def test_a_manifest_whose_digest_is_not_that_of_its_files_is_none(
    homes: tuple[Home, Home],
) -> None:
    one, two = homes
    one.make(a_stage())
    document = json.loads(objects(one, a_stage())["000001.json"])
    damage(one, a_stage(), "000001.json", json.dumps({**document, "digest": "0" * 64}).encode())
    with pytest.raises(Absent, match="missing"):
        two.store.find(a_stage())


# -- several writers, kills, outages ---------------------------------------------------------


def test_two_writers_at_once_end_with_one_entry(tmp_path: Path, url: str) -> None:
    spawn = multiprocessing.get_context("spawn")
    barrier, results = spawn.Barrier(2), spawn.Queue()
    writers = [
        spawn.Process(
            target=write_at_once, args=(tmp_path / str(n), url, n, barrier, results), daemon=True
        )
        for n in range(2)
    ]
    for writer in writers:
        writer.start()
    ends = {results.get(timeout=120) for _ in writers}
    for writer in writers:
        writer.join(60)
        assert writer.exitcode == 0
    ((_, number, content, length),) = ends
    assert (content, length) == (str(number), 100_000)
    home = Home(tmp_path / "another", url)
    assert home.store.find(a_stage()).summary == {"number": number}
    assert [name for name in objects(home, a_stage()) if name.endswith(".json")] == ["000001.json"]


def test_an_upload_that_was_killed_is_no_entry_and_is_made_up_for(
    tmp_path: Path, url: str, homes: tuple[Home, Home]
) -> None:
    one, two = homes
    spawn = multiprocessing.get_context("spawn")
    writer = spawn.Process(target=upload_many, args=(one.store.root, url), daemon=True)
    writer.start()
    at = f"{one.store.remote._root}/lora/{a_stage().key}"
    for _ in range(6000):
        if one.store.remote._fs.find(at):
            break
        time.sleep(0.01)
    assert writer.pid is not None
    os.kill(writer.pid, signal.SIGKILL)
    writer.join(60)
    there = objects(one, a_stage())
    assert writer.exitcode == -signal.SIGKILL
    assert 0 < len(there) < FILES
    assert "000001.json" not in there
    with pytest.raises(Absent, match="missing"):
        two.store.find(a_stage())
    # Nothing was lost here: the next run finds the entry and uploads it.
    assert one.store.make(a_stage(), never, {}).reused
    assert two.store.make(a_stage(), never, {}).reused
    assert len(list((two.store.folder(a_stage()) / "files").iterdir())) == FILES
    assert not list((one.store.root / ".unshared").iterdir())


def test_a_shared_folder_that_is_away_loses_nothing(tmp_path: Path) -> None:
    folder, away = tmp_path / "shared", tmp_path / "away"
    folder.mkdir()
    one = Home(tmp_path / "one", f"file://{folder}", patience=0.5)

    def produce(files: Path) -> dict[str, Any]:
        folder.rename(away)
        return writing("made before it went away")(files)

    with pytest.raises(InfrastructureError, match=r"cannot list.*is it mounted"):
        one.store.make(a_stage(), produce, {})
    assert not folder.exists()
    with pytest.raises(InfrastructureError, match=f"{folder}: cannot list, tried for 0 s"):
        one.store.find(a_stage())
    away.rename(folder)
    assert one.store.make(a_stage(), never, {}).reused
    assert Home(tmp_path / "two", f"file://{folder}").store.find(a_stage()).reused


def test_an_object_store_that_is_away_is_waited_for_and_told_without_secrets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Not above: pytest wants to be the first who imports what it takes fixtures from.
    from tests import s3

    port = s3.free_port()
    s3.use(monkeypatch, f"http://127.0.0.1:{port}")
    one = Home(tmp_path / "one", "s3://nightly/store", patience=0.5)
    with pytest.raises(InfrastructureError, match="s3://nightly/store: cannot list") as told:
        one.make(a_stage())
    assert s3.SECRET not in str(told.value)
    ready, done = threading.Event(), threading.Event()

    def come_back() -> None:
        time.sleep(1.0)
        with s3.server(port, "nightly"):
            ready.set()
            done.wait(120)

    thread = threading.Thread(target=come_back)
    thread.start()
    try:
        patient = Home(tmp_path / "one", "s3://nightly/store", patience=60.0)
        super(SharedStore, patient.store)._produce(a_stage(), writing("kept"), {})
        patient.store.find(a_stage())
        assert ready.is_set()
        two = Home(tmp_path / "two", "s3://nightly/store")
        assert two.store.find(a_stage()).summary == {"said": "kept"}
    finally:
        done.set()
        thread.join(60)


# -- a person's mistakes ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("url", "what"),
    [
        ("s3://key:hunter2@bucket/prefix", "holds a password"),
        ("s3://bucket/prefix?sig=hunter2", "holds a password or a query"),
        ("/mnt/shared", "is no URL"),
        ("s3://", "is no URL"),
        ("simplecache::s3://bucket", "is no URL"),
        ("file://shared/pilotage", "names no absolute folder"),
        ("s4://bucket", "Protocol not known"),
        ("s3://[bucket", "is no URL"),
        ("local://shared/pilotage", "names no absolute folder"),
        ("memory://shared", "is gone with the process"),
    ],
)
def test_a_url_that_cannot_be_one_is_told_without_its_secret(url: str, what: str) -> None:
    with pytest.raises(UserError, match=what) as told:
        RemoteStore(url)
    assert "PILOTAGE_STORE_URL" in str(told.value)
    assert "hunter2" not in str(told.value)


def test_a_bucket_that_is_not_there_and_keys_that_are_not_there(
    s3_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tests import s3

    with pytest.raises(UserError, match="create the bucket"):
        Home(tmp_path / "one", "s3://no-such-bucket/store").make(a_stage())
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    s3.forget_clients()
    with pytest.raises(UserError, match=r"cannot list.*credentials"):
        Home(tmp_path / "two", s3_url).make(a_stage())


def test_a_probe_says_whether_it_can_be_written_and_leaves_nothing(url: str) -> None:
    remote = RemoteStore(url, patience=1.0)
    assert remote.probe() == ""
    assert remote.objects() == {}


def test_a_store_that_writes_over_is_told(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    remote = RemoteStore(url, patience=1.0)
    monkeypatch.setattr(remote, "_create", remote._write)
    assert "If-None-Match" in remote.probe()
