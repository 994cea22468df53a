"""Runs a Python script in this process as `python SCRIPT ARGS...` would."""

import importlib.machinery
import io
import os
import sys
import types
from collections.abc import Sequence
from pathlib import Path

from kitsune.errors import SettingsError


def read_script(script: str) -> bytes:
    """The source of a script. Raises SettingsError when it cannot be read."""
    try:
        with io.open_code(os.path.abspath(script)) as file:
            return file.read()
    except OSError as error:
        raise SettingsError(f"the script {script} cannot be read: {error.strerror}") from error


def run_script(source: bytes, words: Sequence[str]) -> None:
    """Runs a script as `__main__` and leaves it there, so that atexit handlers and pickling still find its names.

    `words`: the script as named on the command line, and its arguments. Raises what the script raises, including
    SystemExit; an uncaught error is shown without Kitsune's frames, by the excepthook that the script may have set.
    runpy.run_path does not fit: it changes sys.argv[0] and removes `__main__` at the end.
    """
    path = os.path.abspath(words[0])
    sys.argv = [*words]
    if not sys.flags.safe_path:
        sys.path[0] = os.path.dirname(os.path.realpath(path))
    main = _main_module(path)
    sys.modules["__main__"] = main
    try:
        exec(compile(source, path, "exec", dont_inherit=True), main.__dict__)  # noqa: S102 - that is the command
    except BaseException:
        _hide_our_frames(path)
        raise


def _main_module(path: str) -> types.ModuleType:
    main = types.ModuleType("__main__")
    main.__file__ = path
    main.__loader__ = importlib.machinery.SourceFileLoader("__main__", path)
    main.__dict__.update(__builtins__=sys.modules["builtins"], __cached__=None, __package__=None)
    return main


def _hide_our_frames(path: str) -> None:
    """Wraps sys.excepthook so that the traceback begins at the script."""
    show = sys.excepthook

    def show_theirs(kind: type[BaseException], error: BaseException, traceback: types.TracebackType | None) -> None:
        while traceback is not None and Path(traceback.tb_frame.f_code.co_filename) != Path(path):
            traceback = traceback.tb_next
        show(kind, error.with_traceback(traceback), traceback)

    sys.excepthook = show_theirs
