"""lm-eval as a process of its own, against a pretend chat server and the transformers engine.

The pretend server answers as told, so that every score is known beforehand; the same runs
against a real vLLM server in `test_vllm_bench.py`.
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import yaml

from eval_suites.loader import TASKS_DIR, load_accuracy
from registry.errors import InfrastructureError, StageFailed, UserError
from registry.evidence import AccuracyEvidence, read_summary
from tasks.conversations import messages_of, with_system
from tasks.demo_data import generate, reference_reply
from tasks.engines.lm_eval_models import ending, parse_answer
from tasks.engines.lm_eval_run import item_rows, mean, read_items
from tasks.engines.lm_eval_task import dataset_of
from tasks.engines.subprocesses import run_job

Row = dict[str, Any]
METRICS = ["hit_rate", "slot_f1", "format_valid", "satisfaction"]


class PretendServer(ThreadingHTTPServer):
    """`answer(prompt)` gives the text, or a whole reply, or a status other than 200."""

    def __init__(self, answer: Callable[[str], str | Row | int]) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.answer = answer
        self.asked: list[Row] = []
        self.keys: set[str | None] = set()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/v1"


class _Handler(BaseHTTPRequestHandler):
    server: PretendServer

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.asked.append(body)
        self.server.keys.add(self.headers["Authorization"])
        answer = self.server.answer(body["messages"][-1]["content"])
        status = answer if isinstance(answer, int) else 200
        reply = answer if isinstance(answer, dict) else completion(str(answer))
        content = json.dumps(reply).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: Any) -> None:
        pass


def completion(text: str | None, reason: str = "stop", tokens: int = 7) -> Row:
    choice = {"index": 0, "message": {"role": "assistant", "content": text}}
    return {
        "choices": [{**choice, "finish_reason": reason}],
        "usage": {"prompt_tokens": 5, "completion_tokens": tokens},
    }


@pytest.fixture
def serving() -> Iterator[Callable[[Callable[[str], str | Row | int]], PretendServer]]:
    servers = []

    def start(answer: Callable[[str], str | Row | int]) -> PretendServer:
        server = PretendServer(answer)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        servers.append(server)
        return server

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


def write_items(path: Path, rows: list[Row]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    path.write_text(text, encoding="utf-8")
    return path


def job(tmp_path: Path, server: PretendServer, rows: list[Row], **changes: Any) -> Row:
    return {
        "task_file": str(TASKS_DIR / "freight" / "freight.yaml"),
        "items_file": str(write_items(tmp_path / "eval.jsonl", rows)),
        "items": len(rows),
        "model": {
            "kind": "chat",
            "url": server.url,
            "served_name": "pretend",
            "api_key_env": "KEY_OF_TEST",
        },
        "sampling": {"temperature": 0.0, "top_p": 1.0, "max_tokens": 33, "seed": None},
        "concurrency": 4,
        "metrics": METRICS,
        "out_dir": str(tmp_path / "evidence"),
        "bundle": "b" * 64,
        "suite": "freight",
        "engine": "pretend 1",
        "smoke": True,
    } | changes


def run(tmp_path: Path, work: Row) -> Row:
    return run_job(
        "tasks.engines.lm_eval_run",
        work,
        log=tmp_path / "lm_eval.log",
        env={"KEY_OF_TEST": "secret-key"},
        timeout=300,
    )


def evidence_of(tmp_path: Path) -> tuple[AccuracyEvidence, list[Row]]:
    import pyarrow.parquet as pq

    summary = read_summary(tmp_path / "evidence")
    assert isinstance(summary, AccuracyEvidence)
    return summary, pq.read_table(tmp_path / "evidence" / "items.parquet").to_pylist()


def test_freight_from_prompt_to_evidence(tmp_path: Path, serving: Any) -> None:
    rows = generate(3, {"eval": 12})["eval"]
    # What a template or a loader could change on the way.
    rows[0]["prompt"] = "  {{ id }} {% raw %} keeps its spaces\n\n"
    rows[1]["messages"] = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": rows[1]["prompt"]},
    ]
    rows[2]["prompt"] = "12345"
    replies = {row["prompt"]: reference_reply(row) for row in rows}
    replies[rows[3]["prompt"]] = "no JSON"
    whole = {rows[4]["prompt"]: completion(replies[rows[4]["prompt"]], "length", 33)}
    server = serving(lambda prompt: whole.get(prompt) or replies[prompt])
    result = run(tmp_path, job(tmp_path, server, rows, items=10))

    assert [len(server.asked), server.keys] == [10, {"Bearer secret-key"}]
    by_prompt = {body["messages"][-1]["content"]: body for body in server.asked}
    assert set(by_prompt) == {row["prompt"] for row in rows[:10]}, "word for word"
    assert by_prompt[rows[1]["prompt"]]["messages"] == rows[1]["messages"]
    for body in server.asked:
        assert (body["model"], body["temperature"], body["top_p"]) == ("pretend", 0.0, 1.0)
        assert (body["max_tokens"], body["seed"], body["stop"]) == (33, 1234, [])

    assert result["items_asked"] == result["items_scored"] == 10
    assert result["truncated"] == 1
    assert result["metrics"]["hit_rate"] == pytest.approx(0.9)
    assert result["metrics"]["slot_f1"] == pytest.approx(0.9)
    summary, items = evidence_of(tmp_path)
    assert summary.metrics == result["metrics"]
    assert summary.settings["sampling"]["seed"] == 1234, "what was sent, not what was left open"
    assert summary.settings["num_fewshot"] == 0
    assert summary.harness.startswith("lm-eval 0.")
    assert summary.task_version == "1"
    assert [item["item_id"] for item in items] == [row["id"] for row in rows[:10]]
    assert [item["segment"] for item in items] == [row["segment"] for row in rows[:10]]
    assert items[3]["response"] == "no JSON"
    assert [items[3][name] for name in METRICS] == [0.0] * 4
    assert (items[4]["finish_reason"], items[4]["output_tokens"]) == ("length", 33)
    assert (items[5]["finish_reason"], items[5]["output_tokens"]) == ("stop", 7)
    for name in METRICS:
        assert summary.metrics[name] == pytest.approx(sum(item[name] for item in items) / 10)
    text = (tmp_path / "lm_eval.log").read_text() + (tmp_path / "lm_eval.job.json").read_text()
    assert "secret-key" not in text


CALL = {
    "id": "c1",
    "type": "function",
    "function": {"name": "track", "arguments": '{"order": "FT1"}'},
}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": "Finds an order.",
            # Of types that no column of Arrow could hold at once.
            "parameters": {"type": "object", "properties": {"order": {"default": default}}},
        },
    }
    for name, default in (("track", "FT1"), ("cancel", 7))
]


def conversations() -> list[Row]:
    """Two conversations that end with one sentence, one with a tool's answer, one plain item."""
    asked = {"reference": {"intent": "a"}, "segment": "s"}
    turns = [
        {"role": "system", "content": "You are brief. 好"},
        {"role": "user", "content": "Where is FT1?"},
        {"role": "assistant", "content": "In Wuhan.\n"},
        {"role": "user", "content": "  and now?  "},
    ]
    other = [turns[0], {"role": "user", "content": "Where is FT2?"}, *turns[2:]]
    tool = [
        turns[1],
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "content": "In Jinan.", "tool_call_id": "c1"},
    ]
    return [
        {"id": "one", "prompt": "  and now?  ", **asked, "messages": turns},
        {"id": "two", "prompt": "  and now?  ", **asked, "messages": other, "tools": TOOLS[:1]},
        {"id": "tool", "prompt": "Where is FT1?", **asked, "messages": tool, "tools": TOOLS},
        {"id": "plain", "prompt": "  and now?  ", **asked},
        {"id": "only tools", "prompt": "Cancel it", **asked, "tools": TOOLS},
    ]


