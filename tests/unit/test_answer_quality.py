"""Each answer has exactly one class, and what is flagged is really bad."""

from __future__ import annotations

import json
from typing import Any

import pytest
from pydantic import ValidationError

from eval_suites.scoring import strict_json
from recipes.quality_recipe import Quality
from tasks.answer_loops import loop_in
from tasks.answer_quality import CLASSES, HALF_PAIR, Judge
from tasks.answer_refusals import refusal_in
from tasks.answer_text import prose_parts
from tasks.engines.languages import Languages
from tasks.engines.openai_chat import ChatResult

ROW = {"id": "a", "segment": "s", "prompt": "Where is my order?", "reference": None}


def answer(text: str, finish: str | None = "stop", **more: Any) -> ChatResult:
    content = {"id": "a", "state": "done", "text": text, "finish_reason": finish, **more}
    return ChatResult.model_validate(content)


def judge(keep_truncated: bool = False, **quality: Any) -> Judge:
    return Judge(Quality.model_validate(quality), keep_truncated)


CALL = {"id": "c1", "type": "function", "function": {"name": "track", "arguments": '{"order": 1}'}}
LOOPED = "The report is a report of " * 8


@pytest.mark.parametrize(
    ("result", "kind"),
    [
        (answer("It left today."), "accepted"),
        (answer("It left today. It", "length"), "length"),
        (answer("It left today.", "length"), "length"),
        (answer("", "content_filter"), "content_filter"),
        (answer("It left today.", None), "unknown"),
        (answer("It left today.", "tool_calls"), "unknown"),
        (answer(" \n"), "empty"),
        (answer("", None, state="rejected", reason="too long"), "rejected"),
        (answer("\u200b\ufeff\x00"), "empty"),
        (answer("👍"), "accepted"),
        (answer("<think>hm</think>\n"), "reasoning_only"),
        (answer("", reasoning="hm"), "reasoning_only"),
        (answer("<think>hm, the order"), "reasoning_only"),
        (answer("", refusal="I can't do that."), "refused"),
        (answer("I'm sorry, but I can't assist with that."), "refused"),
        (answer(LOOPED), "looping"),
        (answer("It says <think> and goes on"), "wrong_format"),
    ],
)
def test_one_class_each(result: ChatResult, kind: str) -> None:
    assert judge().classify(result, ROW).kind == kind
    assert kind in CLASSES


def test_the_finish_reason_alone_decides_what_was_cut() -> None:
    ends_well, ends_badly = "It covers two years.", "首先登录账户，然后并上"
    for text in (ends_well, ends_badly):
        assert judge().classify(answer(text, "length"), ROW).kind == "length"
        assert judge().classify(answer(text, "stop"), ROW).kind == "accepted"


def test_a_cut_answer_is_kept_where_the_recipe_says_so_and_its_text_is_good() -> None:
    keeping, plain = judge(keep_truncated=True, format={"kind": "json"}), judge()
    good = plain.classify(answer("1. Open the order page. 2. Print", "length"), ROW)
    assert not plain.keeps(good)
    assert keeping.keeps(keeping.classify(good.result, ROW)), "its format cannot be judged"
    for text, flaw in ((LOOPED, "looping"), ("<think>I was", "reasoning_only"), ("", "empty")):
        cut = keeping.classify(answer(text, "length"), ROW)
        assert (cut.kind, cut.flaw, keeping.keeps(cut)) == ("length", flaw, False)


def test_a_class_may_be_kept_but_never_an_answer_without_text() -> None:
    kept = judge(refused={"keep": True}, looping={"keep": True})
    assert kept.keeps(kept.classify(answer("I can't help with that."), ROW))
    assert kept.keeps(kept.classify(answer(LOOPED), ROW))
    assert not kept.keeps(kept.classify(answer("", refusal="No."), ROW))
    assert not kept.keeps(kept.classify(answer(""), ROW))
    assert not kept.keeps(kept.classify(answer("Text.", None), ROW))
    wrong = judge(format={"kind": "json", "keep": True})
    assert wrong.keeps(wrong.classify(answer("no json"), ROW))
    for bad in (answer("so <think> hm"), answer("x", "tool_calls", tool_calls=[CALL])):
        assert not wrong.keeps(wrong.classify(bad, ROW))
    with pytest.raises(ValidationError, match="Extra inputs"):
        Quality.model_validate({"empty": {"keep": True}})


# -- calls of tools --------------------------------------------------------------------------

TOOLS = {**ROW, "tools": [{"type": "function", "function": {"name": "track"}}]}


