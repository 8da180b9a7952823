"""EAGLE3 draft training: the right states, speculators' own loop, and what vLLM makes of it.

The target is trained on the spot (seconds): a Llama of three layers that answers templated
questions with sentences it has learned by heart, so that its greedy answers can be drafted.
"""

from __future__ import annotations

import hashlib
import json
import logging
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pydantic import SecretStr

from recipes.schema import Sampling
from registry.errors import StageFailed, UserError
from registry.settings import settings
from tasks.engines.draft_states import Sample, auxiliary_layers, record_states, render_prompts
from tasks.engines.openai_chat import ChatRequest, Endpoint, generate
from tasks.engines.speculators_train import (
    LossLog,
    new_draft,
    score,
    train_draft,
    training_row,
    without_accelerator,
)
from tasks.engines.subprocesses import run_job
from tasks.engines.vllm_server import VllmServer

pytestmark = pytest.mark.alone

SPECULATIVE_TOKENS = 3
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


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The target in bfloat16 with tokenizer and chat template; 0.6 million parameters."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    folder = tmp_path_factory.mktemp("target")
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
    torch.set_num_threads(settings().cpu_threads)
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
    steps = 150
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, total_steps=steps)
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
            messages = [{"role": "user", "content": conversation(rng)[0]}]
            out.write(json.dumps({"id": f"p{number}", "messages": messages}) + "\n")
    return file


def job(target: Path, folder: Path, **changes: Any) -> dict[str, Any]:
    folder.mkdir(parents=True, exist_ok=True)
    fields = {
        "target": str(target),
        "prompts_file": str(write_prompts(folder / "prompts.jsonl", 250, seed=1)),
        "out_dir": str(folder / "draft"),
        "num_layers": 1,
        "draft_vocab_size": 384,
        "epochs": 4,
        "learning_rate": 2e-3,
        "max_length": 128,
        "response_tokens": 64,
        "num_speculative_tokens": SPECULATIVE_TOKENS,
        "seed": 0,
        "threads": settings().cpu_threads,
    }
    return fields | changes


