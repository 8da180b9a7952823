"""docs/licences.md names what is pinned, and a licence for each."""

from __future__ import annotations

import re

from registry.settings import CHECKOUT


def test_the_list_of_licences_is_that_of_the_lock_files() -> None:
    text = (CHECKOUT / "docs" / "licences.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (\S+) \| (\S+) \| ([a-z ]+) \| (.+) \|$", text, re.M)
    rows = [row for row in rows if row[0] != "package"]
    listed = {(name, version, where) for name, version, both, _ in rows for where in both.split()}
    pinned = set()
    for where in ("driver", "serve"):
        lock = (CHECKOUT / "requirements" / f"{where}-cpu.txt").read_text(encoding="utf-8")
        for name, version in re.findall(
            r"^([A-Za-z0-9_.-]+)(?:\[[^\]]*\])?==([^\s;]+)", lock, re.M
        ):
            pinned.add((re.sub(r"[-_.]+", "-", name).lower(), version, where))
    assert listed == pinned, "`make licences` writes the list again"
    assert [row for row in rows if row[3] in ("", "says none")] == []
    on_cpus = {name for name, _, _ in pinned}
    named = set(text.rpartition("\n\n")[2].strip().split(", "))
    for where in ("driver", "serve"):
        lock = (CHECKOUT / "requirements" / f"{where}-cuda.txt").read_text(encoding="utf-8")
        for name, version in re.findall(
            r"^([A-Za-z0-9_.-]+)(?:\[[^\]]*\])?==([^\s;]+)", lock, re.M
        ):
            plain = re.sub(r"[-_.]+", "-", name).lower()
            assert (f"{plain} {version}" in named) == (plain not in on_cpus), plain
