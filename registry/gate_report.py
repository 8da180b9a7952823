"""Turn a judged `GateOutcome` into what people and CI systems read.

Nothing is decided here. The command `gate` promises to start quickly, so this imports nothing that
needs pandas. A release shows the same tables in Prefect and on its MLflow run.
"""

from __future__ import annotations

import errno
import json
import math
import re
import uuid
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal
from xml.etree import ElementTree

from registry.errors import InfrastructureError, UserError
from registry.gate_outcome import CandidateVerdict, GateOutcome
from registry.outcome import GateResult, LoosenedGate, Verdict, WaiverShown

TEXT_WIDTH = 110
MOST_SUMMARY = 1_000_000
"""Bytes of Markdown. GitHub drops a step summary above 1 MiB, all of it."""

LONGEST_TEXT = 2000
"""Characters of one reason, note or list of items in Markdown and in the terminal."""

SHORT_TEXT = 120
WHOLE = "(verdict)"
"""Test case for what no gate of its own stands for; no gate can be called so."""

_NO_MISTAKE = (errno.ENOSPC, errno.EDQUOT, errno.EIO)
"""Faults of a disk, which no other name would repair."""

NO_NUMBER = "–"
REPLACEMENT = "\ufffd"
_SURROGATES = re.compile("[\ud800-\udfff]")
_CONTROLS = re.compile("[\x00-\x1f\x7f-\x9f\ud800-\udfff]")
_NOT_XML = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


# -- JSON ------------------------------------------------------------------------------------


def document(outcome: GateOutcome) -> dict[str, Any]:
    """The outcome as strict JSON values, with all gates once more in one list, `gates`.

    Of several candidates each gate there names its own, as `candidate_name`.
    """
    shown: dict[str, Any] = _strict(outcome.model_dump(mode="json"))
    several = len(shown["candidates"]) > 1
    shown["gates"] = [
        {**gate, "candidate_name": candidate["name"]} if several else gate
        for candidate in shown["candidates"]
        for gate in candidate["gates"]
    ]
    return shown


def json_line(outcome: GateOutcome) -> str:
    """The document on one line, for whoever splits lines by whatever rule."""
    return strict_line(document(outcome))


def encodable(text: str, encoding: str | None) -> str:
    """A JSON text for a stream of that encoding: what it cannot hold is escaped."""
    try:
        text.encode(encoding or "utf-8")
    except UnicodeEncodeError:
        # Outside of its texts JSON is ASCII, and in them every character may be escaped.
        return re.sub(r"[^\x00-\x7f]", lambda found: json.dumps(found[0])[1:-1], text)
    return text


def strict_line(value: Any) -> str:
    """Any document as one line of strict JSON."""
    text = json.dumps(_strict(value), ensure_ascii=False, allow_nan=False)
    # JSON may hold these as they are, but `str.splitlines` and others end a line there.
    for character in "\x85\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text


