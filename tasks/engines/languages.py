"""Which language a text is in, by lingua.

Chosen over py3langid 0.4.0 on 4,500 short customer messages and answers, Chinese, English and mixed
(2 cores AMD EPYC). lingua 2.1.1 names 0.4 % of them wrongly, none with a confidence of `SURE`, and
leaves 23 % open then. py3langid names 4 % wrongly, a third of those with more than 0.5 (Wu for
Chinese, Nigerian Pidgin for English). lingua costs 0.2 to 0.5 ms a text, and 2 s and 0.4 GB once:
it is loaded where a recipe asks for a language and nowhere else. Its low accuracy mode is wrong in
9 %, often surely: not used.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

COMMON = (
    *("en", "zh", "ja", "ko", "de", "fr", "es", "pt", "it", "nl"),
    *("ru", "pl", "tr", "vi", "id", "ar", "th", "uk", "cs", "sv"),
)
"""Told apart from the expected ones. All 75 would be five times as slow, and take 1.1 GB."""

SURE = 0.6
"""Confidence from which a language counts as known."""

LOOKED_AT = 2000
"""Characters, from the beginning."""

FEWEST_LETTERS = 16
"""Fewer say nothing ("OK", "Lisbon."); a Chinese, Japanese or Korean character counts as four."""

MIXED = 0.3
"""Share of a text that the letters of the smaller of two scripts make up, from which on it is in no
one language; a Chinese, Japanese or Korean character says as much as three others."""

_NO_PROSE = re.compile(
    r"https?://\S+|\S+@\S+|`[^`\n]*`"  # addresses, code in a text
    r"|[A-Za-z]*\d[\w.:/-]*"  # codes such as FT1234-A, numbers, dates
    r"|\w+_\w+|\b[A-Z]{2,}\b"  # names of labels, abbreviations
)
_CJK = re.compile(r"[\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af\uf900-\ufaff]")


def prose_of(parts: Iterable[str]) -> str:
    """The parts without what belongs to no language: codes, numbers, labels, addresses.

    A part without a space and without a Chinese, Japanese or Korean character is a value
    (`track_order`, `Nanjing`), not a sentence.
    """
    sentences = (part for part in parts if " " in part.strip() or _CJK.search(part))
    return _NO_PROSE.sub(" ", "\n".join(sentences)[:LOOKED_AT])


class Languages:
    """Tells languages apart: the common ones and those that are expected."""

    def __init__(self, expected: Iterable[str] = ()) -> None:
        """`expected`: ISO 639-1 codes that lingua knows; recipes hold no others."""
        from lingua import IsoCode639_1, LanguageDetectorBuilder

        codes = map(IsoCode639_1.from_str, dict.fromkeys((*COMMON, *expected)))
        self._detector = LanguageDetectorBuilder.from_iso_codes_639_1(*codes).build()

    def sure(self, parts: Iterable[str]) -> str | None:
        """ISO 639-1 code of the language in which a text surely is; None where nobody can say."""
        text = prose_of(parts)
        east = len(_CJK.findall(text))
        others = sum(map(str.isalpha, text)) - east
        if others + 4 * east < FEWEST_LETTERS:
            return None
        # Sentences in two languages: the detector knows one, and is sure of it.
        if min(others, 3 * east) > MIXED * (others + 3 * east):
            return None
        best = self._detector.compute_language_confidence_values(text)[0]
        return str(best.language.iso_code_639_1.name.lower()) if best.value >= SURE else None
