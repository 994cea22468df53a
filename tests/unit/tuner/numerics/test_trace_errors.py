import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kitsune.techniques.technique import Tolerance
from tuner.numerics.trace_errors import (
    LARGEST_ERROR,
    Errors,
    Trace,
    TraceStep,
    TrainingStart,
    allowed,
    errors_between,
    judge,
)
from tuner.numerics.training_trace import remember

FLOOR = Tolerance(loss=1e-4, gradient=1e-3, parameter=1e-2)
NAMES = ("weight", "bias")
START = TrainingStart([torch.zeros(4, 3), torch.zeros(3)], [torch.zeros(3), torch.tensor(0)], NAMES)
STEPS = (0, 1, 5, 6, 7)


def trace(
    *, loss: float = 2.0, gradient: float = 1.0, bias: float | None = 1.0, end: float = 1.0, count: int = 8
) -> Trace:
    generator = torch.Generator().manual_seed(7)
    weights, biases = torch.randn(4, 3, generator=generator), torch.randn(3, generator=generator)
    gradients = [gradient * weights, None if bias is None else bias * gradient * biases]
    snapshots = {step: TraceStep(loss, gradients) for step in STEPS}
    return Trace(
        snapshots=snapshots,
        steps=8,
        parameters=[end * weights, end * biases],
        buffers=[torch.full((3,), end), torch.tensor(count)],
    )


def verdict(candidate: Trace, yardstick: Trace | None = None) -> str | None:
    reference = trace()
    own = errors_between(yardstick or reference, reference, START)
    return judge(errors_between(candidate, reference, START), own, FLOOR, NAMES, 8)[1]


def test_equal_traces_have_no_error():
    errors = errors_between(trace(), trace(), START)
    assert set(errors.loss) == set(errors.gradient) == set(STEPS)
    assert not any([*errors.loss.values(), *errors.gradient.values(), *errors.singles])
    assert errors.parameter == errors.buffer == 0
    assert verdict(trace()) is None


@given(st.floats(1e-6, 0.5))
def test_a_relative_error_is_found_as_it_is(error):
    found = errors_between(trace(loss=2 * (1 + error), gradient=1 + error, end=1 + error), trace(), START)
    for value in (found.loss[0], found.gradient[5], found.parameter, found.buffer, *found.singles):
        assert value == pytest.approx(error, rel=1e-2, abs=1e-6)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"loss": 2.0 * 1.001}, "loss at step"),
        ({"loss": math.inf}, "loss at step"),
        ({"gradient": 1.01}, "gradients at step"),
        ({"gradient": -1.0}, "gradients at step"),
        ({"gradient": 0.0}, "gradients at step"),
        ({"bias": None}, "gradients at step"),
        ({"end": 1.1}, "parameters after 8 steps"),
        ({"end": 0.0}, "parameters after 8 steps"),
        ({"count": 9}, "buffers after 8 steps"),
    ],
)
def test_what_is_wrong_is_named(changes, words):
    reason = verdict(trace(**changes))
    assert reason is not None
    assert reason.startswith(words)
    assert "is allowed" in reason


@pytest.mark.parametrize("changes", [{"loss": 2.0 * 1.00005}, {"gradient": 1.0005}, {"end": 1.005}])
def test_errors_below_the_floor_are_allowed(changes):
    assert verdict(trace(**changes)) is None


def test_three_times_what_eager_loses_is_allowed_and_no_more():
    eager = trace(loss=2.0 * 1.001, gradient=1.02, end=1.03)
    assert verdict(trace(loss=2.0 * 1.0029, gradient=1.059, end=1.089), eager) is None
    assert "loss" in str(verdict(trace(loss=2.0 * 1.0031), eager))
    assert "gradients" in str(verdict(trace(gradient=1.061), eager))
    assert "parameters" in str(verdict(trace(end=1.091), eager))


def test_a_wrong_eager_step_does_not_widen_the_limit():
    wrong = trace(loss=3.0, gradient=1.5)
    assert "loss" in str(verdict(wrong, wrong))
    assert "gradients" in str(verdict(trace(gradient=2.0), trace(gradient=2.0)))


def lossy(seed: int, scale: float = 1.0, bias: float = 1.0) -> Trace:
    """Gradients of which a precision leaves the sizes, but not the directions."""
    generator = torch.Generator().manual_seed(seed)
    gradients = [
        scale * torch.randn(40, 30, generator=generator),
        scale * bias * torch.randn(30, generator=generator),
    ]
    return Trace({step: TraceStep(2.0, gradients) for step in STEPS}, set(), 8, START.parameters, START.buffers)


def lossy_verdict(candidate: Trace, yardstick: Trace) -> str | None:
    own, found = (errors_between(each, lossy(0), START) for each in (yardstick, candidate))
    assert max(own.gradient.values()) > 1.3
    numerics, reason = judge(found, own, FLOOR, NAMES, 8)
    assert "also sizes were compared" in numerics.note
    return reason


def test_where_eager_loses_its_gradients_their_sizes_are_compared():
    assert lossy_verdict(lossy(2), lossy(1)) is None
    assert "gradient of bias" in str(lossy_verdict(lossy(2, bias=0.0), lossy(1)))
    assert "gradient of bias" in str(lossy_verdict(lossy(2, bias=3.0), lossy(1)))
    assert "times the size" in str(lossy_verdict(lossy(2, scale=0.5), lossy(1)))
    assert "times the size" in str(lossy_verdict(lossy(2, scale=1.6), lossy(1, scale=1.6)))
    assert "gradients at step" in str(lossy_verdict(lossy(0, scale=-1.5), lossy(1)))


