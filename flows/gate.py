"""The gate flow: folders of evidence ─► gates ─► verdict. Starts nothing and measures nothing.

For `prefect deployment run gate/ci --watch`, which tells a pipeline whether the run completed:
any verdict but PASS ends it as Failed. The finer exit status comes from `pilotage gate`.
"""

from __future__ import annotations

from prefect import flow

from flows.endings import PASSED, REFUSED, Ended, told
from flows.forms import GateRequest
from flows.gating import gate_folders
from flows.pages import show_page
from registry.gate_outcome import GateOutcome
from registry.gate_report import markdown
from registry.outcome import Verdict


@flow(name="gate", flow_run_name="gate-{request.policy}", validate_parameters=True)
@told
def gate_evidence(request: GateRequest) -> Ended[GateOutcome]:
    """Judge folders of evidence. Raises `UserError` for words, a file or a policy that is wrong."""
    outcome = gate_folders(
        request.policy,
        request.candidates,
        request.references,
        request.repeated,
        request.planned,
        request.champion_policy,
    )
    show_page("gates", markdown(outcome), f"policy {outcome.policy}")
    if outcome.verdict is Verdict.PASS:
        return Ended(outcome, PASSED, said(outcome))
    return Ended(outcome, REFUSED, said(outcome), refused=True)


def said(outcome: GateOutcome) -> str:
    """One line that begins with the verdict: whom it passed, or why nobody passed."""
    passed = [one.name for one in outcome.candidates if one.verdict is Verdict.PASS]
    if outcome.verdict is Verdict.PASS:
        limits = "" if outcome.promotable else "; not promotable by this evidence alone"
        return f"{outcome.verdict}: {', '.join(passed)} by {outcome.policy}{limits}"
    reasons = [f"{one.name}: {one.reasons[0]}" for one in outcome.candidates if one.reasons]
    return f"{outcome.verdict}: {'; '.join(reasons) or 'nobody passed'}"
