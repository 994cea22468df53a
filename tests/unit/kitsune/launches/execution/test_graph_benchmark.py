"""Which of several captured plans is taken, by a clock that the test makes up."""

import itertools
from statistics import median

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kitsune.base.file_cache import KeyedFiles
from kitsune.device.cuda_graph import HostGraph, Recorder
from kitsune.errors import CaptureError
from kitsune.launches.execution.graph_benchmark import HOPELESS_ROUNDS, MAX_RATIO, MAX_RATIO_AMONG, ROUNDS, is_faster
from kitsune.launches.execution.kernel_trace import Kernel, timeline
from kitsune.launches.execution.launch_costs import START_US, between_marks
from kitsune.launches.pipeline import Planner
from kitsune.launches.plan_race import WON_BEFORE, PlanRace
from kitsune.launches.planning.candidates import by_load
from kitsune.launches.planning.schedule import Placed, Schedule, critical_path
from kitsune.launches.plans import WORKSPACE_BYTES, WORKSPACES_OF_STEP, most_taken, plans
from kitsune.launches.timing_cache import TimingCache
from tests.unit.kitsune.launches.steps import CPU, equal, even_us, recorded, warmed


@pytest.fixture(autouse=True)
def times(monkeypatch):
    monkeypatch.setattr("kitsune.launches.plans.measured_us", even_us)


class Graphs(Recorder):
    """Captures on the CPU as on a GPU: plans are timed against each other. `made` are the graphs in order.

    `kept` are those that were not captured apart. The n-th graph takes `taken[n]` bytes, or none.
    """

    def __init__(self, made=None, taken=None):
        super().__init__(CPU)
        self.executes = False
        self.made = [] if made is None else made
        self.kept = []
        self.taken = taken or {}

    def apart(self):
        return Graphs(self.made, self.taken)

    def taken_bytes(self):
        return self.taken.get(len(self.made) - 1, 0)

    def capture(self, function):
        graph, result = HostGraph.record(function)
        self.made.append(graph)
        self.kept.append(graph)
        return graph, result


def contest(times_ms, taken=None, pool_bytes=None, cache=None, captured=1):
    """A step planned on up to four streams, where the n-th captured graph needs so many ms, and so many stay."""
    step, twin = warmed("branches")
    recorder = Graphs(taken=taken)
    planner = Planner(recorder, 4, pool_bytes, cache)
    planner.race.clock = lambda graph: times_ms(recorder.made.index(graph))
    graph, result = planner.capture(step, step.inputs)
    assert planner.refusal == ""
    assert equal([result[0]], [twin()[0]])
    assert equal(step.state(), twin.state())
    assert recorder.kept[-1:] == [graph] == recorder.made[-1:]
    assert len(recorder.kept) == captured
    return planner.plan, len(recorder.made) - 1


#: Plans: on four streams all early; the critical path first, all else late; what ends the step last, all else when it
#: is needed, and the same with what the critical path reads beside it; the critical path first, all else early; on two
#: streams all early; and on four with priorities.
EARLY, LATE, NEEDED, FED, PATH, TWO, BUSIEST = range(1, 8)
MOST = ROUNDS // 2 + 1


@pytest.mark.parametrize(("number", "name"), [(EARLY, ""), (BUSIEST, ", the busiest one first")])
def test_the_fastest_is_taken(number, name):
    plan, raced = contest(lambda at: 5.0 if at == number else 10.0)
    assert raced == 1 + BUSIEST
    assert plan.schedule.streams == 4
    assert plan.priorities == (by_load(plan.schedule) if name else ())
    assert plan.name == f"each launch as early as may be on 4 streams{name}; updates in buckets of 24 MiB"


