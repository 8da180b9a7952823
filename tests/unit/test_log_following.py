"""Which lines of an engine's log a run shows: few, the newest, and what it warns of."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

from tasks.engines import log_following
from tasks.engines.log_following import ENGINE_LOG, Following, chosen, level_of, lines_of


@pytest.mark.parametrize(
    ("line", "level"),
    [
        ("(EngineCore pid=12) INFO 11-29 21:17:06 [core.py:1510] Starting", logging.INFO),
        ("WARNING 11-29 21:17:06 [cuda.py:1] no flash attention", logging.WARNING),
        ("/x/y.py:3: FutureWarning: will go", logging.WARNING),
        ("(EngineCore pid=12) ERROR 11-29 21:17:06 [core.py:1510] died", logging.ERROR),
        ("Traceback (most recent call last):", logging.ERROR),
        ("torch.OutOfMemoryError: CUDA out of memory", logging.ERROR),
        ("{'loss': 1.2, 'errors': 0}", logging.INFO),
        ("0 errors, no warnings", logging.INFO),
    ],
)
def test_the_level_is_the_tools_own(line: str, level: int) -> None:
    assert level_of(line) == level


def test_of_a_progress_bar_the_last_state_counts_and_colours_go() -> None:
    text = "\x1b[36mloading\x1b[0m\n10%|#\r50%|##\r90%|###\r\n\n   \ndone\r\n"
    assert lines_of(text) == ["loading", "90%|###", "done"]
    assert len(lines_of("x" * 5000)[0]) == log_following.LONGEST + 1


def test_of_a_look_the_newest_and_every_new_warning_are_shown_in_their_order() -> None:
    lines = ["a", "WARNING slow 1", "b", "WARNING slow 2", "c", "d", "ERROR gone"]
    seen: set[str] = set()
    assert chosen(lines, seen) == ["WARNING slow 1", "c", "d", "ERROR gone"]
    assert chosen(["WARNING slow 3", "e"], seen) == ["e"]


@pytest.fixture
def shown(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    texts: list[str] = []

    class Kept(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            texts.append(record.getMessage())

    handler = Kept()
    monkeypatch.setattr(ENGINE_LOG, "handlers", [handler])
    monkeypatch.setattr(ENGINE_LOG, "propagate", False)
    monkeypatch.setattr(ENGINE_LOG, "level", logging.INFO)
    ENGINE_LOG.manager._clear_cache()  # type: ignore[attr-defined]
    yield texts
    ENGINE_LOG.manager._clear_cache()  # type: ignore[attr-defined]


def test_what_another_process_wrote_before_is_not_shown(tmp_path: Path, shown: list[str]) -> None:
    log = tmp_path / "serve-bf16.log"
    log.write_text("old\n")
    following = Following(log, log.stat().st_size, {})
    with log.open("a") as out:
        out.write("new\nand the last without an end")
    following.close(failed=False)
    assert shown == ["new", "and the last without an end"]


def test_no_process_shows_more_than_its_share(
    tmp_path: Path, shown: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log_following, "WARNINGS", 1000)
    log = tmp_path / "train.log"
    log.write_text("".join(f"WARNING {'x' * n}\n" for n in range(200)))
    Following(log, 0, {}).close(failed=False)
    assert len(shown) == log_following.MOST + 1
    assert (
        shown[-1] == f"{log_following.MOST} lines shown, {200 - log_following.MOST} more in {log}"
    )


def test_a_process_that_failed_shows_its_last_lines_whole(tmp_path: Path, shown: list[str]) -> None:
    log = tmp_path / "train.log"
    log.write_text("".join(f"step {n}\n" for n in range(100)) + "ValueError: no\n")
    Following(log, 0, {"SOME_API_KEY": "a-key-of-the-child"}).close(failed=True)
    assert shown == [*(f"step {n}" for n in range(86, 100)), "ValueError: no"]


def test_a_log_that_is_gone_harms_nobody(tmp_path: Path, shown: list[str]) -> None:
    following = Following(tmp_path / "gone.log", 0, {})
    following.close(failed=True)
    following.close(failed=True)
    assert shown == []


def test_what_a_server_says_of_being_ended_is_not_shown(tmp_path: Path, shown: list[str]) -> None:
    log = tmp_path / "serve.log"
    log.write_text("ready\n")
    following = Following(log, 0, {})
    following.ends_here()
    with log.open("a") as out:
        out.write("ERROR output_handler failed\n")
    following.close(failed=False)
    assert shown == ["ready"]


def test_a_childs_own_key_is_hidden(tmp_path: Path, shown: list[str]) -> None:
    log = tmp_path / "serve.log"
    log.write_text("serving with a-key-of-the-child\n")
    Following(log, 0, {"VLLM_API_KEY": "a-key-of-the-child"}).close(failed=False)
    assert shown == ["serving with ***"]
