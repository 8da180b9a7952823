"""The prompts of a load test: each different, none sent twice, lengths as asked.

A prompt that an engine has seen before is answered from its prefix cache, and a benchmark that
repeats its prompts measures that cache. So prompts are taken from one supply in order, and a kill
loses those that were taken rather than sending them again. Engines cache by blocks of tokens, each
counted with all that stands before it; the supply keeps the digest of every block it has given, so
what an engine could reuse is known and not hoped for.
"""

from __future__ import annotations

import hashlib
import json
import random
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eval_suites.load import LoadProfile, OutputLog, Scenario
from registry.digests import digest_of
from registry.errors import Problem, UserError
from registry.whole_files import write_whole
from tasks.chat_rows import Malformed, kind_of, messages_in, tools_in
from tasks.conversations import messages_of
from tasks.prompt_tables import read_table
from tasks.rejects import is_unicode, refuse

if TYPE_CHECKING:
    from tokenizers import Tokenizer

Row = dict[str, Any]
Split = Callable[[str], Sequence[object]]

BLOCK = 16
"""Tokens (or words) of a block, as vLLM's prefix cache has them on GPUs."""

FIRST_PROMPT = "first_prompt"
"""File of a measurement's folder: the number where its synthetic prompts begin."""

EXAMPLE = 'each row needs an id of its own, e.g. {"id": "a", "prompt": "hello"}'

TRIES = 200
"""Changes of a text until it has the asked number of tokens."""

VOCABULARY = (
    *("order", "truck", "port", "load", "driver", "city", "gate", "time", "ship", "box", "pallet"),
    *("route", "delay", "quote", "price", "docks", "crane", "check", "cargo", "seal", "label"),
    *("yard", "lane", "depot", "wheel", "axle", "tank", "valve", "hub", "rail"),
)

FILLERS = (" a", ".", " x", ",", " 1", "-")
"""Short pieces for the last tokens of a text."""


class Prompts:
    """A supply of rows `{"id", "messages"[, "tools"]}`; what was taken is never given again."""

    def __init__(
        self, rows: Iterator[Row], known: str, total: int | None, split: Split = str.split
    ) -> None:
        self._rows, self._known, self._total = rows, known, total
        self._seen = SeenBlocks(split)
        self._digest = hashlib.sha256()
        self.taken = 0
        self.expected_hits = 0.0
        """Share of the last rows' blocks that an engine could have cached from earlier ones."""

    @property
    def digest(self) -> str:
        """Of all messages taken so far, in their order."""
        return self._digest.hexdigest()

    @property
    def left(self) -> int | None:
        """Prompts that were not taken yet; None: endless."""
        return None if self._total is None else self._total - self.taken

    def require(self, count: int) -> None:
        """Raises `UserError` when the supply has fewer left."""
        if self.left is not None and self.left < count:
            raise UserError.at(
                self._known,
                f"holds {self._total} different prompts, {self.taken + count} are needed by now",
                "name more prompts, or a load profile with `scenarios` or with shorter steps",
            )

    def take(self, count: int) -> list[Row]:
        """Raises `UserError` when the supply has fewer left."""
        self.require(count)
        found = list(islice(self._rows, count))
        for row in found:
            self._digest.update(json.dumps(row["messages"], sort_keys=True).encode())
            if row.get("tools"):
                self._digest.update(json.dumps(row["tools"], sort_keys=True).encode())
        self.taken += count
        self.expected_hits = self._seen.share(found)
        return found

    def skip(self, count: int) -> None:
        """Leave out what an interrupted search has sent."""
        self.take(count)


class SeenBlocks:
    """Digests of the blocks of all prompts so far."""

    def __init__(self, split: Split) -> None:
        self._split = split
        self._seen: set[bytes] = set()

    def share(self, rows: Sequence[Row]) -> float:
        """Share of the rows' blocks that occurred before, in earlier rows of these too."""
        blocks, repeated = 0, 0
        for row in rows:
            chain = hashlib.sha256()
            tokens = self._split("\n".join(_texts_of(row)))
            for end in range(BLOCK, len(tokens) + 1, BLOCK):
                chain.update("\0".join(map(str, tokens[end - BLOCK : end])).encode() + b"\1")
                digest = chain.digest()
                blocks += 1
                repeated += digest in self._seen
                self._seen.add(digest)
        return repeated / blocks if blocks else 0.0