@pytest.mark.parametrize(
    ("number", "priorities"),
    [(PATH, (-3, 0, 0, 0)), (LATE, (-3, 0, 0, 0)), (NEEDED, (-3, -1, -1, 0)), (FED, (-3, -3, -1, 0))],
)
def test_the_critical_path_may_go_first(number, priorities):
    plan, raced = contest(lambda at: 5.0 if at == number else 10.0)
    assert raced == 1 + BUSIEST
    assert plan.priorities == priorities
    path = critical_path(plan.recording.graph, plan.costs_us)
    assert [each.launch for each in plan.schedule.placed if each.stream == 0] == list(path)


def test_what_is_hardly_faster_does_not_take_more_streams():
    plan, raced = contest(lambda number: 10.0 - 0.01 * number)
    assert raced == 1 + BUSIEST
    assert plan.schedule.streams == 1


def test_among_plans_on_several_streams_less_decides():
    plan, _ = contest(lambda number: {EARLY: 5.0, PATH: 4.99, TWO: 4.97}.get(number, 10.0))
    assert plan.schedule.streams == 2
    plan, _ = contest(lambda number: {EARLY: 5.0, PATH: 4.99}.get(number, 10.0))
    assert plan.name.startswith("each launch as early as may be on 4 streams")


@pytest.mark.parametrize(("more", "pool_bytes", "streams"), [(0, None, 4), (1, None, 2), (1, 2**40, 4)])
def test_what_takes_too_much_memory_is_not_taken(more, pool_bytes, streams):
    """Unless somebody says how large the pool may be: that limit is for the plan."""
    (alone,) = plans(recorded(warmed("branches")[0]), 1, None)
    most_bytes = most_taken(alone.recording, 2**30, WORKSPACES_OF_STEP)
    taken = {0: 2**30, EARLY: most_bytes + more}
    plan, _ = contest(lambda number: {TWO: 8.0, EARLY: 5.0}.get(number, 10.0), taken, pool_bytes)
    assert plan.schedule.streams == streams


@pytest.mark.parametrize("workspaces", [1, 3])
def test_several_streams_take_a_quarter_more_than_a_plain_graph(workspaces):
    (alone,) = plans(recorded(warmed("branches")[0]), 1, None)
    plain_bytes = 2**30 + workspaces * WORKSPACE_BYTES
    all_bytes = plain_bytes + sum(storage.nbytes() for storage in alone.recording.held.values())
    assert most_taken(alone.recording, 2**30, workspaces) == plain_bytes + all_bytes // 4


@pytest.mark.parametrize("failing", [EARLY, LATE])
def test_a_plan_that_cannot_be_captured_is_out_and_takes_no_other_with_it(monkeypatch, failing):
    tried = PlanRace.tried
    numbers = itertools.count()

    def sometimes(self, plan):
        if next(numbers) == failing:
            raise CaptureError("CUDA graph capture failed: CUDA out of memory")
        return tried(self, plan)

    monkeypatch.setattr(PlanRace, "tried", sometimes)
    plan, raced = contest(lambda at: 5.0 if at == PATH - 1 else 10.0)
    assert raced == BUSIEST
    assert plan.name.startswith("the critical path first")


@pytest.mark.parametrize(("race_s", "steps", "tried"), [(0.0, 0, 0), (5.0, 0, BUSIEST), (0.0, 10**12, BUSIEST)])
def test_a_race_ends_when_its_time_is_over(monkeypatch, race_s, steps, tried):
    monkeypatch.setattr("kitsune.launches.plan_race.RACE_S", race_s)
    monkeypatch.setattr("kitsune.launches.plan_race.RACE_STEPS", steps)
    plan, raced = contest(lambda at: 5.0 if at == BUSIEST else 10.0)
    assert raced == 1 + tried
    assert ("7 of 8 plans were not tried" in plan.name) == (tried == 0)
    assert plan.schedule.streams == (4 if tried else 1)


# What won before ------------------------------------------------------------------------------------------------------


