"""A release recipe as a plan: keys before anything runs, and mistakes across files together."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from eval_suites import loader as suites
from eval_suites.schema import KINDS as SUITE_KINDS
from recipes import loader
from recipes.schema import KINDS as RECIPE_KINDS
from registry.errors import UserError
from registry.settings import CHECKOUT
from tasks import planning
from tasks.planning import plan, resolve

TINY = str(CHECKOUT / "tests" / "recipes" / "release_tiny.yaml")


@pytest.fixture(autouse=True)
def no_serve_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Unit tests need no engine; its version is all that a plan asks of it."""
    monkeypatch.chdir(CHECKOUT)
    monkeypatch.setattr("tasks.accuracy.engine_version", lambda: "0.0.test")
    for module in ("serving", "latency", "draft_stage", "draft_checkpoints"):
        monkeypatch.setattr(f"tasks.{module}.engine_tools", lambda: {"vllm": "0.0.test"})


def shipped() -> list[Any]:
    listed = []
    for kinds, root in ((RECIPE_KINDS, loader.RECIPES_DIR), (SUITE_KINDS, suites.SUITES_DIR)):
        listed += [
            pytest.param(kind, name, model, root, id=f"{kind}-{name}")
            for kind, model in kinds.items()
            for name in loader.shipped(kind, root)
        ]
    return listed


@pytest.mark.parametrize(("kind", "name", "model", "root"), shipped())
def test_every_shipped_file_loads(kind: str, name: str, model: Any, root: Path) -> None:
    loader.load(name, kind, model, root=root)


@pytest.mark.parametrize("name", loader.shipped("release"))
def test_every_shipped_release_resolves(name: str) -> None:
    resolve(name)


def test_where_a_release_ran_changes_no_key(home: Path) -> None:
    """The first machine that runs it makes nothing anew by saying so."""
    keys = [
        [stage.key for stage in plan(resolve("freight_demo", given)).stages()]
        for given in ([], ["run_on=somewhere else"])
    ]
    assert keys[0] == keys[1]


def test_the_plan_has_every_key_before_anything_ran(home: Path) -> None:
    todo = plan(resolve("freight_demo"))
    stages = todo.stages()
    assert len({stage.key for stage in stages}) == len(stages)
    names = [stage.name for stage in stages]
    assert names[:2] == ["prompts", "model"]
    assert names.count("quantize") == 5
    assert names.count("serving") == 7
    assert not list(home.rglob("*"))
    assert [s.key for s in plan(resolve("freight_demo")).stages()] == [s.key for s in stages]


def keys(*assignments: str) -> dict[str, str]:
    """Stages of the demo by title."""
    return {stage.title: stage.key for stage in plan(resolve("freight_demo", assignments)).stages()}


def changed(assignment: str) -> set[str]:
    """Titles of the stages whose keys an override changes."""
    before, after = keys(), keys(assignment)
    return {title for title, key in after.items() if before.get(title) != key}


def test_a_policy_change_makes_nothing_again() -> None:
    assert changed("policy.max_age_days=7") == set()


def test_a_load_change_measures_latency_again_and_nothing_else() -> None:
    found = changed("load.seed=5")
    assert found
    assert all(title.startswith("latency ") for title in found)


def test_a_quantization_change_touches_only_its_candidate() -> None:
    found = changed("quantize.w8a8_int8.calibration.samples=32")
    assert {title.split()[-1] for title in found} == {"w8a8_int8"}
    assert len(found) == 4


def test_a_distillation_change_keeps_the_teacher_data() -> None:
    found = changed("distill.epochs=7")
    assert "distill" in found
    assert not {"prompts demo", "teacher_data", "model teacher", "accuracy teacher"} & found


# -- the proof of a draft --------------------------------------------------------------------

PROVE = "prove_draft={load: mock_smoke}"
PROOF = "draft_proof bf16-eagle3"


def test_a_draft_is_proved_only_where_that_is_asked_for() -> None:
    assert not any(title.startswith("draft_proof") for title in keys())
    proved = keys(PROVE)
    assert [title for title in proved if title.startswith("draft_proof")] == [PROOF]
    order = list(proved)
    assert order[order.index(PROOF) - 1] == "latency bf16-eagle3"
    assert {title: key for title, key in proved.items() if title != PROOF} == keys()


@pytest.mark.parametrize(
    ("assignments", "same"),
    [
        (["prove_draft.tokens=[1, 2]"], False),
        (["prove_draft.tokens=[3, 2, 1, 1]"], True),
        (["prove_draft.repeats=7"], False),
        (["draft.num_speculative_tokens=2"], False),
        (["seed=8"], False),
        (["policy.max_age_days=7"], True),
        (["load.seed=5"], True),
    ],
)
def test_the_key_of_a_proof(assignments: list[str], same: bool) -> None:
    assert (keys(PROVE, *assignments)[PROOF] == keys(PROVE)[PROOF]) is same


