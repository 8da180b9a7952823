"""`pilotage gate` and `pilotage power` on folders as people and pipelines really leave them.

A PASS that was not deserved is the fault this file is about; then crashes, and words that mislead.
"""

from __future__ import annotations

import io
import json
import math
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from typer.testing import CliRunner

from eval_suites.gates import error_of
from flows.cli import app
from registry.errors import PilotageError
from registry.evidence import ITEM_COLUMNS, write_summary
from registry.gate_report import encodable, strict_line
from registry.settings import CHECKOUT
from tests.unit.evidence_builders import accuracy, latency, point, rule

RETENTION = "retention_hit_rate"
KEYS = {"name", "kind", "metric", "tier", "result", "estimate", "bound", "margin", "n", "mde"}
GATE = {"name": "g", "kind": "retention", "metric": "hit_rate", "reference": "teacher"}
GOOD = [1] * 372 + [0] * 28
BAD = [1] * 200 + [0] * 200


def run(*words: object) -> tuple[int, str, str]:
    """Exit status, standard output and what a person is told."""
    result = CliRunner().invoke(app, [str(word) for word in words])
    if isinstance(result.exception, PilotageError):
        return result.exception.exit_status, result.output, str(result.exception)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.output, result.output


def gate(
    candidate: object, reference: object, policy: object = RETENTION, *words: object
) -> dict[str, Any]:
    """The document of the last line; the exit status is the one that belongs to its verdict."""
    status, out, _ = run(
        "gate", "--policy", policy, "--candidate", candidate,
        "--reference", f"teacher={reference}", "--json", *words,
    )  # fmt: skip
    document: dict[str, Any] = json.loads(out.splitlines()[-1], parse_constant=pytest.fail)
    assert status == {"PASS": 0, "INCONCLUSIVE": 11}.get(document["verdict"], 10)
    assert all(KEYS | {"needed"} <= set(one) for one in document["gates"])
    return document


def refused(*words: object) -> str:
    """What a person is told who made a mistake."""
    status, _, told = run(*words)
    assert status == 2, told
    return told


def table(folder: Path, scores: Sequence[object], name: str = "hit_rate", **more: Any) -> Path:
    """A folder with an `items.csv`."""
    folder.mkdir(parents=True, exist_ok=True)
    ids = more.pop("ids", [f"i{row:04d}" for row in range(len(scores))])
    frame = pd.DataFrame({"item_id": ids, name: scores, **more})
    frame.to_csv(folder / "items.csv", index=False)
    return folder


def own(folder: Path, scores: Sequence[float], /, rows: Any = None, **changes: Any) -> Path:
    """A folder of our own, as a release writes it."""
    folder.mkdir(parents=True, exist_ok=True)
    n = len(scores)
    counts = {"items_asked": n, "items_scored": n, "metrics": {"hit_rate": sum(scores) / n}}
    summary = accuracy(folder.name, **{**counts, **changes})
    write_summary(folder, summary)
    columns = {name: [None] * n for name in ITEM_COLUMNS} | {
        "item_id": [f"i{row}" for row in range(n)],
        "prompt_hash": [f"p{row}" for row in range(n)],
        "bundle": [summary.bundle] * n,
        "engine": [summary.engine] * n,
        "harness": [summary.harness] * n,
        "hit_rate": [float(score) for score in scores],
    }
    pd.DataFrame(columns | (rows or {})).to_parquet(folder / "items.parquet")
    return folder


def policy(folder: Path, *gates: Mapping[str, Any], **settings: Any) -> Path:
    path = folder / f"policy_{len(list(folder.glob('policy_*')))}.yaml"
    content = {"kind": "policy", "description": "for a test", "gates": list(gates), **settings}
    path.write_text(json.dumps(content))
    return path


# -- a PASS must be deserved -----------------------------------------------------------------


def test_a_percentage_against_a_share_is_no_gain(tmp_path: Path) -> None:
    share = table(tmp_path / "share", GOOD)
    percent = table(tmp_path / "percent", [100 * score for score in BAD])
    (one,) = gate(percent, share)["gates"]
    assert one["result"] == "INVALID"
    assert "goes up to 100 for the candidate and to 1 for the teacher" in one["reason"]
    both = table(tmp_path / "both", [100 * score for score in GOOD])
    assert gate(both, table(tmp_path / "same", [100.0 * s for s in GOOD]))["verdict"] == "PASS"


