"""What is certain about a candidate of a release before its engine starts. Pure.

Two questions: is it certain that a machine cannot serve it, and how many KV tokens will the engine
print. Only what is counted refuses: weights and the KV cache of *one* sequence of `max-model-len`
against *all* memory, and formats that vLLM has no kernel for. Estimates and the reserve refuse
nothing, and where an engine argument or an architecture is not understood nothing is said at all.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from math import ceil
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from registry.digests import digest_of
from registry.engine_memory import PlannedMemory
from registry.errors import UserError
from registry.format_support import ENGINE, kv_problem, method_problem, support_of
from registry.kv_cache import MAX_BATCHED_TOKENS, block_size, kv_dtype_of, kv_tokens
from registry.machines import GIB, Machine
from registry.memory_floor import FORMATS, MemoryFloor, Parts, floor_of
from registry.planned_memory import planned_memory
from registry.quantization_configs import format_of
from registry.shape_parts import ModelShape

PLAN_FILE = "plan.json"
APART = 0.05
"""More than this share between planned and printed KV tokens is said."""

UTILIZATION = 0.92
"""vLLM's own `gpu-memory-utilization`."""

NO_MEMORY = frozenset(
    (
        "allow-deprecated-quantization",
        "enforce-eager",
        "distributed-executor-backend",
        "disable-uvicorn-access-log",
        "uvicorn-log-level",
        "seed",
        "enable-chunked-prefill",
        "disable-log-stats",
        "enable-log-requests",
        "enable-log-outputs",
        "enable-auto-tool-choice",
        "tool-call-parser",
        "reasoning-parser",
        "generation-config",
        "max-logprobs",
        "enable-prefix-caching",
        "default-chat-template-kwargs",
        "scheduling-policy",
        "stream-interval",
    )
)
"""Engine arguments that change neither weights nor the cache of a sequence."""

VARIABLES = frozenset(
    (
        "VLLM_ENABLE_V1_MULTIPROCESSING",
        "VLLM_LOGGING_LEVEL",
        "VLLM_CONFIGURE_LOGGING",
        "VLLM_CPU_OMP_THREADS_BIND",
        "VLLM_WORKER_MULTIPROC_METHOD",
        "VLLM_CPU_KVCACHE_SPACE",
    )
)
KV_SPACE = "VLLM_CPU_KVCACHE_SPACE"

_SIXTEEN = {"auto": None, "bfloat16": "bfloat16", "float16": "float16", "half": "float16"}


class Unplanned(Exception):
    """Nothing is certain; the text says why."""


class MemoryPlan(BaseModel):
    """Bytes are of the fullest GPU, or of the CPU. `refusal`: why it cannot run, empty: it may.

    `unknown`: why nothing is said; then all numbers are null.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    schema_version: int = 1
    candidate: str
    hardware: str | None = Field(description="Hardware file, or `this machine`.")
    hardware_memory_bytes: int | None = Field(default=None, description="Of one GPU, or the CPU.")
    format: str | None = None
    kv_dtype: str | None = None
    draft: bool | None = Field(default=None, description="Whether its draft is counted.")
    max_model_len: int | None = Field(default=None, description="Null: the engine's own choice.")
    max_num_seqs: int | None = None
    tensor_parallel_size: int | None = None
    pipeline_parallel_size: int | None = None
    per_gpu: dict[str, int] | None = Field(
        default=None, description="The floor of one sequence of max-model-len, by its parts."
    )
    floor_bytes: int | None = Field(
        default=None, description="Of max-num-seqs sequences, reserve and estimates included."
    )
    least_bytes: int | None = Field(
        default=None, description="Weights and one sequence: below this it cannot run."
    )
    kv_cache_tokens: int | None = Field(
        default=None, description="That the engine will print; null: not known."
    )
    memory: PlannedMemory | None = Field(
        default=None, description="What its processes or a GPU will hold. Null: not known."
    )
    exact: bool = Field(
        default=False,
        description="`kv_cache_tokens` is counted, for an engine that was held against it: on a "
        "CPU, keys and values in 16 bit. On a GPU it was not measured here.",
    )
    refusal: str = ""
    unknown: str = ""
    notes: list[str] = Field(default_factory=list)
    topology: str = Field(
        default="",
        exclude_if=lambda words: not words,
        description="Of prefill and decode apart; all numbers are then those of a decode engine.",
    )
    roles: dict[str, MemoryPlan] = Field(
        default_factory=dict,
        exclude_if=lambda roles: not roles,
        description="The plan of one engine of each role.",
    )

    @property
    def digest(self) -> str:
        return digest_of(self)

    @property
    def words(self) -> str:
        """One line for a log or a dry run."""
        if self.refusal or self.unknown:
            return self.refusal or f"nothing is certain: {self.unknown}"
        tokens = f"{self.kv_cache_tokens} KV tokens" if self.kv_cache_tokens else "KV tokens open"
        how = "" if self.exact or not self.kv_cache_tokens else " (an estimate)"
        least, has = self.least_bytes or 0, self.hardware_memory_bytes or 0
        return f"at least {_gib(least)} of {_gib(has)} on {self.hardware}; {tokens}{how}"


@dataclass(frozen=True)
class EngineMemory:
    """What a serve recipe says about memory; None: the engine's own choice."""

    max_len: int | None = None
    sequences: int | None = None
    batched: int | None = None
    utilization: float = UTILIZATION
    tp: int = 1
    pp: int = 1
    block: int | None = None
    kv_dtype: str = "auto"
    kv_bytes: int | None = None
    dtype: str | None = None
    asynchronous: bool = True
    prefixes: bool = True
    own_worker: bool = True
    """Of a CPU: whether the worker has a process of its own, the engine's default."""


