"""Whatever ends an exchange reaches the one who asked, at once and with its reason."""

import queue
import threading
import time

import pytest

from kitsune.client import http_deadline
from kitsune.client.http_deadline import HttpRequest
from kitsune.errors import UnreachableError
from tests.scripted_server import absent

PROXIES = ("HTTP_PROXY", "http_proxy", "HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy", "NO_PROXY", "no_proxy")


@pytest.fixture(autouse=True)
def no_proxy(monkeypatch):
    for name in PROXIES:
        monkeypatch.delenv(name, raising=False)


def reason(url: str, *, direct: bool = False) -> str:
    """Why nothing came, which must be known long before the deadline."""
    began = time.monotonic()
    with pytest.raises(UnreachableError) as caught:
        http_deadline.exchange(HttpRequest("GET", url, {}, {}, None, 1024), 20, direct=direct)
    assert time.monotonic() - began < 10
    return str(caught.value)


def test_a_proxy_that_needs_a_package_is_told_of_at_once(monkeypatch):
    def demands(*_: object, **__: object) -> None:
        raise ImportError("Using SOCKS proxy, but the 'socksio' package is not installed.")

    monkeypatch.setattr(http_deadline.httpx, "Client", demands)
    assert "socksio" in reason("http://tuner.example:8537")


def test_what_nobody_foresaw_is_told_of_at_once_and_not_hidden(monkeypatch):
    unhandled: queue.SimpleQueue[type[BaseException]] = queue.SimpleQueue()
    monkeypatch.setattr(threading, "excepthook", lambda told: unhandled.put(told.exc_type))

    def breaks(*_: object) -> None:
        raise KeyError("a bug")

    monkeypatch.setattr(http_deadline._Attempt, "_answer", breaks)
    assert "a bug" in reason("http://tuner.example:8537")
    assert unhandled.get(timeout=60) is KeyError


@pytest.mark.parametrize("direct", [True, False])
def test_where_nobody_listens_the_way_out_is_told(direct):
    told = reason(absent(), direct=direct)
    for words in ("no server listens there", "kitsune serve", "--server", "KITSUNE_SERVER"):
        assert words in told


@pytest.mark.parametrize("scheme", ["http", "https"])
def test_a_proxy_that_is_not_there_is_not_taken_for_the_server(scheme, monkeypatch):
    monkeypatch.setenv("ALL_PROXY", absent())
    told = reason(f"{scheme}://192.0.2.1:8537")
    assert "the proxy 127.0.0.1 refused" in told
    assert "kitsune serve" not in told
