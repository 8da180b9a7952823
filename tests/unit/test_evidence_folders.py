"""What a gate is given of a folder: evidence of every accepted kind, or the reason against it."""

from __future__ import annotations

import hashlib
import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from registry.errors import UserError
from registry.evidence import (
    ITEM_COLUMNS,
    AccuracyEvidence,
    LatencyEvidence,
    ServingEvidence,
    Unusable,
    write_summary,
)
from registry.evidence_folders import CandidateEvidence, read_folder

NOW = datetime(2030, 1, 2, tzinfo=UTC)
DATE = "2030-01-02T03-04-05.678901"
OTHER_DATE = "2030-02-02T03-04-05.678901"


def accuracy(**changes: Any) -> AccuracyEvidence:
    fields: dict[str, Any] = {
        "bundle": "b1",
        "suite": "support",
        "task": "support_intent",
        "task_version": "1",
        "engine": "vllm 0.32",
        "harness": "lm-eval 0.4.13",
        "items_digest": "d1",
        "settings": {"num_fewshot": 0},
        "items_asked": 2,
        "items_scored": 2,
        "metrics": {"hit_rate": 0.5},
        "measured_at": NOW,
        "seconds": 1.0,
    }
    return AccuracyEvidence(**(fields | changes))


def latency() -> LatencyEvidence:
    return LatencyEvidence(
        bundle="b1", profile="p", hardware="h", engine="e", harness="vllm", settings={}, points=[],
        measured_at=NOW, seconds=1.0,
    )  # fmt: skip


def serving() -> ServingEvidence:
    return ServingEvidence(bundle="b1", hardware="h", engine="e", feasible=True, measured_at=NOW)


