"""The list of runs and the home page: filters, order, paging, and automatic refresh."""

import re
from datetime import timedelta

import pytest
from pydantic import ValidationError

from kitsune.plan import Interval
from server.pages.runs import LIMIT
from server.pages.views.runs_view import COLUMNS, Wanted
from tests.store.samples import a_run, after, an_environment
from tests.unit.server.conftest import made
from tests.unit.server.pages.conftest import assert_page
from tuner.records import RunStatus, Verdict
from tuner.store.queries import runs
from tuner.store.queries.runs import Sort
from tuner.store.queries.tokens import Scope
from tuner.wall_clock import utcnow

H200 = an_environment()
A100 = an_environment(gpu="NVIDIA A100")


def add(database, *found):
    with database.begin() as connection:
        for run in found:
            runs.add(connection, run)


def shown(text: str) -> list[str]:
    """The ids of the runs of a page, in order."""
    return re.findall(r'<a id="run-([^"]+)"', text)


def finished(number: int, gain: float, **changes):
    given = {"status": RunStatus.FINISHED, "verdict": Verdict.FASTER, "environment": H200, "trials": number}
    speedup = Interval(median=gain, low=gain - 0.1, high=gain + 0.1)
    more = {"speedup": speedup, "memory_ratio": 1 / gain, "created_at": after(number)}
    return a_run(**{"id": f"r{number}", **given, **more, **changes})


@pytest.fixture
def some(database):
    add(
        database,
        finished(1, 1.5, tags=("weekly",)),
        finished(2, 1.2, environment=A100, workload="zoo:bert"),
        finished(3, 1.9, name="my CNN"),
        a_run(id="r4", status=RunStatus.FAILED, error="why", created_at=after(4)),
        a_run(id="r5", created_at=after(5), device="cuda", fingerprint="a" * 64, workload="archive"),
    )


def test_a_run_is_a_line_of_the_table(admin, some):
    text = assert_page(admin.get("/runs"), 200)
    assert shown(text) == ["r5", "r4", "r3", "r2", "r1"]
    (line,) = [line for line in text.split("<tr>") if 'id="run-r3"' in line]
    assert 'href="/runs/r3" title="zoo:mlp">my CNN</a>' in line
    cells = [re.sub(r"<[^>]+>", "", cell).strip() for cell in re.findall(r"<td.*?</td>", line, re.DOTALL)]
    plain = [cell.replace("\xa0", " ") for cell in cells]
    assert plain[1:4] == ["NVIDIA H200", "1.90\N{MULTIPLICATION SIGN}", "1.80 to 2.00"]
    assert plain[4:7] == ["\N{MINUS SIGN}47 %", "faster", "3"]
    assert plain[8] == "finished"
    assert 'title="archive">a submitted model (aaaa' in text


@pytest.mark.parametrize(
    ("query", "ids"),
    [
        ("status=failed", ["r4"]),
        ("verdict=faster&gpu=NVIDIA+A100", ["r2"]),
        ("workload=zoo:bert", ["r2"]),
        ("tag=weekly", ["r1"]),
        ("fingerprint=" + "a" * 64, ["r5"]),
        ("workload=cnn", ["r3"]),
        ("gpu=a100", ["r2"]),
        ("gain=1.5", ["r3", "r1"]),
        ("interval=1.5", ["r3"]),
        ("memory=-40", ["r3"]),
        ("memory=%E2%88%9240+%25&gain=1.2%C3%97", ["r3"]),
        ("trials=2&status=finished", ["r3", "r2"]),
        ("age=hour", []),
        ("status=running", []),
        ("status=lost", []),
        ("sort=interval&verdict=faster", ["r3", "r1", "r2"]),
        ("sort=name&order=asc", ["r5", "r2", "r4", "r1", "r3"]),
        ("sort=gain", ["r3", "r1", "r2", "r4", "r5"]),
        ("sort=gain&order=asc", ["r2", "r1", "r3", "r4", "r5"]),
        ("sort=trials&status=finished", ["r3", "r2", "r1"]),
        ("order=asc", ["r1", "r2", "r3", "r4", "r5"]),
    ],
)
def test_filters_and_order_stand_in_the_address(admin, some, query, ids):
    found = shown(assert_page(admin.get(f"/runs?{query}"), 200))
    if "sort=gain" in query:  # among those without a gain any order will do
        assert (found[:3], set(found[3:])) == (ids[:3], set(ids[3:]))
    elif "sort=name" in query:  # two are of the same name
        assert (found[:2], set(found[2:4]), found[4:]) == (ids[:2], set(ids[2:4]), ids[4:])
    else:
        assert found == ids
    assert shown(admin.get(f"/fragments/runs?{query}").text) == found


