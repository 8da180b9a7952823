"""Business metrics of one response against its reference. Pure, and total over response texts.

The consumer of a response parses it strictly: one JSON object, no duplicate key, no NaN, nothing
before or after it but white space. What it cannot parse has no intent, no slots and no reply, so
all four metrics are 0. What it can parse is judged key by key.

========================  ======================================================================
`hit_rate`                1 when `intent` is a string equal to the reference's intent, else 0
`slot_f1`                 F1 over slot (key, value) pairs; values equal after Unicode NFKC and
                          with white space at both ends removed; 1 when both sides are empty
`format_valid`            1 when the object has exactly `intent` (string), `slots` (object of
                          strings) and `reply` (string), else 0
`satisfaction`            the rubric below over `reply`, in [0, 1]; 0 for a blank reply
========================  ======================================================================

The satisfaction rubric adds up what is fulfilled:

======  ==========  ============================================================================
weight  criterion   fulfilled when
======  ==========  ============================================================================
0.5     facts       share of the reference's facts that stand in the reply (1 when it has none)
0.2     none wrong  every order-like code and every number of the reply stands in the prompt, in
                    a slot or in a fact of the reference
0.1     language    the reply is in the reference's language: Han characters make up at least
                    half of its words for `zh`, less than half for `en`
0.1     polite      it has at least one of `POLITE`'s expressions of that language
0.1     brief       it has at most `LONGEST` characters of that language
======  ==========  ============================================================================
"""

from __future__ import annotations

import json
import re
import unicodedata
from collections.abc import Mapping
from typing import Any

METRICS = ("hit_rate", "slot_f1", "format_valid", "satisfaction")

WEIGHTS = {"facts": 0.5, "none_wrong": 0.2, "language": 0.1, "polite": 0.1, "brief": 0.1}

POLITE = {
    "zh": ("您", "请", "谢谢", "感谢", "抱歉", "不好意思", "收到"),
    "en": ("thank", "please", "sorry", "apolog", "happy to", "glad to", "welcome"),
}

LONGEST = {"zh": 80, "en": 240}

_CODE = re.compile(r"[A-Za-z]{1,6}-?\d{3,}|\d+(?:\.\d+)?")
_HAN = re.compile(r"[\u3400-\u9fff\uf900-\ufaff]")
_WORD = re.compile(r"[^\W\d_\u3400-\u9fff\uf900-\ufaff]+")


def score(response: str, reference: Mapping[str, Any], prompt: str) -> dict[str, float]:
    """The four `METRICS` of a structured response, each in [0, 1].

    `reference` holds `intent`, and where it has them `slots`, `facts` and `language` (`zh` or
    `en`; without it, language, politeness and length are judged by the prompt's own script).
    Never raises for any text in `response` or `prompt`.
    """
    answer = _parsed(response)
    if answer is None:
        return dict.fromkeys(METRICS, 0.0)
    slots, reply = answer.get("slots"), answer.get("reply")
    return {
        "hit_rate": float(answer.get("intent") == reference["intent"]),
        "slot_f1": _slot_f1(slots, reference.get("slots") or {}),
        "format_valid": float(_has_shape(answer)),
        "satisfaction": _satisfaction(reply, reference, prompt) if isinstance(reply, str) else 0.0,
    }


def score_label(response: str, reference: Mapping[str, Any]) -> dict[str, float]:
    """`hit_rate` and `format_valid` of a response that should be one plain label.

    A hit: the label equals the reference's `intent` after `normalised_label`. Valid: one line,
    not blank, and a known label where the reference lists its `labels`.
    """
    label = normalised_label(response)
    one_line = bool(label) and len(response.strip().splitlines()) == 1
    labels = reference.get("labels")
    known = labels is None or label in {normalised_label(each) for each in labels}
    return {
        "hit_rate": float(one_line and label == normalised_label(reference["intent"])),
        "format_valid": float(one_line and known),
    }


