"""What the sources may not do; each claim of docs/security.md has a test here or is named there."""

from __future__ import annotations

import ast
import html
import json
import logging
import os
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from urllib.parse import quote, quote_plus

import pytest

from registry.errors import InfrastructureError, Problem, UserError
from registry.redaction import (
    blot,
    is_secret,
    redact_logs,
    redacted,
    secrets_aside,
    without_secrets,
)
from registry.settings import CHECKOUT
from tests.planted import ALL, WORDS, leaks

FOLDERS = ("flows", "tasks", "registry", "recipes", "eval_suites")
AUTO = ("AutoTokenizer", "AutoModelForCausalLM", "AutoConfig", "AutoModel")


@cache
def calls() -> list[tuple[str, ast.Call]]:
    """Every call in the sources, with its place."""
    return list(_calls())


def _calls() -> Iterator[tuple[str, ast.Call]]:
    for folder in FOLDERS:
        for path in sorted((CHECKOUT / folder).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.Call):
                    yield f"{path.relative_to(CHECKOUT)}:{node.lineno}", node


def test_no_string_reaches_a_shell() -> None:
    found = []
    for place, call in calls():
        name = ast.unparse(call.func)
        shell = [one for one in call.keywords if one.arg == "shell"]
        if shell or name in ("os.system", "os.popen", "subprocess.getoutput", "eval", "exec"):
            found.append(f"{place} {name}")
        if name.endswith("create_subprocess_shell"):
            found.append(f"{place} {name}")
    assert found == []


def test_the_one_shell_that_is_started_runs_a_text_of_ours() -> None:
    found = []
    for place, call in calls():
        for node in ast.walk(call):
            words = [ast.unparse(one) for one in node.elts] if isinstance(node, ast.List) else []
            if any(word.strip("'").rpartition("/")[2] in ("sh", "bash") for word in words):
                found.append((place.partition(":")[0], words[1:3]))
    assert found == [("tasks/engines/guards.py", ["'-c'", "self.SCRIPT"])]


def test_remote_code_is_on_nowhere_and_off_where_a_model_is_loaded() -> None:
    found = []
    for place, call in calls():
        name = ast.unparse(call.func)
        asked = {one.arg: one.value for one in call.keywords}
        given = asked.get("trust_remote_code")
        if given is not None and not (isinstance(given, ast.Constant) and given.value is False):
            found.append(f"{place} {name} switches it on")
        loads = name in {
            f"{one}.{how}" for one in AUTO for how in ("from_pretrained", "from_config")
        }
        if loads and given is None and None not in asked:
            found.append(f"{place} {name} leaves it to the library")
    assert found == []


def test_nothing_is_unpickled() -> None:
    named = (
        "pickle.load",
        "pickle.loads",
        "joblib.load",
        "dill.load",
        "torch.load",
        "yaml.unsafe_load",
        "yaml.full_load",
        "pd.read_pickle",
        "pandas.read_pickle",
        "cloudpickle.load",
        "cloudpickle.loads",
        "marshal.loads",
        "shelve.open",
    )
    found = [f"{place} {ast.unparse(call.func)}" for place, call in calls()
             if ast.unparse(call.func) in named]  # fmt: skip
    assert found == []
    numpy = [place for place, call in calls() for one in call.keywords if one.arg == "allow_pickle"]
    assert numpy == []


def test_yaml_is_read_by_the_safe_loader_only() -> None:
    for place, call in calls():
        if ast.unparse(call.func) == "yaml.load":
            loader = ast.unparse(call.args[1])
            assert loader in ("_UniqueKeyLoader", "yaml.SafeLoader"), place


# -- secrets ---------------------------------------------------------------------------------


@pytest.mark.parametrize("name", sorted(WORDS))
def test_a_child_does_not_see_a_secret(name: str) -> None:
    assert is_secret(name, WORDS[name])
    environment = {"PATH": "/bin", "TOKENIZERS_PARALLELISM": "false", name: WORDS[name]}
    assert sorted(without_secrets(environment)) == ["PATH", "TOKENIZERS_PARALLELISM"]


@pytest.mark.parametrize(
    "address",
    [
        "postgresql://a:word@h/db",
        "http://a:word@h",
        "http://word@h",
        "mysql+pymysql://a:word@h:1/x",
        "postgresql://a:pa/word@h/db",
        "postgresql://a:it's#word?@h/db",
        "redis://:word/word@h",
    ],
)
def test_an_address_with_a_password_is_a_secret_whatever_its_name(address: str) -> None:
    assert is_secret("ANYTHING", address)
    assert "word" not in redacted(f"no answer from {address}")
    for harmless in ("http://h/a@b", "http://h:80/a@b", "postgresql://h:5432/db", "s3://b/a:b@c"):
        assert not is_secret("ANYTHING", harmless)
        assert redacted(f"from {harmless} and a@b") == f"from {harmless} and a@b"


