"""Prompt files, checkpoints, evidence folders and bundles, each broken by hand in one way."""

# ruff: noqa: E501 - one line for each case

from __future__ import annotations

import gzip
import io
import json
import pickle
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tests.unit.bad_input.cases import TINY, Case, odd_files, written

ROWS = [{"id": f"q{n}", "prompt": f"question {n}", "reference": f"{n}"} for n in range(30)]


def lines(rows: list[Any]) -> bytes:
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode()


def dry(path: object, *sets: str) -> list[object]:
    words: list[object] = ["release", TINY, "--dry-run", "--prompts", path]
    given = ["prompts.mapping.reference=reference", *sets]
    return words + [word for one in given for word in ("--set", one)]


def parquet(rows: Any) -> bytes:
    import pandas as pd

    out = io.BytesIO()
    pd.DataFrame(rows).to_parquet(out)
    return out.getvalue()


def with_row(at: int, row: Any) -> bytes:
    return lines([*ROWS[:at], row, *ROWS[at + 1 :]])


CSV = b"id,prompt,reference\n" + b"".join(b"q%d,question %d,%d\n" % (n, n, n) for n in range(30))

PROMPTS: dict[str, tuple[str, bytes, list[str]]] = {
    "is empty": ("p.jsonl", b"", []),
    "blank lines only": ("p.jsonl", b"\n\n  \n", []),
    "a byte-order mark only": ("p.jsonl", b"\xef\xbb\xbf", []),
    "a list": ("p.jsonl", json.dumps(ROWS).encode(), []),
    "numbers": ("p.jsonl", b"1\n2\n3\n", []),
    "UTF-16": ("p.jsonl", lines(ROWS).decode().encode("utf-16"), ["UTF-16"]),
    "NUL bytes": ("p.jsonl", b"\0" * 4096, []),
    "gzip under a text's name": ("p.jsonl", gzip.compress(lines(ROWS)), ["gzip"]),
    "a zip archive": ("p.csv", b"PK\x03\x04" + bytes(100), ["zip archive"]),
    "Parquet under a text's name": ("p.jsonl", parquet(ROWS), ["Parquet"]),
    "text under Parquet's name": ("p.parquet", lines(ROWS), []),
    "cut Parquet": ("p.parquet", parquet(ROWS)[:-200], []),
    "Parquet without its begin": ("p.parquet", parquet(ROWS)[100:], []),
    "Parquet without rows": ("p.parquet", parquet({"id": [], "prompt": []}), []),
    "Parquet without a prompt": ("p.parquet", parquet([{"id": "a", "text": "b"}]), ["prompt"]),
    "an unknown ending": ("p.xlsx", b"x", [".csv"]),
    "no ending": ("prompts", lines(ROWS), []),
    "CSV with quotes that do not close": ("p.csv", CSV + b'q99,"never,1\n', ["p.csv"]),
    "CSV without a header": ("p.csv", CSV.split(b"\n", 1)[1], ["prompt"]),
    "CSV with semicolons": ("p.csv", CSV.replace(b",", b";"), []),
    "CSV with a header only": ("p.csv", b"id,prompt,reference\n", []),
    "CSV with a column twice": ("p.csv", CSV.replace(b"reference", b"prompt", 1), ["prompt"]),
    "all prompts are empty": ("p.jsonl", lines([{"id": str(n), "prompt": ""} for n in range(9)]), []),
    "no prompts": ("p.jsonl", lines([{"id": str(n)} for n in range(9)]), ["prompt"]),
    "all ids are one": ("p.jsonl", lines([{"id": "a", "prompt": f"p {n}"} for n in range(30)]), []),
    "too few for the parts": ("p.jsonl", lines(ROWS[:3]), []),
    "messages that are text": (
        "p.jsonl", lines([{"id": str(n), "messages": "hello"} for n in range(30)]), []),
    "a role that nobody has": (
        "p.jsonl",
        lines([{"id": str(n), "messages": [{"role": "boss", "content": "x"}]} for n in range(30)]),
        []),
    "nested ten thousand deep": ("p.jsonl", b'{"prompt": ' + b"[" * 10_000 + b"\n", []),
    "a line of 100 MB": ("p.jsonl", b'{"prompt": "' + b"x" * 100_000_000 + b'"}\n', []),
}  # fmt: skip


