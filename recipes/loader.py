"""Find, read, override and validate the YAML files that people write.

A name (`freight_demo`) means a file shipped in the checkout, a path means that file. The kind is
checked before the body, overrides (`a.b=c`) are applied before validation, and every mistake of
a file is reported at once with file, place, value and remedy.
"""

from __future__ import annotations

import difflib
import math
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from datetime import date, time
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import BaseModel, ValidationError

from registry.digests import canonical_json
from registry.errors import Problem, UserError

RECIPES_DIR = Path(__file__).resolve().parent
MAX_BYTES = 1 << 20
MAX_EXPANDED = 4 << 20
"""Letters and values of a file with each alias in full: aliases to aliases stand for billions."""
MAX_DEPTH = 100
LONGEST_NAME = 150
"""Bytes of a file's name without its ending; a file system takes 255, and a report's adds some."""
LONGEST_REASON = 1500
LARGEST = 1 << 63
"""Above it a whole number is none that a program could take."""
NO_VALUE = (TypeError, ValueError, LookupError, AttributeError, OverflowError, RecursionError)
"""What PyYAML and json raise, beside their own errors, for values that no recipe can have."""
Model = TypeVar("Model", bound=BaseModel)


class _UniqueKeyLoader(yaml.SafeLoader):
    """YAML keeps the last of two equal keys; here that is a mistake that is named."""

    def __init__(self, stream: str) -> None:
        super().__init__(stream)
        self.sizes: dict[yaml.Node, int] = {}
        """Letters and values below each node that is read to its end, its aliases in full."""

    def compose_node(self, parent: Any, index: Any) -> Any:
        mark = self.peek_event().start_mark
        node = super().compose_node(parent, index)
        assert node is not None, "an event that begins a node is read to a node"
        if node not in self.sizes:
            self.sizes[node] = self._size(node)
        if self.sizes[node] > MAX_EXPANDED:
            what = f"with its aliases in full it has more than {MAX_EXPANDED} letters and values"
            raise yaml.composer.ComposerError(None, None, what, mark)
        return node

    def _size(self, node: yaml.Node) -> int:
        # What is inside of itself has no size yet; it is refused when it is read.
        if isinstance(node, yaml.MappingNode):
            below = [part for pair in node.value for part in pair]
        else:
            below = node.value if isinstance(node, yaml.SequenceNode) else []
        own = len(node.value) if isinstance(node, yaml.ScalarNode) else 0
        return 1 + own + sum(self.sizes.get(part, 0) for part in below)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[Any] = set()
        for key_node, _ in node.value:
            if key_node.tag == "tag:yaml.org,2002:merge":
                continue
            key = self.construct_object(key_node, deep=deep)
            if not isinstance(key, str | int | float | bool | type(None)):
                raise yaml.constructor.ConstructorError(
                    None, None, "a key must be plain text", key_node.start_mark
                )
            if key in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"key {key!r} stands here twice", key_node.start_mark
                )
            seen.add(key)
        return super().construct_mapping(node, deep=deep)


# YAML 1.1 reads `1e-3` as text, `1:30` as 90 and `010` as 8: nobody means that. What is no number
# here stays a text, which a number's field refuses.
_PLAIN_NUMBERS = {
    "tag:yaml.org,2002:int": r"[-+]?(?:0|[1-9][0-9_]*|0x[0-9a-fA-F_]+|0b[01_]+)",
    "tag:yaml.org,2002:float": (
        r"[-+]?(?:(?:[0-9][0-9_]*\.[0-9_]*|\.[0-9][0-9_]*)(?:[eE][-+]?[0-9]+)?"
        r"|[0-9]+[eE][-+]?[0-9]+|\.(?:inf|Inf|INF))|\.(?:nan|NaN|NAN)"
    ),
}
_UniqueKeyLoader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag not in _PLAIN_NUMBERS]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
for _tag, _number in _PLAIN_NUMBERS.items():
    _UniqueKeyLoader.add_implicit_resolver(
        _tag, re.compile(f"^(?:{_number})$"), list("-+.0123456789")
    )


