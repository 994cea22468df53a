import logging
import random
import time
from statistics import mean

import optuna
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kitsune.knobs import KNOBS, Choice, Knob
from tests.unit.tuner.simulation import Surface, replay, trial
from tuner.records import Failure, FailureKind, Phase, Source, Trial
from tuner.search import Proposal, best, best_stock, blamed, costs, hopeless, propose
from tuner.space import Space, expert_seeds, stock_rivals

EVERYTHING = Space.of()
SMALL = Space.of(
    {
        f"{name}={choice}": "not here"
        for name, knob in KNOBS.items()
        if name not in ("layout", "update", "compile")
        for choice in knob.choices
    }
    | {f"compile={choice}": "not here" for choice in ("coordinate-descent", "max-autotune-no-cudagraphs")}
)
ITEMS = [(name, choice) for name, knob in KNOBS.items() for choice in knob.choices]
spaces = st.sets(st.sampled_from(ITEMS)).map(lambda items: Space.of({f"{k}={c}": "no" for k, c in items}))


def failed(number: int, knobs: dict[str, Choice], kind: FailureKind = FailureKind.RAISED) -> Trial:
    return trial(number, knobs, failure=Failure(kind=kind, phase=Phase.BUILD, reason="it broke"))


def regret(surface: Surface, trials: list[Trial]) -> float:
    return surface.optimum() / speedup_of_best(surface, trials) - 1


def speedup_of_best(surface: Surface, trials: list[Trial]) -> float:
    found = best(trials)
    assert found is not None
    return surface.speedup(found.knobs)


def chance(space: Space, trials: list[Trial], seed: int) -> Proposal | None:
    """Random search: what a search has to beat."""
    rng = random.Random(f"{seed}:{len(trials)}")
    return Proposal(space.repair({k: rng.choice(cs) for k, cs in space.searchable().items()}), Source.TPE)


def distinct(trials: list[Trial]) -> int:
    return len({frozenset(trial.knobs.items()) for trial in trials})


# The whole search, on paper -------------------------------------------------------------------------------------------


def test_with_25_trials_the_mean_regret_is_below_five_percent() -> None:
    ours, by_chance = [], []
    for seed in range(20):
        surface = Surface(EVERYTHING, seed)
        optimum = surface.optimum()  # looks at every configuration
        for regrets, search in ((ours, propose), (by_chance, chance)):
            regrets.append(optimum / speedup_of_best(surface, replay(surface, search, 25, seed)) - 1)
    assert mean(ours) < 0.05
    assert mean(ours) < mean(by_chance) / 3


def test_with_60_trials_little_is_left_to_find() -> None:
    surfaces = [Surface(EVERYTHING, seed) for seed in range(5)]
    assert mean(regret(surface, replay(surface, propose, 60, surface.seed)) for surface in surfaces) < 0.02


def test_a_space_where_most_fails_is_still_searched() -> None:
    surface = Surface(EVERYTHING, seed=3)
    surface.wrong = {("precision", "bf16"), ("precision", "fp16"), ("compile", "default"), ("update", "fused")}
    trials = replay(surface, propose, 40)
    found = best(trials)
    assert found is not None
    assert not surface.wrong & set(found.knobs.items())
    assert regret(surface, trials) < 0.1


def test_a_small_space_is_exhausted_and_its_best_is_found() -> None:
    surface = Surface(SMALL, seed=1, noise=0.0)
    trials = replay(surface, propose, 1000)
    assert distinct(trials) == len(trials) == len(list(SMALL.configurations())) == 2 * 4 * 3
    assert regret(surface, trials) == 0
    assert propose(SMALL, trials) is None


@settings(max_examples=12)
@given(spaces, st.integers(0, 2**31))
def test_proposals_are_allowed_and_never_repeat(space: Space, seed: int) -> None:
    trials = replay(Surface(space, seed), propose, 30, seed)
    assert distinct(trials) == len(trials)
    assert all(space.allows(trial.knobs) is None for trial in trials)
    if len(trials) < 30:
        assert len(trials) == len(list(space.configurations()))


@pytest.mark.parametrize("count", [0, 3, 12, 45])
def test_the_same_trials_give_the_same_proposal(count: int) -> None:
    trials = replay(Surface(EVERYTHING, seed=2), propose, count, seed=5)
    assert propose(EVERYTHING, trials, 5) == propose(EVERYTHING, list(trials), 5)
    restored = [Trial.model_validate_json(trial.model_dump_json()) for trial in trials]
    assert propose(EVERYTHING, restored, 5) == propose(EVERYTHING, trials, 5)