def own_folder(folder: Path, evidence: AccuracyEvidence, rows: int = 2, **columns: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    write_summary(folder, evidence)
    frame = {name: [None] * rows for name in ITEM_COLUMNS} | {
        "item_id": [f"q{row}" for row in range(rows)],
        "bundle": [evidence.bundle] * rows,
        "engine": [evidence.engine] * rows,
        "harness": [evidence.harness] * rows,
        "hit_rate": [float(row % 2) for row in range(rows)],
    }
    pd.DataFrame(frame | columns).to_parquet(folder / "items.parquet")
    return folder


# -- our own ---------------------------------------------------------------------------------


def test_our_own_summary_with_its_items(tmp_path: Path) -> None:
    read = read_folder(own_folder(tmp_path, accuracy()))
    assert (read.bundle, read.source, read.folder) == ("b1", "pilotage", str(tmp_path))
    assert read.unreadable == {}
    assert read.accuracy == accuracy()
    assert read.items is not None and read.items.metric("hit_rate").tolist() == [0.0, 1.0]
    assert (read.latency, read.serving) == (None, None)


def test_a_summary_without_items_is_evidence_without_items(tmp_path: Path) -> None:
    write_summary(tmp_path, accuracy())
    read = read_folder(tmp_path)
    assert (read.accuracy, read.items, read.unreadable) == (accuracy(), None, {})


def test_one_folder_per_kind_below(tmp_path: Path) -> None:
    own_folder(tmp_path / "accuracy", accuracy())
    for name, evidence in (("latency", latency()), ("serving", serving())):
        (tmp_path / name).mkdir()
        write_summary(tmp_path / name, evidence)  # type: ignore[arg-type]
    read = read_folder(tmp_path)
    assert (read.bundle, read.unreadable) == ("b1", {})
    assert (read.accuracy, read.latency, read.serving) == (accuracy(), latency(), serving())
    assert read.items is not None and len(read.items) == 2


def test_latency_alone(tmp_path: Path) -> None:
    write_summary(tmp_path, latency())
    read = read_folder(tmp_path)
    assert (read.bundle, read.latency, read.accuracy) == ("b1", latency(), None)


def test_older_evidence_does_not_say_whether_a_kernel_was_emulated(tmp_path: Path) -> None:
    for evidence in (latency(), serving()):
        folder = tmp_path / evidence.kind
        folder.mkdir()
        write_summary(folder, evidence)
        path = folder / "summary.json"
        content = json.loads(path.read_text())
        for name in ("emulated", "production", "kernels"):
            content.pop(name, None)
        path.write_text(json.dumps(content))
    read = read_folder(tmp_path)
    assert read.unreadable == {}
    assert read.latency is not None and read.serving is not None
    assert read.latency.emulated is read.serving.emulated is read.serving.kernels is None
    assert read.latency.times_count


def test_the_stores_folders_are_read_by_kind(tmp_path: Path) -> None:
    own_folder(tmp_path / "a", accuracy())
    (tmp_path / "l").mkdir()
    write_summary(tmp_path / "l", latency())
    read = CandidateEvidence.read("b1", accuracy=tmp_path / "a", latency=tmp_path / "l")
    assert read.items is not None and read.latency == latency()
    swapped = CandidateEvidence.read("b1", accuracy=tmp_path / "l", serving=tmp_path / "none")
    assert "holds latency evidence, not accuracy" in swapped.unreadable["accuracy"]
    assert "no such evidence" in swapped.unreadable["serving"]
    assert (swapped.accuracy, swapped.items, swapped.serving) == (None, None, None)


@pytest.mark.parametrize("version", [1, 3, "2", None, True, 2.0])
def test_another_schema_version_is_named(tmp_path: Path, version: Any) -> None:
    own_folder(tmp_path, accuracy())
    path = tmp_path / "summary.json"
    content = json.loads(path.read_text()) | {"schema_version": version}
    path.write_text(json.dumps(content))
    text = read_folder(tmp_path).unreadable["accuracy"]
    assert f"schema version {version!r}; this version reads 2: measure again" in text
    assert str(path) in text
    read = CandidateEvidence.read("b1", accuracy=tmp_path)
    assert read.unreadable["accuracy"] == text and read.items is None


def test_a_summary_without_a_version_is_refused(tmp_path: Path) -> None:
    content = accuracy().model_dump(mode="json", exclude={"schema_version"})
    (tmp_path / "summary.json").write_text(json.dumps(content))
    assert "no version; this version reads 2" in read_folder(tmp_path).unreadable["accuracy"]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "not JSON"),
        ("[1]", "kind None"),
        ('{"kind": ["accuracy"]}', "kind"),
        ('{"kind": "accuracy", "schema_version": 2}', "Field required"),
        ("[" * 100_000, "not JSON"),
    ],
)
def test_broken_summaries_are_a_reason(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "summary.json").write_text(text)
    assert said in read_folder(tmp_path).unreadable["accuracy"]


def test_broken_items_leave_the_summary_readable(tmp_path: Path) -> None:
    own_folder(tmp_path, accuracy(), item_id=["q0", "q0"])
    read = read_folder(tmp_path)
    assert read.accuracy == accuracy() and read.items is None
    assert list(read.unreadable) == ["items"]
    assert "'q0' on rows 1, 2" in read.unreadable["items"]


@pytest.mark.parametrize("column", ["bundle", "engine", "harness"])
def test_rows_beside_another_summary_are_found_out(tmp_path: Path, column: str) -> None:
    own_folder(tmp_path, accuracy(), **{column: ["other", "other"]})
    assert f"{column} of 2 of 2 rows" in read_folder(tmp_path).unreadable["items"]


@pytest.mark.parametrize("rows", [1, 3])
def test_rows_that_the_summary_did_not_count(tmp_path: Path, rows: int) -> None:
    own_folder(tmp_path, accuracy(), rows=rows)
    assert f"{rows} rows; the summary says 2 of 2" in read_folder(tmp_path).unreadable["items"]


# -- tables ----------------------------------------------------------------------------------


@pytest.mark.parametrize("suffix", ["csv", "jsonl"])
def test_a_plain_table(tmp_path: Path, suffix: str) -> None:
    content = {"csv": "item_id,hit_rate\n7,1\n", "jsonl": '{"item_id": 7, "hit_rate": 1}\n'}
    (tmp_path / f"items.{suffix}").write_text(content[suffix])
    read = read_folder(tmp_path)
    assert (read.source, read.bundle, read.accuracy, read.unreadable) == ("table", "", None, {})
    assert read.items is not None
    assert (read.items.ids.tolist(), read.items.metric("hit_rate").tolist()) == (["7"], [1.0])


