"""`pilotage bench` around the search: the URL, the first question, the tokenizer, the answer."""

from __future__ import annotations

import dataclasses
import json
import threading
from collections.abc import Iterator
from contextlib import nullcontext
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock

from flows.bench_rendering import bench_text
from registry.errors import InfrastructureError, UserError
from registry.evidence import LatencyEvidence, LoadPoint
from registry.outcome import Verdict
from tasks.bench_targets import Target, endpoint_base, opened, probe, url_target
from tasks.benchmarking import Benchmark, bench, decided, document, fixed_verdict, with_kept_rate
from tasks.engines.fixed_rates import judged
from tasks.engines.load_evidence import load_point
from tasks.engines.load_prompts import first_prompt, supply_of, word_tokenizer
from tasks.engines.load_run import Seen
from tests.unit.load_builders import evenly, profile


class Endpoint(ThreadingHTTPServer):
    """Answers every question with one status and text; keeps what was asked."""

    status: int
    text: str
    asked: list[tuple[str, str | None, dict[str, Any]]]

    @property
    def base(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class _Handler(BaseHTTPRequestHandler):
    server: Endpoint

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.asked.append((self.path, self.headers["Authorization"], body))
        content = self.server.text.encode()
        self.send_response(self.server.status)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def endpoint() -> Iterator[Endpoint]:
    server = Endpoint(("127.0.0.1", 0), _Handler)
    server.status, server.text, server.asked = 200, "", []
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


def events(*chunks: dict[str, Any]) -> str:
    return "".join(f"data: {json.dumps(chunk)}\n\n" for chunk in chunks) + "data: [DONE]\n\n"


WORD = {"choices": [{"index": 0, "delta": {"content": "hello"}}]}
USAGE = {"choices": [], "usage": {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}}


# -- the URL ---------------------------------------------------------------------------------


@pytest.mark.parametrize("end", ["", "/", "/v1", "/v1/"])
def test_urls_with_and_without_v1_are_the_same(end: str) -> None:
    assert endpoint_base(f"http://127.0.0.1:8000{end}") == "http://127.0.0.1:8000"
    assert endpoint_base(f"https://host/some/path{end}") == "https://host/some/path"


@pytest.mark.parametrize(
    "url", ["", "127.0.0.1:8000", "localhost:8000/v1", "ftp://host", "http://", "http://host:port"]
)
def test_what_is_no_http_url_is_a_users_error(url: str) -> None:
    with pytest.raises(UserError, match="--url"):
        endpoint_base(url)


# -- the first question ----------------------------------------------------------------------


def test_an_endpoint_that_counts_tokens_is_seen(endpoint: Endpoint) -> None:
    endpoint.text = events(WORD, USAGE)
    assert probe(endpoint.base, "m", "secret")
    ((path, key, body),) = endpoint.asked
    assert (path, key) == ("/v1/chat/completions", "Bearer secret")
    assert (body["model"], body["stream"]) == ("m", True)
    assert body["stream_options"] == {"include_usage": True}


@pytest.mark.parametrize(
    "text",
    [events(WORD), events(WORD | {"usage": None}), "data: {broken\n\n", "", ": ping\n\n", "[]"],
)
def test_an_endpoint_that_does_not_count_is_seen(endpoint: Endpoint, text: str) -> None:
    endpoint.text = text
    assert not probe(endpoint.base, "m", "")
    assert endpoint.asked[0][1] is None, "no key, no header"


@pytest.mark.parametrize("status", [400, 401, 403, 404, 422])
def test_a_wrong_name_or_key_is_a_users_error(endpoint: Endpoint, status: int) -> None:
    endpoint.status, endpoint.text = status, "no model `m` here"
    with pytest.raises(UserError, match=f"answers {status}: no model `m` here") as error:
        probe(endpoint.base, "m", "secret")
    assert "secret" not in str(error.value)


@pytest.mark.parametrize("status", [429, 500, 503])
def test_an_endpoint_that_refuses_at_times_is_measured(endpoint: Endpoint, status: int) -> None:
    endpoint.status = status
    assert probe(endpoint.base, "m", "")


def test_nobody_there_is_no_answer() -> None:
    with pytest.raises(InfrastructureError, match=r"http://127\.0\.0\.1:9 does not answer"):
        probe("http://127.0.0.1:9", "m", "")


def test_nothing_is_left_behind_where_nobody_answers(tmp_path: Path) -> None:
    nobody = url_target("http://127.0.0.1:9", "m", "", None)
    with pytest.raises(InfrastructureError):
        bench(nobody, "nobody", "mock_smoke", out=tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_mistake_is_found_before_anything_is_asked(endpoint: Endpoint) -> None:
    def asked(load: str, **changes: Any) -> None:
        bench(url_target(endpoint.base, "m", "", None), "here", load, **changes)

    with pytest.raises(UserError, match="has no `sla`"):
        asked("smoke_cpu")
    with pytest.raises(UserError, match="no_such_profile"):
        asked("no_such_profile")
    with pytest.raises(UserError, match="--generator wrk"):
        asked("mock_smoke", generator="wrk")
    with pytest.raises(UserError, match="no_such_machine"):
        asked("mock_smoke", hardware="no_such_machine")
    assert endpoint.asked == []


def test_a_key_in_the_url_is_refused_and_not_shown() -> None:
    with pytest.raises(UserError, match="holds a name or password") as error:
        endpoint_base("http://me:secret@here:80")
    assert "secret" not in str(error.value)
    with pytest.raises(UserError, match="no http URL"):
        endpoint_base("http://here:99999")


def test_one_measurement_in_a_folder_at_a_time(endpoint: Endpoint, tmp_path: Path) -> None:
    endpoint.text = events(WORD, USAGE)
    out = tmp_path / "out"
    with FileLock(tmp_path / ".out.lock"), pytest.raises(UserError, match="is running in it"):
        bench(url_target(endpoint.base, "m", "", None), "here", "mock_smoke", out=out)
    assert not out.exists()
    file = tmp_path / "file"
    file.write_text("")
    for wrong in (file, file / "below"):
        with pytest.raises(UserError, match="cannot be used"):
            bench(url_target(endpoint.base, "m", "", None), "here", "mock_smoke", out=wrong)


def test_prompts_of_a_file_belong_to_no_scenario(endpoint: Endpoint, tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"id": "a", "prompt": "one"}\n', encoding="utf-8")
    with pytest.raises(UserError, match="belong to no scenario"):
        bench(url_target(endpoint.base, "m", "", None), "h", "freight_cpu_2core", prompts=file)
    assert endpoint.asked == []


@pytest.mark.parametrize(
    "named",
    [{}, {"url": "http://here"}, {"url": "http://here", "model": "m", "bundle": "m@champion"},
     {"bundle": "m@champion", "model": "m"}, {"bundle": "m@champion", "serve": "s"},
     {"url": "http://here", "model": "m", "serve": "s"}, {"model": "m", "tokenizer": Path("t")},
     {"serve": "s"}],
)  # fmt: skip
def test_exactly_one_target_is_named(named: dict[str, Any]) -> None:
    nothing = dict.fromkeys(("url", "model", "bundle", "serve", "tokenizer"))
    with pytest.raises(UserError, match="needs one of: --url with --model"):
        opened(**nothing | named, api_key="")


def test_a_folder_without_a_model_is_refused(tmp_path: Path) -> None:
    target, _ = opened(
        url=None, model=str(tmp_path), bundle=None, serve=None, tokenizer=None, api_key=""
    )
    with pytest.raises(UserError, match=r"there is no config\.json"), target:
        pass


# -- prompts and tokens ----------------------------------------------------------------------


def test_prompts_come_from_the_file_or_the_profile(tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"id": "a", "prompt": "one"}\n', encoding="utf-8")
    assert supply_of(profile(), file).take(1)[0]["id"] == "a"
    (row,) = supply_of(profile(), None).take(1)
    assert len(row["messages"][0]["content"].split()) == 8


def test_no_two_searches_send_the_same_prompts(tmp_path: Path) -> None:
    """The endpoint may still have cached the last one's; a stopped search goes on with its own."""
    sent = []
    for name in ("first", "second", "first"):
        (tmp_path / name).mkdir(exist_ok=True)
        rows = supply_of(profile(), None, first_prompt(tmp_path / name)).take(100)
        sent.append({row["messages"][0]["content"] for row in rows})
    assert not sent[0] & sent[1]
    assert sent[0] == sent[2]


def test_the_word_tokenizer_counts_words(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    folder = word_tokenizer(tmp_path / "made" / "here")
    assert word_tokenizer(folder) == folder, "a second time too"
    tokenizer = AutoTokenizer.from_pretrained(folder)
    for text in ("", "order", "order truck 7f port", "word " * 500):
        assert len(tokenizer(text).input_ids) == len(text.split())
    (row,) = supply_of(
        profile(scenarios={"any": {"unit": "words", "prefix": 50, "input": 70}}), None
    ).take(1)
    assert len(tokenizer(row["messages"][0]["content"]).input_ids) == 120


# -- the answer ------------------------------------------------------------------------------


def point(
    answer: str = "kept", sla: str = "e2el p90 2s", rate: float = 10.0, **growth: float
) -> LoadPoint:
    """From 300 requests at one rate: some of 3 s where it is lost, one where it is open."""
    over = {"kept": 0, "undecided": 25, "not kept": 60, "void": 0}[answer]
    times: list[float | None] = [100.0] * 300
    for index in range(over):
        times[40 + index * 4] = 3000.0
    if answer == "void":
        growth = {"vllm:prefix_cache_queries_total": 10.0, "vllm:prefix_cache_hits_total": 9.0}
    written = profile(search=None, rates=[rate], sla=[sla])
    seen = Seen([evenly(rate, times)], 30.0, growth=growth)
    return load_point(written, judged(written, rate, seen), seen)


def finished(
    *points: LoadPoint,
    kept: tuple[float | None, float | None] = (None, None),
    verdict: Verdict = Verdict.PASS,
) -> Benchmark:
    evidence = LatencyEvidence(
        bundle="", profile="p", hardware="h", engine="e", harness="g", settings={},
        points=list(points), sla=["e2el p90 2000ms"], kept_rate=kept, notes=["a note"],
        measured_at=datetime.now(UTC), seconds=1.0,
    )  # fmt: skip
    return Benchmark(verdict, evidence, Path("/evidence"), 1234)


def test_the_document_has_what_automation_reads() -> None:
    done = document(finished(point(sla="e2el p99 2s"), kept=(10.0, 12.0)))
    assert done["verdict"] == "PASS"
    assert done["kept_rate"] == [10.0, 12.0]
    assert done["sla"] == ["e2el p90 2000ms"]
    assert (done["requests_total"], done["evidence"]) == (1234, "/evidence")
    (shown,) = done["points"]
    assert set(shown) >= {
        "rate", "verdict", "cause", "n", "failed", "hit_rate", "steady", "p99_e2el",
        "p99_e2el_bound",
    }  # fmt: skip
    assert shown["p99_e2el"] == 100.0
    assert shown["p99_e2el_bound"] is None, "270 judged requests bound no P99"
    assert json.loads(json.dumps(done, allow_nan=False)) == done


def test_an_emulated_kernel_is_said() -> None:
    done = finished(point(sla="e2el p99 2s"))
    assert document(done)["emulated"] is None
    assert "emulated" not in bench_text(document(done))
    emulated = done.evidence.model_copy(update={"emulated": True})
    told = document(dataclasses.replace(done, evidence=emulated))
    assert (told["emulated"], told["production"]) == (True, True)
    assert decided(Verdict.PASS, emulated) is decided(Verdict.FAIL, emulated) is Verdict.INFEASIBLE
    elsewhere = emulated.model_copy(update={"production": False})
    assert decided(Verdict.PASS, elsewhere) is Verdict.PASS
    assert decided(Verdict.PASS, done.evidence) is Verdict.PASS
    assert "note: the engine emulated a kernel that this hardware lacks" in bench_text(told)


def test_no_rate_is_null() -> None:
    assert document(finished())["kept_rate"] == [None, None]
    assert document(finished(kept=(None, 2.0)))["kept_rate"] == [None, 2.0]


@pytest.mark.parametrize(
    ("answer", "verdict"),
    [("kept", "PASS"), ("not kept", "FAIL"), ("undecided", "INCONCLUSIVE"), ("void", "ANOMALOUS")],
)
def test_verdicts_of_points(answer: str, verdict: str) -> None:
    made = point(answer)
    assert made.answer == answer
    (shown,) = document(finished(made))["points"]
    assert (shown["verdict"], shown["cause"]) == (verdict, made.cause)
    assert bool(made.cause) == (answer != "kept")


def test_fixed_rates_have_an_interval_and_a_verdict() -> None:
    points = [point("kept", rate=1.0), point("kept", rate=2.0), point("not kept", rate=4.0)]
    assert with_kept_rate(finished(*points).evidence).kept_rate == (2.0, 4.0)
    assert fixed_verdict(points) is Verdict.FAIL
    assert fixed_verdict(points[:2]) is Verdict.PASS
    assert fixed_verdict([*points[:2], point("undecided")]) is Verdict.INCONCLUSIVE
    assert fixed_verdict([*points, point("void")]) is Verdict.ANOMALOUS


def test_a_closed_loop_has_no_kept_rate() -> None:
    points = [
        point("kept", rate=rate).model_copy(update={"concurrency": count})
        for count, rate in ((1, 17.86), (2, 18.73))
    ]
    points.append(point("not kept", rate=18.69).model_copy(update={"concurrency": 4}))
    done = finished(*points)
    assert document(done)["kept_rate"] == [None, None]
    untouched = done.evidence.model_copy(update={"kept_rate": None})
    assert with_kept_rate(untouched).kept_rate is None
    assert [shown["concurrency"] for shown in document(done)["points"]] == [1, 2, 4]


def test_a_p99_that_the_sla_does_not_ask_for_has_no_bound() -> None:
    made = point(sla="ttft p90 1s")
    (shown,) = document(finished(made))["points"]
    assert shown["p99_e2el_bound"] is None
    assert shown["p99_e2el"] == 100.0
    assert made.values == {"ttft p90 1000ms": 25.0}


def test_a_server_of_ours_whose_log_names_no_kernel_is_not_measured(tmp_path: Path) -> None:
    """Such times would pass a gate of production as real ones."""
    silent = Target(
        "http://127.0.0.1:9", "m", "", None, "vllm 0", "here", bundle="b",
        quantized=True, log=tmp_path / "vllm.log",
    )  # fmt: skip
    load = tmp_path / "load.yaml"
    load.write_text(
        "kind: load\ndescription: x\nhardware: any\nrates: [1.0]\nseconds_per_rate: 1\n"
        "sla: [e2el p99 2s]\nsampling: {temperature: 0.0, max_tokens: 8, seed: 0}\n"
    )
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"id": "1", "prompt": "Where is order 1?"}\n')
    with pytest.raises(UserError, match="nobody knows whether its times are real"):
        bench(nullcontext(silent), "one", str(load), prompts=prompts, out=tmp_path / "out")
    assert not list((tmp_path / "out").glob("*.json"))
