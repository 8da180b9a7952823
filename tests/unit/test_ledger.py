"""The ledger's chain: whatever is done to a line, the first bad one is found and named."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Sequence
from contextlib import closing
from datetime import UTC, datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest
import typer
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError
from typer.testing import CliRunner

from flows import ledger_commands
from registry.digests import digest_of
from registry.errors import UserError
from registry.ledger import (
    EMPTY,
    NO_HASH,
    Broken,
    Draft,
    Entry,
    Head,
    Ledger,
    LedgerDamaged,
    LedgerMoved,
    Move,
    aliases_of,
    anchor_of,
    verify,
)
from registry.ledger_lines import chained
from registry.ledger_text import documents, export, verify_file

MODEL = "freight-assistant"
NOON = datetime(2026, 3, 1, 12, 0, 0, 123456, tzinfo=UTC)


def draft(number: int, **changes: Any) -> Draft:
    told: dict[str, Any] = {
        "at": NOON + timedelta(hours=number),
        "actor": "nightly",
        "action": "promote",
        "moves": {"champion": Move(before=number - 1 or None, after=number)},
        "bundle": f"{number:064x}",
        "evidence": {"accuracy": "a" * 64},
        "policy": "b" * 64,
        "waivers": ["slower on long prompts"],
        "reason": f"Grund {number} \u2028 größer",
        "details": {"release": "c" * 64},
    }
    return Draft(**{**told, **changes})


def chain(length: int) -> list[Entry]:
    lines: list[Entry] = []
    for number in range(1, length + 1):
        lines.append(chained(MODEL, draft(number), end(lines)))
    return lines


def end(lines: Sequence[Entry]) -> Head:
    return Head(len(lines), lines[-1].hash) if lines else EMPTY


def number_of(broken: Broken | None) -> int | None:
    return broken.sequence if broken is not None else None


CHANGES: dict[str, Any] = {
    "model": "another",
    "sequence": 77,
    "at": NOON - timedelta(microseconds=1),
    "actor": "somebody else",
    "action": "rollback",
    "moves": {"champion": Move(before=1, after=99)},
    "bundle": "",
    "evidence": {},
    "policy": "d" * 64,
    "waivers": [],
    "reason": "another",
    "details": {"release": "e" * 64},
    "previous": "f" * 64,
    "hash": "f" * 64,
}


def test_every_field_of_a_line_is_among_the_changes() -> None:
    assert set(CHANGES) == set(Entry.model_fields)


# -- a chain ---------------------------------------------------------------------------------


def test_a_line_names_the_one_before_and_hashes_everything_else() -> None:
    first, second = chain(2)
    assert (first.sequence, first.previous) == (1, NO_HASH)
    assert (second.sequence, second.previous) == (2, first.hash)
    told = second.model_dump(mode="json")
    assert told.pop("hash") == digest_of(told)
    assert told["at"] == "2026-03-01T14:00:00.123456Z"


def test_times_are_utc_whatever_zone_they_are_told_in() -> None:
    told = draft(1, at=NOON.astimezone(timezone(timedelta(hours=8))))
    assert chained(MODEL, told, EMPTY) == chained(MODEL, draft(1, at=NOON), EMPTY)
    with pytest.raises(ValidationError):
        draft(1, at=datetime(2026, 3, 1))


def test_without_a_time_a_line_gets_the_moment_of_adding_it() -> None:
    before = datetime.now(UTC)
    made = chained(MODEL, draft(1, at=None), EMPTY)
    assert before <= made.at <= datetime.now(UTC)


def test_a_line_from_before_a_field_was_added_keeps_its_hash() -> None:
    old = json.loads(chain(1)[0].body)
    del old["details"]
    line = Entry.model_validate({**old, "hash": digest_of(old)})
    assert line.details == {}
    assert verify([line], None) is None


@given(st.integers(0, 8), st.data())
def test_a_whole_chain_is_whole_by_any_of_its_anchors(length: int, data: st.DataObject) -> None:
    lines = chain(length)
    anchored = data.draw(st.integers(0, length))
    assert verify(lines, None) is None
    assert verify(lines, end(lines[:anchored])) is None


@given(st.integers(1, 8), st.data())
def test_an_anchor_of_which_one_tag_is_written_already_is_no_break(
    length: int, data: st.DataObject
) -> None:
    lines = chain(length)
    number = data.draw(st.integers(1, length))
    assert verify(lines, Head(number - 1, lines[number - 1].hash)) is None


@given(st.integers(1, 8), st.data())
def test_a_changed_field_is_found_and_its_line_named(length: int, data: st.DataObject) -> None:
    lines = chain(length)
    place = data.draw(st.integers(1, length))
    field = data.draw(st.sampled_from(sorted(CHANGES)))
    lines[place - 1] = lines[place - 1].model_copy(update={field: CHANGES[field]})
    assert number_of(verify(lines, None)) == place


@given(st.integers(1, 8), st.data())
def test_a_line_that_was_changed_and_hashed_anew_is_named(length: int, data: st.DataObject) -> None:
    lines = chain(length)
    anchor = end(lines)
    place = data.draw(st.integers(1, length))
    changed = lines[place - 1].model_copy(update={"reason": "never mind"})
    lines[place - 1] = changed.model_copy(update={"hash": changed.digest})
    assert number_of(verify(lines, anchor)) == place


@given(st.integers(1, 8), st.data())
def test_a_chain_that_was_made_anew_from_some_line_on_is_found_by_its_anchor(
    length: int, data: st.DataObject
) -> None:
    lines = chain(length)
    place = data.draw(st.integers(1, length))
    anchored = data.draw(st.integers(place, length))
    anchor = end(lines[:anchored])
    forged = lines[: place - 1]
    for number in range(place, length + 1):
        forged.append(chained(MODEL, draft(number, actor="a forger"), end(forged)))
    assert number_of(verify(forged, anchor)) == anchored
    assert verify(forged, None) is None


@given(st.integers(1, 8), st.data())
def test_a_removed_line_is_found_and_named(length: int, data: st.DataObject) -> None:
    lines = chain(length)
    anchor = end(lines)
    place = data.draw(st.integers(1, length))
    del lines[place - 1]
    assert number_of(verify(lines, anchor)) == place


@given(st.integers(2, 8), st.data())
def test_removed_lines_whose_followers_got_new_numbers_are_found(
    length: int, data: st.DataObject
) -> None:
    lines = chain(length)
    place = data.draw(st.integers(1, length - 1))
    left = [*lines[: place - 1], *lines[place:]]
    renumbered = [one.model_copy(update={"sequence": n}) for n, one in enumerate(left, start=1)]
    assert number_of(verify(renumbered, None)) == place


@given(st.integers(2, 8), st.data())
def test_exchanged_lines_are_found(length: int, data: st.DataObject) -> None:
    lines = chain(length)
    first = data.draw(st.integers(1, length - 1))
    second = data.draw(st.integers(first + 1, length))
    lines[first - 1], lines[second - 1] = lines[second - 1], lines[first - 1]
    assert number_of(verify(lines, None)) == first


@given(st.integers(1, 8), st.data())
def test_a_line_that_is_there_twice_is_found(length: int, data: st.DataObject) -> None:
    lines = chain(length)
    place = data.draw(st.integers(1, length))
    lines.insert(data.draw(st.integers(place, length)), lines[place - 1])
    assert number_of(verify(lines, None)) == place


@given(st.integers(1, 8), st.data())
def test_a_line_put_in_between_is_found(length: int, data: st.DataObject) -> None:
    lines = chain(length)
    place = data.draw(st.integers(1, length))
    lines.insert(place - 1, chained(MODEL, draft(50), end(lines[: place - 1])))
    assert number_of(verify(lines, None)) == place


@given(st.integers(1, 8), st.data())
def test_an_end_that_was_cut_off_is_found_by_its_anchor(length: int, data: st.DataObject) -> None:
    lines = chain(length)
    left = data.draw(st.integers(0, length - 1))
    broken = verify(lines[:left], end(lines))
    assert number_of(broken) == left + 1
    assert f"{length} lines" in str(broken)


def test_what_is_wrong_is_said_in_words() -> None:
    lines = chain(4)
    said = {
        "line 1 is missing: all lines are gone": [],
        "line 1 is missing: line 2 stands in its place": lines[1:],
        "line 3 is missing: the ledger was cut off": lines[:2],
        "line 2 is there twice": [*lines[:2], *lines[1:]],
        "line 2 was changed: its content has another hash": [
            lines[0],
            lines[1].model_copy(update={"actor": "x"}),
            *lines[2:],
        ],
    }
    for text, given_lines in said.items():
        assert str(verify(given_lines, end(lines))).startswith(text)


def test_lines_of_another_model_do_not_continue_a_chain() -> None:
    lines = chain(2)
    lines.append(chained("another", draft(3), end(lines)))
    assert str(verify(lines, None)) == "line 3 belongs to another model, 'another'"


def test_aliases_are_where_the_last_line_moved_them() -> None:
    moves = [
        {"candidate": Move(before=None, after=1)},
        {"champion": Move(before=None, after=1)},
        {"champion": Move(before=1, after=2), "previous": Move(before=None, after=1)},
        {"previous": Move(before=1, after=None)},
    ]
    lines: list[Entry] = []
    for number, one in enumerate(moves, start=1):
        lines.append(chained(MODEL, draft(number, moves=one), end(lines)))
    assert aliases_of(lines) == {"candidate": 1, "champion": 2, "previous": None}


def test_an_anchor_is_two_tags_or_none() -> None:
    tags = {"pilotage.ledger.length": "3", "pilotage.ledger.head": "a" * 64, "other": "x"}
    assert anchor_of(tags, MODEL) == Head(3, "a" * 64)
    assert anchor_of({"pilotage.ledger.length": "3"}, MODEL) is None
    assert anchor_of({"other": "x"}, MODEL) is None


@pytest.mark.parametrize(
    ("length", "head"), [("x", "a" * 64), ("-1", "a" * 64), ("²", "a" * 64), ("3", "short")]
)
def test_an_anchor_that_nobody_but_a_hand_wrote_is_named(length: str, head: str) -> None:
    tags = {"pilotage.ledger.length": length, "pilotage.ledger.head": head}
    with pytest.raises(UserError, match=r"pilotage\.ledger\.length"):
        anchor_of(tags, MODEL)


# -- the table -------------------------------------------------------------------------------


@pytest.fixture
def stored(tmp_path: Path) -> Ledger:
    """Four lines in a table whose guards somebody has dropped."""
    ledger = Ledger(f"sqlite:///{tmp_path / 'ledger.db'}")
    for number in range(1, 5):
        ledger.append(MODEL, draft(number), ledger.head(MODEL))
    with closing(sqlite3.connect(tmp_path / "ledger.db")) as asked:
        names = asked.execute("SELECT name FROM sqlite_master WHERE type = 'trigger'").fetchall()
        for (name,) in names:
            asked.execute(f"DROP TRIGGER {name}")
        asked.commit()
    assert ledger.check(MODEL, None) is None
    return ledger


def change(ledger: Ledger, statement: str, *values: object) -> None:
    with closing(sqlite3.connect(ledger._file)) as asked:
        asked.execute(statement, values)
        asked.commit()


@pytest.mark.parametrize(
    ("column", "value", "line", "words"),
    [
        ("hash", "0" * 64, 3, "its content has another hash"),
        ("hash", None, 3, "its row holds no text"),
        ("at", "2026-03-01", 3, "its column at is '2026-03-01'"),
        ("action", "rollback", 3, "its column action is 'rollback'"),
        ("model", "another", 3, "line 4 stands in its place"),
        ("sequence", 9, 3, "line 4 stands in its place"),
        ("sequence", "x", 3, "line 4 stands in its place"),
        ("body", "{", 3, "cannot be read"),
        ("body", "", 3, "cannot be read"),
        ("body", None, 3, "its row holds no text"),
        ("body", b"\x00", 3, "its row holds no text"),
        ("body", "[]", 3, "cannot be read"),
    ],
)
def test_a_changed_column_is_found(
    stored: Ledger, column: str, value: object, line: int, words: str
) -> None:
    change(stored, "PRAGMA writable_schema = ON")
    with closing(sqlite3.connect(stored._file)) as asked:
        # Without NOT NULL, as somebody may have made the table who filled it by hand.
        asked.execute("ALTER TABLE pilotage_ledger RENAME TO old")
        asked.execute("CREATE TABLE pilotage_ledger AS SELECT * FROM old")
        asked.execute(f"UPDATE pilotage_ledger SET {column} = ? WHERE sequence = 3", (value,))
        asked.commit()
    broken = stored.check(MODEL, None)
    assert number_of(broken) == line
    assert words in str(broken)


def test_the_last_row_with_another_number_is_found(stored: Ledger) -> None:
    change(stored, "UPDATE pilotage_ledger SET sequence = 9 WHERE sequence = 4")
    assert "line 9 stands in its place" in str(stored.check(MODEL, None))


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ('"nightly"', '"daily"'),
        ('{"action":', '{ "action":'),
        ('"sequence":3', '"sequence":3.0'),
        ('"sequence":3', '"sequence":9,"sequence":3'),
        ("größer", "gr\\u00f6ßer"),
        ('"at":"2026-03-01T15:00:00.123456Z"', '"at":"2026-03-01T15:00:00.123456+00:00"'),
        ('"actor"', '"unknown":1,"actor"'),
    ],
)
def test_a_changed_letter_of_a_body_is_found(stored: Ledger, before: str, after: str) -> None:
    change(
        stored,
        "UPDATE pilotage_ledger SET body = replace(body, ?, ?) WHERE sequence = 3",
        before,
        after,
    )
    assert number_of(stored.check(MODEL, None)) == 3


def test_the_first_of_two_damages_is_named(stored: Ledger) -> None:
    change(stored, "UPDATE pilotage_ledger SET body = '' WHERE sequence = 4")
    change(stored, "DELETE FROM pilotage_ledger WHERE sequence = 2")
    broken = stored.check(MODEL, None)
    assert str(broken) == "line 2 is missing: line 3 stands in its place"


def test_rows_that_are_no_lines_are_not_given_out_as_lines(stored: Ledger) -> None:
    change(stored, "UPDATE pilotage_ledger SET body = '{}' WHERE sequence = 3")
    with pytest.raises(LedgerDamaged, match="line 3 was changed") as raised:
        stored.entries(MODEL)
    assert raised.value.exit_status == 10


def test_whoever_expects_another_end_is_told_the_present_one(tmp_path: Path) -> None:
    ledger = Ledger(f"sqlite:///{tmp_path / 'ledger.db'}")
    first = ledger.append(MODEL, draft(1), EMPTY)
    for wrong in (EMPTY, Head(1, "f" * 64), Head(2, first.hash)):
        with pytest.raises(LedgerMoved, match="ends at line 1") as raised:
            ledger.append(MODEL, draft(2), wrong)
        assert raised.value.head == Head(1, first.hash)
    assert ledger.entries(MODEL) == [first]


def test_models_have_chains_of_their_own(tmp_path: Path) -> None:
    ledger = Ledger(f"sqlite:///{tmp_path / 'ledger.db'}")
    made = {name: ledger.append(name, draft(1), EMPTY) for name in ("b", "a", "ä'; --")}
    assert ledger.models() == ["a", "b", "ä'; --"]
    for name, line in made.items():
        assert ledger.entries(name) == [line]
        assert ledger.head(name) == (1, line.hash) == (1, ledger.hash_of(name, 1))
    assert ledger.hash_of("a", 2) is None


def test_a_question_makes_no_file_and_no_table(tmp_path: Path) -> None:
    file = tmp_path / "deep" / "ledger.db"
    ledger = Ledger(f"sqlite:///{file}")
    assert (ledger.head(MODEL), ledger.entries(MODEL), ledger.models()) == (EMPTY, [], [])
    assert ledger.hash_of(MODEL, 1) is None
    assert not file.parent.exists()
    ledger.append(MODEL, draft(1), EMPTY)
    assert file.exists()


@pytest.mark.parametrize(
    ("uri", "words"),
    [
        ("http://user:secret@host:5000", "not behind 'http'"),
        ("mysql://user:secret@host/db", "not behind 'mysql'"),
        ("/data/mlflow.db", "not behind '/data/mlflow.db'"),
        ("sqlite://", "names no file"),
        ("sqlite:///:memory:", "names no file"),
        ("sqlite:///file:x?uri=true", "names no file"),
        ("postgresql:/secret", "cannot be read"),
    ],
)
def test_a_place_that_can_hold_no_ledger_names_the_setting(uri: str, words: str) -> None:
    with pytest.raises(UserError, match="PILOTAGE_LEDGER_URI") as raised:
        Ledger(uri).append(MODEL, draft(1), EMPTY)
    assert words in str(raised.value)
    assert "secret" not in str(raised.value)


# -- exports ---------------------------------------------------------------------------------


def exported(tmp_path: Path, lines: Sequence[Entry]) -> Path:
    file = tmp_path / "ledger.jsonl"
    export(file, lines)
    return file


def test_an_export_is_the_documents_line_by_line_and_is_whole(tmp_path: Path) -> None:
    lines = chain(3)
    file = exported(tmp_path, lines)
    read = [json.loads(line) for line in file.read_text(encoding="utf-8").split("\n")[:-1]]
    assert read == documents(lines)
    assert [one["ledger_length"] for one in read] == [3, 3, 3]
    checked = verify_file(file, MODEL, end(lines))
    assert (checked.lines, checked.broken, checked.notes) == (3, None, [])


def as_ascii(content: bytes) -> bytes:
    lines = [json.dumps(json.loads(line)) for line in content.split(b"\n") if line]
    return "\n".join(lines).encode("ascii")


@pytest.mark.parametrize(
    "rewritten",
    [
        lambda content: b"\xef\xbb\xbf" + content,
        lambda content: content.replace(b"\n", b"\r\n"),
        lambda content: content.rstrip(b"\n"),
        lambda content: content.replace(b'": ', b'":'),
        as_ascii,
    ],
)
def test_how_an_export_is_written_does_not_matter(tmp_path: Path, rewritten: Any) -> None:
    lines = chain(3)
    file = exported(tmp_path, lines)
    file.write_bytes(rewritten(file.read_bytes()))
    assert verify_file(file, MODEL, end(lines)).broken is None


@given(st.data())
def test_no_byte_of_an_export_can_be_changed_unseen(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    lines = chain(3)
    file = exported(tmp_path_factory.mktemp("export"), lines)
    content = bytearray(file.read_bytes())
    at = data.draw(st.integers(1, len(content) - 2))
    other = data.draw(st.integers(0, 255).filter(lambda byte: byte != content[at]))
    place = bytes(content[:at]).count(b"\n") + 1
    content[at] = other
    file.write_bytes(bytes(content))
    broken = verify_file(file, MODEL, end(lines)).broken
    try:
        read = [json.loads(line) for line in bytes(content).split(b"\n") if line.strip()]
        same = read == documents(lines)
    except ValueError:
        same = False
    assert number_of(broken) == (None if same else place)


@pytest.mark.parametrize("left", [0, 1, 2])
def test_a_cut_end_is_seen_in_the_file_alone(tmp_path: Path, left: int) -> None:
    file = exported(tmp_path, chain(3))
    kept = file.read_bytes().split(b"\n")[:left]
    file.write_bytes(b"\n".join(kept))
    broken = verify_file(file, MODEL, None).broken
    assert number_of(broken) == left + 1
    assert "is missing" in str(broken)


def test_half_a_last_line_is_named(tmp_path: Path) -> None:
    file = exported(tmp_path, chain(3))
    file.write_bytes(file.read_bytes()[:-40])
    assert "line 3 was changed: it cannot be read" in str(verify_file(file, MODEL, None).broken)


def test_a_beginning_that_was_cut_off_is_named(tmp_path: Path) -> None:
    file = exported(tmp_path, chain(3))
    file.write_bytes(b"\n".join(file.read_bytes().split(b"\n")[1:]))
    assert "line 1 is missing: line 2" in str(verify_file(file, MODEL, None).broken)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (b'{"sequence": 1}', "it has no hash"),
        (b"[1]", "it is no JSON object"),
        (b"[" * 100_000, "it is nested too deep"),
        (b'{"hash": "x", "hash": "y"}', "a key stands in it twice"),
        (b'{"hash": "x", "ledger_length": 2, "at": NaN}', "Out of range float"),
        (b'{"hash": "x", "ledger_length": 2}', "Field required"),
        (b'{"hash": "x", "ledger_length": true}', "no ledger_length"),
        (b'{"hash": "x", "ledger_length": 2, "actor": "\\ud800"}', "cannot be read"),
        (b"\xff\xfe", "can't decode"),
    ],
)
def test_damage_of_any_kind_is_an_answer(tmp_path: Path, line: bytes, words: str) -> None:
    file = exported(tmp_path, chain(2))
    file.write_bytes(file.read_bytes().split(b"\n")[0] + b"\n" + line)
    broken = verify_file(file, MODEL, None).broken
    assert number_of(broken) == 2
    assert words in str(broken)


def test_an_export_that_is_older_than_the_ledger_is_its_beginning_or_is_not(
    tmp_path: Path,
) -> None:
    lines = chain(5)
    file = exported(tmp_path, lines[:3])
    hashes = {line.sequence: line.hash for line in lines}
    checked = verify_file(file, MODEL, end(lines), hashes.get)
    assert checked.broken is None
    assert checked.notes == ["older than the ledger, which has 5 lines and begins with it"]
    alone = verify_file(file, MODEL, end(lines))
    assert (alone.broken, len(alone.notes)) == (None, 1)
    forged = verify_file(file, MODEL, end(lines), {3: "f" * 64}.get)
    assert "line 3 is another one in the ledger" in str(forged.broken)
    gone = verify_file(file, MODEL, end(lines), {}.get)
    assert "line 3 is missing in the ledger" in str(gone.broken)


def test_an_export_that_was_made_anew_is_found_by_the_anchor(tmp_path: Path) -> None:
    forged: list[Entry] = []
    for number in range(1, 4):
        forged.append(chained(MODEL, draft(number, actor="a forger"), end(forged)))
    file = exported(tmp_path, forged)
    assert number_of(verify_file(file, MODEL, end(chain(3))).broken) == 3
    assert verify_file(file, MODEL, None).broken is None


def test_what_is_no_export_is_a_persons_mistake(tmp_path: Path) -> None:
    other = tmp_path / "other.jsonl"
    other.write_text('{"id": 1}\n')
    listed = tmp_path / "listed.json"
    listed.write_text(json.dumps(documents(chain(2))))
    for path, words in (
        (tmp_path / "none.jsonl", "no such file"),
        (tmp_path, "is no regular file"),
        (Path("a\0b"), "cannot be read|no such file"),
        (other, "is no export of a ledger"),
        (listed, "is one JSON list"),
    ):
        with pytest.raises(UserError, match=words):
            verify_file(path, MODEL, None)
    with pytest.raises(UserError, match="is an export of 'freight-assistant', not of 'other'"):
        verify_file(exported(tmp_path, chain(2)), "other", Head(2, "f" * 64))


# -- the command -----------------------------------------------------------------------------

APP = typer.Typer()
APP.command()(ledger_commands.ledger)


class Shown:
    """What the command printed and how it ended."""

    def __init__(self, *words: str) -> None:
        done = CliRunner().invoke(APP, list(words))
        self.error = done.exception if not isinstance(done.exception, SystemExit) else None
        self.text = done.stdout
        self.status = getattr(self.error, "exit_status", done.exit_code)

    @property
    def document(self) -> Any:
        return json.loads(self.text.splitlines()[-1])


@pytest.fixture
def told(home: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Three lines in the ledger of this home; `tags` are what MLflow says of the model."""
    store = Ledger(f"sqlite:///{home / 'mlflow.db'}")
    lines = [store.append(MODEL, draft(number), store.head(MODEL)) for number in range(1, 4)]
    tags = {"pilotage.ledger.length": "3", "pilotage.ledger.head": lines[-1].hash}
    answer: dict[str, Any] = {"store": store, "lines": lines, "tags": tags}
    monkeypatch.setattr(
        ledger_commands, "_tags", lambda model: answer["tags"] if model == MODEL else None
    )
    return answer


