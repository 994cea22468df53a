"""Calls a function of a module in this process, and writes down what Python's audit hooks tell of running code.

    python -m benchmarks.watched EVENTS kitsune.__main__:main serve --port 0

One line of EVENTS for each event by which code could come to run, or a file to be touched: code objects compiled or
executed, modules looked for, pickles that name something, processes, libraries, files opened. Starting up makes
thousands of them; afterwards a server that only reads data makes none but for its temporary files.
"""

import importlib
import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

_PREFIXES: Final = ("ctypes.", "marshal.", "os.", "pickle.", "pty.", "shutil.", "socket.connect", "subprocess.")
_EVENTS: Final = frozenset(
    ("code.__new__", "compile", "exec", "function.__new__", "import", "open", "socket.getaddrinfo")
)


def watch(events: Path) -> None:
    """From here on, and for good: an audit hook cannot be taken out."""
    descriptor = os.open(events, os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o600)

    def note(event: str, told: tuple[Any, ...]) -> None:
        if event in _EVENTS or event.startswith(_PREFIXES):
            os.write(descriptor, f"{event} {ascii(told)[:300]}\n".encode())

    sys.addaudithook(note)


def events_since(events: Path, start: int) -> list[str]:
    """What was written down from this byte on, but for temporary files without a name."""
    with events.open("rb") as file:
        file.seek(start)
        lines = file.read().decode().splitlines()
    return [line for line in lines if not _is_temporary(line)]


def _is_temporary(line: str) -> bool:
    """It is the folder that is opened."""
    return line.startswith(f"open ({tempfile.gettempdir()!r}, ")


def main(arguments: Sequence[str]) -> None:
    events, called, *rest = arguments
    module, _, name = called.partition(":")
    sys.argv = [called, *rest]
    watch(Path(events))
    function: Callable[[], object] = getattr(importlib.import_module(module), name)
    function()


if __name__ == "__main__":
    main(sys.argv[1:])
