"""Commands that move an alias: `promote` and `rollback`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from flows.console import Json, show
from flows.prefect_home import prepare_prefect
from flows.turn_commands import begin
from registry.errors import UserError

if TYPE_CHECKING:
    from registry.alias_outcome import AliasOutcome


def promote(
    bundle: Annotated[
        str, typer.Argument(metavar="BUNDLE", help="MODEL@candidate, MODEL@VERSION or a digest.")
    ],
    alias: Annotated[str, typer.Option(help="The alias to move.")] = "champion",
    policy: Annotated[
        str | None, typer.Option(help="A policy that it must have been judged by, name or path.")
    ] = None,
    reason: Annotated[
        str, typer.Option(help="For the ledger; needed for a version that was rolled back.")
    ] = "",
    approve: Annotated[
        bool,
        typer.Option("--approve", help="Say yes where the policy asks a person; needs --reason."),
    ] = False,
    as_json: Json = False,
) -> None:
    """Point an alias to a bundle that passed, on recorded evidence alone; smoke-tested."""
    _begin()
    from flows.forms import PromoteRequest, request_of
    from flows.promote import promote_bundle
    from tasks.bundles import check_text

    words = {"BUNDLE": bundle, "--alias": alias, "--reason": reason, "--policy": policy or ""}
    check_text(words)
    request = request_of(
        PromoteRequest, bundle=bundle, alias=alias, policy=policy, reason=reason, approve=approve
    )
    outcome = promote_bundle(request)
    # None is for runs of a deployment alone, which may find that another one asks already.
    if outcome is not None:
        _show(outcome, as_json)


def rollback(
    model: Annotated[str, typer.Argument(help="A registered model.")],
    reason: Annotated[str, typer.Option(help="Why; it stands in the ledger.")],
    to: Annotated[
        int | None, typer.Option(min=1, help="A version that was champion; else the one before.")
    ] = None,
    smoke: Annotated[
        bool, typer.Option(help="Ask it a prompt first; --no-smoke where no engine is at hand.")
    ] = True,
    as_json: Json = False,
) -> None:
    """Point the champion back to an earlier one."""
    _begin()
    from flows.forms import RollbackRequest, request_of
    from flows.rollback import roll_back_model
    from tasks.bundles import check_model_name, check_text

    check_model_name(model)
    check_text({"--reason": reason})
    if not reason.strip():
        raise UserError.at("--reason", "is empty", "say why: it stands in the ledger")
    request = request_of(RollbackRequest, model=model, reason=reason, to=to, smoke=smoke)
    _show(roll_back_model(request), as_json)


def _begin() -> None:
    """Before Prefect is imported: its home, and the end of what a kill left behind."""
    prepare_prefect()
    begin()


def _show(outcome: AliasOutcome, as_json: bool) -> None:
    show(outcome.model_dump(mode="json") if as_json else _text(outcome), as_json)


def _text(outcome: AliasOutcome) -> str:
    from registry.alias_moves import shown

    where = f"{outcome.model}@{outcome.alias}"
    now = f"version {outcome.version} (bundle {outcome.bundle[:12]})"
    if not outcome.changed:
        lines = [f"{where} is {now} already; nothing was moved"]
    else:
        was = f"version {outcome.before}" if outcome.before is not None else "nothing"
        lines = [f"{where}: {was} -> {now}"]
    for answer in outcome.smoke:
        said = shown(answer.text, 100)
        lines.append(
            f"asked {answer.reference} (started in {answer.startup_seconds:.1f} s): {said}"
        )
    if outcome.line is not None:
        by = shown(outcome.actor)
        lines.append(f"ledger: line {outcome.line}, {by}, {outcome.line_hash[:12]}")
    return "\n".join(lines)
