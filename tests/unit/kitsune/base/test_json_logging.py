"""Records of the log as lines for programs."""

import json
import logging
import sys

import pytest

from kitsune.base import json_logging
from kitsune.base.json_logging import HIDDEN, JsonLines, LogFormat, without_secrets
from kitsune.errors import SettingsError

SECRET = "Zx3vKq2mY8sJ1tRw0bNf5uLh7cGd4eAiPoQy6kTjWlE"
DIGEST = "9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08"


def line(message: str = "hello %s", *given: object, error: bool = False, **extra: object) -> dict[str, object]:
    try:
        if error:
            raise ValueError(f"it was {SECRET}")
        found = None
    except ValueError:
        found = sys.exc_info()
    record = logging.LogRecord("kitsune.x", logging.WARNING, __file__, 1, message, given or ("you",), found)
    record.__dict__.update(extra)
    text = JsonLines().format(record)
    assert "\n" not in text
    return json.loads(text)


def test_a_line_has_what_is_known():
    told = line(run_id="r1", status=200, duration_ms=1.5)
    assert {name: told[name] for name in ("level", "logger", "message", "run_id", "status", "duration_ms")} == {
        "level": "warning", "logger": "kitsune.x", "message": "hello you", "run_id": "r1", "status": 200,
        "duration_ms": 1.5,
    }  # fmt: skip
    assert str(told["utc"]).endswith("+00:00")
    assert not {"run_id", "status", "traceback"} & set(line())


def test_what_a_line_is_about_is_said_around_it():
    with json_logging.concerning(run_id="r1"):
        with json_logging.concerning(request_id="q"):
            assert {"run_id": "r1", "request_id": "q"}.items() <= line().items()
        assert "request_id" not in line()
        assert line(run_id="r2")["run_id"] == "r2"
    assert "run_id" not in line()


def test_an_error_has_its_traceback_on_the_same_line():
    told = str(line(error=True)["traceback"])
    assert told.startswith("Traceback") and "ValueError" in told
    assert SECRET not in told


@pytest.mark.parametrize(
    "text", [f"ksn_{SECRET}", SECRET, f"/shared/{SECRET}/live", f"({SECRET})", f"{SECRET}_more", f"ksn_{SECRET[:30]}"]
)
def test_secrets_are_hidden(text):
    assert SECRET[:30] not in without_secrets(text)
    assert HIDDEN in without_secrets(text)
    assert SECRET[:30] not in json.dumps(line("it is %s", text))


@pytest.mark.parametrize(
    "text",
    [DIGEST, DIGEST[:40], "06g0t3n8q4v0e4b6k1m2z5y7xc", "kitsune-worker-deployment-6d8f9c7b5d-x2x9z-and-so-on-1234",
     "KITSUNE_REQUESTS_PER_MINUTE_AND_MORE_OF_THE_SAME_KIND", "urn:uuid:0b0ecf6d-3c2b-4c64-a9d9-3f1c2d0a8a55"],
)  # fmt: skip
def test_names_are_not(text):
    assert without_secrets(text) == text


@pytest.mark.parametrize(
    ("option", "variable", "found"),
    [
        (None, "", "text"),
        (None, "json", "json"),
        (LogFormat.TEXT, "json", "text"),
        (LogFormat.JSON, "nonsense", "json"),
    ],
)
def test_the_option_goes_before_the_variable(option, variable, found):
    assert json_logging.chosen(option, {"KITSUNE_LOG_FORMAT": variable}) == found


def test_a_variable_that_is_no_format_is_refused():
    with pytest.raises(SettingsError, match="KITSUNE_LOG_FORMAT is 'xml'; it can be text or json"):
        json_logging.chosen(None, {"KITSUNE_LOG_FORMAT": "xml"})
