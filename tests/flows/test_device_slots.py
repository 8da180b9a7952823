"""A held device is a slot in Prefect, which no run waits for or dies of. A real server."""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from uuid import UUID

import pytest
from prefect import flow
from prefect.client.orchestration import get_client
from prefect.exceptions import ObjectNotFound
from prefect.settings import PREFECT_API_URL, temporary_settings

from registry.errors import InfrastructureError
from tasks import device_slots
from tasks.devices import exclusive, is_held, limit_name, lock_file
from tasks.engines.subprocesses import wait_until
from tasks.progress import LOG

pytestmark = pytest.mark.usefixtures("prefect")


@pytest.fixture(autouse=True)
def _cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")


def taken() -> int:
    with get_client(sync_client=True) as client:
        return client.read_global_concurrency_limit_by_name(limit_name("cpu")).active_slots


def change(**values: Any) -> None:
    from prefect.client.schemas.actions import GlobalConcurrencyLimitUpdate

    with get_client(sync_client=True) as client:
        update = GlobalConcurrencyLimitUpdate(**values)
        client.update_global_concurrency_limit(limit_name("cpu"), update)


@flow
def heavy() -> int:
    with exclusive("latency"), exclusive("again"):
        # The work does not wait for the slot.
        wait_until(lambda: bool(json.loads(lock_file("cpu").read_text())["lease"]), 30, every=0.02)
        return taken()


def test_a_flow_takes_the_slot_and_a_limit_that_is_missing_is_made() -> None:
    # Outside of a flow run there is nobody to show it to.
    with exclusive("pilotage bench"), pytest.raises(ObjectNotFound):
        taken()
    assert heavy() == 1
    assert taken() == 0


def test_a_slot_that_a_killed_run_left_is_freed_at_once() -> None:
    heavy()
    change(active_slots=1)  # as after a restart of the server, which forgets leases
    assert heavy() == 1
    assert taken() == 0


def test_the_lease_of_a_killed_holder_is_given_back() -> None:
    """Else its end would take the slot of a later holder."""
    heavy()
    with get_client(sync_client=True) as client:
        names = [limit_name("cpu")]
        lease = client.increment_concurrency_slots_with_lease(names, 1, "concurrency", 60).json()
        lock_file("cpu").write_text(f'{{"pid": 1, "lease": "{lease["lease_id"]}"}}')
        assert heavy() == 1
        assert taken() == 0
        client.release_concurrency_slots_with_lease(UUID(lease["lease_id"]))
    assert taken() == 0


def test_a_person_may_close_a_device() -> None:
    heavy()
    change(limit=0)
    with pytest.raises(InfrastructureError, match="is set to no slot"):
        heavy()
    assert not is_held()
    change(limit=1)
    assert heavy() == 1


def test_a_lost_lease_is_taken_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_slots, "RENEW_EVERY", 0.2)
    heavy()

    @flow
    def long() -> bool:
        with exclusive("training"):
            wait_until(lambda: bool(json.loads(lock_file("cpu").read_text())["lease"]), 30)
            lease = UUID(json.loads(lock_file("cpu").read_text())["lease"])
            with get_client(sync_client=True) as client:
                client.release_concurrency_slots_with_lease(lease)
            return wait_until(lambda: taken() == 1, 30, every=0.1)

    assert long()
    assert taken() == 0


def test_a_server_that_is_away_stops_nothing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(device_slots, "AGAIN", 0.1)
    monkeypatch.setattr(LOG, "propagate", True)
    heavy()

    @flow
    def away() -> bool:
        with temporary_settings({PREFECT_API_URL: "http://127.0.0.1:9/api"}):
            context = exclusive("training")
            context.__enter__()
            held = is_held() and wait_until(lambda: "does not give the slot" in caplog.text, 30)
            context.__exit__(None, None, None)
        return held and not is_held()

    assert away()
    # By their time: the handlers of other tests of the process may see a line as well.
    said = {one.created for one in caplog.records if "does not give the slot" in one.message}
    assert len(said) == 1
    assert taken() == 0


class Login(BaseHTTPRequestHandler):
    """What stands before a server may answer in its place: 200, and a page for people."""

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b"<html>Please log in</html>")

    do_GET = do_POST

    def log_message(self, *arguments: Any) -> None:
        pass


def test_a_server_that_does_not_speak_as_one_stops_nothing() -> None:
    heavy()
    login = ThreadingHTTPServer(("127.0.0.1", 0), Login)
    threading.Thread(target=login.serve_forever, daemon=True).start()

    @flow
    def odd() -> bool:
        address = f"http://127.0.0.1:{login.server_address[1]}/api"
        with temporary_settings({PREFECT_API_URL: address}), exclusive("training"):
            return is_held()

    try:
        assert odd()
    finally:
        login.shutdown()
        login.server_close()
    assert not is_held()


def test_a_record_of_nobody_knows_whom_stops_nothing() -> None:
    heavy()
    lock_file("cpu").write_text('{"pid": 1, "lease": "no lease"}')
    assert heavy() == 1
    assert taken() == 0
