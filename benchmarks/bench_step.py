"""What a load step of ours costs beside `vllm bench serve` by hand, and whether both agree.

`python -m benchmarks.bench_step --bundle MODEL@ALIAS` serves a bundle and sends the same number of
fresh prompts at the same rate in turn: by a step of `pilotage bench`, and by `vllm bench serve`
started by hand. Printed are the ratios of their times, and how far our percentiles are from those
that vLLM computed for the same requests.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import tempfile
import time
from pathlib import Path

from eval_suites.load import LoadProfile
from eval_suites.loader import load_profile
from registry.evidence import percentile
from registry.settings import settings
from tasks.bench_targets import Target, bundle_target
from tasks.bundles import bundle_named
from tasks.engines.load_generator import Batch, Row
from tasks.engines.load_prompts import Prompts, synthetic
from tasks.engines.load_run import LoadRun, Seen
from tasks.engines.vllm_bench import VllmBench

PERCENTS = (50, 90, 95, 99)


def by_hand(
    target: Target, profile: LoadProfile, rows: list[Row], rate: float, folder: Path
) -> float:
    """Seconds of one `vllm bench serve` with the same traffic, its start included."""
    prompts = folder / "prompts.jsonl"
    lines = [
        json.dumps({"prompt": row["messages"][0]["content"], "output_tokens": row["output_tokens"]})
        for row in rows
    ]
    prompts.write_text("\n".join(lines) + "\n", encoding="utf-8")
    command = [
        *(str(settings().serve_python), "-m", "vllm.entrypoints.cli.main", "bench", "serve"),
        *("--backend", "openai-chat", "--endpoint", "/v1/chat/completions"),
        *("--base-url", target.url, "--model", target.model, "--tokenizer", str(target.tokenizer)),
        *("--dataset-name", "custom", "--dataset-path", str(prompts), "--custom-output-len", "-1"),
        *("--num-prompts", str(len(rows)), "--request-rate", str(rate), "--ignore-eos"),
        *("--skip-chat-template", "--disable-shuffle", "--no-oversample", "--num-warmups", "0"),
        *("--ready-check-timeout-sec", "0", "--temperature", "0", "--disable-tqdm"),
        *("--save-result", "--save-detailed", "--result-dir", str(folder)),
        *("--result-filename", "by-hand.json", "--seed", str(profile.seed)),
    ]
    env = os.environ | {"OPENAI_API_KEY": target.api_key, "HF_HUB_OFFLINE": "1"}
    started = time.monotonic()
    subprocess.run(command, env=env, check=True, stdout=subprocess.DEVNULL)
    spent = time.monotonic() - started
    result = json.loads((folder / "by-hand.json").read_text(encoding="utf-8"))
    assert result["completed"] == len(rows), result["errors"]
    return spent


def ours(
    run: LoadRun, supply: Prompts, count: int, rate: float, number: int
) -> tuple[float, float]:
    """Seconds of one step, and of the sending alone."""
    seen = Seen()
    started = time.monotonic()
    run.send(seen, number, Batch(supply.take(count), number, rate), supply.expected_hits)
    return time.monotonic() - started, seen.duration


def furthest(raw: Path) -> float:
    """The largest relative distance of our percentiles from vLLM's own, of the same requests."""
    result = json.loads(raw.read_text(encoding="utf-8"))
    times = {
        "ttft": [1000 * one for one in result["ttfts"]],
        "e2el": [1000 * one for one in result["latencies"]],
        "tpot": [
            1000 * (e2el - ttft) / (tokens - 1)
            for e2el, ttft, tokens in zip(
                result["latencies"], result["ttfts"], result["output_lens"], strict=True
            )
            if tokens > 1
        ],
    }
    return max(
        abs((percentile(values, percent) or 0.0) / result[f"p{percent}_{name}_ms"] - 1)
        for name, values in times.items()
        for percent in PERCENTS
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--bundle", required=True)
    parser.add_argument("--load", default="freight_cpu_2core")
    parser.add_argument("--rate", type=float, default=10.0)
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--repeats", type=int, default=3)
    chosen = parser.parse_args()
    profile = load_profile(chosen.load)
    count = round(chosen.rate * chosen.seconds)
    with (
        tempfile.TemporaryDirectory() as written,
        bundle_target(bundle_named(chosen.bundle), chosen.bundle) as target,
        VllmBench(target.api_key, log=Path(written) / "generator.log") as generator,
    ):
        folder = Path(written)
        assert target.tokenizer is not None
        run = LoadRun(
            target.traffic(profile, target.tokenizer), generator, target.watch(), folder,
            target.check_alive,
        )  # fmt: skip
        supply = synthetic(profile.scenarios, profile.seed, tokenizer=target.tokenizer)
        ours(run, supply, 20, 20.0, 0)
        pairs = []
        for number in range(1, chosen.repeats + 1):
            step, sending = ours(run, supply, count, chosen.rate, number)
            hand = by_hand(target, profile, supply.take(count), chosen.rate, folder)
            pairs.append((step / hand, step / sending))
            off = furthest(folder / f"step{number:03d}-1.json")
            print(
                f"a step {step:.2f} s, of which it sent {sending:.2f} s; by hand {hand:.2f} s; "
                f"percentiles off by {off:.1e}",
                flush=True,
            )
    print(f"median of a step over a call by hand {statistics.median(p[0] for p in pairs):.3f}, "
          f"over its own sending {statistics.median(p[1] for p in pairs):.3f}")  # fmt: skip


if __name__ == "__main__":
    main()
