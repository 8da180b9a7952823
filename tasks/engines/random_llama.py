"""A Llama of two layers with random weights: enough to prove that an engine can serve a format.

Runs in a process of its own: `python -m tasks.engines.random_llama JOB.json RESULT.json`, with
the job `{"out": FOLDER, "seed": 0}`. Takes a second beside the imports, downloads nothing. Its
widths are multiples of 128, so that every quantization scheme's groups divide them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tasks.engines.subprocesses import job_main

CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}<|end|>"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def make(job: dict[str, Any]) -> dict[str, Any]:
    """Write the model and its byte-level tokenizer into `job["out"]`; returns its parameters."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    out = Path(job["out"])
    specials = ["<|end|>", "<|system|>", "<|user|>", "<|assistant|>"]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {piece: index for index, piece in enumerate([*specials, *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(specials)
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|end|>", pad_token="<|end|>"
    )
    wrapped.chat_template = CHAT_TEMPLATE

    torch.manual_seed(int(job.get("seed", 0)))
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=512,
            hidden_size=128,
            intermediate_size=256,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=32,
            max_position_embeddings=512,
            bos_token_id=None,
            eos_token_id=0,
            pad_token_id=0,
        )
    ).to(torch.bfloat16)
    model.save_pretrained(out)
    wrapped.save_pretrained(out)
    return {"parameters": model.num_parameters()}


if __name__ == "__main__":
    job_main(make)
