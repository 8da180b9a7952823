"""Requests in the text log of a vLLM server (0.32), as far as it holds them.

`--enable-log-requests --enable-log-outputs` at level DEBUG write the token ids of a prompt as it
arrives and of an answer as it is given (streamed ones in pieces); at INFO there is no count of
tokens. Chat completions and responses log their answers, plain completions do not. Times have
whole seconds and no year.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

COLUMNS = ["request_id", "arrived", "prompt_tokens", "output_tokens", "ended"]

_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
_LINE = re.compile(
    r"(?:\([^()]* pid=\d+\) )?(?:DEBUG|INFO) ((\d\d)-\d\d) (\d\d:\d\d:\d\d) \[[^\]]*\] (.*)"
)
# A prompt may hold such words itself; the line's own stand last.
_PROMPT = re.compile(r"Request (\S+) details: prompt: .*, prompt_token_ids: (\[[\d, ]*\]|None),")
_ANSWER = re.compile(
    r"Generated response (\S+)(?: \(streaming (?:delta|complete)\))? details: "
    r"output_token_ids: (\[[\d, ]*\]|None)$"
)


@dataclass
class Logged:
    """One request; `years` is how often the year had changed when it arrived, `ended_years` too."""

    request_id: str
    line: int
    years: int
    arrived: str
    prompt_tokens: int | None
    output_tokens: int | None = None
    ended: str | None = None
    ended_years: int = 0


def requests_of(lines: Iterable[str]) -> tuple[list[Logged], int]:
    """In the order of their arrival, and how often the year changed within the log."""
    found: dict[str, Logged] = {}
    years, before = 0, ""
    for number, line in enumerate(lines, start=1):
        if "_token_ids: " not in line:
            continue
        head = _LINE.match(_COLOUR.sub("", line).rstrip("\r\n"))
        if head is None:
            continue
        day, month, clock, message = head.groups()
        years += month == "01" and before == "12"
        before = month
        if prompt := _PROMPT.match(message):
            key = prompt[1]
            found.setdefault(key, Logged(key, number, years, f"{day} {clock}", _count(prompt[2])))
        elif (answer := _ANSWER.match(message)) and answer[1] in found:
            one, tokens = found[answer[1]], _count(answer[2])
            if tokens is not None:
                one.output_tokens = tokens + (one.output_tokens or 0)
            one.ended, one.ended_years = f"{day} {clock}", years
    return list(found.values()), years


def _count(ids: str) -> int | None:
    if ids == "None":
        return None
    return ids.count(",") + 1 if ids != "[]" else 0


def rows_of(lines: Iterable[str], last_year: int) -> list[tuple[int, list[str]]]:
    """(line, values of `COLUMNS`); an empty value was not logged. The log ends in `last_year`."""
    requests, years = requests_of(lines)

    def time(years_then: int, text: str | None) -> str:
        return "" if text is None else f"{last_year - years + years_then}-{text}"

    return [
        (
            one.line,
            [
                one.request_id,
                time(one.years, one.arrived),
                "" if one.prompt_tokens is None else str(one.prompt_tokens),
                "" if one.output_tokens is None else str(one.output_tokens),
                time(one.ended_years, one.ended),
            ],
        )
        for one in requests
    ]