def _strict(value: Any) -> Any:
    """Without NaN, infinities and lone surrogates, none of which JSON can hold."""
    if isinstance(value, dict):
        return {_strict(key): _strict(one) for key, one in value.items()}
    if isinstance(value, list):
        return [_strict(one) for one in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return _SURROGATES.sub(REPLACEMENT, value) if isinstance(value, str) else value


# -- JUnit -----------------------------------------------------------------------------------

Mark = Literal["", "failure", "error", "skipped"]


@dataclass(frozen=True)
class Case:
    """One test case: what it is called, how it ended, and what is written beside it."""

    classname: str
    name: str
    verdict: Verdict
    mark: Mark
    message: str
    output: str = ""


def junit(outcome: GateOutcome) -> str:
    """JUnit XML with one test case per gate and candidate.

    A gate that decides and refuses is a failure, or an error when INVALID; one that has no say
    (supporting, advisory, waived) and is not PASS is skipped. A refusal that no gate stands for
    is a case of its own, so that a refused policy never looks green.
    """
    cases = _cases(outcome)
    marks = Counter(case.mark for case in cases)
    counts = {
        "tests": str(len(cases)),
        "failures": str(marks["failure"]),
        "errors": str(marks["error"]),
        "skipped": str(marks["skipped"]),
        # Candidates are judged together: there is one time, and no gate has its own.
        "time": f"{outcome.seconds:.3f}",
    }
    root = ElementTree.Element("testsuites", {"name": "pilotage gate", **counts})
    suite = ElementTree.SubElement(root, "testsuite", {"name": _xml(outcome.policy), **counts})
    properties = ElementTree.SubElement(suite, "properties")
    for name, value in _properties(outcome):
        ElementTree.SubElement(properties, "property", {"name": _xml(name), "value": _xml(value)})
    for case in cases:
        suite.append(_case_element(case))
    remarks = [*_waiver_lines(outcome), *_loosened_lines(outcome), *_note_lines(outcome)]
    if remarks:
        ElementTree.SubElement(suite, "system-out").text = _xml("\n".join(remarks))
    ElementTree.indent(root)
    body = ElementTree.tostring(root, encoding="unicode")
    return f'<?xml version="1.0" encoding="UTF-8"?>\n{body}\n'


def _cases(outcome: GateOutcome) -> list[Case]:
    cases: list[Case] = []
    for candidate in outcome.candidates:
        classname = f"{outcome.policy}.{candidate.name}"
        own = [_gate_case(classname, gate) for gate in candidate.gates]
        if candidate.verdict is not Verdict.PASS and not _any_refusal(own):
            own.append(_whole_case(classname, candidate.verdict, candidate.reasons))
        cases += own
    if outcome.verdict is not Verdict.PASS and not _any_refusal(cases):
        reasons = [*_loosened_lines(outcome), *_note_lines(outcome)]
        cases.append(_whole_case(outcome.policy, outcome.verdict, reasons))
    return cases


def _gate_case(classname: str, gate: GateResult) -> Case:
    figures = "\n".join(f"{name}: {value}" for name, value in _figures(gate))
    return Case(classname, gate.name, gate.result, _mark(gate), _why(gate), figures)


def _whole_case(classname: str, verdict: Verdict, reasons: Sequence[str]) -> Case:
    mark: Mark = "error" if verdict is Verdict.INVALID else "failure"
    return Case(classname, WHOLE, verdict, mark, "; ".join(reasons) or verdict.value)


def _any_refusal(cases: Iterable[Case]) -> bool:
    return any(case.mark in ("failure", "error") for case in cases)


def _mark(gate: GateResult) -> Mark:
    if gate.result is Verdict.PASS:
        return ""
    if not gate.decides:
        return "skipped"
    return "error" if gate.result is Verdict.INVALID else "failure"


def _why(gate: GateResult) -> str:
    """The reason, and before it why a refusal has no say."""
    if gate.result is Verdict.PASS or gate.decides:
        return gate.reason
    if gate.waived is not None:
        waived = gate.waived
        return (
            f"waived by {waived.owner} until {waived.expires} ({waived.reason}); "
            f"{gate.result}: {gate.reason}"
        )
    return f"{gate.tier} gate, has no say; {gate.result}: {gate.reason}"


def _case_element(case: Case) -> ElementTree.Element:
    element = ElementTree.Element(
        "testcase", {"classname": _xml(case.classname), "name": _xml(case.name), "time": "0"}
    )
    if case.mark:
        attributes = {"message": _xml(case.message)}
        if case.mark != "skipped":
            attributes = {"type": case.verdict.value, **attributes}
        # GitLab shows only the text of this element, Jenkins and GitHub's readers the message.
        told = f"{case.message}\n{case.output}".rstrip()
        ElementTree.SubElement(element, case.mark, attributes).text = _xml(told)
    if case.output:
        ElementTree.SubElement(element, "system-out").text = _xml(case.output)
    return element


def _properties(outcome: GateOutcome) -> Iterator[tuple[str, str]]:
    yield "policy", outcome.policy
    yield "policy_digest", outcome.policy_digest
    yield "verdict", outcome.verdict.value
    yield "promotable", str(outcome.promotable).lower()
    yield "settings", outcome.settings
    for name, folder in outcome.references.items():
        yield f"reference.{name}", folder
    for candidate in outcome.candidates:
        yield f"candidate.{candidate.name}.verdict", candidate.verdict.value
        yield f"candidate.{candidate.name}.folder", candidate.folder
        yield f"candidate.{candidate.name}.bundle", candidate.bundle
        yield f"candidate.{candidate.name}.settings", candidate.settings
        yield f"candidate.{candidate.name}.level_share", number(candidate.level_share)


def _xml(text: str) -> str:
    """Without the characters that XML 1.0 cannot hold, not even escaped."""
    return _NOT_XML.sub(REPLACEMENT, text)


# -- Markdown --------------------------------------------------------------------------------

COLUMNS = (
    "gate", "metric", "kind", "tier", "candidate", "reference", "ratio", "estimate", "bound",
    "margin", "n", "mde", "needed", "result",
)  # fmt: skip


def markdown(outcome: GateOutcome) -> str:
    """A GitHub step summary, below its limit: flips go first, then the ends of long texts."""
    page = ""
    for flips, length in ((True, LONGEST_TEXT), (False, LONGEST_TEXT), (False, SHORT_TEXT)):
        page = "\n".join(_page(outcome, flips, length)) + "\n"
        if len(page.encode()) <= MOST_SUMMARY:
            return page
    return _cut_lines(page, MOST_SUMMARY)


def _page(outcome: GateOutcome, flips: bool, length: int) -> Iterator[str]:
    def cell(text: str) -> str:
        return escaped(_line(text, length))

    yield f"## Gate {cell(outcome.policy)}: {outcome.verdict}"
    yield ""
    yield f"**{outcome.verdict}** · {cell(_standing(outcome))}"
    if outcome.references:
        pairs = [f"{name} = {folder}" for name, folder in outcome.references.items()]
        yield ""
        yield f"Compared with: {cell(', '.join(pairs))}"
    for candidate in outcome.candidates:
        yield ""
        yield f"### {cell(candidate.name)}: {candidate.verdict}"
        yield ""
        yield cell(_origin(candidate))
        if candidate.gates:
            rows = [_gate_row(gate) for gate in candidate.gates]
            yield from _table(COLUMNS, rows, length)
        yield from _list("Reasons", reasons(candidate), length)
    if flips:
        yield from _section("Flips", FLIP_COLUMNS, _flip_rows(outcome), length)
    elif _flip_rows(outcome):
        yield ""
        yield "Flips are left out: with them this would be longer than GitHub shows."
    waivers = [[w.gate, w.owner, w.reason, str(w.expires), w.state] for w in outcome.waivers]
    yield from _section("Waivers", ("gate", "owner", "reason", "expires", "state"), waivers, length)
    loosened = [[one.gate, one.what, _acknowledged(one), one.reason] for one in outcome.loosened]
    yield from _section(
        "Loosened gates", ("gate", "what", "acknowledged", "reason"), loosened, length
    )
    yield from _list("Notes", outcome.notes, length)


FLIP_COLUMNS = (
    "candidate", "gate", "gained", "lost", "McNemar p", "first gained", "first lost",
)  # fmt: skip


def _gate_row(gate: GateResult) -> list[str]:
    reference = number(gate.reference)
    if gate.reference_name:
        reference += f" ({gate.reference_name})"
    return [
        gate.name, _metric(gate), gate.kind, gate.tier, number(gate.candidate), reference,
        number(gate.ratio), number(gate.estimate), number(gate.bound), number(_limit(gate)),
        number(gate.n), number(gate.mde), number(gate.needed), _result(gate),
    ]  # fmt: skip


def _flip_rows(outcome: GateOutcome) -> list[list[str]]:
    return [
        [
            candidate.name,
            gate.name,
            number(gate.flips.gained),
            number(gate.flips.lost),
            number(gate.flips.mcnemar_p),
            ", ".join(gate.flips.gained_items),
            ", ".join(gate.flips.lost_items),
        ]
        for candidate in outcome.candidates
        for gate in candidate.gates
        if gate.flips is not None
    ]


def _section(
    title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], length: int
) -> Iterator[str]:
    if rows:
        yield ""
        yield f"### {title}"
        yield from _table(columns, rows, length)


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]], length: int) -> Iterator[str]:
    yield ""
    yield f"| {' | '.join(columns)} |"
    yield f"|{' --- |' * len(columns)}"
    for row in rows:
        yield f"| {' | '.join(escaped(_line(text, length)) for text in row)} |"