@pytest.mark.parametrize("scale", [1e308, 1e200, 1e-200, 1e-320])
def test_scores_that_floating_point_cannot_square_are_refused(tmp_path: Path, scale: float) -> None:
    scores = [scale, scale / 2] * 200
    one = gate(table(tmp_path / "c", scores), table(tmp_path / "t", scores[::-1]))["gates"][0]
    assert one["result"] == "INVALID"
    assert "neither 0 nor a number from 1e-100 to 1e+100" in one["reason"]
    assert "item 'i0000' (line 2)" in one["reason"]


def test_an_item_is_in_one_segment_and_one_conversation(tmp_path: Path) -> None:
    segments = ["a", "b"] * 200
    sliced = policy(tmp_path, {**GATE, "slices": ["segment"]})
    candidate = table(tmp_path / "c", GOOD, segment=segments)
    other = table(tmp_path / "t", GOOD, segment=segments[::-1])
    (one,) = gate(candidate, other, sliced)["gates"]
    assert one["result"] == "INVALID"
    assert (
        "400 items have another segment than the teacher's, e.g. i0000: 'a' against 'b'"
        in (one["reason"])
    )
    talks = [row // 4 for row in range(400)]
    candidate = table(tmp_path / "c2", GOOD, conversation=talks)
    assert gate(candidate, table(tmp_path / "t2", GOOD, conversation=talks[::-1]))["gates"][0][
        "result"
    ] == "INVALID"  # fmt: skip


def test_items_depend_on_each_other_whichever_side_recorded_it(tmp_path: Path) -> None:
    talks = [f"k{row // 4}" for row in range(400)]
    with_it = table(tmp_path / "t", GOOD, conversation=talks)
    (one,) = gate(table(tmp_path / "c", GOOD), with_it)["gates"]
    assert one["units"] == 100


def test_one_huge_conversation_is_one(tmp_path: Path) -> None:
    talks = [row if row < 100 else 1000 for row in range(400)]
    pair = [table(tmp_path / name, GOOD, conversation=talks) for name in "ct"]
    (one,) = gate(*pair)["gates"]
    assert (one["result"], one["units"]) == ("INCONCLUSIVE", 101)
    assert "101 clusters so uneven that they weigh as much as 1.8 of one size" in one["reason"]


def test_two_filters_of_one_metric_are_not_compared(tmp_path: Path) -> None:
    strict, loose = (table(tmp_path / name, GOOD, f"m,{name}") for name in ("strict", "loose"))
    asked = policy(tmp_path, {**GATE, "metric": "m"})
    (one,) = gate(strict, loose, asked)["gates"]
    assert one["result"] == "INVALID"
    assert "m is 'm,strict' of the candidate and 'm,loose' of the teacher" in one["reason"]
    assert gate(strict, table(tmp_path / "other", GOOD, "m,strict"), asked)["verdict"] == "PASS"


def test_a_summary_without_the_number_says_that_something_was_lost(tmp_path: Path) -> None:
    teacher = own(tmp_path / "t", GOOD)
    assert gate(own(tmp_path / "c", GOOD), teacher)["promotable"] is True
    (one,) = gate(own(tmp_path / "lost", GOOD, metrics={"hit_rate": None}), teacher)["gates"]
    assert one["result"] == "INVALID"
    assert "summary has no number for hit_rate" in one["reason"]


def test_white_space_makes_no_second_item(tmp_path: Path) -> None:
    ids = [f"i{row // 2}{' ' * (row % 2)}" for row in range(400)]
    pair = [table(tmp_path / name, GOOD, ids=ids) for name in "ct"]
    (one,) = gate(*pair)["gates"]
    assert one["result"] == "INVALID"
    assert "'i0' on lines 2, 3" in one["reason"]
    spaced = table(tmp_path / "spaced", GOOD[:200], ids=[f"i{row} " for row in range(200)])
    plain = table(tmp_path / "plain", GOOD[:200], ids=[f"i{row}" for row in range(200)])
    assert "missing of the teacher ('i0 '" in gate(spaced, plain)["gates"][0]["reason"]


def test_one_run_given_twice_has_no_noise_to_show(tmp_path: Path) -> None:
    first, teacher = table(tmp_path / "one", GOOD), table(tmp_path / "t", GOOD)
    (tmp_path / "again").symlink_to(first)
    words = ["gate", "--policy", RETENTION, "--candidate", first, "--reference"]
    told = refused(*words, f"teacher={teacher}", "--aa", first, "--aa", tmp_path / "again")
    assert "is the first run once more" in told
    own_runs = [own(tmp_path / name, GOOD) for name in ("b1", "b2")]
    judged = gate(own(tmp_path / "c", GOOD), own(tmp_path / "t2", GOOD), RETENTION,
                  "--aa", own_runs[0], "--aa", own_runs[1])  # fmt: skip
    assert "the A/A runs are of two bundles: b1 and b2" in judged["gates"][0]["reason"]


def test_an_empty_word_is_a_variable_that_nobody_set(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    candidate, teacher = table(tmp_path / "here", GOOD), table(tmp_path / "t", GOOD)
    monkeypatch.chdir(candidate)
    for words in (
        ["--candidate", "", "--reference", f"teacher={teacher}"],
        ["--candidate", "a=", "--reference", f"teacher={teacher}"],
        ["--candidate", candidate, "--reference", "teacher="],
        ["--candidate", candidate, "--reference", f"teacher={teacher}", "--aa", "", "--aa", "x"],
    ):
        assert "is empty" in refused("gate", "--policy", RETENTION, *words)
    told = refused("gate", "--policy", RETENTION, "--candidate", candidate,
                   "--reference", f"teacher={teacher}", "--champion-policy", "")  # fmt: skip
    assert "no recipe or suite of that name" in told
    assert "is empty" in refused("power", "--policy", RETENTION, "--evidence", "", "--effect", 1)


def test_what_is_waived_still_never_promotes(tmp_path: Path) -> None:
    waiver = {"gate": "g", "owner": "me", "reason": "new", "expires": "2999-01-01"}
    floor = {"name": "f", "kind": "floor", "metric": "hit_rate", "margin": 0.5}
    both = policy(tmp_path, GATE, {**floor, "tier": "supporting"}, waivers=[waiver])
    pair = own(tmp_path / "c", GOOD, smoke=True), own(tmp_path / "t", GOOD, smoke=True)
    (alone,) = gate(*pair, both)["candidates"]
    assert alone["reasons"] == ["every critical gate is waived (g): nothing was judged"]
    fast = {"name": "f", "kind": "floor", "metric": "latency.success_rate", "margin": 1.0}
    beside = policy(tmp_path, GATE, {**fast, "rate": 2.0}, waivers=[waiver])
    for smoke in (False, True):
        folder = tmp_path / f"smoke_{smoke}"
        own(folder / "accuracy", GOOD, smoke=smoke)
        (folder / "latency").mkdir()
        write_summary(folder / "latency", latency("accuracy", point(2.0)))
        teacher = own(tmp_path / f"teacher_{smoke}", GOOD, smoke=smoke)
        judged = gate(folder, teacher, beside)
        assert (judged["verdict"], judged["promotable"]) == ("PASS", not smoke)


def test_settings_that_are_not_there_are_unknown(tmp_path: Path) -> None:
    floor = policy(tmp_path, {"name": "f", "kind": "floor", "metric": "hit_rate", "margin": 0.5})
    known = gate(own(tmp_path / "c", GOOD), own(tmp_path / "t", GOOD), floor)
    assert (known["settings"], known["promotable"]) == ("recorded", True)
    unknown = gate(own(tmp_path / "u", GOOD, settings={}), tmp_path / "t", floor)
    assert (unknown["verdict"], unknown["settings"]) == ("PASS", "unknown")
    assert unknown["promotable"] is False
    assert unknown["candidates"][0]["settings"] == "unknown"


def test_a_folder_compared_with_itself_says_so(tmp_path: Path) -> None:
    folder = table(tmp_path / "one", GOOD)
    assert "it is compared with itself" in " ".join(gate(folder, folder)["notes"])
    assert gate(folder, table(tmp_path / "other", GOOD))["notes"] == []


# -- numbers that agree with the result ------------------------------------------------------


def test_needed_is_enough_to_be_judged(tmp_path: Path) -> None:
    def needed(n: int, **changes: Any) -> tuple[Any, str]:
        asked = policy(tmp_path, {**GATE, **changes})
        pair = [table(tmp_path / f"{name}{n}", [1] * n) for name in "ct"]
        (one,) = gate(*pair, asked)["gates"]
        assert one["result"] == "INCONCLUSIVE"
        return one["needed"], one["reason"]

    assert needed(1) == (99, needed(1)[1])
    assert "no number of items" not in needed(1)[1]
    assert needed(2)[0] == 98
    assert needed(99)[0] == 1


def test_needed_of_a_slice_names_it(tmp_path: Path) -> None:
    asked = policy(tmp_path, {**GATE, "slices": ["segment"]})
    segments = ["few"] * 5 + ["many"] * 395
    pair = [table(tmp_path / name, [1] * 400, segment=segments) for name in "ct"]
    (one,) = gate(*pair, asked)["gates"]
    assert (one["slice"], one["needed"]) == ("segment=few", 95)
    assert "about 95 more items of segment=few would decide" in one["reason"]


def test_needed_is_a_planned_look_or_none(tmp_path: Path) -> None:
    # Close to the margin: some thousand items more would decide.
    candidate = table(tmp_path / "c", [0] * 58 + [1] * 342)
    teacher = table(tmp_path / "t", [1] * 366 + [0] * 34)

    def judged(*looks: int) -> Mapping[str, Any]:
        share = 1 / (len(looks) + 1)
        planned = [{"items": items, "share": share} for items in (400, *looks)]
        (one,) = gate(candidate, teacher, policy(tmp_path, GATE, looks=planned))["gates"]
        assert one["result"] == "INCONCLUSIVE"
        result: Mapping[str, Any] = one
        return result

    last = judged()
    assert last["needed"] is None
    assert "and no look is planned at as many" in last["reason"]
    later = judged(100_000)
    assert later["needed"] == 99_600
    assert "the look planned at 100000 items has as many" in later["reason"]


def test_what_can_never_pass_needs_no_further_items(tmp_path: Path) -> None:
    candidate = own(tmp_path / "c", [0] * 58 + [1] * 342, smoke=True)
    teacher = own(tmp_path / "t", [1] * 366 + [0] * 34, smoke=True)
    (one,) = gate(candidate, teacher)["gates"]
    assert (one["result"], one["needed"]) == ("INCONCLUSIVE", None)
    assert "more items" not in one["reason"]


def test_levels_are_the_numbers_that_people_wrote(tmp_path: Path) -> None:
    pair = table(tmp_path / "c", GOOD), table(tmp_path / "t", GOOD)
    shares = [gate(*pair, RETENTION, "--candidates", n)["candidates"][0] for n in (1, 2, 3)]
    assert [one["level_share"] for one in shares] == pytest.approx([1, 1 / 2, 1 / 3], rel=1e-11)
    assert shares[0]["level_share"] == 1
    assert [error_of(rule(confidence=c)) for c in (0.95, 0.9, 0.99)] == [0.05, 0.1, 0.01]


@pytest.mark.parametrize("confidence", [0.9999999999999, 1 - 2**-53])
def test_any_confidence_below_one_ends_with_numbers(tmp_path: Path, confidence: float) -> None:
    pair = table(tmp_path / "c", GOOD), table(tmp_path / "t", GOOD[1:] + GOOD[:1])
    (one,) = gate(*pair, policy(tmp_path, {**GATE, "confidence": confidence}))["gates"]
    assert 0 < one["level"] < 1e-12
    assert one["result"] == ("PASS" if one["bound"] > 0.9 else "INCONCLUSIVE")
    assert "with more than 0.9999 confidence" in one["reason"]


def test_no_margin_is_not_minus_nothing(tmp_path: Path) -> None:
    asked = policy(tmp_path, {**GATE, "kind": "non_inferiority", "margin": 0})
    (one,) = gate(table(tmp_path / "c", GOOD), table(tmp_path / "t", BAD), asked)["gates"]
    assert math.copysign(1, one["limit"]) == 1
    assert "above 0 asked" in one["reason"]


# -- words of the command line ---------------------------------------------------------------


def test_a_folder_named_like_a_reference_does_not_take_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    candidate = table(tmp_path / "c", GOOD)
    table(tmp_path / "ref", GOOD)
    (tmp_path / "teacher=ref").mkdir()
    monkeypatch.chdir(tmp_path)
    judged = gate(candidate, "ref")
    assert judged["references"] == {"teacher": "ref"}
    equals = table(tmp_path / "a=b", GOOD)
    assert gate(equals.name, "ref")["candidates"][0]["folder"] == "a=b"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--candidate", "候选=c"], "'候选' is no name"),
        (["--candidate", "c", "--candidate", "/"], "--candidate /: has no name"),
        (["--candidate", "x" * 5000], "no such folder: File name too long"),
        (["--candidate", "c", "--candidates", 10**9], "less than or equal to 10000"),
    ],
)
def test_words_that_name_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[object], said: str
) -> None:
    table(tmp_path / "c", GOOD)
    monkeypatch.chdir(tmp_path)
    told = refused("gate", "--policy", RETENTION, *words, "--reference", "teacher=c")
    assert said in " ".join(told.replace("│", " ").split())


