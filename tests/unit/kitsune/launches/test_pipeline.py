"""Which plans are left for the next proof once one was refused."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from kitsune.device.cuda_graph import Recorder
from kitsune.launches.pipeline import Planner
from kitsune.launches.plans import Planned, plans
from tests.unit.kitsune.launches.steps import CPU, even_us, recorded, sgd, warmed

STREAMS = 3
NO = "its numbers differ from those of the step"


@pytest.fixture(autouse=True)
def even_costs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kitsune.launches.plans.measured_us", even_us)


def refused_once(monkeypatch: pytest.MonkeyPatch, planner: Planner) -> list[Planned]:
    """The plans that were put to the proof, of which the first was refused."""
    shown: list[Planned] = []

    def mismatch(_, replay: Callable[[], Any]) -> str | None:
        shown.append(replay.__self__.plan)
        return NO if len(shown) == 1 else None

    monkeypatch.setattr("kitsune.launches.execution.equivalence.EquivalenceCheck.mismatch", mismatch)
    step, _ = warmed("branches", sgd)
    planner.capture(step, step.inputs)
    assert planner.refusal == ""
    return shown


def test_the_next_proof_is_of_another_schedule(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = refused_once(monkeypatch, Planner(Recorder(CPU), STREAMS))
    assert first.schedule != second.schedule


def test_plans_are_told_apart_by_what_they_are_and_not_by_their_names(monkeypatch: pytest.MonkeyPatch) -> None:
    def nameless(*arguments) -> list[Planned]:
        return [replace(plan, name="") for plan in plans(*arguments)]

    monkeypatch.setattr("kitsune.launches.plan_race.plans", nameless)
    first, second = refused_once(monkeypatch, Planner(Recorder(CPU), STREAMS))
    assert first.schedule != second.schedule


def test_backwards_run_on_the_thread_that_issues_their_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    threads: list[bool] = []

    def seen(step):
        return lambda: threads.append(torch._C._is_multithreading_enabled()) or step()

    step, _ = warmed("branches", sgd)
    assert Planner(Recorder(CPU), STREAMS).capture(seen(step), step.inputs)[0] is not None
    whole = len(threads)
    halves = seen(lambda: torch.ones(1)), seen(lambda: None)
    assert Planner(Recorder(CPU), STREAMS).capture_pair(*halves, list) is not None
    assert len(threads) > whole > 1
    assert not any(threads)
    assert torch._C._is_multithreading_enabled()


def test_plans_share_a_schedule_where_they_differ_in_priorities_only() -> None:
    step, _ = warmed("branches", sgd)
    found = plans(recorded(step), STREAMS, 2**40)
    early = [plan for plan in found if plan.name.startswith("each launch as early as may be")]
    on_all, on_two, hurried = early
    assert [plan.schedule.streams for plan in early] == [STREAMS, 2, STREAMS]
    assert hurried.schedule is on_all.schedule
    assert (on_all.priorities, on_two.priorities, min(hurried.priorities)) == ((), (), 1 - STREAMS)
    assert len({id(plan.schedule) for plan in found}) == len(found) - 1


@pytest.mark.parametrize(("streams", "for_ends"), [(4, 1), (7, 2)])
@pytest.mark.parametrize("few", [0, 48])
def test_what_ends_the_step_runs_in_a_part_of_the_gpu(monkeypatch, streams, for_ends, few) -> None:
    monkeypatch.setattr("kitsune.launches.plans.few_multiprocessors", lambda device: few)
    step, _ = warmed("branches", sgd)
    found = plans(recorded(step), streams, 2**40)
    apart, fed = (plan for plan in found if plan.schedule.streams == streams and "what ends the step" in plan.name)
    assert fed.multiprocessors == apart.multiprocessors
    assert fed.priorities[-for_ends:] == apart.priorities[-for_ends:]
    assert fed.name == apart.name.replace(" what ends", f" what it reads on {for_ends} of them, what ends")
    assert apart.priorities == (-3, *[-1] * (streams - 1 - for_ends), *[0] * for_ends)
    assert apart.multiprocessors == ((*[0] * (streams - for_ends), *[few] * for_ends) if few else ())
    assert (f"on {for_ends} of them and 48 multiprocessors," in apart.name) == bool(few)
    assert all(not plan.multiprocessors for plan in found if plan not in (apart, fed) and plan.schedule.streams != 4)


@pytest.mark.parametrize(("streams", "beside"), [(3, []), (4, [1]), (5, [1, 1]), (6, [2, 1]), (8, [2, 1])])
def test_what_the_critical_path_reads_may_be_as_urgent_as_it_is(streams: int, beside: list[int]) -> None:
    """On the most streams first, and then on four."""
    step, _ = warmed("branches", sgd)
    fed = [plan for plan in plans(recorded(step), streams, 2**40) if "what it reads" in plan.name]
    assert [plan.schedule.streams for plan in fed] == [streams, 4][: len(beside)]
    assert [plan.priorities.count(-3) for plan in fed] == [1 + count for count in beside]


@pytest.mark.parametrize(("streams", "counts"), [(4, [4]), (5, [4, 5]), (8, [4, 5, 6])])
def test_the_busiest_stream_goes_first_on_a_few_more_than_four(streams: int, counts: list[int]) -> None:
    step, _ = warmed("branches", sgd)
    found = plans(recorded(step), streams, 2**40)
    assert [plan.schedule.streams for plan in found if "the busiest one first" in plan.name] == counts
