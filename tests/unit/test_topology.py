"""Prefill and decode apart: what a recipe may say, and what it does to keys and digests."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

from recipes import loader
from recipes.schema import ServeRecipe
from registry.bundle import Bundle, Part
from registry.digests import digest_of
from registry.errors import UserError
from registry.topology import Disaggregated, topology_words, transfer_config, weight_copies
from tasks.serving import bundle_config

DISAGGREGATED = {
    "kind": "disaggregated",
    "prefill": 1,
    "decode": 2,
    "prefill_args": {"max-num-seqs": 4},
    "decode_args": {"max-num-seqs": 64, "enforce-eager": True},
}


def recipe(topology: Any = None, engine: str = "vllm", **args: Any) -> ServeRecipe:
    content = {"kind": "serve", "description": "d", "engine": engine, "engine_args": args}
    if topology is not None:
        content["topology"] = topology
    return loader.validate(content, "serve", ServeRecipe, source="serve.yaml")


def problems(topology: Any, engine: str = "vllm", **args: Any) -> str:
    with pytest.raises(UserError) as caught:
        recipe(topology, engine, **args)
    return str(caught.value)


def bundle(**changes: Any) -> Bundle:
    content = {
        "name": "c",
        "target": Part(stage="quantize", key="k", digest="t"),
        "engine_version": "0.32.0",
        "engine_args": {"max-model-len": 1024},
        **changes,
    }
    return Bundle.model_validate(content)


# -- the recipe ------------------------------------------------------------------------------


def test_colocated_is_what_is_said_by_saying_nothing() -> None:
    plain = recipe()
    assert recipe("colocated") == plain and plain.topology is None
    assert "topology" not in plain.model_dump(mode="json")
    assert topology_words(plain.topology) == "colocated"


def test_a_recipe_with_both_roles() -> None:
    topology = recipe(DISAGGREGATED, **{"max-model-len": 1024, "max-num-seqs": 8}).topology
    assert topology is not None
    assert topology.words == "disaggregated, 1 prefill + 2 decode (NixlConnector)"
    shared = {"max-model-len": 1024, "max-num-seqs": 8}
    assert topology.arguments("prefill", shared) == {"max-model-len": 1024, "max-num-seqs": 4}
    assert topology.arguments("decode", shared) == {
        "max-model-len": 1024,
        "max-num-seqs": 64,
        "enforce-eager": True,
    }
    assert (topology.engines("prefill"), topology.engines("decode")) == (1, 2)


@pytest.mark.parametrize(
    ("topology", "args", "message"),
    [
        ("disagregated", {}, "is `colocated`, or a mapping with `kind: disaggregated`"),
        ({"kind": "colocated"}, {}, "Input should be 'disaggregated'"),
        ({"prefill": 0}, {}, "greater than or equal to 1"),
        ({"proxy": 1}, {}, "unknown key"),
        (
            {"connector": "P2pNcclConnector"},
            {},
            "vLLM 0.32 has no P2pNcclConnector any more; write NixlConnector",
        ),
        ({"connector": "ExampleConnector"}, {}, "Input should be 'NixlConnector'"),
        ({"prefill_args": {"port": 1}}, {}, "prefill_args: port: is set by the project"),
        (
            {"decode_args": {"kv-transfer-config": {}}},
            {},
            "decode_args: kv-transfer-config: is set by the project",
        ),
        ({"decode_args": {"dtype": "half"}}, {}, "dtype: has to be the same on both sides"),
        (
            {"prefill_args": {"kv-offloading-size": 4}},
            {},
            "prefill_args: kv-offloading-size: vLLM would move the KV cache with another connector",
        ),
        ({}, {"kv-offloading-size": 4}, "engine_args: kv-offloading-size: vLLM would move"),
        (
            {},
            {"pipeline-parallel-size": 2},
            "decode: pipeline-parallel-size is 2: vLLM 0.32 takes 1 for a decode engine",
        ),
        ({}, {"kv-transfer-config": {"kv_role": "kv_both"}}, "kv-transfer-config: is set by"),
    ],
)
def test_what_a_topology_may_not_say(topology: Any, args: dict[str, Any], message: str) -> None:
    assert message in problems(topology, **args)


def test_both_mistakes_of_a_topology_at_once() -> None:
    found = problems({"prefill_args": {"model": "x"}, "decode_args": {"dtype": "half"}})
    assert "prefill_args: model" in found and "decode_args: dtype" in found


def test_prefill_may_have_stages_and_decode_may_not() -> None:
    written = {"prefill_args": {"pipeline-parallel-size": 2}}
    topology = recipe(written).topology
    assert topology is not None and topology.prefill_args == {"pipeline-parallel-size": 2}


def test_sglang_is_not_served_in_parts() -> None:
    assert "only `engine: vllm` is served in parts" in problems({}, engine="sglang")


def test_a_colocated_recipe_may_not_write_a_transfer_either() -> None:
    found = problems("colocated", **{"kv-transfer-config": {"kv_role": "kv_both"}})
    assert "kv-transfer-config: is set by the project" in found


# -- digests and keys ------------------------------------------------------------------------


def test_a_bundle_without_a_topology_has_the_digest_that_it_always_had() -> None:
    content = {
        "target": "t",
        "draft": None,
        "num_speculative_tokens": None,
        "engine": "vllm",
        "engine_version": "0.32.0",
        "engine_args": {"max-model-len": 1024},
        "env": {},
    }
    text = json.dumps(content, sort_keys=True, separators=(",", ":"))
    assert bundle().digest == hashlib.sha256(text.encode()).hexdigest()
    assert bundle().digest == ("ac4dceb3a8e0092f235fcca0d50ae466eda20ac7d8943a3a54b59818b19326d3")


def test_bundle_json_of_one_engine_is_what_older_versions_read() -> None:
    assert "topology" not in json.loads(bundle().model_dump_json())
    assert Bundle.model_validate_json(bundle().model_dump_json()) == bundle()
    assert Bundle.model_validate({**bundle().model_dump(), "topology": None}) == bundle()


def test_whatever_a_topology_says_is_in_the_digest() -> None:
    ways = [
        None,
        {},
        {"decode": 2},
        {"prefill": 2},
        {"prefill_args": {"max-num-seqs": 4}},
        {"decode_args": {"max-num-seqs": 4}},
        {"decode_args": {"max-num-seqs": 8}},
    ]
    bundles = [bundle(topology=way) for way in ways]
    assert len({one.digest for one in bundles}) == len(ways)
    for one in bundles:
        assert Bundle.model_validate_json(one.model_dump_json()).digest == one.digest


def test_the_order_of_arguments_is_no_difference() -> None:
    args = {"max-num-seqs": 4, "block-size": 16}
    turned = dict(reversed(args.items()))
    first, second = (bundle(topology={"decode_args": one}) for one in (args, turned))
    assert first.digest == second.digest
    assert first.topology is not None and second.topology is not None
    assert list(first.topology.decode_args) == list(second.topology.decode_args)


def test_a_measurement_knows_the_topology_and_keys_without_one_stay() -> None:
    plain = bundle_config(recipe(), None)
    assert plain == {
        "engine": "vllm",
        "engine_args": {},
        "env": {},
        "num_speculative_tokens": None,
    }
    apart = bundle_config(recipe(DISAGGREGATED), None)
    assert digest_of(apart) != digest_of(plain)
    made = Bundle.model_validate(
        {"name": "c", "target": bundle().target, "engine_version": "0", **apart}
    )
    assert made.topology == recipe(DISAGGREGATED).topology


def test_a_drafts_training_is_the_same_however_its_bundle_is_served(tmp_path: Path) -> None:
    from recipes.schema import DraftRecipe
    from registry.artifacts import Stage
    from tasks import speculation

    draft = loader.load("eagle3_1layer_32k", "draft", DraftRecipe)
    draft = draft.model_copy(update={"states": "vllm"})
    parent = Stage(name="distill", label="", version=1, config={}, parents={})
    keys = {
        speculation.stage(draft, parent, parent, None, bundle_config(one, None)).key
        for one in (recipe(), recipe(DISAGGREGATED))
    }
    assert len(keys) == 1


# -- vLLM's words ----------------------------------------------------------------------------


def test_each_role_says_what_it_does_with_the_cache() -> None:
    topology = Disaggregated()
    assert json.loads(transfer_config(topology, "prefill")) == {
        "kv_connector": "NixlConnector",
        "kv_role": "kv_producer",
        "kv_load_failure_policy": "fail",
    }
    assert json.loads(transfer_config(topology, "decode", "cpu")) == {
        "kv_connector": "NixlConnector",
        "kv_role": "kv_consumer",
        "kv_load_failure_policy": "fail",
        "kv_buffer_device": "cpu",
    }


# -- where a bundle is shown -----------------------------------------------------------------


def test_lineage_and_mlflow_say_how_a_bundle_is_served(tmp_path: Path) -> None:
    from registry.tracking import _bundle_params
    from tasks.lineage import lineage_for

    apart = bundle(topology=DISAGGREGATED)
    words = "disaggregated, 1 prefill + 2 decode (NixlConnector)"
    top = lineage_for(apart, {}).ordered()[0]
    assert top.facts["topology"] == words
    assert "topology" not in lineage_for(bundle(), {}).ordered()[0].facts
    assert _bundle_params(apart)["topology"] == words
    assert _bundle_params(bundle())["topology"] == "colocated"


def test_why_says_both_roles_and_nothing_of_one_engine() -> None:
    from flows.lineage_rendering import topology_lines
    from tasks.why import serving_facts

    told = serving_facts(bundle(topology=DISAGGREGATED))
    assert told is not None
    assert list(topology_lines(told["topology"])) == [
        "  disaggregated, 1 prefill + 2 decode (NixlConnector)",
        "    prefill alone: max-num-seqs 4",
        "    decode alone: enforce-eager True, max-num-seqs 64",
    ]
    plain = serving_facts(bundle())
    assert plain is not None and plain["topology"] == "colocated"
    assert list(topology_lines(plain["topology"])) == []


def test_a_page_says_it_beside_the_name_and_pairs_drafts_of_one_topology() -> None:
    from registry.outcome import CandidateOutcome, Verdict
    from registry.report import render
    from registry.report_latency import draft_pairs
    from tests.unit.evidence_builders import point
    from tests.unit.test_report import details, release

    def candidate(name: str, topology: str = "", draft: bool = False) -> CandidateOutcome:
        return CandidateOutcome(
            name=name,
            bundle=name,
            verdict=Verdict.PASS,
            reasons=[],
            target="t",
            draft=draft,
            topology=topology,
            latency=[point()],
        )

    one, apart = candidate("one"), candidate("apart", "disaggregated, 1 prefill + 2 decode")
    both = candidate("both", apart.topology, draft=True)
    assert [(p.off.name, p.on.name) for p in draft_pairs([one, apart, both])] == [("apart", "both")]
    assert draft_pairs([one, both]) == []
    shown = release()
    first = shown.candidates[0].model_copy(update={"topology": apart.topology})
    page = render(
        shown.model_copy(update={"candidates": [first, *shown.candidates[1:]]}), details()
    )
    assert page.count(f'<span class="tag">{apart.topology}</span>') >= 1


def test_how_often_a_server_holds_its_weights() -> None:
    assert weight_copies({"tensor-parallel-size": 4, "pipeline-parallel-size": 2}) == 1
    assert weight_copies({"tensor-parallel-size": 4, "data-parallel-size": "3"}) == 3
    assert weight_copies({"tp-size": 4, "dp-size": 2}) == 2
    apart = Disaggregated(prefill=3, decode=2, decode_args={"data-parallel-size": 2})
    assert weight_copies({"tensor-parallel-size": 4}, apart) == 3 + 2 * 2
