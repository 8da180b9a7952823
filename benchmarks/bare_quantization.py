"""The llmcompressor script that a specialist would write by hand: load, oneshot, save.

    python -m benchmarks.bare_quantization MODEL RECIPE.yaml TEXTS.jsonl OUT [--samples 128]
                                           [--max-length 512] [--threads 2]

TEXTS holds one `{"messages": [...]}` a line; every text is calibrated on, in its order. Prints one
JSON line: seconds of loading, of llmcompressor with saving (CPU seconds of all threads too), and
of the whole process, and the largest resident memory in bytes.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import time
from pathlib import Path

STARTED = time.monotonic()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("model")
    parser.add_argument("recipe")
    parser.add_argument("texts")
    parser.add_argument("out")
    parser.add_argument("--samples", type=int, default=128)
    parser.add_argument("--max-length", type=int, default=512)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    asked = parser.parse_args()
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    import torch
    from datasets import Dataset
    from llmcompressor import oneshot
    from transformers import AutoModelForCausalLM, AutoTokenizer

    torch.set_num_threads(asked.threads)
    tokenizer = AutoTokenizer.from_pretrained(asked.model)
    lines = Path(asked.texts).read_text(encoding="utf-8").splitlines()[: asked.samples]
    texts = [
        tokenizer.apply_chat_template(json.loads(line)["messages"], tokenize=False)
        for line in lines
    ]
    encoded = [
        tokenizer(text, add_special_tokens=False, truncation=True, max_length=asked.max_length)
        for text in texts
    ]
    dataset = Dataset.from_list(
        [{name: row[name] for name in ("input_ids", "attention_mask")} for row in encoded]
    )
    began = time.monotonic()
    model = AutoModelForCausalLM.from_pretrained(asked.model, dtype="auto")
    loaded, worked = time.monotonic(), time.process_time()
    oneshot(
        model=model,
        tokenizer=tokenizer,
        recipe=asked.recipe,
        dataset=dataset,
        num_calibration_samples=len(texts),
        max_seq_length=asked.max_length,
    )
    model.save_pretrained(asked.out)
    tokenizer.save_pretrained(asked.out)
    ended = time.monotonic()
    print(
        json.dumps(
            {
                "load_seconds": round(loaded - began, 2),
                "quantize_seconds": round(ended - loaded, 2),
                "quantize_cpu_seconds": round(time.process_time() - worked, 2),
                "cpu_seconds": round(time.process_time(), 2),
                "seconds": round(ended - STARTED, 2),
                "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
            }
        )
    )


if __name__ == "__main__":
    main()