def test_the_lines_are_shown_as_a_table_and_as_json(told: dict[str, Any]) -> None:
    shown = Shown(MODEL)
    assert shown.status == 0
    for words in ("champion 2 → 3", "nightly", "2026-03-01 15:00:00", told["lines"][2].hash[:12]):
        assert words in shown.text
    assert Shown(MODEL, "--json").document == documents(told["lines"])


def test_what_people_wrote_is_shown_as_it_is_and_obeyed_by_no_terminal(
    told: dict[str, Any],
) -> None:
    told["store"].append(
        MODEL, draft(4, actor="\x1b[2J", reason="[red]why[/red]"), end(told["lines"])
    )
    shown = Shown(MODEL).text
    assert "[red]why[/red]" in shown
    assert "\x1b" not in shown


def test_an_export_goes_out_and_is_checked(told: dict[str, Any], tmp_path: Path) -> None:
    file = tmp_path / "out" / "ledger.jsonl"
    shown = Shown(MODEL, "--export", str(file))
    assert (shown.status, shown.text) == (0, f"{file}: 3 lines of {MODEL}\n")
    assert Shown(MODEL, "--export", str(file), "--json").document == documents(told["lines"])
    checked = Shown(MODEL, "--verify", str(file), "--json")
    assert checked.status == 0
    assert checked.document == {
        "model": MODEL,
        "file": str(file),
        "lines": 3,
        "whole": True,
        "broken": None,
        "anchor": {"length": 3, "hash": told["lines"][-1].hash},
        "notes": [],
    }
    file.write_text(file.read_text().replace("nightly", "daily", 1))
    refused = Shown(MODEL, "--verify", str(file))
    assert refused.status == 10
    assert "line 1 was changed" in refused.text


