import html
import re
from collections.abc import Iterator

import pytest
from fastapi import FastAPI

from kitsune.launches.planning.trace_export import trace_of
from kitsune.timeline import Timeline
from server.api.traces import why_no_timeline
from tests.store.samples import a_run, a_timeline, an_environment
from tests.unit.server.conftest import HERE, bearer, secret
from tests.unit.server.pages import stories
from tests.unit.server.pages.visits import Visit, keep, keep_timeline, visit
from tuner.records import Run, RunStatus
from tuner.store.database import Database
from tuner.store.queries import runs
from tuner.store.queries.tokens import Scope

ALL = [
    stories.measured_on_a_cpu,
    stories.with_a_gain,
    stories.without_a_gain,
    stories.too_noisy,
    stories.failed,
    stories.queued,
    stories.running,
    stories.cancelled,
    stories.of_one_trial,
    stories.of_many_samples,
]


@pytest.fixture
def ada(app: FastAPI, database: Database) -> Iterator[Visit]:
    with visit(app, database) as made:
        yield made


@pytest.fixture
def reader(app: FastAPI, database: Database) -> Iterator[Visit]:
    with visit(app, database, Scope.READ) as made:
        yield made


@pytest.fixture
def outsider(app: FastAPI, database: Database) -> Iterator[Visit]:
    with visit(app, database, team="others") as made:
        yield made


def shown(visit: Visit, path: str, status: int = 200) -> str:
    answer = visit.client.get(path, follow_redirects=False)
    assert answer.status_code == status, answer.text
    return answer.text


@pytest.mark.parametrize("story", ALL, ids=lambda story: story.__name__)
def test_every_run_has_a_page_and_a_file(ada, database, story):
    run = keep(database, story())
    for path in (f"/runs/{run.id}", f"/runs/{run.id}/export.html"):
        text = shown(ada, path)
        assert "Training step of" in text
        assert "undefined" not in text and "None" not in re.sub(r">None\.<", "", text)


def test_the_page_of_a_run_has_all_its_parts(ada, database):
    run = keep(database, stories.with_a_gain())
    text = shown(ada, f"/runs/{run.id}")
    headings = re.findall(r"<h2[^>]*>([^<]*)<", text)
    assert headings == [
        "From the step as given to the plan",
        "Train with it",
        "Choices, and why",
        "Search",
        "Trials",
        "Time against memory",
        "Launches on streams",
        "Where the time of this run went",
        "Noise",
        "Where this comes from",
        "Tags and note",
        "Share",
        "Delete",
    ]
    assert text.count('<div class="chart">') == 5
    assert f'href="/plans/{run.plan_id}"' in text
    assert f'href="/models/{run.fingerprint}"' in text


@pytest.mark.parametrize("path", ["", "/export.html"])
def test_whatever_people_can_write_is_text(ada, database, path):
    run = keep(database, stories.of_hostile_names())
    text = shown(ada, f"/runs/{run.id}{path}")
    assert "<script>alert" not in text
    assert "{{ 7*7 }}" in text and "49\n" not in text and "&amp;\u202e49" not in text
    assert text.count("&lt;script&gt;alert(1)&lt;/script&gt;") >= 10
    plan = shown(ada, f"/plans/{run.plan_id}")
    assert "<script>alert" not in plan
    model = shown(ada, f"/models/{run.fingerprint}")
    assert "<script>alert" not in model and "&lt;script&gt;" in model


def test_a_plan_that_was_altered_does_not_hide_its_run(ada, database):
    run = keep(database, stories.with_a_gain())
    with database.begin() as connection:
        connection.exec_driver_sql("update kitsune_plans set document = replace(document, 'fused', 'given')")
    text = shown(ada, f"/runs/{run.id}")
    assert "The plan of this run cannot be read" in text
    assert "Trials" in text


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


# While it goes on -----------------------------------------------------------------------------------------------------


def test_a_running_page_asks_for_news_and_gets_what_changed(ada, database):
    story = stories.running()
    run = keep(database, story)
    assert f'hx-get="/runs/{run.id}/live?seen=4"' in shown(ada, f"/runs/{run.id}")
    same = shown(ada, f"/runs/{run.id}/live?seen=4")
    assert "Measuring trial 5 of 9." in same
    assert 'id="tried"' not in same and "<html" not in same
    assert '<span id="standing" class="state running" hx-swap-oob="true">running</span>' in same
    news = shown(ada, f"/runs/{run.id}/live?seen=3")
    assert 'id="tried" hx-swap-oob="true"' in news
    assert "number 3" not in news


def test_the_last_news_is_the_whole_page(ada, database):
    run = keep(database, stories.with_a_gain())
    answer = ada.client.get(f"/runs/{run.id}/live?seen=3")
    assert (answer.status_code, answer.headers["hx-refresh"], answer.text) == (204, "true", "")
    assert "hx-get" not in shown(ada, f"/runs/{run.id}")