def test_a_call_of_a_tool_is_an_answer() -> None:
    for finish in ("tool_calls", "stop"):
        result = answer("", finish, tool_calls=[CALL])
        assert judge(format={"kind": "json"}).classify(result, TOOLS).kind == "accepted"


@pytest.mark.parametrize(
    ("function", "why"),
    [
        ({"name": "fly", "arguments": "{}"}, "'fly'"),
        ({"name": "track", "arguments": '{"order": '}, "arguments of track"),
        ({"name": "track", "arguments": "[1]"}, "arguments of track"),
        ({"name": "track", "arguments": {"order": 1}}, "arguments of track"),
        ({"name": ["track"], "arguments": "{}"}, "['track']"),
        ({"name": "track", "arguments": '{"order": "\\ud83d"}'}, "surrogate"),
        (None, "None"),
    ],
)
def test_a_call_that_nobody_could_make(function: Any, why: str) -> None:
    result = answer("", "tool_calls", tool_calls=[{"function": function}])
    found = judge().classify(result, TOOLS)
    assert found.kind == "wrong_format" and why in found.why


# -- refusals --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    [
        "I'm sorry, but I can't assist with that.",
        "I’m sorry, I can’t help with that request.",
        "Sorry, I cannot help you with this.",
        "I cannot fulfill this request.",
        "I am unable to comply with your request as it violates our policy.",
        "I'm not able to help with that. Is there anything else I can do for you?",
        "As an AI language model, I cannot provide personal opinions.",
        "As an AI, I don't have access to your account.",
        "Unfortunately, as a large language model, I am unable to browse the internet.",
        "I'm just an AI and can't feel pain.",
        "I must decline to answer.",
        "I won't be able to help with that.",
        "I can't provide instructions on how to pick a lock.",
        "I'm sorry, but as a chatbot designed to assist with banking, I'm not able to trade.",
        "I do not feel comfortable discussing this.",
        "**I cannot assist with that.**",
        "很抱歉，我无法回答您的问题。",
        "抱歉，我不能协助这个请求。",
        "对不起，我无法提供此类内容。",
        "作为一个人工智能语言模型，我无法预测股票走势。",
        "作为AI助手，我不具备实时查询能力。",
        "我无法满足您的请求。",
        "非常抱歉，您的请求违反了使用政策。",
        "让我们换个话题吧。",
        "对不起，我不能帮助您完成这个请求。",
    ],
)
def test_refusals(text: str) -> None:
    assert refusal_in(text)


@pytest.mark.parametrize(
    "text",
    [
        "I can't find the order number FT1234, please send it again.",
        "I'm sorry, I can't find your order. Could you send me its number?",
        "Sorry, I can't help with that request without the order number.",
        "I'm sorry to hear that your parcel is late. It arrives tomorrow.",
        "We cannot refund tickets after 30 days.",
        "Unfortunately, we are unable to deliver to Hangzhou today.",
        "I cannot confirm the pick-up before noon; the driver is on the way.",
        "I am not able to attend the meeting on Monday.",
        "I can't answer the phone while driving.",
        "We can't help but notice how fast it was.",
        "I won't be able to make it to the depot by 7pm.",
        "As an AI company, we offer three plans.",
        "Our AI assistant cannot be reached by phone.",
        "I'm not comfortable with the seats in this car.",
        "I do not feel comfortable verifying my identity.",
        "No, you cannot use the card abroad.",
        "Sorry for the delay, your order ships today.",
        "很抱歉，您的订单FT1234无法按时送达，预计明天到达。",
        "抱歉，暂时查不到订单FT1234，请提供正确的单号。",
        "无法取消已经发货的订单，您可以在签收后申请退货。",
        "您好，我不能确定司机的位置，已为您联系调度。",
        "对不起，仓库今天不能卸货。",
        "不能提供发票的订单，请联系财务。",
        "请您换个时间再来。",
        "您的请求不符合退款条件。",
        "不能提供该内容的发票。",
        "我们无法完成您的请求，因为库存不足。",
        "I can't help it, the warehouse is closed.",
        "I'm sorry, we can't help with that because the order has shipped.",
        "I can't discuss the contract before Monday.",
        "作为人工智能公司，我们提供三种方案。",
        "好的，已为您换个司机。",
    ],
)
def test_business_is_no_refusal(text: str) -> None:
    assert refusal_in(text) is None


def test_a_long_answer_is_no_refusal() -> None:
    text = "As an AI, I don't have opinions. " + "The first plan costs less than the others. " * 10
    assert refusal_in(text) is None


