"""The `kitsune` command line. The tuner adds its commands through the entry points of GROUP.

Data goes to stdout, everything else to stderr. torch is imported only by the commands that need it.
"""

import importlib
import logging
import platform
import re
import sys
from collections.abc import Sequence
from http import HTTPStatus
from importlib.metadata import entry_points
from pathlib import Path
from types import TracebackType
from typing import Annotated, Any, Final, NoReturn

import typer
from typer.core import TyperGroup

from kitsune import __version__
from kitsune.base.json_logging import LogFormat
from kitsune.base.optional_imports import load
from kitsune.base.text_format import clean
from kitsune.cli import doctor, output, signals
from kitsune.cli.exit_codes import ExitCode, code_of
from kitsune.errors import KitsuneError, NotFoundError, RefusedError
from kitsune.plan import Match, Plan, differences

GROUP: Final = "kitsune.commands"
PLAN_GROUP: Final = "plan"
_PLAN_ID: Final = re.compile(r"[0-9a-f]{64}")
DEBUG: Final = "--debug"
HELP: Final = ("-h", "--help")
# Depending on its version, typer vendors Click or uses the one from PyPI. This is ClickException of either.
UsageProblem: Final[type[Any]] = typer.BadParameter.__mro__[2]

log = logging.getLogger("kitsune")

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout, for errors too.")]
PlanFile = Annotated[
    Path, typer.Argument(metavar="FILE", help="A plan in a JSON file.", exists=True, dir_okay=False, readable=True)
]
PlanName = Annotated[str, typer.Argument(metavar="PLAN", help="A plan in a JSON file, or its id on a server.")]
ServerUrl = Annotated[
    str | None, typer.Option("--server", metavar="URL", help="Default: KITSUNE_SERVER, or the one on this machine.")
]
LogFormatOption = Annotated[
    LogFormat | None,
    typer.Option("--log-format", help="text for people, json for programs: one object a line. Default: text."),
]
Device = Annotated[str | None, typer.Option(metavar="cpu|cuda:N", help="Default: the current GPU, or the CPU.")]


def main() -> NoReturn:
    """Runs the command in `sys.argv` and exits. `--debug` may stand anywhere."""
    arguments = sys.argv[1:]
    if DEBUG in arguments:
        arguments = [DEBUG, *(argument for argument in arguments if argument != DEBUG)]
    else:
        sys.excepthook = tell_unexpected
    output.ensure_streams()
    signals.handle()
    sys.exit(run(arguments))


def tell_unexpected(kind: type[BaseException], error: BaseException, _: TracebackType | None) -> None:
    """sys.excepthook: reports an unexpected error without its traceback. Python then exits with code 1."""
    what = (str(error).strip().splitlines() or ["no message"])[0]
    message = f"unexpected {kind.__name__}: {what}; run with {DEBUG} for the traceback"
    output.fail(kind.__name__, message, ExitCode.UNEXPECTED, as_json="--json" in sys.argv)


def run(arguments: Sequence[str]) -> int:
    """Runs one command line and returns its exit code. Errors other than KitsuneError propagate."""
    as_json = "--json" in arguments
    try:
        command = typer.main.get_command(full_app())
        code = command.main(list(arguments), prog_name="kitsune", standalone_mode=False)
    except KitsuneError as error:
        return output.fail(type(error).__name__, str(error), code_of(error), as_json=as_json)
    except OSError as error:
        if not set(HELP) & set(arguments):
            raise
        return output.fail_help(error)
    except (KeyboardInterrupt, _Interrupted, typer.Abort):
        return signals.tell_interrupted(as_json=as_json)
    except UsageProblem as error:
        if (context := getattr(error, "ctx", None)) is not None:
            output.note(f"{context.get_usage()}\nTry '{context.command_path} --help' for help.\n")
        return output.fail("UsageError", error.format_message(), ExitCode.USAGE, as_json=as_json)
    return code if isinstance(code, int) else ExitCode.OK


class _Interrupted(BaseException):
    """Ctrl-C under another type: Click would handle KeyboardInterrupt itself and exit without a message."""


class _Commands(TyperGroup):
    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt as error:
            raise _Interrupted from error


def full_app() -> typer.Typer:
    """The app with the commands of this file and of every entry point of GROUP, which is called with the app."""
    app = typer.Typer(
        cls=_Commands,
        add_completion=True,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": list(HELP)},
    )
    app.callback(invoke_without_command=True)(root)
    plans = typer.Typer(help="Show, check or compare plans, or fetch one from a server.")
    plans.command("show")(plan_show)
    plans.command("check")(plan_check)
    plans.command("diff")(plan_diff)
    app.add_typer(plans, name=PLAN_GROUP)
    # a set: an editable installation is found twice
    for entry in sorted(set(entry_points(group=GROUP)), key=lambda entry: entry.name, reverse=True):
        try:
            register = entry.load()
        except ImportError as error:
            log.warning("the commands of %s cannot be loaded: %s", entry.name, error)
            continue
        register(app)
    app.command("doctor")(tell_health)
    return app


