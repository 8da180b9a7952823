"""What an engine shows while load is sent, and that nothing it does stops the load."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import httpx
import pytest

from registry.errors import InfrastructureError
from registry.evidence import TIMELINE_COLUMNS
from tasks.engines.engine_watch import COUNTERS, EngineWatch, Seen, reset_prefix_cache, shown_on
from tests.mock_server import MockServer, serving

LIVE = b"""# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="m"} 3.0
vllm:num_requests_waiting{engine="0",model_name="m"} 5.0
vllm:num_requests_waiting_by_reason{engine="0",model_name="m",reason="capacity"} 5.0
vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.25
vllm:prefix_cache_queries_total{engine="0",model_name="m"} 287.0
vllm:prefix_cache_queries_created{engine="0",model_name="m"} 1.7960100788249106e+09
vllm:prefix_cache_hits_total{engine="0",model_name="m"} 7.0
vllm:spec_decode_num_drafts_total{engine="0",model_name="m"} 10.0
vllm:spec_decode_num_draft_tokens_total{engine="0",model_name="m"} 20.0
vllm:spec_decode_num_accepted_tokens_total{engine="0",model_name="m"} 12.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="m",position="0"} 8.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="m",position="1"} 4.0
vllm:num_preemptions_total{engine="0",model_name="m"} 2.0
process_start_time_seconds 1.79601006125e+09
"""
"""Lines of a live page of vLLM 0.32.0 with a draft."""

Answer = Callable[["Pretend", str], "bytes | int"]


class Pretend:
    """A server whose pages a test decides about: bytes are a page, a number is a status."""

    def __init__(self, answer: Answer) -> None:
        self.answer = answer
        self.asked: list[str] = []
        self.over = threading.Event()


@contextmanager
def pretending(answer: Answer) -> Iterator[tuple[Pretend, str]]:
    pretend = Pretend(answer)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            pretend.asked.append(self.path)
            found = pretend.answer(pretend, self.path)
            self.send_response(found if isinstance(found, int) else 200)
            body = b"" if isinstance(found, int) else found
            self.send_header("Content-Length", str(len(body)))
            # The one who asked may have gone: that is what some tests are about.
            with suppress(ConnectionError):
                self.end_headers()
                self.wfile.write(body)

        do_POST = do_GET

        def log_message(self, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, args=[0.02], daemon=True).start()
    try:
        yield pretend, f"http://127.0.0.1:{server.server_port}"
    finally:
        pretend.over.set()
        server.shutdown()
        server.server_close()


def until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def page(preemptions: float = 0, queries: float = 0, started: float = 1.0) -> bytes:
    return (
        f'vllm:num_preemptions_total{{engine="0"}} {preemptions}\n'
        f'vllm:prefix_cache_queries_total{{engine="0"}} {queries}\n'
        f'vllm:num_requests_running{{engine="0"}} 1.0\n'
        f"process_start_time_seconds {started}\n"
    ).encode()


# -- pages -----------------------------------------------------------------------------------


def test_a_live_page_is_read() -> None:
    shown = shown_on(LIVE)
    assert shown is not None
    assert [shown.counters[name] for name in COUNTERS] == [287, 7, 10, 20, 12, 2]
    per_position = "vllm:spec_decode_num_accepted_tokens_per_pos_total"
    assert shown.counters[f'{per_position}{{position="0"}}'] == 8
    assert shown.counters[f'{per_position}{{position="1"}}'] == 4
    assert shown.gauges["vllm:num_requests_waiting"] == 5
    assert shown.gauges["vllm:kv_cache_usage_perc"] == 0.25


def test_engines_are_summed_and_of_their_caches_the_fullest_counts() -> None:
    shown = shown_on(LIVE + LIVE.replace(b'engine="0"', b'engine="1"').replace(b" 0.25", b" 0.75"))
    assert shown is not None
    assert shown.counters["vllm:prefix_cache_queries_total"] == 574
    assert shown.gauges["vllm:num_requests_running"] == 6
    assert shown.gauges["vllm:kv_cache_usage_perc"] == 0.75
    assert shown.gauges["process_start_time_seconds"] == 1.79601006125e09


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"<!doctype html><html>vllm:num_requests_running 3</html>",
        b"process_start_time_seconds 1.0\npython_info 1.0\n",
        b"sglang:num_running_reqs 1.0\n",
        b"vllm:num_requests_running\nvllm:num_requests_waiting{} \nvllm:kv_cache_usage_perc NaN\n",
        b"\xff\xfe\x00",
    ],
)
def test_what_is_no_page_of_an_engine(text: bytes) -> None:
    assert shown_on(text) is None


def test_odd_labels_and_times_behind_the_number() -> None:
    shown = shown_on(b'vllm:num_requests_running{model_name="a} 9{b"} 2 1700000000000\n')
    assert shown is not None
    assert shown.gauges == {"vllm:num_requests_running": 2}


# -- a step ----------------------------------------------------------------------------------


def test_growth_and_samples_of_a_mock_under_load() -> None:
    # Long enough that all three are there at once on a machine with other work.
    mock = MockServer(service=0.6, exponential=False)
    body = {"messages": [{"role": "user", "content": "a b c"}], "max_tokens": 4}
    with serving(mock) as url:
        watch = EngineWatch(f"{url}/v1/", every=0.05)
        for _ in range(2):
            with watch.step() as seen:
                senders = [
                    threading.Thread(
                        target=httpx.post,
                        args=[f"{url}/v1/chat/completions"],
                        kwargs={"json": body, "timeout": 30, "trust_env": False},
                    )
                    for _ in range(3)
                ]
                for sender in senders:
                    sender.start()
                for sender in senders:
                    sender.join()
            assert seen.growth["vllm:prefix_cache_queries_total"] == 30
        assert seen.growth["vllm:prefix_cache_hits_total"] == 30
    columns = {column for column in TIMELINE_COLUMNS if column not in ("step", "rate")}
    assert all(row.keys() == columns for row in seen.samples)
    times = [row["at_s"] for row in seen.samples]
    assert times == sorted(times)
    assert times[0] == 0
    summary = seen.summary()
    assert summary["running_max"] == 1
    assert summary["waiting_max"] == 2
    # The mock has no cache, counts no preemptions, and no process ids were given.
    for name in ("kv_cache_usage_max", "preemptions", "memory_peak_bytes", "gpu_memory_peak_bytes"):
        assert summary[name] is None


def test_single_metrics_are_asked_for_where_the_engine_can() -> None:
    """Once the whole page, then only what is wanted: it takes vLLM a twentieth of the time."""
    with pretending(lambda pretend, path: page()) as (pretend, url):
        watch = EngineWatch(url, every=0.02)
        with watch.step():
            until(lambda: len(pretend.asked) >= 4)
        with watch.step():
            pass
    whole = [path for path in pretend.asked if path == "/metrics"]
    assert len(whole) == 2, "before each step"
    assert all(
        path.startswith("/metrics/?name[]=") and "name[]=vllm:num_requests_running" in path
        for path in pretend.asked
        if path != "/metrics"
    )


@pytest.mark.parametrize("filtered", [307, 404, b"", b"vllm:num_requests_running 1.0\n"])
def test_the_whole_page_where_it_cannot(filtered: bytes | int) -> None:
    def answer(pretend: Pretend, path: str) -> bytes | int:
        return page() if path == "/metrics" else filtered

    with pretending(answer) as (pretend, url):
        with EngineWatch(url, every=0.02).step() as seen:
            until(lambda: pretend.asked.count("/metrics") >= 4)
        assert len([path for path in pretend.asked if path != "/metrics"]) == 1
    assert seen.summary()["running_max"] == 1


def test_preemptions_count_from_the_begin_of_the_step() -> None:
    with pretending(lambda one, path: page(preemptions=40 + len(one.asked))) as (pretend, url):
        watch = EngineWatch(url, every=0.02)
        with watch.step() as seen:
            until(lambda: len(pretend.asked) >= 3)
    counted = [row["preemptions"] for row in seen.samples]
    assert counted[0] == 0
    assert counted == sorted(counted)
    assert seen.summary()["preemptions"] == counted[-1] > 0


# -- engines that show nothing ---------------------------------------------------------------


@pytest.mark.parametrize("found", [404, 401, 500, b"<html>not here</html>"])
def test_without_metrics_it_is_asked_once_per_step(found: bytes | int) -> None:
    with pretending(lambda pretend, path: found) as (pretend, url):
        watch = EngineWatch(url, every=0.01)
        for number in (1, 2):
            with watch.step() as seen:
                time.sleep(0.1)
            assert len(pretend.asked) == number
            assert (seen.growth, seen.samples) == ({}, [])
            assert set(seen.summary().values()) == {None}


def test_nobody_there_is_no_error() -> None:
    with pretending(lambda pretend, path: 404) as (_, url):
        pass
    with EngineWatch(url).step() as seen:
        pass
    assert seen.growth == {}


def test_metrics_that_hang_cost_a_moment_and_are_not_asked_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("tasks.engines.engine_watch.PATIENCE", 0.2)

    def answer(pretend: Pretend, path: str) -> bytes | int:
        pretend.over.wait(60)
        return 500

    with pretending(answer) as (pretend, url):
        with EngineWatch(url, every=0.01).step() as seen:
            time.sleep(0.1)
        assert len(pretend.asked) == 1
    assert (seen.growth, seen.samples) == ({}, [])


def test_metrics_that_hang_under_load_are_left_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """The step does not wait for a sample; what is shown afterwards still counts."""
    monkeypatch.setattr("tasks.engines.engine_watch.MOMENT", 0.05)
    hanging = threading.Event()

    def hang(pretend: Pretend, path: str) -> bytes | int:
        hanging.set()
        pretend.over.wait(60)
        return 500

    with pretending(lambda pretend, path: page(queries=100)) as (pretend, url):
        with EngineWatch(url, every=0.01).step() as seen:
            pretend.answer = hang
            until(hanging.is_set)
            pretend.answer = lambda one, path: page(queries=130)
        assert any(one.name == "engine-watch" for one in threading.enumerate()), "still waiting"
    assert seen.growth["vllm:prefix_cache_queries_total"] == 30
    assert seen.samples[-1]["running"] == 1


def test_a_failed_sample_is_a_gap_only() -> None:
    with pretending(lambda pretend, path: page()) as (pretend, url):
        watch = EngineWatch(url, every=0.01, pids=lambda: [os.getpid()])
        with watch.step() as seen:
            pretend.answer = lambda one, path: 500
            asked = len(pretend.asked)
            until(lambda: len(pretend.asked) >= asked + 4)
            pretend.answer = lambda one, path: page(queries=6)
    assert seen.growth["vllm:prefix_cache_queries_total"] == 6
    gaps = [row for row in seen.samples if row["running"] is None]
    assert gaps
    assert all(row["memory_bytes"] > 0 for row in gaps)


# -- engines that begin anew -----------------------------------------------------------------


@pytest.mark.parametrize("after", [page(queries=3, started=2), page(queries=90, started=2), page()])
def test_a_restart_is_told(after: bytes) -> None:
    """Also where the counters have grown past what they were: the process began later."""
    with (
        pretending(lambda pretend, path: page(queries=50)) as (pretend, url),
        pytest.raises(InfrastructureError, match="restarted while load was sent"),
        EngineWatch(url, every=60).step(),
    ):
        pretend.answer = lambda one, path: after


def test_a_restart_between_samples_is_told() -> None:
    with (
        pretending(lambda pretend, path: page(queries=50)) as (pretend, url),
        pytest.raises(InfrastructureError, match="restarted"),
        EngineWatch(url, every=0.01).step(),
    ):
        pretend.answer = lambda one, path: page(queries=1)
        asked = len(pretend.asked)
        until(lambda: len(pretend.asked) >= asked + 4)
        pretend.answer = lambda one, path: page(queries=60)


def test_what_the_load_raises_is_not_covered_up() -> None:
    before = set(threading.enumerate())
    with (
        pretending(lambda pretend, path: page(queries=50)) as (pretend, url),
        pytest.raises(KeyboardInterrupt),
        EngineWatch(url).step(),
    ):
        pretend.answer = lambda one, path: page(queries=1)
        raise KeyboardInterrupt
    until(lambda: set(threading.enumerate()) <= before)


# -- memory ----------------------------------------------------------------------------------


def test_memory_of_processes_and_their_children_without_metrics() -> None:
    grown = "import subprocess, sys; b = bytearray(90_000_000); print(flush=True); input()"
    child = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {grown!r}])"
    with (
        pretending(lambda pretend, path: 404) as (_, url),
        subprocess.Popen(
            [sys.executable, "-c", child], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        ) as process,
    ):
        assert process.stdout is not None
        process.stdout.readline()
        with EngineWatch(url, every=0.02, pids=lambda: [process.pid]).step() as seen:
            time.sleep(0.1)
        process.communicate(b"\n")
    peak = seen.summary()["memory_peak_bytes"]
    assert peak is not None
    assert 90_000_000 < peak < 400_000_000
    assert seen.growth == {}


def test_processes_that_are_gone_are_no_error() -> None:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    with (
        pretending(lambda pretend, path: page()) as (_, url),
        EngineWatch(url, pids=lambda: [process.pid]).step() as seen,
    ):
        pass
    assert seen.summary()["memory_peak_bytes"] is None


def test_an_empty_step_has_all_names() -> None:
    assert set(Seen().summary()) == {
        *("running_max", "waiting_max", "kv_cache_usage_max"),
        *("preemptions", "memory_peak_bytes", "gpu_memory_peak_bytes"),
    }


# -- the prefix cache ------------------------------------------------------------------------


def test_the_prefix_cache_is_emptied_where_the_engine_can() -> None:
    answers: list[bytes | int] = [b'{"success": false}', b'{"success": true}']
    with pretending(lambda pretend, path: answers[len(pretend.asked) - 1]) as (pretend, url):
        assert reset_prefix_cache(f"{url}/v1", "key")
        assert pretend.asked == ["/reset_prefix_cache"] * 2, "blocks were held the first time"


@pytest.mark.parametrize("found", [404, 405, 401, b'{"success": false}', b"[]", b"<html>"])
def test_an_engine_that_empties_nothing(found: bytes | int) -> None:
    with pretending(lambda pretend, path: found) as (_, url):
        assert not reset_prefix_cache(url)
    assert not reset_prefix_cache(url), "nobody there"