def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "items.csv")
    (one,) = gate(tmp_path, table(tmp_path / "t", GOOD))["gates"]
    assert one["result"] == "INVALID"
    assert "is no regular file" in one["reason"]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
@pytest.mark.parametrize("option", ["--junit", "--summary"])
def test_a_full_disk_is_worth_another_try(tmp_path: Path, option: str) -> None:
    folder = table(tmp_path / "c", GOOD)
    status, _, told = run("gate", "--policy", RETENTION, "--candidate", folder,
                          "--reference", f"teacher={folder}", option, "/dev/full")  # fmt: skip
    assert status == 4
    assert "/dev/full: cannot be written: No space left" in told


# -- whatever a terminal can show ------------------------------------------------------------


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "cp1252", "utf-8", None])
def test_json_fits_every_encoding(encoding: str | None) -> None:
    document = {"候选": "é ü – \U0001f600 \u2028", "number": math.nan}
    line = encodable(strict_line(document), encoding)
    stream = io.TextIOWrapper(io.BytesIO(), encoding=encoding or "utf-8")
    stream.write(line)
    assert json.loads(line) == {"候选": "é ü – \U0001f600 \u2028", "number": None}


@pytest.mark.parametrize("json_words", [["--json"], []])
def test_names_that_standard_output_cannot_hold(tmp_path: Path, json_words: list[str]) -> None:
    candidate, teacher = table(tmp_path / "候选", GOOD), table(tmp_path / "t", GOOD)
    answer = subprocess.run(
        [sys.executable, "-m", "flows.cli", "gate", "--policy", RETENTION,
         "--candidate", str(candidate), "--reference", f"teacher={teacher}", *json_words],
        cwd=CHECKOUT,
        env={**os.environ, "PYTHONIOENCODING": "latin-1"},
        capture_output=True,
        timeout=120,
    )  # fmt: skip
    assert answer.returncode == 0, answer.stderr
    if json_words:
        assert json.loads(answer.stdout)["candidates"][0]["folder"] == str(candidate)
    else:
        assert "\\u5019\\u9009" in answer.stdout.decode("latin-1")