def test_a_broken_table_is_a_reason(tmp_path: Path) -> None:
    (tmp_path / "items.csv").write_text("item_id,hit_rate\n7,1\n7,0\n")
    read = read_folder(tmp_path)
    assert (read.source, read.items) == ("table", None)
    assert "'7' on lines 2, 3" in read.unreadable["items"]


# -- folders that are none, or too much ------------------------------------------------------


def test_what_is_no_folder_is_the_callers_mistake(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no such folder[\s\S]*remedy"):
        read_folder(tmp_path / "none")
    (tmp_path / "items.csv").write_text("item_id,m\n1,1\n")
    with pytest.raises(UserError, match=r"is a file[\s\S]*remedy: name the folder"):
        read_folder(tmp_path / "items.csv")


def test_a_folder_without_evidence(tmp_path: Path) -> None:
    (tmp_path / "notes.json").write_text('{"a": 1}')
    (tmp_path / "broken.json").write_text("{")
    read = read_folder(tmp_path)
    assert list(read.unreadable) == ["accuracy"]
    assert "nothing that is evidence" in read.unreadable["accuracy"]
    pd.DataFrame({"item_id": ["a"]}).to_parquet(tmp_path / "items.parquet")
    assert "without its summary.json" in read_folder(tmp_path).unreadable["accuracy"]


@pytest.mark.parametrize("other", ["summary.json", "items.jsonl", "accuracy/", "results_a.json"])
def test_two_kinds_at_once(tmp_path: Path, other: str) -> None:
    (tmp_path / "items.csv").write_text("item_id,m\n1,1\n")
    if other.endswith("/"):
        own_folder(tmp_path / other, accuracy())
    elif other == "summary.json":
        own_folder(tmp_path, accuracy())
    else:
        (tmp_path / other).write_text("{}")
    read = read_folder(tmp_path)
    assert (read.accuracy, read.items) == (None, None)
    assert "evidence of several kinds" in read.unreadable["accuracy"]
    assert "items.csv" in read.unreadable["accuracy"]


# -- lm-eval ---------------------------------------------------------------------------------


def results(*tasks: str, n: int = 3, value: Any = 0.5, **changes: Any) -> dict[str, Any]:
    """A results file with the keys that lm-eval 0.4.13 writes."""
    content: dict[str, Any] = {
        "results": {
            task: {
                "name": task,
                "alias": task,
                "sample_len": n,
                "exact_match,strict": value,
                "exact_match_stderr,strict": 0.1,
                "exact_match,loose": 1.0,
                "exact_match_stderr,loose": "N/A",
            }
            for task in tasks
        },
        "group_subtasks": {},
        "configs": {
            task: {
                "task": task,
                "output_type": "generate_until",
                "generation_kwargs": {"until": ["\n"], "max_gen_toks": 8},
                "repeats": 1,
                "filter_list": [{"name": "strict"}, {"name": "loose"}],
                "metric_list": [{"metric": "exact_match"}],
                "metadata": {"version": 2.0, "pretrained": "some/model"},
            }
            for task in tasks
        },
        "versions": dict.fromkeys(tasks, 2.0),
        "n-shot": dict.fromkeys(tasks, 5),
        "n-samples": {task: {"original": n, "effective": n} for task in tasks},
        "config": {
            "model": "local-chat-completions",
            "model_args": "model=student",
            "batch_size": 16,
            "device": "cpu",
            "limit": None,
            "gen_kwargs": {},
            "random_seed": 0,
            "fewshot_seed": 1234,
        },
        "date": 1893553445.5,
        "lm_eval_version": "0.4.13",
        "task_hashes": {task: f"hash of {task}" for task in tasks},
        "system_instruction_sha": None,
        "fewshot_as_multiturn": None,
        "chat_template": None,
        "chat_template_sha": None,
        "total_evaluation_time_seconds": "12.5",
    }
    return content | changes


def sample(doc_id: int, kept: str, value: Any = 1.0, **changes: Any) -> dict[str, Any]:
    content = {
        "doc_id": doc_id,
        "doc": {"prompt": f"q{doc_id}", "segment": "AB"[doc_id % 2]},
        "target": "a",
        "arguments": {"gen_args_0": {"arg_0": f"q{doc_id}", "arg_1": {}}},
        "resps": [["a"]],
        "filtered_resps": ["a"],
        "filter": kept,
        "metrics": ["exact_match"],
        "doc_hash": hashlib.sha256(str(doc_id).encode()).hexdigest(),
        "prompt_hash": f"p{doc_id}",
        "target_hash": "t",
        "exact_match": value,
    }
    return content | changes


def samples(n: int = 3) -> list[dict[str, Any]]:
    """One line per filter and item, filter by filter: item 0 is wrong under `strict`."""
    return [sample(doc, kept, float(doc > 0 or kept == "loose")) for kept in ("strict", "loose")
            for doc in range(n)]  # fmt: skip


def lm_eval_folder(
    folder: Path,
    content: dict[str, Any] | str,
    logged: dict[str, list[dict[str, Any]]] | None = None,
    date: str = DATE,
) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    text = content if isinstance(content, str) else json.dumps(content, indent=2)
    (folder / f"results_{date}.json").write_text(text)
    for task, lines in (logged or {}).items():
        path = folder / f"samples_{task}_{date}.jsonl"
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def refusal(folder: Path) -> str:
    read = read_folder(folder)
    assert (read.source, read.accuracy, read.items) == ("lm-eval", None, None)
    assert read.unreadable["accuracy"] == read.unreadable["items"]
    return read.unreadable["accuracy"]


@pytest.mark.parametrize("below", ["", "org__model"])
def test_lm_evals_results_with_samples(tmp_path: Path, below: str) -> None:
    lm_eval_folder(tmp_path / below, results("qa"), {"qa": samples()})
    read = read_folder(tmp_path)
    assert (read.source, read.bundle, read.unreadable) == ("lm-eval", "", {})
    evidence, items = read.accuracy, read.items
    assert evidence is not None and items is not None
    assert (evidence.suite, evidence.task, evidence.task_version) == ("qa", "qa", "2.0")
    assert (evidence.engine, evidence.harness) == ("local-chat-completions", "lm-eval 0.4.13")
    assert (evidence.items_asked, evidence.items_scored) == (3, 3)
    assert evidence.metrics == {"exact_match,loose": 1.0, "exact_match,strict": 0.5}
    assert (evidence.limited, evidence.smoke, evidence.seconds) == (False, False, 12.5)
    assert evidence.measured_at == datetime.fromtimestamp(1893553445.5, UTC)
    assert len(evidence.items_digest) == 64
    digest = evidence.settings.pop("scoring_digest")
    assert len(digest) == 64
    assert evidence.settings == {
        "chat_template": False,
        "chat_template_sha": None,
        "system_instruction_sha": None,
        "fewshot_as_multiturn": False,
        "fewshot_seed": 1234,
        "random_seed": 0,
        "gen_kwargs": None,
        "limit": None,
        "num_fewshot": 5,
        "task_hash": "hash of qa",
        "generation_kwargs": {"until": ["\n"], "max_gen_toks": 8},
        "repeats": 1,
    }
    assert items.ids.tolist() == ["0", "1", "2"]
    assert items.metric("exact_match,strict").tolist() == [0.0, 1.0, 1.0]
    assert items.metric("exact_match,loose").tolist() == [1.0, 1.0, 1.0]
    with pytest.raises(Unusable, match="several filters"):
        items.metric("exact_match")
    assert items.labels("segment").tolist() == ["A", "B", "A"]
    assert items.labels("prompt_hash").tolist() == ["p0", "p1", "p2"]
    assert not items.has("output_tokens")
    assert "exact_match" not in items.metrics() and len(items.metrics()) == 2


def test_results_named_after_the_output_path(tmp_path: Path) -> None:
    lm_eval_folder(tmp_path, results("qa"), {"qa": samples()})
    (tmp_path / f"results_{DATE}.json").rename(tmp_path / f"nightly_{DATE}.json")
    assert read_folder(tmp_path).accuracy is not None
    (tmp_path / f"nightly_{DATE}.json").rename(tmp_path / "student.json")
    assert read_folder(tmp_path).accuracy is not None


def test_results_without_samples(tmp_path: Path) -> None:
    read = read_folder(lm_eval_folder(tmp_path, results("qa", task_hashes={})))
    assert read.accuracy is not None and read.items is None
    assert (read.accuracy.items_scored, read.accuracy.items_digest) == (3, "")
    assert "task_hash" not in read.accuracy.settings


def test_what_may_differ_is_in_no_setting(tmp_path: Path) -> None:
    one = results("qa")
    other = results("qa", date=1.0, total_evaluation_time_seconds="1")
    other["config"] |= {"model_args": "model=teacher", "batch_size": 1, "device": "cuda"}
    other["configs"]["qa"]["metadata"] = {"version": 2.0, "pretrained": "other/model"}
    read = [
        read_folder(lm_eval_folder(tmp_path / name, content, {"qa": samples()})).accuracy
        for name, content in (("one", one), ("other", other))
    ]
    assert read[0] is not None and read[1] is not None
    assert read[0].settings == read[1].settings
    assert read[0].items_digest == read[1].items_digest


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"n-shot": {"qa": 0}}, "num_fewshot"),
        ({"chat_template_sha": "a1"}, "chat_template_sha"),
        ({"system_instruction_sha": "a1"}, "system_instruction_sha"),
        ({"fewshot_as_multiturn": True}, "fewshot_as_multiturn"),
        ({"task_hashes": {"qa": "another"}}, "task_hash"),
        ({"config": {"gen_kwargs": {"temperature": 1}}}, "gen_kwargs"),
        ({"config": {"limit": 200}}, "limit"),
        ({"config": {"fewshot_seed": 7}}, "fewshot_seed"),
        ({"configs": {"qa": {"repeats": 4}}}, "repeats"),
        ({"configs": {"qa": {"generation_kwargs": {"max_gen_toks": 9}}}}, "generation_kwargs"),
        ({"configs": {"qa": {"filter_list": [{"name": "other"}]}}}, "scoring_digest"),
    ],
)
def test_what_must_not_differ_is_a_setting(
    tmp_path: Path, change: dict[str, Any], name: str
) -> None:
    read = read_folder(lm_eval_folder(tmp_path / "one", results("qa"))).accuracy
    changed = read_folder(lm_eval_folder(tmp_path / "other", results("qa", **change))).accuracy
    assert read is not None and changed is not None
    assert read.settings.get(name) != changed.settings.get(name)