def read_yaml(path: Path) -> dict[str, Any]:
    """The mapping in a YAML file. Raises `UserError` naming file and line."""
    try:
        if path.exists() and not path.is_file():
            raise UserError.at(path, "is no regular file", "name a YAML file")
        if path.stat().st_size > MAX_BYTES:
            raise UserError.at(path, f"larger than {MAX_BYTES} bytes", "name a YAML file")
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise UserError.at(
            path, f"byte {error.start} is not UTF-8", "save the file as UTF-8"
        ) from None
    except OSError as error:
        raise UserError.at(path, f"cannot be read ({error.strerror})", "check the path") from None
    try:
        content = yaml.load(text, _UniqueKeyLoader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = f"{path}:{mark.line + 1}:{mark.column + 1}" if mark else str(path)
        raise UserError.at(place, f"not YAML: {error.problem}", "correct that line") from None
    except (yaml.YAMLError, *NO_VALUE) as error:
        raise UserError.at(path, f"not YAML: {error}", "correct the file") from None
    try:
        canonical_json(content).encode("utf-8")
        place, value = next(_odd_values(content), ("", None))
        why = f"{place}: is {cut(value)}" if place else ""
    except NO_VALUE as error:
        place, value = next(_odd_values(content), ("", error))
        why = f"{place}: is {cut(value)}" if place else str(error)
    if why:
        raise UserError.at(
            path, f"holds a value that no recipe can have: {why}", "write a plain text or number"
        )
    if not isinstance(content, dict):
        raise UserError.at(
            path, f"holds {type(content).__name__}, not a mapping", "begin with `kind: ...`"
        )
    return content


def find(name: str, kind: str, root: Path = RECIPES_DIR) -> Path:
    """The file of a recipe or suite by name or path. Raises `UserError` with near matches."""
    if name.endswith((".yaml", ".yml")) or "/" in name:
        try:
            path = Path(name).expanduser()
            if path.is_file():
                if len(os.fsencode(path.stem)) > LONGEST_NAME:
                    what = f"its name is longer than {LONGEST_NAME} bytes"
                    raise UserError.at(f"{name!a}", what, "rename it: reports and logs bear it too")
                return path
        except (OSError, RuntimeError, ValueError) as error:
            raise UserError.at(f"{name[:200]!a}", str(error), f"name a {kind} file") from None
        raise UserError.at(
            path, "no such file", f"name a {kind} file or one of: {_known(kind, root)}"
        )
    shipped = {path.stem: path for path in _files(kind, root)}
    if name in shipped:
        return shipped[name]
    near = difflib.get_close_matches(name, shipped, n=1)
    remedy = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(sorted(shipped))}"
    raise UserError.at(f"{kind} {name!r}", "no recipe or suite of that name", remedy)


def short_name(name: str) -> str:
    """A recipe's name for people and file names, whether it was given by name or by path."""
    return Path(name).stem if "/" in name else name


def shipped(kind: str, root: Path = RECIPES_DIR) -> list[str]:
    """Names of the files of one kind that come with the checkout."""
    return sorted(path.stem for path in _files(kind, root))


def load(
    name: str,
    kind: str,
    model: type[Model],
    *,
    root: Path = RECIPES_DIR,
    overrides: Mapping[str, Any] | None = None,
) -> Model:
    """One validated recipe or suite by name or path, with dotted overrides applied first."""
    path = find(name, kind, root)
    return validate(read_yaml(path), kind, model, source=str(path), overrides=overrides)


def validate(
    content: dict[str, Any],
    kind: str,
    model: type[Model],
    *,
    source: str,
    overrides: Mapping[str, Any] | None = None,
) -> Model:
    """Check the kind, apply overrides, validate; all problems at once."""
    found = content.get("kind")
    if found != kind:
        raise UserError.at(
            f"{source}: kind", f"is {cut(found)}, expected {kind!r}", f"write `kind: {kind}`"
        )
    for dotted, value in (overrides or {}).items():
        content = _with(content, dotted.split("."), value, dotted)
    try:
        read = model.model_validate(content)
    except ValidationError as error:
        raise UserError(
            [_problem(source, content, detail, model) for detail in error.errors()]
        ) from None
    if truths := [*_truths_for_numbers(content, read.model_dump())]:
        raise UserError(
            [Problem(f"{source}: {at}", f"is {value}, no number", "write digits")
             for at, value in truths]
        )  # fmt: skip
    return read


def _truths_for_numbers(
    written: Any, read: Any, at: tuple[str, ...] = ()
) -> Iterator[tuple[str, bool]]:
    """Places where `yes` or `off` was taken for 1 or 0: pydantic reads them so."""
    if isinstance(written, dict) and isinstance(read, dict):
        for key in written.keys() & read.keys():
            yield from _truths_for_numbers(written[key], read[key], (*at, str(key)))
    elif isinstance(written, list) and isinstance(read, list | tuple):
        for index, (one, other) in enumerate(zip(written, read, strict=False)):
            yield from _truths_for_numbers(one, other, (*at, str(index)))
    elif isinstance(written, bool) and isinstance(read, int | float) and read is not written:
        yield ".".join(at), written


def parse_overrides(assignments: Sequence[str]) -> dict[str, Any]:
    """`["a.b=1", "c=[x, y]"]` as `{"a.b": 1, "c": ["x", "y"]}`; values are read as YAML."""
    parsed: dict[str, Any] = {}
    problems = []
    for assignment in assignments:
        dotted, equals, text = assignment.partition("=")
        parts = dotted.split(".")
        if not equals or not all(parts) or len(parts) > MAX_DEPTH:
            what = "is not KEY.KEY=VALUE"
            problems.append(Problem(f"--set {_start(assignment)}", what, "e.g. seed=1"))
            continue
        try:
            value = yaml.load(text, _UniqueKeyLoader)
            canonical_json(value).encode("utf-8")
            parsed[dotted] = value
        except (yaml.YAMLError, *NO_VALUE):
            what = "value is not YAML that a recipe can hold"
            problems.append(Problem(f"--set {_start(assignment)!a}", what, "quote it"))
    if problems:
        raise UserError(problems)
    return parsed