def prompts() -> Iterator[Case]:
    for name, (file, content, says) in PROMPTS.items():
        write = written(file, content)
        yield Case("prompt file", name, lambda folder, write=write: dry(write(folder)),
                   ["{}/" + file, *says])  # fmt: skip
    for name, make, _ in odd_files():

        def odd(folder: Path, make: Any = make) -> list[object]:
            make(folder / "p.jsonl")
            return dry(folder / "p.jsonl")

        yield Case("prompt file", f"{name} in its place", odd, ["{}/p.jsonl"])
    for name, sets, says in (
        ("a column that is not there", ["prompts.mapping.prompt=question"], ["question"]),
        ("a mapping that is a list", ["prompts.mapping=[1]"], ["prompts.mapping"]),
        ("sizes that are too large", ["prompts.sizes.eval=100000"], ["prompts.sizes"]),
        ("sizes below zero", ["prompts.sizes.eval=-1"], ["prompts.sizes", "eval"]),
        ("a part that nobody knows", ["prompts.sizes.exam=3"], ["exam"]),
    ):
        write = written("p.jsonl", lines(ROWS))
        yield Case("prompt file", name,
                   lambda folder, write=write, sets=sets: dry(write(folder), *sets), says)  # fmt: skip


# -- checkpoints -----------------------------------------------------------------------------

CONFIG = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 16,
          "hidden_size": 8, "num_hidden_layers": 2}  # fmt: skip
TEMPLATE = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
TOKENIZER = {"version": "1.0", "model": {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "a"}}


def tensors() -> dict[str, tuple[str, list[int]]]:
    named = {"model.embed_tokens.weight": ("BF16", [16, 8]), "lm_head.weight": ("BF16", [16, 8])}
    return named | {f"model.layers.{n}.input_layernorm.weight": ("BF16", [8]) for n in range(2)}


def safetensors(of: dict[str, tuple[str, list[int]]]) -> bytes:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, (dtype, shape) in of.items():
        size = 2 if dtype == "BF16" else 1
        for length in shape:
            size *= length
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [end, end + size]}
        end += size
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + bytes(end)


def model(folder: Path) -> Path:
    """A folder that is whole, as far as can be seen without loading it."""
    root = folder / "model"
    root.mkdir()
    (root / "config.json").write_text(json.dumps(CONFIG))
    (root / "model.safetensors").write_bytes(safetensors(tensors()))
    (root / "tokenizer.json").write_text(json.dumps(TOKENIZER))
    (root / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE}))
    return root


def student(root: object) -> list[object]:
    return [
        "release",
        TINY,
        "--dry-run",
        "--set",
        f"distill.student={{source: path, path: {root}}}",
    ]


def rewrite(name: str, content: Any) -> Callable[[Path], None]:
    def change(root: Path) -> None:
        raw = content if isinstance(content, bytes) else json.dumps(content).encode()
        (root / name).write_bytes(raw)

    return change


def config(**changes: Any) -> Callable[[Path], None]:
    return rewrite("config.json", CONFIG | changes)


def other(name: str, dtype: str, shape: list[int]) -> Callable[[Path], None]:
    return rewrite("model.safetensors", safetensors(tensors() | {name: (dtype, shape)}))


def without(name: str) -> Callable[[Path], None]:
    return lambda root: (root / name).unlink()


def cut(size: int) -> Callable[[Path], None]:
    def change(root: Path) -> None:
        path = root / "model.safetensors"
        path.write_bytes(path.read_bytes()[:size])

    return change


def sharded(index: Any, *, both: bool = True) -> Callable[[Path], None]:
    def change(root: Path) -> None:
        (root / "model.safetensors").rename(root / "model-00001-of-00002.safetensors")
        if both:
            more = {"model.norm.weight": ("BF16", [8])}
            (root / "model-00002-of-00002.safetensors").write_bytes(safetensors(more))
        if index is not None:
            raw = index if isinstance(index, bytes) else json.dumps(index).encode()
            (root / "model.safetensors.index.json").write_bytes(raw)

    return change