def root(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the versions of Kitsune, torch and CUDA.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="With --version: as one JSON object.")] = False,
    debug: Annotated[bool, typer.Option(DEBUG, help="Log all; show the traceback of unexpected errors.")] = False,
) -> None:
    """Measures how your PyTorch training step runs fastest on your GPU, proves the numbers, and keeps the plan."""
    if debug:
        logging.basicConfig(level=logging.INFO)
        log.setLevel(logging.DEBUG)
    if version:
        found = versions()
        output.emit(found) if as_json else output.stdout().print("\n".join(f"{k} {v}" for k, v in found.items()))
        raise typer.Exit
    if context.invoked_subcommand is None:
        context.fail("Missing command.")
    if as_json:
        raise typer.BadParameter("stands after the command", param_hint="--json")


def versions() -> dict[str, str]:
    """The versions that a bug report needs. Imports torch."""
    found = {"kitsune": __version__, "python": platform.python_version()}
    try:
        device = importlib.import_module("kitsune.device.backend")
    except (ImportError, OSError) as error:
        return {**found, "torch": f"cannot be imported: {error}"}
    here = device.environment(device.pick_device())
    return {
        **found,
        "torch": here.torch,
        "cuda": here.cuda or "not used",
        "driver": here.driver or "none",
        "device": here.gpu,
    }


def plan_show(plan_name: PlanName, server: ServerUrl = None, as_json: Json = False) -> None:
    """Show the choices of a plan, where it is valid, and what was measured."""
    plan = named_plan(plan_name, server)
    if as_json:
        output.emit(plan.to_json())
    else:
        show_plan(plan)


def show_plan(plan: Plan) -> None:
    console = output.stdout()
    for part in output.plan_screen(plan):
        console.print(part)


def plan_check(file: PlanFile, device: Device = None, as_json: Json = False) -> None:
    """Check whether a plan can be used on this machine: exact, compatible or refused (exit code 3), with the reason."""
    plan = Plan.load(file)
    match, reason = fit(plan, device)
    if as_json:
        output.emit({"plan_id": plan.plan_id, "match": match.value, "reason": reason})
    else:
        output.stdout().print(clean(f"{match.value}: {reason}"), soft_wrap=True)
    if match is Match.REFUSED:
        raise typer.Exit(ExitCode.UNFIT)


def plan_diff(one: PlanName, other: PlanName, server: ServerUrl = None, as_json: Json = False) -> None:
    """Show what differs between two plans: choices, measurements, machines."""
    plans = [named_plan(name, server) for name in (one, other)]
    rows = differences(*plans)
    if as_json:
        output.emit({"differences": [{"field": field, "one": a, "other": b} for field, a, b in rows]})
    elif rows:
        output.stdout().print(output.table("", one, other, rows=rows))
    else:
        output.note("They are the same.")


def named_plan(name: str, server: str | None) -> Plan:
    """The plan in the file of this name, or with this id on the server.

    Raises PlanError, SettingsError, RemoteError, and NotFoundError when the server has no plan of this id.
    """
    if Path(name).is_file():
        return Plan.load(name)
    if not _PLAN_ID.fullmatch(name):
        raise typer.BadParameter(f"there is no file {name!r}, and the id of a plan has 64 hexadecimal digits")
    there = importlib.import_module("kitsune.client.server_address").server_of(server)
    try:
        plan: Plan = importlib.import_module("kitsune.client.http_client").Client(there).plan(name)
    except RefusedError as error:
        if error.status == HTTPStatus.NOT_FOUND:
            raise NotFoundError(
                f"{there.url} has no plan {name}; kitsune runs list --server {there.url} shows the runs that have one"
            ) from error
        raise
    return plan


def fit(plan: Plan, device: str | None) -> tuple[Match, str]:
    """How well a plan matches this device, and the reason. Imports torch. Raises UnfitError for an unknown device."""
    here = importlib.import_module("kitsune.device.backend")
    environment = here.environment(here.pick_device(device))
    if plan.environment is None:
        return Match.COMPATIBLE, "written by hand, without an environment; choices that do not apply here are declined"
    return plan.environment.match(environment)


def tell_health(
    measure: Annotated[
        bool, typer.Option("--measure", help="Instead: time a step with known slowdowns, for about a minute.")
    ] = False,
    device: Annotated[
        str | None, typer.Option(metavar="cpu|cuda:N", help="With --measure. Default: the current GPU, or the CPU.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Check whether this machine can run Kitsune; exit code 3 if a main job cannot work."""
    if measure:
        checkup = load("tuner.timing.checkup", extra="tuner", packages=(*doctor.TUNER_PACKAGES, "pynvml"))
        raise typer.Exit(checkup.tell(device, as_json=as_json))
    if device is not None:
        raise typer.BadParameter("needs --measure", param_hint="--device")
    checks = doctor.checks()
    fits = all(check.status is not doctor.Status.FAIL for check in checks)
    if as_json:
        output.emit({"fits": fits, "checks": [check.model_dump(mode="json") for check in checks]})
    else:
        rows = [
            (check.status.value.upper(), check.name, check.detail + (f"\n-> {check.fix}" if check.fix else ""))
            for check in checks
        ]
        output.stdout().print(output.table("", "check", "what was found", rows=rows))
    if not fits:
        raise typer.Exit(ExitCode.UNFIT)
