"""What `plan` prints for people."""

from __future__ import annotations

from typing import Any

from registry.topology import Disaggregated

GIB = 1 << 30

PARTS = {
    "weights_bytes": "weights",
    "engine_bytes": "the engine's own copies and padding",
    "kv_bytes": "KV cache",
    "kv_slack_bytes": "blocks beside it",
    "draft_weights_bytes": "draft",
    "draft_kv_bytes": "the draft's KV cache",
    "activation_bytes": "activations (estimate)",
    "graph_bytes": "CUDA graphs (estimate)",
    "reserve_bytes": "reserve, 5 %",
    "floor_bytes": "floor",
}


def plan_text(document: dict[str, Any]) -> str:
    lines = [
        f"{document['model']}: {document['parameters'] / 1e9:.2f} billion parameters, "
        f"{document['format']}, KV cache {document['kv_dtype']}, trained for "
        f"{document['trained_length']} tokens",
        f"{document['concurrency']} sequences of {document['context']} tokens "
        f"({document['demand']['source']})",
        "",
        *_floor_lines(document),
        "",
        *_fit_lines(document),
        *_ruled_lines(document),
        *_current_lines(document),
    ]
    if document["notes"]:
        lines += ["", *(f"note: {note}" for note in document["notes"])]
    return "\n".join(lines)


def together_text(document: dict[str, Any]) -> str:
    """Several models on the same GPUs."""
    lines = [
        f"{one['model']}: {one['concurrency']} sequences of {one['context']} tokens, "
        f"{one['format']}: {one['floor_bytes'] / GIB:.2f} GiB"
        for one in document["models"]
    ]
    lines.append("")
    for fit in document["fits"]:
        cost, currency = fit["cost_per_month"], fit["currency"]
        price = "" if cost is None else f", {cost:.0f} {currency} a month"
        lines.append(f"{fit['hardware']}, {fit['gpus']} GPU(s){price}")
        for engine in fit["engines"]:
            words = " ".join(f"--{name} {value}" for name, value in engine["engine_args"].items())
            lines.append(f"  {engine['model']}, {engine['format']}: vllm serve ... {words}")
    if not document["fits"]:
        lines.append("Nothing fits.")
    lines += _ruled_lines(document)
    lines += ["", *(f"note: {note}" for note in document["notes"])]
    return "\n".join(lines)


def parts_text(document: dict[str, Any]) -> str:
    """Prefill and decode apart: both roles, all GPUs, and what a request moves."""
    topology = Disaggregated.model_validate(document["topology"])
    lines = [
        f"{document['model']}: {document['parameters'] / 1e9:.2f} billion parameters, "
        f"{document['format']}, KV cache {document['kv_dtype']}, trained for "
        f"{document['trained_length']} tokens",
        topology.words,
        f"{document['concurrency']} sequences of {document['context']} tokens "
        f"({document['demand']['source']})",
        "",
    ]
    fits = document["fits"]
    if fits:
        lines += _parts_table(fits)
    else:
        lines.append("Nothing fits.")
    lines += _ruled_lines(document)
    lines += ["", *(f"note: {note}" for note in document["notes"])]
    return "\n".join(lines)


def _parts_table(fits: list[dict[str, Any]]) -> list[str]:
    lines = [
        f"{'hardware':<18}{'format':<13}{'GPUs':>5}{'prefill GiB':>13}{'decode GiB':>12}"
        f"{'most seqs':>11}{'moved MiB':>11}{'ms':>7}{'TTFT ms':>9}{'TPOT ms':>9}{'a month':>12}"
    ]
    for fit in fits:
        floors = {role: one["per_gpu"]["floor_bytes"] / GIB for role, one in fit["roles"].items()}
        cost, found, moved = fit["cost_per_month"], fit["estimate"], fit["transfer"]
        price = "-" if cost is None else f"{cost:.0f} {fit['currency']}"
        lines.append(
            f"{fit['hardware']:<18}{fit['format']:<13}{fit['gpus']:>5}{floors['prefill']:>13.2f}"
            f"{floors['decode']:>12.2f}{fit['max_concurrency']:>11}"
            f"{moved['bytes_per_request'] / 2**20:>11.1f}{_number(moved['ms'], 1):>7}"
            f"{_number(found['ttft_ms'], 0):>9}{_number(found['tpot_ms'], 1):>9}{price:>12}"
        )
    return [
        *lines,
        "GiB: the floor of a GPU of each role. moved: the cache of one prompt, and its time.",
        "ms, TTFT and TPOT: estimate, not measured (docs/capacity.md).",
    ]