def engine_memory(args: Mapping[str, Any], env: Mapping[str, str], *, cpu: bool) -> EngineMemory:
    """Raises `Unplanned` for an argument or variable whose effect is not known here."""
    odd = [name for name in args if name not in NO_MEMORY and name not in _READ]
    odd += [name for name in env if name.startswith("VLLM_") and name not in VARIABLES]
    if odd:
        raise Unplanned(f"what {', '.join(odd)} does to memory is not known here")
    kv_bytes = _whole(args, "kv-cache-memory-bytes")
    space = env.get(KV_SPACE, "")
    if cpu and space:
        # vLLM takes it before the argument.
        kv_bytes = (_whole({KV_SPACE: space}, KV_SPACE) or 0) * GIB
    dtype = str(args.get("dtype", "auto"))
    if dtype not in _SIXTEEN:
        raise Unplanned(f"dtype {dtype} is not counted here")
    utilization = args.get("gpu-memory-utilization", UTILIZATION)
    if not isinstance(utilization, int | float) or not 0 < utilization <= 1:
        raise Unplanned(f"gpu-memory-utilization {utilization!r} is no share")
    return EngineMemory(
        max_len=_whole(args, "max-model-len"),
        sequences=_whole(args, "max-num-seqs"),
        batched=_whole(args, "max-num-batched-tokens"),
        utilization=float(utilization),
        tp=_whole(args, "tensor-parallel-size") or 1,
        pp=_whole(args, "pipeline-parallel-size") or 1,
        block=_whole(args, "block-size"),
        kv_dtype=str(args.get("kv-cache-dtype", "auto")),
        kv_bytes=kv_bytes,
        dtype=_SIXTEEN[dtype],
        asynchronous=not cpu and args.get("async-scheduling", True) is not False,
        prefixes=args.get("enable-prefix-caching", True) is not False,
        own_worker=env.get("VLLM_ENABLE_V1_MULTIPROCESSING") != "0",
    )


_READ = frozenset(
    (
        "max-model-len",
        "max-num-seqs",
        "max-num-batched-tokens",
        "gpu-memory-utilization",
        "block-size",
        "dtype",
        "tensor-parallel-size",
        "pipeline-parallel-size",
        "kv-cache-dtype",
        "kv-cache-memory-bytes",
        "async-scheduling",
    )
)


def _whole(args: Mapping[str, Any], name: str) -> int | None:
    """A whole number above zero; None where it is not given."""
    value = args.get(name)
    if value is None:
        return None
    text = str(value)
    if isinstance(value, bool) or not text.isdecimal() or int(text) < 1:
        # vLLM also knows `auto`, -1 and `512M`.
        raise Unplanned(f"{name} {text[:40]} is no whole number")
    return int(text)


