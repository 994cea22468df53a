"""What a search leaves for what follows it."""

from dataclasses import replace

import pytest

from tests.unit.tuner.machine import PROOF
from tests.unit.tuner.planning.test_pace import lasting
from tuner.planning.pace import LEAVE_S, WARM
from tuner.planning.prior_runs import AGAIN, Knowledge, Proven
from tuner.planning.reserve import LATE_S, LEAST_PROOF_STEPS, PLAYOFF_SHARE, PROOF_S, Reserve
from tuner.records import Source, Spent, Trial
from tuner.statistics.process_statistics import LEAST_PROCESSES, PROCESSES, Prior

GRAPH = {"precision": "bf16", "compile": "default", "capture": "step"}


def took(number: int, speedup: float, spent: Spent, **knobs: str) -> Trial:
    found = lasting(number, 0, spent.total_s, **knobs)
    assert found.comparison is not None
    gain = found.comparison.speedup.model_copy(update={"median": speedup})
    comparison = found.comparison.model_copy(update={"speedup": gain})
    source = Source.SEED if knobs else Source.BASELINE
    return found.model_copy(update={"spent": spent, "comparison": comparison, "source": source})


BASELINE = took(0, 1.0, Spent(build_s=5, timing_s=3))
BEST = took(1, 8.0, Spent(build_s=5, numerics_s=60, warmup_s=40, timing_s=3), **GRAPH)


def reserve(*trials: Trial, known: Knowledge | None = None, at_once: int = 4, step_s: float = 0.1) -> Reserve:
    return Reserve(trials, known or Knowledge(), at_once, 300.0, step_s)


def test_nothing_is_left_before_there_is_a_leader():
    assert reserve().confirmation_s() == 0
    assert reserve(BASELINE).confirmation_s() == 5 + AGAIN * (3 + LEAVE_S), "which needs no long look"


def test_the_long_look_is_one_process_however_many_there_are():
    assert reserve(BASELINE, BEST).confirmation_s() >= PROOF_S + WARM * 108 + PROCESSES * 3
    assert reserve(BASELINE, BEST, at_once=1).confirmation_s() > reserve(BASELINE, BEST).confirmation_s()
    assert reserve(BASELINE, BEST, step_s=0.001).confirmation_s() < reserve(BASELINE, BEST).confirmation_s()


def test_the_long_look_is_begun_beside_what_is_timed_where_it_has_time_for_more_than_to_compile():
    beside, alone = reserve(BASELINE, BEST), reserve(BASELINE, BEST, at_once=1)
    shortest_s = LEAST_PROOF_STEPS * 0.1
    needed_s = WARM * 108 + AGAIN * 3
    assert beside.proof_within(BEST, needed_s + shortest_s - 1) == 0, "not even the shortest look"
    assert beside.proof_within(BEST, needed_s + shortest_s) == shortest_s
    assert shortest_s < beside.proof_within(BEST, needed_s + 30) <= 30
    assert beside.proof_within(BEST, needed_s + 100) == PROOF_S
    assert alone.proof_within(BEST, needed_s + shortest_s) == 0
    assert shortest_s <= alone.proof_within(BEST, alone.least_s()) <= shortest_s + LATE_S


def test_the_least_is_as_many_processes_as_decide():
    rival = took(2, 7.5, Spent(build_s=5, numerics_s=60, timing_s=3), precision="bf16", compile="reduce-overhead")
    known = Knowledge(proven=Proven("before", BEST, rival, Prior(0.01, 4, "eager"), PROOF))
    assert reserve(BASELINE, BEST, rival).least(BEST) == LEAST_PROCESSES
    assert reserve(BASELINE, BEST, rival, known=known).least(BEST) == AGAIN
    assert reserve(BASELINE, BEST).least(BEST) == AGAIN, "no noise explains eight times"
    assert reserve(BASELINE, rival).least(rival) == AGAIN, "the best stock configuration, over the step as given"
    assert reserve(BASELINE).least(BASELINE) == 1
    close = took(1, 1.2, Spent(build_s=5, timing_s=3), **GRAPH)
    assert reserve(BASELINE, close).least(close) == LEAST_PROCESSES


