"""`kitsune` and `python -m kitsune`: the command line, which takes a third of a second to load."""

import importlib
import signal
import sys


def main() -> None:
    """Ctrl-C while modules are being loaded is told of once they are there: only they know how."""
    pressed: list[int] = []
    before = signal.getsignal(signal.SIGINT)
    if before is signal.default_int_handler:  # whoever has started us may want it ignored
        signal.signal(signal.SIGINT, lambda number, _: pressed.append(number))
    cli = importlib.import_module("kitsune.cli.main")
    signals = importlib.import_module("kitsune.cli.signals")
    signal.signal(signal.SIGINT, before)
    if pressed:
        sys.exit(signals.tell_interrupted(as_json="--json" in sys.argv))
    cli.main()


if __name__ == "__main__":
    main()