def _texts_of(row: Row) -> Iterator[str]:
    """What of a row an engine reads, in the order of most chat templates: tools stand first."""
    if row.get("tools"):
        yield json.dumps(row["tools"])
    for message in row["messages"]:
        yield str(message["content"] or "")
        if message.get("tool_calls"):
            yield json.dumps(message["tool_calls"])


# -- which prompts ---------------------------------------------------------------------------


def first_prompt(folder: Path) -> int:
    """Where this search's synthetic prompts begin.

    Drawn at random once for each folder: the endpoint may still have cached those of a search
    before, with the same profile.
    """
    file = folder / FIRST_PROMPT
    if not file.exists():
        write_whole(file, str(secrets.randbits(32) << 24))
    try:
        return int(file.read_text(encoding="utf-8"))
    except ValueError:
        raise UserError.at(file, "holds no number", "remove the folder, or name another") from None


def supply_of(
    profile: LoadProfile, prompts: Path | None, first: int = 0, tokenizer: Path | None = None
) -> Prompts:
    """The prompts to send: a file's, or the profile's synthetic ones."""
    if prompts is not None:
        return from_file(prompts, tokenizer)
    return synthetic(profile.scenarios, profile.seed, first, tokenizer)


# -- prompts of people -----------------------------------------------------------------------


def read_prompts(path: Path) -> list[Row]:
    """Rows `{"id", "messages"[, "tools"]}` in file order, each once.

    Raises `UserError` naming bad lines.
    """
    table = read_table(path)
    rows: dict[str, Row] = {}
    named: dict[str, tuple[int, str]] = {}
    problems = [(reject.line, reject.problem(path)) for reject in table.rejects]
    for line, columns in ((row.line, row.columns) for row in table.rows):
        try:
            name, chat = _chat(columns)
            digest = digest_of(chat if "tools" in chat else chat["messages"])
            # Requests are recorded by the id of their prompt.
            first, other = named.setdefault(name, (line, digest))
            if other != digest:
                raise Malformed("an id twice", f"id {name!r} is that of line {first} too")
        except Malformed as error:
            problems.append((line, Problem(f"{path}:{line}", str(error), EXAMPLE)))
        else:
            rows.setdefault(digest, {"id": name, **chat})
    if problems:
        problems.sort(key=lambda one: one[0])
        raise refuse([problem for _, problem in problems], path)
    if not rows:
        raise UserError.at(path, "holds no prompts", EXAMPLE)
    return list(rows.values())


def _chat(columns: Row) -> tuple[str, Row]:
    """Id and `{"messages"[, "tools"]}` of a row. Raises `Malformed`."""
    name = columns.get("id")
    if not isinstance(name, str | int) or isinstance(name, bool) or name == "":
        raise Malformed("no id", f"id is {'empty' if name == '' else kind_of(name)}")
    if not columns.get("messages") and columns.get("prompt") is None:
        raise Malformed("no prompt", "has no prompt and no messages")
    chat: Row = {"messages": messages_in(messages_of(columns), "messages")}
    if tools := tools_in(columns.get("tools"), "tools"):
        chat["tools"] = tools
    if not is_unicode(json.dumps(chat, ensure_ascii=False)):
        raise Malformed("not Unicode", "a text holds a lone surrogate")
    return str(name), chat


def from_file(path: Path, tokenizer: Path | None = None) -> Prompts:
    """The prompts of a JSONL file, each once; blocks are of tokens where a tokenizer is known."""
    rows = read_prompts(path)
    return Prompts(iter(rows), str(path), len(rows), _split(tokenizer))


# -- synthetic ones --------------------------------------------------------------------------


def synthetic(
    scenarios: Mapping[str, Scenario], seed: int, first: int = 0, tokenizer: Path | None = None
) -> Prompts:
    """Endless prompts of exact lengths, of all scenarios in turn as their weights say.

    Numbered from `first`: two supplies of numbers that do not overlap have no prompt in common,
    and none of their blocks after the prefix. Raises `UserError` where tokens are counted and no
    tokenizer is named, or lengths are too short to tell prompts apart.
    """
    texts = {
        name: _texts(name, one, f"{seed} {name}", tokenizer) for name, one in scenarios.items()
    }
    names = list(scenarios)
    weights = [scenarios[name].weight for name in names]

    def rows() -> Iterator[Row]:
        number = first
        while True:
            # A seed of its own for each, so that a search that was stopped can leave some out.
            drawn = random.Random(f"{seed} {number}")
            name = drawn.choices(names, weights)[0]
            row: Row = {
                "id": f"s{number}",
                "messages": [{"role": "user", "content": texts[name](number, drawn)}],
            }
            output = scenarios[name].output
            assert not isinstance(output, OutputLog), "logs are read with the profile"
            if output is not None:
                row["output_tokens"] = output if isinstance(output, int) else drawn.choice(output)
            if len(names) > 1:
                row["scenario"] = name
            yield row
            number += 1

    units = {one.unit for one in scenarios.values()}
    split = _split(tokenizer) if units == {"tokens"} else str.split
    return Prompts(rows(), "synthetic", None, split)


