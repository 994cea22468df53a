"""The submit form: it starts a run, or is shown again with errors."""

import re
import threading

import pytest
from anyio import CapacityLimiter

from kitsune.submission.format.limits import MAX_ARCHIVE_BYTES
from server.api import archives as archives_route
from tests.unit.kitsune.submission import hostile
from tests.unit.server.pages.conftest import assert_page, csrf_of
from tests.unit.server.wire import Wire
from tuner.store.queries import archives, runs
from tuner.store.queries.tokens import Scope

FIELDS = {"name": "", "device": "", "budget": "10m", "trials": "", "memory_limit": ""}


@pytest.fixture
def client(browser):
    return browser(Scope.READ, Scope.SUBMIT)


def send(client, content: bytes | None = None, **changes: str):
    content = hostile.valid().to_bytes() if content is None else content
    data = {"csrf": csrf_of(client), **FIELDS, **changes}
    return client.post("/submit", data=data, files={"archive": ("model.ksn", content)})


def all_runs(database, **changes):
    with database.read() as connection:
        return runs.page(connection, limit=100, **changes).runs


def test_an_archive_becomes_a_queued_run(client, database):
    answer = send(client, name="my CNN", device="cuda", budget="5m", trials="7", memory_limit="4GiB")
    (run,) = all_runs(database)
    assert (answer.status_code, answer.headers["location"]) == (303, f"/runs/{run.id}")
    assert (run.name, run.device, run.budget_s, run.budget_trials, run.workload) == (
        "my CNN",
        "cuda",
        300,
        7,
        "archive",
    )
    assert run.memory_limit_bytes == 2**32
    with database.read() as connection:
        assert archives.get(connection, run.archive).fingerprint == run.fingerprint


def test_who_may_only_submit_begins_and_ends_at_the_form(browser, database):
    client = browser(Scope.SUBMIT)
    assert (client.get("/").status_code, client.get("/").headers["location"]) == (303, "/submit")
    answer = send(client)
    (run,) = all_runs(database)
    assert (answer.status_code, answer.headers["location"]) == (303, "/submit")
    assert f"Started: run <code>{run.id}</code>" in assert_page(client.get("/submit"), 200)
    assert "Started" not in client.get("/submit").text


def test_without_a_budget_it_is_left_to_a_first_look(client, database):
    assert send(client, budget="").status_code == 303
    assert (all_runs(database)[0].budget_s, all_runs(database)[0].budget_trials) == (None, None)


def test_a_double_click_starts_one_run(client, database):
    assert send(client).headers["location"] == send(client).headers["location"]
    assert len(all_runs(database)) == 1


def test_a_run_and_its_archive_belong_to_the_team(browser, database):
    send(browser(Scope.SUBMIT, Scope.READ, team="ours"))
    assert len(all_runs(database, team="ours")) == 1 and not all_runs(database, team="default")
    with database.read() as connection:
        sha256 = all_runs(database)[0].archive
        assert archives.get(connection, sha256, team="ours") and not archives.get(connection, sha256, team="default")


@pytest.mark.parametrize(
    ("changes", "field", "words"),
    [
        ({"budget": "soon"}, "budget", "90s, 5m"),
        ({"budget": "-1"}, "budget", "90s, 5m"),
        ({"memory_limit": "much"}, "memory_limit", "512MB"),
        ({"memory_limit": "0"}, "memory_limit", "40GiB"),
        ({"trials": "0"}, "trials", "greater than"),
        ({"trials": "many"}, "trials", "integer"),
        ({"trials": "999999999"}, "trials", "less than"),
        ({"trials": "٣"}, "trials", "integer"),
        ({"name": "a\u202eb"}, "name", "printable"),
        ({"name": "x" * 101}, "name", "100"),
    ],
)
def test_a_wrong_field_comes_back_with_what_is_wrong(client, database, changes, field, words):
    text = assert_page(send(client, **changes), 422, "Nothing was started")
    (told,) = re.findall(rf'id="{field}-error">([^<]+)<', text)
    assert words in told
    assert f'aria-describedby="{field}-error {field}-hint" aria-invalid="true"' in text
    assert not all_runs(database)


def test_what_was_typed_is_kept(client):
    text = assert_page(send(client, name="<my> CNN", device="cpu", budget="x"), 422)
    assert 'value="&lt;my&gt; CNN"' in text
    assert 'value="cpu" checked' in text


@pytest.mark.parametrize("content", [b"", b"x", b"PK\x03\x04" + b"\x00" * 1000])
def test_what_is_no_archive_is_refused_with_the_reason(client, database, content):
    text = assert_page(send(client, content), 422)
    assert re.search(r'id="archive-error">[^<]{20,}<', text)
    assert not all_runs(database)


def test_a_form_without_a_file_is_refused(client, database):
    answer = client.post("/submit", data={"csrf": csrf_of(client), **FIELDS})
    assert_page(answer, 422, "kitsune export")


def test_a_file_beyond_the_limit_is_refused(client, database):
    assert_page(send(client, b"\x00" * (MAX_ARCHIVE_BYTES + 1)), 413, "The body may have 33554432 bytes")
    assert not all_runs(database)


def test_forms_and_the_api_share_the_places_for_what_arrives(client, database, monkeypatch):
    places = CapacityLimiter(1)
    monkeypatch.setattr(archives_route, "ARRIVALS", places)
    assert send(client).status_code == 303
    places.acquire_on_behalf_of_nowait(object())
    assert_page(send(client, name="another"), 503)
    assert len(all_runs(database)) == 1


@pytest.mark.parametrize("path", ["/submit", "/tokens", "/logout", "/login", "/api/v1/runs"])
def test_of_strangers_no_byte_of_a_large_form_is_read(app, path):
    async def receive():
        raise AssertionError("the body was read")

    wire = Wire(app, ("content-type", "multipart/form-data; boundary=x"), ("content-length", "30000000"), path=path)
    status, headers, _ = wire.answer(receive)
    assert (status, headers["connection"]) in ((303, "close"), (415, "close"), (401, "close"))


def test_more_than_a_form_is_refused(client):
    csrf = csrf_of(client)
    many = {f"f{number}": "x" for number in range(60)}
    files = {"archive": ("a", b"x")}
    assert client.post("/submit", data={"csrf": csrf, **many}, files=files).status_code == 400
    assert client.post("/submit", data={"csrf": csrf, "name": "x" * 70_000}, files=files).status_code == 400
    two = [("archive", ("a", b"x")), ("archive", ("b", b"x"))]
    assert client.post("/submit", data={"csrf": csrf}, files=two).status_code == 400


@pytest.mark.parametrize("body", [b"", b"--x", b"--x\r\n\r\n", b"\xff" * 100])
def test_a_broken_form_is_refused(client, body):
    answer = client.post("/submit", content=body, headers={"Content-Type": "multipart/form-data; boundary=x"})
    assert answer.status_code in (400, 403)
    without_boundary = client.post("/submit", content=body, headers={"Content-Type": "multipart/form-data"})
    assert "in multipart.</p>" in assert_page(without_boundary, 400)


def test_many_at_once_are_all_kept(browser, database):
    client = browser(Scope.READ, Scope.SUBMIT)
    answers = []
    threads = [
        threading.Thread(target=lambda number=number: answers.append(send(client, name=f"n{number}")))
        for number in range(6)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {answer.status_code for answer in answers} == {303}
    assert {run.name for run in all_runs(database)} == {f"n{number}" for number in range(6)}
