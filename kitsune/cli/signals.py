"""Signals that end a command: handlers of the command line, before anything that takes longer is loaded."""

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
    """Leaves alone what whoever has started us ignores: SIGHUP under nohup, SIGINT of a shell's background job."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is signal.SIG_DFL:
            signal.signal(number, leave)
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, interrupt)


def leave(number: int, _: FrameType | None) -> NoReturn:
    """Unlike the default, unwinds: a measuring process must not outlive us."""
    raise SystemExit(128 + number)


def interrupt(_: int, frame: FrameType | None) -> NoReturn:
    """Raises KeyboardInterrupt; but ends the process within an import, since that of torch may swallow one."""
    if _is_importing(frame):
        try:
            tell_interrupted(as_json="--json" in sys.argv)
        finally:
            os._exit(ExitCode.INTERRUPTED)
    raise KeyboardInterrupt


def tell_interrupted(*, as_json: bool) -> int:
    """Tells of a Ctrl-C that left no result, which is how servers are ended as well; returns the exit code."""
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
