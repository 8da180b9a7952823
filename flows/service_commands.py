"""Commands that start, end and fill the services of one machine: `up`, `down`, `deploy`."""

from __future__ import annotations

import os
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from flows.console import Json, show
from flows.prefect_home import prepare_prefect

if TYPE_CHECKING:
    from tasks.deploying import Deployed
    from tasks.services import Started


def up(as_json: Json = False) -> None:
    """Start Prefect's server, a worker for each work pool and MLflow; what runs is left alone."""
    own = own_api()
    prepare_prefect(runs=False)
    from tasks.services import up as start

    done = start(own)
    show([asdict(one) for one in done] if as_json else "\n".join(map(_row, done)), as_json)


def down(as_json: Json = False) -> None:
    """End what `up` started, with the flow runs and engines below it, and nothing else."""
    prepare_prefect(runs=False)
    from tasks.services import down as end

    ended = end()
    show(ended if as_json else "\n".join(ended) or "nothing was running", as_json)


def deploy(
    file: Annotated[
        Path | None, typer.Option(help="Instead of the checkout's prefect.yaml.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Check prefect.yaml and automations/ and register what differs on the server."""
    own = own_api()
    prepare_prefect(runs=False)
    from tasks.deploying import deploy as register

    done = register(own, file)
    show(asdict(done) if as_json else _text(done), as_json)


def own_api() -> str:
    """PREFECT_API_URL of the user's own, if it is not that of the server of `pilotage up`."""
    from tasks.services import server_url

    found = os.environ.get("PREFECT_API_URL", "").rstrip("/")
    ours = found.replace("//localhost:", "//127.0.0.1:")
    return "" if ours == f"{server_url()}/api" else found


def _row(one: Started) -> str:
    process = "" if one.pid is None else f"pid {one.pid}"
    return f"{one.name:<15}{one.what:<30}{one.url:<27}{process}".rstrip()


def _text(done: Deployed) -> str:
    lines = [f"{name}: {what}" for name, what in done.changed.items()]
    lines += [f"{name}: ours, and not in the files any more; {how}" for name, how in done.left]
    lines.append(
        f"{len(done.changed)} changed, {len(done.unchanged)} unchanged"
        + ("" if done.changed else ": nothing was changed")
    )
    return "\n".join(lines)
