"""Each answer of the teacher in exactly one class.

==================  ==============================================================================
`accepted`          complete, and nothing of what follows
`rejected`          the server refused the request
`length`            cut at the token limit, by the finish reason
`content_filter`    taken out by the provider, by the finish reason
`unknown`           no finish reason, or one that does not say that the answer is complete
`empty`             no text and no call of a tool
`reasoning_only`    reasoning, and no answer after it
`refused`           the provider says so, or it reads so (`answer_refusals.py`)
`looping`           it goes round in circles (`answer_loops.py`)
`wrong_language`    surely in another language than is expected (`engines/languages.py`)
`wrong_format`      its consumer could not read it, or a reasoning tag or a token of a chat
                    template is left in it
==================  ==============================================================================

The first that fits, in this order. Whether an answer is complete is decided by the finish reason,
never by the look of the text: a cut answer that ends with a full stop is cut, and a complete one
may end without. Pure but for the language, which is asked of a detector that is given.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from eval_suites.scoring import score, score_label, strict_json
from recipes.quality_recipe import FormatRule, Quality
from tasks.answer_loops import loop_in
from tasks.answer_refusals import compiled, refusal_in
from tasks.answer_text import left_over, prose_parts, split_reasoning, writable
from tasks.conversations import tools_of
from tasks.engines.openai_chat import ChatResult

CLASSES = (
    "accepted",
    "rejected",
    "length",
    "content_filter",
    "unknown",
    "empty",
    "reasoning_only",
    "refused",
    "looping",
    "wrong_language",
    "wrong_format",
)

RULES = {
    "wrong_language": "language",
    "wrong_format": "format",
    **{name: name for name in CLASSES if not name.startswith("wrong_") and name != "accepted"},
}
"""The rule of the recipe (a field of `quality`) by class; `length` has `max_truncated_share`."""

HALF_PAIR = "what cannot be written down (half of a surrogate pair)"

SureLanguage = Callable[[Iterable[str]], str | None]
"""ISO 639-1 code of the language of some parts of a text, None where nobody can say."""


@dataclass(frozen=True)
class Judged:
    """An answer, its class, and what is learned of it."""

    result: ChatResult
    kind: str
    text: str
    """The answer without its reasoning."""
    reasoning: str = ""
    why: str = ""
    """What made it this class, for people."""
    flaw: str = ""
    """Of a cut answer: the class that its text would have otherwise, where it is a bad one."""

    @property
    def truncated(self) -> bool:
        return self.kind == "length"


@dataclass(frozen=True)
class Judge:
    """The rules of one recipe, ready for many answers."""

    quality: Quality
    keep_truncated: bool = False
    language: SureLanguage | None = None
    """Needed where `quality.language` is given."""
    _refusals: tuple[re.Pattern[str], ...] = field(init=False)
    _format: Callable[[str, Mapping[str, Any]], str] | None = field(init=False)

    def __post_init__(self) -> None:
        rules = self.quality
        object.__setattr__(self, "_refusals", compiled(rules.refused.patterns))
        checked = None if rules.format is None else format_check(rules.format)
        object.__setattr__(self, "_format", checked)

    def keeps(self, judged: Judged) -> bool:
        """Whether an answer is learned."""
        if judged.kind == "accepted":
            return True
        if judged.kind == "length":
            return self.keep_truncated and bool(judged.text.strip()) and not judged.flaw
        rule = getattr(self.quality, RULES[judged.kind])
        if not getattr(rule, "keep", False) or not any(map(_is_seen, judged.text)):
            return False
        # A call that nobody could make and reasoning that may be left are never learned.
        return not judged.result.tool_calls and not left_over(
            judged.text, self.quality.reasoning_tags
        )

    def classify(self, result: ChatResult, row: Mapping[str, Any]) -> Judged:
        """The class of one answer to the prompt `row`."""
        text, thought = split_reasoning(result.text, self.quality.reasoning_tags)
        reasoning = "\n".join(filter(None, (result.reasoning.strip(), thought)))

        def judged(kind: str, why: str = "", flaw: str = "") -> Judged:
            return Judged(result, kind, text, reasoning, why, flaw)

        if result.state == "rejected":
            return judged("rejected", result.reason)
        flaw, why = self._flaw(result, text, reasoning, row)
        if result.finish_reason == "length":
            return judged("length", why, flaw)
        if result.finish_reason == "content_filter":
            return judged("content_filter")
        called = result.finish_reason in ("tool_calls", "function_call") and result.tool_calls
        if result.finish_reason != "stop" and not called:
            return judged("unknown", f"finish reason {result.finish_reason!r}")
        return judged(flaw or "accepted", why)

    def _flaw(
        self, result: ChatResult, text: str, reasoning: str, row: Mapping[str, Any]
    ) -> tuple[str, str]:
        """The class that the text alone gives an answer, empty for a good one, and why."""
        cut = result.finish_reason == "length"
        if result.refusal:
            return "refused", result.refusal[:100]
        if not any(map(_is_seen, text)) and not result.tool_calls:
            return ("reasoning_only" if reasoning else "empty"), ""
        if not result.tool_calls and (words := refusal_in(text, self._refusals)):
            return "refused", words
        if loop := next(filter(None, map(loop_in, prose_parts(text))), None):
            return "looping", loop
        if wrong := self._other_language(text, row):
            return "wrong_language", wrong
        if tag := left_over(text, self.quality.reasoning_tags):
            return "wrong_format", f"{tag} is left in it"
        if result.tool_calls:
            wrong = bad_call(result.tool_calls, row)
        else:
            # What was cut cannot have its format, whatever it had become.
            wrong = "" if cut or self._format is None else self._format(text, row)
        return ("wrong_format", wrong) if wrong else ("", "")

    def _other_language(self, text: str, row: Mapping[str, Any]) -> str:
        rule = self.quality.language
        if rule is None or self.language is None:
            return ""
        found = self.language(prose_parts(text))
        if found is None:
            return ""
        if rule.expect == "as_prompt":
            asked = self.language([row["prompt"]])
            return "" if asked in (None, found) else f"{found}, and the prompt is {asked}"
        return "" if found in rule.expect else found


def format_check(rule: FormatRule) -> Callable[[str, Mapping[str, Any]], str]:
    """A function of an answer and its prompt row: what is wrong with the format, or nothing."""

    def as_json(text: str, row: Mapping[str, Any]) -> str:
        try:
            value = strict_json(text)
        except ValueError as error:
            return f"not JSON: {error}"
        return HALF_PAIR if _has_half_pair(value) else ""

    if rule.kind == "json":
        return as_json
    if rule.kind == "regex":
        pattern = re.compile(rule.pattern or "")
        return lambda text, row: "" if pattern.fullmatch(text) else "does not match the pattern"
    if rule.kind == "json_schema":
        from jsonschema import Draft202012Validator
        from referencing import Registry

        # Without a registry of its own the library would fetch what a schema refers to.
        validator = Draft202012Validator(rule.json_schema or {}, registry=Registry())

        def by_schema(text: str, row: Mapping[str, Any]) -> str:
            if wrong := as_json(text, row):
                return wrong
            try:
                error = next(validator.iter_errors(json.loads(text)), None)
            except RecursionError:
                return "nested too deeply"
            return "" if error is None else f"{error.json_path}: {error.message[:100]}"

        return by_schema

    def by_suite(text: str, row: Mapping[str, Any]) -> str:
        # A reference is no part of these checks, except for the labels that are known.
        reference = {"intent": "", **(row.get("reference") or {})}
        marks = (
            score(text, reference, row["prompt"])
            if rule.kind == "structured"
            else score_label(text, reference)
        )
        return "" if marks["format_valid"] == 1.0 else f"format_valid is 0 ({rule.kind})"

    return by_suite


def bad_call(calls: Iterable[Mapping[str, Any]], row: Mapping[str, Any]) -> str:
    """What is wrong with the calls of an answer: no known function, or arguments that are no
    object."""
    known = [tool.get("function", {}).get("name") for tool in tools_of(row)]
    for call in calls:
        function = call.get("function")
        function = function if isinstance(function, Mapping) else {}
        if function.get("name") not in known:
            return f"calls {function.get('name')!r}, which is no tool of the prompt"
        try:
            arguments = strict_json(function.get("arguments") or "{}")
        except (ValueError, TypeError):
            arguments = None
        if not isinstance(arguments, dict):
            return f"the arguments of {function.get('name')} are no JSON object"
        if _has_half_pair(arguments):
            return f"the arguments of {function.get('name')} hold {HALF_PAIR}"
    return ""


def _has_half_pair(value: Any) -> bool:
    """Whether a JSON value holds what no file and no tokenizer takes."""
    try:
        text = json.dumps(value, ensure_ascii=False)
    except RecursionError:
        # Read, and yet too deep to be written: `strict_json` allows a little more.
        return True
    return writable(text) != text


def _is_seen(character: str) -> bool:
    """False for white space, control characters and those of no width."""
    return character.isprintable() and not character.isspace()
