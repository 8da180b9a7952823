"""The files beside a model's weights: is what was written next to them still the same?

A derived model (merged, quantized, pruned) must talk as its parent does. Depending on the library
version a chat template lies in `tokenizer_config.json` or in `chat_template.jinja`, and a tool
that looks in one place only finds none or takes a default one. Here both places count, what is
compared is the *rendered* text (and, where the tokenizer loads, its token ids), and nothing is
ever put in place of a missing file.

Weights are safetensors only, and a folder that asks for its own Python code is refused.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from registry.digests import digest_of, digest_of_folder
from registry.errors import Problem, StageFailed
from registry.safetensors_headers import Tensor, tensors
from tasks.engines.template_text import LONGEST_TEMPLATE, Conversation, outcome, rendered

CONFIG = "config.json"
TOKENIZER_CONFIG = "tokenizer_config.json"
TEMPLATE_FILE = "chat_template.jinja"
ADAPTER = "adapter_config.json"
_MAY_NAME_CODE = (
    *(CONFIG, "generation_config.json", "processor_config.json", "preprocessor_config.json"),
)

SIDE_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    TOKENIZER_CONFIG,
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    TEMPLATE_FILE,
    "generation_config.json",
)
"""What travels with the weights, byte for byte, whenever a model is derived from another."""

PROBES: tuple[tuple[Conversation, bool], ...] = (
    (({"role": "user", "content": "Where is order 4711? 运费多少？"},), True),
    (
        (
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": " Hello\n"},
            {"role": "assistant", "content": "Hi."},
            {"role": "user", "content": "再见"},
        ),
        True,
    ),
    (({"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Hi."}), False),
)
"""Conversations (and whether the assistant is asked to answer) that tell two templates apart."""

_SPECIAL_TOKENS = ("bos_token", "eos_token", "pad_token", "unk_token", "sep_token", "cls_token")
LONGEST_SHOWN = 300
"""Characters of a rendering that a message shows."""
_PICKLES = (
    *(".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle", ".joblib", ".npy", ".npz", ".dill"),
)
"""Files that run code when they are read, or may (a NumPy file can hold pickled objects)."""


def render(
    folder: Path | str, conversation: Conversation, *, add_generation_prompt: bool = True
) -> str:
    """`conversation` as the text that the model in `folder` is given.

    Raises `StageFailed` for a folder without a chat template or with two different ones.
    """
    root = Path(folder)
    template = chat_template(root, f"{root}")
    return rendered(template, _special_tokens(root), conversation, add_generation_prompt)


def check_side_files(folder: Path | str, reference: Path | str, stage: str) -> None:
    """Refuse `folder`, written by `stage`, unless it talks exactly as `reference` does.

    Raises `StageFailed` naming folder, file and stage: no tokenizer files, no chat template, two
    different chat templates, another rendering, other token ids for the same text.
    """
    root, parent = Path(folder), Path(reference)
    wanted = chat_template(parent, f"{parent} (what {stage} started from)")
    found = chat_template(root, f"{root}, written by stage {stage}")
    if problem := tokenizer_problem(root):
        raise StageFailed(Problem(f"{root}, written by stage {stage}", problem))
    for conversation, prompt in PROBES:
        expected = outcome(wanted, _special_tokens(parent), conversation, prompt)
        said = outcome(found, _special_tokens(root), conversation, prompt)
        if said != expected:
            raise StageFailed(
                Problem(
                    f"{root}, written by stage {stage}",
                    f"the chat template ({_template_places(root)}) renders {_shown(said)} where "
                    f"that of {parent} renders {_shown(expected)}",
                    f"copy the side files of {parent} unchanged",
                )
            )
        ids, expected_ids = _token_ids(root, said), _token_ids(parent, expected)
        if None not in (ids, expected_ids) and ids != expected_ids:
            raise StageFailed(
                Problem(
                    f"{root / 'tokenizer.json'}, written by stage {stage}",
                    f"other token ids than {parent} for {_shown(said)}: "
                    f"{str(ids)[:LONGEST_SHOWN]} and {str(expected_ids)[:LONGEST_SHOWN]}",
                    f"copy the side files of {parent} unchanged",
                )
            )


def check_weights(folder: Path | str, stage: str) -> None:
    """Refuse a folder that is not plain safetensors weights with a standard architecture.

    Raises `StageFailed`: not a model folder, pickled weights, no safetensors, own Python code.
    """
    root = Path(folder)
    if not (root / CONFIG).is_file():
        raise StageFailed(Problem(str(root), f"no {CONFIG}: not a model folder (stage {stage})"))
    problems = [
        Problem(
            str(path),
            f"pickled weights are not accepted (stage {stage})",
            "save the model with `save_pretrained`, which writes safetensors",
        )
        for path in sorted(root.iterdir())
        if path.suffix.lower() in _PICKLES
    ]
    if not any(root.glob("*.safetensors")):
        problems.append(
            Problem(
                str(root),
                f"no *.safetensors file (stage {stage})",
                "copy its weights there, as safetensors",
            )
        )
    if (root / ADAPTER).exists():
        problems.append(
            Problem(
                str(root / ADAPTER),
                "is an adapter beside the weights: transformers applies it unasked, vLLM does not "
                f"(stage {stage})",
                "merge it into the weights, or remove it",
            )
        )
    for name in (*_MAY_NAME_CODE, TOKENIZER_CONFIG):
        if _asks_for_code(_json(root / name)):
            problems.append(
                Problem(
                    str(root / name),
                    f"`auto_map` asks for Python code from the folder (stage {stage})",
                    "use a model whose architecture transformers knows; "
                    "trust_remote_code is never on",
                )
            )
    if problems:
        raise StageFailed(problems)


def _asks_for_code(content: Any) -> bool:
    """Whether `auto_map` stands anywhere: models of models keep the inner one's settings inside."""
    open_ = [content]
    while open_:
        one = open_.pop()
        if isinstance(one, dict):
            if "auto_map" in one:
                return True
            open_ += one.values()
        elif isinstance(one, list):
            open_ += one
    return False