@pytest.fixture(scope="module")
def trained(target: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """A draft with a reduced vocabulary, made by the process that the flow starts."""
    folder = tmp_path_factory.mktemp("draft")
    # Module scope comes before the test's own home.
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PILOTAGE_HOME", str(folder / "home"))
        settings.cache_clear()
        asked = job(target, folder)
        result = run_job("tasks.engines.speculators_train", asked, log=folder / "draft.log")
    settings.cache_clear()
    return folder / "draft", result


# -- the states ----------------------------------------------------------------------------------


@pytest.mark.parametrize("layers", range(2, 40))
def test_layer_ids_are_three_and_ascending(layers: int) -> None:
    ids = auxiliary_layers(layers)
    assert len(ids) == 3
    assert ids == sorted(set(ids))
    assert ids[0] >= 0
    assert ids[-1] <= layers
    if layers >= 7:
        assert ids == [2, layers // 2, layers - 3]


def test_one_layer_is_refused() -> None:
    with pytest.raises(UserError, match="one layer"):
        auxiliary_layers(1)


@pytest.fixture
def recorded(target: Path, tmp_path: Path) -> Iterator[tuple[Any, list[Sample]]]:
    """The target in float32 and four samples of different lengths with recorded states."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(target)
    prompts = render_prompts(write_prompts(tmp_path / "p.jsonl", 4, seed=2), tokenizer)
    samples = [
        Sample(name, tokens + [5] * (3 + index), len(tokens), finished=False)
        for index, (name, tokens) in enumerate(prompts)
    ]
    record_states(model, samples, [0, 1, 3])
    yield model, samples


def test_states_are_layer_outputs_and_the_last_is_before_the_norm(
    recorded: tuple[Any, list[Sample]],
) -> None:
    import torch

    model, samples = recorded
    decoder, outputs = model.model, {}
    for number, layer in enumerate(decoder.layers, 1):
        layer.register_forward_hook(
            lambda _, __, output, number=number: outputs.__setitem__(number, output)
        )
    for sample in samples:
        # Alone and unpadded, so equality also proves that padding in a batch leaked nothing.
        with torch.inference_mode():
            whole = model(torch.tensor([sample.tokens]), output_hidden_states=True)
        embedded = decoder.embed_tokens(torch.tensor(sample.tokens))
        expected = torch.cat([embedded, outputs[1][0], outputs[3][0]], dim=-1)
        torch.testing.assert_close(sample.states, expected, atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(sample.last_states, outputs[3][0], atol=1e-4, rtol=1e-4)
        normed = decoder.norm(sample.last_states)
        # transformers' own last entry is already normed: the trap this test is for.
        torch.testing.assert_close(normed, whole.hidden_states[-1][0], atol=1e-4, rtol=1e-4)
        assert not torch.allclose(sample.last_states, whole.hidden_states[-1][0], atol=1e-2)
        torch.testing.assert_close(model.lm_head(normed), whole.logits[0], atol=1e-3, rtol=1e-3)


def test_training_row_puts_each_token_beside_the_state_before_it(
    recorded: tuple[Any, list[Sample]],
) -> None:
    import torch

    sample = recorded[1][0]
    row = training_row(sample)
    assert row["input_ids"].tolist() == sample.tokens[1:]
    assert torch.equal(row["hidden_states"], sample.states[:-1])
    assert torch.equal(row["verifier_last_hidden_states"], sample.last_states[1:])
    # From the answer's first token on, up to the token before its last.
    learned = [position for position, used in enumerate(row["loss_mask"].tolist()) if used]
    assert learned == list(range(sample.prompt_length - 1, len(sample.tokens) - 2))


def test_prompt_rows_without_messages_are_all_named(target: Path, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    file = tmp_path / "prompts.jsonl"
    file.write_text('{"id": "a"}\n{"id": "b", "messages": []}\n')
    with pytest.raises(UserError) as caught:
        render_prompts(file, AutoTokenizer.from_pretrained(target))
    assert [problem.where for problem in caught.value.problems] == [f"{file}:1", f"{file}:2"]


# -- training ------------------------------------------------------------------------------------


@pytest.mark.parametrize("loss", [float("nan"), float("inf")])
def test_a_loss_that_is_no_number_stops_the_training(loss: float) -> None:
    log = LossLog()
    record = logging.makeLogRecord({"msg": {"train": {"loss": loss}, "epoch": 0}})
    with pytest.raises(StageFailed, match="epoch 1"):
        log.emit(record)


def test_nan_in_the_target_is_refused(target: Path, tmp_path: Path) -> None:
    """Through the whole stage: the target's head gives nothing back that it has answered."""
    import torch
    from safetensors.torch import load_file, save_file

    broken = tmp_path / "broken"
    broken.mkdir()
    for file in target.iterdir():
        (broken / file.name).write_bytes(file.read_bytes())
    weights = load_file(broken / "model.safetensors")
    weights["model.norm.weight"] = torch.full_like(weights["model.norm.weight"], float("nan"))
    save_file(weights, broken / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(StageFailed):
        train_draft(job(broken, tmp_path, epochs=1))


def test_the_trainer_still_needs_its_workaround() -> None:
    """When this fails, speculators runs on the CPU by itself: remove `without_accelerator`."""
    import torch
    from speculators.train import trainer

    if torch.cuda.is_available():
        pytest.skip("has an accelerator")
    assert isinstance(trainer.get_local_rank(), int)
    with pytest.raises(RuntimeError):
        torch.accelerator.synchronize()
    with without_accelerator():
        assert trainer.get_local_rank() == "cpu"
        torch.accelerator.synchronize()


def test_same_seed_same_bytes(target: Path, tmp_path: Path) -> None:
    digests = []
    for name in ("one", "two"):
        asked = job(target, tmp_path / name, epochs=1)
        write_prompts(Path(asked["prompts_file"]), 24, seed=1)
        train_draft(asked)
        files = sorted(Path(asked["out_dir"]).iterdir())
        assert [file.name for file in files] == ["config.json", "model.safetensors"]
        digests.append([hashlib.sha256(file.read_bytes()).hexdigest() for file in files])
    assert digests[0] == digests[1]


def test_result_and_checkpoint(trained: tuple[Path, dict[str, Any]], target: Path) -> None:
    from safetensors import safe_open

    folder, result = trained
    assert result["prompts"] == result["answers"] + result["dropped"]
    assert result["truncated"] == 0
    assert result["layer_ids"] == [1, 2, 3]
    assert result["vocab_coverage"] > 0.95
    assert result["target_agreement"] > 0.95
    assert len(result["train_loss"]) == len(result["held_out_loss"]) == 4
    assert result["train_loss"][-1] < result["train_loss"][0]
    assert result["acceptance"] == sorted(result["acceptance"], reverse=True)
    assert result["acceptance_length"] == pytest.approx(1 + sum(result["acceptance"]), abs=1e-4)

    config = json.loads((folder / "config.json").read_text())
    assert config["eagle_aux_hidden_state_layer_ids"] == [1, 2, 3]
    assert config["dtype"] == "bfloat16"
    assert str(target) not in json.dumps(config)
    with safe_open(folder / "model.safetensors", framework="pt") as weights:
        kinds = {name: str(weights.get_tensor(name).dtype) for name in weights.keys()}  # noqa: SIM118
    assert kinds.pop("d2t") == "torch.int64"
    assert kinds.pop("t2d") == "torch.bool"
    assert set(kinds.values()) == {"torch.bfloat16"}


def test_score_counts_as_the_server_does(
    recorded: tuple[Any, list[Sample]], target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pretend draft that is right at its first two proposals and wrong at the third."""
    import torch

    _, samples = recorded
    sample = Sample("a", [9, 9, 20, 21, 22, 23, 24, 25, 26], 2, finished=True)
    sample.states = torch.zeros(9, samples[0].states.shape[1])
    sample.last_states = torch.zeros(9, samples[0].last_states.shape[1])

    class Pretend:
        d2t, draft_vocab_size = None, 512
        device, dtype = torch.device("cpu"), torch.float32

        def __call__(self, *, input_ids: Any, ttt_steps: int, **_: Any) -> list[Any]:
            after = [torch.roll(input_ids, -1 - step, dims=1) for step in range(ttt_steps)]
            return [*after[:2], torch.zeros_like(input_ids)]

    counted = score(Pretend(), [sample], steps=3)
    # Seven answer tokens: the first is the target's, then drafts start at tokens 0, 3 and 6 of the
    # answer; the one at 6 would be behind the end. Six places to draft from in all.
    assert counted["acceptance"] == [1.0, 1.0, 0.0]
    assert counted["acceptance_length"] == 3.0
    assert counted["accuracy"] == [1.0, 1.0, 0.0]


def test_too_large_draft_vocabulary_is_refused(target: Path) -> None:
    from collections import Counter

    asked = {"target": str(target), "num_layers": 1, "draft_vocab_size": 513}
    with pytest.raises(UserError, match="513 is more than the target's 512"):
        new_draft(asked, [1, 2, 3], Counter({5: 1}), [1], eager=True)


# -- the engine ----------------------------------------------------------------------------------

QUICK = {
    "enforce-eager": True,
    "dtype": "bfloat16",
    "max-model-len": 256,
    "kv-cache-memory-bytes": 128 * 2**20,
    "distributed-executor-backend": "uni",
}
QUICK_ENV = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "OMP_NUM_THREADS": "1"}


@pytest.mark.slow
def test_engine_accepts_what_training_promised(
    trained: tuple[Path, dict[str, Any]], target: Path, tmp_path: Path
) -> None:
    """vLLM with the draft: same greedy answers, the same acceptance as on held-out prompts."""
    draft, result = trained
    plain, _ = served(target, None, tmp_path)
    drafted, counted = served(target, draft, tmp_path)
    assert drafted == plain
    drafts = counted["vllm:spec_decode_num_drafts_total"]
    length = 1 + counted["vllm:spec_decode_num_accepted_tokens_total"] / drafts
    assert drafts > 100
    assert length >= 2.0
    assert length == pytest.approx(result["acceptance_length"], abs=0.25)


def served(target: Path, draft: Path | None, folder: Path) -> tuple[list[str], dict[str, float]]:
    """Greedy answers to 30 unseen prompts, one at a time, and what the counters rose by."""
    prompts = write_prompts(folder / "unseen.jsonl", 30, seed=7).read_text().splitlines()
    requests = [
        ChatRequest(
            id=row["id"],
            messages=row["messages"],
            sampling=Sampling(temperature=0.0, max_tokens=64),
        )
        for row in map(json.loads, prompts)
    ]
    running = VllmServer(
        target,
        log=folder / f"vllm-{'draft' if draft else 'plain'}.log",
        served_name="m",
        engine_args=QUICK,
        env=QUICK_ENV,
        draft=draft,
        num_speculative_tokens=SPECULATIVE_TOKENS if draft else 0,
    )
    with running:
        before = running.metrics()
        endpoint = Endpoint(url=running.url, model="m", api_key=SecretStr(running.api_key))
        results = generate(
            requests, endpoint, concurrency=1, max_retry_wait=5.0, request_timeout=60.0
        )
        after = running.metrics()
    assert {answer.state for answer in results} == {"done"}
    return [answer.text for answer in results], {
        name: value - before.get(name, 0.0) for name, value in after.items()
    }