def test_chance_comes_from_the_seed() -> None:
    trials = replay(Surface(EVERYTHING, seed=2, walls=False), propose, 60, seed=5)
    while (proposal := propose(EVERYTHING, trials, 5)) and proposal.source is not Source.TPE:
        trials.append(trial(len(trials), proposal.knobs, speedup=0.5))
    found = [propose(EVERYTHING, trials, seed) for seed in range(8)]
    assert len({frozenset(proposal.knobs.items()) for proposal in found if proposal}) > 1


def test_a_proposal_takes_less_than_a_tenth_of_a_second_after_100_trials() -> None:
    rng = random.Random(0)
    configurations = rng.sample(list(EVERYTHING.configurations()), 100)
    leader = {"precision": "bf16", "compile": "default", "capture": "step"}
    known = [leader, *(knobs for _, knobs in EVERYTHING.neighbours(leader)), *configurations][:100]
    trials = [
        trial(number, knobs, speedup=2.0 if number == 0 else rng.uniform(0.5, 1.9))
        for number, knobs in enumerate(known)
    ]
    trials += [
        trial(200 + number, named.knobs, Source.STOCK, speedup=0.4)
        for number, named in enumerate((*stock_rivals(EVERYTHING), *expert_seeds(EVERYTHING)))
    ]
    durations = []
    for _ in range(5):
        start = time.process_time()
        assert propose(EVERYTHING, trials) is not None
        durations.append(time.process_time() - start)
    assert min(durations) < 0.1


# A knob more ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("first", [True, False])
def test_a_knob_added_to_the_table_is_searched_without_another_edit(first: bool) -> None:
    lanes = Knob(name="lanes", meaning="how many", choices={1: "one", 2: "two", 4: "four"}, needs="CUDA")
    table = {"lanes": lanes, **KNOBS} if first else {**KNOBS, "lanes": lanes}
    surface = Surface(Space.of(table=table), seed=4, planted={("lanes", 2): 0.7, ("lanes", 4): 0.9})
    surface.host_share = 0.1
    found = best(replay(surface, propose, 20))
    assert found is not None
    assert found.knobs["lanes"] == 2


def test_a_table_without_the_knobs_of_the_presets_is_searched_all_the_same() -> None:
    knob = Knob(name="lanes", meaning="how many", choices={1: "one", 2: "two", 4: "four"}, needs="CUDA")
    space = Space.of(table={"lanes": knob})
    trials = replay(Surface(space, seed=0), propose, 10)
    assert [(trial.source, trial.knobs) for trial in trials] == [
        (Source.BASELINE, {}),
        (Source.DESCENT, {"lanes": 2}),
        (Source.DESCENT, {"lanes": 4}),
    ]


# The order ------------------------------------------------------------------------------------------------------------


def test_what_is_quick_to_try_comes_before_what_is_slow_and_before_descent() -> None:
    rivals, seeds = stock_rivals(EVERYTHING)[1:], expert_seeds(EVERYTHING)
    expected: list[tuple[Source, object]] = []
    for slow in (False, True):
        expected += [(Source.STOCK, rival.knobs) for rival in rivals if EVERYTHING.is_slow(rival.knobs) is slow]
        expected += [(Source.SEED, seed.knobs) for seed in seeds if EVERYTHING.is_slow(seed.knobs) is slow]
    assert len(expected) == len(rivals) + len(seeds)
    assert any(EVERYTHING.is_slow(seed.knobs) for seed in seeds)
    trials = [trial(0, {}, Source.BASELINE)]
    while len(trials) <= len(expected):
        found = propose(EVERYTHING, trials)
        assert found is not None
        trials.append(trial(len(trials), found.knobs, found.source))
    assert [(each.source, each.knobs) for each in trials[1:]] == expected


def test_without_patience_nothing_slow_is_proposed() -> None:
    surface = Surface(EVERYTHING, seed=6, walls=False)
    trials = replay(surface, lambda space, trials, seed=0: propose(space, trials, seed, is_patient=False), 40)
    assert len(trials) == 40
    assert not any(EVERYTHING.is_slow(trial.knobs) for trial in trials)


def test_descent_comes_before_the_estimator() -> None:
    sources = [trial.source for trial in replay(Surface(EVERYTHING, seed=7, walls=False), propose, 60)]
    presets = 1 + len(stock_rivals(EVERYTHING)[1:]) + len(expert_seeds(EVERYTHING))
    assert not {Source.DESCENT, Source.TPE} & set(sources[:presets])
    assert sources.index(Source.DESCENT) < sources.index(Source.TPE)


