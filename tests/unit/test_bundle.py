"""A bundle's identity: what serves differently has another digest, what lies elsewhere has not."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import save_file

from recipes import loader
from recipes.schema import ServeRecipe
from recipes.serve_rules import argument_problems, variable_problems
from registry.bundle import Bundle, Part
from registry.digests import digest_of_folder, files_below
from registry.errors import UserError
from registry.settings import settings
from tasks.bundles import weights_as_gated
from tasks.engines.vllm_server import command

FILES = {
    "config.json": '{"quantization_config": {"bits": 8}}',
    "generation_config.json": '{"eos_token_id": 2}',
    "tokenizer.json": '{"model": {"vocab": {"a": 0}}}',
    "tokenizer_config.json": "{}",
    "chat_template.jinja": "{{ messages }}",
    ".hidden": "h",
}


def model_folder(folder: Path) -> Path:
    folder.mkdir(parents=True)
    for name, text in FILES.items():
        (folder / name).write_text(text)
    weights = np.arange(64, dtype=np.float32).reshape(8, 8)
    save_file({"weight": weights}, folder / "model.safetensors")
    return folder


def bundle(**changes: Any) -> Bundle:
    return Bundle.model_validate(
        {
            "name": "c",
            "target": Part(stage="quantize", key="k", digest="t"),
            "draft": Part(stage="draft", key="k", digest="d"),
            "num_speculative_tokens": 3,
            "engine_version": "0.32.0",
            "engine_args": {"max-model-len": 1024, "enforce-eager": True},
            "env": {"OMP_NUM_THREADS": "1"},
            **changes,
        }
    )


# -- folders ---------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [*FILES, "model.safetensors"])
def test_one_changed_byte_of_any_file_is_another_folder(tmp_path: Path, name: str) -> None:
    folder = model_folder(tmp_path / "model")
    before = digest_of_folder(folder)
    content = bytearray((folder / name).read_bytes())
    for place in range(len(content)):
        content[place] ^= 1
        (folder / name).write_bytes(content)
        assert digest_of_folder(folder) != before, f"byte {place} of {name}"
        content[place] ^= 1
    (folder / name).write_bytes(content)
    assert digest_of_folder(folder) == before


def test_where_it_lies_and_when_it_was_written_do_not_count(tmp_path: Path) -> None:
    folder = model_folder(tmp_path / "model")
    before = digest_of_folder(folder)
    for path in files_below(folder):
        os.utime(path, (1, 1))
        path.chmod(0o600)
    (folder / "empty").mkdir()
    assert digest_of_folder(folder) == before
    assert digest_of_folder(Path(shutil.copytree(folder, tmp_path / "copy"))) == before
    assert digest_of_folder(folder.rename(tmp_path / "moved")) == before


def test_names_that_differ_in_case_or_in_unicode_form_are_other_names(tmp_path: Path) -> None:
    digests = set()
    for number, name in enumerate(["a", "A", "\u00e9", "e\u0301", "sub/a", "a "]):
        folder = tmp_path / str(number)
        (folder / name).parent.mkdir(parents=True)
        (folder / name).write_text("x")
        digests.add(digest_of_folder(folder))
    assert len(digests) == 6


def test_a_file_more_or_a_folder_in_its_place_is_another_folder(tmp_path: Path) -> None:
    folder = model_folder(tmp_path / "model")
    seen = {digest_of_folder(folder)}
    (folder / "sub").mkdir()
    (folder / "sub" / ".more").write_text("")
    seen.add(digest_of_folder(folder))
    (folder / "config.json").unlink()
    (folder / "config.json").mkdir()
    seen.add(digest_of_folder(folder))
    (folder / "config.json" / "config.json").write_text(FILES["config.json"])
    seen.add(digest_of_folder(folder))
    assert len(seen) == 4


def test_a_link_to_a_file_counts_as_the_file(tmp_path: Path) -> None:
    folder = model_folder(tmp_path / "model")
    before = digest_of_folder(folder)
    real = (folder / "model.safetensors").rename(tmp_path / "elsewhere")
    (folder / "model.safetensors").symlink_to(real)
    assert digest_of_folder(folder) == before
    with real.open("ab") as handle:
        handle.write(b"x")
    assert digest_of_folder(folder) != before


@pytest.mark.parametrize("what", ["linked folder", "broken link", "pipe", "name"])
def test_what_no_digest_would_see_is_refused(tmp_path: Path, what: str) -> None:
    folder = model_folder(tmp_path / "model")
    if what == "linked folder":
        (folder / "odd").symlink_to(model_folder(tmp_path / "other"))
    elif what == "broken link":
        (folder / "odd").symlink_to(tmp_path / "nothing")
    elif what == "pipe":
        os.mkfifo(folder / "odd")
    else:
        (folder / os.fsdecode(b"odd\xff")).write_text("x")
    with pytest.raises(UserError, match="odd"):
        digest_of_folder(folder)


def test_one_flipped_bit_in_a_weight_file_is_refused_by_digest() -> None:
    store = settings().store_dir
    target = model_folder(store / "quantize" / "k" / "files")
    draft = model_folder(store / "draft" / "k" / "files")
    made = bundle(
        target=Part(stage="quantize", key="k", digest=digest_of_folder(target)),
        draft=Part(stage="draft", key="k", digest=digest_of_folder(draft)),
    )
    weights_as_gated(made, "m@champion")
    for folder in (target, draft):
        weights = folder / "model.safetensors"
        whole = weights.read_bytes()
        flipped = bytearray(whole)
        flipped[-1] ^= 0b100
        weights.write_bytes(flipped)
        with pytest.raises(UserError, match="is not what was gated as m@champion"):
            weights_as_gated(made, "m@champion")
        weights.write_bytes(whole)
    weights_as_gated(made, "m@champion")


# -- arguments -------------------------------------------------------------------------------


def test_every_part_counts() -> None:
    variants = [
        bundle(),
        bundle(target=Part(stage="quantize", key="k", digest="t2")),
        bundle(draft=Part(stage="draft", key="k", digest="d2")),
        bundle(draft=None),
        bundle(draft=None, num_speculative_tokens=None),
        bundle(num_speculative_tokens=2),
        bundle(engine="sglang"),
        bundle(engine_version="0.32.1"),
        bundle(env={}),
        bundle(env={"OMP_NUM_THREADS": "2"}),
        bundle(env={"OMP_NUM_THREADS": "1", "KMP_BLOCKTIME": ""}),
        *(bundle(engine_args={"x": value}) for value in VALUES),
        bundle(engine_args={}),
    ]
    assert len({one.digest for one in variants}) == len(variants)


VALUES: list[Any] = [
    *(True, False, None, "true", "True", "null", "", 1, 0, -0.0, 1.0, "1", "1.0", 2**70),
    *([1, 2], [2, 1], [[1], 2], [], {}, {"a": 1}, {"a": "1"}, {"a": None}, {"a": {"b": 1}}),
]


def test_names_places_and_the_order_of_keys_do_not_count() -> None:
    args = {"max-model-len": 1024, "enforce-eager": True, "hf-overrides": {"b": 1, "a": [2, 1]}}
    turned = {"hf-overrides": {"a": [2, 1], "b": 1}, "enforce-eager": True, "max-model-len": 1024}
    one, other = bundle(engine_args=args), bundle(engine_args=turned, name="x", root="r")
    other = other.model_copy(update={"target": Part(stage="s", key="z", below="b", digest="t")})
    assert one.digest == other.digest
    # And so they are one command: an engine may let a later argument win.
    commands = [command("p", "t", "n", made.engine_args, 1) for made in (one, other)]
    assert commands[0] == commands[1]


def test_the_digest_of_a_bundle_that_exists_is_what_it_was() -> None:
    document = bundle().model_dump(mode="json")
    del document["root"]
    assert Bundle.model_validate(document).digest == bundle().digest
    assert bundle().digest == "0dc1dffaeee546aeec280b5cbc35b1037002f7976c2a38672e6c295807906dbe"


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
        | st.text(),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
        max_leaves=8,
    )
)  # fmt: skip
def test_the_digest_survives_the_file_it_is_kept_in(value: Any) -> None:
    made = bundle(engine_args={"x": value})
    again = Bundle.model_validate(json.loads(made.model_dump_json()))
    assert again == made
    assert again.digest == made.digest


# -- what a recipe may not say ---------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [
        ("port", 1, "set by the project"),
        ("speculative-config", {"model": "x"}, "set by the project"),
        ("spec-model", "x", "set by the project"),
        ("spec-mo", "x", "the engine reads spec-model"),
        ("no-trust-remote-code", True, "the engine reads trust-remote-code"),
        ("chat-templ", "x", "the engine reads chat-template"),
        ("chat_template", "x", "in full, without --"),
        ("-O", 3, "in full, without --"),
        ("compilation-config.cache_dir", "x", "in full, without --"),
        ("no-enforce-eager", True, "write `enforce-eager: false`"),
        ("tokenizer-revision", "v1", "outside of the bundle"),
        ("lora-modules", ["a=/x"], "outside of the bundle"),
        ("hf-config-path", "x", "outside of the bundle"),
        ("mm-encoder-fp8-scale-path", "x", "outside of the bundle"),
        ("generation-config", "some/folder", "only `auto` and `vllm`"),
        ("download-dir", "models", "outside of the bundle"),
        ("logits-processors", ["a.B"], "loads code"),
        ("middleware", "a.b", "loads code"),
        ("tool-parser-plugin", "x.py", "loads code"),
        ("distributed-executor-backend", "my.Executor", "loads code"),
        ("ec-transfer-config", {"ec_connector_module_path": "x"}, "ec_connector_module_path names"),
        ("kv-transfer-config", {"kv_role": "kv_both"}, "set by the project"),
        ("structured-outputs-config", {"reasoning_parser_plugin": "x"}, "loads code"),
        ("compilation-config", {"inductor_passes": {"p": "a.b"}}, "loads code"),
        ("model-loader-extra-config", {"a": ["/weights"]}, "'/weights' names something outside"),
        ("hf-overrides", {"x": "~/y"}, "outside of the bundle"),
        ("allowed-origins", ["*", "--chat-template"], "read as another argument"),
        ("max-model-len", "-O3", "read as another argument"),
        ("weight-transfer-config", {}, "while it is served"),
        ("device-ids", [1], "nobody has locked"),
        ("ssl-keyfile", "k", "plain HTTP"),
        ("api-key", "k", "secret"),
    ],
)
def test_an_argument_that_no_digest_would_cover(name: str, value: Any, reason: str) -> None:
    content = {"kind": "serve", "description": "d", "engine_args": {name: value}}
    with pytest.raises(UserError) as refusal:
        loader.validate(content, "serve", ServeRecipe, source="x")
    assert name in str(refusal.value)
    assert reason in str(refusal.value)


@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [
        ("VLLM_PLUGINS", "x", "loads code"),
        ("LD_PRELOAD", "libtcmalloc.so", "the machine's affair"),
        ("PYTHONPATH", "x", "the machine's affair"),
        ("HTTP_PROXY", "x", "the machine's affair"),
        ("HF_HOME", "x", "set by the project"),
        ("VLLM_USE_MODELSCOPE", "1", "outside of the bundle"),
        ("VLLM_MODEL_REDIRECT_PATH", "x", "the machine's affair"),
        ("VLLM_TUNED_CONFIG_FOLDER", "x", "the machine's affair"),
        ("VLLM_SERVER_DEV_MODE", "1", "while it is served"),
        ("VLLM_CACHE_ROOT", "x", "the machine's affair"),
        ("VLLM_SOMETHING_NEW", "/x", "outside of the bundle"),
        ("VLLM_API_KEY", "x", "secret"),
        ("CUDA_VISIBLE_DEVICES", "1", "nobody has locked"),
        ("cuda_device_order", "PCI_BUS_ID", "nobody has locked"),
        ("HIP_VISIBLE_DEVICES", "1", "nobody has locked"),
        ("A-B", "x", "no name"),
    ],
)
def test_a_variable_that_no_digest_would_cover(name: str, value: str, reason: str) -> None:
    content = {"kind": "serve", "description": "d", "env": {name: value}}
    with pytest.raises(UserError) as refusal:
        loader.validate(content, "serve", ServeRecipe, source="x")
    assert name in str(refusal.value)
    assert reason in str(refusal.value)


def test_what_serves_within_the_digest_is_free() -> None:
    assert not argument_problems(
        {
            "enforce-eager": True,
            "max-model-len": -1,
            "gpu-memory-utilization": 0.9,
            "hf-overrides": {"rope_scaling": {"factor": 2.0}},
            "override-generation-config": {"temperature": 0.0},
            "generation-config": "vllm",
            "quantization": "compressed-tensors",
            "chat-template-content-format": "string",
            "config-format": "hf",
            "model-impl": "vllm",
            "root-path": "/v2",
            "disable-access-log-for-endpoints": "/health,/metrics",
            "allowed-origins": ["https://shop.example"],
            "distributed-executor-backend": "uni",
            "compilation-config": {"mode": 3, "cudagraph_capture_sizes": [1, 2]},
        }
    )
    assert not variable_problems(
        {
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "OMP_NUM_THREADS": "1",
            "VLLM_HOST_IP": "10.0.0.1",
            "PYTHONHASHSEED": "0",
            "VLLM_MAX_TOKENS_PER_EXPERT_FP4_MOE": "1",
            "VLLM_DISABLE_COMPILE_CACHE": "1",
        }
    )


def test_a_value_without_a_json_form_is_refused() -> None:
    args = {"hf-overrides": {"x": {1: 1, "a": 2}}}
    content = {"kind": "serve", "description": "d", "engine_args": args}
    with pytest.raises(UserError, match="cannot be written as JSON"):
        loader.validate(content, "serve", ServeRecipe, source="x")
