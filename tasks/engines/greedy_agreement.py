"""Do two servers give the same greedy answers? Asked one request at a time, compared afterwards.

Speculative decoding must not change what a model says. But the target checks several draft tokens
in one pass, with other shapes and so another order of sums than one token at a time; where two
tokens are as good as equally likely, rounding decides. So the first difference of two answers is
judged by the log-probabilities of the two tokens, in both servers' own distributions. What comes
after it has another prefix and says nothing. Under load even one server differs from itself, for
the same reason: its batches change.

The servers need not run at once: `greedy_answers` keeps what one of them said, `compare` is pure.

What a log-probability of vLLM is while it speculates (0.32, `v1/sample/rejection_sampler.py`): the
target's, never the draft's. `RejectionSampler._get_logprobs_tensors` takes the target's raw logits
at the verified positions and of the bonus token, in float32, before any penalty or temperature
(`logprobs_mode` is `raw_logprobs`); rejected positions are dropped. A greedy token is therefore the
most likely one of its own list at every position, which is checked for the whole answer.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any, Literal

import httpx
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from registry.errors import InfrastructureError
from registry.whole_files import write_whole
from tasks.conversations import chat_of

Row = Mapping[str, Any]

NEAR_TIE = 0.25
"""Nats between two tokens up to which rounding may choose between them.

Logits leave a bfloat16 model as bfloat16: eight significant bits, steps of 1/16 between 8 and 16
and of 1/8 between 16 and 32. Two logits that each move by one step change their distance by 0.25
at most. Measured on the demo's bf16 model against itself in float32, so with all of bfloat16's
rounding: distances moved by 0.02 nats (median) and 0.08 (P99 of 4082 places, once by 0.35), and the
ten answers of 140 that parted did so at tokens exactly as likely in bfloat16 and at most 0.06
apart in float32. It does not tell two models apart: an 8-bit copy parted at near-ties too.
"""

LARGEST_NOISE = NEAR_TIE / 2
"""Where distances move by more than this at one place in a hundred, that is not rounding alone."""

GREEDY: Mapping[str, Any] = {
    **{"temperature": 0.0, "top_p": 1.0, "frequency_penalty": 0.0, "presence_penalty": 0.0},
    **{"logprobs": True, "top_logprobs": 5},
}

TRIES = 3

VLLM_ONLY: Mapping[str, Any] = {"return_tokens_as_token_ids": True, "repetition_penalty": 1.0}
"""Sent beside OpenAI's own fields. Tokens by number: several may read alike (parts of one
character). The penalty is a default of some models' generation config."""


