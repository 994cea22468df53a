"""The rule for names of tokens and runs, which are shown in a terminal."""

from typing import Final

MAX_NAME: Final = 100


def is_showable(name: str) -> bool:
    """Whether it is short enough, without control characters and characters that change the text direction."""
    return len(name) <= MAX_NAME and name.isprintable()
