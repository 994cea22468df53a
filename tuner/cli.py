"""The tuner's part of the command line: options in; the work is done by modules that are loaded when a command runs.

So `kitsune --help` loads neither torch nor optuna nor SQLAlchemy, and says what to install where they are missing.
"""

import importlib
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from kitsune.cli import Device, Json
from kitsune.errors import UnfitError
from tuner.records import RunStatus

#: Packages of the extra, by the name under which they are imported.
EXTRA: Final = ("alembic", "optuna", "pynvml", "sqlalchemy")

Spec = Annotated[
    str, typer.Argument(metavar="WORKLOAD", help="zoo:NAME[?batch=N&size=tiny|base], FILE.py:FUNCTION or FILE.ksn")
]
Database = Annotated[
    str | None, typer.Option(metavar="URL", help="sqlite:///PATH or postgresql://...; default: KITSUNE_DATABASE_URL.")
]
Out = Annotated[Path | None, typer.Option(metavar="FILE", help="Save the plan here.", dir_okay=False)]
RunId = Annotated[str, typer.Argument(metavar="RUN", help='The id of a run, or "last".')]
Limit = Annotated[int, typer.Option(min=1, max=1000, help="At most so many runs, newest first.")]
Status = Annotated[RunStatus | None, typer.Option(help="Only runs that stand so.")]
After = Annotated[str | None, typer.Option(metavar="CURSOR", help='Go on after this page: "after" of its --json.')]


def register(app: typer.Typer) -> None:
    """The entry point: adds `tune`, `export` and `runs` to the app."""
    app.command("tune")(tune)
    app.command("export")(export)
    history = typer.Typer(help="What was tuned here: list, show, plan. Alone it lists.")
    history.callback(invoke_without_command=True)(runs)
    history.command("list")(runs_list)
    history.command("show")(runs_show)
    history.command("plan")(runs_plan)
    app.add_typer(history, name="runs")


def tune(
    workload: Spec,
    trials: Annotated[
        int | None, typer.Option(min=1, help="How many configurations to try; 25 without a budget.")
    ] = None,
    budget: Annotated[str | None, typer.Option(metavar="TIME", help="How long it may take: 90s, 5m, 1h.")] = None,
    device: Device = None,
    seed: Annotated[int, typer.Option(help="Of weights, batch and search.")] = 0,
    database: Database = None,
    out: Out = None,
    as_json: Json = False,
    quiet: Annotated[bool, typer.Option("-q", "--quiet", help="No progress on stderr.")] = False,
) -> None:
    """Measure how a training step runs fastest here, and keep the plan. Ctrl-C ends the search and keeps the best."""
    code = _load("tuner.session").tune(
        workload,
        options={"trials": trials, "budget": budget, "device": device, "seed": seed, "database": database},
        out=out,
        as_json=as_json,
        quiet=quiet,
    )
    raise typer.Exit(code)


def export(
    workload: Spec,
    out: Annotated[Path, typer.Option(metavar="FILE", help="The archive to write; by custom *.ksn.", dir_okay=False)],
    as_json: Json = False,
) -> None:
    """Write a training step as an archive: its graph, without weights, code or data."""
    _load("tuner.packing").export(workload, out, as_json=as_json)


def runs(
    context: typer.Context,
    limit: Limit = 20,
    status: Status = None,
    after: After = None,
    database: Database = None,
    as_json: Json = False,
) -> None:
    """What was tuned here: list, show, plan. Alone it lists."""
    if context.invoked_subcommand is None:
        return runs_list(limit, status, after, database, as_json)
    given = {"limit": limit != 20, "status": status, "after": after, "database": database, "json": as_json}
    if misplaced := [f"--{name}" for name, value in given.items() if value]:
        raise typer.BadParameter(f"stands after {context.invoked_subcommand!r}", param_hint=misplaced)
    return None


def runs_list(
    limit: Limit = 20,
    status: Status = None,
    after: After = None,
    database: Database = None,
    as_json: Json = False,
) -> None:
    """The newest runs."""
    _load("tuner.history").list_runs(database, limit=limit, status=status, after=after, as_json=as_json)


def runs_show(run: RunId, database: Database = None, as_json: Json = False) -> None:
    """One run: what was tried, what failed and why, what was never tried and why, and the plan."""
    _load("tuner.history").show_run(database, run, as_json=as_json)


def runs_plan(run: RunId, out: Out = None, database: Database = None, as_json: Json = False) -> None:
    """The plan of a run as JSON: on stdout, or in a file."""
    _load("tuner.history").give_plan(database, run, out, as_json=as_json)


def _load(module: str) -> Any:
    """Raises UnfitError when the packages of the extra are not installed."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in EXTRA:
            raise
        raise UnfitError(
            f"this command needs {error.name}, which is not installed; pip install 'kitsune-torch[tuner]'"
        ) from error
