"""`prefect.yaml` and `automations/`, strictly: Prefect itself ignores what it does not know."""

from __future__ import annotations

import ast
import copy
import json
import re
import subprocess
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import yaml

from eval_suites import loader as suites
from recipes import loader
from recipes.loader import read_yaml
from registry.errors import UserError
from registry.settings import CHECKOUT
from tasks import events
from tasks.deploy_file import (
    AUTOMATIONS_DIR,
    DEPLOY_FILE,
    EVENTS,
    POOLS,
    full_name,
    load_flow,
    read_automations,
    read_deploy_file,
    request_model,
    unknown_keys,
)

HEAVY = ("torch", "transformers", "vllm", "llmcompressor", "mlflow", "lm_eval", "peft", "ray")
KIND_OF_FIELD = {"load": "load", "policy": "policy", "suite": "accuracy"}

EXPECTED = {
    "release/manual": "gpu",
    "nightly/matrix": "cpu",
    "prompts/alone": "cpu",
    "distill/alone": "gpu",
    "quantize/alone": "gpu",
    "draft/alone": "gpu",
    "benchmark/alone": "gpu",
    "teacher/alone": "gpu",
    "accuracy/alone": "gpu",
    "gate/ci": "cpu",
    "promote/on-candidate": "cpu",
    "rollback/manual": "gpu",
    "candidate/one": "gpu",
    "smoke/on-gpu": "gpu",
    "maintenance/daily": "cpu",
}


def test_every_deployment_is_there_once_in_its_pool() -> None:
    found = read_deploy_file()
    pools = {full_name(one): one.work_pool.name for one in found.deployments}
    assert pools == EXPECTED
    assert set(pools.values()) == set(POOLS)


def test_prefect_reads_the_same_deployments() -> None:
    """Nothing of the file is lost on the way: Prefect's own model holds every key of ours."""
    from prefect.cli.deploy._models import PrefectYamlModel

    content = read_yaml(DEPLOY_FILE)
    known = PrefectYamlModel.model_validate(content).model_dump(mode="json", by_alias=True)
    del content["definitions"]
    assert unknown_keys(content, known) == []


def test_importing_every_entrypoint_loads_no_model_library() -> None:
    modules = sorted({one.entrypoint.rpartition(".")[0] for one in read_deploy_file().deployments})
    code = f"import sys, {', '.join(modules)}; print([n for n in {HEAVY!r} if n in sys.modules])"
    answer = subprocess.run(
        [sys.executable, "-c", code], cwd=CHECKOUT, capture_output=True, text=True, check=True
    )
    assert answer.stdout.strip() == "[]"


def test_every_recipe_suite_and_policy_named_is_in_the_checkout() -> None:
    for deployment in read_deploy_file().deployments:
        model = request_model(load_flow(deployment.entrypoint))
        # What a person must fill in has no default and names nothing yet.
        written = deployment.parameters.get("request", {})
        fields = {
            name: written.get(name, field.get_default(call_default_factory=True))
            for name, field in model.model_fields.items()
            if name in written or not field.is_required()
        }
        for name, value in fields.items():
            for one in value if isinstance(value, list | tuple) else [value]:
                if name in ("recipe", "recipes") and one:
                    loader.find(one, "release")
                elif name in KIND_OF_FIELD and one:
                    kind = KIND_OF_FIELD[name]
                    loader.find(one, kind, root=suites.SUITES_DIR)


def test_schedules_have_a_zone_and_do_not_double() -> None:
    scheduled = {full_name(one): one for one in read_deploy_file().deployments if one.schedules}
    assert set(scheduled) == {"nightly/matrix", "maintenance/daily"}
    for one in scheduled.values():
        assert [schedule.timezone for schedule in one.schedules] == ["Asia/Shanghai"]
        assert one.concurrency_limit is not None
        assert one.concurrency_limit.collision_strategy == "CANCEL_NEW"


def test_the_trigger_fills_the_request_of_the_promotion() -> None:
    from prefect.events import Event, Resource
    from prefect.server.utilities.user_templates import render_user_template_sync

    (promote,) = [one for one in read_deploy_file().deployments if one.triggers]
    (trigger,) = promote.triggers
    labels = {
        "prefect.resource.id": "pilotage.version.freight-assistant.7",
        "pilotage.bundle": "freight-assistant@7",
    }
    event = Event(event=EVENTS[0], resource=Resource.model_validate(labels))
    request = trigger.parameters["request"]
    rendered = {
        key: render_user_template_sync(value, {"event": event}) for key, value in request.items()
    }
    model = request_model(load_flow(promote.entrypoint))
    assert model.model_validate(rendered).bundle == "freight-assistant@7"  # type: ignore[attr-defined]


