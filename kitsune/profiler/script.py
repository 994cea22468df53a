"""A Python script in, run as `python SCRIPT ARGS...` would run it, in this process."""

import importlib.machinery
import io
import os
import sys
import types
from collections.abc import Sequence
from pathlib import Path

from kitsune.errors import SettingsError


def read_script(script: str) -> bytes:
    """Its source. Raises SettingsError when it cannot be read."""
    try:
        with io.open_code(os.path.abspath(script)) as file:
            return file.read()
    except OSError as error:
        raise SettingsError(f"the script {script} cannot be read: {error.strerror}") from error


def run_script(source: bytes, words: Sequence[str]) -> None:
    """Runs it as `__main__`, and leaves it there: what it registers with atexit, or pickles, still finds its names.

    `words` are the script, as it was named, and its arguments. Whatever it raises, SystemExit too, comes through; an
    uncaught error is shown without our own frames, by the hook that the script may have set. Not runpy.run_path, which
    changes sys.argv[0] and takes `__main__` away at the end.
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
    """For the error that is on its way out of this process."""
    show = sys.excepthook

    def show_theirs(kind: type[BaseException], error: BaseException, traceback: types.TracebackType | None) -> None:
        while traceback is not None and Path(traceback.tb_frame.f_code.co_filename) != Path(path):
            traceback = traceback.tb_next
        show(kind, error.with_traceback(traceback), traceback)

    sys.excepthook = show_theirs