def test_an_export_is_checked_where_there_is_no_registry(
    told: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = exported(tmp_path, told["lines"])
    told["tags"] = None
    shown = Shown(MODEL, "--verify", str(file))
    assert shown.status == 0
    assert "note: MLflow has no model" in shown.text
    assert "note: checked without an anchor" in shown.text

    def away(model: str) -> None:
        raise UserError.at("MLflow", "is away")

    monkeypatch.setattr(ledger_commands, "_tags", away)
    shown = Shown(MODEL, "--verify", str(file))
    assert shown.status == 0
    assert "note: the registry could not be asked: MLflow: is away" in shown.text


def test_the_database_is_checked_against_the_anchor(told: dict[str, Any]) -> None:
    assert Shown(MODEL, "--verify").text == (
        f"ledger of {MODEL}: 3 lines, the chain is whole, as anchored in MLflow\n"
    )
    told["tags"] = {**told["tags"], "pilotage.ledger.length": "4"}
    cut = Shown(MODEL, "--verify", "--json")
    assert cut.status == 10
    assert cut.document["broken"]["line"] == 4
    told["tags"] = {"pilotage.ledger.length": "2", "pilotage.ledger.head": told["lines"][1].hash}
    behind = Shown(MODEL, "--verify")
    assert behind.status == 0
    assert "note: the anchor in MLflow is 1 behind the last line" in behind.text


@pytest.mark.parametrize(
    ("tags", "what"),
    [
        ({"pilotage.ledger.length": "1"}, "is 1 after what a killed move leaves"),
        ({"pilotage.ledger.length": "abc"}, "are no anchor of a ledger"),
        (None, "has no anchor in MLflow"),
    ],
)
def test_what_stops_a_promotion_is_no_whole_ledger_here(
    told: dict[str, Any], tags: dict[str, str] | None, what: str
) -> None:
    head = {"pilotage.ledger.head": told["lines"][0].hash}
    told["tags"] = {} if tags is None else {**head, **tags}
    checked = Shown(MODEL, "--verify", "--json")
    assert checked.status == 10
    assert what in checked.document["broken"]["what"]


def test_no_line_where_the_anchor_says_there_are_is_no_answer(told: dict[str, Any]) -> None:
    change(told["store"], "DROP TABLE pilotage_ledger")
    shown = Shown(MODEL)
    assert (shown.status, shown.text) == (10, "")
    assert "all lines are gone" in str(shown.error)


def test_a_changed_row_ends_with_status_10(told: dict[str, Any]) -> None:
    change(told["store"], "DROP TRIGGER pilotage_ledger_no_update")
    change(told["store"], "UPDATE pilotage_ledger SET body = '{}' WHERE sequence = 2")
    told["tags"] = None
    checked = Shown(MODEL, "--verify", "--json")
    assert checked.status == 10
    assert (checked.document["whole"], checked.document["broken"]["line"]) == (False, 2)
    shown = Shown(MODEL)
    assert (shown.status, shown.text) == (10, "")
    assert "line 2 was changed" in str(shown.error)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["other"], "no such model"),
        (["other", "--json"], "no such model"),
        (["other", "--verify"], "no such model"),
        ([MODEL, "file.jsonl"], "a file is checked, not shown"),
        ([MODEL, "--verify", "none.jsonl"], "no such file"),
        ([MODEL, "--verify", "--export", "x"], "does not go with --verify"),
        ([MODEL, "--export", "/"], "cannot be written"),
        (["a\udcff"], "is not UTF-8"),
    ],
)
def test_a_persons_mistake_is_status_2(
    told: dict[str, Any], words: list[str], message: str
) -> None:
    shown = Shown(*words)
    assert shown.status == 2
    assert message in str(shown.error)
    assert shown.text == ""


def test_a_model_that_is_gone_from_the_registry_is_named(told: dict[str, Any]) -> None:
    told["tags"] = None
    shown = Shown(MODEL, "--verify")
    assert shown.status == 2
    assert "3 lines about it" in str(shown.error)


def test_a_model_without_lines_says_so(told: dict[str, Any]) -> None:
    change(told["store"], "DROP TRIGGER pilotage_ledger_no_delete")
    change(told["store"], "DELETE FROM pilotage_ledger")
    told["tags"] = {}
    assert "no line yet" in Shown(MODEL).text
    assert Shown(MODEL, "--json").document == []