def test_blank_fields_are_left_out_of_the_address(admin, some):
    answer = admin.get("/runs?status=failed&verdict=&gpu=+&workload=&tag=&sort=gain")
    assert (answer.status_code, answer.headers["location"]) == (303, "/runs?status=failed&sort=gain")
    assert shown(admin.get("/fragments/runs?status=failed&verdict=").text) == ["r4"]


@pytest.mark.parametrize(
    ("query", "field", "told"),
    [
        ("tag=a,b", "tag", "A tag has up to 40 letters"),
        ("gain=much", "gain", "A factor, such as 1.2"),
        ("memory=nan", "memory", "Per cent, such as -10"),
        ("status=bogus", "status", "Choose one of the states"),
    ],
)
def test_a_field_that_makes_no_sense_keeps_the_form_and_says_what_belongs_there(admin, some, query, field, told):
    text = assert_page(admin.get(f"/runs?{query}&workload=mine"), 422, 'role="alert"')
    assert told in text.partition(f'id="{field}-error"')[2].partition("</span>")[0]
    assert 'name="workload" value="mine"' in text
    assert 'id="list"' not in text and "String should" not in text


def test_by_https_all_addresses_are_https(browser, admin, database):
    """Also behind a proxy: browsers send that cookie by https only."""
    cookie = admin.cookies["kitsune_session"]
    stranger = browser()
    for place in ("/", "/runs"):
        text = stranger.get(place, headers={"Cookie": f"__Host-kitsune_session={cookie}"}).text
        assert "--server https://localhost:8537" in text and "http://localhost" not in text


def test_the_form_shows_what_was_asked_for(admin, some):
    text = admin.get("/runs?status=failed&gpu=NVIDIA+%22H200%22&tag=x&sort=trials&order=asc").text
    assert "<option selected>failed</option>" in text
    assert 'value="NVIDIA &#34;H200&#34;"' in text
    assert '<input type="hidden" name="sort" value="trials">' in text
    assert "No run matches these filters" in text


@pytest.mark.parametrize(
    "query",
    ["status=bogus", "verdict=x", "sort=id", "order=sideways", "bogus=1", "after=x", "fingerprint=zz",
     "gpu=" + "x" * 201, "gpu=%00", "after=" + "A" * 2000],
)  # fmt: skip
def test_a_query_that_makes_no_sense_is_a_page_that_says_so(admin, some, query):
    for place in ("/runs", "/fragments/runs"):
        assert_page(admin.get(f"{place}?{query}"), 422, "<h1>")


def test_the_order_is_told_in_the_head_of_its_column(admin, some):
    heads = re.findall(r"<th scope=\"col\".*?</th>", admin.get("/runs?sort=trials&order=asc").text, re.DOTALL)
    told = [re.sub(r"<[^>]+>", "", head).strip() for head in heads if "aria-sort" in head]
    assert told == ["Trials \N{UPWARDS ARROW}"]
    assert all('aria-sort="ascending"' in head for head in heads if "aria-sort" in head)


def test_pages_follow_each_other(admin, database):
    add(database, *(a_run(id=f"n{number:03}", created_at=after(number)) for number in range(2 * LIMIT + 3)))
    place, seen = "/runs?status=queued", []
    while place:
        text = assert_page(admin.get(place), 200)
        seen += shown(text)
        found = re.search(r'id="next-page" href="([^"]+)"', text)
        place = found[1].replace("&amp;", "&") if found else None
        assert ("First page" in text) == (len(seen) > LIMIT)
    assert seen == [f"n{number:03}" for number in reversed(range(2 * LIMIT + 3))]


def test_the_table_comes_again_only_when_it_has_changed(admin, database, some):
    text = admin.get("/runs").text
    renewal = re.search(r'hx-get="([^"]+)"', text)[1].replace("&amp;", "&")
    same = admin.get(renewal)
    assert (same.status_code, same.content) == (204, b"")
    with database.begin() as connection:
        runs.cancel(connection, "r5")
    changed = admin.get(renewal)
    assert changed.status_code == 200 and changed.text.lstrip().startswith('<div id="list"')
    assert "cancelled" in changed.text and "<html" not in changed.text
    again = re.search(r'hx-get="([^"]+)"', changed.text)[1].replace("&amp;", "&")
    assert again != renewal and admin.get(again).status_code == 204