def places(**changes: str) -> dict[str, Any]:
    first = dict.fromkeys(tensors(), "model-00001-of-00002.safetensors")
    second = {"model.norm.weight": "model-00002-of-00002.safetensors"}
    return {"weight_map": {**first, **second, **changes}}


def at_places(*tensors: tuple[str, int, int]) -> bytes:
    """A file of 8-bit tensors, each with its first byte and the byte after its last."""
    header = {name: {"dtype": "U8", "shape": [max(0, end - first)], "data_offsets": [first, end]}
              for name, first, end in tensors}  # fmt: skip
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + bytes(max(end for _, _, end in tensors))


def template(text: str) -> Callable[[Path], None]:
    return rewrite("tokenizer_config.json", {"chat_template": text})


def raw_header(text: bytes) -> Callable[[Path], None]:
    return rewrite("model.safetensors", struct.pack("<Q", len(text)) + text)


EMBED, NORM = "model.embed_tokens.weight", "model.layers.1.input_layernorm.weight"
INDEX = "model.safetensors.index.json"
CHECKPOINTS: dict[str, tuple[Callable[[Path], None], list[str]]] = {
    "no config.json": (without("config.json"), ["config.json"]),
    "a config.json that is not JSON": (rewrite("config.json", b"{"), ["config.json", "JSON"]),
    "a config.json that is a list": (rewrite("config.json", []), ["config.json", "holds list"]),
    "an empty config.json": (rewrite("config.json", b""), ["config.json", "JSON"]),
    "a config.json in UTF-16": (rewrite("config.json", "{}".encode("utf-16")), ["config.json"]),
    "a config.json nested deep": (rewrite("config.json", b"[" * 100_000), ["config.json"]),
    "no architecture": (config(model_type=None), ["config.json: model_type", "None"]),
    "a vocabulary of text": (config(vocab_size="many"), ["config.json: vocab_size", "'many'"]),
    "layers below zero": (config(num_hidden_layers=-2), ["num_hidden_layers", "'-2'"]),
    "no attention heads": (config(num_attention_heads=0), ["config.json: num_attention_heads", "'0'"]),
    "heads below zero": (config(num_key_value_heads=-4), ["config.json: num_key_value_heads", "'-4'"]),
    "a width of a head in words": (config(head_dim="wide"), ["config.json: head_dim", "'wide'"]),
    "a length in words": (
        config(max_position_embeddings="long"), ["config.json: max_position_embeddings", "'long'"]),
    "architectures that are a word": (
        config(architectures="LlamaForCausalLM"), ["config.json: architectures", "no list of names"]),
    "architectures that are numbers": (config(architectures=[7]), ["config.json: architectures", "[7]"]),
    "a quantization that is a word": (
        config(quantization_config="fp8"), ["config.json: quantization_config", "'fp8'"]),
    "rope parameters that are a list": (
        config(rope_parameters=[1]), ["config.json: rope_parameters", "[1]"]),
    "more layers than weights": (config(num_hidden_layers=3), ["layers [2]", "is 3"]),
    "more layers than anybody counts": (
        config(num_hidden_layers=10**15), ["layers [2, 3, 4", f"is {10**15}"]),
    "another vocabulary": (config(vocab_size=17), [EMBED, "[16, 8]", "[17, 8]"]),
    "another width": (config(hidden_size=4), [NORM, "[8]", "[4]"]),
    "own Python code": (config(auto_map={"AutoModel": "m.M"}), ["config.json", "trust_remote"]),
    "own Python code of an inner model": (
        config(text_config={**CONFIG, "auto_map": {"AutoConfig": "m.C"}}), ["trust_remote"]),
    "own Python code four hundred levels deep": (
        rewrite("config.json",
                json.dumps(CONFIG)[:-1].encode() + b', "x": ' + b'{"a": ' * 400
                + b'{"auto_map": {}}' + b"}" * 401),
        ["config.json", "trust_remote"]),
    "own Python code of the tokenizer": (
        rewrite("tokenizer_config.json",
                {"chat_template": TEMPLATE, "auto_map": {"AutoTokenizer": ["t.T", None]}}),
        ["tokenizer_config.json", "trust_remote"]),
    "a table of other shape": (other(EMBED, "BF16", [8, 16]), [EMBED, "[8, 16]", "[16, 8]"]),
    "a table of three dimensions": (other(EMBED, "BF16", [16, 8, 1]), [EMBED, "[16, 8, 1]"]),
    "whole numbers for weights": (other(EMBED, "I8", [16, 8]), [EMBED, "I8", "quantization"]),
    "a norm of other length": (other(NORM, "BF16", [9]), [NORM, "[9]", "[8]"]),
    "cut in its data": (cut(-10), ["model.safetensors", "is cut"]),
    "cut in its header": (cut(100), ["model.safetensors", "is cut"]),
    "cut in its first bytes": (cut(5), ["model.safetensors", "5 bytes"]),
    "weights of no bytes": (cut(0), ["model.safetensors", "0 bytes"]),
    "bytes after the data": (
        rewrite("model.safetensors", safetensors(tensors()) + b"more"), ["something added"]),
    "a header of garbage": (raw_header(b"\xff" * 64), ["model.safetensors", "no JSON"]),
    "a header that is a list": (raw_header(b"[1]"), ["model.safetensors", "no JSON object"]),
    "a header of ten thousand brackets": (raw_header(b"[" * 10_000), ["model.safetensors"]),
    "a tensor twice": (
        raw_header(b'{"a": {"dtype": "U8", "shape": [0], "data_offsets": [0, 0]}, '
                   b'"a": {"dtype": "U8", "shape": [0], "data_offsets": [0, 0]}}'),
        ["model.safetensors", "a name twice"]),
    "half a character for a tensor's name": (
        raw_header(b'{"\\ud800": {"dtype": "U8", "shape": [0], "data_offsets": [0, 0]}}'),
        ["model.safetensors", "half a character"]),
    "metadata that is a number": (
        raw_header(b'{"__metadata__": 7}'), ["model.safetensors: __metadata__"]),
    "metadata with numbers": (
        raw_header(b'{"__metadata__": {"a": 7}}'), ["model.safetensors: __metadata__"]),
    "no tensors": (raw_header(b"{}"), ["hold no tensor"]),
    "an entry without a shape": (raw_header(b'{"a": {"dtype": "BF16"}}'), ["model.safetensors: a"]),
    "an entry with a shape below zero": (
        raw_header(b'{"a": {"dtype": "BF16", "shape": [-1], "data_offsets": [0, 0]}}'),
        ["model.safetensors: a", "-1"]),
    "a layer whose number has 5000 digits": (
        other(f"model.layers.{'9' * 5000}.input_layernorm.weight", "BF16", [9]), ["[9]", "[8]"]),
    "two tensors in one place": (
        rewrite("model.safetensors", at_places(("a", 0, 4), ("b", 2, 6))),
        ["model.safetensors: b", "begins at byte 2", "ends at 4"]),
    "a gap between two tensors": (
        rewrite("model.safetensors", at_places(("a", 0, 4), ("b", 6, 8))),
        ["model.safetensors: b", "begins at byte 6", "ends at 4"]),
    "a tensor that ends before it begins": (
        rewrite("model.safetensors", at_places(("a", 8, 4))), ["model.safetensors: a"]),
    "an entry longer than its shape": (
        raw_header(b'{"a": {"dtype": "BF16", "shape": [1], "data_offsets": [0, 9]}}'),
        ["model.safetensors: a", "takes 2 bytes"]),
    "a header longer than the file": (
        rewrite("model.safetensors", struct.pack("<Q", 1 << 62) + b"{}"), ["is cut"]),
    "a pickle under its name": (rewrite("model.safetensors", pickle.dumps([1] * 99)), ["no safe"]),
    "an archive under its name": (rewrite("model.safetensors", b"PK\x03\x04" + bytes(99)), []),
    "no weights": (without("model.safetensors"), ["no *.safetensors"]),
    "parts without an index": (sharded(None), [INDEX, "2 files say that they are parts"]),
    "a missing part": (
        sharded(places(), both=False), [INDEX, "model-00002-of-00002.safetensors", "not there"]),
    "an index that is not JSON": (sharded(b"{"), [INDEX, "JSON"]),
    "an index that is a list": (sharded([]), [INDEX, "holds list"]),
    "an index without places": (sharded({"metadata": {}}), [INDEX, "weight_map"]),
    "an index of text": (sharded({"weight_map": "all"}), [INDEX, "weight_map"]),
    "a tensor in another part": (
        sharded(places(**{EMBED: "model-00002-of-00002.safetensors"})), [INDEX, EMBED]),
    "a place outside of the folder": (
        sharded(places(**{EMBED: "../../etc/passwd"})), [INDEX, "'../../etc/passwd'", "outside"]),
    "an absolute place": (sharded(places(**{EMBED: "/etc/passwd"})), [INDEX, "'/etc/passwd'"]),
    "a place with a name of 5000 letters": (
        sharded(places(**{EMBED: "x" * 5000})), [INDEX, "'xxx", "not there"]),
    "a place that is a number": (sharded({"weight_map": {EMBED: 7}}), [INDEX, "'7'"]),
    "a place that is a list": (sharded({"weight_map": {EMBED: ["x"]}}), [INDEX, "['x']"]),
    "an adapter beside the weights": (
        rewrite("adapter_config.json", {"base_model_name_or_path": "somebody/else"}),
        ["adapter_config.json", "merge it"]),
    "no tokenizer": (without("tokenizer.json"), ["no tokenizer files"]),
    "no chat template": (rewrite("tokenizer_config.json", {}), ["no chat template"]),
    "no tokenizer_config.json": (without("tokenizer_config.json"), ["model"]),
    "a tokenizer_config.json that is a list": (
        rewrite("tokenizer_config.json", [1]), ["tokenizer_config.json", "holds list"]),
    "a tokenizer_config.json that is not JSON": (
        rewrite("tokenizer_config.json", b"{"), ["tokenizer_config.json"]),
    "a tokenizer that is none": (
        rewrite("tokenizer.json", {"version": "1.0", "model": {"type": "Guess"}}),
        ["tokenizer.json", "is no tokenizer"]),
    "a token without its text": (
        rewrite("tokenizer_config.json", {"chat_template": TEMPLATE, "eos_token": {"id": 1}}),
        ["tokenizer_config.json: eos_token", "{'id': 1}"]),
    "a template that is a number": (
        rewrite("tokenizer_config.json", {"chat_template": 7}), ["template"]),
    "named templates without names": (
        rewrite("tokenizer_config.json", {"chat_template": [{"x": 1}]}), ["template"]),
    "a template that is no Jinja": (
        rewrite("tokenizer_config.json", {"chat_template": "{% for"}), ["template"]),
    "a template in Latin-1": (rewrite("chat_template.jinja", b"caf\xe9"), ["chat_template.jinja"]),
    "a template that reaches outside": (
        rewrite("tokenizer_config.json",
                {"chat_template": "{{ ''.__class__.__mro__[1].__subclasses__() }}"}),
        ["template", "unsafe"]),
    "a template without end": (
        rewrite("tokenizer_config.json",
                {"chat_template": "{% for a in range(10**9) %}x{% endfor %}"}),
        ["template"]),
    "a template that writes 10 GB": (
        rewrite("tokenizer_config.json", {"chat_template": "{{ 'x' * 10**10 }}"}), ["template"]),
    "a template that doubles its text": (template(
        "{% set ns = namespace(x='aa') %}{% for i in range(60) %}"
        "{% set ns.x = ns.x ~ ns.x %}{% endfor %}{{ ns.x }}"), ["memory"]),
    "a template that pads to 100 GB": (template("{{ 'x'.center(10**11) }}"), ["memory"]),
    "a template that calls itself": (
        template("{% macro a() %}{{ a() }}{% endmacro %}{{ a() }}"), ["template", "recursion"]),
    "a template that divides by nothing": (template("{{ 1 // 0 }}"), ["template", "ZeroDivision"]),
    "a template that adds a text to a number": (template("{{ 1 + 'a' }}"), ["template", "TypeErr"]),
    "two templates of which one fails": (
        lambda root: (root / "chat_template.jinja").write_text("{{ 1 // 0 }}") and None,
        ["two different chat templates", "ZeroDivision"]),
    "two templates of which one writes 8 MB": (
        rewrite("chat_template.jinja", b"{% for a in range(900) %}{{ 'x' * 9000 }}{% endfor %}"),
        ["two different chat templates", "'xxx"]),
    "a template of 5 MB": (rewrite("chat_template.jinja", b"x" * 5_000_000), ["chat_template.jin"]),
    **{
        f"pickled weights in .{ending}": (
            rewrite(f"pytorch_model.{ending}", pickle.dumps({"a": 1})),
            [f"pytorch_model.{ending}", "pickled weights are not accepted"])
        for ending in ("bin", "pt", "pth", "ckpt", "pkl", "pickle", "joblib", "npz", "npy", "BIN")
    },
    "a pickled adapter beside": (
        rewrite("adapter_model.bin", pickle.dumps({})), ["adapter_model.bin", "pickled"]),
}  # fmt: skip


