"""All pages of the application with every state of a session."""

import re
from datetime import timedelta

import pytest
from fastapi.routing import iter_route_contexts

from server.pages.frame import PageRoute
from tests.store.samples import a_plan, a_run, after
from tests.unit.server.conftest import bearer, made, secret
from tests.unit.server.pages.conftest import assert_page, csrf_of, signed_in
from tuner.store.queries import archives, plans, runs, sessions, tokens
from tuner.store.queries.tokens import Scope
from tuner.wall_clock import utcnow

#: Pages without a session.
OPEN = {
    ("GET", "/login"),
    ("POST", "/login"),
    ("GET", "/problems"),
    ("GET", "/problems/{slug}"),
    ("GET", "/shared/{secret}"),
    ("GET", "/shared/{secret}/live"),
}
#: The scope of each page; None: any session. A new page must be added here.
#: They lead to a page that shows the run, so `submit` alone is not enough.
ALSO_READ = {"/runs/{run_id}/note", "/runs/{run_id}/share"}
NEEDS = {
    ("GET", "/"): None,
    ("GET", "/runs"): Scope.READ,
    ("GET", "/fragments/runs"): Scope.READ,
    ("GET", "/runs/{run_id}"): Scope.READ,
    ("GET", "/runs/{run_id}/live"): Scope.READ,
    ("GET", "/runs/{run_id}/export.csv"): Scope.READ,
    ("GET", "/runs/{run_id}/export.html"): Scope.READ,
    ("GET", "/runs/{run_id}/export.json"): Scope.READ,
    ("GET", "/runs/{run_id}/trace.json"): Scope.READ,
    ("POST", "/runs/{run_id}/cancel"): Scope.SUBMIT,
    ("POST", "/runs/{run_id}/retry"): Scope.SUBMIT,
    ("POST", "/runs/{run_id}/note"): Scope.SUBMIT,
    ("POST", "/runs/{run_id}/delete"): Scope.SUBMIT,
    ("POST", "/runs/{run_id}/share"): Scope.SUBMIT,
    ("POST", "/runs/{run_id}/unshare"): Scope.SUBMIT,
    ("GET", "/plans/{plan_id}"): Scope.READ,
    ("GET", "/plans/{plan_id}/plan.json"): Scope.READ,
    ("GET", "/compare"): Scope.READ,
    ("GET", "/models/{fingerprint}"): Scope.READ,
    ("GET", "/submit"): Scope.SUBMIT,
    ("POST", "/submit"): Scope.SUBMIT,
    ("GET", "/tokens"): Scope.ADMIN,
    ("POST", "/tokens"): Scope.ADMIN,
    ("POST", "/tokens/{token_id}/revoke"): Scope.ADMIN,
    ("POST", "/logout"): None,
}
EVERY = sorted(NEEDS)
#: Pages of a single object, which another team must not see.
OF_ONE = [(method, path) for method, path in EVERY if "{" in path]


@pytest.fixture
def theirs(database, archive):
    """A run, its plan and a token of another team, as values of path parameters."""
    token, _ = made(database, Scope.ADMIN, team="theirs")
    with database.begin() as connection:
        runs.add(connection, queued := a_run(team="theirs", fingerprint="f" * 64))
        run = runs.claim_one(connection, queued.id, "worker")
        plan = a_plan(fingerprint="f" * 64)
        plans.put(connection, plan, run)
    return {
        "run_id": run.id,
        "plan_id": plan.plan_id,
        "token_id": token.id,
        "fingerprint": "f" * 64,
        "secret": "x" * 43,
    }


def routes_of(app) -> set[tuple[str, str]]:
    found = [route for route in iter_route_contexts(app.routes) if isinstance(route.original_route, PageRoute)]
    return {(method, route.path_format) for route in found for method in route.methods}


def concrete(path: str, names: dict[str, str] | None = None) -> str:
    blank = {"run_id": "r1", "plan_id": "0" * 64, "token_id": "0", "fingerprint": "0" * 64, "secret": "0" * 43}
    return re.sub(r"\{(\w+)\}", lambda found: (names or blank)[found[1]], path)


def test_every_page_is_either_open_or_says_what_it_needs(app):
    assert routes_of(app) == OPEN | set(NEEDS)


@pytest.mark.parametrize(("method", "path"), EVERY)
def test_without_a_live_session_every_page_leads_to_the_sign_in(browser, database, method, path):
    token, _ = made(database, *Scope)
    brief, _ = made(database, *Scope, expires_at=after(60), now=after(0))
    gone, _ = made(database, *Scope)
    cookies = [
        None,
        "garbage",
        "\x00",
        secret(database, *Scope),  # a token is no cookie
        token.id,
        signed_in(database, token, now=utcnow() - timedelta(hours=12, seconds=1))[1],
        signed_in(database, brief, now=after(0))[1],
        signed_in(database, gone)[1],
    ]
    ended = signed_in(database, token)[1]
    with database.begin() as connection:
        tokens.revoke(connection, gone.id)
        sessions.end(connection, ended)
    for cookie in [*cookies, ended]:
        client = browser()
        headers = {} if cookie is None else {"Cookie": f"kitsune_session={cookie}"}
        answer = client.request(method, concrete(path), headers=headers)
        assert answer.status_code == 303, cookie
        assert answer.headers["location"].startswith("/login")
        assert ("?next=" in answer.headers["location"]) == (method == "GET")
        assert not answer.content


