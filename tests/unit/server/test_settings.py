"""Settings of the server from options and the environment."""

import pytest

from kitsune.base.json_logging import LogFormat
from kitsune.cli import main
from kitsune.errors import SettingsError
from server.settings import ServerSettings


def test_the_environment_says_what_no_option_says():
    variables = {
        "KITSUNE_RETENTION_DAYS": "30",
        "KITSUNE_LOG_FORMAT": "json",
        "KITSUNE_ACTIVE_RUNS": "7",
        "KITSUNE_REQUESTS_PER_MINUTE": " ",
    }
    found = ServerSettings.from_environment({"retention_days": 90.0, "port": 1}, variables)
    assert (found.retention_days, found.log_format, found.active_runs, found.port) == (90.0, LogFormat.JSON, 7, 1)
    assert found.requests_per_minute == ServerSettings().requests_per_minute
    assert ServerSettings.from_environment({}, variables).retention_days == 30.0


def test_what_kubernetes_sets_beside_a_service_of_our_name_is_not_ours():
    variables = {"KITSUNE_PORT": "tcp://10.0.0.1:8537", "KITSUNE_HOST": "10.0.0.1", "KITSUNE_ALLOW_REMOTE": "1"}
    assert ServerSettings.from_environment({}, variables) == ServerSettings()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("RETENTION_DAYS", "soon"),
        ("RETENTION_DAYS", "0"),
        ("RETENTION_DAYS", "-1"),
        ("RETENTION_DAYS", "nan"),
        ("RETENTION_DAYS", "inf"),
        ("RETENTION_DAYS", "36501"),
        ("RETENTION_DAYS", "1e9"),
        ("LOG_FORMAT", "xml"),
        ("ACTIVE_RUNS", "-1"),
        ("ACTIVE_RUNS", "many"),
        ("MAX_JSON_BYTES", "0"),
    ],
)
def test_a_variable_that_makes_no_sense_is_named(name, value):
    with pytest.raises(SettingsError, match=f"KITSUNE_{name} is '{value}'; "):
        ServerSettings.from_environment({}, {f"KITSUNE_{name}": value})


def test_an_option_that_makes_no_sense_is_named(capsys):
    assert main.run(["serve", "--retention-days", "0"]) == 2
    assert "--retention-days is 0.0; " in capsys.readouterr().err
