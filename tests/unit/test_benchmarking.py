"""`pilotage bench` around the search: the URL, the first question, the tokenizer, the answer."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from eval_suites.load_steps import ClauseResult, StepResult
from eval_suites.rate_search import KeptRate
from registry.errors import InfrastructureError, UserError
from registry.evidence import LoadPoint
from registry.outcome import Verdict
from tasks.benchmarking import (
    Benchmark,
    bench_url,
    document,
    endpoint_base,
    first_prompt,
    probe,
    supply,
    word_tokenizer,
)
from tasks.engines.kept_rate import Found, Step, _point
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
    with pytest.raises(InfrastructureError):
        bench_url("http://127.0.0.1:9", "m", "mock_smoke", out=tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_profile_of_fixed_rates_is_refused_before_anything_is_asked(endpoint: Endpoint) -> None:
    with pytest.raises(UserError, match="has fixed rates and no search"):
        bench_url(endpoint.base, "m", "smoke_cpu")
    with pytest.raises(UserError):
        bench_url(endpoint.base, "m", "no_such_profile")
    assert endpoint.asked == []


# -- prompts and tokens ----------------------------------------------------------------------


def test_prompts_come_from_the_file_or_the_profile(tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"id": "a", "prompt": "one"}\n', encoding="utf-8")
    assert supply(profile(), file).take(1)[0]["id"] == "a"
    (row,) = supply(profile(), None).take(1)
    assert len(row["messages"][0]["content"].split()) == 8
    with pytest.raises(UserError, match="none are named, and the profile has no `synthetic` ones"):
        supply(profile(synthetic=None), None)


def test_no_two_searches_send_the_same_prompts(tmp_path: Path) -> None:
    """The endpoint may still have cached the last one's; a stopped search goes on with its own."""
    sent = []
    for name in ("first", "second", "first"):
        (tmp_path / name).mkdir(exist_ok=True)
        rows = supply(profile(), None, first_prompt(tmp_path / name)).take(100)
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
    (row,) = supply(profile(synthetic={"prefix_words": 50, "input_words": 70}), None).take(1)
    assert len(tokenizer(row["messages"][0]["content"]).input_ids) == 120


# -- the answer ------------------------------------------------------------------------------


def step(answer: str, void: bool = False, sla: str = "e2el p99 2s", **changes: Any) -> Step:
    written = profile(sla=[sla])
    (clause,) = written.sla
    clauses = () if void else (ClauseResult(clause, answer, 150.0, 170.0, 0),)  # type: ignore[arg-type]
    result = StepResult(
        rate=10.0, answer=answer, void=void, n=3, hit_rate=0.01, clauses=clauses, **changes  # type: ignore[arg-type]
    )  # fmt: skip
    return Step(result, _point(result, evenly(10, [100.0, 110.0, None]), 1.0, {}))


def finished(*steps: Step, rates: KeptRate, verdict: Verdict = Verdict.PASS) -> Benchmark:
    found = Found(verdict, rates, list(steps), ["a note"], 1234)
    return Benchmark(found, profile(), Path("/evidence"))


def test_the_document_has_what_automation_reads() -> None:
    done = document(finished(step("kept"), rates=KeptRate(10.0, 12.0)))
    assert done["verdict"] == "PASS"
    assert done["kept_rate"] == [10.0, 12.0]
    assert done["sla"] == ["e2el p99 2000ms"]
    assert (done["requests_total"], done["evidence"]) == (1234, "/evidence")
    (point,) = done["points"]
    assert set(point) >= {
        "rate", "verdict", "cause", "n", "failed", "hit_rate", "steady", "p99_e2el",
        "p99_e2el_bound",
    }  # fmt: skip
    assert (point["p99_e2el"], point["p99_e2el_bound"]) == (150.0, 170.0)
    assert json.loads(json.dumps(done, allow_nan=False)) == done


def test_no_rate_is_null() -> None:
    assert document(finished(rates=KeptRate(None, None)))["kept_rate"] == [None, None]
    assert document(finished(rates=KeptRate(None, 2.0)))["kept_rate"] == [None, 2.0]


@pytest.mark.parametrize(
    ("answer", "void", "verdict"),
    [("kept", False, "PASS"), ("not kept", False, "FAIL"),
     ("undecided", False, "INCONCLUSIVE"), ("undecided", True, "ANOMALOUS")],
)  # fmt: skip
def test_verdicts_of_points(answer: str, void: bool, verdict: str) -> None:
    done = document(finished(step(answer, void, cause="why"), rates=KeptRate(None, None)))
    assert (done["points"][0]["verdict"], done["points"][0]["cause"]) == (verdict, "why")


def test_a_p99_that_the_sla_does_not_ask_for_has_no_bound() -> None:
    (point,) = document(
        finished(step("kept", sla="ttft p90 1s"), rates=KeptRate(10.0, None))
    )["points"]  # fmt: skip
    assert point["p99_e2el_bound"] is None
    assert point["p99_e2el"] is None, "one of three failed: the P99 is beyond every time"
    made = step("kept", sla="ttft p90 1s").point
    assert isinstance(made, LoadPoint)
    assert made.values == {"ttft p90 1000ms": 150.0}
