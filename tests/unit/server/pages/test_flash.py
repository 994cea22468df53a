"""Flash messages: shown once, for a minute, on their page and in their session only."""

from types import SimpleNamespace

import pytest

from server.pages import flash
from tests.unit.server.conftest import HERE, made
from tests.unit.server.pages.conftest import csrf_of, signed_in
from tests.unit.server.pages.test_tokens_page import GIVEN
from tuner.store.queries.tokens import Scope

SECRET = r"ksn_"
PLACE = "/tokens"


def create(client, **headers):
    """Makes a token without following the redirect; returns the cookie that was set."""
    answer = client.post(PLACE, data={"csrf": csrf_of(client), **GIVEN}, headers=headers)
    assert answer.status_code == 303
    return next(value for value in answer.headers.get_list("set-cookie") if flash.COOKIE in value)


def test_the_cookie_is_out_of_reach_of_scripts_other_sites_and_other_pages(admin):
    cookie = create(admin)
    for part in ("HttpOnly", "SameSite=strict", "Path=/tokens", "Max-Age=60"):
        assert part in cookie
    assert cookie.startswith("kitsune_once=") and "Secure" not in cookie


def test_a_browser_that_speaks_https_keeps_it_to_that(admin):
    """Behind a proxy with TLS; only Origin shows it."""
    cookie = create(admin, Origin="https://localhost:8537")
    assert cookie.startswith("__Secure-kitsune_once=") and "Secure;" in f"{cookie};"


def test_it_is_shown_once_and_taken_back(admin):
    create(admin)
    first = admin.get(PLACE)
    assert SECRET in first.text
    for part in ('kitsune_once=""', "Max-Age=0", "Path=/tokens"):
        assert part in first.headers["set-cookie"]
    again = admin.get(PLACE)
    assert SECRET not in again.text
    assert "set-cookie" not in again.headers


def test_it_is_too_old_after_a_minute(admin, monkeypatch):
    create(admin)
    later = flash.time.time() + flash.LIFETIME_S
    monkeypatch.setattr(flash, "time", SimpleNamespace(time=lambda: later))
    assert SECRET not in admin.get(PLACE).text


def test_another_session_does_not_show_it(admin, browser, database):
    value = create(admin).partition("=")[2].partition(";")[0]
    other = browser(Scope.ADMIN)
    other.cookies.set(flash.COOKIE, value)
    assert SECRET not in other.get(PLACE).text
    admin.cookies.set(flash.COOKIE, value)
    assert SECRET in admin.get(PLACE).text


@pytest.mark.parametrize("value", ["", ".", "x", "x.y", "bnVsbA==.", "W10=.0", "é.é", "." + "0" * 64])
def test_what_nobody_sealed_is_nothing(database, browser, value):
    _, cookie = signed_in(database, made(database, Scope.ADMIN)[0])
    header = f"kitsune_session={cookie}; kitsune_once={value}".encode()
    answer = browser().get(f"{HERE}{PLACE}", headers={"Cookie": header})
    assert answer.status_code == 200
    assert "not shown again" not in answer.text
