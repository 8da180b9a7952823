"""Recipes, suites, policies, load profiles and hardware files: every shipped one, broken."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from registry.settings import CHECKOUT
from tests.unit.bad_input.cases import Case, odd_files, written

FOLDERS = ("recipes", "eval_suites")


@cache
def shipped() -> dict[str, dict[str, Any]]:
    """Every YAML file of a kind of ours, by path in the checkout."""
    files = [
        path for folder in FOLDERS for path in sorted((CHECKOUT / folder).rglob("*.yaml"))
        if "tasks" not in path.parts
    ]  # fmt: skip
    found = {}
    for path in files:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
        found[str(path.relative_to(CHECKOUT))] = content
    return found


def validate(content: Any, name: str = "r.yaml") -> Any:
    """Words that validate a file with this content, written as JSON, which is YAML."""
    text = content if isinstance(content, str | bytes) else json.dumps(content, ensure_ascii=False)
    write = written(name, text)
    return lambda folder: ["validate", write(folder)]


def mutations() -> Iterator[Case]:
    """One of each kind for each file, at a key that turns with the file; each is refused."""
    for number, (path, content) in enumerate(shipped().items()):
        kind = content["kind"]
        keys = [key for key in content if key != "kind"]
        key = keys[number % len(keys)]
        label = f"{Path(path).stem} of {kind}"

        def changed(value: Any, key: str = key, content: dict[str, Any] = content) -> Any:
            return {**content, key: value}

        renamed = {f"{k}_x" if k == key else k: v for k, v in content.items()}
        # Of a quantize recipe's ways to say what is done one must be there: that is said first.
        says = "" if key in ("preset", "recipe") else f": {key}_x: unknown key"
        yield Case(kind, f"{label}: `{key}` renamed", validate(renamed), ["{}/r.yaml", says])
        yield Case(kind, f"{label}: `{key}` is a list of lists",
                   validate(changed([[["deep"]]])), ["{}/r.yaml", f": {key}", "deep"])  # fmt: skip
        yield Case(kind, f"{label}: `{key}` is not a number",
                   validate(f"{json.dumps(changed('N')).replace(json.dumps('N'), '.nan')}"),
                   ["{}/r.yaml", key, "nan"])  # fmt: skip
        yield Case(kind, f"{label}: kind of another", validate({**content, "kind": "recipee"}),
                   ["{}/r.yaml: kind", "'recipee'", "one of accuracy"])  # fmt: skip
        yield Case(kind, f"{label}: `description` is missing",
                   validate({k: v for k, v in content.items() if k != "description"}),
                   ["{}/r.yaml: description", "is missing"])  # fmt: skip


NUMBERS = {
    "recipes/distill/": [("epochs", -1), ("learning_rate", -1e308), ("batch_size", 0),
                         ("max_length", 10**30), ("lora", [8]), ("epochs", "many")],
    "recipes/teacher/": [("concurrency", 10**9), ("max_truncated_share", 1.5),
                         ("sampling", {"temperature": -1, "max_tokens": 1}), ("samples", 65),
                         ("request_timeout", 0), ("url", "ftp://h"), ("url", "http://k:v@h/v1"),
                         ("url", "https://name@h/v1"), ("url", "https://h/v1?api_key=x"),
                         ("more_urls", ["https://h/v1#x"])],
    "recipes/release/": [("candidates", []), ("model", "../x"), ("model", "a\nb"), ("seed", -1),
                         ("reference_candidate", "none"), ("candidates", [{"name": "A B"}])],
    "recipes/draft/": [("num_speculative_tokens", 0), ("epochs", -3), ("held_out_share", 2)],
    "recipes/serve/": [("engine_args", {"port": 1}), ("engine_args", {"trust-remote-code": True}),
                       ("engine_args", {"model": "/etc"}), ("engine_args", []),
                       ("env", {"LD_PRELOAD": "x.so"}), ("env", {"A B": "x"}),
                       ("env", {"HF_TOKEN": "x"}), ("engine_args", {"api-key": "x"}),
                       ("engine_args", {"chat-template": "../x"}),
                       ("engine_args", {"seed": "--trust-remote-code"})],
    "recipes/hardware/": [("accelerators", -1), ("memory_gib", 0), ("price_per_hour", -2),
                          ("memory_gib", "much")],
    "eval_suites/load/": [("rates", [0]), ("rates", [-1.0]), ("rates", ["fast"]),
                          ("seconds_per_rate", 0), ("sampling", None)],
    "eval_suites/accuracy/": [("items", 0), ("items", 1.5), ("metrics", []),
                              ("concurrency", -1)],
    "eval_suites/policies/": [("gates", []), ("gates", {}), ("max_age_days", -1),
                              ("gates", [{"name": "g", "kind": "guess"}]), ("alpha", 2)],
}  # fmt: skip
"""Values of the right kind that nothing can mean, by folder."""


def numbers() -> Iterator[Case]:
    for folder, values in NUMBERS.items():
        first = f"{folder}freight" if folder == "eval_suites/load/" else folder
        path, content = next(item for item in shipped().items() if item[0].startswith(first))
        for key, value in values:
            shown = str(value)[:30]
            yield Case(content["kind"], f"{Path(path).stem}: {key} is {shown!r}",
                       validate({**content, key: value}), ["{}/r.yaml", key])  # fmt: skip


BOMB = "\n".join(
    ["a0: &a0 [x, x, x, x, x, x, x, x, x]"]
    + [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 10)]
)
TEXTS: dict[str, tuple[str | bytes, list[str]]] = {
    "is empty": ("", ["holds NoneType, not a mapping"]),
    "comments only": ("# nothing\n", ["holds NoneType, not a mapping"]),
    "a list": ("- kind: distill\n", ["holds list, not a mapping"]),
    "a word": ("distill", ["holds str, not a mapping"]),
    "a tab for indentation": ("kind: distill\nlora:\n\tr: 8\n", [":3:1", "not YAML"]),
    "a key twice": ("kind: distill\nkind: draft\n", [":2:1", "'kind' stands here twice"]),
    "a key twice inside": ("kind: distill\nlora: {r: 1, r: 2}\n", [":2:14", "'r' stands here"]),
    "not closed": ("kind: distill\nlora: {r: 1\n", ["not YAML"]),
    "quotes not closed": ("kind: 'distill\n", ["not YAML"]),
    "two documents": ("kind: distill\n---\nkind: draft\n", ["not YAML"]),
    "UTF-16": ("kind: distill\n".encode("utf-16"), ["byte 0 is not UTF-8", "save the file"]),
    "Latin-1": ("kind: distill # café\n".encode("latin-1"), ["byte 19 is not UTF-8"]),
    "a NUL byte": (b"kind: dis\0till\n", ["not YAML"]),
    "a control character": (b"kind: dis\x07till\n", ["not YAML"]),
    "half a surrogate pair": ('kind: "\\ud800"\n', ["no recipe can have"]),
    "an escape beyond Unicode": ('kind: "\\UFFFFFFFF"\n', ["not YAML"]),
    "aliases of aliases": (BOMB, ["with its aliases in full", "letters and values"]),
    "itself inside": ("a: &a [*a]\nkind: distill\n", ["no recipe can have"]),
    "itself as its base": ("a: &a\n  <<: *a\nkind: distill\n", ["r.yaml"]),
    "nested a thousand deep": ("a: " + "[" * 1000 + "]" * 1000, ["not YAML"]),
    "nested a thousand mappings deep": ("{a: " * 1000 + "1" + "}" * 1000, ["not YAML"]),
    "a Python object": ("kind: !!python/object:os.system x\n", ["not YAML", "python/object"]),
    "a Python call": ("kind: !!python/object/apply:os.system ['id']\n", ["not YAML"]),
    "a Python name": ("kind: !!python/name:os.system\n", ["not YAML"]),
    "a tag of nobody": ("kind: !me x\n", ["not YAML"]),
    "binary": ("kind: !!binary aGVsbG8=\n", ["r.yaml"]),
    "a set": ("kind: !!set {distill}\n", ["r.yaml", "kind: is {'distill'}"]),
    "a date for its kind": ("kind: 2026-01-31\n", ["r.yaml"]),
    "a list for its kind": ("kind: [distill]\n", ["r.yaml: kind", "'distill'"]),
    "a list as key": ("? [a]\n: b\n", ["a key must be plain text"]),
    "a number of 5000 digits": ("kind: distill\nepochs: " + "9" * 5000, ["r.yaml"]),
    "infinity": ("kind: distill\nlora: {r: .inf}\n", ["no recipe can have"]),
    "a number beyond floats": ("kind: distill\nepochs: 1.0e+999\n", ["r.yaml"]),
    "larger than a recipe": (b"#" * (1 << 20) + b"\n", ["larger than 1048576 bytes"]),
    "a line of 100 MB": (b"kind: " + b"x" * 100_000_000, ["larger than 1048576 bytes"]),
    "a program": (b"\x7fELF\x02\x01\x01" + bytes(range(256)), ["r.yaml"]),
    "an archive": (b"PK\x03\x04" + bytes(200), ["r.yaml"]),
    "a word of 200 kB": ("kind: " + "x" * 200_000, ["r.yaml: kind"]),
    "a name with escapes": ("kind: distill\n\x1b[31mred: 1\n", ["r.yaml"]),
}


def texts() -> Iterator[Case]:
    for name, (text, says) in TEXTS.items():
        yield Case("YAML file", name, validate(text), ["{}/r.yaml", *says])
    for name, make, says in odd_files():

        def odd(folder: Path, make: Any = make) -> list[object]:
            make(folder / "r.yaml")
            return ["validate", folder / "r.yaml"]

        yield Case("YAML file", f"{name} in its place", odd, ["{}", says])


CASES = [*mutations(), *numbers(), *texts()]
