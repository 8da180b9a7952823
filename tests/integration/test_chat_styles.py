"""What is learned, decoded, under chat templates in the styles of Llama 3, Qwen and SmolLM2.

The templates are written for these tests; the tokenizer knows every byte and the special tokens of
the style, so that whatever is decoded is exactly what the model learns to write.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from registry.errors import StageFailed
from tasks.engines import loss_mask
from tasks.engines.loss_mask import IGNORE, Example, conversation
from tests.integration.distill_builders import write

LLAMA = (
    "{{ bos_token }}{% if tools %}<|start_header_id|>system<|end_header_id|>\n\nTools: "
    "{{ tools | tojson }}<|eot_id|>{% endif %}"
    "{% for m in messages %}<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n"
    "{% if m.tool_calls %}{% set f = m.tool_calls[0].function %}"
    '{"name": "{{ f.name }}", "parameters": {{ f.arguments | tojson }}}<|eot_id|>'
    "{% else %}{{ m.content | trim }}<|eot_id|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
QWEN = (
    "<|im_start|>system\n"
    "{% if messages[0].role == 'system' %}{{ messages[0].content }}{% else %}Be of use.{% endif %}"
    "{% if tools %}\n{{ tools | tojson }}{% endif %}<|im_end|>\n"
    "{% for m in messages if m.role != 'system' %}"
    "{% if m.role == 'tool' %}<|im_start|>user\n<tool_response>{{ m.content }}</tool_response>"
    "{% else %}<|im_start|>{{ m.role }}\n{{ m.content or '' }}{% endif %}"
    "{% for c in m.tool_calls or [] %}<tool_call>\n"
    '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}'
    "\n</tool_call>{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
QWEN3 = (  # the last answer opens with a thought; an earlier one has lost it
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' and loop.last %}<think>\n\n</think>\n\n{% endif %}"
    "{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SMOLLM2 = (
    "{% for m in messages %}{% if loop.first and m.role != 'system' %}<|im_start|>system\n"
    "You are small.<|im_end|>\n{% endif %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CHATML = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
LLAMA_TOKENS = ["<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]
STYLES = {
    "llama 3": (LLAMA, LLAMA_TOKENS, "<|eot_id|>"),
    "qwen 2.5": (QWEN, CHATML, "<|im_end|>"),
    "qwen 3": (QWEN3, [*CHATML, "<think>", "</think>"], "<|im_end|>"),
    "smollm2": (SMOLLM2, CHATML, "<|im_end|>"),
}

USER, MORE = {"role": "user", "content": "到哪了？"}, {"role": "user", "content": "So? "}
FIRST, SECOND = (
    {"role": "assistant", "content": "在路上。"},
    {"role": "assistant", "content": "Bye!"},
)
CALL = {
    "role": "assistant",
    "content": None,
    "tool_calls": [
        {"type": "function", "function": {"name": "track", "arguments": '{"id": "FT1"}'}}
    ],
}
TOOL = {"role": "tool", "content": "at sea"}
TOOLS = [{"type": "function", "function": {"name": "track", "parameters": {}}}]


def tokenizer(style: str) -> Any:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    template, specials, end = STYLES[style]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    pieces = {piece: at for at, piece in enumerate([*specials, *alphabet])}
    inner = Tokenizer(models.BPE(vocab=pieces, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens(specials)
    # Padding and end token are one, as where a tokenizer has no padding token of its own.
    found = PreTrainedTokenizerFast(
        tokenizer_object=inner, eos_token=end, pad_token=end, bos_token=specials[0]
    )
    found.chat_template = template
    return found


def examples(style: str, messages: list[dict[str, Any]], **row: Any) -> tuple[Any, list[Example]]:
    made = tokenizer(style)
    rows = conversation({"id": "r", "messages": messages, **row}, made, [made.eos_token_id])
    return made, rows


def parts(made: Any, example: Example) -> list[str]:
    """Each learned stretch of an example, decoded."""
    found: list[list[int]] = []
    before = IGNORE
    for label in example.labels:
        if label != IGNORE:
            if before == IGNORE:
                found.append([])
            found[-1].append(label)
        before = label
    return [made.decode(ids) for ids in found]


@pytest.mark.parametrize("style", STYLES)
def test_one_turn_learns_the_answer_and_its_end(style: str) -> None:
    made, rows = examples(style, [USER, FIRST])
    end = made.eos_token
    thought = "<think>\n\n</think>\n\n" if style == "qwen 3" else ""
    assert [parts(made, row) for row in rows] == [[f"{thought}在路上。{end}"]]
    rendered = made.apply_chat_template([USER, FIRST], tokenize=False)
    assert made.decode(rows[0].input_ids) == rendered


@pytest.mark.parametrize("style", ["llama 3", "qwen 2.5", "smollm2"])
def test_every_turn_is_learned_where_it_stands(style: str) -> None:
    system = {"role": "system", "content": "Be brief."}
    made, rows = examples(style, [system, USER, FIRST, MORE, SECOND])
    end = made.eos_token
    assert [parts(made, row) for row in rows] == [[f"在路上。{end}", f"Bye!{end}"]]


def test_a_turn_that_is_shown_without_its_thought_later_is_learned_by_itself() -> None:
    made, rows = examples("qwen 3", [USER, FIRST, MORE, SECOND])
    thought, end = "<think>\n\n</think>\n\n", made.eos_token
    assert [row.name for row in rows] == ["r", "r turn 1"]
    assert [parts(made, row) for row in rows] == [
        [f"{thought}Bye!{end}"],
        [f"{thought}在路上。{end}"],
    ]
    assert "在路上。" in made.decode(rows[0].input_ids)
    # Both are the same conversation: a split never puts them on different sides.
    assert len({row.prompt_hash for row in rows}) == 1
    _, alone = examples("qwen 3", [USER, FIRST])
    assert alone[0].prompt_hash == rows[0].prompt_hash


@pytest.mark.parametrize("style", ["llama 3", "qwen 2.5"])
def test_tool_calls_are_learned_and_results_only_read(style: str) -> None:
    made, rows = examples(style, [USER, CALL, TOOL, SECOND], tools=TOOLS)
    end = made.eos_token
    if style == "llama 3":
        call = '{"name": "track", "parameters": {"id": "FT1"}}'
    else:
        call = '<tool_call>\n{"name": "track", "arguments": {"id": "FT1"}}\n</tool_call>'
    assert [parts(made, row) for row in rows] == [[f"{call}{end}", f"Bye!{end}"]]
    whole = made.decode(rows[0].input_ids)
    assert "at sea" in whole and '"name": "track", "parameters": {}' in whole


@pytest.mark.parametrize("style", STYLES)
def test_an_answer_that_was_cut_learns_no_end(style: str, tmp_path: Path) -> None:
    made, rows = examples(style, [USER, FIRST, MORE, SECOND], truncated=True)
    assert parts(made, rows[0])[-1].endswith("Bye!")
    assert made.eos_token_id not in rows[0].answer_ids
    assert all(text.endswith(made.eos_token) for text in parts(made, rows[0])[:-1])

    kept = {"id": "cut", "messages": [USER, FIRST], "truncated": True}
    ended = {"id": "ended", "messages": [MORE, SECOND]}
    path = write(tmp_path / "rows.jsonl", [kept, ended])
    data = loss_mask.load(path, made, [made.eos_token_id], 200)
    assert (data.truncated, data.not_ended, data.last_token_not_end) == (1, 0, 0.0)
    data.check("rows", 0.0)


def test_padding_is_never_learned_where_it_is_the_end_token() -> None:
    made, rows = examples("smollm2", [USER, FIRST])
    _, longer = examples("smollm2", [USER, FIRST, MORE, SECOND])
    assert made.pad_token_id == made.eos_token_id
    batch = loss_mask.tensors([rows[0], longer[0]], made.pad_token_id)
    assert batch["labels"][0].tolist().count(made.eos_token_id) == 1
    assert batch["labels"][1].tolist().count(made.eos_token_id) == 2
    fill = len(longer[0].input_ids) - len(rows[0].input_ids)
    assert batch["labels"][0].tolist()[-fill:] == [IGNORE] * fill
    assert batch["attention_mask"][0].sum() == len(rows[0].input_ids)


def test_the_next_token_is_the_label_wherever_logits_are_computed() -> None:
    made, rows = examples("qwen 2.5", [USER, FIRST, MORE, SECOND])
    _, short = examples("qwen 2.5", [USER, FIRST])
    whole = loss_mask.tensors([rows[0], short[0]], made.pad_token_id)
    partial = loss_mask.tensors([rows[0], short[0]], made.pad_token_id, partial=True)
    kept = partial["logits_to_keep"]
    assert partial["shift_labels"].equal(whole["shift_labels"][:, kept])
    learned = [row[row != IGNORE].tolist() for row in partial["shift_labels"]]
    assert learned == [
        [label for label in row.labels if label != IGNORE] for row in (*rows, *short)
    ]
    assert len(kept) < whole["input_ids"].shape[1]


def test_tool_arguments_that_are_no_json_are_refused(tmp_path: Path) -> None:
    call: dict[str, Any] = {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"type": "function", "function": {"name": "track", "arguments": "{id"}}],
    }
    made = tokenizer("qwen 2.5")
    path = write(tmp_path / "rows.jsonl", [{"id": "r", "messages": [USER, call]}])
    data = loss_mask.load(path, made, [made.eos_token_id], 200)
    with pytest.raises(StageFailed, match="row r: the arguments of a tool call are not JSON"):
        data.check(str(path), 0.0)