def test_a_beating_heart_is_no_news_but_silence_is(admin, database, monkeypatch):
    at = utcnow()
    add(database, a_run(id="r1", created_at=at))
    with database.begin() as connection:
        run = runs.claim_one(connection, "r1", "w", lease_s=60)
    renewal = re.search(r'hx-get="([^"]+)"', admin.get("/runs").text)[1].replace("&amp;", "&")
    with database.begin() as connection:
        runs.heartbeat(connection, run, lease_s=60)
    assert admin.get(renewal).status_code == 204
    with database.begin() as connection:
        runs.heartbeat(connection, run, lease_s=-60)
    assert "lost" in admin.get(renewal).text


def test_an_empty_list_teaches_what_to_do(admin):
    for place in ("/", "/runs"):
        text = assert_page(admin.get(place), 200)
        for command in ("kitsune worker", "kitsune submit train.py:make_workload --server http://localhost:8537"):
            assert command in text
    assert 'name="status"' not in admin.get("/runs").text


def test_the_first_page_shows_the_newest_and_the_queue(admin, some):
    text = assert_page(admin.get("/"), 200, "0 running", "1 waiting", "no worker is active")
    assert shown(text) == ["r5", "r4", "r3", "r2", "r1"]
    assert "hx-get" not in text


def test_a_run_that_is_lost_hides_from_nobody_that_nothing_runs(admin, database):
    add(database, a_run(id="r1", fingerprint="f" * 64, created_at=utcnow()), a_run(id="r2"))
    with database.begin() as connection:
        runs.claim_one(connection, "r1", "w", lease_s=60)
    text = assert_page(admin.get("/"), 200, "1 running", "1 waiting")
    assert "lost" not in text and "no worker is active" not in text
    with database.begin() as connection:
        run = runs.get(connection, "r1")
        runs.heartbeat(connection, run, lease_s=-60)
    assert_page(admin.get("/"), 200, "0 running", '<a href="/runs?status=lost">1 lost</a>', "no worker is active")
    assert shown(admin.get("/runs?status=lost").text) == ["r1"]
    assert shown(admin.get("/runs?status=running").text) == []
    assert '<span class="state lost">lost</span>' in admin.get(f"/models/{'f' * 64}").text
    assert ">lost</td>" in admin.get("/compare?ids=r1,r2").text


def test_what_users_wrote_is_text(browser, database):
    nasty = "<script>alert(1)</script>\"'&"
    add(database, finished(1, 1.5, name=nasty, tags=(nasty,), environment=an_environment(gpu=nasty), workload=nasty))
    token, _ = made(database, Scope.ADMIN)
    client = browser(Scope.ADMIN)
    for place in ("/", "/runs", f"/runs?gpu={nasty}", f"/login?next=/{nasty}", "/tokens"):
        assert "<script>alert" not in client.get(place).text
    assert "&lt;script&gt;alert(1)" in client.get("/runs").text
    assert token.id in client.get("/tokens").text


# The addresses themselves ---------------------------------------------------------------------------------------------


def test_an_address_holds_only_what_differs():
    assert Wanted().address() == "/runs"
    assert Wanted(status=RunStatus.FAILED, gpu="A B").address() == "/runs?status=failed&gpu=A+B"
    assert Wanted(after="x").address(after=None) == "/runs"


def test_a_click_on_a_column_sorts_and_the_next_turns_round():
    wanted = Wanted(status=RunStatus.FAILED, after="x")
    assert wanted.sorted_by(Sort.GAIN) == "/runs?status=failed&sort=gain&order=desc"
    assert wanted.sorted_by(Sort.MEMORY) == "/runs?status=failed&sort=memory&order=asc"
    by_gain = Wanted(sort=Sort.GAIN)
    assert by_gain.sorted_by(Sort.GAIN).endswith("order=asc")
    assert Wanted(sort=Sort.GAIN, order="asc").sorted_by(Sort.GAIN).endswith("order=desc")


def test_every_order_of_the_store_is_a_column():
    assert {column.sort for column in COLUMNS} == set(Sort)
    assert [column.order(Wanted(sort=Sort.GAIN)) for column in COLUMNS].count("descending") == 1


def test_blanks_are_not_asked_for():
    assert Wanted.model_validate({"status": "", "gpu": "  "}) == Wanted()
    with pytest.raises(ValidationError):
        Wanted.model_validate({"bogus": "1"})


def test_ages_count_from_the_clock_of_the_server(admin, database):
    add(database, a_run(id="r1", created_at=utcnow() - timedelta(minutes=5)))
    text = admin.get("/runs").text
    assert "5\xa0min ago" in text and '<meta name="kitsune-now" content="20' in text
