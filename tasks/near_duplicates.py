"""Prompts that say the same in nearly the same words, found in linear time.

A text is folded (`folded`) and cut into shingles: pairs of characters where it is written without
spaces (Chinese, Japanese), four characters elsewhere. Two texts are as alike as their sets of
shingles: Jaccard, shared / all. MinHash (Broder 1997; datasketch) makes a short signature of each
set, and texts that agree in a band of their signatures are proposed as a pair (Leskovec, Rajaraman,
Ullman, Mining of Massive Datasets, 3.4). Bands only propose: a pair is one when the true Jaccard
similarity of its sets reaches the threshold.

The bands are sorted here and not kept in datasketch's `MinHashLSH`: that holds a Python set per
band and text (0.14 GB for 20,000 texts, measured), and hands out all pairs of a band that many
share, which is quadratic where messages come from templates. Here a text is compared with its
`WINDOW` next ones in each band, sorted so that alike ones lie together (the sorted neighbourhood of
Hernández and Stolfo 1995), and given up after `PATIENCE` comparisons that were in vain. How many
were given up is told: of them, pairs may have been missed.
"""

from __future__ import annotations

import re
import unicodedata
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

PERMUTATIONS = 64
RECALL = 0.999
"""Share of the pairs exactly at the threshold that a band must propose; above it are more."""

WINDOW = 100
"""Neighbours that a text is compared with in each band; fewer share a band in natural text."""

PATIENCE = 50
"""Comparisons in vain after which a text is compared no more."""

_CJK = "\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff"
_RUNS = re.compile(f"[{_CJK}]+|[^{_CJK}]+")
_WORDS = re.compile(rf"[{_CJK}]|[^\s{_CJK}]+")
_FIRST_CJK = re.compile(f"[{_CJK}]")
_AT_ONCE = 1 << 15
"""Pairs of signatures that are compared at once: 16 MiB."""


class _Folding(dict[int, str]):
    """What each character of a text becomes, found as it is met."""

    def __missing__(self, code: int) -> str:
        char = chr(code)
        kind = unicodedata.category(char)
        unseen = (kind in ("Cf", "Cc") and not char.isspace()) or 0xFE00 <= code <= 0xFE0F
        if unseen or char in "'’":
            made = ""
        elif kind[0] in "PZC" or kind in ("So", "Sk"):
            made = " "
        else:
            made = char
        self[code] = made
        return made


_FOLDING = _Folding()


def folded(text: str) -> str:
    """A text without what two people would write differently: width, case, space, punctuation.

    NFKC, case folded; punctuation and pictures become a space, apostrophes and invisible
    characters nothing; signs of money and arithmetic stay. A text of nothing else stays as it is.
    """
    plain = unicodedata.normalize("NFKC", text).casefold()
    return " ".join(plain.translate(_FOLDING).split()) or " ".join(plain.split())


def words_of(text: str) -> list[str]:
    """The words of a folded text; each character is one where no spaces are written."""
    return _WORDS.findall(text)


def shingles(text: str) -> set[str]:
    """The shingles of a folded text: at least one, all of it where it is shorter."""
    found: set[str] = set()
    for run in _RUNS.findall(text):
        size = 2 if _FIRST_CJK.match(run) else 4
        found.update(run[at : at + size] for at in range(max(1, len(run) - size + 1)))
    return found


def jaccard(left: set[str], right: set[str]) -> float:
    shared = len(left & right)
    return shared / (len(left) + len(right) - shared)


