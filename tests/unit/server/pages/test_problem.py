"""Errors are pages where a page was requested, and problems elsewhere."""

import logging

import pytest

from kitsune.errors import StoreBusyError, StoreError
from tests.unit.server.conftest import assert_problem
from tests.unit.server.pages.conftest import HTML, assert_page
from tuner.store.queries import runs
from tuner.store.queries.tokens import Scope


def test_a_browser_that_finds_nothing_gets_a_page(stranger):
    assert "Sign out" not in assert_page(stranger.get("/nowhere"), 404, "Not found", "nothing at this address")
    assert_page(stranger.get("/runs/a/b/c"), 404)
    assert_page(stranger.delete("/login"), 405)


@pytest.mark.parametrize("path", ["/api/v1/nothing", "/api/v1/runs", "/metrics", "/api/v1"])
def test_programs_get_problems_whatever_they_accept(stranger, path):
    answer = stranger.get(path, headers=HTML)
    assert answer.headers["content-type"] == "application/problem+json"


def test_without_the_wish_for_a_page_it_is_a_problem(stranger):
    assert_problem(stranger.get("/nowhere", headers={"Accept": "*/*"}), 404)


def test_what_the_guard_refuses_is_a_problem(stranger):
    assert_problem(stranger.get("/runs", headers={"Host": "evil.example"}), 421)


@pytest.mark.parametrize(
    ("error", "status", "words"),
    [
        (StoreBusyError("secret"), 503, "try again in a second"),
        (StoreError("secret"), 503, "log says why"),
        (RuntimeError("secret"), 500, "log says why"),
        (ZeroDivisionError("secret"), 500, "urn:uuid:"),
    ],
)
def test_what_goes_wrong_inside_is_a_page_that_tells_nothing_internal(
    browser, monkeypatch, caplog, error, status, words
):
    def fail(*_, **__):
        raise error

    client = browser(Scope.READ)
    monkeypatch.setattr(runs, "page", fail)
    with caplog.at_level(logging.ERROR, "kitsune.server"):
        answer = client.get("/runs")
    text = assert_page(answer, status, words, "Sign out", "urn:uuid:")
    assert "secret" not in text and "Traceback" not in text
    assert "secret" in caplog.text and text.partition("urn:uuid:")[2][:36] in caplog.text
    assert ("retry-after" in answer.headers) == (status == 503)
