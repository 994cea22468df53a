"""The tuner's part of the command line: options and help. Modules that do the work are loaded when a command runs.

So `kitsune --help` needs neither torch nor optuna nor SQLAlchemy; a command says what to install if they are missing.
"""

import contextlib
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Final, Literal

import typer

from kitsune.base.environment import variable
from kitsune.base.optional_imports import load
from kitsune.cli.main import PLAN_GROUP, Device, Json, LogFormatOption, PlanFile, ServerUrl
from kitsune.plan import Plan
from tuner.records import RunStatus

#: Import names of the packages of the `tuner` extra.
EXTRA: Final = ("alembic", "optuna", "pynvml", "sqlalchemy")
PLAN_SUFFIX: Final = ".json"
_load = partial(load, extra="tuner", packages=EXTRA)

Spec = Annotated[
    str, typer.Argument(metavar="WORKLOAD", help="zoo:NAME[?batch=N&size=tiny|base], FILE.py:FUNCTION or FILE.ksn")
]
Database = Annotated[
    str | None, typer.Option(metavar="URL", help="sqlite:///PATH or postgresql://...; default: KITSUNE_DATABASE_URL.")
]
Out = Annotated[Path | None, typer.Option(metavar="FILE", help="Save the plan here.", dir_okay=False)]
RunsServer = Annotated[
    str | None, typer.Option("--server", metavar="URL", help="The runs of a server; default: KITSUNE_SERVER, if set.")
]
Seed = Annotated[int, typer.Option(min=-(2**63), max=2**63 - 1, help="Seed of weights, batch and search.")]
MemoryLimit = Annotated[
    str | None,
    typer.Option(metavar="SIZE", help="The most memory that a step may need: 40GiB. The fastest that fits is found."),
]
RunId = Annotated[str, typer.Argument(metavar="RUN", help='The id of a run, or "last".')]
Limit = Annotated[int, typer.Option(min=1, max=1000, help="The maximum number of runs, newest first.")]
Status = Annotated[RunStatus | None, typer.Option(help="Only runs with this status.")]
After = Annotated[str | None, typer.Option(metavar="CURSOR", help='Continue after this page: "after" in --json.')]


def register(app: typer.Typer) -> None:
    """The entry point: adds the commands of this file, and `plan fetch` to the `plan` group."""
    app.command("tune")(tune)
    app.command("explain")(explain)
    app.command("verify")(verify)
    app.command("worker")(worker)
    app.command("export")(export)
    app.command("migrate")(migrate)
    app.command("submit")(submit)
    plans = next(
        group.typer_instance for group in app.registered_groups if group.name == PLAN_GROUP and group.typer_instance
    )
    plans.command("fetch")(plan_fetch)
    history = typer.Typer(help="List, show, watch, cancel or delete runs, or get a plan. Without a command: list.")
    history.callback(invoke_without_command=True)(runs)
    history.command("list")(runs_list)
    history.command("show")(runs_show)
    history.command("plan")(runs_plan)
    history.command("watch")(runs_watch)
    history.command("cancel")(runs_cancel)
    history.command("delete")(runs_delete)
    app.add_typer(history, name="runs")


def tune(
    workload: Spec,
    trials: Annotated[int | None, typer.Option(min=1, help="How many configurations to try.")] = None,
    budget: Annotated[
        str | None,
        typer.Option(metavar="TIME", help="Time limit: 90s, 5m, 1h. Default: suggested after a first look."),
    ] = None,
    memory_limit: MemoryLimit = None,
    device: Device = None,
    seed: Seed = 0,
    database: Database = None,
    out: Out = None,
    as_json: Json = False,
    quiet: Annotated[bool, typer.Option("-q", "--quiet", help="No progress on stderr.")] = False,
    no_ablation: Annotated[
        bool, typer.Option("--no-ablation", help="Do not measure what each choice gives, nor where the time goes.")
    ] = False,
) -> None:
    """Find the fastest way to run a training step here. Ctrl-C ends the search and keeps the best plan."""
    begun_s = time.monotonic()  # before torch is loaded, which takes seconds of the budget
    options = {"trials": trials, "budget": budget, "device": device, "seed": seed, "database": database}
    options["memory_limit"] = memory_limit
    code = _load("tuner.commands.tune").tune(
        workload,
        options={**options, "ablation": not no_ablation, "begun_s": begun_s},
        out=out,
        as_json=as_json,
        quiet=quiet,
    )
    raise typer.Exit(code)