def test_what_won_before_races_against_one_stream_only(tmp_path):
    plan, _ = contest(lambda at: 5.0 if at == FED else 10.0, cache=TimingCache(KeyedFiles(tmp_path)))
    again, raced = contest(lambda at: 9.0 if at == 1 else 10.0, cache=TimingCache(KeyedFiles(tmp_path)))
    assert raced == 2
    assert again.name == plan.name + WON_BEFORE
    assert again.priorities == plan.priorities


def test_where_it_is_no_longer_faster_all_the_others_race_and_the_new_winner_is_kept(tmp_path):
    contest(lambda at: 5.0 if at == FED else 10.0, cache=TimingCache(KeyedFiles(tmp_path)))
    plan, raced = contest(lambda at: 5.0 if at == BUSIEST else 10.0, cache=TimingCache(KeyedFiles(tmp_path)))
    assert raced == 1 + BUSIEST
    assert ", the busiest one first" in plan.name
    again, raced = contest(lambda at: 9.0 if at == 1 else 10.0, cache=TimingCache(KeyedFiles(tmp_path)))
    assert (raced, again.name) == (2, plan.name + WON_BEFORE)


@pytest.mark.parametrize("race_s", [0.0, 5.0])
def test_where_one_stream_won_they_all_race_again(tmp_path, monkeypatch, race_s):
    """Nothing would ever tell that the others only had no time, or no memory."""
    monkeypatch.setattr("kitsune.launches.plan_race.RACE_STEPS", 0)
    monkeypatch.setattr("kitsune.launches.plan_race.RACE_S", race_s)
    plan, _ = contest(lambda _: 10.0, cache=TimingCache(KeyedFiles(tmp_path)))
    monkeypatch.setattr("kitsune.launches.plan_race.RACE_S", 5.0)
    again, raced = contest(lambda at: 5.0 if at == FED else 10.0, cache=TimingCache(KeyedFiles(tmp_path)))
    assert (plan.schedule.streams, raced, again.schedule.streams) == (1, 1 + BUSIEST, 4)


def test_what_won_before_is_not_taken_where_it_needs_too_much_memory(tmp_path):
    contest(lambda at: 5.0 if at == FED else 10.0, cache=TimingCache(KeyedFiles(tmp_path)))
    plan, raced = contest(lambda at: 5.0 if at == 1 else 10.0, {1: 2**40}, cache=TimingCache(KeyedFiles(tmp_path)))
    assert raced == 1 + BUSIEST
    assert plan.schedule.streams == 1


def test_a_folder_that_cannot_be_written_costs_a_race(tmp_path):
    (tmp_path / "file").touch()
    for _ in range(2):
        plan, raced = contest(
            lambda at: 5.0 if at == FED else 10.0, cache=TimingCache(KeyedFiles(tmp_path / "file" / "races"))
        )
        assert (raced, plan.schedule.streams) == (1 + BUSIEST, 4)


def test_another_limit_of_memory_is_another_race(tmp_path):
    contest(lambda at: 5.0 if at == FED else 10.0, cache=TimingCache(KeyedFiles(tmp_path)))
    _, raced = contest(lambda at: 5.0 if at == FED else 10.0, pool_bytes=2**40, cache=TimingCache(KeyedFiles(tmp_path)))
    assert raced == 1 + BUSIEST
    assert len(list(tmp_path.iterdir())) == 2


@pytest.mark.parametrize("told", [b"", b"a rule of another version", b"\xff\xfe", b"x" * 10**6])
def test_a_name_that_says_nothing_costs_a_race(tmp_path, told):
    contest(lambda at: 5.0 if at == FED else 10.0, cache=TimingCache(KeyedFiles(tmp_path)))
    (file,) = tmp_path.iterdir()
    kept = file.read_bytes()
    file.write_bytes(told)
    plan, raced = contest(lambda at: 5.0 if at == FED else 10.0, cache=TimingCache(KeyedFiles(tmp_path)))
    assert raced == 1 + BUSIEST
    assert WON_BEFORE not in plan.name
    assert file.read_bytes() == kept


