"""Near-duplicates: what folding leaves, what bands propose, and that nothing is quadratic."""

from __future__ import annotations

import random
from itertools import combinations

import pytest

from tasks import near_duplicates
from tasks.near_duplicates import (
    PATIENCE,
    PERMUTATIONS,
    RECALL,
    Pair,
    bands_for,
    clusters,
    folded,
    jaccard,
    near_pairs,
    shingles,
    words_of,
)


def pairs_of(texts: list[str], threshold: float, seed: int = 0) -> dict[tuple[int, int], float]:
    found: list[Pair] = []
    near_pairs(texts, threshold, seed, found.append)
    return {(pair.first, pair.second): pair.similarity for pair in found}


def variants(count: int) -> list[str]:
    """Sentences of random words, each with two that differ from it in a word or two."""
    rng = random.Random(7)
    words = ["".join(rng.choices("abcdefghijklmnop", k=rng.randint(2, 8))) for _ in range(400)]
    texts = []
    for _ in range(count):
        base = rng.choices(words, k=12)
        texts.append(" ".join(base))
        for changes in (1, 2):
            other = list(base)
            for at in rng.sample(range(12), changes):
                other[at] = rng.choice(words)
            texts.append(" ".join(other))
    return list(dict.fromkeys(texts))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("  Where IS\tmy card?! ", "where is my card"),
        ("isn't top-up", "isnt top up"),
        ("ＡＢ１２ 订单，在哪里？", "ab12 订单 在哪里"),
        ("thanks 🙏\ufe0f", "thanks"),
        ("zero\u200bwidth soft\u00adhyphen", "zerowidth softhyphen"),
        ("$5 + 3", "$5 + 3"),
        ("$5 is not €5", "$5 is not €5"),
        ("STRASSE straße", "strasse strasse"),
        ("नमस्ते।", "नमस्ते"),
        ("?!", "?!"),
        ("👍", "👍"),
    ],
)
def test_what_folding_leaves(text: str, expected: str) -> None:
    assert folded(text) == expected


def test_shingles_of_both_scripts() -> None:
    assert shingles("card x") == {"card", "ard ", "rd x"}
    assert shingles("订单在哪") == {"订单", "单在", "在哪"}
    assert shingles("ft12订单") == {"ft12", "订单"}
    assert shingles("ok") == {"ok"}
    assert words_of("ab12 订单 yes") == ["ab12", "订", "单", "yes"]
    assert jaccard({"a", "b", "c"}, {"b", "c", "d"}) == 0.5


@pytest.mark.parametrize("threshold", [0.5, 0.7, 0.85, 0.95, 1.0])
def test_bands_propose_nearly_every_pair_at_the_threshold(threshold: float) -> None:
    bands, rows = bands_for(threshold)
    assert bands * rows <= PERMUTATIONS
    assert 1 - (1 - threshold**rows) ** bands >= RECALL


@pytest.mark.parametrize("threshold", [0.6, 0.85])
def test_pairs_are_those_of_the_true_similarity(threshold: float) -> None:
    texts = variants(60)
    sets = [shingles(text) for text in texts]
    true = {
        (one, other): jaccard(sets[one], sets[other])
        for one, other in combinations(range(len(texts)), 2)
    }
    true = {pair: alike for pair, alike in true.items() if alike >= threshold}
    found = pairs_of(texts, threshold)
    assert len(true) >= 10
    assert all(true[pair] == alike for pair, alike in found.items()), "no false one"
    assert len(found) >= 0.98 * len(true)
    assert found == pairs_of(texts, threshold), "the same again"


def test_groups_are_chains_of_pairs_and_equal_texts() -> None:
    texts = [
        "Why was my top-up reverted by the bank yesterday?",
        "something else entirely",
        "why was my top up reverted by the bank yesterday",
        "Why was my top-up reverted by the bank yesterday evening?",
        "订单FT1234现在到哪里了，麻烦查一下",
        "订单FT1234现在到哪里了 麻烦查一下！",
        "Something else, entirely!",
    ]
    assert clusters(texts, 0.8, seed=0).groups() == [[0, 2, 3], [1, 6], [4, 5]]
    assert clusters(texts, 0.95, seed=0).groups() == [[0, 2], [1, 6], [3], [4, 5]]
    assert clusters([], 0.8, seed=0).groups() == []


def test_messages_of_one_template_are_not_compared_with_each_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rng = random.Random(0)
    texts = [f"please tell me where order {rng.randrange(10**6):06d} is now" for _ in range(1000)]
    texts = list(dict.fromkeys(texts))
    compared = 0

    def counted(left: set[str], right: set[str]) -> float:
        nonlocal compared
        compared += 1
        return jaccard(left, right)

    monkeypatch.setattr(near_duplicates, "jaccard", counted)
    given_up = near_pairs(texts, 0.85, 0, lambda pair: None)
    assert given_up > 300, "and says so"
    assert compared <= PATIENCE * len(texts), "all pairs would be half a million"
