"""Which words are secrets, and texts without them.

Secrets come to this process by environment variables only. They are known by the variable's name
(`HF_TOKEN`, `PILOTAGE_JUDGE_API_KEY`) or by what stands there (a URL with a password). Children get
none of them (`without_secrets`), and what this process writes for people, every message and every
line of a log, is passed through `redacted`.
"""

from __future__ import annotations

import html
import json
import logging
import mmap
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any
from urllib.parse import quote, quote_plus, unquote

HIDDEN = "***"
SHORTEST = 8
"""Characters. A shorter value is no key, and its letters stand in other words too."""
LONG_LINE = 20
"""Characters of a line that is hidden by itself."""

_OURS = ("PILOTAGE_MLFLOW_URI", "PILOTAGE_LEDGER_URI", "PILOTAGE_NOTIFY_URL", "PILOTAGE_STORE_URL")
"""Addresses: a password may stand in them, and of a webhook the address itself is the secret."""
_WEBHOOK = "PILOTAGE_NOTIFY_URL"

_SECRET_NAME = re.compile(
    r"(?:^|_)(?:API_?|ACCESS_?|PRIVATE_?)?(?:KEYS?|TOKEN|SECRETS?|AUTH_STRING|CONNECTION_STRING)(?:$|_)"
    r"|_(?:PASS|PWD|PAT)$|PASSWORD|PASSWD|PASSPHRASE|CREDENTIAL|WEBHOOK",
    re.IGNORECASE,
)
_USERINFO = re.compile(r"(?P<begin>://)(?P<userinfo>[^\s/?#'\"<>]+)@")
_TO_DATABASE = re.compile(
    r"(?P<begin>(?<!http)(?<!https)://)(?P<userinfo>[^\s:/@]*:[^\s@]{1,300})@"
)
"""Drivers take passwords that hold what no URL may hold unencoded: slashes, `#`, quotes."""
_ADDRESSES = (_TO_DATABASE, _USERINFO)
_IN_QUERY = re.compile(
    r"(?P<name>[?&](?:[\w-]*(?:api_?-?key|token|password|secret|signature)|key|sig|auth)=)"
    r"[^&\s'\"<>]+",
    re.IGNORECASE,
)
_IN_HEADER = re.compile(
    r"(?P<name>\b(?:Bearer|Basic)\s+)(?=[^\s'\"]*\d)[A-Za-z0-9._~+/=-]{16,}", re.IGNORECASE
)
_SHAPES = re.compile(
    r"\b(?:sk-[A-Za-z0-9_-]{20,}|hf_[A-Za-z0-9]{20,}|gh[pousr]_[A-Za-z0-9]{20,}"
    r"|AKIA[0-9A-Z]{16}|xox[abpr]-[A-Za-z0-9-]{20,})\b"
)
"""Keys that say by their first letters whose they are: one may be typed where none belongs."""


def is_secret(name: str, value: str) -> bool:
    """Whether an environment variable holds a secret, by its name or by its value. Pure."""
    said = "://" in value and any(form.search(value) for form in _ADDRESSES)
    return name in _OURS or _named_as_secret(name) or said


def without_secrets(environment: Mapping[str, str]) -> dict[str, str]:
    """What a child may see of an environment that needs no secret. Pure."""
    return {name: value for name, value in environment.items() if not is_secret(name, value)}


@contextmanager
def secrets_aside(but: str) -> Iterator[None]:
    """Without secrets in this process's environment, for a library that starts its own processes.

    Those whose names begin with `but` stay: the library's own. What is written for people hides
    all of them meanwhile as ever. To be as short as the start: other threads see it too.
    """
    secrets = {
        name: value
        for name, value in os.environ.items()
        if is_secret(name, value) and not name.startswith(but)
    }
    _aside.update(secrets)
    for name in secrets:
        del os.environ[name]
    try:
        yield
    finally:
        os.environ.update(secrets)
        _aside.clear()


_aside: dict[str, str] = {}