def checkpoints() -> Iterator[Case]:
    for name, (change, says) in CHECKPOINTS.items():

        def words(folder: Path, change: Callable[[Path], None] = change) -> list[object]:
            root = model(folder)
            change(root)
            return student(root)

        yield Case("checkpoint", name, words, ["{}/model", *says])
    for file in ("config.json", "model.safetensors", "tokenizer_config.json", "notes.txt"):
        for name, make, _ in odd_files():

            def odd(folder: Path, make: Any = make, file: str = file) -> list[object]:
                root = model(folder)
                (root / file).unlink(missing_ok=True)
                make(root / file)
                return student(root)

            if (file, name) != ("notes.txt", "a folder"):
                yield Case("checkpoint", f"{name} for {file}", odd, ["{}/model"])
    yield Case("checkpoint", "no folder", lambda folder: student(folder / "none"),
               ["{}/none", "no such folder"])  # fmt: skip
    yield Case("checkpoint", "a file for the folder",
               lambda folder: student(written("model", "x")(folder)), ["{}/model"])  # fmt: skip
    yield Case("checkpoint", "a name of 5000 letters",
               lambda folder: student("x" * 5000), ["student.path", "too long"])  # fmt: skip


DRAFTS: dict[str, tuple[Callable[[Path], None], list[str]]] = {
    "a published draft of pickles": (
        rewrite("pytorch_model.bin", pickle.dumps({})), ["pytorch_model.bin", "pickled"]),
    "a published draft with its own code": (config(auto_map={"AutoModel": "m.M"}), ["auto_map"]),
    "a published draft without weights": (without("model.safetensors"), ["no *.safetensors"]),
    "a published draft that is cut": (cut(-10), ["model.safetensors", "is cut"]),
    "a published draft that is no folder": (without("config.json"), ["config.json"]),
}  # fmt: skip


