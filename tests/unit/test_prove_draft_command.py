"""`pilotage prove-draft` around the proof: searches on their own servers, prompts, exit status."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from eval_suites.load import LoadProfile
from flows.bench_rendering import proof_text
from flows.cli import app
from recipes.schema import ProveDraft
from registry.artifacts import Stage
from registry.bundle import Bundle
from registry.errors import InfrastructureError, UserError
from registry.evidence import SUMMARY
from registry.outcome import Verdict
from registry.settings import settings
from tasks import bundles, draft_measuring, draft_stage, latency, measured_folders
from tasks.draft_measuring import Proved, ServedSearch, Supplies, measure_draft, prove, tokens_of
from tasks.engines.load_prompts import word_tokenizer
from tests.unit.load_builders import QueueBench
from tests.unit.pretend_chat import PretendChat, Top, pretending
from tests.unit.turn_builders import FakeServed, World, bundle, written

SURE: Top = {"yes": -0.01, "no": -5.0}
EAGLE = bundle("eagle", 3)
SPEED = {"eagle": 0.040, "eagle-1": 0.036, "eagle-2": 0.020, "eagle-3": 0.028}


class Everything(dict[str, list[Top]]):
    """One answer to every prompt."""

    def __missing__(self, key: str) -> list[Top]:
        return [SURE]


@dataclass
class SearchedWorld(World):
    """A machine whose servers are watched too, as searches want it."""

    live: list[QueueBench] = field(default_factory=list)
    dead: bool = False

    @contextmanager
    def serve(self, one: Bundle) -> Iterator[FakeServed]:
        with super().serve(one) as served:
            self.live.append(served.load_generator.queue_bench)
            yield _alive(served, self)
            self.live.pop()

    def watch(self, url: str, **_: Any) -> QueueBench:
        return self.live[-1]


def _alive(served: FakeServed, world: SearchedWorld) -> FakeServed:
    def check_alive() -> None:
        if world.dead:
            raise InfrastructureError("the server ended")

    served.server.pid = 1  # type: ignore[attr-defined]
    served.server.check_alive = check_alive  # type: ignore[attr-defined]
    return served


@pytest.fixture(autouse=True)
def known_bundles(monkeypatch: pytest.MonkeyPatch) -> None:
    known = {"eagle@champion": EAGLE, "plain@champion": bundle("plain")}
    monkeypatch.setattr(measured_folders, "bundle_named", lambda reference: known[reference])
    monkeypatch.setattr(bundles, "weights_as_gated", lambda bundle, reference: None)
    monkeypatch.setattr(bundles, "engine_version", lambda: "0")
    monkeypatch.setattr(draft_stage, "engine_tools", lambda: {"vllm": "0"})


@contextmanager
def on(world: SearchedWorld, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Servers, watches and chats of the computed machine instead of real ones."""
    monkeypatch.setattr(draft_measuring, "EngineWatch", world.watch)
    with pretending(PretendChat(Everything())) as url:
        world.url = url
        yield


def profile(**changes: Any) -> LoadProfile:
    return written(seconds_per_rate=20, sla=["e2el p90 1s"], looks=1, **changes)


def load(folder: Path, **changes: Any) -> str:
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "load.yaml"
    file.write_text(yaml.safe_dump(profile(**changes).model_dump(mode="json")))
    return str(file)


def proved(
    tmp_path: Path, world: SearchedWorld, monkeypatch: pytest.MonkeyPatch, **changes: Any
) -> Proved:
    with on(world, monkeypatch):
        return prove(
            "eagle@champion", load(tmp_path), "1,2,3", 4, serve=world.serve,  # type: ignore[arg-type]
            **changes,
        )  # fmt: skip


