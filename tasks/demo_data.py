"""The demo's messages: what customers and drivers write to a freight company, with references.

Everything is made from a seed by the standard library alone. A message is an opener, a request
(a verb phrase in a frame, or a sentence), at times a filler and a closer, and then noise: typos,
abbreviations, words of the other script, emoji, odd case. Slot values are never touched by the
noise, so whatever a reference asks for can be copied from the prompt.

Two pools of phrases share nothing (`skeletons` shows them, a test compares them): `known` feeds
`pretrain`, `train`, `calibration` and `draft`; `unseen` feeds `eval` and `load`. A model is thus
judged on sentences that nobody taught it, about intents and slots that it knows. No prompt
occurs twice over all parts.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

from registry.digests import digest_of, digest_of_file
from tasks import demo_phrases_en, demo_phrases_zh

Record = dict[str, Any]
Pool = Literal["known", "unseen"]

PARTS: dict[str, Pool] = {
    "pretrain": "known",
    "train": "known",
    "calibration": "known",
    "draft": "known",
    "eval": "unseen",
    "load": "unseen",
}

CUSTOMER_INTENTS = (
    "track_order",
    "quote_price",
    "book_truck",
    "cancel_order",
    "change_address",
    "change_time",
    "report_damage",
    "payment_invoice",
    "complain",
)
DRIVER_INTENTS = (
    "driver_checkin",
    "report_delay",
    "safety_report",
    "change_time",
    "report_damage",
    "payment_invoice",
)
INTENTS = tuple(dict.fromkeys(CUSTOMER_INTENTS + DRIVER_INTENTS))

SEGMENTS: dict[str, tuple[str, Literal["zh", "en"], tuple[str, ...]]] = {
    "customer_zh": ("customer", "zh", CUSTOMER_INTENTS),
    "customer_en": ("customer", "en", CUSTOMER_INTENTS),
    "driver_zh": ("driver", "zh", DRIVER_INTENTS),
    "driver_en": ("driver", "en", DRIVER_INTENTS),
}
"""Business segment: who writes, in which language, about what."""

SLOTS = (
    "order",
    "origin",
    "destination",
    "vehicle",
    "time",
    "weight",
    "amount",
    "delay",
    "location",
)
"""Every slot, in the order in which replies list them."""

EMOJI = ("🙏", "😊", "😡", "🚚", "📦", "👍", "⏰", "❗", "😭", "🙂")

_LANGUAGES: dict[str, ModuleType] = {"zh": demo_phrases_zh, "en": demo_phrases_en}
_ATTEMPTS = 400


def source_digest() -> str:
    """Digest of the generator's own files: other phrases are other data under the same seed."""
    modules = (Path(__file__), Path(demo_phrases_en.__file__), Path(demo_phrases_zh.__file__))
    return digest_of([digest_of_file(path) for path in modules])


def generate(seed: int, sizes: Mapping[str, int]) -> dict[str, list[Record]]:
    """Records by part, `sizes[part]` of each; the same seed and sizes give the same records.

    A record is `{"id", "segment", "prompt", "reference"}`, its reference `{"intent", "slots",
    "facts", "language"}`. Segments and, within a segment, intents take turns, so that every
    part holds all of them in near-equal numbers. A part's records do not depend on the sizes of
    parts that stand after it in `PARTS`.

    Raises ValueError for an unknown part, a negative size, or a size for which the phrases do
    not yield enough distinct prompts.
    """
    for part, size in sizes.items():
        if part not in PARTS:
            raise ValueError(f"unknown part {part!r}; known are {', '.join(PARTS)}")
        if size < 0:
            raise ValueError(f"size of part {part!r} is {size}; it must not be negative")
    taken: set[str] = set()
    made: dict[str, list[Record]] = {}
    for part in (part for part in PARTS if part in sizes):
        rng = random.Random(f"{seed}/{part}")
        made[part] = [_distinct(rng, part, number, taken) for number in range(sizes[part])]
    return made


def reference_reply(record: Mapping[str, Any]) -> str:
    """The gold assistant message: compact JSON `{"intent":..,"slots":{..},"reply":".."}`."""
    reference = record["reference"]
    reply = _reply_template(reference["intent"], reference["language"], reference["slots"])
    return json.dumps(
        {
            "intent": reference["intent"],
            "slots": reference["slots"],
            "reply": reply.format_map(reference["slots"]),
        },
        ensure_ascii=False,
        separators=(",", ":"),
    )