def test_prompts_of_a_models_own_template_are_named_after_it(tmp_path: Path) -> None:
    content = results("qa", chat_template_sha="a1b2")
    read = read_folder(lm_eval_folder(tmp_path, content, {"qa": samples()})).accuracy
    assert read is not None
    assert read.settings["chat_template_task_hash"] == "hash of qa"
    assert "task_hash" not in read.settings


@pytest.mark.parametrize("absent", ["n-shot", "versions", "chat_template_sha"])
def test_results_that_lack_the_settings_have_none(tmp_path: Path, absent: str) -> None:
    content = results("qa")
    del content[absent]
    read = read_folder(lm_eval_folder(tmp_path, content)).accuracy
    assert read is not None and read.settings == {}


@pytest.mark.parametrize(
    ("limit", "original", "limited"), [(None, 3, False), (None, 4, True), (3.0, 3, True)]
)
def test_a_limited_run_says_so(
    tmp_path: Path, limit: float | None, original: int, limited: bool
) -> None:
    content = results("qa")
    content["config"]["limit"] = limit
    content["n-samples"]["qa"]["original"] = original
    read = read_folder(lm_eval_folder(tmp_path, content)).accuracy
    assert read is not None and read.limited is limited


@pytest.mark.parametrize("value", [float("nan"), float("inf"), None, "0.5", True, [0.5]])
def test_a_result_that_is_no_number_is_null(tmp_path: Path, value: Any) -> None:
    read = read_folder(lm_eval_folder(tmp_path, results("qa", value=value))).accuracy
    assert read is not None
    assert read.metrics == {"exact_match,loose": 1.0, "exact_match,strict": None}