def drafts() -> Iterator[Case]:
    for name, (change, says) in DRAFTS.items():

        def words(folder: Path, change: Callable[[Path], None] = change) -> list[object]:
            root = model(folder)
            change(root)
            return ["release", TINY, "--dry-run", "--set", f"draft.init_from={root}"]

        yield Case("checkpoint", name, words, ["{}/model", *says])


# -- evidence --------------------------------------------------------------------------------

GATE = {"name": "g", "kind": "retention", "metric": "hit_rate", "reference": "teacher"}
POLICY = {"kind": "policy", "description": "d", "gates": [GATE]}


def items(rows: int = 400, value: str = "1") -> str:
    return "item_id,hit_rate\n" + "".join(f"i{n:04d},{value}\n" for n in range(rows))


def own(folder: Path) -> Path:
    from tests.unit.test_gate_command import own

    return own(folder, [1.0] * 400)


def gate(folder: Path, candidate: object) -> list[object]:
    policy = written("policy.yaml", json.dumps(POLICY))(folder)
    teacher = folder / "teacher"
    teacher.mkdir(exist_ok=True)
    written("items.csv", items())(teacher)
    return ["gate", "--policy", policy, "--candidate", f"c={candidate}", "--reference",
            f"teacher={teacher}"]  # fmt: skip