def test_of_a_winner_that_the_proof_refuses_the_next_one_is_kept(tmp_path, monkeypatch):
    answers = ["not today", None]
    monkeypatch.setattr("kitsune.launches.execution.equivalence.EquivalenceCheck.mismatch", lambda *_: answers.pop(0))
    second_race = BUSIEST + 2  # the winner of the first was captured once more, for the proof
    quickest = (EARLY, second_race + 1)
    plan, raced = contest(
        lambda at: 5.0 if at in quickest else 10.0, cache=TimingCache(KeyedFiles(tmp_path)), captured=2
    )
    (file,) = tmp_path.iterdir()
    assert raced > second_race
    assert plan.name == file.read_text() + "; a faster one was refused: not today"
    assert not plan.name.startswith("each launch as early as may be on 4 streams")


def test_one_slow_replay_decides_nothing():
    first, second = object(), object()
    times = {first: iter([1.0] * 11), second: iter([0.9] * 5 + [50.0] * 2 + [0.9] * 4)}
    assert is_faster(first, second, lambda graph: next(times[graph]), MAX_RATIO)


@given(
    st.lists(st.floats(0.9, 1.1), min_size=ROUNDS + 1, max_size=ROUNDS + 1),
    st.sampled_from([MAX_RATIO, MAX_RATIO_AMONG]),
)
def test_a_contest_that_ends_early_ends_as_the_whole_one_would(times_ms, by):
    first, second = object(), object()
    replays = iter(times_ms)

    def clock(graph):
        return 1.0 if graph is first else next(replays)

    hopeless = min(times_ms[1 : 1 + HOPELESS_ROUNDS]) > 1.0
    assert is_faster(first, second, clock, by) == (not hopeless and median(times_ms[1:]) < by)


@pytest.mark.parametrize(
    ("took_ms", "rounds"), [(2.0, HOPELESS_ROUNDS), (1.0, ROUNDS // 2 + 1), (0.5, ROUNDS // 2 + 1)]
)
def test_a_contest_ends_once_it_is_decided(took_ms, rounds):
    first, second, replays = object(), object(), []

    def clock(graph):
        replays.append(graph)
        return 1.0 if graph is first else took_ms

    assert is_faster(first, second, clock, MAX_RATIO) == (took_ms < 1.0)
    assert len(replays) == 2 * (1 + rounds)


def test_the_first_replays_are_not_counted():
    first, second = object(), object()
    times = {first: iter([9.0] + [1.0] * 10), second: iter([1.0] * 11)}
    assert not is_faster(first, second, lambda graph: next(times[graph]), MAX_RATIO_AMONG)


def test_what_a_launch_takes_is_what_ran_before_its_mark():
    ran = [("gemm", 7.0), ("spin_kernel(long)", 0.5), ("spin_kernel(long)", 0.5), ("a", 1.0), ("b", 2.0)]
    kernels = [Kernel(name, float(at), took) for at, (name, took) in enumerate([*ran, ("spin_kernel(long)", 0.5)])]
    assert between_marks(kernels) == pytest.approx([7.0 + START_US, 0.0, 3.0 + 2 * START_US])
    assert between_marks(kernels[:-1]) == pytest.approx([7.0 + START_US, 0.0])


def test_the_busiest_stream_is_the_most_urgent_one():
    def schedule(*loads_us):
        placed = [Placed(number, number, (), 0.0, load) for number, load in enumerate(loads_us)]
        return Schedule(len(loads_us), tuple(placed))

    assert by_load(schedule(3.0, 9.0, 1.0)) == (-1, -2, 0)
    assert by_load(schedule(*map(float, range(6)))) == (0, -1, -2, -3, -3, -3)


def test_a_profiler_of_the_users_is_left_alone():
    with torch.profiler.profile(), pytest.raises(CaptureError, match=r"torch\.profiler is running"):
        timeline(lambda: None)
