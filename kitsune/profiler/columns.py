"""Formats rows of text as aligned columns."""

from collections.abc import Iterable, Sequence

from kitsune.base.text_format import clean


def columns(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A text table: the first column left-aligned, the others right-aligned. Control characters are replaced."""
    lines = [[clean(word).replace("\n", " ").replace("\t", " ") for word in row] for row in (header, *rows)]
    first, *rest = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join([name.ljust(first), *(word.rjust(width) for word, width in zip(words, rest, strict=True))]).rstrip()
        for name, *words in lines
    )


def shown(value: float) -> str:
    """The number with six significant digits."""
    return f"{value:.6g}"
