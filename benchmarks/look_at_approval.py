"""Answer the question of a suspended promotion in a headless browser, with pictures (docs/ui.md).

Needs a server with a run of the promote flow that waits for a person, Chromium, and `pip install
playwright`, which is in no list of ours:

    python -m benchmarks.look_at_approval --run ID --answer no --by Mei --reason "too slow"

Sends the form without a name first, which must be refused. Prints one JSON line: what the form and
the refusal said, what the run ended with, and the pictures.
"""

from __future__ import annotations

import json
import time
from typing import Any

from benchmarks.look_at_form import SETTLED, Looker, looking, options

ENDED = ("COMPLETED", "FAILED", "CRASHED", "CANCELLED")


def opened(look: Looker, run: str) -> Any:
    """The dialog of the run's menu."""
    look.open(f"runs/flow-run/{run}")
    look.page.get_by_role("button", name="Open menu").first.click()
    look.page.get_by_role("menuitem", name="Resume").wait_for()
    look.picture("approval_menu")
    look.page.get_by_role("menuitem", name="Resume").click()
    dialog = look.page.get_by_role("dialog")
    dialog.get_by_label("Reason").wait_for()
    look.page.wait_for_timeout(500)
    look.picture("approval_question")
    return dialog


def refused(look: Looker, dialog: Any, run: str) -> str:
    """The dialog's words when it is sent as it is."""
    dialog.get_by_role("button", name="Resume").click()
    refusal = str(look.page.get_by_text("Validation failed").inner_text())
    look.picture("approval_refused")
    state = look.api("GET", f"flow_runs/{run}")["state_name"]
    if state != "Suspended":
        raise SystemExit(f"a form without a name was taken: the run is {state}")
    return refusal


def answered(look: Looker, dialog: Any, answer: str, by: str, reason: str) -> None:
    dialog.get_by_label("Select Answer").click()
    look.page.get_by_role("option", name=answer, exact=True).click()
    dialog.get_by_label("Answered By").fill(by)
    dialog.get_by_label("Reason").fill(reason)
    look.page.wait_for_timeout(500)
    file = look.out / "ui_approval_form.png"
    dialog.screenshot(path=str(file))
    look.pictures.append(file.name)
    dialog.get_by_role("button", name="Resume").click()
    look.page.wait_for_timeout(SETTLED)


def ended(look: Looker, run: str, limit: float) -> dict[str, Any]:
    until = time.monotonic() + limit
    while time.monotonic() < until:
        state: dict[str, Any] = look.api("GET", f"flow_runs/{run}")
        if state["state_type"] in ENDED:
            look.open(f"runs/flow-run/{run}")
            look.picture("approval_ended")
            return state
        time.sleep(1)
    raise SystemExit(f"the run did not end within {limit:.0f} s: {look.page.inner_text('body')}")


def main() -> None:
    parser = options(__doc__.splitlines()[0])
    parser.add_argument("--run", required=True, help="id of the suspended run")
    parser.add_argument("--answer", choices=("no", "yes"), required=True)
    parser.add_argument("--by", required=True)
    parser.add_argument("--reason", required=True)
    given = parser.parse_args()
    with looking(given, height=1000) as look:
        dialog = opened(look, given.run)
        shown = dialog.inner_text()
        refusal = refused(look, dialog, given.run)
        answered(look, dialog, given.answer, given.by, given.reason)
        end = ended(look, given.run, given.limit)
    line = {
        "form": shown,
        "refusal": refusal,
        "run": end["name"],
        "state": end["state_name"],
        "message": (end["state"] or {}).get("message"),
        "pictures": look.pictures,
    }
    print(json.dumps(line, ensure_ascii=False))


if __name__ == "__main__":
    main()
