"""The two models that `lm_eval_run` lets lm-eval ask: a served one and transformers' own.

Both are lm-eval's classes, made to say of every answer how it ended and how long it is, and to
send an item's own conversation where it has one. Importing this module imports neither.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from registry.errors import InfrastructureError
from tasks.engines.openai_chat import Endpoint

DEFAULT_SEED = 1234
"""What lm-eval sends where a suite names no seed; sent by us too, so that it is on record."""


class Answer(str):
    """A response text that knows how it ended; lm-eval carries it along as the string it is."""

    finish_reason: str | None = None
    output_tokens: int | None = None

    @classmethod
    def of(cls, text: str, finish_reason: str | None, output_tokens: int | None) -> Answer:
        answer = cls(text)
        answer.finish_reason, answer.output_tokens = finish_reason, output_tokens
        return answer


def seed(job: Mapping[str, Any]) -> int:
    """The seed that is sent with every request."""
    given = job["sampling"].get("seed")
    return DEFAULT_SEED if given is None else int(given)


def generation(sampling: Mapping[str, Any], kind: str) -> dict[str, Any]:
    """lm-eval's `gen_kwargs`; it gives them to either kind of model by that kind's own names."""
    greedy = sampling["temperature"] == 0
    options = {
        "temperature": sampling["temperature"],
        "max_gen_toks": sampling["max_tokens"],
        "do_sample": not greedy,
    }
    # transformers warns about top_p in greedy decoding; a server ignores it.
    return options if kind == "hf" and greedy else options | {"top_p": sampling["top_p"]}


def served_model(job: Mapping[str, Any], conversations: Mapping[str, Any]) -> Any:
    """A chat endpoint, asked as in production; `conversations`: messages by prompt."""
    from lm_eval.models.openai_completions import LocalChatCompletion

    key = _api_key(job["model"].get("api_key_env"))

    class ServedModel(LocalChatCompletion):
        """lm-eval's chat client that keeps finish reason and token count of every answer."""

        @property
        def api_key(self) -> str:
            return key

        def apply_chat_template(self, chat_history: list[dict[str, str]], **options: Any) -> Any:
            return super().apply_chat_template(_turns(chat_history, conversations), **options)

        def parse_generations(self, outputs: Any, **_: Any) -> list[str]:
            return [parse_answer(outputs)]

    endpoint = Endpoint(url=job["model"]["url"], model=job["model"]["served_name"])
    return ServedModel(
        model=endpoint.model,
        base_url=endpoint.chat_url,
        num_concurrent=job["concurrency"],
        seed=seed(job),
        timeout=job.get("request_timeout", 300),
    )


def parse_answer(outputs: Any) -> Answer:
    """The one answer of a chat completion. A reply that holds none is an infrastructure fault."""
    try:
        (choice,) = outputs["choices"]
        text, reason = choice["message"]["content"], choice["finish_reason"]
    except (KeyError, TypeError, ValueError):
        raise InfrastructureError(f"a reply without an answer: {str(outputs)[:300]}") from None
    if reason not in ("stop", "length"):
        raise InfrastructureError(f"a request ended with {reason!r} instead of an answer")
    return Answer.of(text or "", reason, (outputs.get("usage") or {}).get("completion_tokens"))


def reference_model(job: Mapping[str, Any], conversations: Mapping[str, Any]) -> Any:
    """transformers in this process, for weights that the engine has no kernel for."""
    import torch
    from lm_eval.models.huggingface import HFLM

    class ReferenceModel(HFLM):
        """lm-eval's transformers model that keeps finish reason and token count of answers."""

        def __init__(self, **arguments: Any) -> None:
            super().__init__(**arguments)
            self._pending: list[tuple[str, int]] = []
            self._ended: dict[str, tuple[str, int]] = {}
            # lm-eval hands each finished text to this hook in the order of the batch's rows.
            self.cache_hook = self

        def add_partial(self, _: str, request: tuple[str, Any], __: str) -> None:
            self._ended[request[0]] = self._pending.pop(0)

        def _model_generate(self, context: Any, max_length: int, stop: Any, **options: Any) -> Any:
            rows = super()._model_generate(context, max_length, stop, **options)
            ends = self.model.generation_config.eos_token_id
            ends = {self.tokenizer.eos_token_id, *(ends if isinstance(ends, list) else [ends])}
            room = max_length - context.shape[1]
            self._pending += [ending(row[context.shape[1] :].tolist(), ends, room) for row in rows]
            return rows

        def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
            texts = super().generate_until(requests, disable_tqdm)
            return [
                Answer.of(text, *self._ended[request.args[0]])
                for text, request in zip(texts, requests, strict=True)
            ]

        def apply_chat_template(self, chat_history: list[dict[str, str]], **options: Any) -> Any:
            return super().apply_chat_template(_turns(chat_history, conversations), **options)

    cuda = torch.cuda.is_available()
    return ReferenceModel(
        pretrained=job["model"]["path"],
        device="cuda" if cuda else "cpu",
        # A CPU without bf16 units emulates them; float32 holds every bf16 weight exactly.
        dtype=job["model"].get("dtype") or ("auto" if cuda else "float32"),
        batch_size=job["concurrency"],
    )


def ending(tokens: Sequence[int], ends: set[int | None], room: int) -> tuple[str, int]:
    """Finish reason and token count of one generated row; the end token counts, as in vLLM."""
    for position, token in enumerate(tokens):
        if token in ends:
            return "stop", position + 1
    return ("length" if len(tokens) >= room else "stop"), len(tokens)


def _turns(
    chat_history: list[dict[str, str]], conversations: Mapping[str, Any]
) -> list[dict[str, str]]:
    if len(chat_history) != 1:
        return chat_history
    return list(conversations.get(chat_history[0]["content"], chat_history))


def _api_key(variable: str | None) -> str:
    if not variable:
        return ""
    if variable not in os.environ:
        raise InfrastructureError(f"the API key's variable {variable} is not set in this process")
    return os.environ[variable]
