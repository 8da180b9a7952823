"""The recipe's template round a prompt: put in, and taken out again."""

from __future__ import annotations

import re

_FIELDS = re.compile(r"\{(prompt|labels)\}")


def filled(template: str, prompt: str, labels: str) -> str:
    """The template with its fields replaced, each once: what is put in is no template."""
    said = {"prompt": prompt, "labels": labels}
    return _FIELDS.sub(lambda field: said[field[1]], template)


def taken_out(template: str, text: str) -> str:
    """The prompt that `filled` put into this template; a text that it did not make stays."""
    pattern, seen = "", set()
    for at, piece in enumerate(_FIELDS.split(template)):
        if at % 2 == 0:
            pattern += re.escape(piece)
        elif piece in seen:
            pattern += f"(?P={piece})"
        else:
            # The labels end as soon as they can, the prompt takes the rest.
            pattern += f"(?P<{piece}>.*{'?' if piece == 'labels' else ''})"
            seen.add(piece)
    found = re.fullmatch(pattern, text, re.DOTALL)
    return found["prompt"] if found else text