def test_an_event_that_is_waited_for_is_emitted_by_our_code() -> None:
    sources = [*(CHECKOUT / "flows").glob("*.py"), *(CHECKOUT / "tasks").glob("*.py")]
    code = "\n".join(p.read_text() for p in sources if p.name != "deploy_file.py")
    names = [name for name, value in vars(events).items() if name.isupper() and value in EVENTS]
    assert {getattr(events, name) for name in names} == set(EVENTS)
    assert all(re.search(rf"emit\(\s*{name}\b", code) for name in names)


def test_no_path_of_a_machine_is_in_the_files() -> None:
    for path in [DEPLOY_FILE, *AUTOMATIONS_DIR.rglob("*.yaml")]:
        assert not re.search(r"(^|[\s\"'])/(home|root|work|srv|opt|tmp)/", path.read_text()), path


Change = Callable[[dict[str, Any]], None]


def written() -> dict[str, Any]:
    """The file's content, nothing shared: an anchor is one object for all that use it."""
    content: dict[str, Any] = json.loads(json.dumps(read_yaml(DEPLOY_FILE)))
    return content


def _deployment(content: dict[str, Any], entrypoint: str) -> dict[str, Any]:
    return next(one for one in content["deployments"] if one["entrypoint"].endswith(entrypoint))


def _set(entrypoint: str, *keys: Any, value: Any) -> Change:
    def change(content: dict[str, Any]) -> None:
        at: Any = _deployment(content, entrypoint)
        for key in keys[:-1]:
            at = at[key]
        at[keys[-1]] = value

    return change


def _drop(entrypoint: str, *keys: Any) -> Change:
    def change(content: dict[str, Any]) -> None:
        at: Any = _deployment(content, entrypoint)
        for key in keys[:-1]:
            at = at[key]
        del at[keys[-1]]

    return change