TABLES: dict[str, tuple[str, str | bytes, list[str]]] = {
    "is empty": ("items.csv", "", ["items.csv"]),
    "a header only": ("items.csv", "item_id,hit_rate\n", ["items.csv", "no items"]),
    "no ids": ("items.csv", "id,hit_rate\na,1\n", ["items.csv", "item_id"]),
    "another metric": ("items.csv", items().replace("hit_rate", "score"), ["hit_rate"]),
    "NaN": ("items.csv", items(value="nan"), ["hit_rate", "nan"]),
    "infinity": ("items.csv", items(value="inf"), ["hit_rate", "inf"]),
    "words": ("items.csv", items(value="good"), ["hit_rate", "good"]),
    "decimal commas": ("items.csv", items(value='"0,5"'), ["0,5", "write 0.5"]),
    "an empty cell": ("items.csv", items().replace("i0007,1", "i0007,"), ["i0007", "is empty"]),
    "an id twice": ("items.csv", items() + "i0003,0\n", ["'i0003' on lines 5, 402"]),
    "a cell too many": ("items.csv", items() + "x,1,2\n", ["line 402: 3 cells"]),
    "a column twice": ("items.csv", items().replace("hit_rate", "hit_rate,hit_rate"), []),
    "quotes that do not close": ("items.csv", items() + '"x,1\n', ["not CSV"]),
    "UTF-16": ("items.csv", items().encode("utf-16"), ["UTF-16"]),
    "NUL bytes": ("items.csv", items().encode() + b"\0\0", ["NUL"]),
    "Latin-1": ("items.csv", items().encode() + b"caf\xe9,1\n", ["not UTF-8"]),
    "semicolons": ("items.csv", items().replace(",", ";"), ["commas"]),
    "broken JSON": ("items.jsonl", '{"item_id": "a", "hit_rate": 1}\n{"item', ["line 2: not JSON"]),
    "JSON that is a list": ("items.jsonl", "[1]\n", ["line 1"]),
    "a key twice in JSON": ("items.jsonl", '{"item_id": "a", "item_id": "b"}\n', ["twice"]),
    "JSON nested deep": ("items.jsonl", "[" * 100_000 + "\n", ["line 1"]),
    "other items than the teacher's": ("items.csv", items().replace("i0", "j0"), ["item"]),
    "fewer items than the teacher's": ("items.csv", items(200), ["item"]),
}


