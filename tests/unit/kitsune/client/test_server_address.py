"""Which server is meant, and that a token goes nowhere else."""

import os

import pytest

from kitsune.client.server_address import Server, checked_url, is_loopback, server_of
from kitsune.errors import SettingsError

KEPT = "ksn_kept_by_serve"


@pytest.fixture
def kept(kitsune_home):
    """A token as `kitsune serve` leaves it."""
    kitsune_home.mkdir()
    (kitsune_home / "token").write_text(KEPT + "\n")
    return kitsune_home


def test_this_machine_by_default(kitsune_home):
    assert server_of() == Server("http://127.0.0.1:8537", None)


def test_the_argument_goes_over_the_variable(monkeypatch):
    monkeypatch.setenv("KITSUNE_SERVER", "https://tuner.example:8000/")
    assert server_of().url == "https://tuner.example:8000"
    assert server_of("http://localhost:9").url == "http://localhost:9"


@pytest.mark.parametrize("url", ["http://127.0.0.1:1", "http://127.8.9.1:1", "http://localhost:1", "http://[::1]:1"])
def test_the_kept_token_is_for_this_machine(kept, url):
    assert server_of(url).token == KEPT


@pytest.mark.parametrize(
    "url",
    [
        "http://tuner.example:8537",
        "http://192.168.0.7:8537",
        "http://0.0.0.0:8537",
        "http://127.0.0.1.evil.example:8537",
        "http://localhost.evil.example",
        "http://[2001:db8::1]:8537",
        "http://2130706433:8537",
    ],
)
def test_the_kept_token_goes_nowhere_else(kept, url):
    assert server_of(url).token is None


def test_the_tokens_order(kept, monkeypatch):
    assert server_of().token == KEPT
    monkeypatch.setenv("KITSUNE_TOKEN", "ksn_variable")
    assert server_of().token == "ksn_variable"
    assert server_of("https://tuner.example").token == "ksn_variable"
    assert server_of(token="ksn_argument").token == "ksn_argument"


def test_the_token_of_one_server_is_not_shown_to_another(kept, monkeypatch):
    monkeypatch.setenv("KITSUNE_SERVER", "https://tuner.example")
    monkeypatch.setenv("KITSUNE_TOKEN", "ksn_of_tuner_example")
    assert server_of().token == "ksn_of_tuner_example"
    assert server_of("https://tuner.example/").token == "ksn_of_tuner_example"
    assert server_of("https://other.example").token is None
    assert server_of("http://tuner.example").token is None
    assert server_of("http://127.0.0.1:8537").token == KEPT


@pytest.mark.parametrize(
    "address",
    [
        "",
        "tuner.example",
        "ftp://tuner.example",
        "http://",
        "http://a b",
        "http://x:99999",
        "http://x?y=1",
        "http://x#y",
    ],
)
def test_what_is_no_address(address):
    with pytest.raises(SettingsError):
        checked_url(address)


def test_a_password_in_an_address_is_refused_and_not_repeated():
    with pytest.raises(SettingsError, match="give a token instead") as caught:
        checked_url("http://127.0.0.1:8537@evil.example/")
    assert "8537" not in str(caught.value)


@pytest.mark.parametrize("token", ["ksn with blanks", "ksn\r\nX-Evil: 1", "ksn_\xfc", "", "x" * 2000])
def test_a_token_that_is_none_is_refused_and_not_repeated(token):
    with pytest.raises(SettingsError) as caught:
        server_of(token=token)
    assert token == "" or token not in str(caught.value)


def test_a_token_file_that_cannot_be_read(kept):
    (kept / "token").write_bytes(b"\xff\xfe")
    with pytest.raises(SettingsError, match="cannot be read"):
        server_of()
    os.unlink(kept / "token")
    (kept / "token").mkdir()
    with pytest.raises(SettingsError, match="cannot be read"):
        server_of()


def test_an_empty_token_file_is_none(kept):
    (kept / "token").write_text("\n")
    assert server_of().token is None


def test_the_token_is_not_shown(kept):
    assert KEPT not in repr(server_of())


def test_loopback():
    assert is_loopback("LOCALHOST")
    assert not is_loopback("")
