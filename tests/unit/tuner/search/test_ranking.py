"""By which speedups trials are ranked, where what they were timed beside was not the same in each process."""

import math
import random
from collections.abc import Mapping
from statistics import fmean

import pytest

from kitsune.knobs import Choice
from tests.unit.tuner.machine import ENVIRONMENT, numerics
from tests.unit.tuner.simulation import trial
from tuner.planning.playoff import yardstick_noise
from tuner.planning.standings import leader, rival, searched, to_beat
from tuner.records import Arm, Failure, FailureKind, Measurement, Phase, Source, Trial
from tuner.search.outcomes import best, speedup
from tuner.search.proposal import Proposal
from tuner.search.ranking import is_captured, key_of, rankable, shared_part

Knobs = Mapping[str, Choice]
STOCK: Knobs = {"precision": "bf16", "compile": "reduce-overhead"}
GRAPH: Knobs = {"precision": "bf16", "compile": "default", "capture": "step"}
HALF: Knobs = {**GRAPH, "precision": "fp16"}
FLASH: Knobs = {**GRAPH, "attention": "flash"}
CUDNN: Knobs = {**GRAPH, "attention": "cudnn"}


def arm(knobs: Knobs, ms: float) -> Arm:
    return Arm(name="arm", knobs=dict(knobs), step_ms=(ms,) * 3, peak_bytes=1, first_step_s=1.0)


class Run:
    """Trials of a run. Each is told the times of its two arms, and is compared as the tuner does it."""

    def __init__(self) -> None:
        self.trials: list[Trial] = []

    def add(self, beside: tuple[Knobs, float], candidate: tuple[Knobs, float], source: Source = Source.SEED) -> None:
        arms = (arm(*beside), arm(*candidate))
        measured = Measurement(arms=arms, steps_per_block=(1, 1), numerics=numerics(1e-6), environment=ENVIRONMENT)
        own = next((speedup(each) for each in self.trials if each.knobs == beside[0]), 1.0) if beside[0] else 1.0
        made = trial(len(self.trials), dict(candidate[0]), speedup=own * beside[1] / candidate[1])
        self.trials.append(made.model_copy(update={"measurement": measured, "source": source}))

    def speedups(self) -> list[float]:
        return [round(speedup(each), 3) for each in rankable(self.trials)]


def bert() -> Run:
    """Of an H200: the host was slower in later processes, and what is captured was not."""
    run = Run()
    run.add(({}, 33.55), ({}, 33.53), Source.BASELINE)
    run.add(({}, 33.64), (STOCK, 7.345), Source.STOCK)
    run.add(({}, 34.74), (GRAPH, 4.719))
    run.add(({}, 36.62), (CUDNN, 4.811))
    run.add((STOCK, 9.784), (HALF, 5.021))
    run.add((GRAPH, 4.707), (FLASH, 4.686))
    return run


def test_a_yardstick_that_the_host_launches_decides_nothing_between_captured_steps() -> None:
    run = bert()
    by_ratio, by_rank = best(run.trials), best(rankable(run.trials))
    assert by_ratio is not None
    assert by_rank is not None
    assert (by_ratio.knobs, by_rank.knobs) == (HALF, FLASH)
    times = {str(each.knobs): each.measurement.arms[-1].step_ms[0] for each in run.trials if each.measurement}
    ranked = sorted(rankable(run.trials), key=speedup)
    assert [times[str(each.knobs)] for each in ranked] == sorted(times.values(), reverse=True)


def test_intervals_go_along_and_nothing_else_changes() -> None:
    run = bert()
    for was, now in zip(run.trials, rankable(run.trials), strict=True):
        assert was.comparison is not None
        assert now.comparison is not None
        before, after = was.comparison.speedup, now.comparison.speedup
        assert after.low / after.median == pytest.approx(before.low / before.median)
        assert after.high / after.median == pytest.approx(before.high / before.median)
        assert now.model_copy(update={"comparison": was.comparison}) == was


def test_what_the_host_launches_is_ranked_by_its_ratio() -> None:
    """It shares with its yardstick what the host does to both."""
    run = bert()
    assert shared_part(run.trials) < 0.5
    run.add(({}, 50.0), ({"compile": "default"}, 25.0))
    assert run.speedups()[-1] == 2.0


def test_those_of_a_search_lead_by_their_rank() -> None:
    run = bert()
    first = leader(run.trials)
    assert first is not None
    assert first.knobs == FLASH
    assert searched(run.trials) == rankable(run.trials)


def test_to_be_beaten_is_the_leader_less_what_a_yardstick_differs_by() -> None:
    run = bert()
    proposal = Proposal({**GRAPH, "streams": 2}, Source.SEED)
    assert to_beat(run.trials, proposal) == pytest.approx(1 - yardstick_noise(run.trials))
    assert yardstick_noise(run.trials) > 0.02
    assert to_beat(run.trials, Proposal(STOCK, Source.STOCK)) is None
    run.trials = run.trials[:2]
    alone = to_beat(run.trials, proposal)
    assert rival(run.trials) == run.trials[1]
    assert alone == pytest.approx(1 - yardstick_noise(run.trials))