def test_patterns_of_the_recipe() -> None:
    text = "Please call our hotline."
    assert refusal_in(text) is None
    own = judge(refused={"patterns": [r"please call our"]})
    assert own.classify(answer("PLEASE CALL OUR hotline."), ROW).kind == "refused"
    with pytest.raises(ValidationError, match="no regular expression"):
        judge(refused={"patterns": ["("]})


# -- loops -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    [
        "No, " * 20,
        "It is a 2020 truck, which is a type of truck that is" + " a type of truck that is" * 5,
        "The answer is:\n\n" + "The answer to this question is:\n\n" * 6,
        "好的，" * 12,
        "您的订单正在派送中，请您耐心等待。" * 5,
        "set_" + "_account" * 12,
        "请稍等" + "。。。" * 80,
        # Ends properly after its loop.
        "The report is " + "a report of " * 14 + "a driver who is late.",
        # A paragraph that is too long to stand four times in a row.
        "\n".join(
            [
                "The driver's insurance company is responsible for the claim of the customer.",
                "The payment is due to the insurance company at the end of every month.",
                "It is a legal document that is filed with the local authorities.",
            ]
            * 3
        ),
    ],
)
def test_loops(text: str) -> None:
    assert loop_in(text)


@pytest.mark.parametrize(
    "text",
    [
        "No, no, no, that is not what I meant.",
        "Ha ha ha ha! Yes, yes, yes, yes.",
        "-" * 72,
        "1 0 0 0\n0 1 0 0\n0 0 1 0\n0 0 0 1\n" * 2,
        "\n".join(f"{n}. Open page {n}." for n in range(1, 30)),
        "\n".join(f"Order FT{n}: status open, carrier DHL, region EU, paid" for n in range(40)),
        "- Colour: N/A\n- Weight: N/A\n- Size: N/A\n- Origin: N/A\n- Owner: N/A\n",
        "谢谢谢谢，好的好的好的。",
        "2023-01-01, 2023-01-02, 2023-01-03, 2023-01-04, 2023-01-05",
        "We will, we will rock you. We will, we will rock you.",
        "您好，订单FT1已发出。您好，订单FT2已发出。您好，订单FT3已发出。",
        "",
        "a",
    ],
)
def test_no_loops(text: str) -> None:
    assert loop_in(text) is None


def test_data_of_a_json_answer_are_no_loop_but_its_texts_may_be() -> None:
    rows = [{"status": "open", "priority": "high", "team": "operations"}] * 20
    assert judge().classify(answer(json.dumps(rows)), ROW).kind == "accepted"
    text = json.dumps({"reply": "I am here to help you. " * 10})
    assert judge().classify(answer(text), ROW).kind == "looping"


def test_tables_and_code_are_no_loop() -> None:
    table = "Here it is:\n" + "| open | open | open |\n" * 20
    code = "Here it is:\n```\n" + "push(0, 0, 'empty')\n" * 20 + "```\nDone."
    for text in (table, code):
        assert judge().classify(answer(text), ROW).kind == "accepted"


# -- language --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def languages() -> Languages:
    return Languages()


ZH = {**ROW, "prompt": "客服你好，查一下我的订单到哪了，比较着急"}


@pytest.mark.parametrize(
    ("text", "expect", "row", "kind"),
    [
        ("Your order is on its way and arrives tomorrow.", ["zh"], ROW, "wrong_language"),
        ("您的订单WL3316已由DHL Express承运，明天送达。", ["en"], ROW, "wrong_language"),
        ("您的订单WL3316已由DHL Express承运，明天送达。", ["en", "zh"], ROW, "accepted"),
        ("Die Lieferung kommt leider erst morgen an.", ["en", "zh"], ROW, "wrong_language"),
        ("Your order is on its way and arrives tomorrow.", "as_prompt", ZH, "wrong_language"),
        ("您的订单正在派送，预计明天到达。", "as_prompt", ZH, "accepted"),
        ("Your order is on its way.", "as_prompt", {**ROW, "prompt": "FT1234?"}, "accepted"),
        # Nobody can say: two languages, codes, numbers, labels, a word.
        (
            "Your order 您的订单 is on the way 已发货 and arrives 明天到达",
            "as_prompt",
            ROW,
            "accepted",
        ),
        (
            "Your order 您的订单 is on the way 已发货 and arrives 明天到达",
            "as_prompt",
            ZH,
            "accepted",
        ),
        ("您的订单正在由 DHL Express 派送，预计明天到达。", ["en"], ROW, "wrong_language"),
        ("FT12345", ["zh"], ROW, "accepted"),
        ("OK", ["zh"], ROW, "accepted"),
        ("1,234.50 USD", ["zh"], ROW, "accepted"),
        ("card_arrival", ["zh"], ROW, "accepted"),
        ('{"intent":"track_order","slots":{"order":"WL3316"}}', ["zh"], ROW, "accepted"),
        ('{"intent":"track_order","reply":"您好，正在为您查询订单。"}', ["zh"], ROW, "accepted"),
        (
            '{"intent":"track_order","reply":"Thank you, we are checking where it is."}',
            ["zh"],
            ROW,
            "wrong_language",
        ),
        ("```\nfor order in orders:\n    print(order)\n```", ["zh"], ROW, "accepted"),
    ],
)
def test_languages(
    languages: Languages, text: str, expect: Any, row: dict[str, Any], kind: str
) -> None:
    quality = Quality.model_validate({"language": {"expect": expect}})
    judging = Judge(quality, language=languages.sure)
    assert judging.classify(answer(text), row).kind == kind