def test_the_least_has_the_shortest_long_look_beside_it_where_that_is_a_small_part_of_the_budget():
    known = Knowledge(proven=Proven("before", BEST, BASELINE, Prior(0.01, 4, "eager"), PROOF))
    least_s, again_s = reserve(BASELINE, BEST).least_s(), reserve(BASELINE, BEST, known=known).least_s()
    assert reserve(BASELINE).least_s() == 0
    assert again_s < least_s < reserve(BASELINE, BEST).confirmation_s()
    assert reserve(BASELINE, BEST).processes_within(BEST, least_s) >= AGAIN
    assert reserve(BASELINE, BEST, known=known).processes_within(BEST, 1.0) == AGAIN
    assert reserve(BASELINE, BEST).proof_within(BEST, least_s) >= LEAST_PROOF_STEPS * 0.1
    short = replace(reserve(BASELINE, BEST), budget_s=120.0)
    assert short.least_s() == again_s
    assert short.proof_within(BEST, short.least_s()) == 0
    assert replace(short, step_s=0.2).proof_within(BEST, 1000.0) == 0, "the shortest takes more than its part"


def test_a_step_with_random_numbers_is_compiled_once_more_where_its_look_stays_a_small_part_of_the_budget():
    quick = took(1, 8.0, Spent(build_s=5, numerics_s=20, warmup_s=10, timing_s=3), **GRAPH)
    plain, random = (replace(reserve(BASELINE, quick, step_s=0.02), is_random=given) for given in (False, True))
    assert random.least_s() - plain.least_s() == pytest.approx(WARM * 38)
    assert random.confirmation_s() > plain.confirmation_s()
    assert plain.proof_within(quick, plain.least_s()) > 0
    look_s = random.proof_within(quick, random.least_s())
    assert look_s + 2 * WARM * 38 + AGAIN * 3 <= random.least_s(), "compiling twice is within that time"
    assert 0 < look_s <= plain.proof_within(quick, random.least_s())
    slow = replace(reserve(BASELINE, BEST), is_random=True)
    assert slow.least_s() == replace(slow, is_random=False).least_s(), "32 s each time are too much"


def test_what_was_proven_before_needs_little():
    known = Knowledge(proven=Proven("before", BEST, BASELINE, Prior(0.01, 4, "eager"), PROOF))
    assert reserve(BASELINE, BEST, known=known).confirmation_s() < 30
    assert reserve(BASELINE, BEST, known=known).processes(GRAPH) == AGAIN
    assert reserve(BASELINE, BEST, known=known).processes({"precision": "bf16"}) == PROCESSES


def test_what_was_proven_before_needs_as_much_where_it_is_not_known_how_far_processes_lie_apart():
    """Of a stock configuration, over which nothing gained: two processes alone leave that open."""
    known = Knowledge(proven=Proven("before", BEST, BASELINE, proof=PROOF))
    assert reserve(BASELINE, BEST, known=known).processes(GRAPH) == PROCESSES


def test_a_play_off_has_a_part_of_the_budget_or_nothing():
    alone = reserve(BASELINE, BEST)
    assert (alone.contenders(), alone.playoff_s()) == ([BEST], 0)
    cheap = Spent(build_s=1, timing_s=2)
    alike = [
        took(number, 8.0, cheap, **{**GRAPH, "update": update}) for number, update in ((1, "fused"), (2, "kitsune"))
    ]
    assert 0 < reserve(BASELINE, *alike).playoff_s() <= PLAYOFF_SHARE * 300
    dear = [each.model_copy(update={"spent": Spent(build_s=40, timing_s=2)}) for each in alike]
    assert reserve(BASELINE, *dear).playoff_s() == 0
    assert len(reserve(BASELINE, *alike).contenders()) == 2
    ranked_s = reserve(BASELINE, *alike).playoff_s()
    assert [len(reserve(BASELINE, *alike).contenders(left_s)) for left_s in (ranked_s, ranked_s - 1, -1)] == [2, 1, 1]