@pytest.mark.parametrize("concurrency", [1, 4])
def test_conversations_and_tools_arrive_as_they_are(
    tmp_path: Path, serving: Any, concurrency: int
) -> None:
    rows = conversations()
    called = completion(None, "tool_calls")
    called["choices"][0]["message"]["tool_calls"] = [CALL]
    server = serving(lambda prompt: called if prompt == "Cancel it" else "a")
    work = job(
        tmp_path,
        server,
        rows,
        task_file=str(TASKS_DIR / "intent_label" / "intent_label.yaml"),
        metrics=["hit_rate"],
        concurrency=concurrency,
    )
    result = run(tmp_path, work)
    sent = [{"messages": body["messages"], "tools": body.get("tools")} for body in server.asked]
    wanted = [{"messages": messages_of(row), "tools": row.get("tools")} for row in rows]
    assert sorted(map(json.dumps, sent)) == sorted(map(json.dumps, wanted))
    assert all(body["max_tokens"] == 33 and body["stop"] == [] for body in server.asked)
    assert (result["items_scored"], result["metrics"]["hit_rate"]) == (5, 0.8)
    _, items = evidence_of(tmp_path)
    assert items[4]["finish_reason"] == "tool_calls"
    assert json.loads(items[4]["response"]) == {"tool_calls": [CALL["function"]]}
    assert len({item["prompt_hash"] for item in items}) == 5


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ("num_fewshot: 1", "num_fewshot: does not go with items that are conversations"),
        ("description: Be nice.", "description: does not go with items that are conversations"),
        ('doc_to_text: "Q: {{prompt}}"', "doc_to_text: changes the last message of one"),
    ],
)
def test_a_task_that_would_change_a_conversation_is_refused(
    tmp_path: Path, serving: Any, changed: str, message: str
) -> None:
    own = yaml.safe_load(PLAIN_TASK) | {"num_fewshot": 0, "doc_to_text": "prompt"}
    (tmp_path / "plain.yaml").write_text(yaml.safe_dump(own | yaml.safe_load(changed)))
    shot = {**conversations()[3], "id": "s"}
    write_items(tmp_path / "shots.jsonl", [shot])
    server = serving(lambda prompt: "a")
    work = job(tmp_path, server, conversations(), task_file=str(tmp_path / "plain.yaml"))
    with pytest.raises(StageFailed, match=message):
        run(tmp_path, work | {"metrics": ["exact_match,as-is"]})
    assert not server.asked


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (503, 'in all its attempts: 503, Response text: .*"content": "503"'),
        ({"object": "error", "message": "overloaded"}, "a reply without an answer"),
        (completion(None, "abort"), "ended with 'abort'"),
    ],
    ids=["status", "no_choices", "aborted"],
)
def test_a_failed_request_is_never_scored(
    tmp_path: Path, serving: Any, fault: int | Row, message: str
) -> None:
    rows = generate(3, {"eval": 4})["eval"]
    bad = rows[2]["prompt"]
    server = serving(lambda prompt: fault if prompt == bad else "{}")
    with pytest.raises(InfrastructureError, match=message) as caught:
        run(tmp_path, job(tmp_path, server, rows))
    assert "secret-key" not in (tmp_path / "lm_eval.log").read_text() + str(caught.value)
    assert sum(body["messages"][-1]["content"] == bad for body in server.asked) == 3, "retried"
    assert not (tmp_path / "evidence").exists()