def own_changed(change: Callable[[Path], None]) -> Callable[[Path], list[object]]:
    def words(folder: Path) -> list[object]:
        candidate = own(folder / "c")
        change(candidate)
        return gate(folder, candidate)

    return words


def summary(**changes: Any) -> Callable[[Path], None]:
    def change(root: Path) -> None:
        path = root / "summary.json"
        content = json.loads(path.read_text()) | changes
        path.write_text(json.dumps({k: v for k, v in content.items() if v != "gone"}))

    return change


def rows(change: Callable[[Any], Any]) -> Callable[[Path], None]:
    def rewritten(root: Path) -> None:
        import pandas as pd

        path = root / "items.parquet"
        change(pd.read_parquet(path)).to_parquet(path)

    return rewritten


def cut_file(name: str, size: int) -> Callable[[Path], None]:
    return lambda root: (root / name).write_bytes((root / name).read_bytes()[:size])


OWN: dict[str, tuple[Callable[[Path], None], list[str]]] = {
    "a summary that is not JSON": (rewrite("summary.json", b"{"), ["summary.json"]),
    "a summary that is a list": (rewrite("summary.json", []), ["summary.json"]),
    "an empty summary": (rewrite("summary.json", b""), ["summary.json"]),
    "a summary nested deep": (rewrite("summary.json", b"[" * 100_000), ["summary.json"]),
    "a version of tomorrow": (summary(schema_version=99), ["summary.json", "99"]),
    "a version that is text": (summary(schema_version="2"), ["summary.json", "'2'"]),
    "no version": (summary(schema_version="gone"), ["summary.json", "no version"]),
    "a kind that nobody knows": (summary(kind="guess"), ["summary.json", "guess"]),
    "a kind that is a list": (summary(kind=["accuracy"]), ["summary.json"]),
    "no bundle": (summary(bundle="gone"), ["summary.json", "bundle"]),
    "fewer items than it says": (summary(items_asked=500, items_scored=450), ["450 of the candidate's 500 items"]),
    "items below zero": (summary(items_asked=-1), ["summary.json", "items_asked"]),
    "a key too many": (summary(extra=1), ["summary.json", "extra"]),
    "a date that is none": (summary(measured_at="yesterday"), ["summary.json", "measured_at"]),
    "rows of another bundle": (
        rows(lambda frame: frame.assign(bundle="f" * 64)), ["items.parquet", "bundle"]),
    "rows of two bundles": (
        rows(lambda frame: frame.assign(bundle=["c"] * 399 + ["d" * 64])), ["1 of 400 rows"]),
    "rows of another engine": (
        rows(lambda frame: frame.assign(engine="other")), ["items.parquet", "engine"]),
    "an id twice": (
        rows(lambda frame: frame.assign(item_id=["i0", *frame["item_id"][1:-1], "i0"])), ["'i0'"]),
    "NaN": (rows(lambda frame: frame.assign(hit_rate=float("nan"))), ["hit_rate"]),
    "infinity": (rows(lambda frame: frame.assign(hit_rate=float("inf"))), ["hit_rate"]),
    "text for scores": (rows(lambda frame: frame.assign(hit_rate="good")), ["hit_rate"]),
    "no ids": (rows(lambda frame: frame.drop(columns="item_id")), ["item_id"]),
    "no rows": (rows(lambda frame: frame[:0]), ["items.parquet"]),
    "half the rows": (rows(lambda frame: frame[:200]), ["200 rows"]),
    "cut rows": (cut_file("items.parquet", 500), ["items.parquet", "Parquet"]),
    "rows of no bytes": (cut_file("items.parquet", 0), ["items.parquet"]),
    "text for Parquet": (rewrite("items.parquet", b"item_id,hit_rate\n"), ["items.parquet"]),
}  # fmt: skip


