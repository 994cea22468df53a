"""Lists of runs, on SQLite and on PostgreSQL alike: every order and filter, notes and tags, retries, links."""

from collections.abc import Callable
from itertools import product
from uuid import uuid4

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kitsune.errors import ConflictError, CursorError
from kitsune.plan import Interval
from tests.store.samples import START, a_plan, a_run, a_trial, after, an_archive, an_environment
from tuner.records import Run, RunStatus, Verdict
from tuner.store.database import Database
from tuner.store.filters import Filters
from tuner.store.queries import archives, runs, shares, submits, trials
from tuner.store.queries.runs import Sort
from tuner.store.queries.submits import Request

#: What a run is sorted by.
KEYS: dict[Sort, Callable[[Run], object]] = {
    Sort.CREATED: lambda run: run.created_at,
    Sort.GAIN: lambda run: run.speedup.median if run.speedup else None,
    Sort.MEMORY: lambda run: run.memory_ratio,
    Sort.TRIALS: lambda run: run.trials,
    Sort.NAME: lambda run: runs.label_of(run).casefold(),
    Sort.INTERVAL: lambda run: run.speedup.low if run.speedup else None,
    Sort.VERDICT: lambda run: run.verdict.value if run.verdict else None,
    Sort.GPU: lambda run: run.environment.gpu if run.environment else None,
    Sort.STATUS: lambda run: run.status.value,
}

few = st.builds(
    dict,
    created_at=st.integers(0, 3).map(after),
    speedup=st.none() | st.sampled_from([1.0, 1.25, 1e300]).map(lambda x: Interval(median=x, low=x / 2, high=x)),
    memory_ratio=st.none() | st.sampled_from([0.0, 0.5, 1.5]),
    trials=st.sampled_from([0, 1, 2**63 - 1]),
    workload=st.sampled_from(["archive", "zoo:gpt", "zoo:mlp?batch=4", "z" * 3000]),
    name=st.sampled_from(["", "Mine", "mine too"]),
    verdict=st.none() | st.sampled_from(Verdict),
    environment=st.none() | st.sampled_from(["a100", "h200"]).map(lambda gpu: an_environment(gpu=gpu)),
    status=st.sampled_from(RunStatus),
)


def expected(made: list[Run], sort: Sort, is_descending: bool) -> list[str]:
    key = KEYS[sort]
    valued = [run for run in made if key(run) is not None]
    lacking = [run for run in made if key(run) is None]
    valued.sort(key=lambda run: (key(run), run.id), reverse=is_descending)
    lacking.sort(key=lambda run: run.id, reverse=is_descending)
    return [run.id for run in valued + lacking]