def memory_plan(
    candidate: str,
    shape: ModelShape,
    draft: ModelShape | None,
    args: Mapping[str, Any],
    env: Mapping[str, str],
    machine: Machine,
    engine_version: str,
) -> MemoryPlan:
    """The plan of one candidate on one machine; what is not understood is in `unknown`."""
    try:
        engine = engine_memory(args, env, cpu=machine.is_cpu)
        return _planned(candidate, shape, draft, engine, machine, engine_version)
    except Unplanned as why:
        return not_planned(candidate, str(why), machine.name)
    except UserError as error:
        # Of an architecture that is not known, or of numbers that the engine will refuse itself.
        problem = error.problems[0]
        return not_planned(candidate, f"{problem.where} {problem.what}", machine.name)


def not_planned(candidate: str, why: str, hardware: str | None = None) -> MemoryPlan:
    return MemoryPlan(candidate=candidate, hardware=hardware, unknown=why)


def _planned(
    candidate: str,
    shape: ModelShape,
    draft: ModelShape | None,
    engine: EngineMemory,
    machine: Machine,
    engine_version: str,
) -> MemoryPlan:
    if any(layer.attention == "linear" for layer in shape.layers) and not engine.prefixes:
        raise Unplanned("states without prefix caching are not counted here")
    block = engine.block or block_size(shape, cpu=machine.is_cpu)
    how: dict[str, Any] = {
        "format": "auto",
        "kv_dtype": engine.kv_dtype,
        "context": engine.max_len or 1,
        "tp": engine.tp,
        "pp": engine.pp,
        "draft": draft,
        "block": block,
        "max_batched_tokens": engine.batched,
        "eager": machine.is_cpu,
    }
    floor = floor_of(shape, concurrency=1, **how)
    all_of_them = None
    if engine.sequences and engine.max_len:
        all_of_them = floor_of(shape, concurrency=engine.sequences, **how).per_gpu
    full = all_of_them.floor_bytes if all_of_them is not None else None
    kv_dtype = kv_dtype_of(shape, engine.kv_dtype)
    name = (
        shape.quantization.format.name
        if shape.quantization
        else FORMATS[engine.dtype or shape.dtype].name
    )
    tokens = _tokens(shape, draft, engine, machine, block, floor)
    least = max(_least(parts, shape, engine.tp) for parts in floor.stages)
    notes = []
    if engine.max_len is None:
        notes.append("max-model-len is the engine's own choice: one token is counted")
    return MemoryPlan(
        candidate=candidate,
        hardware=machine.name,
        hardware_memory_bytes=machine.memory_bytes,
        format=name,
        kv_dtype=kv_dtype,
        draft=draft is not None,
        max_model_len=engine.max_len,
        max_num_seqs=engine.sequences,
        tensor_parallel_size=engine.tp,
        pipeline_parallel_size=engine.pp,
        per_gpu=asdict(floor.per_gpu),
        floor_bytes=full,
        least_bytes=least,
        kv_cache_tokens=tokens,
        memory=planned_memory(
            all_of_them or floor.per_gpu,
            machine,
            gpus=engine.tp * engine.pp,
            pieces=shape.vocab,
            kv_bytes=engine.kv_bytes,
            utilization=engine.utilization,
            own_worker=engine.own_worker,
            full=all_of_them is not None,
        ),
        exact=tokens is not None and machine.is_cpu and kv_dtype in ("bfloat16", "float16"),
        refusal=_memory_problem(engine, machine, floor, least)
        or _kernel_problem(shape, engine, machine, kv_dtype, engine_version),
        notes=notes,
    )


