"""YAML of manifests, written from values so that every reader reads the same."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import yaml

from registry.deployment import one_line


class Literal(str):
    """Text of several lines that is written as it is."""


class _Dumper(yaml.SafeDumper):
    """Writes every text that some reader could take for something else in double quotes.

    Readers differ: `y` is true for one, `0o17` a number for another.
    """

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    plain = re.fullmatch(r"[A-Za-z/][A-Za-z0-9_./-]{2,}", text)
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=None if plain else '"')


def _literal(dumper: yaml.SafeDumper, text: Literal) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", str(text), style="|")


_Dumper.add_representer(str, _text)
_Dumper.add_representer(Literal, _literal)


def yaml_file(header: Sequence[str], documents: Sequence[Mapping[str, Any]]) -> str:
    """Comment lines and YAML documents as one file; no value can leave its place."""
    comment = "".join(f"# {one_line(line)}".rstrip() + "\n" for line in header)
    body = yaml.dump_all(
        documents,
        Dumper=_Dumper,
        sort_keys=False,
        width=2**20,
        explicit_start=len(documents) > 1,
    )
    return comment + body