class TestLists:
    @settings(
        max_examples=40,
        suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
    )
    @given(drawn=st.lists(few, max_size=8), limit=st.integers(1, 4), sort=st.sampled_from(Sort), falls=st.booleans())
    def test_pages_hold_every_run_once_in_every_order(
        self, database: Database, drawn: list[dict[str, object]], limit: int, sort: Sort, falls: bool
    ) -> None:
        team = str(uuid4())
        made = [a_run(id=str(uuid4()), team=team, **one) for one in drawn]
        seen: list[str] = []
        with database.begin() as connection:
            for run in made:
                runs.add(connection, run)
            after = None
            while True:
                page = runs.page(connection, team=team, sort=sort, is_descending=falls, limit=limit, after=after)
                assert len(page.runs) <= limit
                seen += [run.id for run in page.runs]
                after = page.after
                if after is None:
                    break
                assert len(page.runs) == limit
        assert seen == expected(made, sort, falls)

    @pytest.mark.parametrize(("sort", "falls"), [*product(Sort, (True, False))])
    def test_a_cursor_is_good_for_its_own_order_only(self, database: Database, sort: Sort, falls: bool) -> None:
        with database.begin() as connection:
            for _ in range(3):
                runs.add(connection, a_run())
            cursor = runs.page(connection, sort=sort, is_descending=falls, limit=1).after
            assert cursor is not None
            for other, direction in product(Sort, (True, False)):
                if (other, direction) == (sort, falls):
                    assert len(runs.page(connection, sort=other, is_descending=direction, after=cursor).runs) == 2
                else:
                    with pytest.raises(CursorError, match="in this order"):
                        runs.page(connection, sort=other, is_descending=direction, after=cursor)

    @pytest.mark.parametrize("tag", ["a", "b-2", "zoë", "狐:1", "x.y/z+w_"])
    def test_a_tag_finds_its_runs_and_no_others(self, database: Database, tag: str) -> None:
        others = [f"{tag}x", f"x{tag}", tag.upper() if tag != tag.upper() else "other", "c"]
        with database.begin() as connection:
            mine = [a_run(tags=tags) for tags in ((tag,), ("c", tag), (tag, "c"), ("c", tag, "d"))]
            for run in [*mine, a_run(), a_run(tags=tuple(others))]:
                runs.add(connection, run)
            assert {run.id for run in runs.page(connection, tag=tag).runs} == {run.id for run in mine}

    def test_filters_hold_in_every_order(self, database: Database) -> None:
        kept = {"team": "red", "fingerprint": "f", "workload": "zoo:mlp", "tags": ("t",), "verdict": Verdict.SAME}
        mine = a_run(status=RunStatus.FINISHED, environment=an_environment(), **kept)
        unlike = [{"team": "blue"}, {"fingerprint": "g"}, {"workload": "zoo:gpt"}, {"tags": ()}, {"verdict": None}]
        with database.begin() as connection:
            runs.add(connection, mine)
            runs.add(connection, mine.evolve(id="other status", status=RunStatus.FAILED))
            runs.add(connection, mine.evolve(id="other gpu", environment=None))
            for number, change in enumerate(unlike):
                runs.add(connection, mine.evolve(id=f"other {number}", **change))
            filters = {name: value for name, value in kept.items() if name != "tags"}
            for sort in Sort:
                page = runs.page(
                    connection, **filters, tag="t", status=RunStatus.FINISHED, gpu="NVIDIA H200", sort=sort
                )
                assert page.runs == (mine,)

    @pytest.mark.parametrize(
        ("filters", "ids"),
        [
            ({"gpu": "h200"}, "ac"),
            ({"gpu": "CPU"}, "b"),
            ({"gpu": "_200"}, ""),
            ({"workload": "resnet18"}, "a"),
            ({"workload": "(batch 8)"}, "a"),
            ({"workload": "zoo:ResNet"}, "a"),
            ({"workload": "MLP by FORM"}, "b"),
            ({"workload": "größe"}, "c"),
            ({"workload": "%"}, ""),
            ({"min_gain": 1.5}, "ac"),
            ({"min_gain": 1.5000001}, "c"),
            ({"min_gain_low": 1.45}, "c"),
            ({"max_memory": 0.8}, "a"),
            ({"min_trials": 7}, "bc"),
            ({"created_after": after(1)}, "c"),
            ({"created_after": after(1), "max_memory": 0.8}, ""),
            ({"is_lost": True}, "b"),
            ({"is_lost": False}, "ac"),
            ({"is_lost": None, "gpu": None, "min_gain": None}, "abc"),
        ],
    )
    def test_what_a_list_shows_finds_its_runs_in_every_order(
        self, database: Database, filters: Filters, ids: str
    ) -> None:
        gains = [Interval(median=1.5, low=1.4, high=1.6), Interval(median=1.9, low=1.8, high=2.0)]
        h200, lost = an_environment(), {"status": RunStatus.RUNNING, "lease_until": after(50)}
        with database.begin() as connection:
            for run in (
                a_run(id="a", workload="zoo:resnet18?batch=8", environment=h200, speedup=gains[0], memory_ratio=0.8),
                a_run(id="b", workload="archive", name="mlp by form", trials=7, created_at=after(1), **lost),
                a_run(id="c", name="GRÖSSE", environment=h200, speedup=gains[1], trials=8, created_at=after(2)),
            ):
                runs.add(connection, run)
            for sort in Sort:
                found = runs.page(connection, team="default", sort=sort, now=after(51), **filters).runs
                assert {run.id for run in found} == set(ids), sort
            assert runs.count_lost(connection, team="default", now=after(51)) == 1
            assert runs.count_lost(connection, team="default", now=after(50)) == 0
            assert runs.count_lost(connection, team="red", now=after(51)) == 0

    def test_the_low_end_of_a_gain_is_kept_with_its_plan(self, database: Database) -> None:
        run = self.claimed(database)
        with database.begin() as connection:
            done = runs.finish(connection, run, plan=a_plan(1.5), verdict=Verdict.FASTER)
            low = done.speedup.low
            assert runs.page(connection, min_gain_low=low).runs == (done,)
            assert runs.page(connection, min_gain_low=low + 0.001).runs == ()

    # What a list shows of a run

    def test_a_run_counts_its_trials(self, database: Database) -> None:
        run = self.claimed(database)
        with database.begin() as connection:
            for number in (0, 1, 1, 7):
                trials.add(connection, run, a_trial(run, number))
            assert runs.get(connection, run.id).trials == len(trials.list_of(connection, run.id)) == 3

    def test_a_run_tells_of_its_plan(self, database: Database) -> None:
        run, plan = self.claimed(database), a_plan(1.5)
        evidence = plan.evidence.model_copy(update={"baseline_peak_bytes": 400, "peak_bytes": 300})
        plan = plan.model_copy(update={"evidence": evidence})
        with database.begin() as connection:
            done = runs.finish(connection, run, plan=plan, verdict=Verdict.FASTER)
            assert runs.get(connection, run.id) == done
        assert (done.speedup, done.memory_ratio) == (evidence.speedup, 0.75)

    def test_a_run_whose_baseline_took_no_memory_has_no_ratio(self, database: Database) -> None:
        run, plan = self.claimed(database), a_plan()
        evidence = plan.evidence.model_copy(update={"baseline_peak_bytes": 0})
        with database.begin() as connection:
            done = runs.finish(connection, run, plan=plan.model_copy(update={"evidence": evidence}))
        assert (done.speedup, done.memory_ratio) == (evidence.speedup, None)

    def test_counts_are_of_a_team_or_of_all(self, database: Database) -> None:
        with database.begin() as connection:
            for team, status in (("red", "failed"), ("red", "queued"), ("blue", "queued")):
                runs.add(connection, a_run(team=team, status=RunStatus(status)))
            assert runs.count(connection)[RunStatus.QUEUED] == 2
            assert runs.count(connection, team="blue") == {**dict.fromkeys(RunStatus, 0), RunStatus.QUEUED: 1}

    # What people say of runs

    def test_tags_and_note_are_set_apart(self, database: Database) -> None:
        run = self.claimed(database)
        with database.begin() as connection:
            tagged = runs.annotate(connection, run.id, tags=("a", "b"))
            assert tagged == run.evolve(tags=("a", "b"))
            both = runs.annotate(connection, run.id, note="two\nlines")
            assert both == run.evolve(tags=("a", "b"), note="two\nlines")
            assert runs.annotate(connection, run.id) == both
            assert runs.annotate(connection, run.id, tags=(), note="") == run
            assert runs.annotate(connection, run.id, team="red", note="not theirs") is None
            assert runs.annotate(connection, "no", note="x") is None
            assert runs.get(connection, run.id) == run

    # Trying again

    def test_a_retry_asks_for_the_same(self, database: Database) -> None:
        step = an_archive()
        with database.begin() as connection:
            stored, _ = archives.put(connection, step.to_bytes(), step, team="red")
            request = Request(archive=stored.sha256, trials=7, budget_s=9.0, memory_limit_bytes=5, seed=3, name="mine")
            first, _ = submits.submit(connection, request, owner="ann", team="red", now=START)
            runs.annotate(connection, first.id, tags=("t",), note="of the first")
            claimed = runs.claim(connection, "w", device="cuda:1", now=START)
            runs.fail(connection, claimed, "out of luck", now=after(1))
            again, is_new = submits.retry(connection, first.id, owner="ann", team="red", now=after(2))
            assert runs.get(connection, again.id) == again
        assert is_new
        same = ("team", "archive", "workload", "fingerprint", "budget_trials", "budget_s", "seed", "name")
        same += ("memory_limit_bytes",)
        assert {name: getattr(again, name) for name in same} == {name: getattr(first, name) for name in same}
        assert (again.status, again.attempt, again.worker, again.error) == (RunStatus.QUEUED, 0, None, None)
        assert (again.device, again.created_at, again.tags, again.note) == ("cuda", after(2), ("t",), "")
        assert again.id != first.id

    def test_a_retry_is_one_until_it_ends(self, database: Database) -> None:
        with database.begin() as connection:
            old = runs.add(connection, a_run(status=RunStatus.CANCELLED))
            first, is_new = submits.retry(connection, old.id, owner="ann")
            assert (is_new, submits.retry(connection, old.id, owner="ann")) == (True, (first, False))
            runs.cancel(connection, first.id)
            second, is_new = submits.retry(connection, old.id, owner="ann")
        assert is_new
        assert second.id != first.id

    @pytest.mark.parametrize(
        ("changes", "why"),
        [
            ({"status": RunStatus.QUEUED}, "is queued; .* cancel it first"),
            ({"status": RunStatus.RUNNING}, "is running"),
            ({"status": RunStatus.FAILED, "workload": "live"}, "kitsune tune"),
            ({"status": RunStatus.FAILED, "workload": "train.py:make"}, "kitsune tune"),
            ({"status": RunStatus.FAILED, "workload": "archive"}, "kitsune tune"),
        ],
    )
    def test_what_cannot_be_tried_again_says_why(
        self, database: Database, changes: dict[str, object], why: str
    ) -> None:
        with database.begin() as connection:
            old = runs.add(connection, a_run(**changes))
            with pytest.raises(ConflictError, match=why):
                submits.retry(connection, old.id, owner="ann")
            assert len(runs.page(connection).runs) == 1
            assert submits.retry(connection, old.id, owner="ann", team="red") is None

    # Links

    def test_a_link_shows_its_run_until_it_ends(self, database: Database) -> None:
        run = self.claimed(database)
        with database.begin() as connection:
            share, secret = shares.create(connection, run.id, team="default", expires_at=after(60), now=START)
            other, other_secret = shares.create(connection, run.id, team="default", now=after(1))
            assert shares.find(connection, secret, now=after(59)) == share
            assert shares.find(connection, secret, now=after(60)) is None
            assert shares.listed(connection, run.id, team="default", now=after(2)) == [share, other]
            assert shares.listed(connection, run.id, team="default", now=after(60)) == [other]
            assert shares.end(connection, run.id, team="red") == 0
            assert shares.find(connection, other_secret, now=after(2)) == other
            assert shares.end(connection, run.id, team="default", now=after(3)) == 2
            assert shares.end(connection, run.id, team="default", now=after(4)) == 0
            assert shares.find(connection, other_secret, now=after(4)) is None
        assert (share.run_id, share.team, share.created_at) == (run.id, "default", START)

    @pytest.mark.parametrize("secret", ["", "x", "A" * 43, "\x00" * 43, "é" * 43, "A" * 10_000])
    def test_an_unknown_link_shows_nothing(self, database: Database, secret: str) -> None:
        run = self.claimed(database)
        with database.begin() as connection:
            assert shares.create(connection, run.id, team="red") is None
            assert shares.create(connection, "no", team="default") is None
            shares.create(connection, run.id, team="default")
            assert shares.find(connection, secret) is None

    def claimed(self, database: Database) -> Run:
        run = a_run()
        with database.begin() as connection:
            runs.add(connection, run)
            mine = runs.claim_one(connection, run.id, "w", now=START)
        assert mine is not None
        return mine