def test_nothing_is_remembered_from_an_earlier_run(tmp_path: Path, serving: Any) -> None:
    """Same file name, same size, same task: other items and another model are asked afresh."""
    rows = [
        {"id": f"i{number}", "segment": "s", "prompt": text, "reference": {"intent": "a"}}
        for number, text in enumerate(("one", "two"))
    ]
    task = {
        "task_file": str(TASKS_DIR / "intent_label" / "intent_label.yaml"),
        "metrics": ["hit_rate", "format_valid"],
    }
    first = serving(lambda prompt: "a")
    assert run(tmp_path, job(tmp_path, first, rows, **task))["metrics"]["hit_rate"] == 1.0
    other = serving(lambda prompt: "b")
    assert run(tmp_path, job(tmp_path, other, rows, **task))["metrics"]["hit_rate"] == 0.0
    before = evidence_of(tmp_path)[0].items_digest
    rows[0] |= {"prompt": "uno", "reference": {"intent": "b"}}
    assert run(tmp_path, job(tmp_path, other, rows, **task))["metrics"]["hit_rate"] == 0.5
    assert {body["messages"][-1]["content"] for body in other.asked[2:]} == {"uno", "two"}
    assert evidence_of(tmp_path)[0].items_digest != before


PLAIN_TASK = """
task: plain
dataset_path: json
dataset_kwargs: {data_files: {test: nowhere.jsonl, shots: shots.jsonl}}
test_split: test
fewshot_split: shots
num_fewshot: 1
output_type: generate_until
doc_to_text: "Q: {{prompt}}"
doc_to_target: "{{reference.intent}}"
generation_kwargs: {until: ["###"]}
filter_list:
  - name: as-is
    filter: [{function: take_first}]
  - name: first-word
    filter: [{function: regex, regex_pattern: "^(\\\\w+)"}, {function: take_first}]
metric_list: [{metric: exact_match, aggregation: mean, higher_is_better: true}]
metadata: {version: 2}
"""