def _floor_lines(document: dict[str, Any]) -> list[str]:
    gpus = document["tp"] * document["pp"]
    head = f"{'GiB':<38}{'all GPUs':>12}" if gpus > 1 else f"{'GiB':<38}{'one GPU':>12}"
    lines = [head + (f"{'fullest GPU':>14}" if gpus > 1 else "")]
    for key, name in PARTS.items():
        if not document[key]:
            continue
        line = f"{name:<38}{document[key] / GIB:>12.2f}"
        lines.append(line + (f"{document['per_gpu'][key] / GIB:>14.2f}" if gpus > 1 else ""))
    lines.append(
        f"KV cache of a token: {document['kv_bytes_per_token']} bytes; weights from "
        f"{document['weights_from']}"
    )
    if "extremes" in document:
        extreme = document["extremes"]
        lines.append(
            f"sized by the extremes ({extreme['concurrency']} sequences of {extreme['context']} "
            f"tokens) it would be {extreme['floor_bytes'] / GIB:.2f} GiB"
        )
    return lines


def _fit_lines(document: dict[str, Any]) -> list[str]:
    fits = document["fits"]
    if not fits:
        least = document["least_memory"]
        lines = ["Nothing fits."]
        if least is not None:
            need = least["gpu_memory_bytes"] / GIB
            lines.append(
                f"The least that would do: {least['tp']} GPU(s) of {need:.2f} GiB, in "
                f"{least['format']}."
            )
        return lines
    lines = [
        f"{'hardware':<18}{'format':<13}{'tp':>3}{'pp':>3}{'replicas':>9}{'floor GiB':>11}"
        f"{'most seqs':>11}{'TTFT ms':>9}{'TPOT ms':>9}{'E2EL ms':>10}{'a month':>12}"
    ]
    shown = _cheapest(fits)
    for fit in shown:
        found = _times(fit)
        cost, currency = fit["cost_per_month"], fit["currency"]
        price = "-" if cost is None else f"{cost:.0f} {currency}"
        lines.append(
            f"{fit['hardware']:<18}{fit['format']:<13}{fit['tp']:>3}{fit['pp']:>3}"
            f"{fit['replicas']:>9}{fit['per_gpu']['floor_bytes'] / GIB:>11.2f}"
            f"{fit['max_concurrency']:>11}{_number(found.get('ttft_ms'), 0):>9}"
            f"{_number(found.get('tpot_ms'), 1):>9}{_number(found.get('e2el_ms'), 0):>10}"
            f"{price:>12}{'  measured' if found.get('measured') else ''}"
        )
    measured = [fit for fit in shown if _times(fit).get("measured")]
    other = " of the other rows" if measured else ""
    lines.append(f"TTFT, TPOT and E2EL{other}: estimate, not measured (docs/capacity.md).")
    lines += [_measured_words(fit) for fit in measured]
    if len(shown) < len(fits):
        lines.append(
            f"Of each hardware and format the cheapest; {len(fits) - len(shown)} more in --json."
        )
    best = fits[0]
    words = " ".join(f"--{name} {value}" for name, value in best["engine_args"].items())
    lines += ["", f"{best['hardware']}, {best['format']}: vllm serve ... {words}"]
    said: dict[str, list[str]] = {}
    for fit in shown:
        for note in fit["notes"]:
            said.setdefault(note, []).append(f"{fit['hardware']} {fit['format']}")
    lines += [f"{', '.join(places)}: {note}" for note, places in said.items()]
    return lines


def _times(fit: dict[str, Any]) -> dict[str, Any]:
    """Measured: TTFT and E2EL at P95, TPOT at P50; where nothing is, the estimate."""
    found = fit.get("measured")
    if found is None or found["rate"] is None:
        return fit["estimate"] or {}
    return {
        "measured": True,
        "ttft_ms": found["ttft_ms"].get("p95"),
        "tpot_ms": found["tpot_ms"].get("p50"),
        "e2el_ms": found["e2el_ms"].get("p95"),
    }


def _measured_words(fit: dict[str, Any]) -> str:
    found = fit["measured"]
    words = (
        f"{fit['hardware']} {fit['format']}: measured {found['measured_at'][:10]} at "
        f"{found['rate']:.4g} requests/s (TTFT and E2EL P95, TPOT P50), "
        f"{_number(found['output_tokens_per_s'], 0)} output tokens/s"
    )
    if found["replicas"] is not None:
        words += f"; at the rate that it kept {found['replicas']} replicas would do"
    if found["emulated"]:
        words += "; by an emulated kernel"
    others = ", ".join(f"{name} {value}" for name, value in found["other_arguments"].items())
    return words + (f"; its arguments were others: {others}" if others else "")


def _cheapest(fits: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The first of each hardware and format; they are in order."""
    found: dict[tuple[str, str], dict[str, Any]] = {}
    for fit in fits:
        found.setdefault((fit["hardware"], fit["format"]), fit)
    return list(found.values())


def _ruled_lines(document: dict[str, Any]) -> list[str]:
    ruled = document["ruled_out"]
    if not ruled:
        return []
    return [
        "",
        "Ruled out:",
        *(f"  {one['hardware']:<18}{one['format']:<13}{one['reason']}" for one in ruled),
    ]


def _current_lines(document: dict[str, Any]) -> list[str]:
    if "current" not in document:
        return []
    now = document["current"]
    return ["", f"Now: {now['hardware']} x {now['replicas']}: {now['says']}"]


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"