def _list(title: str, texts: Sequence[str], length: int) -> Iterator[str]:
    if texts:
        yield ""
        yield f"{title}:"
        yield ""
        yield from (f"- {escaped(_line(text, length))}" for text in texts)


def escaped(text: str) -> str:
    """Text of one line as GitHub's Markdown shows it unchanged, in a table or out of it."""
    text = text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    text = re.sub(r"([\\`*\[\]|~$#])", r"\\\1", text)
    # Within a word an underscore is only that, and `hit_rate` should stay readable.
    text = re.sub(r"(?<![^\W_])_|_(?![^\W_])", r"\\_", text)
    # At the start of a list's line these would begin another list, or be a rule.
    text = re.sub(r"^([-+=])(?=[\s=-]|$)", r"\\\1", text)
    return re.sub(r"^(\d+)([.)])(?=\s|$)", r"\1\\\2", text)


def _cut_lines(page: str, most: int) -> str:
    """As many whole lines as fit, and a last one that says that something is missing."""
    end = "\n\nThe rest is left out: it would be longer than GitHub shows.\n"
    room = most - len(end.encode())
    kept = page.encode()[:room].decode(errors="ignore")
    return kept[: kept.rfind("\n")] + end


# -- text for a terminal ---------------------------------------------------------------------