def foreign(seed: int, n: int) -> list[Record]:
    """`n` distinct records of text wholly unlike the business, for harsh calibration.

    Same shape as the others, segment `foreign`, intent `none`, no slots and no facts.
    """
    rng = random.Random(f"{seed}/foreign")
    makers = (_foreign_code, _foreign_sums, _foreign_greek, _foreign_kana)
    records: list[Record] = []
    taken: set[str] = set()
    while len(records) < n:
        prompt = makers[len(records) % len(makers)](rng)
        if prompt in taken:
            continue
        taken.add(prompt)
        records.append(
            {
                "id": f"foreign-{len(records):05d}",
                "segment": "foreign",
                "prompt": prompt,
                "reference": {"intent": "none", "slots": {}, "facts": [], "language": "en"},
            }
        )
    return records


def form(rng: random.Random) -> tuple[str, str]:
    """A filled-in form and the same as compact JSON: `("FT4821; Jinan->Wuhan", '{"slots":..}')`.

    Fresh values, taken from no record, in any order, some with their labels; no sentence and no
    intent. For teaching a model to copy values into JSON without showing it any reference.
    """
    language = rng.choice(tuple(_LANGUAGES))
    slots = {
        name: _value(rng, name, language)
        for name in SLOTS
        if rng.random() < (0.8 if name == "order" else 0.3)
    }
    values = dict(slots)
    fields = []
    if {"origin", "destination"} <= set(values) and rng.random() < 0.7:
        fields.append(f"{values.pop('origin')}->{values.pop('destination')}")
    for name, value in values.items():
        # A city alone does not say which slot it fills.
        plain = name not in ("origin", "destination", "location") and rng.random() < 0.5
        fields.append(
            value
            if plain
            else rng.choice((f"{name}: {value}", f"{name}={value}", f"{value}={name}"))
        )
    rng.shuffle(fields)
    text = rng.choice((", ", "; ", "，", " / ", " ")).join(fields)
    return text, json.dumps({"slots": slots}, ensure_ascii=False, separators=(",", ":"))


def skeletons(pool: Pool) -> dict[str, set[str]]:
    """Every phrase template of a pool by kind (`core`, `frame`, `opener`, `closer`, `filler`)."""
    found: dict[str, set[str]] = {
        kind: set() for kind in ("core", "frame", "opener", "closer", "filler")
    }
    for words in _LANGUAGES.values():
        for pools in words.CORES.values():
            for block in pools[pool].values():
                found["core"].update(_lines(block))
        found["frame"].update(_lines(words.FRAMES[pool]))
        found["filler"].update(_lines(words.FILLERS[pool]))
        for role in ("customer", "driver"):
            found["opener"].update(_lines(words.OPENERS[role][pool]))
            found["closer"].update(_lines(words.CLOSERS[role][pool]))
    found["frame"].discard("{do}")
    return found


# -- one record ----------------------------------------------------------------------------


