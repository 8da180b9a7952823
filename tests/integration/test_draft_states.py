"""The states a draft learns from: transformers' are the right ones, and vLLM's are the same."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from registry.errors import StageFailed, UserError
from registry.settings import settings
from tasks.engines.draft_fit import training_row
from tasks.engines.draft_states import (
    Prompt,
    Sample,
    auxiliary_layers,
    record_states,
    render_prompts,
    split,
)
from tasks.engines.vllm_states import check_states
from tests.integration.draft_target import make_target, write_prompts


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_target(tmp_path_factory.mktemp("target"), steps=20)


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
        Sample(p.id, [*p.tokens, *[5] * (3 + index)], len(p.tokens), finished=False)
        for index, p in enumerate(prompts)
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


def test_tools_are_rendered_too(target: Path, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(target)
    tokenizer.chat_template = "{% for t in tools %}<|user|>{{ t.name }}{% endfor %}" + str(
        tokenizer.chat_template
    )
    file = tmp_path / "p.jsonl"
    asked = {"messages": [{"role": "user", "content": "a"}], "tools": [{"name": "order"}]}
    file.write_text(json.dumps({"id": "a", "segment": "s", **asked}) + "\n")
    (prompt,) = render_prompts(file, tokenizer)
    assert tokenizer.decode(prompt.tokens) == "<|user|>order<|user|>a<|end|><|assistant|>"
    assert (prompt.segment, prompt.row) == ("s", asked)


# -- which are held out --------------------------------------------------------------------------


def prompts(counts: dict[str, int]) -> list[Prompt]:
    return [
        Prompt(f"{segment}{number}", segment, (number,), {})
        for segment, count in counts.items()
        for number in range(count)
    ]


def test_every_segment_has_its_share_held_out() -> None:
    train, held_out = split(prompts({"a": 100, "b": 50, "c": 20}), 0.1, seed=0)
    held = [prompt.segment for prompt in held_out]
    assert {segment: held.count(segment) for segment in "abc"} == {"a": 10, "b": 5, "c": 2}
    assert len(train) == 153
    assert not {p.id for p in train} & {p.id for p in held_out}


def test_the_split_knows_no_order_and_has_a_seed() -> None:
    many = prompts({"a": 30, "b": 30})
    first, other = split(many, 0.2, seed=0), split(many[::-1], 0.2, seed=0)
    assert first == other
    assert split(many, 0.2, seed=1)[1] != first[1]


@pytest.mark.parametrize(
    ("total", "share", "expected"), [(2, 0.1, 1), (2, 0.9, 1), (5000, 0.1, 200), (1, 0.5, 0)]
)
def test_how_many_are_held_out(total: int, share: float, expected: int) -> None:
    train, held_out = split(prompts({"a": total}), share, seed=0)
    assert (len(train), len(held_out)) == (total - expected, expected)


# -- vLLM's --------------------------------------------------------------------------------------


def sample_with(states: Any, last: Any) -> Sample:
    return Sample("a", [1] * states.shape[0], 2, True, states=states, last_states=last)


def test_other_states_are_refused_with_their_numbers(recorded: tuple[Any, list[Sample]]) -> None:
    import torch

    model, samples = recorded
    right = samples[0]
    assert check_states(model, right, [0, 1, 3]) == {
        "layer 0": 0.0,
        "layer 1": 0.0,
        "layer 3": 0.0,
        "final": 0.0,
    }
    normed = replace(right, last_states=model.model.norm(right.last_states).detach())
    with pytest.raises(StageFailed, match=r"layer 0 0.000, layer 1 0.000, layer 3 0.000, final"):
        check_states(model, normed, [0, 1, 3])
    width = right.last_states.shape[-1]
    turned = torch.roll(right.states, width, dims=-1)
    with pytest.raises(StageFailed, match=r"layer 1 [0-9]"):
        check_states(model, replace(right, states=turned), [0, 1, 3])
    half = right.states.clone()
    half[: len(half) // 3] = 0
    with pytest.raises(StageFailed, match=r"layer 0 0.000.*\d\d% of the tokens of layer 1"):
        check_states(model, replace(right, states=half), [0, 1, 3])
    nan = torch.full_like(right.states, float("nan"))
    with pytest.raises(StageFailed, match="layer 0 nan"):
        check_states(model, replace(right, states=nan), [0, 1, 3])


def test_a_neighbouring_layer_is_no_near_miss(recorded: tuple[Any, list[Sample]]) -> None:
    """A deep model's layers change little: one layer's shift is within the allowed error."""
    import torch

    model, samples = recorded
    for layer in model.model.layers:
        for name in ("self_attn.o_proj", "mlp.down_proj"):
            layer.get_submodule(name).weight.data *= 0.02
    (right,) = [replace(samples[0], states=None, last_states=None)]
    record_states(model, [right], [0, 1, 2])
    assert set(check_states(model, right, [0, 1, 2]).values()) == {0.0}
    shifted = replace(right)
    record_states(model, [shifted], [1, 2, 3])
    assert torch.equal(shifted.last_states, right.last_states)
    with pytest.raises(StageFailed, match=r"layer 0 0.0\d\d, .*; layer 0 is nearest to layer 1"):
        check_states(model, shifted, [0, 1, 2])


def test_vllms_own_connector_still_needs_cuda() -> None:
    """When this fails, vLLM writes states without CUDA: remove `in_server/` and its mention."""
    ask = "import importlib.util; print(importlib.util.find_spec('vllm').origin)"
    python = str(settings().serve_python)
    origin = subprocess.run([python, "-I", "-c", ask], capture_output=True, text=True, check=True)
    module = "distributed/kv_transfer/kv_connector/v1/example_hidden_states_connector.py"
    source = (Path(origin.stdout.strip()).parent / module).read_text()
    assert "def _submit_async_write" in source
    assert "pin_memory=True" in source
