"""Numbers and text as people read them: speedups, times, and text that is safe on a terminal."""


def clean(text: str) -> str:
    """The text with control characters replaced, so that it cannot send escape sequences to a terminal."""
    return "".join(c if c.isprintable() or c in "\n\t" else "\N{REPLACEMENT CHARACTER}" for c in text)


def factor(value: float) -> str:
    return f"{value:.2f}x" if value < 10 else f"{value:.1f}x"


def step_time(ms: float) -> str:
    """Milliseconds with three or more significant digits, without the unit."""
    return f"{ms:.3f}" if ms < 10 else f"{ms:.2f}" if ms < 100 else f"{ms:.1f}"


def duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
