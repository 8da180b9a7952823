"""The text log of vLLM 0.32: lines as its request logger wrote them."""

from __future__ import annotations

import os
from datetime import UTC, datetime
from pathlib import Path

import pytest

from registry.errors import UserError
from tasks.profiling import profile_logs
from tasks.traffic_logs import Options, read_log
from tasks.vllm_logs import rows_of

HEAD = "(ApiServer pid=63) DEBUG 12-31 23:59:5{0} [request_logger.py:55] "
LINES = [
    "INFO 12-31 23:59:40 [api_server.py:1] Starting vLLM API server",
    # The prompt quotes a line of a log; the ids are the last that stand there.
    HEAD.format(1) + "Request chatcmpl-a1 details: prompt: \"hi\\nRequest x details: prompt: 'q', "
    'prompt_token_ids: [1]", prompt_token_ids: [1, 2, 3, 4, 5], prompt_embeds shape: None.',
    "(ApiServer pid=63) INFO 12-31 23:59:51 [request_logger.py:65] Received request chatcmpl-a1: "
    "params: SamplingParams(n=1), lora_request: None.",
    "\x1b[0;36m(ApiServer pid=63)\x1b[0;0m \x1b[37mDEBUG\x1b[0m \x1b[90m12-31 23:59:52\x1b[0m "
    "\x1b[90m[request_logger.py:55]\x1b[0m Request chatcmpl-b2 details: prompt: 'x', "
    "prompt_token_ids: [1, 2], prompt_embeds shape: None.",
    HEAD.format(3) + "Generated response chatcmpl-b2 (streaming delta) details: "
    "output_token_ids: [7, 8]",
    HEAD.format(4) + "Generated response chatcmpl-a1 details: output_token_ids: [7, 8, 9]",
    "(ApiServer pid=63) DEBUG 01-01 00:00:02 [request_logger.py:101] Generated response "
    "chatcmpl-b2 (streaming delta) details: output_token_ids: [9]",
    "(ApiServer pid=63) DEBUG 01-01 00:00:02 [request_logger.py:101] Generated response "
    "chatcmpl-b2 (streaming complete) details: output_token_ids: None",
    "(ApiServer pid=63) DEBUG 01-01 00:00:03 [request_logger.py:55] Request chatcmpl-c3 details: "
    "prompt: 'x', prompt_token_ids: [1], prompt_embeds shape: None.",
]


def test_rows_of_a_log_over_new_year() -> None:
    assert rows_of(LINES, 2026) == [
        (2, ["chatcmpl-a1", "2025-12-31 23:59:51", "5", "3", "2025-12-31 23:59:54"]),
        (4, ["chatcmpl-b2", "2025-12-31 23:59:52", "2", "3", "2026-01-01 00:00:02"]),
        (9, ["chatcmpl-c3", "2026-01-01 00:00:03", "1", "", ""]),
    ]


def test_a_log_is_profiled_in_the_servers_zone(tmp_path: Path) -> None:
    path = tmp_path / "server.log"
    path.write_text("\n".join(LINES) + "\n")
    written = datetime(2026, 1, 1, 12, tzinfo=UTC).timestamp()
    os.utime(path, (written, written))
    log = read_log([path], Options(timezone="Asia/Shanghai", bad_rows=0.5))
    assert log.requests.latency is not None
    assert log.requests.latency.tolist() == [3_000_000, 10_000_000]
    # The third was still running when the log ended.
    assert log.left_out == {"output_tokens: missing": 1}
    assert log.examples == [f"{path}: line 9: output_tokens = ''"]
    assert (
        log.requests.arrived[0] == datetime(2025, 12, 31, 15, 59, 51, tzinfo=UTC).timestamp() * 1e6
    )
    found = profile_logs([path], bad_rows=0.5).profile
    assert found.peak_concurrency == 2
    assert any("no year" in note for note in found.notes)


def test_a_log_at_info_has_no_token_counts(tmp_path: Path) -> None:
    path = tmp_path / "server.log"
    path.write_text(LINES[2] + "\n")
    with pytest.raises(UserError, match=r"holds no token counts.*\n.*VLLM_LOGGING_LEVEL=DEBUG"):
        read_log([path], Options())
