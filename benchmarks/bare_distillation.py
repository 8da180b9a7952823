"""LoRA on chat rows as a specialist would write it with TRL by hand: no held-out rows, no merge.

    python -m benchmarks.bare_distillation MODEL ROWS OUT [--epochs 1] [--batch-size 8] ...

Prints one JSON line last: tokens trained on, wall and processor seconds of `trainer.train()`.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("model")
    parser.add_argument("rows", type=Path)
    parser.add_argument("out")
    parser.add_argument("--epochs", type=float, default=1.0)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--max-length", type=int, default=512)
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--dtype", default="float32")
    asked = parser.parse_args()

    import torch
    from datasets import Dataset
    from peft import LoraConfig
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import SFTConfig, SFTTrainer

    torch.set_num_threads(asked.threads)
    rows = [json.loads(line) for line in asked.rows.read_text(encoding="utf-8").splitlines()]
    table = Dataset.from_list(
        [{"prompt": row["messages"][:-1], "completion": row["messages"][-1:]} for row in rows]
    )
    on_gpu = torch.cuda.is_available()
    model = AutoModelForCausalLM.from_pretrained(asked.model, dtype=getattr(torch, asked.dtype))
    trainer = SFTTrainer(
        model=model.to("cuda" if on_gpu else "cpu"),
        processing_class=AutoTokenizer.from_pretrained(asked.model),
        peft_config=LoraConfig(
            r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM"
        ),
        train_dataset=table,
        args=SFTConfig(
            output_dir=asked.out,
            num_train_epochs=asked.epochs,
            per_device_train_batch_size=asked.batch_size,
            learning_rate=asked.learning_rate,
            lr_scheduler_type="cosine",
            warmup_steps=0.03,
            max_length=asked.max_length,
            train_sampling_strategy="group_by_length",
            gradient_checkpointing=False,
            bf16=asked.dtype == "bfloat16",
            use_cpu=not on_gpu,
            dataloader_pin_memory=on_gpu,
            save_strategy="no",
            logging_steps=1,
            report_to=[],
            disable_tqdm=True,
            seed=0,
        ),
    )
    tokens = sum(len(row["input_ids"]) for row in trainer.train_dataset)
    began, used = time.monotonic(), time.process_time()
    outcome = trainer.train()
    print(
        json.dumps(
            {
                "tokens": round(tokens * asked.epochs),
                "seconds": time.monotonic() - began,
                "processor_seconds": time.process_time() - used,
                "steps": outcome.global_step,
                "loss": outcome.training_loss,
            }
        )
    )


if __name__ == "__main__":
    main()
