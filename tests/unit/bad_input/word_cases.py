"""Words of the command line that name nothing, or something else than they should."""

# ruff: noqa: E501 - one line for each case

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from tests.unit.bad_input.cases import TINY, Case

HOSTILE = ("../../x", "/etc/passwd", "a\nb", "$(touch x)", "C:\\x", "a b", "\x1b[31m", "", "\udcff")

WORDS: list[tuple[list[str], list[str]]] = [
    ([], ["Usage"]),
    (["nothing"], ["nothing"]),
    (["release"], ["name"]),
    (["release", TINY, "--nothing"], ["--nothing"]),
    (["release", "freight_dmo"], ["'freight_dmo'", "'freight_demo'"]),
    (["release", "x" * 5000], ["x" * 50]),
    (["release", "~nobody-here/a.yaml"], ["~nobody-here"]),
    (["release", TINY, "--set", "seed"], ["--set seed", "KEY.KEY=VALUE"]),
    (["release", TINY, "--set", "=1"], ["--set =1"]),
    (["release", TINY, "--set", "a..b=1"], ["--set a..b=1"]),
    (["release", TINY, "--set", "seed=["], ["--set", "seed=["]),
    (["release", TINY, "--set", "seed=.nan"], ["seed=.nan"]),
    (["release", TINY, "--set", "seed=!!python/name:os.system"], ["--set", "python/name"]),
    (["release", TINY, "--set", "nothing=1"], ["nothing: unknown key"]),
    (["release", TINY, "--set", "seed.deep.er=1"], ["seed"]),
    (["release", TINY, "--set", "candidates.9.name=x"], ["candidates.9", "0 to 2"]),
    (["release", TINY, "--set", "quantize.none.recipe=x"], ["quantize.none"]),
    (["release", TINY, "--set", "teacher.url=file:///etc/passwd"], ["teacher_tiny.yaml: url"]),
    (["release", TINY, "--set", "accuracy.task=../../../etc/passwd"], ["passwd"]),
    (["release", TINY, "--prompts", "none.csv", "--dry-run", "--set", "prompts.mapping.reference=r"],
     ["none.csv"]),
    (["validate", "none.yaml"], ["none.yaml"]),
    (["validate", "requirements"], ["requirements", "no YAML file"]),
    (["serve", "nothing"], ["nothing", "MODEL@ALIAS"]),
    (["serve", "m@champion", "--port", "0"], ["--port"]),
    (["serve", "m@champion", "--port", "many"], ["--port"]),
    (["serve", "m@champion"], ["no such database"]),
    (["gate", "--policy", "none", "--candidate", "x"], ["'none'"]),
    (["gate", "--policy", "retention_hit_rate", "--candidate", ""], ["--candidate", "is empty"]),
    (["gate", "--policy", "retention_hit_rate", "--candidate", "none"], ["none", "no such folder"]),
    (["gate", "--policy", "retention_hit_rate", "--candidate", ".", "--aa", "."], ["--aa"]),
    (["gate", "--policy", "retention_hit_rate", "--candidate", ".", "--candidates", "-1"], ["--candidates"]),
    (["power", "--policy", "retention_hit_rate", "--evidence", ".", "--effect", "nan"], ["--effect"]),
    (["power", "--policy", "retention_hit_rate", "--evidence", ".", "--effect", "-1"], ["--effect"]),
    (["bench", "--load", "none", "--url", "http://127.0.0.1:9", "--model", "m"], ["none"]),
    (["bench", "--load", "freight_cpu_2core"], ["bench"]),
    (["bench", "--load", "freight_cpu_2core", "--bundle", "zzz"], ["--bundle zzz"]),
    (["bench", "--load", "freight_cpu_2core", "--bundle", "0" * 64], ["--bundle 0000"]),
    (["bench", "--load", "freight_cpu_2core", "--url", "http://u:secretword@h", "--model", "m"],
     ["--url", "PILOTAGE_TEACHER_API_KEY"]),
    (["bench", "--load", "freight_cpu_2core", "--url", "ftp://h", "--model", "m"], ["ftp://h"]),
    (["bench", "--load", "freight_cpu_2core", "--model", "none"], ["none", "config.json"]),
    (["ledger", "a/b"], ["a/b"]),
    (["why", "m"], ["m"]),
    (["prune", "--keep", "-1"], ["--keep"]),
]  # fmt: skip


def words() -> Iterator[Case]:
    for given, says in WORDS:
        name = " ".join(word if len(word) < 60 else word[:20] + "..." for word in given)
        name = name.replace(TINY, "RECIPE") or "none at all"
        yield Case("command line", name, lambda folder, given=given: given, says)
    for number, hostile in enumerate(HOSTILE):
        for command, rest in (("why", []), ("serve", ["--print"])):
            given = [command, f"{hostile}@champion", *rest]
            yield Case("command line", f"{command} of hostile name {number}",
                       lambda folder, given=given: given, [])  # fmt: skip


def bundles() -> Iterator[Case]:
    digest = "ab" * 32
    for name, content in {
        "is empty": b"", "is not JSON": b"{", "is a list": b"[]", "has no target": b'{"name": "a"}',
        "is another's": b'{"name": "a", "target": {"stage": "s", "key": "k", "digest": "d"}, '
                        b'"engine_version": "1"}',
        "nested deep": b"[" * 100_000, "is UTF-16": "{}".encode("utf-16"),
        "leaves the store": b'{"name": "a", "target": {"stage": "../../..", "key": "/etc", '
                            b'"digest": "d", "below": ".."}, "engine_version": "1"}',
    }.items():  # fmt: skip

        def given(folder: Path, content: bytes = content) -> list[str]:
            from registry.settings import settings

            settings.cache_clear()
            kept = settings().home / "bundles"
            kept.mkdir(parents=True)
            (kept / f"{digest}.json").write_bytes(content)
            return ["bench", "--load", "freight_cpu_2core", "--bundle", digest]

        yield Case("bundle", name, given, [f"{digest}.json"])


CASES = [*words(), *bundles()]