def test_several_tasks_are_one_suite(tmp_path: Path) -> None:
    content = results("b", "a")
    content["results"]["a"] |= {"exact_match,strict": 1.0, "f1,none": 0.5}
    content["n-samples"]["a"] = {"original": 1, "effective": 1}
    plain = [sample(0, kept, doc={"prompt": "x"}) for kept in ("strict", "loose")]
    read = read_folder(lm_eval_folder(tmp_path, content, {"b": samples(), "a": plain}))
    assert read.accuracy is not None and read.items is not None
    assert (read.accuracy.suite, read.accuracy.items_asked) == ("a, b", 4)
    # Over all items, and null where a task lacks it.
    assert read.accuracy.metrics == {
        "exact_match,loose": 1.0,
        "exact_match,strict": (3 * 0.5 + 1.0) / 4,
        "f1,none": None,
    }
    assert read.accuracy.settings["tasks"]["b"]["num_fewshot"] == 5
    assert read.items.ids.tolist() == ["a:0", "b:0", "b:1", "b:2"]
    assert read.items.labels("segment").tolist() == ["a", "A", "B", "A"]


def test_groups_have_no_items_of_their_own(tmp_path: Path) -> None:
    content = results("a", "b", group_subtasks={"all": ["a", "b"]})
    content["results"]["all"] = {"exact_match,strict": 0.9, "alias": "all"}
    read = read_folder(lm_eval_folder(tmp_path, content)).accuracy
    assert read is not None and (read.suite, read.items_asked) == ("a, b", 6)
    assert read.metrics["exact_match,strict"] == 0.5