def _distinct(rng: random.Random, part: str, number: int, taken: set[str]) -> Record:
    segment = list(SEGMENTS)[number % len(SEGMENTS)]
    role, language, intents = SEGMENTS[segment]
    intent = intents[(number // len(SEGMENTS)) % len(intents)]
    for _ in range(_ATTEMPTS):
        prompt, slots = _message(rng, PARTS[part], role, language, intent)
        if prompt not in taken:
            break
    else:
        raise ValueError(f"part {part!r}: no new {segment} message about {intent} can be made")
    taken.add(prompt)
    reply = _reply_template(intent, language, slots)
    return {
        "id": f"{part}-{number:05d}",
        "segment": segment,
        "prompt": prompt,
        "reference": {
            "intent": intent,
            "slots": slots,
            "facts": [slots[name] for name in _placeholders(reply)],
            "language": language,
        },
    }


def _message(
    rng: random.Random, pool: Pool, role: str, language: str, intent: str
) -> tuple[str, dict[str, str]]:
    words = _LANGUAGES[language]
    forms = words.CORES[intent][pool]
    form = rng.choice(("do", "say"))
    text = rng.choice(_lines(forms[form]))
    if form == "do":
        text = rng.choice(_lines(words.FRAMES[pool])).replace("{do}", text)
    gap = "" if language == "zh" else " "
    if rng.random() < 0.15:
        text = rng.choice(_lines(words.FILLERS[pool])) + gap + text
    if rng.random() < 0.45:
        text = rng.choice(_lines(words.OPENERS[role][pool])) + gap + text
    if rng.random() < 0.35:
        joint = "" if text.endswith(("？", "?", "！", "!")) else "，" if language == "zh" else ","
        text = text + joint + gap + rng.choice(_lines(words.CLOSERS[role][pool]))
    text = _noise(rng, text, language)
    slots = {name: _value(rng, name, language) for name in SLOTS if f"{{{name}}}" in text}
    if slots.get("origin") is not None:
        while slots["destination"] == slots["origin"]:
            slots["destination"] = _value(rng, "destination", language)
    return text.format_map(slots), slots


def _value(rng: random.Random, name: str, language: str) -> str:
    words = _LANGUAGES[language]
    zh = language == "zh"
    if name == "order":
        return rng.choice(("FT", "HY", "KD", "WL")) + f"{rng.randrange(10_000):04d}"
    if name == "vehicle":
        return str(rng.choice(words.VEHICLES))
    if name == "time":
        return rng.choice(words.DAYS) + _gap(zh) + rng.choice(words.HOURS)
    if name == "weight":
        tons = rng.random() < 0.7
        number = rng.randrange(2, 33) if tons else rng.randrange(1, 20) * 50
        return f"{number}{('吨' if tons else '公斤') if zh else (' tons' if tons else ' kg')}"
    if name == "amount":
        return f"{rng.randrange(10, 990) * 10}{'元' if zh else ' yuan'}"
    if name == "delay":
        hours = rng.random() < 0.5
        number = rng.randrange(2, 13) if hours else rng.randrange(2, 12) * 5
        if zh:
            return f"{number}{'小时' if hours else '分钟'}"
        return f"{number} {'hours' if hours else 'minutes'}"
    return rng.choice(words.CITIES.split())


def _gap(zh: bool) -> str:
    """What stands between two words."""
    return "" if zh else " "


def _noise(rng: random.Random, template: str, language: str) -> str:
    """`template` with everyday disorder in its words; its placeholders stay whole."""
    words = _LANGUAGES[language]
    if rng.random() < 0.12:
        template = _replace_one(rng, template, words.MIXED_SCRIPT)
    if language == "zh":
        if rng.random() < 0.12:
            template = _replace_one(rng, template, words.TYPOS)
        if rng.random() < 0.08:
            template = template.replace("，", " ")
    else:
        if rng.random() < 0.12:
            template = _replace_one(rng, template, words.ABBREVIATIONS)
        if rng.random() < 0.12:
            template = _slip(rng, template)
        style = rng.random()
        if style < 0.08:
            template = _outside(template, str.upper)
        elif style < 0.16:
            template = _outside(template, str.capitalize)
    if rng.random() < 0.12:
        template = f"{template} {rng.choice(EMOJI)}"
    return template


def _replace_one(rng: random.Random, template: str, table: Mapping[str, str]) -> str:
    present = [word for word in table if word in template]
    if not present:
        return template
    word = rng.choice(present)
    return _outside(template, lambda text: text.replace(word, table[word]))


def _slip(rng: random.Random, template: str) -> str:
    """One letter of one longer word dropped, doubled or swapped with its neighbour."""
    spans = [m.span() for m in re.finditer(r"(?<![\w{])[A-Za-z]{5,}(?![\w}])", template)]
    if not spans:
        return template
    start, end = rng.choice(spans)
    at = rng.randrange(start + 1, end - 1)
    first, second = template[at], template[at + 1]
    slip = rng.choice((second, first + first + second, second + first))
    return template[:at] + slip + template[at + 2 :]


def _outside(template: str, change: Any) -> str:
    """Apply `change` to the text between placeholders only."""
    pieces = re.split(r"(\{\w+\})", template)
    return "".join(piece if piece.startswith("{") else change(piece) for piece in pieces)


def _reply_template(intent: str, language: str, slots: Mapping[str, str]) -> str:
    words = _LANGUAGES[language]
    if intent == "complain" and "order" not in slots:
        return str(words.COMPLAINT_WITHOUT_ORDER)
    return str(words.REPLIES[intent])


def _placeholders(template: str) -> list[str]:
    return re.findall(r"\{(\w+)\}", template)


def _lines(block: str) -> list[str]:
    return [line.strip() for line in block.strip().splitlines()]


# -- foreign text --------------------------------------------------------------------------


def _foreign_code(rng: random.Random) -> str:
    a, b, c = (rng.choice("abcdefghijkmnpqrstuvwxyz") * rng.randint(1, 3) for _ in range(3))
    return (
        f"for(int {a}=0;{a}<{rng.randrange(9, 999)};++{a}){{{b}[{a}]^=~{c}<<{rng.randrange(9)};}}"
    )


def _foreign_sums(rng: random.Random) -> str:
    terms = [f"{rng.randrange(10**9)}.{rng.randrange(10**6)}e-{rng.randrange(9)}" for _ in range(5)]
    return " % ".join(terms)


def _foreign_greek(rng: random.Random) -> str:
    return " ".join(
        "".join(rng.choice("αβγδεζηθικλμνξοπρστυφχψω") for _ in range(rng.randint(3, 9)))
        for _ in range(8)
    )


def _foreign_kana(rng: random.Random) -> str:
    return "".join(
        rng.choice("あいうえおかきくけこサシスセソタチツテトんをがぎぐげご") for _ in range(30)
    )
