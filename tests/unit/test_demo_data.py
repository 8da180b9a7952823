"""The demo's messages: reproducible, honest (eval templates are unseen), and copyable."""

from __future__ import annotations

import json
import random
import re
from collections import Counter

import pytest

from eval_suites.scoring import score
from tasks.demo_data import (
    INTENTS,
    PARTS,
    SEGMENTS,
    SLOTS,
    Record,
    foreign,
    form,
    generate,
    reference_reply,
    skeletons,
)

SIZES = {
    "pretrain": 3000,
    "train": 800,
    "calibration": 64,
    "draft": 200,
    "eval": 400,
    "load": 300,
}


@pytest.fixture(scope="module")
def parts() -> dict[str, list[Record]]:
    return generate(7, SIZES)


def everything(parts: dict[str, list[Record]]) -> list[Record]:
    return [record for records in parts.values() for record in records]


def bare(phrase: str) -> str:
    """A template without its slots, case, spaces and punctuation."""
    return re.sub(r"[\W_]+", "", re.sub(r"\{\w+\}", "", phrase).casefold())


def words(phrase: str) -> set[str]:
    return set(re.findall(r"[a-z']+|[\u4e00-\u9fff]", re.sub(r"\{\w+\}", " ", phrase.casefold())))


def test_same_seed_same_records_other_seed_others(parts: dict[str, list[Record]]) -> None:
    assert generate(7, SIZES) == parts
    assert generate(8, {"eval": 20})["eval"] != generate(7, {"eval": 20})["eval"]


def test_sizes_and_ids(parts: dict[str, list[Record]]) -> None:
    assert {part: len(records) for part, records in parts.items()} == SIZES
    ids = [record["id"] for record in everything(parts)]
    assert len(set(ids)) == len(ids)


def test_no_prompt_occurs_twice_over_all_parts(parts: dict[str, list[Record]]) -> None:
    prompts = [record["prompt"] for record in everything(parts)]
    assert len(set(prompts)) == len(prompts)


def test_pools_share_no_template() -> None:
    known, unseen = skeletons("known"), skeletons("unseen")
    for kind in known:
        assert known[kind] and unseen[kind], kind
    seen = {bare(phrase) for phrases in known.values() for phrase in phrases}
    held = {bare(phrase) for phrases in unseen.values() for phrase in phrases}
    assert not seen & held


def test_no_unseen_request_is_a_known_one_in_other_clothes() -> None:
    known = [bare(phrase) for phrase in skeletons("known")["core"]]
    for phrase in skeletons("unseen")["core"]:
        inner = bare(phrase)
        # A lone verb such as "cancel" is vocabulary, not a template.
        telling = 12 if inner.isascii() else 5
        assert not [other for other in known if inner in other], phrase
        assert not [other for other in known if other in inner and len(other) >= telling], phrase
    for phrase in skeletons("unseen")["core"]:
        for other in skeletons("known")["core"]:
            same = len(words(phrase) & words(other)) / len(words(phrase) | words(other))
            assert same < 0.7, (phrase, other)


def test_every_part_holds_every_segment_and_intent(parts: dict[str, list[Record]]) -> None:
    for part, records in parts.items():
        segments = Counter(record["segment"] for record in records)
        assert set(segments) == set(SEGMENTS), part
        assert max(segments.values()) - min(segments.values()) <= 1
        assert {record["reference"]["intent"] for record in records} == set(INTENTS)


def test_slot_values_and_facts_can_be_copied(parts: dict[str, list[Record]]) -> None:
    for record in everything(parts):
        reference = record["reference"]
        assert set(reference) == {"intent", "slots", "facts", "language"}
        assert set(reference["slots"]) <= set(SLOTS)
        assert "{" not in record["prompt"]
        for value in [*reference["slots"].values(), *reference["facts"]]:
            assert value in record["prompt"]


def test_reference_reply_is_the_perfect_answer(parts: dict[str, list[Record]]) -> None:
    for record in everything(parts):
        reply = reference_reply(record)
        assert list(json.loads(reply)) == ["intent", "slots", "reply"]
        assert set(score(reply, record["reference"], record["prompt"]).values()) == {1.0}, record


def test_messages_are_not_clean(parts: dict[str, list[Record]]) -> None:
    prompts = [record["prompt"] for record in parts["eval"]]
    lengths = sorted(len(prompt) for prompt in prompts)
    assert lengths[0] < 20 and lengths[-1] > 90
    assert any(re.search("[\U0001f300-\U0001faff]", prompt) for prompt in prompts)
    english = [r["prompt"] for r in parts["eval"] if r["reference"]["language"] == "en"]
    assert any(re.search("[\u4e00-\u9fff]", prompt) for prompt in english)


def test_parts_that_stand_earlier_do_not_depend_on_later_ones() -> None:
    assert next(iter(PARTS)) == "pretrain"
    small = generate(3, {"pretrain": 50})
    assert generate(3, {"pretrain": 50, "eval": 60})["pretrain"] == small["pretrain"]


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"test": 3}, "unknown part"),
        ({"eval": -1}, "negative"),
    ],
)
def test_wrong_sizes(sizes: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        generate(0, sizes)


def test_forms_show_every_value_and_no_reference() -> None:
    rng = random.Random(0)
    for _ in range(200):
        text, answer = form(rng)
        filled = json.loads(answer)
        assert list(filled) == ["slots"]
        assert set(filled["slots"]) <= set(SLOTS)
        assert all(value in text for value in filled["slots"].values())


def test_foreign_text_is_nothing_like_the_business() -> None:
    records = foreign(0, 40)
    assert records == foreign(0, 40)
    assert len({record["prompt"] for record in records}) == 40
    for record in records:
        assert record["reference"] == {"intent": "none", "slots": {}, "facts": [], "language": "en"}
        assert not re.search(r"[\u4e00-\u9fff]|(FT|HY|KD|WL)\d", record["prompt"])
