"""Ports that somebody else has, and a clock that goes back."""

from __future__ import annotations

import json
import os
import shutil
import socket
from contextlib import ExitStack
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from tests.faults.audit import Holdings, check_not_moved, check_whole, holdings
from tests.faults.conftest import Tell
from tests.faults.world import World

pytestmark = [pytest.mark.fault, pytest.mark.alone, pytest.mark.timeout(1800)]

FAKETIME = next(
    (str(path) for path in Path("/usr/lib").glob("*/faketime/libfaketime.so.1")),
    os.environ.get("PILOTAGE_FAULTS_FAKETIME", ""),
)


def backwards(days: float) -> dict[str, str]:
    """Environment in which the tool's own processes see an earlier date (libfaketime)."""
    if not FAKETIME:
        pytest.skip("libfaketime is not installed (Debian: faketime)")
    return {
        "LD_PRELOAD": FAKETIME,
        "FAKETIME": f"-{days:g}d",
        # Only the date goes back: waits and limits run by the monotonic clock.
        "FAKETIME_DONT_FAKE_MONOTONIC": "1",
        "FAKETIME_SKIP_CMDS": "",
    }


def test_clock_goes_back_by_two_days(world: World, finished: Holdings, tell: Tell) -> None:
    """The clock goes back by two days between two nights: evidence is from the future"""
    run = world.start(env=backwards(2))
    status = run.end()
    assert "Traceback" not in run.text, run.text[-4000:]
    assert status == 0, run.text[-4000:]
    # What was made in the future is not too old, and is not promoted anew by it.
    assert run.made == []
    again = world.release()
    assert again.made == []
    check_whole(world, finished)
    tell(
        caused="libfaketime: the release's processes see the day before yesterday",
        stage="whole release", seen="everything reused, nothing promoted anew", status=status,
        then="with the right clock: nothing made, champion as before",
    )  # fmt: skip


def test_evidence_from_the_future_is_not_promoted(
    world: World, finished: Holdings, tell: Tell
) -> None:
    """A promotion is asked for while the clock stands before its evidence"""
    other = next(
        one["bundle"] for one in world.release().document["candidates"]
        if one["name"] == "w8a8_int8-eagle3"
    )  # fmt: skip
    run = world.command("promote", other[:12], env=backwards(2))
    status = run.end(600)
    assert status == 10, run.text[-3000:]
    assert "is from the future" in run.text, run.text[-3000:]
    check_not_moved(world, finished)
    said = next(line for line in run.text.splitlines() if "from the future" in line)
    tell(
        caused="libfaketime, two days back; `pilotage promote`", stage="promote", seen=said,
        status=status, then="alias and ledger as before",
    )  # fmt: skip


def test_ports_are_taken(world: World, finished: Holdings, tell: Tell) -> None:
    """Ports 4200, 5000, 8000 and 8001 belong to somebody else"""
    world.forget("serving", "bf16")
    with ExitStack() as taken:
        for port in (4200, 5000, 8000, 8001):
            one = taken.enter_context(socket.socket())
            one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                one.bind(("127.0.0.1", port))
                one.listen()
            except OSError:
                continue  # somebody has it already, which is as good
        run = world.release()
    assert run.made == ["serving bf16"]
    check_whole(world, finished, releases=holdings(world).releases)
    tell(
        caused="a listening socket on each", stage="serving, Prefect's server, MLflow",
        seen="every server took a free port of its own", status=0, then="-",
    )  # fmt: skip


def test_a_date_of_tomorrow_in_a_manifest(world: World, finished: Holdings, tell: Tell) -> None:
    """A store entry that says it was made tomorrow (its machine's clock was ahead)"""
    entry = world.entry("latency", "bf16")
    manifest = entry / "manifest.json"
    content = json.loads(manifest.read_text())
    content["made_at"] = (datetime.now(UTC) + timedelta(days=1)).isoformat()
    manifest.write_text(json.dumps(content))
    run = world.release()
    assert run.document["verdict"] == "PASS"
    assert run.document["champion"]["version"] == 1
    check_not_moved(world, finished)
    tell(
        caused="`made_at` of the latency entry set to tomorrow", stage="latency bf16",
        seen=f"made anew: {', '.join(run.made) or 'nothing'}; PASS", status=0, then="-",
    )  # fmt: skip
    shutil.rmtree(entry)
