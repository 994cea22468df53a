"""The page of a run: its parts, its news while it goes on, its launches on streams, and where its time goes."""

import html
import re

import pytest

from kitsune.class_tables import ClassTable, ClassTables
from kitsune.launches.planning.trace_export import trace_of
from kitsune.timeline import ClassTime, Timeline
from server.api.traces import why_no_timeline
from server.pages.views.class_view import NEVER, TO_COME
from tests.store.samples import a_timeline, some_class_tables
from tests.unit.server.pages import stories
from tests.unit.server.pages.visits import keep, keep_class_tables, keep_timeline, link_of, shown
from tuner.records import Run, RunStatus
from tuner.store.database import Database
from tuner.tuning.class_recording import NO_TIME, without

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
        "Where the time of a step goes",
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


# Where the time of a step goes ----------------------------------------------------------------------------------------

TIMES = "\N{MULTIPLICATION SIGN}"
WHERE = "Where the time of a step goes</h2>"


def cells(*texts: str) -> str:
    return squeezed(" ".join(f'<td class="number">{text}</td>' for text in texts))


def squeezed(text: str) -> str:
    return re.sub(r">\s*<", "> <", text)


def test_each_class_is_shown_as_given_beside_the_plan_against_its_floor(ada, stranger, database):
    run = keep(database, stories.with_a_gain())
    keep_class_tables(database, run, some_class_tables())
    pages = [shown(ada, path) for path in (f"/runs/{run.id}", f"/plans/{run.plan_id}", f"/runs/{run.id}/export.html")]
    for text in map(squeezed, [*pages, stranger.get(link_of(ada, run.id)).text]):
        products = cells("40", "2.000", "0.500", f"4.00{TIMES}", "40", "1.000", "0.500", f"2.00{TIMES}")
        assert f'<th scope="row">matrix products</th> {products}' in text
        copies = cells("0", "0.000", "0.000", "", "1,200", "1.234", "1.000", f"1.23{TIMES}")
        assert f'<th scope="row">copies and casts</th> {copies}' in text
        assert f'<th scope="row">gaps</th> {cells("40", "0.100", "0.000", "", "0", "0.000", "0.000", "")}' in text
        whole = cells("40", "2.100", "0.500", f"4.20{TIMES}", "1,240", "2.235", "1.500", f"1.49{TIMES}")
        assert f'<tfoot> <tr> <th scope="row">In all</th> {whole}' in text
        assert re.findall(r'scope="colgroup"[^>]*>([^<]*)<', text) == ["As given", "Under the plan"]
        assert "Under the plan: update: not fused." in text
        assert "No times" not in text


def test_the_classes_that_a_timeline_has_are_those_under_the_plan(ada, database):
    """As runs of older versions have them."""
    run = on_streams(database, a_timeline(classes=(ClassTime("gaps", 12, 5.0, 0.0),)))
    text = squeezed(shown(ada, f"/runs/{run.id}"))
    assert f'<th scope="row">gaps</th> {cells("12", "0.005", "0.000", "")}' in text
    assert re.findall(r'scope="colgroup"[^>]*>([^<]*)<', text) == ["Under the plan"]
    assert f"No times as given: {NEVER}." in text


def test_the_reason_why_there_is_no_table_is_told_once(ada, database):
    run = keep(database, stories.with_a_gain())
    keep_class_tables(database, run, without(NO_TIME))
    text = shown(ada, f"/runs/{run.id}")
    told = "No times as given and under the plan: the budget had no time for it; <code>kitsune explain</code> shows it."
    assert text.count(told) == 1
    assert WHERE in text and "Over floor" not in text


def test_a_plan_that_is_the_step_as_given_has_one_group_of_columns(ada, database):
    run, trials, plan = stories.measured_on_a_cpu()
    assert plan is not None
    plan = plan.model_copy(update={"knobs": {}})
    keep(database, (run.evolve(plan_id=plan.plan_id), trials, plan))
    given = some_class_tables().given
    keep_class_tables(database, run, ClassTables(given=given, plan=given))
    text = shown(ada, f"/runs/{run.id}")
    assert re.findall(r'scope="colgroup"[^>]*>([^<]*)<', text) == ["As given"]
    assert "Under the plan" not in text


def test_a_run_that_goes_on_with_its_plan_says_what_is_to_come(ada, database):
    run, trials, plan = stories.with_a_gain()
    keep(database, (run.evolve(status=RunStatus.RUNNING), trials, plan))
    assert f"No times as given and under the plan: {TO_COME}." in shown(ada, f"/runs/{run.id}")


@pytest.mark.parametrize("story", [stories.failed, stories.queued, stories.running])
def test_without_a_plan_nothing_is_said_of_classes(ada, database, story):
    assert WHERE not in shown(ada, f"/runs/{keep(database, story()).id}")


def test_damaged_classes_hide_nothing_else(ada, database):
    run = keep(database, stories.with_a_gain())
    keep_class_tables(database, run, some_class_tables())
    with database.begin() as connection:
        connection.exec_driver_sql("update kitsune_class_tables set plan = 'no'")
    for path in (f"/runs/{run.id}", f"/plans/{run.plan_id}", f"/runs/{run.id}/export.html"):
        assert NEVER in shown(ada, path)


def test_reasons_and_notes_are_text(ada, database):
    run = keep(database, stories.with_a_gain())
    hostile = ClassTable(missing=stories.HOSTILE, notes=(stories.HOSTILE,))
    keep_class_tables(database, run, ClassTables(given=hostile, plan=hostile))
    text = shown(ada, f"/runs/{run.id}")
    assert "<script>alert" not in text and "&lt;script&gt;" in text
