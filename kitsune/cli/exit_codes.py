"""Exit codes of the command line, and the code of each error. docs/cli.md shows the same table."""

from collections.abc import Mapping
from enum import IntEnum
from typing import Final

from kitsune import errors
from kitsune.errors import KitsuneError


class ExitCode(IntEnum):
    """The exit codes of `kitsune`. 7 to 10 are reserved for gates."""

    OK = 0
    UNEXPECTED = 1
    USAGE = 2
    UNFIT = 3
    REJECTED = 4
    NO_RESULT = 5
    REMOTE = 6
    STORE = 11
    HUNG_UP = 129
    INTERRUPTED = 130
    TERMINATED = 143


MEANINGS: Final[Mapping[ExitCode, str]] = {
    ExitCode.OK: "done; that includes finding no gain, and a machine too noisy to tell",
    ExitCode.UNEXPECTED: "an unexpected error; `--debug` shows the traceback",
    ExitCode.USAGE: "the command line or a setting makes no sense",
    ExitCode.UNFIT: "this machine lacks what is needed, or a plan does not fit it",
    ExitCode.REJECTED: "what was given is refused: a workload, an archive, a plan, the name of a run",
    ExitCode.NO_RESULT: "tuning has no result: every trial failed, or the budget ended before the first",
    ExitCode.REMOTE: "a server is unreachable, or refused the request",
    ExitCode.STORE: "the database cannot be used: locked, full, unreachable, of another version",
    ExitCode.HUNG_UP: "the terminal went away (SIGHUP)",
    ExitCode.INTERRUPTED: "Ctrl-C (SIGINT); after the first one the best so far is printed",
    ExitCode.TERMINATED: "SIGTERM; a worker leaves with 0",
}

#: The most derived class listed decides, so a subclass can have another code than its base.
CODES: Final[Mapping[type[BaseException], ExitCode]] = {
    KitsuneError: ExitCode.UNEXPECTED,
    errors.SettingsError: ExitCode.USAGE,
    errors.UnfitError: ExitCode.UNFIT,
    errors.DeclinedError: ExitCode.UNFIT,
    errors.UnplannedError: ExitCode.UNFIT,
    errors.PlanError: ExitCode.REJECTED,
    errors.SubmissionError: ExitCode.REJECTED,
    errors.WorkloadError: ExitCode.REJECTED,
    errors.CaptureError: ExitCode.REJECTED,
    errors.BaselineError: ExitCode.REJECTED,
    errors.NotFoundError: ExitCode.REJECTED,
    errors.ConflictError: ExitCode.REJECTED,
    errors.TuneError: ExitCode.NO_RESULT,
    errors.RemoteError: ExitCode.REMOTE,
    errors.StoreError: ExitCode.STORE,
    errors.CursorError: ExitCode.USAGE,
    errors.StoppedError: ExitCode.TERMINATED,
}


def code_of(error: KitsuneError) -> ExitCode:
    return next(CODES[kind] for kind in type(error).__mro__ if kind in CODES)
