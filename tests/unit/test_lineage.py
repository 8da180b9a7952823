"""The lineage of a bundle: the right nodes, in the right order, also after a pruning."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from registry.lineage import Edge, Lineage, Node, merged, whole_store
from registry.settings import settings
from tasks.lineage import lineage_for
from tests.unit.lineage_builders import Release, release, stages_of, text_of


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Release:
    return release(tmp_path_factory.mktemp("home") / "store")


@pytest.fixture
def home(made: Release, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Release]:
    """A copy that a test may prune."""
    shutil.copytree(made.store.root, tmp_path / "store")
    monkeypatch.setenv("PILOTAGE_HOME", str(tmp_path))
    settings.cache_clear()
    store = type(made.store)(tmp_path / "store")
    yield made._replace(store=store)
    settings.cache_clear()


def kinds(lineage: Lineage) -> list[str]:
    return [node.title for node in lineage.ordered()]


def test_the_chain_goes_from_the_bundle_to_the_prompts(home: Release) -> None:
    evidence = {kind: home.refs[kind] for kind in ("latency", "accuracy")}
    lineage = lineage_for(home.bundle(), evidence)
    assert kinds(lineage) == [
        "bundle quantize",
        "accuracy",
        "latency",
        "draft",
        "quantize w8a8",
        "distill",
        "teacher_data",
        "model student",
        "prompts wo.csv",
    ]
    top = lineage.of_kind("bundle")[0]
    assert top.key == top.digest == home.bundle().digest
    assert set(lineage.parents(top.id)) == {
        "target",
        "draft",
        "evidence.accuracy",
        "evidence.latency",
    }
    assert lineage.prompts_digest() == home.manifest("prompts").digest
    assert not any(node.gone for node in lineage.nodes.values())
    # Whatever order the nodes were read in.
    shuffled = Lineage(
        nodes=dict(reversed(lineage.nodes.items())), edges=list(reversed(lineage.edges))
    )
    assert shuffled.ordered() == lineage.ordered()


def test_a_target_within_an_artifact_is_found_by_its_folder(home: Release) -> None:
    lineage = lineage_for(home.bundle("distill", draft=False), {})
    assert kinds(lineage)[:2] == ["bundle distill", "distill"]
    assert not lineage.of_kind("distill")[0].gone


def test_a_pruned_parent_stays_and_is_marked(home: Release) -> None:
    shutil.rmtree(home.store.folder(home.stages["teacher_data"]))
    lineage = lineage_for(home.bundle(draft=False), {})
    node = lineage.of_kind("teacher_data")[0]
    assert node.gone
    assert node.digest == home.manifest("distill").parents["data"]["digest"]
    # What only the pruned manifest named is not known any more.
    assert lineage.prompts_digest() == ""


def test_weights_made_anew_under_the_same_key_are_not_those_of_the_bundle(home: Release) -> None:
    bundle = home.bundle()
    other = bundle.target.model_copy(update={"digest": "0" * 64})
    lineage = lineage_for(bundle.model_copy(update={"target": other}), {})
    assert [node.digest for node in lineage.of_kind("quantize") if node.gone] == ["0" * 64]


def test_facts_are_short_and_hold_neither_prompt_nor_secret(home: Release) -> None:
    lineage = lineage_for(home.bundle(), {kind: home.refs[kind] for kind in ("accuracy",)})
    text = lineage.model_dump_json()
    assert "secret" not in text and "key=x" not in text
    assert not any(text_of(name) in text for name in ("t0", "e0"))
    data = lineage.of_kind("teacher_data")[0].facts
    assert data["engine.url"] == "http://teacher/v1"
    assert data["made.answers.length"] == "2"
    quantized = lineage.of_kind("quantize")[0].facts
    assert quantized["recipe"] == "GPTQModifier (scheme W8A8)"
    assert quantized["calibration.samples"] == "2"
    assert quantized["git"] == "a" * 40
    assert quantized["driver"] == "python 3.11.7, torch 2.13.0"
    assert quantized["serve"] == "vllm 0.32.0"
    assert quantized["machine"] == "EPYC, H100"


def test_written_and_read_it_is_the_same(home: Release) -> None:
    lineage = lineage_for(home.bundle(), {})
    assert Lineage.model_validate_json(lineage.model_dump_json()) == lineage


def test_the_whole_store_names_manifests_that_cannot_be_read(home: Release) -> None:
    folder = home.store.folder(home.stages["accuracy"])
    (folder / "manifest.json").write_text("{", encoding="utf-8")
    lineage, broken = whole_store(home.store.root)
    assert broken == [f"accuracy/{home.stages['accuracy'].key}/manifest.json"]
    assert len(lineage.nodes) == len(stages_of()) - 1
    assert whole_store(home.store.root / "nothing")[0].nodes == {}


def test_merging_keeps_what_one_store_still_has(home: Release) -> None:
    whole = lineage_for(home.bundle(), {})
    shutil.rmtree(home.store.folder(home.stages["distill"]))
    pruned = lineage_for(home.bundle(), {})
    assert pruned.of_kind("distill")[0].gone
    for both in (merged([pruned, whole]), merged([whole, pruned])):
        assert both.ordered() == whole.ordered()


def test_a_circle_is_no_lineage() -> None:
    nodes = [Node(kind="draft", key=key, digest=key) for key in "ab"]
    edges = [
        Edge(child=nodes[0].id, role="x", parent=nodes[1].id),
        Edge(child=nodes[1].id, role="x", parent=nodes[0].id),
    ]
    circle = Lineage(nodes={node.id: node for node in nodes}, edges=edges)
    with pytest.raises(ValueError, match="made of itself"):
        circle.ordered()
    assert circle.below([nodes[0].id]) == {node.id for node in nodes}


def test_a_long_setting_is_cut(tmp_path: Path) -> None:
    stages = release(tmp_path)
    manifest = stages.manifest("prompts")
    from registry.lineage_facts import LONGEST, facts_of

    long = manifest.model_copy(update={"config": {"prompts": {"template": "x" * 9999}}})
    assert len(facts_of(long)["prompts.template"]) == LONGEST
    odd = manifest.model_copy(update={"stage": "new_kind", "config": {"a": [{"b": 1}, {"b": 2}]}})
    assert facts_of(odd)["a"] == "b 1; b 2"
    assert json.dumps(facts_of(odd))
