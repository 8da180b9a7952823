"""The demo release at reduced size, from the command line to an answer of the promoted bundle.

One home for the whole module, one story: killed in the middle, run again, run with nothing
changed, served, stopped while it measures, promoted anew, rolled back, downloaded and started.
Every engine is the real one.
"""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from registry.candidate_memory import MemoryPlan
from registry.settings import CHECKOUT, settings
from tasks.engines.ports import free_port

RECIPE = "tests/recipes/release_tiny.yaml"
PILOTAGE = [sys.executable, "-m", "flows.cli"]

pytestmark = [pytest.mark.slow, pytest.mark.alone, pytest.mark.timeout(1500)]


@pytest.fixture(scope="module")
def story(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("story")


@pytest.fixture
def environment(story: Path) -> dict[str, str]:
    return {**os.environ, "PILOTAGE_HOME": str(story / "home")}


def start(environment: dict[str, str], log: Path, *words: str) -> subprocess.Popen[bytes]:
    with log.open("wb") as out:
        return subprocess.Popen(
            [*PILOTAGE, "release", RECIPE, "--json", *words],
            cwd=CHECKOUT,
            env=environment,
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def wait_for(line: str, log: Path, process: subprocess.Popen[bytes], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if line in log.read_text(errors="replace"):
            return
        assert process.poll() is None, log.read_text(errors="replace")[-3000:]
        time.sleep(0.2)
    raise AssertionError(f"{line!r} did not appear:\n{log.read_text(errors='replace')[-3000:]}")


def pilotage(
    environment: dict[str, str], *words: str, status: int = 0
) -> subprocess.CompletedProcess[str]:
    """A command to its end, with the exit status that it must have."""
    done = subprocess.run(
        [*PILOTAGE, *words], cwd=CHECKOUT, env=environment, capture_output=True, text=True,
        timeout=300,
    )  # fmt: skip
    assert done.returncode == status, done.stdout + done.stderr
    return done


def lines_of_the_ledger(environment: dict[str, str]) -> list[dict[str, Any]]:
    answer = pilotage(environment, "ledger", "tiny-assistant", "--json").stdout
    found: list[dict[str, Any]] = json.loads(answer.splitlines()[-1])
    return found


def document(log: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(log.read_text().splitlines()[-1])
    return found


def our_processes(home: str) -> list[str]:
    """Command lines of live processes that belong to this story, the tests' own left out."""
    wanted = f"PILOTAGE_HOME={home}".encode()
    found = []
    for process in psutil.process_iter():
        try:
            words = process.cmdline()
            # vLLM's engine clears its environment, so its command line and log are looked at too.
            environment = Path(f"/proc/{process.pid}/environ").read_bytes().split(b"\0")
            outputs = [str(Path(f"/proc/{process.pid}/fd/{n}").readlink()) for n in (1, 2)]
            ours = wanted in environment or any(home in word for word in [*words, *outputs])
            if ours and process.status() != psutil.STATUS_ZOMBIE:
                found.append(" ".join(words))
        except (psutil.Error, OSError):
            continue
    return found


def test_1_killed_in_the_middle_then_run_again(story: Path, environment: dict[str, str]) -> None:
    first = start(environment, story / "killed.log")
    wait_for("distill: making", story / "killed.log", first, 600)
    time.sleep(2)
    first.kill()
    first.wait(30)

    log = story / "first.log"
    again = start(environment, log)
    assert again.wait(1200) == 0, log.read_text()[-5000:]
    result = document(log)
    assert result["verdict"] == "PASS"
    assert result["version"] == 1
    assert result["champion"]["version"] == 1
    assert {one["name"]: one["verdict"] for one in result["candidates"]} == {
        "bf16": "PASS",
        "w8a8_int8-eagle3": "PASS",
        "refused": "INFEASIBLE",
    }
    refused = result["candidates"][-1]
    assert "Unknown quantization method: bitsandbytes" in refused["reasons"][0]
    # The reference engine measured its accuracy all the same, for the report.
    assert refused["engines"]["accuracy"].startswith("transformers ")
    assert refused["latency"] == []
    gates = {gate["name"]: gate for gate in result["candidates"][0]["gates"]}
    assert gates["recovery_satisfaction"]["result"] == "PASS"
    assert "the student itself" in gates["recovery_satisfaction"]["reason"]
    # A first release has no champion to compare with, and says so.
    assert "regression_hit_rate" not in gates
    assert any("regression_hit_rate was not judged" in note for note in result["notes"])
    assert any("candidates share the error" in note for note in result["notes"])
    by_name = {stage["name"]: stage for stage in result["stages"]}
    for finished in ("prompts demo", "model teacher", "teacher_data", "model student"):
        assert by_name[finished]["reused"], finished
    assert not by_name["distill"]["reused"]
    assert not by_name["latency bf16"]["reused"]
    assert Path(result["report"]).read_text().startswith("<!doctype html>")
    assert our_processes(environment["PILOTAGE_HOME"]) == []


def test_2_with_nothing_changed_everything_is_reused(
    story: Path, environment: dict[str, str]
) -> None:
    log = story / "second.log"
    assert start(environment, log).wait(300) == 0
    first, second = document(story / "first.log"), document(log)
    assert all(stage["reused"] for stage in second["stages"])
    assert second["version"] == 1
    assert second["release"] == first["release"]
    assert second["run_id"] == first["run_id"]
    assert "making" not in log.read_text()
    # Now there is a champion: the smallest with its draft counted, one of the candidates again.
    assert second["selection"]["chosen"] == "bf16"
    champion, drafted, _ = (
        {gate["name"]: gate for gate in candidate["gates"]} for candidate in second["candidates"]
    )
    assert drafted["regression_hit_rate"]["result"] == "PASS"
    assert drafted["regression_hit_rate"]["reference_name"] == "champion"
    assert drafted["regression_hit_rate"]["bound"] is not None
    assert champion["regression_hit_rate"]["result"] == "PASS"
    assert "the champion itself" in champion["regression_hit_rate"]["reason"]
    # It was judged against the champion this time; what the promotion read is still there.
    assert "PROBLEM" not in pilotage(environment, "why", "tiny-assistant@champion").stdout


def test_3_mlflow_holds_one_of_everything(story: Path, environment: dict[str, str]) -> None:
    import mlflow

    client = mlflow.MlflowClient(f"sqlite:///{environment['PILOTAGE_HOME']}/mlflow.db")
    result = document(story / "first.log")
    experiment = client.get_experiment_by_name("tiny-assistant")
    assert experiment is not None
    runs = client.search_runs([experiment.experiment_id])
    parents = [run for run in runs if "mlflow.parentRunId" not in run.data.tags]
    assert [run.info.run_id for run in parents] == [result["run_id"]]
    keys = [run.data.tags["pilotage.key"] for run in runs if run not in parents]
    assert sorted(keys) == sorted({stage["key"] for stage in result["stages"]})
    models = client.search_logged_models([experiment.experiment_id])
    # Judged without a champion, and then against the first one; the promotion read the former.
    assert Counter(model.name for model in models) == {
        "bf16": 2,
        "refused": 2,
        "w8a8_int8-eagle3": 2,
    }
    folder = Path(client.download_artifacts(result["run_id"], "gates.json"))
    gates = json.loads(folder.read_text())
    assert gates["verdict"] == "PASS"
    assert {gate["candidate_name"] for gate in gates["gates"]} == {
        "bf16",
        "w8a8_int8-eagle3",
        "refused",
    }
    champion = client.get_model_version_by_alias("tiny-assistant", "champion")
    assert champion.tags["pilotage.bundle"] == result["champion"]["bundle"]
    assert len(client.search_model_versions("name = 'tiny-assistant'")) == 1


def test_4_the_engine_has_the_cache_that_was_planned(
    story: Path, environment: dict[str, str]
) -> None:
    """To the token, with and without a draft; of what the engine refuses nothing was planned."""
    proofs = list(Path(environment["PILOTAGE_HOME"]).glob("store/serving/*/files/summary.json"))
    assert len(proofs) == 3
    for path in proofs:
        proof = json.loads(path.read_text())
        planned = json.loads(path.with_name("plan.json").read_text())
        assert proof["planned_kv_tokens"] == planned["kv_cache_tokens"] == proof["kv_cache_tokens"]
        assert proof["plan_exact"] is proof["feasible"]
        assert proof["plan"] == MemoryPlan.model_validate(planned).digest
        if proof["feasible"]:
            memory = proof["planned_memory"]
            # Scales of channels are 16 bit in the file and float32 in the engine.
            assert memory["files_bytes"] == pytest.approx(memory["files_counted_bytes"], rel=0.02)
            assert proof["memory"]["private_bytes"] > memory["weights_bytes"]
            assert proof["memory"]["resident_bytes"] > proof["memory"]["private_bytes"]


def test_4_the_draft_is_measured_by_the_engine(story: Path) -> None:
    result = document(story / "first.log")
    plain, drafted, _ = result["candidates"]
    assert all(point["acceptance_length"] is None for point in plain["latency"])
    assert all(point["acceptance_length"] >= 1.0 for point in drafted["latency"])
    assert [point["rate"] for point in drafted["latency"]] == [1.0, 2.0, 3.0]
    for point in plain["latency"] + drafted["latency"]:
        assert point["ok"] == point["total"]


@pytest.fixture
def served(environment: dict[str, str]) -> Iterator[str]:
    """The promoted bundle, started with exactly the printed command on a free port."""
    port = free_port()
    words = ["serve", "tiny-assistant@champion", "--print", "--port", str(port)]
    printed = pilotage(environment, *words).stdout
    assert "vllm" in printed
    with running(["env", *shlex.split(printed)], environment):
        yield f"http://127.0.0.1:{port}"


@contextmanager
def running(command: list[str], environment: dict[str, str]) -> Iterator[None]:
    """A server that is ended with the block."""
    server = subprocess.Popen(
        command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        yield
    finally:
        server.terminate()
        server.wait(60)


def test_5_the_printed_command_answers_a_business_prompt(served: str) -> None:
    answers_a_prompt(served)


def answers_a_prompt(url: str, **headers: str) -> None:
    """Wait for the server, ask, and see that a token came."""
    deadline = time.monotonic() + 300
    body = {
        "model": "tiny-assistant",
        "messages": [{"role": "user", "content": "Where is my order 2152?"}],
        "max_tokens": 16,
        "temperature": 0,
    }
    while True:
        try:
            answer = httpx.post(
                f"{url}/v1/chat/completions", json=body, headers=headers, timeout=60
            )
            break
        except httpx.TransportError:
            assert time.monotonic() < deadline, "the command did not start a server"
            time.sleep(1)
    assert answer.status_code == 200, answer.text
    assert answer.json()["usage"]["completion_tokens"] > 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_6_stopped_while_measuring_leaves_no_process(
    story: Path, environment: dict[str, str], number: signal.Signals
) -> None:
    log = story / f"stopped-{number}.log"
    # Another seed of the load: latency is measured again, everything else is reused.
    process = start(environment, log, "--set", f"load.seed={int(number) + 100}")
    wait_for("latency bf16: making", log, process, 300)
    time.sleep(8)
    process.send_signal(number)
    assert process.wait(90) == 128 + number
    assert our_processes(environment["PILOTAGE_HOME"]) == []
    assert "Traceback" not in log.read_text()


def test_7_the_stopped_run_goes_on_where_it_was(story: Path, environment: dict[str, str]) -> None:
    log = story / "resumed.log"
    words = ("--set", f"load.seed={int(signal.SIGTERM) + 100}")
    assert start(environment, log, *words).wait(600) == 0, log.read_text()[-3000:]
    made = [stage["name"] for stage in document(log)["stages"] if not stage["reused"]]
    assert made == ["latency bf16", "latency w8a8_int8-eagle3"]
    # The same bundle passed with new evidence: no second version.
    assert document(log)["version"] == 1


def test_8_a_new_bundle_is_compared_with_the_champion_on_its_own_items(
    story: Path, environment: dict[str, str]
) -> None:
    log = story / "challenger.log"
    words = (
        "--set",
        "candidates=[{name: bf16, quantize: bf16, serve: vllm_cpu_2core}]",
        "--set",
        "serve.vllm_cpu_2core.engine_args.max-num-seqs=5",
    )
    assert start(environment, log, *words).wait(600) == 0, log.read_text()[-3000:]
    result = document(log)
    champion = next(stage for stage in result["stages"] if stage["name"] == "accuracy champion")
    assert not champion["reused"]
    gates = {gate["name"]: gate for gate in result["candidates"][0]["gates"]}
    regression = gates["regression_hit_rate"]
    assert (regression["reference_name"], regression["n"]) == ("champion", 24)
    assert regression["flips"]["mcnemar_p"] is not None
    assert result["previous"]["version"] == 1
    assert result["version"] == 2


def test_9_the_ledger_says_who_moved_what(story: Path, environment: dict[str, str]) -> None:
    lines = lines_of_the_ledger(environment)
    assert [line["action"] for line in lines] == ["register", "promote", "register", "promote"]
    assert {line["actor"] for line in lines} == {"release release_tiny"}
    assert lines[3]["moves"]["champion"] == {"before": 1, "after": 2}
    assert lines[3]["evidence"] == document(story / "challenger.log")["candidates"][0]["evidence"]
    pilotage(environment, "ledger", "tiny-assistant", "--verify")
    answer = pilotage(environment, "why", "tiny-assistant@champion", "--json").stdout
    reasons = json.loads(answer.splitlines()[-1])
    assert (reasons["version"], reasons["verdict"]) == (2, "PASS")
    assert reasons["bundle"] == document(story / "challenger.log")["champion"]["bundle"]
    kinds = [one["kind"] for one in reasons["chain"]]
    assert kinds[:3] == ["alias", "version", "bundle"]
    assert kinds[-1] == "prompts"
    assert reasons["prompts_digest"] == reasons["chain"][-1]["digest"]


def test_10_rolled_back_in_one_command_and_not_promoted_again_by_itself(
    story: Path, environment: dict[str, str]
) -> None:
    said = pilotage(
        environment, "rollback", "tiny-assistant", "--reason", "wrong about customs", "--json"
    )
    outcome = json.loads(said.stdout.splitlines()[-1])
    assert (outcome["version"], outcome["before"], outcome["changed"]) == (1, 2, True)
    assert outcome["smoke"][0]["tokens"] > 0
    assert lines_of_the_ledger(environment)[-1]["reason"] == "wrong about customs"
    # The next night makes the same bundle again. It stays where a person put it.
    log = story / "next-night.log"
    words = (
        "--set",
        "candidates=[{name: bf16, quantize: bf16, serve: vllm_cpu_2core}]",
        "--set",
        "serve.vllm_cpu_2core.engine_args.max-num-seqs=5",
    )
    assert start(environment, log, *words).wait(300) == 11, log.read_text()[-3000:]
    night = document(log)
    assert (night["promoted"], night["champion"]["version"]) == (None, 1)
    assert any("rolled back on" in note and "customs" in note for note in night["notes"])
    assert our_processes(environment["PILOTAGE_HOME"]) == []


def test_11_one_flipped_bit_is_refused(story: Path, environment: dict[str, str]) -> None:
    bundle = document(story / "challenger.log")["champion"]["bundle"]
    named = json.loads((story / "home" / "bundles" / f"{bundle}.json").read_text())["target"]
    store = story / "home" / "store"
    weights = store / named["stage"] / named["key"] / "files" / named["below"] / "model.safetensors"
    before, whole = lines_of_the_ledger(environment), weights.read_bytes()
    flipped = bytearray(whole)
    flipped[-1] ^= 1
    weights.write_bytes(flipped)
    try:
        words = ("promote", "tiny-assistant@2", "--reason", "it was right after all")
        refused = pilotage(environment, *words, status=10)
    finally:
        weights.write_bytes(whole)
    assert "is not what was gated" in refused.stderr
    assert lines_of_the_ledger(environment) == before


def test_12_a_candidate_that_was_not_chosen_is_promoted_and_what_mlflow_downloads_starts(
    story: Path, environment: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:

    drafted = document(story / "second.log")["candidates"][1]
    words = ("promote", drafted["bundle"][:12], "--json")
    outcome = json.loads(pilotage(environment, *words).stdout.splitlines()[-1])
    assert (outcome["version"], outcome["before"]) == (3, 1)
    assert [answer["tokens"] > 0 for answer in outcome["smoke"]] == [True, True]
    again = json.loads(pilotage(environment, *words).stdout.splitlines()[-1])
    assert (again["changed"], again["smoke"], again["line"]) == (False, [], outcome["line"])

    from mlflow.artifacts import download_artifacts

    # Its own arguments for tracking and registry are not looked at for an alias (MLflow 3.17).
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{environment['PILOTAGE_HOME']}/mlflow.db")
    there = str(tmp_path / "fetched")
    fetched = Path(download_artifacts("models:/tiny-assistant@champion", dst_path=there))
    assert {"bundle.json", "target", "draft", "deploy"} <= {path.name for path in fetched.iterdir()}
    port = free_port()
    serve = settings().serve_python.parent
    shell = {
        **environment,
        "PATH": f"{serve}:{environment['PATH']}",
        "PORT": str(port),
        "VLLM_API_KEY": "chosen-by-the-user",
    }
    with running(["sh", str(fetched / "deploy" / "vllm-serve.sh")], shell):
        answers_a_prompt(f"http://127.0.0.1:{port}", authorization="Bearer chosen-by-the-user")


def test_13_a_looser_policy_is_refused_before_anything_starts(
    story: Path, environment: dict[str, str]
) -> None:
    log = story / "looser.log"
    words = ("--set", "policy.max_age_days=60", "--set", "policy.noise_floor=false")
    assert start(environment, log, *words).wait(120) == 2
    text = log.read_text()
    assert "max_age_days 30 -> 60; noise_floor true -> false" in text
    assert "acknowledged" in text
    owned = "[{gate: policy, owner: release desk, reason: a long holiday}]"
    words = (*words, "--set", f"policy.acknowledged={owned}")
    assert start(environment, log, *words).wait(300) == 0, log.read_text()[-3000:]
    (loosened,) = document(log)["loosened"]
    assert loosened["acknowledged_by"] == "release desk"
