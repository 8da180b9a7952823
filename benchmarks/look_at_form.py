"""Fill in the form of release/manual in a headless browser and take pictures (docs/ui.md).

Needs a server with the deployments (`make up deploy`), a home in which the release is finished (so
that it takes half a minute), Chromium, and `pip install playwright`, which is in no list of ours:

    python -m benchmarks.look_at_form --own tests/recipes/release_tiny.yaml

Prints one JSON line: what the run ended with, and the pictures. The pictures show what lies in that
home; look at them before they are committed.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from prefect.client.base import PrefectHttpxSyncClient

IMAGES = Path(__file__).resolve().parents[1] / "docs" / "images"
DEPLOYMENT = "release/manual"
SETTLED = 3000
"""Milliseconds until a page has asked for all that it shows."""


class Looker:
    """A page of the UI and the API behind it."""

    def __init__(self, page: Any, url: str, out: Path) -> None:
        self.page, self.url, self.out = page, url, out
        self.pictures: list[str] = []

    def open(self, path: str) -> None:
        # Not "load": the page asks for fonts and news outside, which a machine may not reach.
        self.page.goto(f"{self.url}/v2/{path}", wait_until="domcontentloaded")
        self.page.get_by_text("Dashboard").first.wait_for()
        self.page.wait_for_timeout(SETTLED)

    def picture(self, name: str, *, full: bool = False) -> None:
        file = self.out / f"ui_{name}.png"
        self.page.screenshot(path=str(file), full_page=full)
        self.pictures.append(file.name)

    def api(self, method: str, path: str, body: Any = None) -> Any:
        # Prefect's own, which has the token that a request which changes something must bring.
        with PrefectHttpxSyncClient(
            base_url=f"{self.url}/api", enable_csrf_support=True, timeout=30
        ) as client:
            return client.request(method, f"/{path}", json=body).json()


def options(description: str) -> argparse.ArgumentParser:
    """What every look at the UI takes."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--url", default="http://127.0.0.1:4200")
    parser.add_argument("--out", type=Path, default=IMAGES)
    parser.add_argument("--chromium", default="/usr/bin/chromium")
    parser.add_argument("--limit", type=float, default=900.0, help="seconds the run may take")
    return parser


@contextmanager
def looking(given: argparse.Namespace, height: int = 800) -> Iterator[Looker]:
    """A page in a headless Chromium, with the `options`."""
    from playwright.sync_api import sync_playwright

    given.out.mkdir(parents=True, exist_ok=True)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=given.chromium, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1200, "height": height})
        page.set_default_timeout(180_000)
        yield Looker(page, given.url, given.out)
        browser.close()


def fill_in_and_submit(look: Looker, own: str) -> str:
    """The id of the run that the form made."""
    deployment = look.api("GET", f"deployments/name/{DEPLOYMENT}")["id"]
    look.open(f"deployments/deployment/{deployment}/run")
    look.page.get_by_role("button", name="Submit").wait_for()
    look.picture("form", full=True)
    # The recipe comes first: its drop-down, then a path of one's own.
    look.page.get_by_text("freight_demo", exact=True).first.click()
    look.page.wait_for_timeout(500)
    look.picture("form_recipes")
    look.page.keyboard.press("Escape")
    look.page.get_by_text("own file").first.click()
    look.page.locator("textarea").first.fill(own)
    look.page.wait_for_timeout(500)
    look.picture("form_filled", full=True)
    before = {run["id"] for run in look.api("POST", "flow_runs/filter", {})}
    look.page.get_by_role("button", name="Submit").click()
    for _ in range(60):
        made = {run["id"] for run in look.api("POST", "flow_runs/filter", {})} - before
        if made:
            return str(made.pop())
        time.sleep(0.5)
    raise SystemExit(f"nothing was started: {look.page.inner_text('body')[-500:]}")


def watched(look: Looker, run: str, limit: float) -> dict[str, Any]:
    """The run when it has ended; pictures of it under way and at the end."""
    until = time.monotonic() + limit
    seen = False
    while time.monotonic() < until:
        state: dict[str, Any] = look.api("GET", f"flow_runs/{run}")
        if state["state_type"] == "RUNNING" and not seen:
            time.sleep(12)
            look.open(f"runs/flow-run/{run}")
            look.picture("run_under_way")
            seen = True
        if state["state_type"] in ("COMPLETED", "FAILED", "CRASHED", "CANCELLED"):
            look.open(f"runs/flow-run/{run}")
            look.picture("run_ended")
            return state
        time.sleep(1)
    raise SystemExit(f"the run did not end within {limit:.0f} s")


def pages_of(look: Looker, run: str) -> list[str]:
    """Keys of the run's pages; a picture of the list, and of each."""
    look.open(f"runs/flow-run/{run}?tab=Artifacts")
    look.page.get_by_role("tab", name="Artifacts").click()
    look.page.wait_for_timeout(SETTLED)
    look.picture("artifacts")
    wanted = {"artifacts": {"flow_run_id": {"any_": [run]}}}
    pages = look.api("POST", "artifacts/filter", wanted)
    newest = {page["key"]: page["id"] for page in reversed(pages) if page["key"]}
    for key, page in newest.items():
        look.open(f"artifacts/artifact/{page}")
        look.picture(f"artifact_{key}")
    return sorted(newest)


def main() -> None:
    parser = options(__doc__.splitlines()[0])
    parser.add_argument("--own", required=True, help="path of a release recipe, for the worker")
    given = parser.parse_args()
    with looking(given) as look:
        run = fill_in_and_submit(look, given.own)
        ended = watched(look, run, given.limit)
        pages = pages_of(look, run)
    line = {
        "run": ended["name"],
        "type": ended["state_type"],
        "state": ended["state_name"],
        "message": (ended["state"] or {}).get("message"),
        "parameters": ended["parameters"],
        "pages": pages,
        "pictures": look.pictures,
    }
    print(json.dumps(line, ensure_ascii=False))


if __name__ == "__main__":
    main()