def evidence() -> Iterator[Case]:
    def case(name: str, words: Callable[[Path], list[object]], says: list[str]) -> Case:
        return Case("evidence", name, words, says, status=10, remedy=False)

    for name, (file, content, says) in TABLES.items():

        def plain(folder: Path, file: str = file, content: Any = content) -> list[object]:
            (folder / "c").mkdir()
            written(file, content)(folder / "c")
            return gate(folder, folder / "c")

        yield case(f"table: {name}", plain, ["INVALID", *says])
    for name, (change, says) in OWN.items():
        yield case(f"own folder: {name}", own_changed(change), ["INVALID", *says])
    yield case("an empty folder", lambda folder: _empty(folder), ["INVALID", "nothing that is"])
    yield case("two kinds at once", own_changed(rewrite("items.csv", items().encode())),
               ["INVALID", "several kinds"])  # fmt: skip
    for file in ("summary.json", "items.parquet"):
        for name, make, _ in odd_files():

            def odd(root: Path, make: Any = make, file: str = file) -> None:
                (root / file).unlink()
                make(root / file)

            yield case(f"{name} for {file}", own_changed(odd), ["INVALID"])
    yield Case("evidence", "no folder", lambda folder: gate(folder, folder / "none"),
               ["{}/none", "no such folder"])  # fmt: skip
    yield Case("evidence", "a file for the folder",
               lambda folder: gate(folder, written("c", "x")(folder)), ["{}/c", "is a file"])  # fmt: skip


def _empty(folder: Path) -> list[object]:
    (folder / "c").mkdir()
    return gate(folder, folder / "c")


CASES = [*prompts(), *checkpoints(), *drafts(), *evidence()]
