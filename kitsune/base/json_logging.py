"""Records of the standard logging in, lines for a program out: one JSON object each, without secrets."""

import json
import logging
import re
import sys
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import UTC, datetime
from enum import StrEnum
from typing import Any, Final

from kitsune.base.environment import PREFIX, variable
from kitsune.errors import SettingsError

#: Under these names a call to log may tell more, by `extra=`.
FIELDS: Final = ("run_id", "status", "duration_ms")
#: As long as a token, and as what makes a link or a cookie secret: 32 bytes of chance in base64.
_LONG: Final = re.compile(r"ksn_[A-Za-z0-9_-]{20,}|[A-Za-z0-9_-]{43,}")
_SHORTEST: Final = 24
HIDDEN: Final = "***"

#: To make an encoder for each line took a tenth of it.
_encode: Final = json.JSONEncoder(default=str).encode

_about: ContextVar[Mapping[str, Any]] = ContextVar("kitsune_log_about")


class LogFormat(StrEnum):
    """How a server and a worker log."""

    TEXT = "text"  #: for people: what they say, and warnings
    JSON = "json"  #: for programs: one object a line, and nothing else on stderr


class JsonLines(logging.Formatter):
    """`utc`, `level`, `logger`, `message`; what the record is about; of an error its traceback."""

    def format(self, record: logging.LogRecord) -> str:
        extra = {name: value for name in FIELDS if (value := getattr(record, name, None)) is not None}
        told = {
            "utc": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **_about.get({}),
            **extra,
        }
        if record.exc_info:
            told["traceback"] = "".join(traceback.format_exception(*record.exc_info))
        shown = {name: without_secrets(value) if isinstance(value, str) else value for name, value in told.items()}
        return _encode(shown)


def set_up(kind: LogFormat) -> None:
    """From here on this process logs so; `text` leaves everything as it is.

    Packages that brought handlers of their own along lose them: nothing but JSON may reach stderr.
    """
    if kind is LogFormat.TEXT:
        return
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines())
    root = logging.getLogger()
    for logger in [root, *(logging.getLogger(name) for name in list(root.manager.loggerDict))]:
        logger.handlers.clear()
        logger.propagate = True
    root.addHandler(handler)
    root.setLevel(logging.WARNING)
    logging.getLogger("kitsune").setLevel(logging.INFO)
    logging.captureWarnings(capture=True)


def is_json() -> bool:
    """Whether this process was set up so."""
    return any(isinstance(handler.formatter, JsonLines) for handler in logging.getLogger().handlers)


def chosen(option: LogFormat | None, variables: Mapping[str, str] | None = None) -> LogFormat:
    """The option, else KITSUNE_LOG_FORMAT, else text. Raises SettingsError."""
    name = variable("log_format", variables)
    try:
        return option or LogFormat(name or LogFormat.TEXT)
    except ValueError as error:
        raise SettingsError(f"{PREFIX}LOG_FORMAT is {name!r:.100}; it can be {' or '.join(LogFormat)}") from error


@contextmanager
def concerning(**about: Any) -> Iterator[None]:
    """What is logged within is about this, whoever logs it; a thread of its own must be given the context."""
    token = _about.set({**_about.get({}), **about})
    try:
        yield
    finally:
        _about.reset(token)


def without_secrets(text: str) -> str:
    """Hides whatever may be a secret: of that length, capitals and small letters mixed, which no digest has."""
    if len(text) < _SHORTEST:
        return text
    return _LONG.sub(lambda found: HIDDEN if _is_mixed(found[0]) else found[0], text)


def _is_mixed(word: str) -> bool:
    return word != word.lower() and word != word.upper()
