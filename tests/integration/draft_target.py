"""A target that is trained on the spot, and prompts for it.

A Llama of three layers that answers templated questions with sentences it has learned by heart,
so that its greedy answers can be drafted. Seconds on two cores.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

SPECULATIVE_TOKENS = 3
THREADS = 1
"""So little work: two threads that wait for each other on a busy machine took ten times as long."""
CITIES = [
    "Berlin",
    "Paris",
    "Lyon",
    "Madrid",
    "Oslo",
    "Rome",
    "Vienna",
    "Prague",
    "Lisbon",
    "Dublin",
]
CARGO = ["steel", "timber", "paper", "glass", "apples", "furniture", "machines", "textiles"]
VEHICLES = ["van", "truck", "trailer", "flatbed"]
TEMPLATE = (
    "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def conversation(rng: random.Random) -> tuple[str, str]:
    """A question and its one right answer."""
    start, goal = rng.sample(CITIES, 2)
    cargo, vehicle = rng.choice(CARGO), rng.choice(VEHICLES)
    if rng.random() < 0.5:
        return (
            f"Where is my {cargo} from {start} to {goal}?",
            f"Your {cargo} left {start} by {vehicle_of(cargo)} and will arrive in {goal} soon. "
            f"Please have the papers for {cargo} ready at the gate in {goal}.",
        )
    return (
        f"I need a {vehicle} to {goal} for {cargo}.",
        f"We booked a {vehicle} to {goal} for your {cargo}. The driver will call you before he "
        f"arrives. Thank you for shipping {cargo} with us.",
    )


def vehicle_of(cargo: str) -> str:
    return VEHICLES[len(cargo) % len(VEHICLES)]


def make_target(folder: Path, steps: int = 150) -> Path:
    """The target in bfloat16 with tokenizer and chat template; 0.6 million parameters."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    rng = random.Random(0)
    pairs = [conversation(rng) for _ in range(600)]
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    specials = ["<|pad|>", "<|end|>", "<|user|>", "<|assistant|>"]
    bpe.train_from_iterator(
        (text for pair in pairs for text in pair),
        trainers.BpeTrainer(
            vocab_size=512,
            special_tokens=specials,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        ),
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe, pad_token="<|pad|>", eos_token="<|end|>"
    )
    tokenizer.chat_template = TEMPLATE
    rows = [
        tokenizer(f"<|user|>{question}<|end|><|assistant|>{answer}<|end|>")["input_ids"]
        for question, answer in pairs
    ]

    torch.manual_seed(0)
    torch.set_num_threads(THREADS)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=512,
            hidden_size=128,
            intermediate_size=256,
            num_hidden_layers=3,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=512,
            tie_word_embeddings=True,
            bos_token_id=None,
            eos_token_id=1,
            pad_token_id=0,
        )
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, total_steps=max(1, steps))
    for _ in range(steps):
        batch = rng.sample(rows, 16)
        width = max(len(row) for row in batch)
        ids = torch.tensor([row + [0] * (width - len(row)) for row in batch])
        loss = model(input_ids=ids, labels=ids.masked_fill(ids == 0, -100)).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    model.to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def write_prompts(file: Path, count: int, seed: int) -> Path:
    rng = random.Random(seed)
    with file.open("w", encoding="utf-8") as out:
        for number in range(count):
            question = conversation(rng)[0]
            row = {
                "id": f"p{number}",
                "segment": "track" if question.startswith("Where") else "book",
                "messages": [{"role": "user", "content": question}],
            }
            out.write(json.dumps(row) + "\n")
    return file


def job(target: Path, folder: Path, **changes: Any) -> dict[str, Any]:
    (folder / "draft").mkdir(parents=True, exist_ok=True)
    fields = {
        "target": str(target),
        "prompts_file": str(write_prompts(folder / "prompts.jsonl", 250, seed=1)),
        "samples_dir": None,
        "out_dir": str(folder / "draft"),
        "init_from": None,
        "num_layers": 1,
        "draft_vocab_size": 384,
        "epochs": 4,
        "learning_rate": 2e-3,
        "batch_tokens": 256,
        "max_length": 128,
        "response_tokens": 64,
        "response_temperature": 0.0,
        "held_out_share": 0.1,
        "engine_checkpoints": 2,
        "num_speculative_tokens": SPECULATIVE_TOKENS,
        "seed": 0,
        "threads": THREADS,
    }
    return fields | changes


def plain_eagle3(published: Path, folder: Path, **changes: Any) -> Path:
    """The same draft as the authors of EAGLE publish theirs: no embeddings, `midlayer.`."""
    from safetensors.torch import load_file, save_file

    folder.mkdir(parents=True)
    config = json.loads((published / "config.json").read_text())
    inner = config["transformer_layer_config"]
    names = ("vocab_size", "hidden_size", "intermediate_size", "num_attention_heads", "head_dim",
             "num_key_value_heads", "num_hidden_layers", "rms_norm_eps", "rope_parameters",
             "max_position_embeddings")  # fmt: skip
    plain = {name: inner[name] for name in names} | {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "torch_dtype": "bfloat16",
        "draft_vocab_size": config["draft_vocab_size"],
        "norm_before_residual": config["norm_before_residual"],
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 2, 3]},
    }
    (folder / "config.json").write_text(json.dumps(plain | changes))
    weights = load_file(published / "model.safetensors")
    save_file(
        {
            name.replace("layers.0.", "midlayer."): tensor
            for name, tensor in weights.items()
            if "embed_tokens" not in name
        },
        folder / "model.safetensors",
    )
    return folder


QUICK = {
    "enforce-eager": True,
    "dtype": "bfloat16",
    "max-model-len": 256,
    "kv-cache-memory-bytes": 128 * 2**20,
    "distributed-executor-backend": "uni",
}
QUICK_ENV = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "OMP_NUM_THREADS": "1"}