NIGHT, RELEASE, PROMOTE = "run_nightly", "release_model", "promote_bundle"
WRONG: dict[str, tuple[Change, str]] = {
    "a key at the top": (lambda c: c.update(deploymnets=[]), "deploymnets: unknown key"),
    "a key of a deployment": (_set(RELEASE, "schedule", value={}), "schedule: unknown key"),
    "a key of a schedule": (
        _set(NIGHT, "schedules", 0, "timezon", value="UTC"),
        "schedules.0.timezon: unknown key",
    ),
    "a key of a work pool": (
        _set(RELEASE, "work_pool", "queue", value="x"),
        "work_pool.queue: unknown key",
    ),
    "a job variable": (
        _set(NIGHT, "work_pool", "job_variables", "enviroment", value={}),
        "job_variables.enviroment: unknown key",
    ),
    "a key of a limit": (
        _set(NIGHT, "concurrency_limit", "strategy", value="ENQUEUE"),
        "concurrency_limit.strategy: unknown key",
    ),
    "a key of a trigger": (
        _set(PROMOTE, "triggers", 0, "expects", value=["x"]),
        "triggers.0.expects: unknown key",
    ),
    "no time zone": (_drop(NIGHT, "schedules", 0, "timezone"), "timezone: is missing"),
    "no such time zone": (
        _set(NIGHT, "schedules", 0, "timezone", value="Asia/Shangai"),
        "is not a time zone of the tz database, such as Asia/Shanghai (found 'Asia/Shangai')",
    ),
    "no cron line": (_set(NIGHT, "schedules", 0, "cron", value="0 25 * * *"), "cron"),
    "six fields": (_set(NIGHT, "schedules", 0, "cron", value="0 0 1 * * *"), "five fields"),
    "no limit": (_drop(NIGHT, "concurrency_limit"), "has a schedule and no concurrency_limit"),
    "no such pool": (_set(RELEASE, "work_pool", "name", value="tpu"), "(found 'tpu')"),
    "no such module": (
        _set(RELEASE, "entrypoint", value="flows.relese.release_model"),
        "No module named 'flows.relese'",
    ),
    "no such flow": (
        _set(RELEASE, "entrypoint", value="flows.release.relese_model"),
        "has no attribute 'relese_model'",
    ),
    "a function that is no flow": (
        _set(RELEASE, "entrypoint", value="flows.release.promote_chosen"),
        "is no flow",
    ),
    "a path": (_set(RELEASE, "entrypoint", value="flows/release.py:release_model"), "pattern"),
    "a request that is not taken": (
        _set(RELEASE, "parameters", "request", value={"recipes": "freight_demo"}),
        "parameters.request.recipes: Extra inputs are not permitted (found 'freight_demo')",
    ),
    "a parameter that is none": (
        _set(RELEASE, "parameters", "recipe", value="freight_demo"),
        "parameters.recipe: unknown key",
    ),
    "an event of nobody": (
        _set(PROMOTE, "triggers", 0, "expect", value=["pilotage.candidate.pased"]),
        "is emitted by nobody",
    ),
    "a trigger without a bundle": (
        _drop(PROMOTE, "triggers", 0, "parameters", "request", "bundle"),
        "parameters.request.bundle: Field required",
    ),
    "no mark of ours": (_set(RELEASE, "tags", value=["release"]), "has no tag 'pilotage'"),
    "twice": (
        lambda c: c["deployments"].append(copy.deepcopy(_deployment(c, RELEASE))),
        "release/manual: stands there twice",
    ),
    "a trigger twice": (
        lambda c: _deployment(c, PROMOTE)["triggers"].append(
            _deployment(c, PROMOTE)["triggers"][0]
        ),
        "pilotage candidate passed: stands there twice",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_mistake_is_named_with_its_place(name: str, tmp_path: Path) -> None:
    change, message = WRONG[name]
    content = written()
    change(content)
    path = tmp_path / "prefect.yaml"
    path.write_text(yaml.safe_dump(content))
    with pytest.raises(UserError) as error:
        read_deploy_file(path)
    assert message in str(error.value)
    assert str(path) in str(error.value)
    assert all(problem.remedy for problem in error.value.problems)


def test_all_mistakes_are_told_at_once(tmp_path: Path) -> None:
    content = written()
    for name in ("a key of a schedule", "no such pool", "an event of nobody"):
        WRONG[name][0](content)
    (tmp_path / "prefect.yaml").write_text(yaml.safe_dump(content))
    with pytest.raises(UserError) as error:
        read_deploy_file(tmp_path / "prefect.yaml")
    assert len(error.value.problems) == 3


def test_the_automations_are_prefects() -> None:
    names = [entry["name"] for entry in read_automations()]
    assert "pilotage zombie runs" in names
    assert len(set(names)) == len(names)


def test_an_automation_with_an_unknown_key_or_a_wrong_value_is_refused(tmp_path: Path) -> None:
    entry = read_yaml(AUTOMATIONS_DIR / "zombie.yaml")["automations"][0]
    unknown = copy.deepcopy(entry)
    unknown["trigger"]["within_seconds"] = 90
    wrong = copy.deepcopy(entry) | {"name": "zombies"}
    wrong["actions"][0]["state"] = "DEAD"
    (tmp_path / "a.yaml").write_text(yaml.safe_dump({"automations": [unknown, wrong, entry]}))
    with pytest.raises(UserError) as error:
        read_automations(tmp_path)
    assert "trigger.within_seconds: unknown key" in str(error.value)
    assert "(found 'DEAD')" in str(error.value)
    (tmp_path / "a.yaml").write_text(yaml.safe_dump({"automations": [entry, entry]}))
    with pytest.raises(UserError, match="stands there twice"):
        read_automations(tmp_path)
    (tmp_path / "a.yaml").write_text(yaml.safe_dump({"automation": []}))
    with pytest.raises(UserError, match="write one list"):
        read_automations(tmp_path)


def test_the_zombie_automation_knows_every_end_of_our_runs() -> None:
    """An end that it does not know would be taken for silence, and its run for crashed."""
    (zombie,) = [one for one in read_automations() if one["name"] == "pilotage zombie runs"]
    known = {name.removeprefix("prefect.flow-run.") for name in zombie["trigger"]["expect"]}
    named = set().union(*(names_of_ends(path) for path in (CHECKOUT / "flows").glob("*.py")))
    ends = {"Promoted", "RolledBack", "Passed", "Refused", "Failed", "Measured", "Infeasible"}
    assert ends <= named
    assert named | {"Completed", "Failed", "Cancelled", "Crashed"} <= known


def test_every_flow_says_in_a_line_how_it_ended() -> None:
    """And has its progress, its pages and the lines of its engines: `@told` does all of that."""
    for one in read_deploy_file().deployments:
        module, _, name = one.entrypoint.rpartition(".")
        tree = ast.parse((CHECKOUT / f"{module.replace('.', '/')}.py").read_text())
        (function,) = [
            node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == name
        ]
        words = {word.id for word in function.decorator_list if isinstance(word, ast.Name)}
        assert "told" in words, one.entrypoint


def names_of_ends(path: Path) -> set[str]:
    """What `Completed(name=...)`, `Failed(name=...)` and `Ended(outcome, name, ...)` may name."""
    ends = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            if node.func.id in ("Completed", "Failed", "Crashed", "Ended"):
                ends += [word.value for word in node.keywords if word.arg == "name"]
            if node.func.id == "Ended":
                assert not isinstance(node.args[1], ast.Name) or node.args[1].id.isupper(), (
                    f"{path}:{node.lineno} names its end by a variable: nobody sees which"
                )
                ends += node.args[1:2]
    module = import_module(f"flows.{path.stem}") if ends else None
    words = [word for end in ends for word in ast.walk(end)]
    found = {getattr(module, word.id, None) for word in words if isinstance(word, ast.Name)}
    found |= {word.value for word in words if isinstance(word, ast.Constant)}
    return {name for name in found if isinstance(name, str)}