def test_without_scripts_a_running_page_loads_itself_again(ada, database):
    assert "<noscript><meta" in shown(ada, f"/runs/{keep(database, stories.running()).id}")
    assert '<meta http-equiv="refresh"' not in shown(ada, f"/runs/{keep(database, stories.with_a_gain()).id}")


# Shared, and saved ----------------------------------------------------------------------------------------------------


def link_of(visit: Visit, run_id: str) -> str:
    """Follows the redirect to the page with the new link, as a browser does."""
    assert visit.send(f"/runs/{run_id}/share").headers["location"] == f"/runs/{run_id}"
    (link,) = set(re.findall(rf"{HERE}(/shared/[\w-]+)", shown(visit, f"/runs/{run_id}")))
    return link


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


# Plans, models, comparisons -------------------------------------------------------------------------------------------


def test_a_plan_can_be_looked_at_and_saved(ada, database, tmp_path):
    run, _, plan = story = stories.with_a_gain()
    keep(database, story)
    text = shown(ada, f"/plans/{plan.plan_id}")
    for words in ("channels innermost, as tensor-core", "Applied on NVIDIA H200; refused", "128x3x32x32"):
        assert words in text
    assert f'href="/runs/{run.id}"' in text
    file = tmp_path / "plan.json"
    file.write_text(shown(ada, f"/plans/{plan.plan_id}/plan.json"), "utf-8")
    assert type(plan).load(file) == plan


def test_a_model_has_its_runs_gpu_by_gpu(ada, database):
    first = keep(database, stories.with_a_gain())
    other = stories.with_a_gain(environment=an_environment(gpu="NVIDIA A100"))
    keep(database, other)
    keep(database, (stories.a_gpu_run(environment=None), [], None))
    text = shown(ada, f"/models/{first.fingerprint}")
    for gpu in ("NVIDIA H200", "NVIDIA A100", "not looked at yet"):
        assert f">{gpu}</h2>" in text
    assert text.count('<div class="chart">') == 0  # a single run has no history
    keep(database, stories.with_a_gain())
    assert shown(ada, f"/models/{first.fingerprint}").count('<div class="chart">') == 1


def test_a_comparison_shows_what_differs(ada, database):
    one = keep(database, stories.with_a_gain())
    other = keep(database, stories.without_a_gain())
    text = shown(ada, f"/compare?ids={one.id}&ids={other.id}")
    names = re.findall(r'<th scope="row">([^<]*)</th>', text)
    assert {"layout", "gain", "verdict", "memory change"} < set(names)
    assert "GPU" not in names and "seed" not in names
    assert "<code>knobs.layout</code>" in text
    every = shown(ada, f"/compare?ids={one.id},{other.id}&all=true")
    assert {"GPU", "seed"} < set(re.findall(r'<th scope="row">([^<]*)</th>', every))
    assert "notice warn" not in every


def test_a_comparison_tells_how_runs_ended(ada, database):
    one, other = keep(database, stories.with_a_gain(name="nightly")), keep(database, stories.failed())
    text = html.unescape(shown(ada, f"/compare?ids={one.id},{other.id}"))
    assert {"name", "state", "error", "took"} < set(re.findall(r'<th scope="row">([^<]*)</th>', text))
    assert "nightly" in text and other.error in text


def test_a_comparison_warns_of_what_cannot_be_compared(ada, database):
    one = keep(database, stories.with_a_gain())
    machine = an_environment(gpu="NVIDIA A100", torch="2.11.0")
    run, tried, _ = stories.with_a_gain(environment=machine, fingerprint="c" * 64)
    other = keep(database, (run.evolve(plan_id=None), tried, None))
    text = shown(ada, f"/compare?ids={one.id},{other.id}")
    said = re.findall(r'<p class="notice warn">([^<]*)\.</p>', html.unescape(text))
    assert "Measured on different GPUs (NVIDIA A100, NVIDIA H200): times do not compare, gains only with care" in said
    headers = bearer(secret(database))
    told = ada.client.get(f"/api/v1/compare?ids={one.id},{other.id}", headers=headers).json()["warnings"]
    assert said == [warning[:1].upper() + warning[1:] for warning in told], "in the words of the API"


def test_a_comparison_of_nothing_says_how_to_choose(ada):
    text = shown(ada, "/compare", 422)
    assert 'in <a href="/runs">the list</a>' in text and "None was chosen" in text and "query.ids" not in text


@pytest.mark.parametrize("count", [0, 1, 21])
def test_two_to_twenty_runs_are_compared(ada, count):
    ids = ",".join(f"run{number}" for number in range(count))
    assert "choose 2 to 20 runs" in shown(ada, f"/compare?ids={ids}", 422).lower()


