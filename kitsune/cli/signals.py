"""Signal handlers of the command line. Cheap to import, so that they are installed early."""

import os
import signal
import sys
from types import FrameType
from typing import Final, NoReturn

from kitsune.cli import output
from kitsune.cli.exit_codes import ExitCode

INTERRUPTED: Final = "stopped by Ctrl-C"
_IMPORTING: Final = "<frozen importlib._bootstrap>"


def handle() -> None:
    """Installs the handlers.

    Signals that were set to be ignored stay ignored: SIGHUP under nohup, SIGINT of a shell's background job.
    """
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is signal.SIG_DFL:
            signal.signal(number, leave)
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, interrupt)


def leave(number: int, _: FrameType | None) -> NoReturn:
    """Raises SystemExit. Unlike the default it unwinds the stack, which ends the measuring process."""
    raise SystemExit(128 + number)


def interrupt(_: int, frame: FrameType | None) -> NoReturn:
    """Raises KeyboardInterrupt. During an import it exits at once: that of torch may swallow the exception."""
    if _is_importing(frame):
        try:
            tell_interrupted(as_json="--json" in sys.argv)
        finally:
            os._exit(ExitCode.INTERRUPTED)
    raise KeyboardInterrupt


def tell_interrupted(*, as_json: bool) -> int:
    """Reports a Ctrl-C without a result, which is also how a server is stopped; returns the exit code."""
    if not as_json:
        output.note(INTERRUPTED)
        return ExitCode.INTERRUPTED
    return output.fail("Interrupted", INTERRUPTED, ExitCode.INTERRUPTED, as_json=as_json)


def _is_importing(frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_code.co_filename == _IMPORTING:
            return True
        frame = frame.f_back
    return False
