"""Rows of words in, lines of text with straight columns out."""

from collections.abc import Iterable, Sequence

from kitsune.cli.output import clean


def columns(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """The first column to the left, all others to the right. No word breaks its line or steers a terminal."""
    lines = [[clean(word).replace("\n", " ").replace("\t", " ") for word in row] for row in (header, *rows)]
    first, *rest = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join([name.ljust(first), *(word.rjust(width) for word, width in zip(words, rest, strict=True))]).rstrip()
        for name, *words in lines
    )


def shown(value: float) -> str:
    """Six digits that mean something."""
    return f"{value:.6g}"