def test_ranking_them_again_changes_nothing() -> None:
    run = bert()
    run.add(({**GRAPH, "streams": 2}, 5.0), (CUDNN, 4.0))  # beside what has no trial of its own
    once = rankable(run.trials)
    assert once[-1] == run.trials[-1]
    assert rankable(once) == once


def test_a_clock_that_all_share_cancels() -> None:
    """As exactly as where nothing differs, once the run has shown that captured steps follow it as well."""
    run, slower = Run(), [1.0, 1.2, 1.0, 1.22, 1.1, 1.0, 1.21]
    run.add(({}, 10.0), ({}, 10.0), Source.BASELINE)
    run.add(({}, 10.0 * slower[1]), (GRAPH, 5.0 * slower[1]))
    run.add(({}, 10.0 * slower[2]), (CUDNN, 4.8 * slower[2]))
    for number, clock in enumerate(slower[3:]):
        run.add((GRAPH, 5.0 * clock), ({**HALF, "streams": number + 2}, (4.9 + number / 10) * clock))
    assert 0.4 < shared_part(run.trials) <= 1.0
    truth = [1.0, 2.0, 10 / 4.8, 10 / 4.9, 10 / 5.0, 10 / 5.1, 10 / 5.2]
    assert run.speedups() == pytest.approx(truth, rel=0.1)
    assert best(rankable(run.trials)) == rankable(run.trials)[2]


@pytest.mark.parametrize(
    "second",
    [{"compile": "default"}, STOCK],
    ids=["nothing is captured", "what the host launches was timed in one process"],
)
def test_otherwise_ratios_are_what_there_is(second: Knobs) -> None:
    run = Run()
    run.add(({}, 10.0), ({}, 10.1), Source.BASELINE)
    if second is STOCK:
        run.add((GRAPH, 2.0), (HALF, 1.9))
    else:
        run.add(({}, 12.0), (second, 5.0))
    assert shared_part(run.trials) == 1.0
    assert rankable(run.trials) == run.trials


def test_failed_trials_and_confirmations_stay_as_they_are() -> None:
    run = bert()
    failed = trial(9, dict(CUDNN), failure=Failure(phase=Phase.WARMUP, kind=FailureKind.RAISED, reason="CUDA error"))
    confirmed = run.trials[-1].model_copy(update={"source": Source.CONFIRM, "number": 10})
    assert rankable([*run.trials, failed, confirmed])[-2:] == [failed, confirmed]


class Machine:
    """Draws what arms take: the host's launches take longer by chance, and a clock makes all of a process slower."""

    def __init__(self, seed: int, *, clock: float, host: float) -> None:
        self.rng, self.clock, self.host = random.Random(seed), clock, host

    def process(self, *arms: tuple[Knobs, float]) -> list[tuple[Knobs, float]]:
        slower = self.rng.gauss(0, self.clock)
        noise = [
            self.rng.gauss(0, 0.004) if is_captured(knobs) else abs(self.rng.gauss(0, self.host)) for knobs, _ in arms
        ]
        return [(knobs, ms * math.exp(slower + each)) for (knobs, ms), each in zip(arms, noise, strict=True)]


def regrets(seed: int, *, clock: float, host: float) -> tuple[float, float]:
    """By how much the best of eight captured candidates, which differ by 2 %, is missed: by ratios, and as ranked."""
    machine, run = Machine(seed, clock=clock, host=host), Run()
    run.add(*machine.process(({}, 30.0), ({}, 30.0)), Source.BASELINE)
    run.add(*machine.process(({}, 30.0), (STOCK, 7.0)), Source.STOCK)
    truth = {key_of({}): 30.0, key_of(STOCK): 7.0}
    for number in range(8):
        knobs = {**GRAPH, "streams": number + 1}
        truth[key_of(knobs)] = 5.0 * math.exp(machine.rng.gauss(0, 0.02))
        leader = best(rankable(run.trials))
        assert leader is not None
        beside = {} if number < 3 else STOCK if number < 4 else leader.knobs
        run.add(*machine.process((beside, truth[key_of(beside)]), (knobs, truth[key_of(knobs)])))
    found = (best(run.trials), best(rankable(run.trials)))
    by_ratio, by_rank = (truth[key_of(each.knobs)] / min(truth.values()) - 1 for each in found if each is not None)
    return by_ratio, by_rank


def mean_regrets(*, clock: float, host: float) -> list[float]:
    found = [regrets(seed, clock=clock, host=host) for seed in range(100)]
    return [fmean(each) for each in zip(*found, strict=True)]


@pytest.mark.parametrize(
    ("clock", "host", "at_most"),
    [(0.003, 0.15, 0.3), (0.02, 0.05, 0.6), (0.05, 0.1, 0.7)],
    ids=["the host is noisy", "both are", "a clock as well"],
)
def test_a_better_candidate_is_found_where_the_host_is_noisy(clock: float, host: float, at_most: float) -> None:
    by_ratio, by_rank = mean_regrets(clock=clock, host=host)
    assert by_rank < at_most * by_ratio


@pytest.mark.parametrize("clock", [0.003, 0.1])
def test_hardly_anything_is_lost_where_only_the_clock_changes(clock: float) -> None:
    by_ratio, by_rank = mean_regrets(clock=clock, host=0.003)
    assert by_rank < by_ratio + 0.004