@pytest.mark.parametrize(("kept", "scored"), [(samples(2), 2), (samples(4), 4), (samples()[:5], 2)])
def test_other_counts_than_asked_are_counted(
    tmp_path: Path, kept: list[dict[str, Any]], scored: int
) -> None:
    read = read_folder(lm_eval_folder(tmp_path, results("qa"), {"qa": kept})).accuracy
    assert read is not None and (read.items_asked, read.items_scored) == (3, scored)


def test_values_of_samples_are_kept_for_what_they_are(tmp_path: Path) -> None:
    lines = [
        sample(0, "none", True, output_tokens=9, doc={"conversation": "c1"}),
        sample(1, "none", float("nan"), output_tokens=8, doc={"conversation": "c1"}),
    ]
    read = read_folder(lm_eval_folder(tmp_path, results("qa", n=2), {"qa": lines}))
    items = read.items
    assert items is not None
    with pytest.raises(Unusable, match=r"1 of 2 items: item '1' \(line 2\) is nan"):
        items.metric("exact_match")
    assert items.metric("output_tokens").tolist() == [9.0, 8.0]
    assert items.labels("conversation").tolist() == ["c1", "c1"]
    # The harness itself counts true as 1.
    sound = lm_eval_folder(tmp_path / "sound", results("qa", n=1), {"qa": lines[:1]})
    items = read_folder(sound).items
    assert items is not None and items.metric("exact_match").tolist() == [1.0]


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        ([], "holds no samples"),
        ([*samples(), *samples()], "'0 under strict' on lines 1, 7"),
        ([sample(0, "a"), sample(0, "b", doc_hash="x")], "line 2: doc_id 0 has another doc_hash"),
        ([{"doc_id": 0}], "line 1: no 'doc_hash', 'filter', 'metrics'"),
        ([sample(0, "a") | {"doc_id": None}], "line 1: doc_id is None"),
        ([sample(0, "a", doc_hash=1)], "line 1: doc_hash or filter is no text"),
        ([sample(0, "a", metrics="exact_match")], "line 1: metrics is"),
    ],
)
def test_samples_that_cannot_be_used(
    tmp_path: Path, lines: list[dict[str, Any]], said: str
) -> None:
    text = refusal(lm_eval_folder(tmp_path, results("qa"), {"qa": lines}))
    assert said in text and f"samples_qa_{DATE}.jsonl" in text


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("{", "not JSON"),
        ("[]", "not an object with `results`"),
        ({"results": {}}, "no `n-samples`"),
        (results("qa", **{"n-samples": {}}), "no `n-samples`"),
        (results("qa", **{"n-samples": {"qa": {"original": 3}}}), "n-samples of 'qa'"),
        (results("qa", **{"n-samples": {"qa": 3}}), "n-samples of 'qa' is 3"),
        (results("qa", results={}), "no results of task 'qa'"),
        (results("qa", results={"qa": {}, "more": {}}), "no n-samples of task 'more'"),
    ],
)
def test_results_that_cannot_be_used(tmp_path: Path, content: Any, said: str) -> None:
    assert said in refusal(lm_eval_folder(tmp_path, content))