def _least(parts: Parts, shape: ModelShape, tp: int) -> int:
    """Bytes that are certain. A head that is quantized too was counted in 16 bit, so it is not."""
    found = parts.weights_bytes + parts.draft_weights_bytes + parts.kv_bytes + parts.draft_kv_bytes
    if shape.quantization is not None and format_of(shape.quantization, ("lm_head",)) is not None:
        found -= sum(2 * one.out * one.columns // tp for one in shape.last if one.kind == "head")
    return max(0, found)


def _memory_problem(engine: EngineMemory, machine: Machine, floor: MemoryFloor, least: int) -> str:
    cache = max(parts.kv_bytes + parts.draft_kv_bytes for parts in floor.stages)
    if engine.kv_bytes is not None and cache > engine.kv_bytes:
        # What would do has a block more, which is nobody's.
        would = max(
            parts.kv_bytes + parts.draft_kv_bytes + parts.kv_slack_bytes for parts in floor.stages
        )
        return (
            f"too little memory: one sequence of {engine.max_len or 1} tokens takes {_gib(cache)} "
            f"of KV cache, and the serve recipe gives {_gib(engine.kv_bytes)}; "
            f"kv-cache-memory-bytes {would} would do"
        )
    if least > machine.memory_bytes:
        parts = floor.per_gpu
        each = "" if engine.tp * engine.pp == 1 else f" on each of {engine.tp * engine.pp} GPUs"
        weights = parts.weights_bytes + parts.draft_weights_bytes
        # With the reserve and the estimates, in the share of a GPU that the engine takes.
        would = ceil(parts.floor_bytes / (1 if machine.is_cpu else engine.utilization))
        return (
            f"too little memory: it takes at least {_gib(least)}{each} ({_gib(weights)} of weights "
            f"and {_gib(parts.kv_bytes + parts.draft_kv_bytes)} of KV cache for one sequence of "
            f"{engine.max_len or 1} tokens), and {machine.title} has "
            f"{_gib(machine.memory_bytes)}; {_gib(would)} would do, by the plan"
        )
    return ""


def _kernel_problem(
    shape: ModelShape, engine: EngineMemory, machine: Machine, kv_dtype: str, version: str
) -> str:
    """Of GPUs only: on a CPU vLLM emulates much, which its own log tells once it has started."""
    known = version.startswith(f"{ENGINE}.") and machine.capability is not None
    if machine.is_cpu or not known or shape.active_parameters != shape.parameters:
        return ""
    if problem := method_problem(shape.quantization, machine):
        return f"no kernel on {machine.title}: {problem}"
    if shape.quantization is not None:
        support = support_of(shape.quantization.format.name, machine)
    else:
        # Told no type, the engine falls back to float16 where bfloat16 is missing.
        support = support_of("bf16" if engine.dtype == "bfloat16" else "fp16", machine)
    if support.unit is None:
        return f"no kernel on {machine.title}: {support.reason}"
    if not kv_dtype.startswith("fp8"):
        return ""
    widest = max(layer.head_dim for layer in shape.layers)
    problem = kv_problem(kv_dtype, machine, mla=shape.latent, head_dim=widest)
    return f"no kernel on {machine.title}: {problem}" if problem else ""


def _tokens(
    shape: ModelShape,
    draft: ModelShape | None,
    engine: EngineMemory,
    machine: Machine,
    block: int,
    floor: MemoryFloor,
) -> int | None:
    """KV tokens that the engine will print. On a GPU without `kv-cache-memory-bytes` what is left
    beside weights and the estimates of activations and graphs."""
    if engine.max_len is None:
        return None
    windows = any(layer.window is not None for layer in shape.layers)
    states = any(layer.attention == "linear" for layer in shape.layers)
    if (windows and engine.batched is None) or (states and machine.is_cpu):
        return None
    budget = engine.kv_bytes
    if budget is None:
        if machine.is_cpu:
            return None
        parts = floor.per_gpu
        taken = parts.weights_bytes + parts.engine_bytes + parts.draft_weights_bytes
        taken += parts.activation_bytes + parts.graph_bytes
        budget = max(0, int(machine.memory_bytes * engine.utilization) - taken)
    tokens = kv_tokens(
        shape,
        budget,
        max_len=engine.max_len,
        kv_dtype=engine.kv_dtype,
        tp=engine.tp,
        pp=engine.pp,
        block=block,
        draft=draft,
        max_batched_tokens=engine.batched or MAX_BATCHED_TOKENS,
        batches=2 if engine.asynchronous else 1,
    )
    # 0: the engine's own refusal, which it words better.
    return tokens or None


def apart(planned: int | None, printed: int | None) -> float | None:
    """Share by which the engine's KV tokens differ from the plan's; None: one is not known."""
    if not planned or printed is None:
        return None
    return (printed - planned) / planned


def _gib(size: int) -> str:
    if size < GIB / 10:
        return f"{size / (1 << 20):.2f} MiB"
    return f"{size / GIB:.2f} GiB"
