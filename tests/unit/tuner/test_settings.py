"""Settings from variables."""

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sqlalchemy import make_url

from kitsune.errors import SettingsError
from tuner.settings import Settings, sqlite_url


def test_defaults() -> None:
    settings = Settings.from_environment({"HOME": "/ignored"})
    home = Path.home() / ".local" / "share" / "kitsune"
    assert settings == Settings(home=home, database_url=f"sqlite:///{home}/kitsune.db", disable=False)


def test_the_data_folder_of_xdg() -> None:
    assert Settings.from_environment({"XDG_DATA_HOME": "/data"}).home == Path("/data/kitsune")
    assert Settings.from_environment({"XDG_DATA_HOME": "data"}) == Settings.from_environment({})


def test_home_moves_the_database() -> None:
    settings = Settings.from_environment({"KITSUNE_HOME": "/k", "XDG_DATA_HOME": "/data"})
    assert settings.home == Path("/k")
    assert settings.database_url == "sqlite:////k/kitsune.db"


def test_home_is_absolute() -> None:
    assert Settings.from_environment({"KITSUNE_HOME": "~/k"}).home == Path.home() / "k"
    assert Settings.from_environment({"KITSUNE_HOME": "k"}).home == Path.cwd() / "k"


def test_a_database_of_ones_own() -> None:
    url = "postgresql://me:secret@host/db"
    assert Settings.from_environment({"KITSUNE_DATABASE_URL": url}).database_url == url


def test_an_empty_variable_counts_as_unset() -> None:
    empty = {"KITSUNE_HOME": "", "KITSUNE_DATABASE_URL": " ", "KITSUNE_DISABLE": "", "XDG_DATA_HOME": ""}
    assert Settings.from_environment(empty) == Settings.from_environment({})


@pytest.mark.parametrize(
    ("value", "meant"),
    [("1", True), ("true", True), ("YES", True), ("on", True), ("0", False), ("false", False), ("off", False)],
)
def test_disable(value: str, meant: bool) -> None:
    assert Settings.from_environment({"KITSUNE_DISABLE": value}).disable is meant


def test_a_value_that_makes_no_sense_names_the_variable() -> None:
    with pytest.raises(SettingsError, match="KITSUNE_DISABLE is 'maybe'; use 1 or 0"):
        Settings.from_environment({"KITSUNE_DISABLE": "maybe"})


def test_no_home_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SettingsError, match="KITSUNE_HOME"):
        Settings.from_environment({"KITSUNE_HOME": "~nobody-of-this-name/k"})


def test_the_environment_of_the_process_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KITSUNE_HOME", "/k")
    assert Settings.from_environment() == Settings.from_environment(dict(os.environ))
    assert Settings.from_environment().home == Path("/k")


@given(st.text(st.characters(exclude_characters="\x00", exclude_categories=["Cs"]), min_size=1))
def test_any_path_fits_into_a_url(name: str) -> None:
    path = Path("/") / name
    assert make_url(sqlite_url(path)).database == str(path)