def test_two_dates_in_one_folder(tmp_path: Path) -> None:
    lm_eval_folder(tmp_path, results("qa"), {"qa": samples()})
    lm_eval_folder(tmp_path, results("qa"), {"qa": samples()}, date=OTHER_DATE)
    text = refusal(tmp_path)
    assert DATE in text and OTHER_DATE in text and "name one folder per run" in text


def test_two_models_in_one_folder(tmp_path: Path) -> None:
    for model in ("model-a", "model-b"):
        lm_eval_folder(tmp_path / model, results("qa"))
    assert "model-a, model-b" in refusal(tmp_path)


def test_samples_of_another_run(tmp_path: Path) -> None:
    lm_eval_folder(tmp_path, results("qa"), {"qa": samples()})
    (tmp_path / f"samples_qa_{OTHER_DATE}.jsonl").write_text("")
    assert "is of another run than" in refusal(tmp_path)


def test_samples_without_results(tmp_path: Path) -> None:
    lm_eval_folder(tmp_path, results("qa"), {"qa": samples()})
    (tmp_path / f"results_{DATE}.json").unlink()
    assert "without a results file" in refusal(tmp_path)


def test_samples_of_other_tasks_or_of_some(tmp_path: Path) -> None:
    lm_eval_folder(tmp_path / "a", results("qa"), {"qa": samples(), "other": samples()})
    assert "has no task 'other'" in refusal(tmp_path / "a")
    lm_eval_folder(tmp_path / "b", results("qa", "other"), {"qa": samples()})
    assert "no samples of task 'other'" in refusal(tmp_path / "b")


def test_a_summary_of_results_in_the_harness_form(tmp_path: Path) -> None:
    """Case 12: few keys, but all that say how it was measured; case 09: none of them, and NaN."""
    few = {
        "results": {"support_qa": {"exact_match,strict-match": 0.702}},
        "n-samples": {"support_qa": {"original": 1319, "effective": 200}},
        "n-shot": {"support_qa": 5},
        "versions": {"support_qa": 2},
        "config": {"model": "local-chat-completions", "limit": 200},
        "chat_template_sha": None,
        "fewshot_as_multiturn": False,
        "date": "2029-12-30",
    }
    read = read_folder(lm_eval_folder(tmp_path / "12", few)).accuracy
    assert read is not None
    assert (read.items_asked, read.items_scored, read.limited) == (200, 200, True)
    assert read.metrics == {"exact_match,strict-match": 0.702}
    assert (read.task_version, read.settings["num_fewshot"]) == ("2", 5)
    assert read.measured_at == datetime(2029, 12, 30, tzinfo=UTC)
    fewer = {
        "results": {"support_qa": {"exact_match,strict-match": float("nan")}},
        "n-samples": {"support_qa": {"original": 400, "effective": 400}},
    }
    read = read_folder(lm_eval_folder(tmp_path / "09", fewer)).accuracy
    assert read is not None
    assert (read.metrics, read.settings) == ({"exact_match,strict-match": None}, {})