@pytest.mark.parametrize("expect", [[], ["english"], ["qq"], ["EN"], "prompt"])
def test_a_language_that_there_is_not(expect: Any) -> None:
    with pytest.raises(ValidationError):
        Quality.model_validate({"language": {"expect": expect}})


# -- format ----------------------------------------------------------------------------------

SCHEMA = {
    "type": "object",
    "properties": {"intent": {"$ref": "#/$defs/label"}},
    "required": ["intent"],
    "$defs": {"label": {"enum": ["track", "cancel"]}},
}
LABELLED = {**ROW, "reference": {"intent": "track", "labels": ["track", "cancel"]}}


@pytest.mark.parametrize(
    ("rule", "text", "why"),
    [
        ({"kind": "json"}, '{"a": 1}', ""),
        ({"kind": "json"}, '```json\n{"a": 1}\n```', "not JSON"),
        ({"kind": "json"}, '{"a": 1, "a": 2}', "duplicate key"),
        ({"kind": "json"}, '{"a": NaN}', "NaN"),
        ({"kind": "json_schema", "json_schema": SCHEMA}, '{"intent": "track"}', ""),
        ({"kind": "json_schema", "json_schema": SCHEMA}, '{"intent": "fly"}', "$.intent"),
        ({"kind": "json_schema", "json_schema": SCHEMA}, "{}", "'intent' is a required"),
        ({"kind": "json_schema", "json_schema": SCHEMA}, "track", "not JSON"),
        ({"kind": "regex", "pattern": "track|cancel"}, "track", ""),
        ({"kind": "regex", "pattern": "track|cancel"}, "track it", "does not match"),
        ({"kind": "structured"}, '{"intent": "t", "slots": {}, "reply": "Hi"}', ""),
        ({"kind": "structured"}, '{"intent": "t"}', "format_valid"),
        ({"kind": "label"}, "cancel", ""),
        ({"kind": "label"}, "fly", "format_valid"),
    ],
)
def test_formats(rule: dict[str, Any], text: str, why: str) -> None:
    found = judge(format=rule).classify(answer(text), LABELLED)
    assert found.kind == ("wrong_format" if why else "accepted")
    assert why in found.why


HALF = '{"reply": "\\ud83d that is a sentence of the English language"}'


def test_half_a_surrogate_pair_in_json_is_no_crash_and_no_format() -> None:
    found = judge(format={"kind": "json"}).classify(answer(HALF), ROW)
    assert (found.kind, found.why) == ("wrong_format", HALF_PAIR)
    schema = {"type": "object", "additionalProperties": {"type": "integer"}}
    keyed = judge(format={"kind": "json_schema", "json_schema": schema})
    assert keyed.classify(answer('{"\\ud83d": "x"}'), ROW).why == HALF_PAIR
    assert list(prose_parts(HALF)) == ["? that is a sentence of the English language"]


def test_json_that_is_nested_too_deeply_is_none() -> None:
    with pytest.raises(ValueError, match="nested too deeply"):
        strict_json("[" * 100_000)
    assert list(prose_parts("[" * 100_000)) == ["[" * 100_000]


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        ({"kind": "json_schema"}, "`json_schema` is given with"),
        ({"kind": "json", "pattern": "x"}, "`pattern` is given with"),
        ({"kind": "regex", "pattern": "("}, "no regular expression"),
        ({"kind": "json_schema", "json_schema": {"type": "objekt"}}, "no JSON schema"),
        ({"kind": "json_schema", "json_schema": {"$ref": "http://a/b"}}, "something outside"),
        ({"kind": "json_schema", "json_schema": {"$ref": "#/$defs/a"}}, "nothing at #/"),
    ],
)
def test_a_format_that_is_none(rule: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        judge(format=rule)