def bands_for(threshold: float) -> tuple[int, int]:
    """Number of bands and values per band: the longest that propose `RECALL` at the threshold.

    A pair with similarity s shares one of b bands of r values with chance 1 - (1 - s^r)^b.
    """
    found = (PERMUTATIONS, 1)
    for rows in range(1, PERMUTATIONS // 2 + 1):
        bands = PERMUTATIONS // rows
        if 1 - (1 - threshold**rows) ** bands >= RECALL:
            found = (bands, rows)
    return found


@dataclass(frozen=True)
class Pair:
    """Two texts by their places, `first` < `second`, and their true Jaccard similarity."""

    first: int
    second: int
    similarity: float


def near_pairs(
    texts: Sequence[str],
    threshold: float,
    seed: int,
    found: Callable[[Pair], None],
    needless: Callable[[int, int], bool] = lambda first, second: False,
) -> int:
    """Hand pairs of folded texts with at least this similarity to `found`, in a fixed order.

    A pair comes once for each band that proposes it; `needless(first, second)` is asked before
    each comparison and spares it. Texts should be distinct. Returns how many were given up. Time
    and memory are linear in the texts.
    """
    import numpy

    if len(texts) < 2:
        return 0
    signatures = _signatures(texts, seed)
    # Four standard deviations of the estimate below: 1 true pair in 30,000 is lost to it.
    least = threshold - 4 * (threshold * (1 - threshold) / PERMUTATIONS) ** 0.5
    in_vain = numpy.zeros(len(texts), dtype=numpy.int32)
    for ones, others in _proposed(signatures, *bands_for(threshold)):
        for start in range(0, len(ones), _AT_ONCE):
            some, rest = ones[start : start + _AT_ONCE], others[start : start + _AT_ONCE]
            going = (in_vain[some] < PATIENCE) & (in_vain[rest] < PATIENCE)
            some, rest = some[going], rest[going]
            alike = (signatures[some] == signatures[rest]).mean(axis=1) >= least
            for one, other in zip(some[alike].tolist(), rest[alike].tolist(), strict=True):
                first, second = min(one, other), max(one, other)
                if needless(first, second):
                    continue
                similarity = jaccard(shingles(texts[first]), shingles(texts[second]))
                if similarity >= threshold:
                    found(Pair(first, second, similarity))
                else:
                    in_vain[first] += 1
                    in_vain[second] += 1
    return int((in_vain >= PATIENCE).sum())


class Groups:
    """Union-find over places 0 to n - 1; a group is named by its smallest place."""

    def __init__(self, size: int) -> None:
        self._above = list(range(size))

    def find(self, place: int) -> int:
        above = self._above
        while above[place] != place:
            above[place] = above[above[place]]
            place = above[place]
        return place

    def join(self, one: int, other: int) -> None:
        low, high = sorted((self.find(one), self.find(other)))
        self._above[high] = low

    def joined(self, one: int, other: int) -> bool:
        return self.find(one) == self.find(other)

    def groups(self) -> list[list[int]]:
        """Places by group, each in order, groups in the order of their smallest place."""
        found: dict[int, list[int]] = {}
        for place in range(len(self._above)):
            found.setdefault(self.find(place), []).append(place)
        return list(found.values())


def clusters(texts: Sequence[str], threshold: float, seed: int) -> Groups:
    """Groups of texts that are equal once folded, or joined by chains of near-duplicates.

    The two ends of a chain may be less alike than the threshold: that costs a split some freedom
    and never a leak.
    """
    groups = Groups(len(texts))
    known: dict[str, int] = {}
    for place, text in enumerate(map(folded, texts)):
        groups.join(known.setdefault(text, place), place)
    places = list(known.values())

    def join(pair: Pair) -> None:
        groups.join(places[pair.first], places[pair.second])

    def needless(one: int, other: int) -> bool:
        return groups.joined(places[one], places[other])

    near_pairs(list(known), threshold, seed, join, needless)
    return groups


# -- parts -----------------------------------------------------------------------------------


def _signatures(texts: Sequence[str], seed: int) -> Any:
    """Minimal hashes of each text's shingles, `[texts, PERMUTATIONS]` of uint32."""
    import numpy
    from datasketch import MinHash

    # CRC-32 is one to one on four bytes; datasketch mixes it before it permutes. One sketch for
    # all texts, because datasketch's own generator copies one for each.
    sketch = MinHash(num_perm=PERMUTATIONS, seed=seed % 2**32, hashfunc=zlib.crc32)
    found = numpy.empty((len(texts), PERMUTATIONS), dtype=numpy.uint32)
    for place, text in enumerate(texts):
        sketch.clear()
        sketch.update_batch([shingle.encode() for shingle in shingles(text)])
        found[place] = sketch.hashvalues
    return found


def _proposed(signatures: Any, bands: int, rows: int) -> Iterator[tuple[Any, Any]]:
    """Places of pairs that agree in a band and lie within `WINDOW` of each other in its order."""
    import numpy

    for band in range(bands):
        own = signatures[:, band * rows : (band + 1) * rows]
        start = (band + 1) % bands * rows
        # Within the band by the next one: whoever agrees there too becomes a neighbour.
        keys = numpy.concatenate([own, signatures[:, start : start + rows]], axis=1)
        order = numpy.lexsort(keys.T[::-1])
        inner = own[order]
        # Number of the run of equal bands that each place in the order belongs to.
        runs = numpy.cumsum((inner[1:] != inner[:-1]).any(axis=1))
        runs = numpy.concatenate([[0], runs])
        for distance in range(1, min(WINDOW, len(order) - 1) + 1):
            same = numpy.flatnonzero(runs[distance:] == runs[:-distance])
            if not len(same):
                break
            yield order[same], order[same + distance]