def test_the_key_of_a_proof_has_the_machine_and_the_profile(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    before = keys(PROVE)[PROOF]
    other = tmp_path / "other.yaml"
    text = (suites.SUITES_DIR / "load" / "mock_smoke.yaml").read_text()
    other.write_text(text)
    assert keys(f"prove_draft={{load: {other}}}")[PROOF] == before
    other.write_text(text.replace("seed: 500", "seed: 501"))
    assert keys(f"prove_draft={{load: {other}}}")[PROOF] != before
    monkeypatch.setattr("tasks.draft_stage.hardware_fingerprint", lambda: "another machine")
    assert keys(PROVE)[PROOF] != before


@pytest.mark.parametrize(
    ("assignments", "message"),
    [
        (["prove_draft={load: smoke_cpu}"], "'smoke_cpu' has no search"),
        (["prove_draft={load: mock_smok}"], "did you mean 'mock_smoke'"),
        ([PROVE, "prove_draft.tokens=[]"], "at least 1 item"),
        ([PROVE, "prove_draft.tokens=[0]"], "greater than or equal to 1"),
        ([PROVE, "prove_draft.tokens=[17]"], "less than or equal to 16"),
        ([PROVE, "prove_draft.repeats=1"], "greater than or equal to 2"),
        ([PROVE, "prove_draft.rounds=1"], "unknown key"),
        (["prove_draft.tokens=[1]"], "prove_draft.load: is missing"),
        ([PROVE, "candidates.1.draft=false"], "no candidate has `draft: true`"),
        ([PROVE, "policy.gates.0.name=draft_pays"], "is the name of the gate"),
    ],
)
def test_mistakes_in_a_proof_are_named(assignments: list[str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        resolve("freight_demo", assignments)


def test_mistakes_of_several_files_are_reported_together() -> None:
    with pytest.raises(UserError) as caught:
        resolve("freight_demo", ["distill.epochs=-1", "policy.gates=[]", "draft.num_layers=0"])
    assert len(caught.value.problems) == 3


@pytest.mark.parametrize(
    ("assignment", "message"),
    [
        ("accuracy.items=100000", "asks 100000 items"),
        ("accuracy.metrics=[hit_rate]", "is not measured by suite"),
        ("load.rates=[0.5]", "is not measured by load profile"),
        ("reference_candidate=w8a8_int8", "is not the unquantized student"),
        ("reference_candidate=nobody", "is no candidate"),
        ("quantize.unknown.x=1", "the release names no such recipe"),
        ("model=team/freight", "cannot be a registered model's name"),
        ("prompts.sizes.load=5", "each with a prompt of its own"),
        ("prompts.sizes.calibration=5", "a quantize recipe asks"),
        ("prompts.sizes.load=0", "every part needs at least one prompt"),
    ],
)
def test_what_only_shows_when_files_are_seen_together(assignment: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        resolve("freight_demo", [assignment])


def test_prompts_of_the_users_own(tmp_path: Path) -> None:
    path = tmp_path / "mine.csv"
    path.write_text("text,category\n" + "".join(f"message {n},a\n" for n in range(3000)))
    resolved = resolve(
        TINY,
        ["prompts.mapping.prompt=text", "prompts.mapping.reference=category"],
        prompts_file=str(path),
    )
    assert resolved.release.prompts.source == "file"
    assert resolved.release.prompts.sizes["train"] == planning.FILE_SIZES["train"]
    stage = plan(resolved).prompts
    moved = tmp_path / "elsewhere.csv"
    path.rename(moved)
    again = plan(
        resolve(
            TINY,
            ["prompts.mapping.prompt=text", "prompts.mapping.reference=category"],
            prompts_file=str(moved),
        )
    ).prompts
    assert stage.key == again.key


# -- drafts --------------------------------------------------------------------------------------


def drafts_of(*assignments: str) -> dict[str, str]:
    return {t: key for t, key in keys(*assignments).items() if t.startswith("draft")}


ALL_DRAFTED = (
    "candidates=[{name: bf16, quantize: bf16, serve: vllm_cpu_2core}, "
    "{name: plain, quantize: bf16, serve: vllm_cpu_2core, draft: true}, "
    "{name: eight, quantize: w8a8_int8, serve: vllm_cpu_2core, draft: true}, "
    "{name: four, quantize: w4a16_gptq, serve: vllm_cpu_2core, draft: true}]"
)


def test_one_draft_of_the_student_is_chosen_for_each_candidate() -> None:
    titles = list(drafts_of(ALL_DRAFTED))
    assert titles == ["draft", "draft_choice plain", "draft_choice eight", "draft_choice four"]


def test_a_draft_for_each_quantized_target() -> None:
    """What is not quantized has the student's own."""
    titles = list(drafts_of(ALL_DRAFTED, "draft.target=candidate"))
    trained = [title for title in titles if not title.startswith("draft_choice")]
    assert trained == ["draft", "draft w8a8_int8", "draft w4a16_gptq"]
    assert (
        drafts_of(ALL_DRAFTED)["draft"] == drafts_of(ALL_DRAFTED, "draft.target=candidate")["draft"]
    )


def test_a_draft_is_made_after_its_target_and_chosen_before_it_is_served() -> None:
    order = list(keys(ALL_DRAFTED, "draft.target=candidate"))
    places = [
        order.index(title)
        for title in (
            "quantize w8a8_int8",
            "draft w8a8_int8",
            "draft_choice eight",
            "serving eight",
        )
    ]
    assert places == sorted(places)


def test_a_published_draft_that_is_not_there_stops_the_plan() -> None:
    with pytest.raises(UserError, match="init_from: /nowhere"):
        plan(resolve("freight_demo", ["draft.init_from=/nowhere"]))


def test_the_engine_that_chose_is_in_the_key_of_the_choice_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    before = drafts_of()
    monkeypatch.setattr("tasks.draft_checkpoints.engine_tools", lambda: {"vllm": "another"})
    after = drafts_of()
    assert before["draft"] == after["draft"]
    assert before["draft_choice bf16-eagle3"] != after["draft_choice bf16-eagle3"]