def test_a_small_gradient_that_is_missing_is_found_among_large_ones():
    def with_bias(scale: float) -> Trace:
        gradients = [torch.ones(1000, 100), scale * torch.full((10,), 0.3)]
        return Trace({step: TraceStep(1.0, gradients) for step in STEPS}, set(), 8, START.parameters, START.buffers)

    reference = with_bias(1.0)
    own = errors_between(reference, reference, START)
    errors = errors_between(with_bias(0.0), reference, START)
    assert max(errors.gradient.values()) < FLOOR.gradient * 3.1
    numerics, reason = judge(errors, own, Tolerance(loss=1, gradient=1e-2, parameter=1), NAMES, 8)
    assert numerics.gradient_error < numerics.gradient_allowed
    assert reason is not None
    assert "gradient of bias" in reason


def test_noise_where_the_true_gradient_is_zero_is_not_an_error():
    def with_bias(value: float) -> Trace:
        gradients = [torch.ones(1000, 100), torch.full((10,), value)]
        return Trace({step: TraceStep(1.0, gradients) for step in STEPS}, set(), 8, START.parameters, START.buffers)

    reference = with_bias(0.0)
    errors = errors_between(with_bias(1e-7), reference, START)
    assert errors.singles[1] < 1e-4


def test_skipped_steps_are_not_compared():
    candidate = trace()
    candidate.snapshots[0] = TraceStep(2.0, [torch.full((4, 3), math.inf), None])
    candidate.skipped.add(0)
    assert 0 not in errors_between(candidate, trace(), START).gradient
    assert verdict(candidate) is None


def overflowing(scale: float = 1.0, bias: float = 1.0) -> Trace:
    """The first two steps were skipped; the next ones are the early ones."""
    found = lossy(2, scale, bias)
    infinite = TraceStep(2.0, [torch.full((40, 30), math.inf), torch.full((30,), math.inf)])
    found.snapshots = {0: infinite, 1: infinite, **dict.fromkeys((2, 3, 5, 6, 7), found.snapshots[5])}
    found.skipped = {0, 1}
    return found


def test_where_the_first_steps_overflow_the_next_ones_are_the_early_ones():
    def verdict_of(candidate: Trace) -> str | None:
        reference, yardstick = (
            replace(lossy(seed), snapshots=dict.fromkeys(candidate.snapshots, lossy(seed).snapshots[5]), skipped={0, 1})
            for seed in (0, 1)
        )
        own, found = (errors_between(each, reference, START) for each in (yardstick, candidate))
        numerics, reason = judge(found, own, FLOOR, NAMES, 8)
        assert "also sizes were compared" in numerics.note
        return reason

    assert overflowing().early == [2, 3]
    assert verdict_of(overflowing()) is None
    assert "gradient of bias" in str(verdict_of(overflowing(bias=0.0)))
    assert "times the size" in str(verdict_of(overflowing(scale=0.5)))


def test_the_early_steps_that_were_not_skipped_are_kept_and_the_last_ones():
    found = Trace()
    for step in range(12):
        found.skipped |= {step} & {0, 1, 3}
        remember(found, step, TraceStep(1.0, [None]))
    assert (found.early, sorted(found.snapshots)) == ([2, 4], [2, 4, 9, 10, 11])


def test_the_published_numbers_are_those_of_the_step_nearest_to_its_limit():
    errors = Errors({0: 0.01, 5: 0.02}, {0: 0.0, 5: 0.0}, [0.0, 0.0], 1.0, [1.0, 1.0], 0.1, 0.0)
    own = Errors({0: 0.001, 5: 0.1}, {0: 0.0, 5: 0.0}, [0.0, 0.0], 1.0, [1.0, 1.0], 0.05, 0.0)
    numerics, reason = judge(errors, own, FLOOR, NAMES, 8, note="so")
    assert (numerics.loss_error, numerics.loss_allowed) == (0.01, pytest.approx(0.003))
    assert numerics.parameter_allowed == pytest.approx(0.15)
    assert (numerics.steps, numerics.note) == (8, "so")
    assert "loss at step 0" in str(reason)


@given(st.floats(0, 1e6), st.floats(1e-9, 1), st.floats(1e-3, 10))
def test_allowed(own, floor, ceiling):
    limit = allowed(own, floor, ceiling)
    assert floor <= limit <= max(floor, ceiling)


def test_an_end_that_is_not_finite_is_the_largest_error():
    assert errors_between(trace(end=math.nan), trace(), START).parameter == LARGEST_ERROR


@pytest.mark.parametrize(
    ("snapshot", "words"),
    [
        (TraceStep(1.0, [torch.ones(2), None]), None),
        (TraceStep(math.nan, [torch.ones(2), None]), "loss is nan"),
        (TraceStep(1.0, [torch.ones(2), torch.tensor([1.0, math.inf])]), "gradient of bias"),
    ],
)
def test_what_is_not_finite_is_named(snapshot, words):
    found = snapshot.first_not_finite(NAMES)
    assert found is None if words is None else words in str(found)
