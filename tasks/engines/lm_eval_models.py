"""The two models that `lm_eval_run` lets lm-eval ask: a served one and transformers' own.

Both are lm-eval's classes, made to say of every answer how it ended and how long it is, and to
send the tools of an item that has some. Importing this module imports neither.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Mapping, Sequence
from typing import Any

from registry.errors import InfrastructureError
from tasks.conversations import for_template
from tasks.engines.endpoints import Endpoint

Messages = list[dict[str, Any]]

LONGEST_REASON = 500
"""Characters of a server's message that are kept."""

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


class RequestLog(logging.Filter):
    """What lm-eval logs of requests, without the key; and what the server last said of one.

    lm-eval 0.4.13 logs a failed request with all its headers, and raises it without the reason.
    """

    def __init__(self, key: str) -> None:
        super().__init__()
        self._key = key
        self.said = ""

    def filter(self, record: logging.LogRecord) -> bool:
        text = record.getMessage()
        if self._key:
            text = text.replace(self._key, "***")
        record.msg, record.args = text, ()
        if "Response text:" in text:
            self.said = text.partition("Status code: ")[2][:LONGEST_REASON]
        return True

    @classmethod
    def start(cls, job: Mapping[str, Any]) -> RequestLog:
        """Of a job's requests, from now on."""
        log = cls(_api_key(job["model"].get("api_key_env")))
        logging.getLogger("lm_eval.models.api_models").addFilter(log)
        return log


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


def served_model(job: Mapping[str, Any]) -> Any:
    """A chat endpoint, asked as in production."""
    from lm_eval.models.api_models import JsonChatStr
    from lm_eval.models.openai_completions import LocalChatCompletion

    key = _api_key(job["model"].get("api_key_env"))

    class ServedModel(LocalChatCompletion):
        """lm-eval's chat client that keeps finish reason and token count of every answer."""

        @property
        def api_key(self) -> str:
            return key

        def apply_chat_template(
            self, chat_history: Messages, tools: Messages | None = None, **options: Any
        ) -> Any:
            if not tools:
                return super().apply_chat_template(chat_history, **options)
            # lm-eval carries one text per item; that of tools holds both.
            chat = {"messages": chat_history, "tools": tools}
            return JsonChatStr(json.dumps(chat, ensure_ascii=False))

        def _create_payload(self, messages: Any, **options: Any) -> dict[str, Any]:
            tools = messages["tools"] if isinstance(messages, dict) else None
            said = messages["messages"] if tools else messages
            payload: dict[str, Any] = super()._create_payload(said, **options)
            return payload | ({"tools": tools} if tools else {})

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
    """The one answer of a chat completion. A reply that holds none is an infrastructure fault.

    Calls of tools are an answer too: its text ends with `{"tool_calls": [{"name", "arguments"}]}`,
    arguments as the model wrote them.
    """
    try:
        (choice,) = outputs["choices"]
        text, reason = choice["message"].get("content"), choice["finish_reason"]
        calls = [
            {name: call["function"][name] for name in ("name", "arguments")}
            for call in choice["message"].get("tool_calls") or []
        ]
    except (KeyError, TypeError, ValueError, AttributeError):
        raise InfrastructureError(f"a reply without an answer: {str(outputs)[:300]}") from None
    if reason not in ("stop", "length", "tool_calls"):
        raise InfrastructureError(f"a request ended with {reason!r} instead of an answer")
    if calls:
        called = json.dumps({"tool_calls": calls}, ensure_ascii=False)
        text = f"{text}\n{called}" if text else called
    return Answer.of(text or "", reason, (outputs.get("usage") or {}).get("completion_tokens"))


def reference_model(job: Mapping[str, Any]) -> Any:
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

        def apply_chat_template(
            self,
            chat_history: Messages,
            add_generation_prompt: bool = True,
            tools: Messages | None = None,
        ) -> Any:
            # lm-eval's own takes the system prompt out where the template refuses one, and asks
            # without it (0.4.13).
            return self.tokenizer.apply_chat_template(
                for_template(chat_history),
                tools=tools or None,
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=not add_generation_prompt,
                **self.chat_template_args,
            )

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


def _api_key(variable: str | None) -> str:
    if not variable:
        return ""
    if variable not in os.environ:
        raise InfrastructureError(f"the API key's variable {variable} is not set in this process")
    return os.environ[variable]