def explain(
    subject: Annotated[
        str, typer.Argument(metavar="PLAN|WORKLOAD", help="FILE.json, or a workload as for tune.", show_default=False)
    ],
    workload: Annotated[
        str | None, typer.Option(metavar="WORKLOAD", help="The workload, if the first argument is a plan.")
    ] = None,
    plan: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Run the step with this plan.", exists=True, dir_okay=False)
    ] = None,
    streams: Annotated[
        int | None, typer.Option(min=1, max=8, help="The maximum number of streams. Default: 1, 2, 4 and 8 in turn.")
    ] = None,
    trace: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Write the fastest schedule as a Perfetto trace.", dir_okay=False),
    ] = None,
    svg: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the fastest schedule as an SVG picture.", dir_okay=False)
    ] = None,
    device: Device = None,
    as_json: Json = False,
) -> None:
    """Show the time of each launch of a step, and what several streams would save."""
    spec, chosen = _explained(subject, workload, plan)
    # absolute, because the user's code, which runs in this process, may change the working directory
    pictures = {kind: path.absolute() for kind, path in (("trace", trace), ("svg", svg)) if path is not None}
    if len(set(pictures.values())) < len(pictures):
        raise typer.BadParameter("a trace is written there already", param_hint="--svg")
    _load("tuner.commands.explain").explain(
        spec, chosen, streams=streams, device=device, pictures=pictures, as_json=as_json
    )


def _explained(subject: str, workload: str | None, plan: Path | None) -> tuple[str, Plan | None]:
    """(workload, plan). The suffix of `subject` tells which of them it is. Raises PlanError."""
    if not subject.endswith(PLAN_SUFFIX):
        if workload is not None:
            raise typer.BadParameter(f"{subject!r} is a workload already", param_hint="--workload")
        return subject, Plan.load(plan) if plan is not None else None
    if plan is not None:
        raise typer.BadParameter(f"{subject!r} is a plan already", param_hint="--plan")
    if workload is None:
        raise typer.BadParameter("a plan does not hold its workload: name it by --workload", param_hint="PLAN")
    if not Path(subject).is_file():
        raise typer.BadParameter(f"there is no file {subject!r}", param_hint="PLAN")
    return workload, Plan.load(subject)


def verify(
    plan: PlanFile,
    workload: Annotated[
        str | None, typer.Argument(metavar="WORKLOAD", help="As for tune; may be left out for a plan of the zoo.")
    ] = None,
    steps: Annotated[int, typer.Option(min=20, help="Steps of each training.")] = 500,
    seeds: Annotated[int, typer.Option(min=2, max=100, help="Number of pairs of trainings, each from a seed.")] = 3,
    device: Device = None,
    out: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Save the loss curves here. Default: beside the plan.", dir_okay=False),
    ] = None,
    as_json: Json = False,
) -> None:
    """Train with and without a plan on fresh batches; exit code 4 if held-out losses differ."""
    done = _load("tuner.commands.verify").verify
    raise typer.Exit(done(plan, workload, steps=steps, seeds=seeds, device=device, out=out, as_json=as_json))


def worker(
    once: Annotated[bool, typer.Option("--once", help="Tune one run and exit; exit at once if there is none.")] = False,
    device: Device = None,
    database: Database = None,
    lease: Annotated[
        str, typer.Option(metavar="TIME", help="Another worker takes over a run after this long without a heartbeat.")
    ] = "60s",
    log_format: LogFormatOption = None,
) -> None:
    """Tune submitted runs, one after another. Ctrl-C and SIGTERM requeue the current run."""
    raise typer.Exit(_load("tuner.commands.worker").work(device, database, lease, once=once, log_format=log_format))


def migrate(database: Database = None, as_json: Json = False) -> None:
    """Migrate the database to the schema of this version. Every command that opens it does so too."""
    _load("tuner.commands.migrate").migrate(database, as_json=as_json)


def export(
    workload: Spec,
    out: Annotated[Path, typer.Option(metavar="FILE", help="The archive to write, usually *.ksn.", dir_okay=False)],
    as_json: Json = False,
) -> None:
    """Write a training step as an archive: its graph, without weights, code or data."""
    _load("tuner.commands.export").export(workload, out, as_json=as_json)


def submit(
    workload: Spec,
    trials: Annotated[
        int | None, typer.Option(min=1, help="How many configurations to try; 25 without a budget.")
    ] = None,
    budget: Annotated[str | None, typer.Option(metavar="TIME", help="How long it may take: 90s, 5m, 1h.")] = None,
    memory_limit: MemoryLimit = None,
    server: ServerUrl = None,
    device: Annotated[
        Literal["cpu", "cuda"] | None, typer.Option(help="The device to tune on. Default: that of the worker.")
    ] = None,
    seed: Seed = 0,
    name: Annotated[str, typer.Option(help="The name of the run.")] = "",
    wait: Annotated[bool, typer.Option("--wait", help="Follow the run until it ends.")] = False,
    as_json: Json = False,
) -> None:
    """Have a server tune a training step. Sends its graph, no weights, code or data. Token: KITSUNE_TOKEN."""
    remote = _load("tuner.commands.submit")
    options = {"trials": trials, "budget": budget, "device": device or "", "seed": seed, "name": name}
    options["memory_limit"] = memory_limit
    raise typer.Exit(remote.submit(workload, _server(server), options, wait=wait, as_json=as_json))