def test_a_users_plain_task_with_examples_and_filters(tmp_path: Path, serving: Any) -> None:
    (tmp_path / "plain.yaml").write_text(PLAIN_TASK)
    shot = {"id": "s", "prompt": "shot?", "reference": {"intent": "shot!"}}
    write_items(tmp_path / "shots.jsonl", [shot])
    rows = [
        {"id": "x", "prompt": "1", "reference": {"intent": "yes"}},
        {"id": "y", "prompt": "2", "reference": {"intent": "no"}},
    ]
    server = serving(lambda prompt: {"Q: 1": "yes, indeed", "Q: 2": "no"}[prompt])
    work = job(tmp_path, server, rows, task_file=str(tmp_path / "plain.yaml"))
    with pytest.raises(StageFailed, match="metric exact_match: is computed by several filters"):
        run(tmp_path, work | {"metrics": ["exact_match"]})
    names = ["exact_match,as-is", "exact_match,first-word"]
    result = run(tmp_path, work | {"metrics": names})
    assert result["metrics"] == {"exact_match,as-is": 0.5, "exact_match,first-word": 1.0}
    assert result["items_scored"] == 2
    contents = [message["content"] for message in server.asked[0]["messages"]]
    assert contents[:2] == ["Q: shot?", "shot!"]
    summary, _ = evidence_of(tmp_path)
    assert (summary.settings["num_fewshot"], summary.task) == (1, "plain")


def test_mistakes_of_the_items_file_come_all_at_once(tmp_path: Path) -> None:
    path = tmp_path / "eval.jsonl"
    path.write_text(
        '{"id": "a", "prompt": "x", "reference": {"intent": "i"}}\n'
        '{"id": "a", "prompt": "y", "reference": {"intent": "i"}}\n'
        '{"id": "b", "prompt": "z"}\nnot json\n'
    )
    with pytest.raises(UserError) as caught:
        read_items(path, 5)
    assert [str(problem).splitlines()[0].partition("eval.jsonl")[2] for problem in
            caught.value.problems] == [
        ":2: id 'a' stands in line 1 already",
        ":3: has no reference",
        ":4: not JSON: Expecting value: line 1 column 1 (char 0)",
        ": holds 3 items, the suite asks 5",
    ]  # fmt: skip


def test_a_task_that_a_served_bundle_cannot_answer(tmp_path: Path, serving: Any) -> None:
    (tmp_path / "t.yaml").write_text(
        "task: t\ndataset_path: allenai/ai2_arc\noutput_type: multiple_choice\n"
    )
    rows = [{"id": "a", "prompt": "x", "reference": {"intent": "i"}}]
    work = job(tmp_path, serving(lambda _: ""), rows, task_file=str(tmp_path / "t.yaml"))
    with pytest.raises(StageFailed) as caught:
        run(tmp_path, work)
    places = [problem.where.rpartition(" ")[2] for problem in caught.value.problems]
    assert places == ["output_type", "dataset_path", "test_split"]


def test_a_missing_number_is_counted_and_has_no_mean() -> None:
    rows = [{"id": name, "prompt": name, "reference": {"intent": "i"}} for name in "ab"]

    def sample(row: Row, value: Any) -> Row:
        answer = parse_answer(completion("text"))
        common = {"doc": row, "filter": "none", "metrics": ["m"], "prompt_hash": "h"}
        return {**common, "resps": [[answer]], "m": value}

    for value in (float("nan"), float("inf"), None, ("a", "b")):
        items = item_rows(
            [sample(rows[0], 1.0), sample(rows[1], value)], rows, ["m"], {"task": "t"}
        )
        assert [item["m"] for item in items] == [1.0, None]
        assert mean([item["m"] for item in items]) is None
    assert mean([1.0, 0.0]) == 0.5
    assert mean([]) is None
    with pytest.raises(UserError, match="metric other: is not computed by the task"):
        item_rows([sample(rows[0], 1.0)], rows, ["other"], {"task": "t"})
    changed = {**rows[0], "reference": {"intent": "i", "slots": None}}
    with pytest.raises(InfrastructureError, match="its reference changed while loading"):
        item_rows([sample(changed, 1.0)], rows, ["m"], {"task": "t"})


