"""Who may see a run, what is done to it, and how it is shared and saved."""

import re

import pytest

from tests.store.samples import a_run
from tests.unit.server.pages import stories
from tests.unit.server.pages.visits import keep, link_of, shown
from tuner.records import RunStatus
from tuner.store.database import Database
from tuner.store.queries import runs

# Who may see it -------------------------------------------------------------------------------------------------------


PLACES = (
    "/runs/{id}",
    "/runs/{id}/live",
    "/runs/{id}/export.html",
    "/runs/{id}/export.json",
    "/runs/{id}/export.csv",
    "/plans/{plan}",
    "/plans/{plan}/plan.json",
    "/models/{fingerprint}",
    "/compare?ids={id},{id2}",
)


@pytest.mark.parametrize("place", PLACES)
def test_another_team_finds_nothing(ada, outsider, database, place):
    run, other = keep(database, stories.with_a_gain()), keep(database, stories.queued())
    path = place.format(id=run.id, id2=other.id, plan=run.plan_id, fingerprint=run.fingerprint)
    assert ada.client.get(path).status_code in (200, 204)
    assert outsider.client.get(path).status_code == 404


@pytest.mark.parametrize("place", PLACES)
def test_without_a_session_there_is_only_the_way_in(stranger, database, place):
    run, other = keep(database, stories.with_a_gain()), keep(database, stories.queued())
    path = place.format(id=run.id, id2=other.id, plan=run.plan_id, fingerprint=run.fingerprint)
    answer = stranger.get(path, follow_redirects=False)
    assert answer.status_code == 303
    assert answer.headers["location"].startswith("/login?next=/")


@pytest.mark.parametrize("act", ["cancel", "retry", "note", "share", "unshare", "delete"])
def test_acts_need_the_scope_the_form_and_the_team(ada, reader, outsider, database, act):
    run = keep(database, stories.cancelled())
    path = f"/runs/{run.id}/{act}"
    assert reader.send(path).status_code == 403
    assert ada.client.post(path, data={"csrf": "wrong"}).status_code == 403
    assert ada.client.post(path).status_code == 403
    assert outsider.send(path).status_code == 404
    assert ada.send(path).status_code in (200, 303)


def test_who_may_only_read_is_offered_nothing_to_change(ada, reader, database):
    run = keep(database, stories.running())
    assert "/cancel" in shown(ada, f"/runs/{run.id}")
    text = shown(reader, f"/runs/{run.id}")
    for act in ("cancel", "retry", "note", "share", "unshare", "delete"):
        assert f'action="/runs/{run.id}/{act}"' not in text


@pytest.mark.parametrize("path", ["/runs/nothing", "/plans/" + "0" * 64, "/models/" + "0" * 64, "/compare?ids=a,b"])
def test_what_is_not_there_is_a_page_that_says_so(ada, path):
    text = shown(ada, path, 404)
    assert "<h1>" in text


# What is done to it ---------------------------------------------------------------------------------------------------


def test_a_run_is_cancelled(ada, database):
    run = keep(database, stories.running())
    assert ada.send(f"/runs/{run.id}/cancel").headers["location"] == f"/runs/{run.id}"
    assert status_of(database, run.id) is RunStatus.CANCELLED
    assert "/cancel" not in shown(ada, f"/runs/{run.id}")


def status_of(database: Database, run_id: str) -> RunStatus:
    with database.read() as connection:
        found = runs.get(connection, run_id)
    assert found is not None
    return found.status


def test_a_run_that_has_ended_is_run_again(ada, database):
    run = keep(database, stories.cancelled())
    place = ada.send(f"/runs/{run.id}/retry").headers["location"]
    assert place != f"/runs/{run.id}"
    assert "waiting for a worker" in shown(ada, place)
    assert ada.send(f"/runs/{run.id}/retry").headers["location"] == place


@pytest.mark.parametrize("with_plan", [False, True])
def test_a_run_that_has_ended_is_deleted_after_a_question(ada, database, with_plan):
    """The confirmation works without scripts, and nothing is deleted before it."""
    run = keep(database, stories.with_a_gain())
    before, _, rest = shown(ada, f"/runs/{run.id}").partition(
        '<details class="sure"><summary>Delete this run</summary>'
    )
    assert f'action="/runs/{run.id}/delete"' in rest.partition("</details>")[0]
    assert f'action="/runs/{run.id}/delete"' not in before
    answer = ada.send(f"/runs/{run.id}/delete", **({"plan": "too"} if with_plan else {}))
    assert (answer.status_code, answer.headers["location"]) == (303, "/runs")
    assert run.id not in shown(ada, "/runs")
    assert ada.client.get(f"/runs/{run.id}").status_code == 404
    plan = ada.client.get(f"/plans/{run.plan_id}")
    assert plan.status_code == (404 if with_plan else 200)
    assert "The run that found it" not in plan.text


@pytest.mark.parametrize("story", [stories.queued, stories.running])
def test_a_run_that_goes_on_is_not_deleted(ada, database, story):
    run = keep(database, story())
    assert "/delete" not in shown(ada, f"/runs/{run.id}")
    answer = ada.send(f"/runs/{run.id}/delete")
    assert answer.status_code == 409
    assert "cancel it first" in answer.text
    assert status_of(database, run.id) is run.status