def plan_fetch(
    workload: Spec, server: ServerUrl = None, device: Device = None, out: Out = None, as_json: Json = False
) -> None:
    """Fetch a server's plan for a workload on this machine, as JSON: to stdout or a file."""
    if out is not None:
        out = out.absolute()  # the user's code, which runs in this process, may change the working directory
        _load("tuner.commands.runs").check_writable(out)
    _load("tuner.commands.submit").fetch(workload, _server(server), out, device=device, as_json=as_json)


def runs(
    context: typer.Context,
    limit: Limit = 20,
    status: Status = None,
    after: After = None,
    database: Database = None,
    server: RunsServer = None,
    as_json: Json = False,
) -> None:
    """List, show, watch, cancel or delete runs, or get a plan. Without a command: list."""
    if context.invoked_subcommand is None:
        return runs_list(limit, status, after, database, server, as_json)
    given = {
        "limit": limit != 20,
        "status": status,
        "after": after,
        "database": database,
        "server": server,
        "json": as_json,
    }
    if misplaced := [f"--{name}" for name, value in given.items() if value]:
        raise typer.BadParameter(f"stands after {context.invoked_subcommand!r}", param_hint=misplaced)
    return None


def runs_list(
    limit: Limit = 20,
    status: Status = None,
    after: After = None,
    database: Database = None,
    server: RunsServer = None,
    as_json: Json = False,
) -> None:
    """List runs, newest first."""
    with _ledger(database, server) as ledger:
        _load("tuner.commands.runs").list_runs(ledger, limit=limit, status=status, after=after, as_json=as_json)


def runs_show(run: RunId, database: Database = None, server: RunsServer = None, as_json: Json = False) -> None:
    """Show a run: trials, failures and their reasons, what was not tried, and the plan."""
    with _ledger(database, server) as ledger:
        _load("tuner.commands.runs").show_run(ledger, run, as_json=as_json)


def runs_plan(
    run: RunId, out: Out = None, database: Database = None, server: RunsServer = None, as_json: Json = False
) -> None:
    """Get the plan of a run as JSON: to stdout or a file."""
    with _ledger(database, server) as ledger:
        _load("tuner.commands.runs").give_plan(ledger, run, out, as_json=as_json)


def runs_watch(run: RunId, database: Database = None, server: RunsServer = None, as_json: Json = False) -> None:
    """Follow a run until it ends; exit code 5 if it fails or is cancelled. Ctrl-C does not end it."""
    with _ledger(database, server) as ledger:
        code = _load("tuner.commands.runs").watch_run(ledger, run, as_json=as_json)
    raise typer.Exit(code)


def runs_cancel(run: RunId, database: Database = None, server: RunsServer = None, as_json: Json = False) -> None:
    """Cancel a run after its current trial. Finished trials are kept."""
    with _ledger(database, server) as ledger:
        _load("tuner.commands.runs").cancel_run(ledger, run, as_json=as_json)


def runs_delete(
    run: Annotated[str | None, typer.Argument(metavar="RUN", help='The id of one run, or "last".')] = None,
    older_than: Annotated[
        str | None, typer.Option("--older-than", metavar="TIME", help="All runs that ended longer ago: 12h, 90d.")
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", help="Delete. Without it, only show what would be deleted.")] = False,
    plans: Annotated[
        bool, typer.Option("--plans", help="Delete their plans too, which look-ups still find otherwise.")
    ] = False,
    database: Database = None,
    server: RunsServer = None,
    as_json: Json = False,
) -> None:
    """Delete ended runs, with their trials, links and archives. Without --yes, only say how many."""
    if (run is None) == (older_than is None):
        raise typer.BadParameter("give one of them", param_hint=["RUN", "--older-than"])
    with _ledger(database, server) as ledger:
        history = _load("tuner.commands.runs")
        if run is not None:
            history.delete_run(ledger, run, is_meant=yes, with_plan=plans, as_json=as_json)
        else:
            history.delete_old(ledger, older_than, is_meant=yes, with_plans=plans, as_json=as_json)


@contextlib.contextmanager
def _ledger(database: str | None, server: str | None) -> Iterator[Any]:
    """The runs of a server if one is given (by option, or by KITSUNE_SERVER without --database), else of a database."""
    if database is not None and server is not None:
        raise typer.BadParameter("give one of them", param_hint=["--database", "--server"])
    if server is None and (database is not None or variable("server") is None):
        with _load("tuner.commands.database_runs").opened(database) as ledger:
            yield ledger
    else:
        yield _load("tuner.commands.server_runs").ServerLedger(
            _load("kitsune.client.http_client").Client(_server(server))
        )


def _server(url: str | None) -> Any:
    return _load("kitsune.client.server_address").server_of(url)
