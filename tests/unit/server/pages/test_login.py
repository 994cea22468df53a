"""Signing in and out: cookies, redirects and failures."""

import re
from datetime import timedelta
from types import SimpleNamespace
from urllib.parse import quote

import pytest

from server.pages import login_throttle
from server.pages.login import own_path
from server.pages.login_throttle import MOST, WITHIN_S, Attempts, network_of
from tests.unit.server.conftest import bearer, expired, made, revoked, secret
from tests.unit.server.pages.conftest import assert_page, csrf_of, signed_in
from tuner.store.queries import tokens
from tuner.store.queries.tokens import Scope, new_secret
from tuner.wall_clock import utcnow


def sign_in(client, token: str, place: str = "", **headers: str):
    return client.post("/login", data={"token": token, "next": place}, headers=headers)


def test_a_token_gives_a_cookie_that_scripts_and_other_sites_do_not_see(stranger, database):
    answer = sign_in(stranger, secret(database), "/runs?sort=gain")
    assert (answer.status_code, answer.headers["location"]) == (303, "/runs?sort=gain")
    name, *attributes = re.split(r"; ?", answer.headers["set-cookie"])
    assert re.fullmatch(r"kitsune_session=[\w-]{43}", name)
    assert {word.lower() for word in attributes if "Age" not in word} == {"httponly", "path=/", "samesite=strict"}
    (age,) = [int(word.partition("=")[2]) for word in attributes if "Age" in word]
    assert 12 * 3600 - 10 < age <= 12 * 3600
    assert_page(stranger.get("/runs"), 200, "Sign out")


def test_by_https_the_cookie_is_bound_to_it(app, stranger, database):
    given = sign_in(stranger, secret(database), Origin="https://localhost:8537").headers["set-cookie"]
    assert given.startswith("__Host-kitsune_session=")
    assert {"Secure", "HttpOnly", "Path=/", "SameSite=strict"} <= set(given.split("; "))
    value = given.partition("=")[2].partition(";")[0]
    assert stranger.get("/runs", headers={"Cookie": f"__Host-kitsune_session={value}"}).status_code == 200


def test_a_cookie_lives_no_longer_than_its_token(stranger, database):
    answer = sign_in(stranger, secret(database, expires_at=utcnow() + timedelta(minutes=5)))
    age = int(re.search(r"Max-Age=(\d+)", answer.headers["set-cookie"])[1])
    assert 290 <= age <= 300


def test_a_failure_tells_nothing_of_why(stranger, database):
    given = ["", "x", new_secret(), expired(database), revoked(database), secret(database)[:-1], "\x00", "é" * 500]
    answers = [sign_in(stranger, token) for token in given]
    texts = {
        re.sub(r'(datetime|content)="[^"]*T[^"]*"', "", assert_page(one, 422, "not valid here")) for one in answers
    }
    assert len(texts) == 1
    assert not any("set-cookie" in answer.headers for answer in answers)
    assert not any(token and token in text for token in given[1:] for text in texts if len(token) > 1)


def test_a_page_leads_to_the_form_and_back(stranger, database):
    answer = stranger.get("/runs?sort=gain&status=failed")
    assert answer.status_code == 303
    place = answer.headers["location"]
    assert place == "/login?next=" + quote("/runs?sort=gain&status=failed", safe="/")
    assert 'name="next" value="/runs?sort=gain&amp;status=failed"' in assert_page(stranger.get(place), 200)
    back = sign_in(stranger, secret(database), "/runs?sort=gain&status=failed")
    assert_page(stranger.get(back.headers["location"]), 200)
    assert stranger.get(place).headers["location"] == "/runs?sort=gain&status=failed"


@pytest.mark.parametrize(
    "place",
    ["https://evil.example", "//evil.example", "/\\evil.example", "\\\\evil", "javascript:alert(1)", "runs", "",
     "/\t/evil.example", "/\n/evil", "/a\\b", "///evil", "/\x00", " /runs", "http:/runs", "/a\r\nX: y"],
)  # fmt: skip
def test_the_way_back_is_a_path_of_ours(stranger, database, place):
    assert own_path(place) == "/"
    assert sign_in(stranger, secret(database), place).headers["location"] in ("/", own_path(place.strip()))


@pytest.mark.parametrize("place", ["/", "/runs", "/runs/06g0?tab=1&x=//y", "/models/ab"])
def test_paths_of_ours_are_kept(place):
    assert own_path(place) == place