def test_every_page_allows_nothing_but_files_of_ours(ada, stranger, database):
    run = keep(database, stories.with_a_gain())
    for path in (f"/runs/{run.id}", f"/plans/{run.plan_id}", f"/models/{run.fingerprint}"):
        answer = ada.client.get(path)
        assert "script-src 'self'; style-src 'self'" in answer.headers["content-security-policy"]
        assert " style=" not in answer.text and "<style" not in answer.text
        assert re.findall(r"\son\w+=", answer.text) == []
        assert answer.headers["cache-control"] == "no-store"


# Launches on streams --------------------------------------------------------------------------------------------------


def on_streams(database: Database, timeline: Timeline) -> Run:
    run = keep(database, stories.with_a_gain())
    keep_timeline(database, run, timeline)
    return run


def test_the_launches_of_the_plan_are_drawn_told_and_saved(ada, database):
    run = on_streams(database, a_timeline())
    for path in (f"/runs/{run.id}", f"/plans/{run.plan_id}"):
        text = shown(ada, path)
        for words in (
            "Launches on streams</h2>",
            "12 launches on 2 streams: 0.030 ms predicted",
            "<title>Launches of a step, stream by stream</title>",
            "<title>Memory in use during a step</title>",
            '<th scope="row" class="break">aten.mm</th><td class="number">4</td><td class="number">12.0</td>',
        ):
            assert words in text
        assert f'<a href="/runs/{run.id}/trace.json">save the trace</a>' in text
        assert "No timeline" not in text
    answer = ada.client.get(f"/runs/{run.id}/trace.json")
    assert answer.json() == trace_of(a_timeline())
    assert "attachment" in answer.headers["content-disposition"]


def test_whoever_has_a_link_or_the_file_sees_the_launches_and_is_offered_nothing_that_asks_for_more(
    ada, stranger, database
):
    run = on_streams(database, a_timeline())
    for text in (stranger.get(link_of(ada, run.id)).text, shown(ada, f"/runs/{run.id}/export.html")):
        assert "<title>Launches of a step, stream by stream</title>" in text
        assert "trace.json" not in text and "perfetto" not in text


def test_what_was_left_out_is_said(ada, database):
    text = shown(ada, f"/runs/{on_streams(database, a_timeline(left_out=1500)).id}")
    assert "Of 1,512 launches the 1,500 shortest were not kept, nor what waited for them." in text


def test_of_many_kinds_of_launches_those_that_take_most_of_the_time_are_listed(ada, database):
    timeline = a_timeline()
    kinds = tuple(launch._replace(name=place) for place, launch in enumerate(timeline.launches))
    names = tuple(f"kernel_{place}" for place in range(12))
    text = shown(ada, f"/runs/{on_streams(database, a_timeline(names=names, launches=kinds)).id}")
    table = text[text.index("Launches that take most of the time</caption>") :]
    assert re.findall(r'class="break">(\w+)</th>', table) == [
        f"kernel_{place}" for place in (11, 2, 5, 8, 1, 10, 4, 7, 0, 3)
    ]
    assert "And 2\N{NO-BREAK SPACE}other names." in table


@pytest.mark.parametrize("story", [stories.with_a_gain, stories.without_a_gain, stories.measured_on_a_cpu])
def test_without_a_timeline_it_is_said_why_in_a_line(ada, database, story):
    run, trials, plan = kept = story()
    keep(database, kept)
    (line,) = re.findall(r'<p class="muted">No timeline: ([^<]*)\.</p>', shown(ada, f"/runs/{run.id}"))
    assert html.unescape(line) == why_no_timeline(run, trials, plan)


@pytest.mark.parametrize("story", [stories.failed, stories.queued, stories.running])
def test_without_a_plan_nothing_is_said_of_launches(ada, database, story):
    run = keep(database, story())
    assert "Launches on streams" not in shown(ada, f"/runs/{run.id}")


@pytest.mark.parametrize("timeline", [Timeline(streams=1, names=(), launches=()), None])
def test_an_empty_and_a_damaged_timeline_hide_nothing_else(ada, database, timeline):
    run = on_streams(database, timeline or a_timeline())
    if timeline is None:
        with database.begin() as connection:
            connection.exec_driver_sql("update kitsune_timelines set content = x'00'")
    for path in (f"/runs/{run.id}", f"/plans/{run.plan_id}", f"/runs/{run.id}/export.html"):
        assert "stream by stream" not in shown(ada, path)


def test_names_of_launches_are_text(ada, database):
    timeline = a_timeline(names=(stories.HOSTILE, "b", "c"), told=stories.HOSTILE)
    run = on_streams(database, timeline)
    for path in (f"/runs/{run.id}", f"/plans/{run.plan_id}", f"/runs/{run.id}/export.html"):
        text = shown(ada, path)
        assert "<script>alert" not in text and "&lt;script&gt;" in text