@pytest.mark.parametrize("workload", ["train.py:make_workload", "live"])
def test_what_only_its_own_machine_has_is_not_offered_again(ada, database, workload):
    run = keep(database, (a_run(workload=workload, status=RunStatus.CANCELLED), [], None))
    assert "/retry" not in shown(ada, f"/runs/{run.id}")
    assert ada.send(f"/runs/{run.id}/retry").status_code == 409


def test_tags_and_a_note_are_kept(ada, database):
    run = keep(database, stories.with_a_gain())
    note = "first line\r\nsecond <b>line</b>"
    answer = ada.send(f"/runs/{run.id}/note", tags=" weekly, a+b ,weekly,,", note=note)
    assert answer.headers["location"] == f"/runs/{run.id}#notes"
    with database.read() as connection:
        found = runs.get(connection, run.id)
    assert (found.tags, found.note) == (("weekly", "a+b"), "first line\nsecond <b>line</b>")
    text = shown(ada, f"/runs/{run.id}")
    assert 'href="/runs?tag=a%2Bb"' in text
    assert "second &lt;b&gt;line" in text
    assert ada.send(f"/runs/{run.id}/note", tags="", note="").status_code == 303
    assert "first line" not in shown(ada, f"/runs/{run.id}")


@pytest.mark.parametrize(
    "fields",
    [
        {"tags": ",".join(map(str, range(30)))},
        {"tags": "x" * 50},
        {"tags": "a\tb"},
        {"note": "x" * 4001},
        {"tags": 'a"b'},
        {"note": "a\x00b"},
    ],
)
def test_tags_and_notes_have_limits(ada, database, fields):
    run = keep(database, stories.with_a_gain())
    assert ada.send(f"/runs/{run.id}/note", **fields).status_code == 422
    with database.read() as connection:
        assert runs.get(connection, run.id).tags == ()


# Shared, and saved ----------------------------------------------------------------------------------------------------


def test_a_link_shows_its_run_and_nothing_else(ada, stranger, database):
    run, other = keep(database, stories.with_a_gain()), keep(database, stories.queued())
    link = link_of(ada, run.id)
    answer = stranger.get(link)
    assert answer.status_code == 200
    assert "1.32 times as fast" in answer.text
    places = re.findall(r'(?:href|action|src|hx-get)="(/[^"]*)"', answer.text)
    assert [place for place in places if not place.startswith("/static/") and place != "/"] == []
    assert "<form" not in answer.text
    assert stranger.get(f"/shared/{other.id}").status_code == 404
    text = shown(ada, f"/runs/{run.id}")
    assert link.rpartition("/")[2] not in text
    assert "1\N{NO-BREAK SPACE}link to it works now" in text, "loading the page again makes no other"


def test_a_link_follows_a_run_that_goes_on(ada, stranger, database):
    run = keep(database, stories.running())
    link = link_of(ada, run.id)
    assert f'hx-get="{link}/live?seen=4"' in stranger.get(link).text
    assert "Measuring trial 5 of 9." in stranger.get(f"{link}/live?seen=4").text


def test_a_link_ends(ada, stranger, database):
    run = keep(database, stories.with_a_gain())
    links = [link_of(ada, run.id) for _ in range(2)]
    assert "2\N{NO-BREAK SPACE}links to it work now" in shown(ada, f"/runs/{run.id}")
    ada.send(f"/runs/{run.id}/unshare")
    for link in links:
        assert stranger.get(link).status_code == 404
        assert stranger.get(f"{link}/live").status_code == 404
    assert "There is none now" in shown(ada, f"/runs/{run.id}")


@pytest.mark.parametrize("secret", ["x", "x" * 43, "..%2f..%2fetc", "%00", "<script>", "x" * 5000])
def test_a_secret_that_was_never_given_shows_nothing(stranger, secret):
    answer = stranger.get(f"/shared/{secret}")
    assert answer.status_code == 404
    assert "<script>" not in answer.text.replace('<script src="', "")


def test_a_saved_run_needs_nothing_but_itself(ada, database):
    run = keep(database, stories.with_a_gain())
    answer = ada.client.get(f"/runs/{run.id}/export.html")
    assert answer.headers["content-disposition"] == f'attachment; filename="kitsune-run-{run.id}.html"'
    assert "<script" not in answer.text
    assert re.findall(r'(?:src|href|action|hx-get)="(?!#)([^"]*)"', answer.text) == []
    assert re.findall(r"url\(|@import", answer.text) == []
    (policy,) = re.findall(r'http-equiv="Content-Security-Policy" content="([^"]*)"', answer.text)
    assert answer.headers["content-security-policy"].startswith(policy.replace("&#39;", "'"))
    assert policy.startswith("default-src &#39;none&#39;; style-src &#39;sha256-")


@pytest.mark.parametrize(("kind", "media_type"), [("json", "application/json"), ("csv", "text/csv")])
def test_a_run_is_saved_as_data_too(ada, database, kind, media_type):
    run = keep(database, stories.with_a_gain())
    answer = ada.client.get(f"/runs/{run.id}/export.{kind}")
    assert answer.headers["content-type"].startswith(media_type)
    assert "attachment" in answer.headers["content-disposition"]
    assert "channels_last" in answer.text
