"""`kitsune tune`: tunes a workload on this machine and prints the result."""

import contextlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from kitsune.cli import output
from kitsune.cli.exit_codes import ExitCode
from kitsune.errors import NoTrialError
from tuner.api import Result, tune_workload
from tuner.commands.runs import check_writable, save
from tuner.statistics.plan_evidence import words
from tuner.terminal import views
from tuner.terminal.progress import Quiet, telling
from tuner.tuning.interrupts import Interrupts

PLAN_FILE = "plan.json"
#: Exit codes of the SystemExit that `kitsune.cli.main` raises for these signals -> message.
STOPPED: Final[Mapping[int, str]] = {ExitCode.TERMINATED: "stopped by SIGTERM", ExitCode.HUNG_UP: "stopped by SIGHUP"}


def tune(spec: str, *, options: Mapping[str, Any], out: Path | None, as_json: bool, quiet: bool) -> int:
    """Tunes with the options of `tuner.api.tune_workload`, prints the result and returns the exit code.

    Raises the errors of `tune_workload`, and SettingsError when `out` cannot be written.
    """
    if out is not None:
        check_writable(out)
    with telling(quiet=quiet) as teller, Interrupts(teller, teller.say).installed() as interrupts:
        try:
            result = tune_workload(spec, tell=interrupts.tell, interrupts=interrupts.counted, **options)
        except (KeyboardInterrupt, NoTrialError) as error:
            if not interrupts.count:
                raise
            result, code, why = None, int(ExitCode.INTERRUPTED), str(error)
        except SystemExit as error:
            if not isinstance(error.code, int) or error.code not in STOPPED:
                raise
            result, code, why = None, error.code, STOPPED[error.code]
    if result is None:
        with contextlib.suppress(OSError):  # a closed terminal must not change the exit code
            output.fail("Interrupted", _stopped(teller, why), code, as_json=as_json)
        return code
    if interrupts.count:  # interrupted when the run had nothing left to end early
        result = result.model_copy(update={"interrupted": True})
    if out is not None:
        save(result.plan, out)
    if as_json:
        output.emit(result.summary())
    else:
        _show(result, out)
    return ExitCode.INTERRUPTED if result.interrupted else ExitCode.OK


def _stopped(teller: Quiet, why: str) -> str:
    run = teller.standing.run
    why = why or "stopped before there was a result"
    return f"{why}; what was tried is kept: kitsune runs show {run.id}" if run else why


def _show(result: Result, out: Path | None) -> None:
    console = output.stdout()
    console.print(views.trial_table(result.trials))
    console.print(views.LEGEND, style="dim")
    console.print()
    for part in output.plan_screen(result.plan):
        console.print(part)
    late = views.untried_screen([(words(each.knobs), each.expected_s) for each in result.untried])
    for part in [*views.ablation_screen(result.ablation), *views.time_screen(result.trials), *late]:
        console.print(part, soft_wrap=isinstance(part, str))
    console.print()
    console.print(_hints(result, out), soft_wrap=True)


def _hints(result: Result, out: Path | None) -> str:
    lines = []
    if out is None:
        lines += [f"Keep the plan:   kitsune runs plan {result.run.id} --out {PLAN_FILE}"]
    if result.plan.knobs:
        lines += [f'Train with it:   plan = kitsune.Plan.load("{out or PLAN_FILE}")']
        lines += ["                 step = kitsune.TrainStep(model, loss_fn, optimizer, plan=plan)"]
        lines += ["                 for x, y in loader: loss = step(x, y)"]
    return "\n".join([*lines, f"Look at it all:  kitsune runs show {result.run.id}"])