def _with(content: Any, parts: list[str], value: Any, dotted: str) -> Any:
    """`content` with the value at `parts` replaced; parts are mapping keys or list positions."""
    head, rest = parts[0], parts[1:]
    if isinstance(content, list):
        if head not in map(str, range(len(content))):
            raise UserError.at(
                f"--set {_start(dotted)}", f"no item {cut(head)}", f"use 0 to {len(content) - 1}"
            )
        index = int(head)
        changed = _with(content[index], rest, value, dotted) if rest else value
        return [*content[:index], changed, *content[index + 1 :]]
    if not isinstance(content, dict):
        what = f"{cut(head)} is below a plain value"
        raise UserError.at(f"--set {_start(dotted)}", what, "shorten the key")
    changed = _with(content.get(head, {}), rest, value, dotted) if rest else value
    return {**content, head: changed}


def _place(content: Any, parts: Sequence[Any]) -> str:
    """The key as it is written: pydantic puts the chosen kind (`source`, `scorer`) in between."""
    written, at = [], content
    for part in parts:
        if isinstance(at, dict) and part not in at and part in (at.get("source"), at.get("scorer")):
            continue
        written.append(str(part))
        inside = isinstance(at, dict) and part in at
        inside = inside or (isinstance(at, list) and isinstance(part, int) and part < len(at))
        at = at[part] if inside else None
    return ".".join(written)


def _problem(source: str, content: Any, detail: Any, model: type[BaseModel]) -> Problem:
    place = _place(content, detail["loc"])
    where = f"{source}: {place}" if place else source
    what = str(detail["msg"]).removeprefix("Value error, ")
    if len(what) > LONGEST_REASON:
        # A value stands in the middle of some of pydantic's sentences, however long it is.
        what = f"{what[: LONGEST_REASON // 2]} ... {what[-LONGEST_REASON // 2 :]}"
    if detail["type"] == "extra_forbidden":
        last = str(detail["loc"][-1])
        near = difflib.get_close_matches(last, model.model_fields, n=1)
        return Problem(where, "unknown key", f"did you mean {near[0]!r}?" if near else "remove it")
    if detail["type"] == "missing":
        return Problem(where, "is missing", "add it")
    # A mapping is shown by its keys: a value that does not belong there may be a secret.
    written = detail.get("input")
    shown = cut(sorted(map(str, written)) if isinstance(written, dict) else written)
    return Problem(where, f"{what} (found {shown})", "correct the value")


def cut(value: Any) -> str:
    """A value for a message, cut where it is long."""
    text = ascii(value) if isinstance(value, str) and not value.isprintable() else repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def _start(words: str) -> str:
    return words if len(words) <= 80 else words[:77] + "..."


class _Key:
    """A key that is no text, beside others that are."""

    def __init__(self, key: Any) -> None:
        self.key = key

    def __repr__(self) -> str:
        return f"a key without quotes, {cut(self.key)}, beside others that are texts"


def _odd_values(content: Any, at: tuple[str, ...] = ()) -> Iterator[tuple[str, Any]]:
    """Place and value of what no recipe can have: no numbers, half characters, what YAML makes."""
    place = ".".join(at)
    if isinstance(content, dict):
        kinds = {type(key): key for key in content}
        if str in kinds and len(kinds) > 1:
            # `3:` beside `'4':` is another key, and the two have no order.
            odd = next(key for kind, key in kinds.items() if kind is not str)
            yield ".".join((*at, str(odd))), _Key(odd)
        for key, value in content.items():
            if len(at) < MAX_DEPTH:
                yield from _odd_values(value, (*at, str(key)))
    elif isinstance(content, list):
        for index, value in enumerate(content):
            if len(at) < MAX_DEPTH:
                yield from _odd_values(value, (*at, str(index)))
    elif isinstance(content, float):
        if not math.isfinite(content):
            yield place, content
    elif isinstance(content, int) and abs(content) > LARGEST:
        yield place, content
    elif isinstance(content, str):
        if not _is_text(content):
            yield place, content
    elif content is not None and not isinstance(content, bool | int | date | time):
        yield place, content


def _is_text(text: str) -> bool:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


def _files(kind: str, root: Path) -> list[Path]:
    return sorted((root / _folder(kind)).glob("*.yaml"))


def _folder(kind: str) -> str:
    return "policies" if kind == "policy" else kind


def _known(kind: str, root: Path) -> str:
    return ", ".join(shipped(kind, root)) or "none"
