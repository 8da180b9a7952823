"""SGLang beside vLLM: its words, what a recipe may say, where it is missing, its deployables.

No SGLang is here, so its own parser reads none of this; the names were read in the source of
sglang 0.5.23.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from recipes import loader
from recipes.schema import DraftRecipe, ServeRecipe
from registry import provenance
from registry.bundle import Bundle, Part
from registry.deployables import render, write
from registry.deployment import Deployment
from registry.errors import UserError
from registry.serve_words import sglang_words
from registry.settings import settings
from tasks import draft_checkpoints, serving, tool_calling
from tasks.engines.sglang_server import SglangServer
from tests.unit.deploy_builders import H200, fake_vllm, path_with, said

PLAIN = [
    *("--model-path", "/m", "--host", "127.0.0.1", "--port", "30001"),
    *("--served-model-name", "freight", "--enable-metrics"),
]
DRAFT_WORDS = [
    *("--speculative-algorithm", "EAGLE3", "--speculative-draft-model-path", "/d"),
    *("--speculative-num-steps", "3", "--speculative-eagle-topk", "1"),
    *("--speculative-num-draft-tokens", "4"),
]


def recipe(**engine_args: Any) -> ServeRecipe:
    return ServeRecipe.model_validate(
        {
            "kind": "serve",
            "description": "d",
            "engine": "sglang",
            "engine_args": {name.replace("_", "-"): value for name, value in engine_args.items()},
        }
    )


# -- the command line ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ({}, []),
        ({"tp-size": 2}, ["--tp-size", "2"]),
        ({"disable-radix-cache": True}, ["--disable-radix-cache"]),
        ({"mem-fraction-static": 0.85}, ["--mem-fraction-static", "0.85"]),
        ({"context-length": None}, []),
        ({"cuda-graph-bs": [1, 2]}, ["--cuda-graph-bs", "1", "2"]),
        (
            {"default-chat-template-kwargs": {"enable_thinking": False}},
            ["--default-chat-template-kwargs", '{"enable_thinking": false}'],
        ),
    ],
)
def test_engine_arguments_keep_sglangs_names(args: dict[str, Any], words: list[str]) -> None:
    assert sglang_words("/m", "freight", args, 30001) == PLAIN + words


@pytest.mark.parametrize("tokens", [1, 3, 5])
def test_a_draft_is_a_chain_and_one_token_more_is_verified(tokens: int) -> None:
    words = sglang_words("/m", "freight", {}, 30001, "/d", tokens)[len(PLAIN) :]
    given = dict(zip(words[::2], words[1::2], strict=True))
    assert given["--speculative-algorithm"] == "EAGLE3"
    assert given["--speculative-draft-model-path"] == "/d"
    assert given["--speculative-num-steps"] == str(tokens)
    assert given["--speculative-eagle-topk"] == "1"
    assert given["--speculative-num-draft-tokens"] == str(tokens + 1)


def test_a_draft_needs_a_token() -> None:
    with pytest.raises(ValueError, match="num_speculative_tokens"):
        sglang_words("/m", "m", {}, 1, "/d", 0)


def test_no_key_is_on_the_command_line(tmp_path: Path) -> None:
    server = SglangServer(
        tmp_path, log=tmp_path / "log", served_name="m", draft=tmp_path, num_speculative_tokens=2,
        python=Path("/sglang/python"),
    )  # fmt: skip
    assert server.command[:3] == ["/sglang/python", "-m", "sglang.launch_server"]
    assert server.command[-2:] == ["--config", str(server.key_file)]
    assert server.api_key not in " ".join([*server.command, repr(server)])


# -- what a recipe may say -------------------------------------------------------------------


def test_the_shipped_recipe_is_one() -> None:
    shipped = loader.load("sglang_qwen3_8b_nvidia_h20", "serve", ServeRecipe)
    assert shipped.engine == "sglang" and shipped.engine_args["tp-size"] == 1


@pytest.mark.parametrize(
    ("args", "why"),
    [
        ({"model_path": "/x"}, "is set by the project"),
        ({"api_key": "x"}, "a secret does not belong"),
        ({"admin_api_key": "x"}, "a secret does not belong"),
        ({"speculative_num_steps": 3}, "is set by the project"),
        ({"speculative_num": 3}, "the engine reads speculative-num-steps"),
        ({"trust_remote_code": True}, "loads code"),
        ({"forward_hooks": "x"}, "loads code"),
        ({"chat_template": "x"}, "names something outside"),
        ({"quantization_param_path": "x"}, "names something outside"),
        ({"crash_dump_folder": "x"}, "names something outside"),
        ({"remote_instance_weight_loader_backend": "nccl"}, "changes what is served"),
        ({"enable_lora": True}, "changes what is served"),
        ({"base_gpu_id": 1}, "takes devices"),
        ({"disable_radix_cache": False}, "flags are given or left out"),
        ({"ssl_keyfile": "x"}, "plain HTTP"),
        ({"model_loader_extra_config": {"path": "/etc"}}, "names something outside"),
        ({"dtype": "--trust-remote-code"}, "another argument"),
        ({"--dtype": "auto"}, "without --"),
    ],
)
def test_what_no_digest_covers_is_refused(args: dict[str, Any], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        recipe(**args)


def test_each_engine_has_its_own_names() -> None:
    """`model-path` is no argument of vLLM, `chat-template` is one of both."""
    assert recipe(
        log_requests=True, fastapi_root_path="/x", no_enable_tp_lm_head_all_to_all=True
    ).engine_args
    with pytest.raises(ValueError, match="engine"):
        ServeRecipe.model_validate({"kind": "serve", "description": "d", "engine": "sglan"})


def test_tools_need_a_parser_alone() -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": {}}}
    records = [{"id": "p1", "prompt": "x", "tools": [tool]}]
    problems = tool_calling.mismatches(records, {"s": recipe()})
    assert len(problems) == 1 and "enable-auto-tool-choice" not in problems[0].what
    assert tool_calling.mismatches(records, {"s": recipe(tool_call_parser="qwen25")}) == []


# -- where it is missing ---------------------------------------------------------------------


@pytest.fixture
def python(home: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Sets PILOTAGE_SGLANG_PYTHON."""

    def set_to(value: str | None) -> None:
        if value is None:
            monkeypatch.delenv("PILOTAGE_SGLANG_PYTHON", raising=False)
        else:
            monkeypatch.setenv("PILOTAGE_SGLANG_PYTHON", value)
        settings.cache_clear()
        provenance.sglang_version.cache_clear()

    yield set_to
    provenance.sglang_version.cache_clear()