def secret_values(environment: Mapping[str, str]) -> list[str]:
    """The secret words of an environment, the longest first. Pure.

    Of an address only the password is one, but for a webhook's, which is one as a whole. Of a text
    of several lines (a key file's) each line is one: texts are cut at their ends.
    """
    found: set[str] = set()
    for name, value in environment.items():
        if not is_secret(name, value):
            continue
        passwords = [
            _password(match["userinfo"]) for form in _ADDRESSES for match in form.finditer(value)
        ]
        found.update(passwords, map(unquote, passwords))
        if name == _WEBHOOK:
            found.update(_of_webhook(value))
        if _named_as_secret(name) and not passwords and not _is_place(value):
            found.add(value.strip())
            found.update(line.strip() for line in value.splitlines() if len(line) >= LONG_LINE)
    return sorted((one for one in found if len(one) >= SHORTEST), key=len, reverse=True)


def _of_webhook(url: str) -> Iterator[str]:
    """What opens a webhook: servers say its path alone, or one word of it, in what they answer."""
    yield url.strip()
    place = url.strip().partition("://")[2].partition("/")[2].partition("#")[0]
    path, _, query = place.partition("?")
    words = [path.rpartition("/")[2], *(pair.partition("=")[2] for pair in query.split("&"))]
    yield from (word for word in (place, path, *words) if len(word) >= LONG_LINE)


def redacted(text: str, environment: Mapping[str, str] | None = None) -> str:
    """`text` without secrets: those of the environment, and what looks like one anywhere."""
    for value in secret_values({**os.environ, **_aside} if environment is None else environment):
        for spelled in _spellings(value):
            if spelled in text:
                text = text.replace(spelled, HIDDEN)
    if "://" in text:
        for form in _ADDRESSES:
            text = form.sub(_hide_password, text)
    text = _IN_QUERY.sub(rf"\g<name>{HIDDEN}", text)
    text = _IN_HEADER.sub(rf"\g<name>{HIDDEN}", text)
    return _SHAPES.sub(HIDDEN, text)


def redact_logs() -> None:
    """From now on no line of this process's logs, of whatever library, holds a secret.

    Also in tracebacks: Prefect sends them to its database. Safe to call twice.
    """
    make = logging.getLogRecordFactory()
    if not getattr(make, "redacts", False):
        logging.setLogRecordFactory(_Redacting(make))


class _Redacting:
    """A factory of log records that hides secrets in message and traceback."""

    redacts = True

    def __init__(self, make: Any) -> None:
        self._make = make

    def __call__(self, *arguments: Any, **options: Any) -> logging.LogRecord:
        record: logging.LogRecord = self._make(*arguments, **options)
        try:
            text = record.getMessage()
        except Exception:
            # Arguments that do not fit the message or cannot be shown: logging says so, as ever.
            return record
        hidden = redacted(text)
        if hidden != text:
            record.msg, record.args = hidden, ()
        if record.exc_info and record.exc_info[0] is not None:
            # Formatters take a traceback that is there already.
            record.exc_text = redacted(logging.Formatter().formatException(record.exc_info))
        return record


def blot(file: Path, words: Sequence[str]) -> None:
    """Write asterisks over `words` in a file that may still be open elsewhere; its size stays."""
    if not words or not file.is_file() or not file.stat().st_size:
        return
    with file.open("r+b") as handle, mmap.mmap(handle.fileno(), 0) as content:
        spelled = {one for word in words for one in _spellings(word)}
        for raw in {os.fsencode(one) for one in spelled}:
            place = content.find(raw)
            while place >= 0:
                content[place : place + len(raw)] = b"*" * len(raw)
                place = content.find(raw, place)


@lru_cache(maxsize=1024)
def _spellings(value: str) -> frozenset[str]:
    """As it is, in a URL, in JSON, in Python's own words, and in HTML."""
    raw = os.fsencode(value)  # a variable may hold bytes that are no text
    return frozenset(
        {
            value,
            quote(raw, safe=""),
            quote(raw),
            quote_plus(raw),
            json.dumps(value)[1:-1],
            json.dumps(value, ensure_ascii=False)[1:-1],
            repr(value)[1:-1],
            html.escape(value),
        }
    )


@lru_cache(maxsize=4096)
def _named_as_secret(name: str) -> bool:
    return _SECRET_NAME.search(name) is not None


def _password(userinfo: str) -> str:
    user, colon, password = userinfo.partition(":")
    return password if colon else user


def _hide_password(match: re.Match[str]) -> str:
    user, colon, _ = match["userinfo"].partition(":")
    return f"{match['begin']}{f'{user}:' if colon else ''}{HIDDEN}@"


def _is_place(value: str) -> bool:
    """A file that holds the secret, by its path."""
    return value.startswith("/") and os.path.exists(value)  # noqa: PTH110 - may be no path at all
