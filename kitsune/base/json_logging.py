"""Structured logging: each record as one line of JSON, with secrets masked."""

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

#: Names in `extra=` of a logging call that become fields of the JSON object.
FIELDS: Final = ("run_id", "status", "duration_ms")
#: What looks like a secret: a token, or 32 random bytes in base64 (43 characters), as in secret links and cookies.
_LONG: Final = re.compile(r"ksn_[A-Za-z0-9_-]{20,}|[A-Za-z0-9_-]{43,}")
_SHORTEST: Final = 24
HIDDEN: Final = "***"

#: Made once: a new encoder for each line took a tenth of its time.
_encode: Final = json.JSONEncoder(default=str).encode

_about: ContextVar[Mapping[str, Any]] = ContextVar("kitsune_log_about")


class LogFormat(StrEnum):
    """The log format of a server or a worker."""

    TEXT = "text"  #: for people: normal output and warnings
    JSON = "json"  #: for programs: one JSON object a line, and nothing else on stderr


class JsonLines(logging.Formatter):
    """Formats `utc`, `level`, `logger`, `message`, the fields set by `concerning` and `extra=`, and `traceback`."""

    def format(self, record: logging.LogRecord) -> str:
        extra = {name: value for name in FIELDS if (value := getattr(record, name, None)) is not None}
        fields = {
            "utc": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **_about.get({}),
            **extra,
        }
        if record.exc_info:
            fields["traceback"] = "".join(traceback.format_exception(*record.exc_info))
        shown = {name: without_secrets(value) if isinstance(value, str) else value for name, value in fields.items()}
        return _encode(shown)


def set_up(kind: LogFormat) -> None:
    """Sets this process up to log in this format; `text` changes nothing.

    With `json`, handlers that packages have installed are removed: nothing but JSON may reach stderr.
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
    """Whether this process was set up to log JSON."""
    return any(isinstance(handler.formatter, JsonLines) for handler in logging.getLogger().handlers)


def chosen(option: LogFormat | None, variables: Mapping[str, str] | None = None) -> LogFormat:
    """The option, else KITSUNE_LOG_FORMAT, else text. Raises SettingsError when the variable has another value."""
    name = variable("log_format", variables)
    try:
        return option or LogFormat(name or LogFormat.TEXT)
    except ValueError as error:
        raise SettingsError(f"{PREFIX}LOG_FORMAT is {name!r:.100}; it can be {' or '.join(LogFormat)}") from error


@contextmanager
def concerning(**about: Any) -> Iterator[None]:
    """Adds these fields to every record logged in the block. A new thread needs a copy of the context to have them."""
    token = _about.set({**_about.get({}), **about})
    try:
        yield
    finally:
        _about.reset(token)


def without_secrets(text: str) -> str:
    """Masks words that look like a secret: long enough, and of mixed case, which hexadecimal digests never are."""
    if len(text) < _SHORTEST:
        return text
    return _LONG.sub(lambda found: HIDDEN if _is_mixed(found[0]) else found[0], text)


def _is_mixed(word: str) -> bool:
    return word != word.lower() and word != word.upper()