def test_a_draft_that_pays_stays(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = SearchedWorld(SPEED)
    found = proved(tmp_path, world, monkeypatch)
    assert found.verdict is Verdict.PASS, found.proof.decision
    assert found.folder.parent == home / "draft"
    assert world.starts[:5] == ["eagle", "eagle", "eagle-1", "eagle-2", "eagle-3"]
    document = found.document
    assert (document["verdict"], document["num_speculative_tokens"]) == ("PASS", 2)
    kept, printed = (
        json.loads(text)
        for text in ((found.folder / "draft.json").read_text(), json.dumps(document))
    )
    assert {key: printed[key] for key in kept} == kept
    low, high = document["kept_rate"]["without"]
    assert 5 < low < high < 40
    emulated = dataclasses.replace(found, proof=dataclasses.replace(found.proof, emulated=True))
    assert emulated.verdict is Verdict.INFEASIBLE
    assert "they decide nothing" in proof_text(emulated.document)
    assert "emulated" not in proof_text(document)
    shown = proof_text(document)
    for words in ("the draft stays", "k=2 was best; the bundle is served with k=3", "over off"):
        assert words in shown
    assert "greedy answers: 64 of 64 equal, 0 part at a near-tie, 0 disagree" in shown
    searches = sorted(found.folder.glob("search-*"))
    assert len(searches) == 2
    assert all((folder / SUMMARY).exists() for folder in searches)


def test_a_draft_that_costs_goes(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = SearchedWorld({name: 0.04 if name == "eagle" else 0.1 for name in SPEED})
    found = proved(tmp_path, world, monkeypatch)
    assert found.verdict is Verdict.FAIL
    assert "the draft goes: it lowers the kept rate" in " ".join(proof_text(found.document).split())


def test_no_kept_rate_is_not_decided(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = proved(tmp_path, SearchedWorld({"eagle": 9.0}), monkeypatch)
    assert found.verdict is Verdict.INCONCLUSIVE
    assert found.verdict.exit_status == 11
    assert "not decided: without its draft" in proof_text(found.document)


def test_an_engine_without_a_kernel_for_the_draft(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = SearchedWorld(SPEED, infeasible=("eagle-1", "eagle-2", "eagle-3"))
    found = proved(tmp_path, world, monkeypatch)
    assert found.verdict is Verdict.FAIL
    assert "no kernel for eagle-2" in proof_text(found.document)


# -- prompts ---------------------------------------------------------------------------------


def prompts(folder: Path, count: int) -> Path:
    file = folder / "prompts.jsonl"
    rows = [{"id": n, "prompt": f"question number {n}"} for n in range(count)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def test_searches_and_turns_share_no_synthetic_prompt(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = proved(tmp_path, SearchedWorld(SPEED), monkeypatch)

    def sent(pattern: str) -> set[str]:
        files = list(found.folder.glob(pattern))
        return {row["request_id"] for file in files for row in json.loads(file.read_text())["rows"]}

    searches, turns = sent("search-*/points/*.json"), sent("t*/*-*.json")
    assert len(searches) > 1000
    assert len(turns) > 1000
    assert not searches & turns


def test_the_prompts_of_a_file_are_parted(tmp_path: Path) -> None:
    tokenizer = word_tokenizer(tmp_path / "tokenizer")
    supplies = Supplies(profile(), prompts(tmp_path, 9), tmp_path, tokenizer)
    parts = {part: supplies.of(part) for part in ("searches", "turns")}
    assert [supply.left for supply in parts.values()] == [5, 4]
    taken = {
        part: [row["messages"][0]["content"] for row in supply.take(4)]
        for part, supply in parts.items()
    }
    assert taken["searches"] == [f"question number {n}" for n in (0, 2, 4, 6)]
    assert taken["turns"] == [f"question number {n}" for n in (1, 3, 5, 7)]
    assert [row["id"] for row in supplies.of("turns").take(2)] == ["1", "3"]


def test_too_few_prompts_for_the_turns_decide_nothing(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    word_tokenizer(EAGLE.target.path)
    found = proved(tmp_path, SearchedWorld(SPEED), monkeypatch, prompts=prompts(tmp_path, 1600))
    assert found.verdict is Verdict.INCONCLUSIVE
    assert "prompts, and there are 800: name more of them" in found.document["reason"]


# -- stops -----------------------------------------------------------------------------------


def test_a_stopped_proof_goes_on_in_its_search(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(InfrastructureError):
        proved(tmp_path, SearchedWorld(SPEED, dies_after=3), monkeypatch)
    (folder,) = (home / "draft").iterdir()
    (search,) = folder.glob("search-*")
    steps = sorted(path.name for path in (search / "points").iterdir())
    assert steps
    world = SearchedWorld(SPEED)
    found = proved(tmp_path, world, monkeypatch)
    assert found.verdict is Verdict.PASS
    assert world.batches[0].rate is not None, "no second warm-up"
    assert found.folder == folder


def test_a_finished_search_is_not_repeated(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = SearchedWorld(SPEED)
    supplies = Supplies(profile(), None, tmp_path, EAGLE.target.path)
    search = ServedSearch(profile(), "p", supplies, tmp_path, world.serve)  # type: ignore[arg-type]
    with on(world, monkeypatch):
        first = search(EAGLE)
        assert search(EAGLE) == first
    assert world.starts == ["eagle-3"]
    assert first.bundle == EAGLE.digest
    assert first.profile == "p"


def test_a_server_that_died_is_no_rate_that_is_not_kept(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = SearchedWorld(SPEED, dead=True)
    supplies = Supplies(profile(), None, tmp_path, EAGLE.target.path)
    search = ServedSearch(profile(), "p", supplies, tmp_path, world.serve)  # type: ignore[arg-type]
    with on(world, monkeypatch), pytest.raises(InfrastructureError, match="the server ended"):
        search(EAGLE)
    assert not list(tmp_path.glob("search-*/points/*"))
    assert not list(tmp_path.glob(f"search-*/{SUMMARY}"))


# -- mistakes --------------------------------------------------------------------------------


def test_tokens_are_read() -> None:
    assert tokens_of("1,2,3") == [1, 2, 3]
    assert tokens_of(" 4 , 2") == [4, 2]


@pytest.mark.parametrize("text", ["", "0", "17", "-1", "1,,2", "two", "1.5", "1;2", "1e1"])
def test_bad_tokens_are_named(text: str) -> None:
    with pytest.raises(UserError, match="is no list of numbers of speculative"):
        tokens_of(text)


def test_mistakes_are_named(home: Path, tmp_path: Path) -> None:
    fixed = load(tmp_path / "fixed", search=None, rates=[1.0])
    bare = load(tmp_path / "bare", scenarios={})
    with pytest.raises(UserError, match="has no `search`"):
        prove("eagle@champion", fixed, "1", 2)
    with pytest.raises(UserError, match="plain@champion: has no draft"):
        prove("plain@champion", load(tmp_path), "1", 2)
    with pytest.raises(UserError, match="--prompts"):
        prove("eagle@champion", bare, "1", 2)
    assert not (home / "draft").exists()


def test_the_command_ends_with_the_decision(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = SearchedWorld(SPEED)
    monkeypatch.setattr(
        draft_measuring,
        "measure_draft",
        lambda *args, **kwargs: measure_draft(*args, **(kwargs | {"serve": world.serve})),
    )
    words = ["prove-draft", "eagle@champion", "--load", load(tmp_path), "--repeats", "4"]
    with on(world, monkeypatch):
        answer = CliRunner().invoke(app, [*words, "--tokens", "2", "--json"])
    assert answer.exit_code == 0, answer.output
    document = json.loads(answer.stdout.splitlines()[-1])
    assert (document["stays"], document["served_tokens"]) == (True, 3)
    assert CliRunner().invoke(app, [*words, "--repeats", "1"]).exit_code == 2


# -- as a stage ------------------------------------------------------------------------------


def test_the_stage_keeps_everything_and_goes_on_after_a_stop(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = ProveDraft(load="some_profile", tokens=[2, 2], repeats=4)
    (tmp_path / "prompts").mkdir()
    data = Stage(name="prompts", version=1)
    monkeypatch.setattr(draft_stage, "folder_of", lambda stage: tmp_path / "prompts")
    monkeypatch.setattr(
        "tasks.stages.Store.recorded_digest", lambda self, stage: "d" * 64, raising=True
    )
    stage = draft_stage.stage("eagle", asked, profile(), data, {}, {})
    assert stage.config["tokens"] == [2]

    def made(world: SearchedWorld) -> Any:
        monkeypatch.setattr(
            draft_stage,
            "measure_draft",
            lambda *args, **kwargs: measure_draft(*args, **(kwargs | {"serve": world.serve})),
        )
        monkeypatch.setattr("tasks.stages.time.sleep", lambda seconds: None)
        with on(world, monkeypatch):
            return draft_stage.prove_candidate.fn(stage, asked, profile(), 30.0, EAGLE)

    # Both tries fail: the second dies at once.
    with pytest.raises(InfrastructureError):
        made(SearchedWorld(SPEED, dies_after=3))
    (work,) = (settings().home / "bench").iterdir()
    assert list(work.glob("search-*/points/*"))
    world = SearchedWorld(SPEED)
    ref = made(world)
    assert ref.summary["stays"] is True
    assert ref.summary["num_speculative_tokens"] == 2
    assert (ref.path / "draft.json").exists()
    assert list(ref.path.glob("search-*/summary.json"))
    assert not work.exists()
    assert latency.young_enough(30.0)(ref)