def _texts(
    name: str, shape: Scenario, seed: str, tokenizer: Path | None
) -> Callable[[int, random.Random], str]:
    """A function from a number to its text, in words or in tokens."""
    if shape.unit == "words":
        prefix = random.Random(seed).choices(VOCABULARY, k=shape.prefix)

        def in_words(number: int, drawn: random.Random) -> str:
            own = [f"{number:x}", *drawn.choices(VOCABULARY, k=shape.input - 1)]
            # The number stands in every block, so no two prompts share one after the prefix.
            own = [f"{word}{number:x}" if i % BLOCK == 0 else word for i, word in enumerate(own)]
            return " ".join([*prefix, *own])

        return in_words
    if tokenizer is None:
        raise UserError.at(
            f"scenario {name}: unit",
            "counts tokens, and no tokenizer is known",
            "name the model's with --tokenizer, or count `words`",
        )
    exact = ExactLength(tokenizer)
    shared = exact.text(random.Random(seed), shape.prefix, f"scenario {name}: prefix")

    def in_tokens(number: int, drawn: random.Random) -> str:
        begun = f"{shared} {number:x}" if shared else f"{number:x}"
        return exact.text(drawn, shape.prefix + shape.input, f"scenario {name}: input", begun)

    return in_tokens


class ExactLength:
    """Texts that a tokenizer counts as asked, without its special tokens and chat template."""

    def __init__(self, folder: Path) -> None:
        self._tokenizer = tokenizer_of(folder)
        self._folder = folder
        pieces = [*(f" {word}" for word in VOCABULARY), *FILLERS]
        # What a piece adds to a text; most tokenizers split at spaces, so it adds up.
        self._cost = {piece: self._count(f"a{piece}") - self._count("a") for piece in pieces}

    def text(self, drawn: random.Random, tokens: int, what: str, begun: str = "") -> str:
        """`begun` and words after it, `tokens` in all. Raises `UserError` where none comes out."""
        text = begun
        for _ in range(TRIES):
            short = tokens - self._count(text)
            if short == 0:
                return text.strip() if self._count(text.strip()) == tokens else text
            if short > 0:
                text += self._more(drawn, short)
            elif len(text) > len(begun):
                text = text[:-1]
            else:
                break
        raise UserError.at(
            what,
            f"no text of exactly {tokens} tokens of {self._folder} begins with {begun!r} "
            f"({self._count(begun)} tokens)",
            "ask for more tokens: each prompt begins with a number of its own",
        )

    def _more(self, drawn: random.Random, tokens: int) -> str:
        """Pieces that should add so many tokens."""
        pieces: list[str] = []
        fitting = list(self._cost)
        while tokens > 0:
            fitting = [piece for piece in fitting if 0 < self._cost[piece] <= tokens] or [
                FILLERS[0]
            ]
            pieces.append(drawn.choice(fitting))
            tokens -= max(1, self._cost[pieces[-1]])
        return "".join(pieces)

    def _count(self, text: str) -> int:
        return len(self._tokenizer.encode(text, add_special_tokens=False).ids) if text else 0


def tokenizer_of(folder: Path) -> Tokenizer:
    """Raises `UserError` for a folder without a fast tokenizer's file."""
    from tokenizers import Tokenizer

    file = folder / "tokenizer.json"
    try:
        return Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises bare `Exception`
        raise UserError.at(
            file, f"is no tokenizer: {error}", "name a folder with a tokenizer.json"
        ) from None


def _split(tokenizer: Path | None) -> Split:
    if tokenizer is None:
        return str.split
    loaded = tokenizer_of(tokenizer)
    return lambda text: loaded.encode(text, add_special_tokens=False).ids


def word_tokenizer(folder: Path) -> Path:
    """A tokenizer whose tokens are words: for counting, where the endpoint's own is not known."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace

    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = Tokenizer(WordLevel({"[UNK]": 0}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = Whitespace()
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "[UNK]"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder
