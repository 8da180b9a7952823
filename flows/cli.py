"""The command line. No logic of its own: it reads words, calls a function, renders the answer."""

from __future__ import annotations

import io
import os
import shutil
import signal
import sys
import traceback
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any

import typer

from flows.console import Json, as_encodable, say, show
from flows.ledger_commands import ledger
from flows.lineage_commands import impact, why
from flows.nightly_commands import maintain, nightly
from flows.plan_command import plan as plan_capacity
from flows.prefect_home import prepare_prefect
from flows.profile_command import profile
from flows.promotion_commands import promote, rollback
from flows.prune_command import prune
from flows.service_commands import deploy, down, up
from flows.tune_command import tune_bundle
from flows.turn_commands import begin, compare, prove_draft
from registry.errors import EXIT_CRASH, EXIT_INFRASTRUCTURE, EXIT_USER_ERROR, PilotageError
from registry.redaction import redacted, without_secrets
from registry.settings import settings
from tasks.engines.subprocesses import own_children

app = typer.Typer(
    help="Distil, quantize, prove and promote LLM bundles, or refuse with reasons.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


@app.command()
def release(
    name: Annotated[str, typer.Argument(help="A release recipe, by name or path.")],
    assignments: Annotated[
        list[str] | None, typer.Option("--set", help="Change a recipe: KEY.KEY=VALUE.")
    ] = None,
    prompts: Annotated[
        str | None, typer.Option(help="CSV, JSONL or Parquet instead of the recipe's prompts.")
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show the plan, start nothing.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Run a release to a promoted version or a refusal with reasons."""
    prepare_prefect()
    from tasks.planning import plan, resolve

    overrides = assignments or []
    if dry_run:
        from flows.rendering import plan_document, plan_table

        todo = plan(resolve(name, overrides, prompts))
        show(plan_document(todo) if as_json else plan_table(todo), as_json)
        return
    # Every mistake in a recipe is found before Prefect's server is started.
    plan(resolve(name, overrides, prompts))
    own_children()
    from flows.quick_start import run_release
    from flows.rendering import outcome_text

    outcome = run_release(name, overrides, prompts)
    show(outcome.model_dump(mode="json") if as_json else outcome_text(outcome), as_json)
    raise typer.Exit(outcome.verdict.exit_status)


@app.command()
def recipes(as_json: Json = False) -> None:
    """List the recipes and suites that come with the checkout."""
    from flows.rendering import recipes_document, recipes_table

    document = recipes_document()
    show(document if as_json else recipes_table(document), as_json)


@app.command()
def validate(
    paths: Annotated[list[Path], typer.Argument(help="Recipes and suites, files or folders.")],
) -> None:
    """Read recipes and suites and report every mistake."""
    from flows.rendering import validate_files

    count = validate_files(paths)
    typer.echo(f"{count} files are valid")


@app.command()
def doctor(
    prove: Annotated[
        bool, typer.Option(help="Prove each format with a token (minutes, once; then remembered).")
    ] = True,
    as_json: Json = False,
) -> None:
    """Say what is installed and what this hardware can serve; for each problem, the repair."""
    from flows.rendering import doctor_document, doctor_text
    from tasks.progress import configure_logging

    configure_logging()
    document = doctor_document(prove)
    show(document if as_json else doctor_text(document), as_json)
    if document["problems"]:
        raise typer.Exit(EXIT_USER_ERROR)


@app.command()
def serve(
    reference: Annotated[str, typer.Argument(help="MODEL@ALIAS or MODEL@VERSION.")],
    print_only: Annotated[bool, typer.Option("--print", help="Print the command only.")] = False,
    port: Annotated[int, typer.Option(min=1, max=65535)] = 8000,
) -> None:
    """Serve what an alias points to, with the arguments that were gated."""
    from tasks.bundles import gated_bundle, serve_command

    bundle = gated_bundle(reference)
    if bundle.topology is not None:
        from tasks.serving_parts import printed, serve_in_parts

        if print_only:
            typer.echo(printed(bundle, reference, port))
        else:
            begin()
            serve_in_parts(bundle, reference, port)
        return
    command, env = serve_command(bundle, reference, port)
    if print_only:
        import shlex

        words = [f"{key}={value}" for key, value in env.items()]
        typer.echo(" ".join([*map(shlex.quote, words), *map(shlex.quote, command)]))
        return
    # The key that clients must send is the one secret that the server needs.
    key = {name: os.environ[name] for name in ("VLLM_API_KEY",) if name in os.environ}
    os.execvpe(command[0], command, {**without_secrets(os.environ), **key, **env})


Candidates = Annotated[
    list[str],
    typer.Option("--candidate", help="[NAME=]DIR: a folder of evidence. Several may be given."),
]
References = Annotated[
    list[str] | None,
    typer.Option("--reference", help="NAME=DIR, NAME one of teacher, student, champion."),
]
MOST_CANDIDATES = 10_000
PolicyName = Annotated[str, typer.Option("--policy", help="A policy, by name or path.")]


@app.command()
def gate(
    policy: PolicyName,
    candidate: Candidates,
    reference: References = None,
    aa: Annotated[
        list[str] | None,
        typer.Option("--aa", help="DIR, given twice: two runs of one bundle, for the noise."),
    ] = None,
    candidates: Annotated[
        int,
        typer.Option(
            min=0, max=MOST_CANDIDATES, help="How many the release has, if not all are given here."
        ),
    ] = 0,
    champion_policy: Annotated[
        str | None,
        typer.Option(help="The policy that promoted the champion; a looser one is refused."),
    ] = None,
    junit: Annotated[Path | None, typer.Option(help="Write JUnit XML to this file.")] = None,
    summary: Annotated[
        Path | None, typer.Option(help="Append Markdown to this file, e.g. $GITHUB_STEP_SUMMARY.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Judge folders of evidence by a policy. Starts nothing and measures nothing."""
    # Two threads draw the bootstrap; a BLAS of several threads would only get in their way.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    from flows.gating import gate_folders, write_reports

    outcome = gate_folders(
        policy, candidate, reference or [], aa or [], candidates, champion_policy
    )
    write_reports(outcome, junit, summary)
    from registry.gate_report import json_line, text

    say(as_encodable(json_line(outcome)) if as_json else text(outcome))
    raise typer.Exit(outcome.verdict.exit_status)


@app.command()
def power(
    policy: PolicyName,
    evidence: Annotated[str, typer.Option(help="A folder of evidence to take the spread from.")],
    effect: Annotated[
        float, typer.Option(min=0.0, help="The true value, as a share of the reference's.")
    ],
    reference: Annotated[
        str | None,
        typer.Option(help="A paired run of the reference; then they need not be independent."),
    ] = None,
    candidates: Annotated[
        int, typer.Option(min=1, max=MOST_CANDIDATES, help="Candidates of the release.")
    ] = 1,
    as_json: Json = False,
) -> None:
    """Say how many items each gate needs for 80 % power, before a night is spent."""
    from flows.gating import power_of_policy, power_text

    rows = power_of_policy(policy, evidence, effect, reference, candidates)
    from registry.gate_report import strict_line

    line = strict_line([row.model_dump() for row in rows])
    say(as_encodable(line) if as_json else power_text(rows))


@app.command()
def bench(
    load: Annotated[str, typer.Option(help="A load profile with an SLA, by name or path.")],
    url: Annotated[
        str | None, typer.Option(help="An OpenAI-compatible endpoint, with or without /v1.")
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(help="With --url the model's name there; alone a model folder to serve."),
    ] = None,
    bundle: Annotated[
        str | None, typer.Option(help="MODEL@ALIAS, MODEL@VERSION or a digest: serve this bundle.")
    ] = None,
    serve_recipe: Annotated[
        str | None, typer.Option("--serve", help="Serve recipe of a model folder.")
    ] = None,
    prompts: Annotated[
        Path | None, typer.Option(help="JSONL with `id` and `prompt` or `messages`.")
    ] = None,
    tokenizer: Annotated[
        Path | None, typer.Option(help="Tokenizer folder of a URL's model; without, words count.")
    ] = None,
    hardware: Annotated[
        str | None, typer.Option(help="A hardware file with a price per hour, for the costs.")
    ] = None,
    generator: Annotated[str, typer.Option(help="What sends the load: vllm or guidellm.")] = "vllm",
    out: Annotated[
        Path | None, typer.Option(help="Folder of the evidence; a stopped search goes on in it.")
    ] = None,
    tune: Annotated[
        list[str] | None,
        typer.Option(
            help="Of a bundle: measure with each of these, max-num-seqs=16,32,64 or "
            "max-num-batched-tokens=1024,2048; both may be given."
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Find the largest request rate at which an endpoint or a bundle keeps its SLA."""
    if tune:
        begin()
        others = {"--url": url, "--model": model, "--serve": serve_recipe, "--hardware": hardware}
        others["--tokenizer"] = str(tokenizer) if tokenizer else None
        status = tune_bundle(
            bundle, load, tune, others, prompts=prompts, out=out, generator=generator,
            as_json=as_json,
        )  # fmt: skip
        raise typer.Exit(status)
    from flows.bench_rendering import bench_text
    from tasks.bench_targets import opened
    from tasks.benchmarking import bench as measure
    from tasks.benchmarking import document

    begin()
    key = settings().teacher_api_key.get_secret_value()
    target, identity = opened(
        url=url, model=model, bundle=bundle, serve=serve_recipe, tokenizer=tokenizer, api_key=key
    )
    done = measure(
        target, identity, load, prompts=prompts, hardware=hardware, generator=generator, out=out
    )
    show(document(done) if as_json else bench_text(document(done)), as_json)
    raise typer.Exit(done.verdict.exit_status)


app.command()(compare)
app.command()(prove_draft)
app.command()(promote)
app.command("plan")(plan_capacity)
app.command()(why)
app.command()(impact)
app.command()(ledger)
app.command()(profile)
app.command()(prune)
app.command()(rollback)
app.command()(nightly)
app.command()(maintain)
app.command()(up)
app.command()(down)
app.command()(deploy)


def main() -> None:
    """Entry point: turns our errors into messages and exit statuses."""
    signal.signal(signal.SIGTERM, _stop)
    signal.signal(signal.SIGINT, _stop)
    for stream in (sys.stdout, sys.stderr):
        # A name that a terminal cannot show is no reason to crash.
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    try:
        app(standalone_mode=True)
    except PilotageError as error:
        # A log that is full takes the words, not the status.
        with suppress(OSError):
            for line in str(error).splitlines():
                # A name in it may hold what a terminal obeys, or what turns its letters round.
                plain = "".join(c if c.isprintable() else ascii(c)[1:-1] for c in line)
                print(f"pilotage: {plain}", file=sys.stderr)
        if error.exit_status == EXIT_INFRASTRUCTURE:
            _tell_full_disk()
        sys.exit(error.exit_status)
    except BaseException as error:
        # What Prefect raises while it is being stopped hides the reason: somebody asked for it.
        if _stopped_by:
            print("pilotage: stopped; finished stages are kept and reused", file=sys.stderr)
            sys.exit(128 + _stopped_by[0])
        service = type(error).__module__.partition(".")[0] in ("httpx", "prefect", "sqlalchemy")
        # A server that does not start or answer is a plain RuntimeError of Prefect's.
        service = service or (isinstance(error, RuntimeError) and _raised_by(error) == "prefect")
        if service or isinstance(error, OSError | MemoryError):
            # A full disk or memory, a server or database that went away: the machine's, no bug.
            with suppress(OSError):
                what = redacted(str(error)) or "there is not enough of it"
                print(f"pilotage: {type(error).__name__}: {what}", file=sys.stderr)
            _tell_full_disk()
            sys.exit(EXIT_INFRASTRUCTURE)
        if isinstance(error, SystemExit):
            raise
        # A bug, with its traceback: what libraries say in it may hold a secret.
        print(redacted(traceback.format_exc()), end="", file=sys.stderr)
        sys.exit(EXIT_CRASH)


def _raised_by(error: BaseException) -> str:
    """Top-level package of the code that raised it."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    module = trace.tb_frame.f_globals.get("__name__", "") if trace is not None else ""
    return str(module).partition(".")[0]


FULL_DISK = 100 << 20
"""Bytes. With less than this left, the disk is named as the likely cause of a fault."""


def _tell_full_disk() -> None:
    """A process that could not write its log says nothing else."""
    with suppress(OSError):
        free = shutil.disk_usage(settings().home).free
        if free < FULL_DISK:
            where = f"PILOTAGE_HOME={settings().home}"
            print(f"pilotage: {where} has {free >> 20} MiB left: make room", file=sys.stderr)


_stopped_by: list[int] = []


def _stop(number: int, frame: Any) -> None:
    # An exception, so that every `finally` ends its servers; the status is the shell's own.
    _stopped_by.append(number)
    # A second signal would cut short what ends the servers.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # Prefect's client may go on asking a server that got the signal too; ours are ended by then.
    signal.signal(signal.SIGALRM, lambda *_: os._exit(128 + number))
    signal.alarm(round(3 * settings().stop_grace) + 5)
    sys.exit(128 + number)


if __name__ == "__main__":
    main()