def label_named(response: str, reference: Mapping[str, Any]) -> float:
    """1 when a reply in sentences names the right label and no other one, else 0.

    For models that answer a question with prose: `The question is about changing the PIN` names
    none, `This is about the age limit.` names `age_limit`. A name is the label's words in order,
    whatever stands between them: spaces, hyphens or underscores.
    """
    text = f"_{normalised_label(re.sub(r'[^0-9A-Za-z一-鿿]+', ' ', response))}_"
    wanted = normalised_label(reference["intent"])
    others = {normalised_label(each) for each in reference.get("labels") or ()} - {wanted}
    return float(f"_{wanted}_" in text and not any(f"_{other}_" in text for other in others))


def normalised_label(text: str) -> str:
    """Case, outer quotes, brackets and final stop removed; spaces and hyphens as `_`."""
    plain = unicodedata.normalize("NFKC", text).casefold().strip(" \t\r\n\"'`*.。:;,!()[]{}<>“”‘’")
    return re.sub(r"[\s_-]+", "_", plain)


def rubric(reply: str, reference: Mapping[str, Any], prompt: str) -> dict[str, float]:
    """Each criterion of the satisfaction rubric in [0, 1], unweighted, for a non-blank reply."""
    language = reference.get("language") or ("zh" if _han_share(prompt) >= 0.5 else "en")
    text = _nfkc(reply)
    facts = [_nfkc(str(fact)) for fact in reference.get("facts") or ()]
    said = [_nfkc(str(value)) for value in (reference.get("slots") or {}).values()]
    allowed = {code.upper() for source in (_nfkc(prompt), *facts, *said) for code in _codes(source)}
    lowered = text.casefold()
    return {
        "facts": sum(stands_in(fact, text) for fact in facts) / len(facts) if facts else 1.0,
        "none_wrong": float(all(code.upper() in allowed for code in _codes(text))),
        "language": float((_han_share(text) >= 0.5) == (language == "zh")),
        "polite": float(any(word in lowered for word in POLITE[language])),
        "brief": float(len(text) <= LONGEST[language]),
    }


# -- parts ---------------------------------------------------------------------------------


def strict_json(text: str) -> Any:
    """The value of a text that is JSON and nothing else. Raises `ValueError`.

    As a strict consumer reads it: no key twice, no NaN, nothing before or after it.
    """
    try:
        return json.loads(text, object_pairs_hook=_without_duplicates, parse_constant=_no_constant)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def _parsed(response: str) -> dict[str, Any] | None:
    try:
        value = strict_json(response)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("duplicate key")
    return found


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


def _has_shape(answer: Mapping[str, Any]) -> bool:
    slots = answer.get("slots")
    return (
        set(answer) == {"intent", "slots", "reply"}
        and isinstance(answer["intent"], str)
        and isinstance(slots, dict)
        and all(isinstance(value, str) for value in slots.values())
        and isinstance(answer["reply"], str)
    )


def _slot_f1(slots: Any, wanted: Mapping[str, str]) -> float:
    if not isinstance(slots, dict):
        return 0.0
    if not slots and not wanted:
        return 1.0
    given = {(key, _nfkc(value).strip()) for key, value in slots.items() if isinstance(value, str)}
    hits = sum((key, _nfkc(value).strip()) in given for key, value in wanted.items())
    return 2 * hits / (len(slots) + len(wanted))


def _satisfaction(reply: str, reference: Mapping[str, Any], prompt: str) -> float:
    if not reply.strip():
        return 0.0
    marks = rubric(reply, reference, prompt)
    return round(sum(WEIGHTS[name] * mark for name, mark in marks.items()), 6)


def stands_in(fact: str, text: str) -> bool:
    """Whether `fact` stands in `text` as a whole, not as part of a longer code or number."""
    before = r"(?<![A-Za-z0-9])" if fact[:1].isascii() and fact[:1].isalnum() else ""
    after = r"(?![A-Za-z0-9])" if fact[-1:].isascii() and fact[-1:].isalnum() else ""
    return re.search(before + re.escape(fact) + after, text, re.IGNORECASE) is not None


def _codes(text: str) -> list[str]:
    return _CODE.findall(text)


def _han_share(text: str) -> float:
    """Share of Han characters among Han characters and words of letters."""
    han = len(_HAN.findall(text))
    # A code such as FT12345 belongs to no language.
    words = len(_WORD.findall(_CODE.sub(" ", text)))
    return han / (han + words) if han + words else 0.0


def _nfkc(text: str) -> str:
    return unicodedata.normalize("NFKC", text)