def text(outcome: GateOutcome) -> str:
    """A table per candidate with reasons below, and everything else that decided."""
    from rich.table import Table

    lines = [f"{_line(outcome.policy)}: {outcome.verdict} ({_line(_standing(outcome))})"]
    for candidate in outcome.candidates:
        lines.append(f"{_line(candidate.name)}: {candidate.verdict}")
        table = Table()
        for column in ("gate", "result"):
            table.add_column(column, overflow="fold")
        for column in ("estimate", "bound", "margin", "n", "mde", "needed"):
            table.add_column(column, overflow="fold", justify="right")
        for gate in candidate.gates:
            where = f"\n  {_line(gate.slice)}" if gate.slice else ""
            words = [f"{_line(gate.name)}\n  {_line(gate.metric)}{where}", _result(gate)]
            figures = (gate.estimate, gate.bound, _limit(gate), gate.n, gate.mde, gate.needed)
            table.add_row(*words, *map(number, figures))
        if candidate.gates:
            lines.append(drawn(table))
        lines.append(f"  {_line(_origin(candidate))}")
        lines += [f"  {_line(f'{candidate.name}: {why}')}" for why in reasons(candidate)]
        lines += [f"  {_line(f'{candidate.name}: {flips}')}" for flips in _flip_lines(candidate)]
    remarks = [*_waiver_lines(outcome), *_loosened_lines(outcome), *_note_lines(outcome)]
    lines += [_line(remark) for remark in remarks]
    return "\n".join(lines)


def drawn(table: Any) -> str:
    """A rich table as plain text of `TEXT_WIDTH` columns, its words as they are.

    Without markup: an engine's `[/usr/lib/x.py]` would end an unopened style and the command.
    """
    from rich.console import Console

    console = Console(width=TEXT_WIDTH, no_color=True, highlight=False, markup=False, emoji=False)
    with console.capture() as captured:
        console.print(table)
    return captured.get().rstrip()


def _flip_lines(candidate: CandidateVerdict) -> Iterator[str]:
    for gate in candidate.gates:
        if gate.flips is not None:
            yield f"{gate.name} flips: {_flips(gate)}"


# -- writing ---------------------------------------------------------------------------------