@pytest.mark.parametrize(
    ("half", "compiled", "late"),
    [
        (0.8, 0.8, set()),
        (1.6, 1.6, {"full, compiled, one graph", "full, one graph"}),
        (0.8, 1.6, {"half, one graph", "full, one graph"}),
        (1.6, 3.2, {"half, one graph", "full, compiled, one graph", "full, one graph"}),
    ],
)
def test_seeds_without_what_clearly_pays_come_last(half: float, compiled: float, late: set[str]) -> None:
    trials = [trial(0, {}, Source.BASELINE), trial(1, {"precision": "bf16"}, Source.STOCK, half)]
    names: list[str] = []
    while (found := propose(EVERYTHING, trials)) is not None and found.name:
        names.append(found.name)
        trials.append(trial(len(trials), found.knobs, found.source, compiled if found.name == "compile" else 1.0))
    assert len(names) == len(stock_rivals(EVERYTHING)) + len(expert_seeds(EVERYTHING)) - 2
    in_order = [name for name in names if name in late]
    assert names[len(names) - len(late) :] == in_order


def test_proposals_carry_the_name_of_what_they_are() -> None:
    assert propose(EVERYTHING, []) == Proposal({}, Source.BASELINE, "eager")
    assert propose(EVERYTHING, [trial(0, {}, Source.BASELINE)]) == Proposal(
        {"precision": "bf16"}, Source.STOCK, "eager_bf16"
    )


def test_the_best_rival_is_tried_in_the_other_layout_and_precision() -> None:
    trials = [trial(0, {}, Source.BASELINE)]
    trials += [
        trial(1 + number, rival.knobs, Source.STOCK, 3.0 if rival.name == "reduce_overhead" else 1.5)
        for number, rival in enumerate(stock_rivals(EVERYTHING)[1:])
    ]
    trials += [trial(10 + number, seed.knobs) for number, seed in enumerate(expert_seeds(EVERYTHING))]
    rival = {"layout": "channels_last", "precision": "bf16", "compile": "reduce-overhead", "update": "fused"}
    expected = [{k: v for k, v in rival.items() if k != "layout"}, {**rival, "precision": "tf32"}]
    for knobs in expected:
        assert propose(EVERYTHING, trials) == Proposal(knobs, Source.STOCK)
        trials.append(trial(len(trials) + 20, knobs, Source.STOCK, 2.0))
    proposal = propose(EVERYTHING, trials)
    assert proposal is not None
    assert proposal.source is Source.DESCENT


def test_descent_changes_one_knob_of_the_best_and_begins_with_what_was_never_tried() -> None:
    trials = replay(Surface(EVERYTHING, seed=6, walls=False), propose, 60)
    first = next(number for number, trial in enumerate(trials) if trial.source is Source.DESCENT)
    leader = best(trials[:first])
    assert leader is not None
    changed = set(trials[first].knobs.items()) - set(leader.knobs.items())
    assert len(changed) == 1
    assert not any(changed <= set(trial.knobs.items()) for trial in trials[:first])


def test_descent_goes_on_from_a_new_best() -> None:
    trials = replay(Surface(EVERYTHING, seed=6, walls=False), propose, 20)
    leader = trial(20, {"layout": "channels_last", "attention": "flash", "precision": "bf16"}, Source.TPE, speedup=99)
    proposal = propose(EVERYTHING, [*trials, leader])
    assert proposal is not None
    assert proposal.source is Source.DESCENT
    assert proposal.knobs in [knobs for _, knobs in EVERYTHING.neighbours(leader.knobs)]


def test_a_choice_that_fails_on_its_own_is_not_tried_in_presets_and_comes_last_in_descent() -> None:
    surface = Surface(EVERYTHING, seed=6, walls=False)
    surface.wrong = {("precision", "bf16")}
    trials = replay(surface, propose, 24)
    assert [trial.number for trial in trials if trial.knobs.get("precision") == "bf16"] == [1]


def test_trials_of_another_space_do_no_harm() -> None:
    strangers = [
        trial(0, {}, Source.BASELINE),
        trial(1, {"precision": "fp16"}, speedup=3.0),
        failed(2, {"capture": "step", "compile": "max-autotune"}),
    ]
    space = Space.of({"precision=fp16": "no longer"})
    trials = list(strangers)
    for number in range(3, 60):
        proposal = propose(space, trials)
        assert proposal is not None
        assert space.allows(proposal.knobs) is None
        trials.append(trial(number, proposal.knobs, proposal.source))


