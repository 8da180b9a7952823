"""vLLM's load generator: against a pretend server for every fault, and against a real one."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from eval_suites.load import LoadProfile
from eval_suites.loader import TASKS_DIR, load_profile
from registry.errors import InfrastructureError, UserError
from registry.evidence import LatencyEvidence, percentile, read_summary
from tasks.demo_data import generate
from tasks.engines.engine_watch import EngineWatch
from tasks.engines.fixed_rates import Measuring, measure_rates
from tasks.engines.load_generator import Traffic
from tasks.engines.load_prompts import from_file
from tasks.engines.load_run import LoadRun
from tasks.engines.subprocesses import run_job
from tasks.engines.vllm_bench import VllmBench
from tasks.engines.vllm_server import VllmServer

pytestmark = pytest.mark.alone

Row = dict[str, Any]


@pytest.fixture(scope="module")
def random_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("random_llama")
    run_job("tasks.engines.random_llama", {"out": str(folder / "model")}, log=folder / "job.log")
    return folder / "model"


def written(**changes: Any) -> LoadProfile:
    return LoadProfile.model_validate(
        {
            "kind": "load",
            "description": "for a test",
            "hardware": "here",
            "rates": [4.0],
            "seconds_per_rate": 1.5,
            "warmup_requests": 1,
            "sampling": {"temperature": 0.0, "top_p": 1.0, "max_tokens": 8, "seed": 3},
            "seed": 5,
            "request_timeout": 3.0,
            "cache_band": [0, 1],
            "smoke": True,
        }
        | changes
    )


def measure(
    bench: VllmBench, tmp_path: Path, url: str, tokenizer: Path, rows: list[Row],
    profile: LoadProfile, key: str = "",
) -> LatencyEvidence:  # fmt: skip
    """The rates of a profile with prompts of a file, as a release measures them."""
    prompts = tmp_path / "load.jsonl"
    text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    prompts.write_text(text, encoding="utf-8")
    folder = tmp_path / "evidence"
    folder.mkdir(exist_ok=True)
    traffic = Traffic(
        url.removesuffix("/v1"), "m", tokenizer, profile.sampling.model_dump(mode="json"),
        profile.burstiness, profile.request_timeout,
    )  # fmt: skip
    run = LoadRun(traffic, bench, EngineWatch(traffic.url, api_key=key), folder / "raw")
    of = Measuring(bundle="b" * 64, profile="test", hardware="here", engine="pretend")
    return measure_rates(profile, run, from_file(prompts), folder, of)


def requests_of(tmp_path: Path) -> list[Row]:
    import pyarrow.parquet as pq

    rows: list[Row] = pq.read_table(tmp_path / "evidence" / "requests.parquet").to_pylist()
    return rows


# -- a pretend server ------------------------------------------------------------------------


class PretendServer(ThreadingHTTPServer):
    """Streams 4 tokens 50 ms apart, the first after 100 ms; a prompt names the fault it meets."""

    asked: list[Row]
    keys: set[str | None]


class _Handler(BaseHTTPRequestHandler):
    server: PretendServer

    def do_GET(self) -> None:
        content = (
            f'vllm:prefix_cache_queries_total{{engine="0"}} {100.0 * len(self.server.asked)}\n'
            f'vllm:prefix_cache_hits_total{{engine="0"}} {25.0 * len(self.server.asked)}\n'
            f'vllm:spec_decode_num_drafts_total{{engine="0"}} {2.0 * len(self.server.asked)}\n'
            "vllm:spec_decode_num_draft_tokens_total "
            f"{6.0 * len(self.server.asked)}\n"
            'vllm:spec_decode_num_accepted_tokens_total{engine="0"} '
            f"{3.0 * len(self.server.asked)}\n"
        ).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        prompt = body["messages"][-1]["content"]
        self.server.asked.append(body)
        self.server.keys.add(self.headers["Authorization"])
        if prompt == "refused":
            # No reason phrase: vLLM's client would leave the error's text empty.
            self.send_response_only(503, "")
            self.end_headers()
            return
        self.send_response(200)
        self.end_headers()
        if prompt == "hangs":
            time.sleep(4)
            return
        time.sleep(0.1)
        self._chunk({"role": "assistant", "content": ""})
        for token in range(4):
            if token:
                time.sleep(0.05)
            if prompt == "breaks off" and token == 2:
                self._send({"error": {"message": "EngineCore died"}})
                return
            self._chunk({"content": "x"})
        usage = {"prompt_tokens": 21, "completion_tokens": 4, "total_tokens": 25}
        self._send({"choices": [], "usage": usage})
        self.wfile.write(b"data: [DONE]\n\n")

    def _chunk(self, delta: Row) -> None:
        self._send({"choices": [{"index": 0, "delta": delta, "finish_reason": None}]})

    def _send(self, content: Row) -> None:
        self.wfile.write(f"data: {json.dumps(content)}\n\n".encode())
        self.wfile.flush()

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def pretend() -> Iterator[tuple[PretendServer, str]]:
    server = PretendServer(("127.0.0.1", 0), _Handler)
    server.asked, server.keys = [], set()
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server, f"http://127.0.0.1:{server.server_address[1]}/v1"
    server.shutdown()
    server.server_close()


def test_faults_are_failed_requests_and_numbers_are_the_stopwatchs(
    pretend: tuple[PretendServer, str], random_llama: Path, tmp_path: Path
) -> None:
    server, url = pretend
    prompts = ["warm", "fine", "refused", "breaks off", "hangs", "also fine", "last"]
    rows: list[Row] = [{"id": f"id of {prompt}", "prompt": prompt} for prompt in prompts]
    rows[5] |= {
        "messages": [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "also fine"},
        ]
    }
    with VllmBench("secret-key", log=tmp_path / "bench.log") as bench:
        started = time.monotonic()
        with pytest.raises(UserError, match="holds 7 different prompts, 9 are needed"):
            measure(bench, tmp_path, url, random_llama, rows, written(seconds_per_rate=2))
        summary = measure(bench, tmp_path, url, random_llama, rows, written())
        seconds = time.monotonic() - started

    assert server.keys == {"Bearer secret-key"}
    asked = [body["messages"][-1]["content"] for body in server.asked]
    assert asked == prompts, "each once, warm-up first, in file order"
    assert server.asked[5]["messages"] == rows[5]["messages"]
    for body in server.asked:
        assert (body["temperature"], body["top_p"], body["seed"]) == (0.0, 1.0, 3)
        assert body["max_completion_tokens"] == 8
        assert "ignore_eos" not in body

    found = {row["request_id"].removeprefix("id of "): row for row in requests_of(tmp_path)}
    assert list(found) == prompts[1:]
    for prompt in ("fine", "also fine", "last"):
        row = found[prompt]
        assert row["ok"]
        assert (row["prompt_tokens"], row["output_tokens"]) == (21, 4)
        assert row["ttft_ms"] == pytest.approx(100, abs=80)
        assert len(row["itl_ms"]) == 3, "the role's chunk is no token"
        assert row["e2el_ms"] == pytest.approx(250, abs=120)
        assert row["tpot_ms"] == pytest.approx(50, abs=30)
        assert row["ttft_ms"] + sum(row["itl_ms"]) == pytest.approx(row["e2el_ms"], abs=5)
    assert found["refused"]["error"] == "failed without a reason"
    assert found["breaks off"]["error"] == "the stream ended without a token count"
    assert found["hangs"]["error"] == "no end within 3.0 s"
    assert found["hangs"]["e2el_ms"] is None

    assert read_summary(tmp_path / "evidence") == summary
    (point,) = summary.points
    assert (point.total, point.ok, point.failed) == (6, 3, 3)
    assert point.e2el_ms["p50"] is None, "half of them failed"
    assert point.e2el_ms["p90"] is None
    # 6 requests after the warm-up, counted by the pretend engine.
    assert point.prefix_cache_hit_rate == pytest.approx(0.25)
    assert point.acceptance_length == pytest.approx(2.5)
    raw = json.loads((tmp_path / "evidence" / "raw" / "step001-1.json").read_text())
    assert raw["spec_decode_acceptance_length"] == pytest.approx(2.5), "vLLM's own, the same"
    assert point.duration_s < summary.seconds < seconds
    assert "secret-key" not in (tmp_path / "bench.log").read_text()


def test_a_server_that_is_not_there_is_no_evidence(random_llama: Path, tmp_path: Path) -> None:
    rows = [{"id": f"p{index}", "prompt": f"prompt {index}"} for index in range(7)]
    with (
        VllmBench("", log=tmp_path / "bench.log") as bench,
        pytest.raises(
            InfrastructureError, match=r"no warm-up request was answered: .*Cannot connect"
        ),
    ):
        measure(bench, tmp_path, "http://127.0.0.1:9", random_llama, rows, written())
    assert not (tmp_path / "evidence" / "summary.json").exists()


# -- the real one ----------------------------------------------------------------------------


def test_real_server_load_and_accuracy(random_llama: Path, tmp_path: Path) -> None:
    parts = generate(7, {"eval": 12, "load": 60})
    items = tmp_path / "eval.jsonl"
    items.write_text(
        "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in parts["eval"]),
        encoding="utf-8",
    )
    profile = load_profile("smoke_cpu")
    sampling = profile.sampling.model_dump(mode="json")
    server = VllmServer(
        random_llama,
        log=tmp_path / "vllm.log",
        served_name="m",
        engine_args={
            "enforce-eager": True,
            "max-model-len": 512,
            "kv-cache-memory-bytes": 64 * 2**20,
            "distributed-executor-backend": "uni",
        },
        env={"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "OMP_NUM_THREADS": "1"},
    )
    with VllmBench(server.api_key, log=tmp_path / "bench.log") as bench, server:
        accuracy = run_job(
            "tasks.engines.lm_eval_run",
            {
                "task_file": str(TASKS_DIR / "freight" / "freight.yaml"),
                "items_file": str(items),
                "items": 12,
                "model": {
                    "kind": "chat",
                    "url": server.url,
                    "served_name": "m",
                    "api_key_env": "KEY_OF_TEST",
                },
                "sampling": sampling,
                "concurrency": 4,
                "metrics": ["hit_rate", "slot_f1", "format_valid", "satisfaction"],
                "out_dir": str(tmp_path / "accuracy"),
                "bundle": "b" * 64,
                "suite": "freight_smoke",
                "engine": "vllm",
            },
            log=tmp_path / "lm_eval.log",
            env={"KEY_OF_TEST": server.api_key},
        )
        before = server.metrics()["vllm:generation_tokens_total"]
        changes = {"warmup_requests": 0, "request_timeout": 60.0}
        summary = measure(
            bench, tmp_path, server.url, random_llama, parts["load"],
            profile.model_copy(update=changes), server.api_key,
        )  # fmt: skip
        generated = server.metrics()["vllm:generation_tokens_total"] - before
    assert accuracy["items_asked"] == accuracy["items_scored"] == 12

    rows = requests_of(tmp_path)
    assert [row["request_id"] for row in rows] == [row["id"] for row in parts["load"][:28]]
    raws = [
        json.loads((tmp_path / "evidence" / "raw" / f"step{number:03d}-1.json").read_text())
        for number in (1, 2, 3)
    ]
    # Weights are random: bytes that are no text come now and then, and no text is no answer.
    answered = [row for row in rows if row["ok"]]
    assert len(answered) > len(rows) / 3
    assert {row["error"] for row in rows} <= {None, "the answer is empty"}
    cut = sampling["max_tokens"] * (len(rows) - len(answered))
    assert sum(row["output_tokens"] for row in answered) + cut == generated, "the engine's count"
    sizes = {row["id"]: len(row["prompt"].encode()) for row in parts["load"]}
    for row in answered:
        # One token per byte, two role tokens and one end token of the chat template, once.
        assert row["prompt_tokens"] == sizes[row["request_id"]] + 3
        # A character of several bytes comes in one chunk.
        assert len(row["itl_ms"]) < row["output_tokens"]
    assert [point.total for point in summary.points] == [4, 8, 16]
    for raw, point in zip(raws, summary.points, strict=True):
        # vLLM's own percentiles are of the answered requests alone.
        mine = [row for row in answered if row["rate"] == point.rate]
        for name in ("ttft", "tpot", "e2el"):
            values = [row[f"{name}_ms"] for row in mine if row[f"{name}_ms"] is not None]
            for percent in (50, 90, 95, 99):
                own = percentile(values, percent)
                assert own == pytest.approx(raw[f"p{percent}_{name}_ms"], rel=1e-6)
        if not point.failed:
            assert point.output_tokens_per_s == pytest.approx(raw["output_throughput"])
        assert point.acceptance_length is None
        # Longest common beginning of two prompts: less than one block of the cache.
        assert point.prefix_cache_hit_rate is not None
        assert point.prefix_cache_hit_rate < 0.2
