"""Entry point of `kitsune` and `python -m kitsune`. Loading the command line takes a third of a second."""

import importlib
import signal
import sys


def main() -> None:
    """Runs the command line. A Ctrl-C during the imports is reported after them, by the code that they load."""
    pressed: list[int] = []
    before = signal.getsignal(signal.SIGINT)
    if before is signal.default_int_handler:  # otherwise the parent process has SIGINT ignored
        signal.signal(signal.SIGINT, lambda number, _: pressed.append(number))
    cli = importlib.import_module("kitsune.cli.main")
    signals = importlib.import_module("kitsune.cli.signals")
    signal.signal(signal.SIGINT, before)
    if pressed:
        sys.exit(signals.tell_interrupted(as_json="--json" in sys.argv))
    cli.main()


if __name__ == "__main__":
    main()