def stored_tensors(folder: Path | str) -> dict[str, Tensor]:
    """Every tensor of a folder's safetensors files by name; only the headers are read."""
    return tensors(Path(folder))


def copy_side_files(source: Path, target: Path) -> list[str]:
    """Copy tokenizer, chat template and generation defaults unchanged; the names copied."""
    copied = [name for name in SIDE_FILES if (source / name).is_file()]
    for name in copied:
        shutil.copyfile(source / name, target / name)
    return copied


def end_token_ids(folder: Path | str) -> list[int]:
    """The ids that end a generation: of `generation_config.json`, else of `config.json`.

    That order is the engines' own. The tokenizer's `eos_token` is not asked: SmolLM2's GGUF names
    the token that *opens* a turn there. Empty when neither file says.
    """
    root = Path(folder)
    for name in ("generation_config.json", CONFIG):
        ids = _json(root / name).get("eos_token_id")
        if ids is not None:
            return sorted(ids) if isinstance(ids, list) else [ids]
    return []


def tokenizer_problem(root: Path) -> str | None:
    """What is wrong with the tokenizer's files; None when nothing is."""
    whole = ("tokenizer.json", "tokenizer.model")
    pair = all((root / name).is_file() for name in ("vocab.json", "merges.txt"))
    if not pair and not any((root / name).is_file() for name in whole):
        return "no tokenizer files (tokenizer.json, or vocab.json with merges.txt)"
    if not (root / TOKENIZER_CONFIG).is_file():
        return f"no {TOKENIZER_CONFIG}"
    return None


def tokenizer_digest(root: Path) -> str:
    """Digest of the vocabulary: equal for models of one tokenizer family.

    Other bytes of `tokenizer.json` (padding, truncation) change when a trainer saves it again.
    """
    whole = _json(root / "tokenizer.json")
    if whole:
        added = {token["content"]: token["id"] for token in whole.get("added_tokens") or ()}
        return digest_of({"vocabulary": whole.get("model", {}).get("vocab"), "added": added})
    files = [root / name for name in ("tokenizer.model", "vocab.json", "merges.txt")]
    return digest_of_folder(root, [file for file in files if file.is_file()])


# -- templates -------------------------------------------------------------------------------