def test_optuna_says_nothing_and_keeps_its_verbosity(
    caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    optuna.logging.set_verbosity(optuna.logging.INFO)
    with caplog.at_level(logging.DEBUG):
        trials = replay(Surface(SMALL, seed=0), propose, 24)
    assert Source.TPE in {trial.source for trial in trials}
    assert optuna.logging.get_verbosity() == optuna.logging.INFO
    assert (caplog.text, *capfd.readouterr()) == ("", "", "")


# The pieces -----------------------------------------------------------------------------------------------------------


def test_best_is_the_highest_speedup_that_worked_and_was_not_a_confirmation() -> None:
    trials = [
        trial(0, {}, Source.BASELINE, 1.001),
        trial(1, {"precision": "bf16"}, Source.STOCK, 1.4),
        failed(2, {"compile": "default"}),
        trial(3, {"capture": "step"}, Source.SEED, 2.0),
        trial(4, {"capture": "segments"}, Source.DESCENT, 2.0),
        trial(5, {"capture": "step"}, Source.CONFIRM, 2.5),
    ]
    assert best(trials) == best(reversed(trials)) == trials[3]
    assert best_stock(trials) == trials[1]
    assert best_stock([trials[0], trials[3]]) == trials[0]
    assert best([failed(0, {})]) is best_stock([]) is None


def test_hopeless_needs_three_pairs_and_three_percent() -> None:
    assert not hopeless([10.0, 10.0], [20.0, 20.0], best_speedup=1.0)
    assert hopeless([10.0, 10.0, 10.0], [20.0, 20.0, 20.0], best_speedup=1.0)
    assert hopeless([10.0] * 3, [5.2] * 3, best_speedup=2.0)
    assert not hopeless([10.0] * 3, [5.1] * 3, best_speedup=2.0)
    assert not hopeless([10.0] * 4, [20.0, 20.0, 20.0, 5.0], best_speedup=2.0)
    assert not hopeless([10.0] * 3, [20.0, 20.0], best_speedup=1.0)


def test_hopeless_is_not_fooled_by_a_clock_that_slows_down() -> None:
    drift = [1.0, 1.3, 1.6, 2.0]
    assert not hopeless([10 * d for d in drift], [5 * d for d in drift], best_speedup=2.0)


def test_hopeless_saves_most_blocks_and_keeps_the_best() -> None:
    used = 0
    for seed in range(40):
        rng = random.Random(seed)
        speedups = [rng.lognormvariate(0, 0.25) for _ in range(20)]
        target = 0.0
        for true in speedups:
            baseline = [10 * rng.lognormvariate(0, 0.01) for _ in range(10)]
            candidate = [10 / true * rng.lognormvariate(0, 0.01) for _ in range(10)]
            stopped = next((n for n in range(3, 11) if target and hopeless(baseline[:n], candidate[:n], target)), None)
            assert stopped is None or true < max(speedups)
            used += stopped or 10
            target = target if stopped else max(target, true)
    assert used < 0.6 * 40 * 20 * 10


def test_blame_needs_a_single_suspect() -> None:
    broken = failed(1, {"compile": "default", "update": "fused"})
    assert blamed([broken]) == frozenset()
    cleared = trial(2, {"update": "fused"})
    assert blamed([broken, cleared]) == {("compile", "default")}
    assert blamed([broken, cleared, trial(3, {"compile": "default"})]) == frozenset()
    assert blamed([failed(1, {"compile": "default"}, FailureKind.OUT_OF_MEMORY)]) == frozenset()
    assert blamed([failed(0, {})]) == frozenset()


def test_a_failed_trial_costs_more_than_any_that_worked() -> None:
    trials = [
        trial(0, {}, Source.BASELINE, 1.0),
        trial(1, {"precision": "bf16"}, speedup=2.0),
        trial(2, {"attention": "math"}, speedup=0.05),
        failed(3, {"compile": "default"}, FailureKind.OUT_OF_MEMORY),
        trial(4, {"precision": "bf16"}, Source.CONFIRM, speedup=3.0),
        trial(5, {"capture": "step", "compile": "max-autotune"}, speedup=9.0),
        trial(6, {"update": "foreach"}, speedup=9.0),  # of a run that began when this was searched
    ]
    found = costs(EVERYTHING, trials)
    assert [knobs for knobs, _ in found] == [trial.knobs for trial in trials[:4]]
    ordered = sorted(found, key=lambda pair: pair[1])
    assert [knobs for knobs, _ in ordered] == [trials[number].knobs for number in (1, 0, 2, 3)]
    assert costs(EVERYTHING, [failed(0, {})])[0][1] > 0