def test_ending_counts_the_end_token() -> None:
    assert ending([5, 6, 0, 0], {0}, 4) == ("stop", 3)
    assert ending([5, 6, 7, 8], {0, None}, 4) == ("length", 4)
    assert ending([5, 6, 7], {0}, 4) == ("stop", 3), "ended by a stop text"


def test_the_transformers_engine(tmp_path: Path, serving: Any) -> None:
    run_job(
        "tasks.engines.random_llama",
        {"out": str(tmp_path / "model")},
        log=tmp_path / "model.log",
    )
    suite = load_accuracy("freight_smoke")
    rows = generate(5, {"eval": 6})["eval"]
    rows[2] = with_system(rows[2], "Be brief.")
    work = job(tmp_path, serving(lambda _: ""), rows, metrics=suite.metrics, concurrency=4)
    work["model"] = {"kind": "hf", "path": str(tmp_path / "model")}
    work["sampling"] |= {"max_tokens": 12}
    result = run(tmp_path, work)
    assert result["items_scored"] == 6
    _, items = evidence_of(tmp_path)
    assert [item["item_id"] for item in items] == [row["id"] for row in rows]
    for item in items:
        assert item["finish_reason"] in ("stop", "length")
        assert 1 <= item["output_tokens"] <= 12
        assert (item["output_tokens"] == 12) or item["finish_reason"] == "stop"
    assert result["truncated"] == sum(item["finish_reason"] == "length" for item in items)
    # The template's own way to write turns, word for word.
    for item, row in zip(items, rows, strict=True):
        turns = [f"<|{one['role']}|>{one['content']}<|end|>" for one in messages_of(row)]
        asked = f"{''.join(turns)}<|assistant|>"
        assert item["prompt_hash"] == hashlib.sha256(asked.encode()).hexdigest()
    refused = {**rows[0], "id": "calls", "tools": TOOLS}
    with pytest.raises(StageFailed, match=r"row calls: the chat template .* leaves out the tools"):
        run(
            tmp_path,
            work | {"items_file": str(write_items(tmp_path / "t.jsonl", [refused])), "items": 1},
        )


def test_texts_that_look_like_dates_stay_texts(tmp_path: Path, serving: Any) -> None:
    days = ["2026-01-05", "2026-01-06", "2026-02-28"]
    server = serving(lambda prompt: prompt.removesuffix("T08:00:00Z"))
    rows = [
        {"id": day, "segment": day, "prompt": f"{day}T08:00:00Z", "reference": {"intent": day}}
        for day in days
    ]
    task = str(TASKS_DIR / "intent_label" / "intent_label.yaml")
    run(tmp_path, job(tmp_path, server, rows, task_file=task, metrics=["hit_rate"]))
    summary, items = evidence_of(tmp_path)
    assert sorted(body["messages"][-1]["content"] for body in server.asked) == [
        row["prompt"] for row in rows
    ]
    assert (summary.items_scored, summary.metrics) == (3, {"hit_rate": 1.0})
    assert sorted(item["item_id"] for item in items) == days


def test_references_of_any_shape_are_carried_or_refused_before_anything_is_asked() -> None:
    shapes: list[Row] = [
        {"day": "2026-01-05"},
        {"day": 5, "more": {"a": [1, "x", None]}},
        {"other": []},
        {"day": None, "more": {"b": True}},
    ]
    rows = [{"id": str(n), "prompt": "p", "reference": one} for n, one in enumerate(shapes)]
    rows[2]["conversation"] = "c"
    rows[1]["messages"] = [{"role": "user", "content": "p"}]
    made = list(dataset_of(rows))
    assert [row["reference"] for row in made] == shapes
    assert [row["conversation"] for row in made] == [None, None, "c", None]
    assert "messages" not in made[1]
    for value in (2**70, 0.12345678901234568):
        odd = {"id": "odd", "prompt": "p", "reference": {"y": value}}
        with pytest.raises(UserError, match="its reference"):
            dataset_of([odd, *rows] if isinstance(value, float) else [odd])