def chat_template(root: Path, where: str) -> str:
    """The folder's one chat template. Two places are fine when both render the same."""
    if not root.is_dir():
        raise StageFailed(Problem(where, "no such folder"))
    if not any((root / name).is_file() for name in (*SIDE_FILES[:3], "vocab.json")):
        raise StageFailed(Problem(where, tokenizer_problem(root) or "no tokenizer files"))
    found = _templates(root)
    if not found:
        raise StageFailed(
            Problem(
                where,
                f"no chat template (neither in {TOKENIZER_CONFIG} nor in {TEMPLATE_FILE})",
                "write the template that the model was trained with; no default is ever used",
            )
        )
    first, *others = found.values()
    tokens = _special_tokens(root)
    for other in others:
        for conversation, prompt in PROBES:
            one = outcome(first, tokens, conversation, prompt)
            two = outcome(other, tokens, conversation, prompt)
            if one != two:
                raise StageFailed(
                    Problem(
                        where,
                        f"two different chat templates: {TOKENIZER_CONFIG} renders {_shown(one)}, "
                        f"{TEMPLATE_FILE} renders {_shown(two)}",
                        "remove the one that was not used in training",
                    )
                )
    return first


def check_template(root: Path) -> None:
    """Refuse a folder whose chat template cannot render a plain question.

    Raises `StageFailed`: there is none, two differ, it is no Jinja, it reaches out of its sandbox.
    """
    from jinja2 import TemplateError

    template = chat_template(root, str(root))
    try:
        rendered(template, _special_tokens(root), *PROBES[0])
    except TemplateError as error:
        raise StageFailed(
            Problem(
                f"{root}: chat template ({_template_places(root)})",
                f"cannot render a plain question: {type(error).__name__}: {str(error)[:200]}",
                "take the template that the model was trained with",
            )
        ) from None


def _templates(root: Path) -> dict[str, str]:
    found: dict[str, str] = {}
    inside = _json(root / TOKENIZER_CONFIG).get("chat_template")
    if isinstance(inside, list):  # several named ones; engines take `default`
        named = [one for one in inside if isinstance(one, dict)]
        inside = {one.get("name"): one.get("template") for one in named}.get("default", inside)
    if inside is not None and not isinstance(inside, str):
        raise StageFailed(
            Problem(
                f"{root / TOKENIZER_CONFIG}: chat_template",
                f"is {str(inside)[:60]}, no text",
                "write the template that the model was trained with",
            )
        )
    if inside:
        found[TOKENIZER_CONFIG] = inside
    if (root / TEMPLATE_FILE).is_file():
        try:
            if (root / TEMPLATE_FILE).stat().st_size > 4 * LONGEST_TEMPLATE:
                raise StageFailed(
                    Problem(
                        str(root / TEMPLATE_FILE),
                        f"has more than {4 * LONGEST_TEMPLATE} bytes",
                        "take the template that the model was trained with",
                    )
                )
            found[TEMPLATE_FILE] = (root / TEMPLATE_FILE).read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise StageFailed(
                Problem(
                    str(root / TEMPLATE_FILE),
                    f"byte {error.start} is not UTF-8",
                    "save the file as UTF-8",
                )
            ) from None
    return found


def _shown(text: str) -> str:
    return repr(text[:LONGEST_SHOWN])


def _template_places(root: Path) -> str:
    return " and ".join(_templates(root))


def _special_tokens(root: Path) -> dict[str, str]:
    """`{"eos_token": "<|end|>", ...}`; a token may be written as text or as `{"content": ...}`."""
    config = _json(root / TOKENIZER_CONFIG)
    written = {name: config[name] for name in _SPECIAL_TOKENS if config.get(name)}
    tokens: dict[str, str] = {}
    for name, token in written.items():
        text = token.get("content") if isinstance(token, dict) else token
        if not isinstance(text, str):
            raise StageFailed(
                Problem(
                    f"{root / TOKENIZER_CONFIG}: {name}",
                    f"is {str(token)[:60]}, no token's text",
                    "take the model's own file",
                )
            )
        tokens[name] = text
    return tokens


def _token_ids(root: Path, text: str) -> list[int] | None:
    """Token ids of `text`; None where the tokenizer is not one file or cannot be loaded."""
    from tokenizers import Tokenizer

    try:
        tokenizer = Tokenizer.from_file(str(root / "tokenizer.json"))
    except Exception:  # the library raises plain `Exception` for missing and unreadable files
        return None
    ids: list[int] = tokenizer.encode(text, add_special_tokens=False).ids
    return ids


def _json(path: Path) -> dict[str, Any]:
    """A JSON object of a model folder; empty when there is no such file."""
    if not path.is_file():
        return {}
    try:
        content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        what = f"cannot be read as JSON: {error}"
        raise StageFailed(Problem(str(path), what, "take the model's own file")) from None
    if not isinstance(content, dict):
        kind = type(content).__name__
        raise StageFailed(
            Problem(str(path), f"holds {kind}, not a JSON object", "take the model's own file")
        )
    return content