@pytest.mark.parametrize(
    "word",
    ['quo"ted-secret', "back\\slash-secret", "with/slash=secret", "<tag>&secret", "geheim-é-secret",
     "line-one-of-a-secret-key\nline-two-of-a-secret-key", "bytes-\udcff-secret"],
)  # fmt: skip
def test_a_secret_is_hidden_however_it_is_spelled(word: str) -> None:
    environment = {"SOME_KEY": word}
    texts = [word, json.dumps(word), json.dumps(word, ensure_ascii=False), repr(word), str([word]),
             html.escape(word), word.splitlines()[0], word.splitlines()[-1]]  # fmt: skip
    if word.isprintable():
        texts += [quote(word), quote(word, safe=""), quote_plus(word)]
    for text in texts:
        assert "secret" not in redacted(f"<{text}>", environment), text


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    "part", ["x://a:", "a.", "?a-", "Bearer ", "token", "sk-a", "://", "@", "a1"]
)
def test_a_text_of_a_megabyte_that_somebody_answers_is_read_in_one_go(part: str) -> None:
    """A pattern that begins anew at every character would take an hour."""
    text = f"?{part * (1_000_000 // len(part))}:// ="
    assert redacted(f"{text} http://a:word@h", {}).endswith(" http://a:***@h")


@pytest.mark.parametrize(
    "name", ["MYSQL_PWD", "DB_PASS", "GITHUB_PAT", "OPENAI_API_KEYS", "CLIENT_SECRETS"]
)
def test_names_of_secrets_of_others(name: str) -> None:
    assert is_secret(name, "x")
    for harmless in ("PWD", "OLDPWD", "PATH", "MAX_TOKENS", "KEYBOARD", "PASSENGERS"):
        assert not is_secret(harmless, "x")


@pytest.mark.parametrize(
    ("url", "answer", "left"),
    [
        (
            "https://hooks.example.com/services/T000/B000/xxPLANTEDxxxxxxxxxxxxxxxx",
            "The requested URL /services/T000/B000/xxPLANTEDxxxxxxxxxxxxxxxx was not found",
            "The requested URL /*** was not found",
        ),
        (
            "https://who:passwordpassword@h.example.com/bot/v2/hook/2f1c-PLANTED-0a9b-4c3d",
            "no hook 2f1c-PLANTED-0a9b-4c3d at this host, passwordpassword",
            "no hook *** at this host, ***",
        ),
        (
            "https://oapi.example.com/robot/send?access_token=PLANTED0123456789abcdef&x=1",
            "token PLANTED0123456789abcdef does not exist; /robot/send",
            "token *** does not exist; /robot/send",
        ),
    ],
)
def test_of_a_webhook_the_path_is_as_secret_as_the_address(
    url: str, answer: str, left: str
) -> None:
    environment = {"PILOTAGE_NOTIFY_URL": url}
    assert redacted(answer, environment) == left
    assert "PLANTED" not in redacted(f"POST {url} failed", environment)


def test_every_error_of_ours_is_without_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, word in WORDS.items():
        monkeypatch.setenv(name, word)
    for word in ALL[: len(WORDS)]:
        for error in (InfrastructureError(f"said {word}"), UserError.at(word, word, word)):
            assert leaks(f"{error}{error!r}".encode()) == []
        assert leaks(repr(Problem(word, word, word)).encode()) == []


def test_no_line_of_a_log_and_no_traceback_holds_a_secret(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for name, word in WORDS.items():
        monkeypatch.setenv(name, word)
    redact_logs()
    log = logging.getLogger("some.library")
    for word in WORDS.values():
        log.warning("key %s", word)
        try:
            raise ValueError(f"refused {word}")
        except ValueError:
            log.exception("with its traceback")
    assert "with its traceback" in caplog.text and "ValueError: refused ***" in caplog.text
    assert leaks(caplog.text.encode()) == []


def test_a_line_that_cannot_be_written_stops_nothing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Odd:
        def __str__(self) -> str:
            raise RuntimeError("cannot be shown")

    monkeypatch.setenv("SOME_KEY", "bytes-\udcff-secret")
    redact_logs()
    record = logging.getLogRecordFactory()("n", logging.INFO, "f", 1, "%s", (Odd(),), None)
    assert record.args
    logging.getLogger("some.library").warning("plain")
    assert "plain" in caplog.text


def test_what_a_child_said_of_its_key_is_blotted_in_place(tmp_path: Path) -> None:
    file = tmp_path / "log"
    word = WORDS["PILOTAGE_TEACHER_API_KEY"]
    file.write_text(f"Bearer {word}\nfine\n{word}", encoding="utf-8")
    size = file.stat().st_size
    blot(file, [word])
    assert (leaks(file.read_bytes()), file.stat().st_size) == ([], size)
    assert b"\nfine\n" in file.read_bytes()
    blot(tmp_path / "none", [word])


def test_what_is_set_aside_is_hidden_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTHER_TOOLS_TOKEN", "planted-word")
    monkeypatch.setenv("RAY_AUTH_TOKEN", "of-the-library")
    with pytest.raises(RuntimeError), secrets_aside(but="RAY_"):
        assert "OTHER_TOOLS_TOKEN" not in os.environ
        assert os.environ["RAY_AUTH_TOKEN"] == "of-the-library"
        assert redacted("it says planted-word") == "it says ***"
        raise RuntimeError
    assert os.environ["OTHER_TOOLS_TOKEN"] == "planted-word"
    assert redacted("it says planted-word") == "it says ***"
