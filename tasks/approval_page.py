"""What a person who is asked sees above the form: what passed, by how much, and what it replaces.

Markdown; whatever models and people wrote is escaped.
"""

from __future__ import annotations

from collections.abc import Iterator

from registry.alias_moves import holder, shown
from registry.alias_outcome import SmokeAnswer
from registry.gate_report import escaped
from registry.settings import settings
from tasks.approval import Question, spelled
from tasks.recorded import Recorded
from tasks.run_pages import code, mlflow_address

MOST_GATES = 20


def question_line(found: Recorded, question: Question) -> str:
    """The question on one line, for a notification."""
    return (
        f"{question.reference} ({found.outcome.name}, bundle {question.bundle[:12]}) passed policy "
        f"{found.facts.policy_name}; the champion is {_champion(question)}. Promote it? "
        f"Without an answer until {spelled(question.deadline)} it is not."
    )


def _champion(question: Question) -> str:
    return "none yet" if question.champion is None else holder(question.champion)


def page(found: Recorded, question: Question, smoke: SmokeAnswer) -> str:
    """The whole page."""
    return "\n".join(_lines(found, question, smoke)) + "\n"


def _lines(found: Recorded, question: Question, smoke: SmokeAnswer) -> Iterator[str]:
    facts, outcome = found.facts, found.outcome
    yield f"## Promote {_plain(question.reference)}?"
    yield ""
    before = "There is no champion yet."
    if question.champion is not None:
        before = f"It would replace {holder(question.champion)} as the champion."
    yield (
        f"**{_plain(outcome.name)}** of recipe {_plain(facts.recipe)} passed policy "
        f"{_plain(facts.policy_name)}. {before} Without an answer until "
        f"**{spelled(question.deadline)}** it is not promoted."
    )
    yield ""
    yield f"Bundle `{question.bundle[:12]}`, MLflow run `{found.run_id}`, {_report(found)}."
    yield ""
    yield "| gate | verdict | estimate | margin | n |"
    yield "| --- | --- | --- | --- | --- |"
    for gate in outcome.gates[:MOST_GATES]:
        numbers = (gate.estimate, gate.margin, gate.n)
        cells = " | ".join("–" if one is None else f"{one:g}" for one in numbers)
        waived = f" (waived by {_plain(gate.waived.owner)})" if gate.waived is not None else ""
        yield f"| {_plain(gate.name)} | {gate.result}{waived} | {cells} |"
    if len(outcome.gates) > MOST_GATES:
        yield f"| and {len(outcome.gates) - MOST_GATES} more | | | | |"
    yield ""
    yield f"Smoke prompt: {_plain(smoke.prompt)}"
    yield ""
    yield f"> {_plain(smoke.text)}"
    yield ""
    yield f"More: `pilotage why {question.reference}`"


def _report(found: Recorded) -> str:
    """Where the report is: a link to the run that has it where there is one, else its file."""
    name = f"{found.facts.recipe}-{found.facts.release[:12]}.html"
    address = mlflow_address(settings())
    if address:
        # MLflow 3.17 knows a run without its experiment by this address alone, nothing below it.
        run = f"{address}/#/runs/{found.run_id}"
        return f"report {code(f'report/{name}')} among the [artifacts of the run]({run})"
    return f"report `{settings().reports_dir / name}`"


def _plain(text: str) -> str:
    return escaped(shown(text, 300))
