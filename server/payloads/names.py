"""What people call a token or a run: whether a line of a terminal shows it as it is."""

from typing import Final

MAX_NAME: Final = 100


def is_showable(name: str) -> bool:
    """Whether it is short, and has no control character and none that turns the direction of the text around it."""
    return len(name) <= MAX_NAME and name.isprintable()
