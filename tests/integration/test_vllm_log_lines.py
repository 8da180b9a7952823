"""vLLM's own request logger writes lines that `pilotage profile` reads; no server is started."""

from __future__ import annotations

import subprocess
from pathlib import Path

from registry.settings import settings
from tasks.traffic_logs import Options, read_log

WRITE = """
import logging, sys
import vllm.logger as ours
from vllm.entrypoints.serve.utils.request_logger import RequestLogger
from vllm.logging_utils import NewLineFormatter
from vllm.sampling_params import SamplingParams

logging.setLogRecordFactory(ours._VllmLogRecordFactory(logging.getLogRecordFactory()))
ours.set_vllm_process_name("ApiServer")
handler = logging.FileHandler(sys.argv[1])
handler.setFormatter(NewLineFormatter(ours._FORMAT, datefmt=ours._DATE_FORMAT))
root = logging.getLogger("vllm")
root.handlers, root.propagate = [handler], False
root.setLevel(logging.DEBUG)
log = RequestLogger(max_log_len=None)
params = SamplingParams(max_tokens=16)
prompt = "two\\nlines, prompt_token_ids: [1],"
log.log_inputs("chatcmpl-a", prompt, [1, 2, 3, 4], None, params, None)
log.log_outputs("chatcmpl-a", "he\\nllo", [7, 8, 9], "stop")
log.log_inputs("chatcmpl-b", "x", [1, 2], None, params, None)
log.log_outputs("chatcmpl-b", "he", [7, 8], None, is_streaming=True, delta=True)
log.log_outputs("chatcmpl-b", "y", [9, 10, 11], None, is_streaming=True, delta=True)
log.log_outputs("chatcmpl-b", "hey", None, "streaming_complete", is_streaming=True)
"""


def test_lines_of_the_installed_vllm(tmp_path: Path) -> None:
    path = tmp_path / "server.log"
    subprocess.run(
        [str(settings().serve_python), "-c", WRITE, str(path)],
        check=True, capture_output=True, timeout=120,
    )  # fmt: skip
    log = read_log([path], Options())
    assert log.left_out == {}
    lengths = zip(log.requests.prompt.tolist(), log.requests.output.tolist(), strict=True)
    assert sorted(lengths) == [(2, 5), (4, 3)]