class _Kept(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Token(_Kept):
    """One token that was chosen, and the most likely ones at its place."""

    token: str = Field(description="`token_id:N` of vLLM, else as text.")
    text: str = ""
    logprob: float | None = Field(default=None, description="Nats; null: the engine gave none.")
    top: dict[str, float] = Field(default_factory=dict, description="Nats by token.")


class Answer(_Kept):
    """What one server said to one prompt."""

    id: str
    text: str = ""
    finish_reason: str | None = None
    tokens: list[Token] = Field(default_factory=list, description="Empty: no log-probabilities.")
    refused: str = Field(default="", description="Why the server would not answer this prompt.")


class Difference(_Kept):
    """The first place at which two answers to one prompt part. Log-probabilities in nats."""

    kind: Literal["near-tie", "disagreement"]
    id: str
    position: int | None = Field(description="From 0; null where no tokens are known.")
    reference_token: str = Field(description="As text; empty: the answer had ended.")
    other_token: str
    reference_logprobs: tuple[float | None, float | None] = Field(
        description="Of the two tokens in the reference's distribution; null: not in its list."
    )
    other_logprobs: tuple[float | None, float | None] = Field(
        description="Of the same two, in the same order, in the other's distribution."
    )
    reason: str


class Noise(_Kept):
    """How far rounding moves the distance of a chosen token from its runner-up, in nats.

    Between the two servers, at places where prefix and chosen token are the same.
    """

    places: int
    p50: float | None
    p99: float | None
    largest: float | None
    smallest_margin: float | None = Field(description="Distance to the runner-up, reference's.")


class Agreement(_Kept):
    """What the comparison of all answers shows."""

    asked: int
    equal: int
    near_ties: list[Difference]
    disagreements: list[Difference]
    refused: int = Field(description="Prompts that neither server would answer.")
    not_greedy: dict[str, int] = Field(
        description="Places where the chosen token is not the most likely one of its own list."
    )
    tokens: int = Field(description="Tokens compared, until answers part.")
    threshold: float
    noise: Noise
    notes: list[str]

    @property
    def agrees(self) -> bool | None:
        """None: nothing was compared, or the reference itself is not greedy."""
        if self.disagreements or (self.not_greedy["other"] and not self.not_greedy["reference"]):
            return False
        if self.not_greedy["reference"] or self.asked == self.refused:
            return None
        return True

    @property
    def words(self) -> str:
        told = [f"{self.equal} of {self.asked} greedy answers are equal"]
        if self.near_ties:
            told.append(f"{len(self.near_ties)} part at a near-tie")
        if self.disagreements:
            told.append(f"{len(self.disagreements)} disagree ({self.disagreements[0].reason})")
        for who, places in self.not_greedy.items():
            if places:
                told.append(f"at {places} places the {who}'s token is not its most likely one")
        if self.refused:
            told.append(f"{self.refused} were refused")
        return ", ".join([*told, *self.notes])


# -- asking ----------------------------------------------------------------------------------


def greedy_answers(
    url: str,
    key: str,
    model: str,
    rows: Sequence[Row],
    max_tokens: int,
    *,
    extra: Mapping[str, Any] = VLLM_ONLY,
    timeout: float = 300.0,
    sleep: Callable[[float], None] = time.sleep,
) -> list[Answer]:
    """Ask every row `{"id", "messages"[, "tools"]}`, one at a time, at temperature 0.

    `url` with or without `/v1`; `timeout` in seconds for one request. A prompt that the server
    refuses (4xx) is an answer of its own; an engine without log-probabilities gives answers
    without tokens. Raises `InfrastructureError` when the server does not answer.
    """
    path = f"{url.rstrip('/').removesuffix('/v1')}/v1/chat/completions"
    asked = {"model": model, "max_tokens": max_tokens, **GREEDY, **extra}
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    with httpx.Client(trust_env=False, headers=headers, timeout=timeout) as client:

        def ask(row: Row) -> Answer:
            said = ""
            for attempt in range(1, TRIES + 1):
                try:
                    reply = client.post(path, json={**asked, **chat_of(row)})
                except httpx.HTTPError as error:
                    said = f"{type(error).__name__}: {error}"
                else:
                    if reply.status_code == 200:
                        return _answer(row["id"], reply)
                    said = f"HTTP {reply.status_code}: {reply.text[:300]}"
                    if reply.status_code in (401, 403, 404):
                        break
                    if reply.status_code < 500 and reply.status_code not in (408, 429):
                        return Answer(id=row["id"], refused=said)
                if attempt < TRIES:
                    sleep(2.0**attempt)
            raise InfrastructureError(f"{path} gives no answer to {row['id']}: {said}")

        return [ask(row) for row in rows]


def _answer(identity: str, reply: httpx.Response) -> Answer:
    try:
        choice = reply.json()["choices"][0]
        content = (choice.get("logprobs") or {}).get("content") or []
        message = choice["message"]
        # The ids of calls are drawn at random; what is called is the answer.
        calls = [one["function"] for one in message.get("tool_calls") or []]
        return Answer(
            id=identity,
            text=(message.get("content") or "") + (json.dumps(calls) if calls else ""),
            finish_reason=choice.get("finish_reason"),
            tokens=[_token(one) for one in content],
        )
    except (ValueError, LookupError, TypeError, AttributeError):
        raise InfrastructureError(
            f"the answer to {identity} is no chat completion: {reply.text[:300]}"
        ) from None


def _token(content: Mapping[str, Any]) -> Token:
    # vLLM writes -9999 where it has no number.
    logprob = content.get("logprob")
    known = logprob is not None and logprob > -9999.0
    encoded = content.get("bytes")
    return Token(
        token=content["token"],
        text=bytes(encoded).decode("utf-8", "replace") if encoded else content["token"],
        logprob=logprob if known else None,
        top={one["token"]: one["logprob"] for one in content.get("top_logprobs") or []},
    )


_ANSWERS = TypeAdapter(list[Answer])


def write_answers(path: Path, answers: Sequence[Answer]) -> None:
    write_whole(path, _ANSWERS.dump_json(list(answers)).decode())


def read_answers(path: Path) -> list[Answer] | None:
    """None where there are none yet, or none that can be read."""
    try:
        return _ANSWERS.validate_json(path.read_bytes())
    except (OSError, ValidationError, json.JSONDecodeError):
        return None


# -- comparing -------------------------------------------------------------------------------


def compare(
    reference: Sequence[Answer], other: Sequence[Answer], threshold: float = NEAR_TIE
) -> Agreement:
    """Token by token until two answers part; a near-tie is at most `threshold` nats in both.

    Pure. The answers are to the same prompts in the same order (`ValueError` otherwise). Without
    log-probabilities only equal texts agree.
    """
    if [one.id for one in reference] != [one.id for one in other]:
        raise ValueError("the answers are not to the same prompts in the same order")
    differences: list[Difference] = []
    changes: list[float] = []
    margins: list[float] = []
    equal, refused, tokens, untold = 0, 0, 0, 0
    for one, two in zip(reference, other, strict=True):
        if one.refused and two.refused:
            refused += 1
            continue
        if one.refused or two.refused:
            who = "the reference" if one.refused else "the other"
            words = f"{one.id}: {who} refuses it: {one.refused or two.refused}"
            differences.append(_difference(one, two, None, words))
            continue
        if not (one.tokens and two.tokens):
            untold += 1
            if (one.text, one.finish_reason) == (two.text, two.finish_reason):
                equal += 1
            else:
                words = f"{one.id}: the texts differ, and no log-probabilities say how near"
                differences.append(_difference(one, two, None, words))
            continue
        place = _parts_at(one, two)
        same = min(len(one.tokens), len(two.tokens)) if place is None else place
        tokens += same
        for left, right in zip(one.tokens[:same], two.tokens[:same], strict=True):
            _note_margin(left, right, changes, margins)
        if place is None:
            equal += 1
        else:
            differences.append(_judge(one, two, place, threshold))
    notes, noise = [], _noise(changes, margins)
    if untold:
        notes.append(f"{untold} answers came without log-probabilities: only equal texts agree")
    if noise.p99 is not None and noise.p99 > LARGEST_NOISE:
        notes.append(f"P99 of the change of margins is {noise.p99:.2f} nats, more than rounding")
    return Agreement(
        asked=len(reference),
        equal=equal,
        near_ties=[one for one in differences if one.kind == "near-tie"],
        disagreements=[one for one in differences if one.kind == "disagreement"],
        refused=refused,
        not_greedy={
            "reference": _not_greedy(reference, threshold),
            "other": _not_greedy(other, threshold),
        },
        tokens=tokens,
        threshold=threshold,
        noise=noise,
        notes=notes,
    )


def _parts_at(one: Answer, two: Answer) -> int | None:
    """The first place at which the tokens differ; the shorter one's end counts as a token."""
    names = [[token.token for token in answer.tokens] for answer in (one, two)]
    pairs = enumerate(zip_longest(*names))
    return next((place for place, (left, right) in pairs if left != right), None)


def _judge(one: Answer, two: Answer, place: int, threshold: float) -> Difference:
    left, right = (
        answer.tokens[place] if place < len(answer.tokens) else None for answer in (one, two)
    )
    where = f"{one.id}, token {place}"
    if left is None or right is None:
        return _difference(one, two, place, f"{where}: one answer has ended without an end token")
    gaps = [_gap(left.top, left.token, right.token), _gap(right.top, right.token, left.token)]
    told = " and ".join("beyond the list" if gap is None else f"{gap:.3f}" for gap in gaps)
    words = f"{where}: {left.text!r} against {right.text!r}, {told} nats apart"
    near = all(gap is not None and gap <= threshold for gap in gaps)
    return _difference(one, two, place, words, near)


def _gap(top: Mapping[str, float], chosen: str, instead: str) -> float | None:
    """How much likelier the chosen token is; None where either is not among the listed ones."""
    if chosen not in top or instead not in top:
        return None
    return top[chosen] - top[instead]


def _difference(
    one: Answer, two: Answer, place: int | None, reason: str, near: bool = False
) -> Difference:
    left, right = (
        answer.tokens[place] if place is not None and place < len(answer.tokens) else None
        for answer in (one, two)
    )
    names = (left.token if left else "", right.token if right else "")

    def logprobs(token: Token | None) -> tuple[float | None, float | None]:
        top = token.top if token else {}
        return top.get(names[0]), top.get(names[1])

    return Difference(
        kind="near-tie" if near else "disagreement",
        id=one.id,
        position=place,
        reference_token=left.text if left else "",
        other_token=right.text if right else "",
        reference_logprobs=logprobs(left),
        other_logprobs=logprobs(right),
        reason=reason,
    )


def _note_margin(left: Token, right: Token, changes: list[float], margins: list[float]) -> None:
    rivals = [token for token in left.top if token != left.token]
    if not rivals:
        return
    rival = max(rivals, key=lambda token: left.top[token])
    here = _gap(left.top, left.token, rival)
    there = _gap(right.top, right.token, rival)
    if here is not None and there is not None:
        margins.append(here)
        changes.append(abs(here - there))


def _noise(changes: list[float], margins: list[float]) -> Noise:
    def at(share: float) -> float | None:
        return sorted(changes)[round(share * (len(changes) - 1))] if changes else None

    return Noise(
        places=len(changes),
        p50=at(0.5),
        p99=at(0.99),
        largest=at(1.0),
        smallest_margin=min(margins, default=None),
    )


def _not_greedy(answers: Sequence[Answer], threshold: float) -> int:
    return sum(
        max(token.top.values()) - token.logprob > threshold
        for answer in answers
        for token in answer.tokens
        if token.top and token.logprob is not None
    )