def write_text(path: Path, content: str, append: bool = False) -> None:
    """Write a file whole or not at all, or add to its end.

    Raises `UserError` naming it, or `InfrastructureError` where the disk is full or broken.
    What is no regular file (a pipe, `/dev/stdout`) is written to, never replaced.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # `/dev/stdout` may be a regular file, of whoever holds it open.
        special = path.exists() and (not path.is_file() or path.parts[:2] == ("/", "dev"))
        if append or special:
            with path.open("a", encoding="utf-8") as file:
                file.write(content)
        else:
            _replace(path.resolve(), content)
    except OSError as error:
        if error.errno in _NO_MISTAKE:
            raise InfrastructureError(f"{path}: cannot be written: {error.strerror}") from None
        raise _unwritable(path, error) from None
    # ValueError: a NUL in the name.
    except (ValueError, RuntimeError) as error:
        raise _unwritable(path, error) from None


def _unwritable(path: Path, error: Exception) -> UserError:
    what = getattr(error, "strerror", None) or str(error)
    return UserError.at(
        path, f"cannot be written: {what}", "name a file in a folder you may write to"
    )


def _replace(target: Path, content: str) -> None:
    incoming = target.with_name(f".{uuid.uuid4().hex}.tmp")
    try:
        incoming.write_text(content, encoding="utf-8")
        incoming.replace(target)
    finally:
        incoming.unlink(missing_ok=True)


# -- parts -----------------------------------------------------------------------------------


def number(value: float | None) -> str:
    """Four significant digits without an exponent where none is needed; a dash for none."""
    if value is None:
        return NO_NUMBER
    if isinstance(value, int):
        return str(value)
    return f"{float(f'{value:.4g}'):.15g}"


def reasons(candidate: CandidateVerdict) -> list[str]:
    """Why it is not PASS, then every gate that was not PASS and had no say."""
    silent = [
        f"{gate.name}: {_why(gate)}"
        for gate in candidate.gates
        if gate.result is not Verdict.PASS and not gate.decides
    ]
    return [*candidate.reasons, *silent]


def _standing(outcome: GateOutcome) -> str:
    """What the verdict is worth: settings, promotion, policy, time."""
    promotes = "may promote" if outcome.promotable else "never promotes"
    return (
        f"settings: {outcome.settings}, {promotes}, policy digest {outcome.policy_digest[:12]}, "
        f"{outcome.seconds:.1f} s"
    )


def _origin(candidate: CandidateVerdict) -> str:
    # A release keeps its evidence in the store, under digests.
    parts = [f"evidence {candidate.folder}"] if candidate.folder else []
    parts.append(f"settings: {candidate.settings}")
    if candidate.bundle:
        parts.append(f"bundle {candidate.bundle[:12]}")
    if candidate.level_share != 1:
        parts.append(f"share of the level {number(candidate.level_share)}")
    return ", ".join(parts)


def _limit(gate: GateResult) -> float:
    """What the bound must clear: a loss of 0.05 that is allowed is -0.05 on its scale."""
    return gate.margin if gate.limit is None else gate.limit


def _metric(gate: GateResult) -> str:
    return f"{gate.metric} ({gate.slice})" if gate.slice else gate.metric


def _result(gate: GateResult) -> str:
    """The result, and why it has no say where it has none."""
    if gate.waived is not None:
        return f"{gate.result} (waived)"
    return gate.result.value if gate.decides else f"{gate.result} ({gate.tier})"


def _figures(gate: GateResult) -> Iterator[tuple[str, str]]:
    """Everything that is known of a gate, by name; what there is none of is left out."""
    words = (
        ("metric", gate.metric),
        ("kind", gate.kind),
        ("tier", gate.tier),
        ("result", gate.result.value),
        ("reference", gate.reference_name),
        ("worst slice", gate.slice),
        ("method", gate.method),
        ("flips", _flips(gate)),
    )
    numbers = (
        ("candidate value", gate.candidate),
        ("reference value", gate.reference),
        ("ratio", gate.ratio),
        ("estimate", gate.estimate),
        ("bound", gate.bound),
        ("opposite bound", gate.opposite_bound),
        ("margin", gate.margin),
        ("level", gate.level),
        ("p value", gate.p_value),
        ("requests/s", gate.rate),
        ("n", gate.n),
        ("units", gate.units),
        ("mde", gate.mde),
        ("needed", gate.needed),
    )
    yield from ((name, _line(value)) for name, value in words if value)
    yield from ((name, number(value)) for name, value in numbers if value is not None)


def _flips(gate: GateResult) -> str:
    flips = gate.flips
    if flips is None:
        return ""
    told = f"{flips.gained} gained, {flips.lost} lost"
    if flips.mcnemar_p is not None:
        told += f", McNemar p {number(flips.mcnemar_p)}"
    for name, items in (("gained", flips.gained_items), ("lost", flips.lost_items)):
        if items:
            told += f"; first {name}: {', '.join(items)}"
    return told


def _waiver_lines(outcome: GateOutcome) -> list[str]:
    return [_waiver_line(waiver) for waiver in outcome.waivers]


def _waiver_line(waiver: WaiverShown) -> str:
    return (
        f"waiver ({waiver.state}): {waiver.gate} by {waiver.owner} until {waiver.expires}: "
        f"{waiver.reason}"
    )


def _loosened_lines(outcome: GateOutcome) -> list[str]:
    return [
        f"loosened: {one.gate}: {one.what}, {_acknowledged(one)}"
        + (f": {one.reason}" if one.reason else "")
        for one in outcome.loosened
    ]


def _acknowledged(loosened: LoosenedGate) -> str:
    by = loosened.acknowledged_by
    return f"acknowledged by {by}" if by else "not acknowledged"


def _note_lines(outcome: GateOutcome) -> list[str]:
    return [f"note: {note}" for note in outcome.notes]


def _line(text: str, length: int = LONGEST_TEXT) -> str:
    """One line, without control characters (a terminal obeys them), cut where it is long."""
    line = _CONTROLS.sub(REPLACEMENT, " ".join(text.split()))
    left = len(line) - length
    return line if left <= 0 else f"{line[:length]} … ({left} more characters)"
