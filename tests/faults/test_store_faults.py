"""The store, damaged: bits flipped, files gone, manifests cut short, folders of dead writers."""

from __future__ import annotations

import os
import re
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.faults.audit import Holdings, check_not_moved, check_whole, holdings
from tests.faults.conftest import Tell
from tests.faults.world import World

pytestmark = [pytest.mark.fault, pytest.mark.alone, pytest.mark.timeout(1800)]


def flip(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


DAMAGE: dict[str, tuple[str, str, str, Callable[[Path], None]]] = {
    "a flipped bit": ("accuracy", "bf16", "digest differs (items.parquet was changed)",
                      lambda entry: flip(entry / "files" / "items.parquet")),
    "a missing file": ("accuracy", "teacher", "files differ from the manifest (items.parquet)",
                       lambda entry: (entry / "files" / "items.parquet").unlink()),
    "a file too many": ("accuracy", "bf16", "files differ from the manifest (more.txt)",
                        lambda entry: (entry / "files" / "more.txt").write_text("more")),
    "a manifest cut short": ("accuracy", "w8a8_int8-eagle3", "manifest cannot be read",
                             lambda entry: cut(entry / "manifest.json")),
    "no manifest": ("serving", "bf16", "no manifest",
                    lambda entry: (entry / "manifest.json").unlink()),
    "an empty folder": ("latency", "bf16", "empty",
                        lambda entry: (shutil.rmtree(entry), entry.mkdir(), None)[-1]),
}  # fmt: skip


@pytest.mark.parametrize("what", DAMAGE)
def test_damaged_entry(world: World, finished: Holdings, tell: Tell, what: str) -> None:
    """A store entry that is not what its manifest says"""
    stage, label, reason, damage = DAMAGE[what]
    entry = world.entry(stage, label)
    damage(entry)
    run = world.release()
    assert f"store/{stage}/{entry.name[:12]}: {reason}" in run.text
    title = f"{stage} {label}"
    assert run.made == [title]
    # Kept for a person to look at, once.
    aside = list((world.store / ".set-aside").glob("*"))
    assert [path.name.rpartition("-")[0] for path in aside] == [f"{stage}-{entry.name[:12]}"]
    again = world.release()
    assert again.made == []
    check_whole(world, finished, releases=again_releases(world, finished))
    tell(
        fault=f"store entry with {what}", caused="changed on the disk", stage=title,
        seen=f"{reason}; set aside", status=0, then="that run made it anew, the next made nothing",
    )  # fmt: skip


def again_releases(world: World, finished: Holdings) -> int:
    """A stage that was measured anew may make another release of it, one and no more."""
    found = holdings(world).releases
    assert found in (finished.releases, finished.releases + 1)
    return found


def test_stale_folders_of_a_crashed_writer(world: World, finished: Holdings, tell: Tell) -> None:
    """Temporary folders of writers that died: a day old, of this minute, withdrawn"""
    incoming = world.store / ".incoming"
    names = ("distill-0123456789ab-dead0001", "distill-0123456789ab-new00002", "out-draft-0123-3")
    for name in names:
        (incoming / name / "files").mkdir(parents=True)
        (incoming / name / "files" / "model.safetensors").write_bytes(b"half")
    old = time.time() - 25 * 3600
    os.utime(incoming / names[0], (old, old))
    note = world.home / "run" / "0123.json"
    note.write_text('{"owner": {"pid": 1, "st')
    run = world.release()
    assert run.made == []
    assert f"removed {names[0]}, left by a writer that crashed" in run.text
    # The writer of the new one may live: it stays for a day.
    assert [path.name for path in incoming.iterdir()] == [names[1]]
    assert not note.exists()
    os.utime(incoming / names[1], (old, old))
    world.release()
    check_whole(world, finished)
    tell(
        caused="folders below store/.incoming, one a day old; a run note cut short",
        stage="store", seen="the old one and the withdrawn one removed, the new one left alone",
        status=0, then="the next day's run removed the other",
    )  # fmt: skip


@pytest.mark.parametrize("what", ["flipped", "missing"])
def test_weights_in_mlflow(world: World, finished: Holdings, tell: Tell, what: str) -> None:
    """Weights in MLflow's artifacts that are not those that were gated"""
    (weights,) = world.home.glob("mlartifacts/tiny-assistant/models/*/artifacts/target/model.safe*")
    # This machine's own copy is lost too: it would be served in their place.
    parent = world.entry("distill")
    assert (parent / "files").is_dir()
    shutil.rmtree(parent)
    if what == "flipped":
        flip(weights)
    else:
        weights.unlink()
    run = world.command("serve", "tiny-assistant@champion", "--print")
    status = run.end(300)
    assert status == 2, run.text[-3000:]
    assert "Traceback" not in run.text
    assert re.search("is not what was gated|is missing, and MLflow has no", run.text), run.text
    assert not list((world.home / "downloads").glob("*")), "half a download is left"
    check_not_moved(world, finished)
    said = run.text.strip().splitlines()[-2:]
    tell(
        fault=f"weights in MLflow's artifacts {what}, and this machine's store lost",
        caused="changed on the disk", stage="serve", seen=" ".join(said)[:300], status=status,
        then="nothing is served; a person is told to release it again",
    )  # fmt: skip