def test_a_link_from_another_site_finds_the_session(stranger):
    page = stranger.get("/login?next=/runs/r1", headers={"Sec-Fetch-Site": "cross-site"})
    assert '<meta http-equiv="refresh" content="0; url=/runs/r1">' in assert_page(page, 200)
    for headers in ({"Sec-Fetch-Site": "same-origin"}, {}):
        assert "http-equiv" not in stranger.get("/login?next=/runs/r1", headers=headers).text


def test_other_sites_cannot_sign_somebody_in(stranger, database):
    for origin in ("https://evil.example", "null", "http://localhost:1"):
        answer = sign_in(stranger, secret(database), Origin=origin)
        assert answer.status_code == 403 and "set-cookie" not in answer.headers


def test_a_form_with_files_signs_nobody_in(stranger, database):
    answer = stranger.post("/login", files={"token": ("x", secret(database).encode())})
    assert_page(answer, 415)
    assert "set-cookie" not in answer.headers


def test_tries_that_fail_are_counted_by_address_and_a_good_token_never_waits(stranger, database, monkeypatch):
    clock = [1000.0]
    monkeypatch.setattr(login_throttle, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    for _ in range(MOST):
        assert sign_in(stranger, "x").status_code == 422
    refused = sign_in(stranger, "x")
    assert_page(refused, 429, "too many attempts", "5 minutes")
    assert int(refused.headers["retry-after"]) == WITHIN_S + 1
    assert sign_in(stranger, secret(database)).status_code == 303
    assert sign_in(stranger, "x").status_code == 429
    clock[0] += WITHIN_S + 1
    assert sign_in(stranger, "x").status_code == 422


def test_those_who_succeed_are_not_counted(stranger, database):
    for _ in range(MOST + 1):
        assert sign_in(stranger, secret(database)).status_code == 303


def test_addresses_are_taken_by_network_and_forgotten(monkeypatch):
    assert network_of("2001:db8::1") == network_of("2001:db8::ffff:2") != network_of("2001:db8:0:1::1")
    assert network_of("10.0.0.1") != network_of("10.0.0.2")
    assert network_of("testclient") == "testclient"
    monkeypatch.setattr(login_throttle, "_ADDRESSES", 3)
    known = Attempts()
    for number in range(10):
        for _ in range(MOST):
            known.note_failure(f"10.0.0.{number}")
    assert [known.wait_s(f"10.0.0.{number}") > 0 for number in range(10)] == [False] * 7 + [True] * 3


def test_signing_out_ends_the_session(browser):
    client = browser(Scope.ADMIN)
    cookie = client.cookies["kitsune_session"]
    answer = client.post("/logout", data={"csrf": csrf_of(client)})
    assert (answer.status_code, answer.headers["location"]) == (303, "/login")
    assert "Max-Age=0" in answer.headers["set-cookie"]
    assert browser(cookie=cookie).get("/runs").status_code == 303


def test_signing_in_anew_ends_the_session_before(browser, database):
    client = browser(Scope.ADMIN)
    before = client.cookies["kitsune_session"]
    assert sign_in(client, secret(database)).status_code == 303
    assert browser(cookie=before).get("/runs").status_code == 303


def test_a_token_of_any_scope_can_sign_out(browser):
    for scope in Scope:
        client = browser(scope)
        text = client.get("/login").headers.get("location")
        assert text == "/"
        form = client.get("/runs").text
        csrf = form.partition('name="csrf" value="')[2].partition('"')[0]
        assert client.post("/logout", data={"csrf": csrf}).status_code == 303


def test_a_revoked_token_ends_its_session_at_once(browser, database):
    token, _ = made(database, Scope.ADMIN)
    client = browser(cookie=signed_in(database, token)[1])
    assert client.get("/runs").status_code == 200
    with database.begin() as connection:
        tokens.revoke(connection, token.id)
    assert client.get("/runs").status_code == 303


def test_neither_key_opens_the_other_door(browser, database):
    client = browser(Scope.ADMIN)
    assert client.get("/api/v1/runs").status_code == 401
    assert client.get("/runs", headers=bearer("x")).status_code == 200
    stranger = browser()
    assert stranger.get("/runs", headers=bearer(secret(database, Scope.ADMIN))).status_code == 303
    answer = stranger.post("/tokens", data={"name": "x"}, headers=bearer(secret(database, Scope.ADMIN)))
    assert answer.headers["location"] == "/login"