def test_a_reader_that_has_gone_changes_no_verdict(tmp_path: Path) -> None:
    worse, teacher = table(tmp_path / "c", BAD), table(tmp_path / "t", GOOD)
    read, write = os.pipe()
    os.close(read)
    answer = subprocess.run(
        [sys.executable, "-m", "flows.cli", "gate", "--policy", RETENTION,
         "--candidate", str(worse), "--reference", f"teacher={teacher}", "--json"],
        cwd=CHECKOUT, stdout=write, stderr=subprocess.PIPE, timeout=120,
    )  # fmt: skip
    os.close(write)
    assert (answer.returncode, answer.stderr) == (10, b"")


def test_power_is_strict_json(tmp_path: Path) -> None:
    one = table(tmp_path / "one", [0.7])
    status, out, _ = run("power", "--policy", RETENTION, "--evidence", one,
                         "--effect", 0.95, "--json")  # fmt: skip
    assert status == 0
    json.loads(out.splitlines()[-1], parse_constant=pytest.fail)


@pytest.mark.parametrize("production", [True, False])
def test_times_of_an_emulated_kernel(tmp_path: Path, production: bool) -> None:
    (tmp_path / "policy.yaml").write_text(
        "kind: policy\ndescription: a time\ngates:\n"
        "  - {name: rate, kind: floor, metric: latency.success_rate, rate: 2.0, margin: 0.9}\n"
    )
    (tmp_path / "c").mkdir()
    known = {"emulated": True, "production": production}
    write_summary(tmp_path / "c", latency("b", point(2.0), **known))
    status, out, _ = run(
        "gate", "--policy", tmp_path / "policy.yaml", "--candidate", tmp_path / "c", "--json"
    )
    document = json.loads(out.splitlines()[-1])
    if production:
        assert (status, document["verdict"]) == (10, "INFEASIBLE")
        assert "emulated" in document["candidates"][0]["reasons"][0]
    else:
        assert (status, document["verdict"]) == (0, "PASS")
        assert any("of an emulated kernel, judged because" in one for one in document["notes"])
