"""A chat template's text for a conversation, as transformers renders it, within bounds."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

Message = Mapping[str, Any]
Conversation = Sequence[Message]

LONGEST_TEMPLATE = 1 << 20
LONGEST_FACTOR = 10_000
LONGEST_RENDERING = 10_000_000
"""Of a template: its own characters, numbers that it multiplies with, characters that it writes.

Memory and time are bounded by the process that tries a stranger's first (`template_check`).
"""


def outcome(
    template: str, tokens: Mapping[str, str], conversation: Conversation, prompt: bool
) -> str:
    """The rendering, or the template's own refusal (some accept no system message)."""
    from jinja2 import TemplateError

    try:
        return rendered(template, tokens, conversation, prompt)
    except TemplateError as error:
        return f"refused: {error}"


def rendered(
    template: str, tokens: Mapping[str, str], conversation: Conversation, prompt: bool
) -> str:
    """Render as transformers does (`transformers/utils/chat_template_utils.py`, 5.17).

    Raises `TemplateError` for whatever goes wrong in the template.
    """
    from jinja2 import TemplateError
    from jinja2.sandbox import ImmutableSandboxedEnvironment, SecurityError

    class Bounded(ImmutableSandboxedEnvironment):
        """The sandbox bounds `range`; a text times a number would still fill the memory."""

        intercepted_binops = frozenset(("*", "**"))

        def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
            sizes = [
                abs(one) if isinstance(one, int | float) else len(one) for one in (left, right)
            ]
            if max(sizes) > LONGEST_FACTOR:
                raise SecurityError(f"{operator} with {max(sizes)} is more than a template needs")
            return super().call_binop(context, operator, left, right)

    environment = Bounded(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    if len(template) > LONGEST_TEMPLATE:
        raise SecurityError(f"it has {len(template)} characters")
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    # `{% generation %}` marks the assistant's part for trainers and renders nothing itself. Its
    # line and blanks go by the same rules as any block's, so it becomes one that does nothing.
    neutral = re.sub(r"\{%(-?)\s*generation\s*(-?)%\}", r"{%\1 if true \2%}", template)
    neutral = re.sub(r"\{%(-?)\s*endgeneration\s*(-?)%\}", r"{%\1 endif \2%}", neutral)
    written = 0
    parts = []
    given = {"messages": list(conversation), "add_generation_prompt": prompt, **tokens}
    try:
        for part in environment.from_string(neutral).generate(**given):
            written += len(part)
            if written > LONGEST_RENDERING:
                raise SecurityError(f"it writes more than {LONGEST_RENDERING} characters")
            parts.append(part)
    except (TemplateError, MemoryError):
        raise
    except Exception as error:  # whatever a program of somebody else's raises
        raise TemplateError(f"{type(error).__name__}: {error}") from None
    return "".join(parts)


def _tojson(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, **options)


def _raise_exception(message: str) -> None:
    from jinja2 import TemplateError

    raise TemplateError(message)