@pytest.mark.parametrize(
    ("given", "why"),
    [
        (None, "is not set, and a serve recipe or a bundle asks for `engine: sglang`"),
        ("/no/such/python", "does not run"),
        (sys.executable, "has no SGLang"),
    ],
)
def test_a_missing_sglang_is_said_before_anything_runs(
    python: Any, given: str | None, why: str
) -> None:
    python(given)
    with pytest.raises(UserError, match="PILOTAGE_SGLANG_PYTHON") as told:
        serving.bundle_config(recipe(), None)
    assert why in str(told.value) and "remedy" in str(told.value)


def test_a_server_without_its_python_says_which_setting(home: Path, tmp_path: Path) -> None:
    server = SglangServer(
        tmp_path, log=tmp_path / "log", served_name="m", python=Path("/no/such/python")
    )
    with pytest.raises(UserError, match="PILOTAGE_SGLANG_PYTHON"), server:
        pass
    assert not server.key_file.exists()


def test_the_version_is_in_every_key_and_vllms_keys_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tasks.serving.sglang_version", lambda: "0.5.23")
    config = serving.bundle_config(recipe(), None)
    assert config["engine"] == "sglang" and config["engine_version"] == "0.5.23"
    vllm = ServeRecipe.model_validate({"kind": "serve", "description": "d"})
    assert set(serving.bundle_config(vllm, None)) == {
        *("engine", "engine_args", "env", "num_speculative_tokens"),
    }


def test_a_draft_candidate_is_refused_before_anything_runs() -> None:
    draft = DraftRecipe(kind="draft", description="d", epochs=1, learning_rate=1e-3)
    stages: Any = None
    with pytest.raises(UserError, match="candidate c: draft"):
        draft_checkpoints.stage("c", draft, stages, stages, stages, {"engine": "sglang"})


# -- deployables -----------------------------------------------------------------------------


def bundle(**more: Any) -> Bundle:
    return Bundle(
        name="fp8",
        target=Part(stage="quantize", key="a" * 64, digest="b" * 64),
        draft=Part(stage="draft", key="c" * 64, digest="d" * 64),
        num_speculative_tokens=3,
        engine="sglang",
        engine_version="0.5.23",
        engine_args={"tp-size": 2, "default-chat-template-kwargs": {"a": "it's $HOME"}},
        env={"SGLANG_LOGGING": "quiet's"},
        **more,
    )


def deployment() -> Deployment:
    return Deployment(model="m$(id)", bundle=bundle(), hardware=H200, weights_bytes=1)


def test_the_engine_is_part_of_the_digest() -> None:
    other = bundle().model_copy(update={"engine": "vllm"})
    assert other.digest != bundle().digest


def test_every_file_says_that_it_was_not_run() -> None:
    files = render(deployment())
    assert set(files) == {"README.md", "sglang-serve.sh"}
    assert files["sglang-serve.sh"].splitlines()[1].startswith("# rendered, not run")
    assert "rendered, not run" in files["README.md"]
    assert deployment().gpus == 2


def test_the_script_starts_the_words_of_the_server(tmp_path: Path) -> None:
    """A shell runs it, with a stand-in for Python that writes down what it was asked."""
    place = tmp_path / "it's a place"
    for name in ("target", "draft"):
        (place / name).mkdir(parents=True)
    made = deployment()
    write(made, place)
    stand_in = fake_vllm(tmp_path / "bin")
    text = stand_in.read_text().replace('[ "$1" = --version ]', '[ "$1" = -I ]')
    stand_in.write_text(text.replace("echo 'a warning'; echo '0.32.0+cpu'", "echo 0.5.23"))
    script = place / "deploy" / "sglang-serve.sh"
    env = {
        "PATH": path_with(stand_in.parent), "SGLANG_PYTHON": str(stand_in), "SGLANG_FOREIGN": "1",
        "PORT": "30001",
    }  # fmt: skip
    done = subprocess.run(["sh", str(script)], env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    words, seen = said(stand_in.parent)
    target, draft = str(place / "target"), str(place / "draft")
    args = made.bundle.engine_args
    assert words == [
        *("-m", "sglang.launch_server"),
        *sglang_words(target, made.model, args, 30001, draft, 3),
    ]
    assert seen["SGLANG_LOGGING"] == "quiet's" and seen["HF_HUB_OFFLINE"] == "1"
    assert "SGLANG_FOREIGN" not in seen
    stand_in.write_text(stand_in.read_text().replace("0.5.23", "0.4.0"))
    done = subprocess.run(["sh", str(script)], env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 2 and "0.4.0 is installed" in done.stderr


def test_bundle_json_holds_the_engine() -> None:
    document = json.loads(bundle().model_dump_json())
    assert (document["engine"], document["engine_version"]) == ("sglang", "0.5.23")
