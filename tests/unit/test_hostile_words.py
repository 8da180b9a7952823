"""Words of people and of models stay words: in pages, in names of files, in what is started."""

from __future__ import annotations

import ast
import re
from datetime import UTC, datetime
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from markdown_it import MarkdownIt
from pydantic import ValidationError

from recipes.schema import Candidate, ReleaseRecipe
from registry.bundle import Part
from registry.outcome import CandidateOutcome, ReleaseOutcome, Verdict, WaiverShown
from registry.settings import CHECKOUT, settings
from tasks.maintaining import Step, table
from tasks.night_digest import digest_table, row_of
from tasks.run_pages import artifact_key, code, failure_page, fenced, summary
from tests.unit.bad_input.cases import TINY, run

HOSTILE = (
    "<script>alert(1)</script><img src=x onerror=alert(1)> [press](javascript:alert(1)) "
    "![p](http://evil.example/x.png) <http://evil.example> ``` ~~~ ` | \\ # \n\n# h\n\n"
    "```\n<script>alert(2)</script>\n"
)
SHOWN = MarkdownIt("commonmark", {"html": True}).enable(["table", "strikethrough"])
"""As a page would be shown by somebody who trusts it."""


def runs_nothing(page: str) -> None:
    """No tag or link of its own, no heading but ours, however freely Markdown is shown."""
    html = SHOWN.render(page)
    tags = set(re.findall(r"<([a-z]+[0-9]?)", html))
    ours = {"h1", "h2", "h3", "p", "strong", "em", "ul", "ol", "li", "code", "pre", "table",
            "thead", "tbody", "tr", "th", "td", "a", "br", "hr", "blockquote"}  # fmt: skip
    assert tags <= ours, tags - ours
    for address in re.findall(r'href="([^"]*)"', html):
        assert urlsplit(address).hostname == "127.0.0.1", address
    assert "<h1>h</h1>" not in html


def pages() -> dict[str, str]:
    now = datetime(2030, 1, 1, tzinfo=UTC)
    odd = CandidateOutcome(name=HOSTILE, bundle="", verdict=Verdict.FAIL, reasons=[HOSTILE])
    waived = WaiverShown(
        gate=HOSTILE, owner=HOSTILE, reason=HOSTILE, expires=now.date(), state="active"
    )
    outcome = ReleaseOutcome(
        release="0" * 64, name=HOSTILE, verdict=Verdict.FAIL, model=HOSTILE, candidates=[odd],
        finished_at=now, seconds=1.0, waivers=[waived],
    )  # fmt: skip
    row = row_of(HOSTILE, "Failed", "FAILED", HOSTILE, 1.0, "http://127.0.0.1:4200/run")
    steps = [Step(HOSTILE, HOSTILE, 0, 1.0), Step("store", "", 0, 1.0, failed=HOSTILE)]
    return {
        "release": summary(outcome, settings(), None, [Path(f"/l/{HOSTILE}")]),
        "failure": failure_page(HOSTILE, HOSTILE, {Path(f"/l/{HOSTILE}"): HOSTILE}),
        "night": digest_table([row], "Night of 2030-01-01"),
        "maintenance": table(steps, 30),
        "code": f"- {code(HOSTILE)}\n",
        "fence": fenced(HOSTILE),
    }


@pytest.mark.parametrize("name", ["release", "failure", "night", "maintenance", "code", "fence"])
def test_what_somebody_wrote_is_shown_and_runs_nothing(name: str) -> None:
    page = pages()[name]
    runs_nothing(page)
    assert "alert" in SHOWN.render(page)


# -- names -----------------------------------------------------------------------------------

OUTSIDE = (
    "../x",
    "..",
    ".",
    "/x",
    "a/b",
    "a\\b",
    "",
    " ",
    "a\n",
    "\0",
    "~",
    "$(touch x)",
    "-x",
    "é" * 9,
)


@pytest.mark.parametrize("name", OUTSIDE)
def test_a_candidate_s_and_a_model_s_name_can_be_a_file_s(name: str) -> None:
    with pytest.raises(ValidationError, match="name"):
        Candidate(name=name, quantize="q", serve="s")
    with pytest.raises(ValueError, match="cannot be a registered model's name"):
        ReleaseRecipe._model_name(name)


@pytest.mark.parametrize("name", ["../x", "..", ".", "/x", "a/b", "", "a\n", "\0"])
def test_a_bundle_s_parts_lie_in_the_store(name: str) -> None:
    whole = {"stage": "quantize", "key": "k", "digest": "d", "below": "a/b"}
    assert Part.model_validate(whole).path == settings().store_dir / "quantize/k/files/a/b"
    for field in ("stage", "key", "digest"):
        with pytest.raises(ValidationError, match=field):
            Part.model_validate({**whole, field: name})
    if name in ("../x", "..", "/x", "\0"):
        with pytest.raises(ValidationError, match="leaves the artifact's folder"):
            Part.model_validate({**whole, "below": name})


@pytest.mark.parametrize("name", ["../../etc/passwd", "a/b\n", "<x>", "", "-", "é", "x" * 999])
def test_a_page_s_key_is_letters(name: str) -> None:
    assert re.fullmatch(r"[a-z0-9-]*gates", artifact_key(name, "gates"))


@pytest.mark.parametrize(
    "name",
    ["$(touch pwned)", "a b;touch pwned", "`touch pwned`", "a\nb", "x" * 240, "é" * 120, "\u202ea",
     "-rf", "%s%s", "{x}"],
    ids=range(10),
)  # fmt: skip
def test_a_recipe_file_of_any_name_is_planned_or_refused(
    name: str, tmp_path: Path, home: Path
) -> None:
    file = tmp_path / f"{name}.yaml"
    file.write_text(Path(TINY).read_text(encoding="utf-8"), encoding="utf-8")
    said = run(["release", file, "--dry-run"])
    assert "Traceback" not in said.out + said.err
    assert said.status == (2 if len(name.encode()) > 150 else 0), said.err
    assert "remedy: " in said.err or said.status == 0
    assert not list(CHECKOUT.glob("pwned*")) and not list(tmp_path.rglob("pwned*"))


# -- what is started -------------------------------------------------------------------------


def test_every_process_that_is_started_is_handed_its_environment() -> None:
    """Without `env` it would have all of ours, secrets too."""
    found = []
    for folder in ("flows", "tasks", "registry", "recipes", "eval_suites"):
        for path in sorted((CHECKOUT / folder).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.Call) and ast.unparse(node.func) in (
                    *(f"subprocess.{one}" for one in ("run", "Popen", "call", "check_call")),
                    *("subprocess.check_output", "Popen", "asyncio.create_subprocess_exec"),
                ):
                    handed = {one.arg for one in node.keywords}
                    if "env" not in handed:
                        found.append(f"{path.relative_to(CHECKOUT)}:{node.lineno}")
    assert found == []