@pytest.mark.parametrize(("method", "path"), EVERY)
@pytest.mark.parametrize("scope", Scope)
def test_a_scope_opens_its_pages_and_no_others(browser, method, path, scope):
    client = browser(scope)
    answer = client.request(method, concrete(path), data={"csrf": csrf_of(client)} if method == "POST" else None)
    if scope is Scope.SUBMIT and path in ALSO_READ:
        assert_page(answer, 403, "lacks the scope &#39;read&#39;", "Sign out")
    elif NEEDS[method, path] in (None, scope) or scope is Scope.ADMIN:
        assert answer.status_code not in (401, 403, 500)
        assert not answer.headers.get("location", "").startswith("/login") or path == "/logout"
    else:
        assert_page(answer, 403, f"lacks the scope &#39;{NEEDS[method, path]}&#39;", "Sign out")


@pytest.mark.parametrize(("method", "path"), OF_ONE)
def test_another_team_learns_nothing(browser, theirs, database, method, path):
    """Things of another team are answered as if they did not exist."""
    for team in ("ours", "default"):
        if team == "default" and "token_id" in path:
            continue  # those who run the server rule the tokens of every team
        client = browser(Scope.ADMIN, team=team)
        data = {"csrf": csrf_of(client)} if method == "POST" else None
        for names in (theirs, None):
            answer = client.request(method, concrete(path, names), data=data)
            if "fingerprint" in path:  # of a model that nobody tuned the page says so
                assert answer.status_code in (200, 404) and theirs["run_id"] not in answer.text
            else:
                assert_page(answer, 404, "Not found")
    with database.read() as connection:
        assert all(token.revoked_at is None for token in tokens.listed(connection))
        assert not runs.get(connection, theirs["run_id"]).status.is_finished


@pytest.mark.parametrize("team", ["ours", "default"])
def test_lists_show_no_other_team(browser, theirs, team):
    client = browser(Scope.ADMIN, team=team)
    for place in ("/", "/runs", "/fragments/runs", f"/models/{theirs['fingerprint']}", f"/runs?fingerprint={'f' * 64}"):
        assert theirs["run_id"] not in client.get(place).text
    assert ("theirs" in client.get("/tokens").text) == (team == "default")
    assert theirs["run_id"] in browser(Scope.READ, team="theirs").get("/runs").text


CHANGING = [(method, path) for method, path in EVERY if method == "POST"]


@pytest.mark.parametrize(("method", "path"), CHANGING)
def test_nothing_changes_without_the_word_of_the_session(browser, database, archive, method, path):
    token, _ = made(database, Scope.ADMIN)
    with database.begin() as connection:
        run = runs.add(connection, a_run())
        assert archives.get(connection, archive.sha256) is not None
    other = csrf_of(browser(Scope.ADMIN))
    client = browser(Scope.ADMIN)
    names = {"run_id": run.id, "token_id": token.id}
    for given in (
        None,
        {},
        {"csrf": ""},
        {"csrf": "x"},
        {"csrf": other},
        {"csrf": "é"},
        {"csrf": ["", csrf_of(client)][:1]},
    ):
        assert_page(client.post(concrete(path, names), data=given), 403, "earlier session")
    good = csrf_of(client)
    assert_page(client.post(f"{concrete(path, names)}?csrf={good}"), 422)
    assert_page(client.post(concrete(path, names), json={"csrf": good}), 403)
    assert_page(client.post(concrete(path, names), files={"csrf": ("csrf", good.encode())}), 403)
    assert client.get("/runs").status_code == 200
    with database.read() as connection:
        assert runs.get(connection, run.id) == run
        assert all(one.revoked_at is None for one in tokens.listed(connection))


@pytest.mark.parametrize(("method", "path"), CHANGING)
@pytest.mark.parametrize("origin", ["https://evil.example", "null", "http://localhost:1"])
def test_no_other_origin_changes_anything(browser, method, path, origin):
    client = browser(Scope.ADMIN)
    answer = client.post(concrete(path), data={"csrf": csrf_of(client)}, headers={"Origin": origin})
    assert answer.status_code == 403


def test_a_part_of_a_page_has_the_page_loaded_again_when_its_session_ended(browser):
    answer = browser().get("/fragments/runs", headers={"HX-Request": "true"})
    assert (answer.status_code, answer.headers["hx-refresh"]) == (401, "true")


def test_pages_are_no_part_of_the_description_of_the_api(browser, database):
    text = browser().get("/openapi.json", headers=bearer(secret(database))).text
    assert "/login" not in text and "/fragments" not in text


@pytest.mark.parametrize("charset", ["undefined", "unicode_escape", "raw_unicode_escape", "utf-7", "latin-1"])
def test_forms_in_other_letters_are_refused(browser, charset):
    client = browser(Scope.ADMIN)
    body = b'--b\r\nContent-Disposition: form-data; name="csrf"\r\n\r\n+2AA- \\ud800 \xff\r\n--b--\r\n'
    kind = f"multipart/form-data; boundary=b; charset={charset}"
    answer = client.post("/submit", content=body, headers={"content-type": kind})
    assert_page(answer, 415, "UTF-8")


@pytest.mark.parametrize("path", ["/compare?ids=%00,a", "/compare?ids=a,b%22"])
def test_ids_that_cannot_be_are_refused(browser, path):
    assert_page(browser(Scope.READ).get(path), 422, "not the id of a run")


def test_a_token_that_cannot_be_is_not_looked_for(browser):
    client = browser(Scope.ADMIN)
    assert client.post("/tokens/%00/revoke", data={"csrf": csrf_of(client)}).status_code == 422


def test_a_number_longer_than_any_is_refused_beside_its_field(browser):
    client = browser(Scope.SUBMIT)
    data = {"csrf": csrf_of(client), "trials": "9" * 5000, "budget": ""}
    answer = client.post("/submit", data=data, files={"archive": ("x", b"abc")})
    assert_page(answer, 422, "trials")
