"""TTFT and TPOT by the roofline: estimates, not measured, until a benchmark replaces them.

A step of the engine takes as long as the slower of two things: reading bytes from memory, or
multiplying (Williams, Waterman, Patterson 2009, CACM 52(4)). For a decoder that means (Pope et al.
2022, arXiv:2211.05102, section 2.1):

    decode step of B sequences, on each of tp GPUs
        bytes = weights + B x context x (KV bytes of a token)
        flops = 2 x (parameters that work on a token) x B
              + 2 x heads x (size of K + size of V) x context x B
        seconds = max(bytes / (bandwidth x 0.75), flops / (rate x 0.55)) + all-reduces
    prefill of P tokens
        flops = 2 x (the same, without the head) x P
              + 2 x heads x (size of K + size of V) x pairs   (P^2 / 2, the other half is masked)
        seconds = the same max, over as many batches as `max-num-batched-tokens` makes of P

The two shares are assumptions: what kernels reach of a data sheet's number. They are part of the
answer, so that nobody takes an estimate for a measurement. With tensor parallelism every layer adds
up its hidden states twice (ring all-reduce: 2 (tp - 1) / tp of the bytes over a link's one
direction, and a latency for each). A table of embeddings is looked up, so only a head that is tied
to it counts. The prefill of a latent cache (MLA) is counted as not decompressed: too slow.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass

from registry.machines import Machine
from registry.memory_floor import Parts
from registry.shape_parts import LayerShape, ModelShape

MARK = "estimate, not measured"


@dataclass(frozen=True)
class Assumed:
    """What a data sheet does not say; not measured here."""

    memory_share: float = 0.75
    compute_share: float = 0.55
    link_share: float = 0.7
    all_reduce_s: float = 20e-6

    @property
    def document(self) -> dict[str, float]:
        return asdict(self)


ASSUMED = Assumed()


@dataclass(frozen=True)
class Work:
    """A model on one GPU of `tp` (and one stage of `pp`), as the roofline sees it.

    `rate` is of the type that the products are in, operations/s. `parts` are of the fullest GPU.
    """

    shape: ModelShape
    machine: Machine
    parts: Parts
    rate: float | None
    tp: int
    pp: int = 1

    def missing(self) -> list[str]:
        """Numbers of the hardware file without which nothing can be estimated."""
        machine = self.machine
        named = {"bandwidth_gb_s": machine.bandwidth, "compute": self.rate}
        if self.tp > 1:
            named["link_gb_s"] = machine.link
        return [name for name, value in named.items() if not value]


def decode_step(work: Work, sequences: float, context: float) -> float | None:
    """Seconds of one step in which each sequence gets one token; None: a number is missing."""
    shape, parts = work.shape, work.parts
    if work.missing() or work.rate is None or work.machine.bandwidth is None:
        return None
    cached = sequences * sum(_in_window(layer, context) for layer in shape.layers)
    cached *= parts.kv_bytes_per_token / len(shape.layers)
    # A state of linear attention is read and written, two bytes a value, however long the context.
    states = sum(layer.state for layer in shape.layers) / (work.tp * work.pp)
    cached += sequences * states * 2 * 2
    flops = 2.0 * (_layers(shape) + _head(shape)) * sequences
    flops += sequences * sum(
        _attention(shape, one, _in_window(one, context)) for one in shape.layers
    )
    flops /= work.tp * work.pp
    one_stage = max(
        (_read(work, sequences) + cached) / (work.machine.bandwidth * ASSUMED.memory_share),
        flops / (work.rate * ASSUMED.compute_share),
    )
    # The stages of a pipeline work one after the other on a sequence's next token.
    return one_stage * work.pp + _all_reduces(work, sequences)


def prefill(work: Work, tokens: float, batch: int) -> float | None:
    """Seconds until a prompt of so many tokens is computed, alone; None: a number is missing."""
    shape = work.shape
    if work.missing() or work.rate is None or work.machine.bandwidth is None:
        return None
    flops = 2.0 * (_layers(shape) * tokens + _head(shape))
    flops += sum(_attention(shape, one, _pairs(one, tokens)) for one in shape.layers)
    flops /= work.tp * work.pp
    batches = math.ceil(tokens / batch)
    one_stage = max(
        batches * _read(work, min(tokens, batch)) / (work.machine.bandwidth * ASSUMED.memory_share),
        flops / (work.rate * ASSUMED.compute_share),
    )
    return one_stage * work.pp + _all_reduces(work, tokens, times=batches)


@dataclass(frozen=True)
class Estimate:
    """Of one replica, milliseconds. `prefill_share`: of its time, at the asked arrival rate."""

    ttft_ms: float | None
    tpot_ms: float | None
    e2el_ms: float | None
    prefill_share: float | None
    note: str = MARK

    @property
    def document(self) -> dict[str, float | str | None]:
        return asdict(self)


@dataclass(frozen=True)
class Load:
    """What one replica is asked: so many sequences at once, arriving at `rate` per second.

    `context` is the mean length in the cache, `prompt` and `output` the lengths that a limit is
    meant for, `mean_prompt` what arrives on average.
    """

    sequences: float
    context: float
    prompt: float
    output: float | None
    mean_prompt: float
    rate: float | None = None


def estimate(work: Work, load: Load, batch: int) -> Estimate:
    """TTFT, TPOT and E2EL of a load.

        share = rate x prefill of a mean prompt        (of the engine's time, no longer decoding)
        TPOT  = decode step / (1 - share)
        TTFT  = prefill x (1 + share / (2 (1 - share))) + one decode step
        E2EL  = TTFT + (output - 1) x TPOT

    The wait is that of an M/D/1 queue. Without a rate the share is 0. From a share of 1 on the
    engine is overrun and every time is infinite.
    """
    missing = work.missing()
    step = decode_step(work, load.sequences, load.context)
    first = prefill(work, load.prompt, batch)
    mean = prefill(work, load.mean_prompt, batch)
    if step is None or first is None or mean is None:
        note = f"no estimate: hardware {work.machine.name} has no {', '.join(missing)}"
        return Estimate(None, None, None, None, note)
    share = (load.rate or 0.0) * mean
    if share >= 1:
        return Estimate(math.inf, math.inf, math.inf, share)
    tpot = step / (1 - share)
    ttft = first * (1 + share / (2 * (1 - share))) + step
    whole = None
    if load.output is not None:
        whole = 1000 * (ttft + max(0.0, load.output - 1) * tpot)
    return Estimate(ttft * 1000, tpot * 1000, whole, share)


def estimate_apart(
    prefilling: Work, decoding: Work, load: Load, engines: int, batch: int, transfer_s: float | None
) -> Estimate:
    """As `estimate`, where some engines compute prompts and others generate.

        share = rate x prefill of a mean prompt / prefill engines
        TPOT  = decode step                              (no prompt is computed in between)
        TTFT  = prefill x (1 + share / (2 (1 - share))) + transfer + one decode step

    `load.sequences` are those of one decode engine, `load.rate` that of all prefill `engines`
    together. `transfer_s`: of the prompt's cache, alone on the link; None: not known, and then
    neither are TTFT and E2EL.
    """
    step = decode_step(decoding, load.sequences, load.context)
    first = prefill(prefilling, load.prompt, batch)
    mean = prefill(prefilling, load.mean_prompt, batch)
    if step is None or first is None or mean is None:
        missing = ", ".join(dict.fromkeys([*prefilling.missing(), *decoding.missing()]))
        note = f"no estimate: hardware {decoding.machine.name} has no {missing}"
        return Estimate(None, None, None, None, note)
    share = (load.rate or 0.0) * mean / engines
    if share >= 1:
        return Estimate(math.inf, step * 1000, math.inf, share)
    if transfer_s is None:
        note = f"{MARK}; the time of the transfer is not known, so TTFT and E2EL are not"
        return Estimate(None, step * 1000, None, share, note)
    ttft = first * (1 + share / (2 * (1 - share))) + transfer_s + step
    whole = None
    if load.output is not None:
        whole = 1000 * (ttft + max(0.0, load.output - 1) * step)
    return Estimate(ttft * 1000, step * 1000, whole, share)


def transfer_seconds(size: int, machine: Machine, pairs: int) -> float | None:
    """Of so many bytes between GPUs of one machine, over `pairs` of them side by side.

    One direction of a link, at the share of it that is assumed. None: the link is not known, or
    there is none; between machines it is the network that counts, of which no file says anything.
    """
    if machine.link is None:
        return None
    return size / (pairs * machine.link / 2 * ASSUMED.link_share)


def _in_window(layer: LayerShape, context: float) -> float:
    return min(context, layer.window) if layer.window else context


def _pairs(layer: LayerShape, tokens: float) -> float:
    """Of a token and one that it looks back at, in a prompt of `tokens`."""
    window = _in_window(layer, tokens)
    return window**2 / 2 + (tokens - window) * window


def _attention(shape: ModelShape, layer: LayerShape, pairs: float) -> float:
    """Operations on pairs of tokens: scores and values, a product and a sum each."""
    values = layer.v_head_dim or layer.head_dim
    return 2 * shape.heads * (layer.head_dim + values) * pairs


def _layers(shape: ModelShape) -> int:
    return sum(one.active_parameters for layer in shape.layers for one in layer.weights)


def _head(shape: ModelShape) -> int:
    return shape.vocab * shape.hidden


def _read(work: Work, tokens: float) -> float:
    """Bytes of weights on one GPU that a batch of tokens reads.

    Not the table of embeddings, of which a row a token is read. An expert of E is left out by one
    token with 1 - k / E, if all are asked equally: those that no token asks stay where they are.
    """
    shape = work.shape
    total = read = 0.0
    for weight in shape.weights:
        total += weight.parameters
        asked = 0.0 if weight.kind == "embedding" and not shape.tied else 1.0
        if weight.count > weight.active:
            asked = 1 - (1 - weight.active / weight.count) ** max(1.0, tokens)
        read += weight.parameters * asked
    return work.parts.weights_bytes * read / total


def _all_reduces(work: Work, tokens: float, times: int = 1) -> float:
    """Two of each layer, of 16-bit hidden states, over one direction of a link."""
    if work.tp == 1 or work.machine.link is None:
        return 0.0
    one = tokens * work.shape.hidden * 2 * 2 * (work.tp - 1) / work.tp
    seconds = one / (work.machine.link / 2 * ASSUMED.link_share)
    return 2 * len(work.shape.layers) * (seconds + times * ASSUMED.all_reduce_s)
