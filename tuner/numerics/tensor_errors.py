"""Compares steps of the candidate and the reference from the same state, tensor by tensor, and judges many such steps.

The reference starts from the candidate's state at many moments of its training, so that drifting trajectories are never
compared. Besides its error, each tensor has a *share*: the projection of the candidate's gradient on the reference's,
<ours, theirs> / <theirs, theirs>. Rounding in random directions changes the share less than the error, by the square
root of the number of elements. A layer's gradient that is 1 % too large changes it by 1 %, which shows even in bf16.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean, median, median_low, pstdev, pvariance
from typing import Final

import torch

from kitsune.long_proof import Margin
from kitsune.techniques.technique import Tolerance
from tuner.numerics.distance import Tensors
from tuner.numerics.trace_errors import (
    LARGE_EAGER_ERROR,
    SINGLE_FACTOR,
    SIZE_FACTOR,
    allowed,
    margin_of,
    nearest,
    ratio,
)

#: Error of the mean share over all steps that is always allowed in addition to the yardsticks'.
SHARE_FLOOR: Final = 2e-3
#: The same as a part of the format's gradient tolerance: 0.5 % in bf16. Compiled code keeps digits that eager rounds,
#: in every step alike (a correct nanoGPT on an H100 is off by 0.46 %).
SHARE_OF_FORMAT: Final = 0.1
#: Allowed standard errors of the mean share. Among 1000 tensors of a correct candidate the largest is 3 to 4.
SHARE_SPREADS: Final = 5.0
#: Limit of the allowance for variation between the candidate's own steps, in multiples of the floor: 2 % in bf16.
OWN_SHARE: Final = 4.0
MAD_TO_DEVIATION: Final = 1.4826  # for normally distributed values
#: Difference of a tensor's share from eager's: always allowed, and allowed as a multiple of the median of all tensors.
OUTLIER_FLOOR: Final = 5e-3
OUTLIER_FACTOR: Final = 10.0
#: The error of a tensor whose true gradient is 0 (as of a bias before batch norm) is relative to this part of its fair
#: share of the norm.
LEAST: Final = 0.01
#: A yardstick with a gradient that is off by more than its own size shows nothing.
LOST: Final = 1.0
#: With fewer steps every one counts; with more, a rare one may be off by RARE times what is allowed.
FEW: Final = 6
RARE: Final = 30.0
#: Relative to the mean loss. Smaller errors are found by the steps from the same state.
DRIFT_FLOOR: Final = 1e-2
DRIFT_FACTOR: Final = 10.0
#: Windows in a row of which the middle error counts, so that a spike of the loss is no drift: with 5 steps a window,
#: one of 11 steps is in at most 3 of them. At the rates given, GPT-2 has such a spike within 60 steps in about one
#: training of five, in fp32 too, and which training has it is chance.
IN_A_ROW: Final = 7


@dataclass(frozen=True, slots=True)
class StepResult:
    """Result of one step: loss, gradients, changes of the floating-point buffers, and values of all other buffers."""

    loss: float
    gradients: Tensors
    buffers: Sequence[torch.Tensor]
    counters: Sequence[torch.Tensor] = ()


@dataclass(frozen=True, slots=True)
class TensorErrors:
    """Error, share and norm of each tensor, all relative to the reference's."""

    errors: Sequence[float]
    shares: Sequence[float]
    sizes: Sequence[float]


@dataclass(frozen=True, slots=True)
class StepErrors:
    """Comparison of one step with the reference's step from the same state."""

    loss: float
    whole: float
    gradients: TensorErrors
    buffers: TensorErrors
    counters_agree: bool = True


def compared(ours: StepResult, theirs: StepResult) -> StepErrors:
    pairs = list(zip(ours.gradients, theirs.gradients, strict=True))
    found = [_products(a, b) for a, b in pairs]
    elements = [0 if a is None and b is None else (b if a is None else a).numel() for a, b in pairs]  # type: ignore[union-attr]
    total = sum(theirs for _, theirs, _, _ in found)
    density = math.sqrt(total / max(1, sum(elements)))
    least = [LEAST * density * math.sqrt(count) for count in elements]
    wrong = math.sqrt(sum(error for _, _, _, error in found))
    return StepErrors(
        loss=abs(ours.loss - theirs.loss) / max(abs(theirs.loss), 1e-12),
        whole=ratio(wrong, math.sqrt(total)),
        gradients=_tensor_errors(found, least),
        buffers=_tensor_errors(
            [_products(a, b) for a, b in zip(ours.buffers, theirs.buffers, strict=True)],
            [0.0] * len(theirs.buffers),
        ),
        counters_agree=all(map(torch.equal, ours.counters, theirs.counters)),
    )


#: <ours, ours>, <theirs, theirs>, <ours, theirs>, <ours - theirs, ours - theirs>
_Products = tuple[float, float, float, float]


def _products(a: torch.Tensor | None, b: torch.Tensor | None) -> _Products:
    if a is None and b is None:
        return 0.0, 0.0, 0.0, 0.0
    ours, theirs = (None if each is None else _flat(each) for each in (a, b))
    if ours is None or theirs is None:
        size = float(torch.dot(_first_given(ours, theirs), _first_given(ours, theirs)))
        return (0.0, size, 0.0, size) if ours is None else (size, 0.0, 0.0, size)
    wrong = ours - theirs
    products = torch.stack([torch.dot(ours, ours), torch.dot(theirs, theirs), torch.dot(ours, theirs)])
    found: list[float] = torch.cat([products, torch.dot(wrong, wrong)[None]]).tolist()
    return found[0], found[1], found[2], found[3]


def _first_given(a: torch.Tensor | None, b: torch.Tensor | None) -> torch.Tensor:
    found = b if a is None else a
    assert found is not None
    return found


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    real = torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor
    return real.detach().double().reshape(-1)


def _tensor_errors(found: Sequence[_Products], least: Sequence[float]) -> TensorErrors:
    errors, shares, sizes = [], [], []
    for (own, theirs, both, wrong), floor in zip(found, least, strict=True):
        size = max(math.sqrt(theirs), floor)
        errors.append(ratio(math.sqrt(wrong), size))
        shares.append(1 + (both - theirs) / size**2 if size > 0 else (1.0 if own == 0 else 0.0))
        sizes.append(ratio(math.sqrt(own), size))
    return TensorErrors(errors, shares, sizes)


@dataclass(frozen=True, slots=True)
class ErrorSamples:
    """Comparisons at the same moments: of the candidate, and of each yardstick (eager in the candidate's precision)."""

    candidate: Sequence[StepErrors]
    yardsticks: Sequence[Sequence[StepErrors]]

    def every(self, value: Callable[[StepErrors], float]) -> float:
        """The largest of all yardsticks and moments: at a single moment eager's own error may be small by chance."""
        return max((value(each) for one in self.yardsticks for each in one), default=0.0)


def judge_comparisons(
    found: ErrorSamples, floor: Tolerance, names: Sequence[str], buffers: Sequence[str]
) -> list[Margin]:
    """For each kind of comparison, the margin nearest to its limit. Needs at least one comparison."""
    margins = [
        _whole(found, "loss", lambda each: each.loss, floor.loss),
        _whole(found, "gradients", lambda each: each.whole, floor.gradient),
    ]
    share = max(SHARE_FLOOR, SHARE_OF_FORMAT * floor.gradient)
    margins += _tensors(found, "gradient of", lambda each: each.gradients, floor.gradient, share, names)
    buffer_share = max(SHARE_FLOOR, floor.parameter / 5)
    margins += _tensors(found, "buffer", lambda each: each.buffers, floor.parameter, buffer_share, buffers)
    margins += _outliers(found, names)
    disagreements = sum(not each.counters_agree for each in found.candidate)
    if disagreements:
        margins.append(margin_of("counters in buffers", "", float(disagreements), 0.0, 1.0))
    return margins


def is_lost(rounded: StepErrors, eager: StepErrors) -> bool:
    """Whether a yardstick with rounded parameters has lost a gradient that eager in the candidate's precision has.

    A parameter near 1 may round to 1, where the model has a pole.
    """
    pairs = zip((rounded.whole, *rounded.gradients.errors), (eager.whole, *eager.gradients.errors), strict=True)
    return any(error > LOST >= other for error, other in pairs)


def recurring_error(errors: Sequence[float]) -> float:
    """The largest error without rare outliers: rounding can flip a ReLU near 0 or a tie in a maximum.

    One error in sixteen, and at least one, may be 30 times as large.
    """
    ordered = sorted(errors)
    if len(ordered) < FEW:
        return ordered[-1]
    return max(ordered[-1 - max(1, len(ordered) // 16)], ordered[-1] / RARE)


def _whole(found: ErrorSamples, what: str, value: Callable[[StepErrors], float], floor: float) -> Margin:
    error = recurring_error([value(each) for each in found.candidate])
    return margin_of(what, "", error, allowed(found.every(value), floor), 1.0)


def _tensors(
    found: ErrorSamples,
    what: str,
    errors_of: Callable[[StepErrors], TensorErrors],
    floor: float,
    share_floor: float,
    names: Sequence[str],
) -> list[Margin]:
    errors, shares, sizes = [], [], []
    for index, name in enumerate(names):
        own = [errors_of(each) for each in found.candidate]
        others = [[errors_of(each) for each in one] for one in found.yardsticks]
        ours = [each.shares[index] - 1 for each in own]
        eager_error = max((each.errors[index] for one in others for each in one), default=0.0)
        worst = recurring_error([each.errors[index] for each in own])
        errors.append(margin_of(what, name, worst, SINGLE_FACTOR * max(floor, eager_error), 1.0))
        within = _share_allowed(ours, [[each.shares[index] - 1 for each in one] for one in others], share_floor)
        shares.append(margin_of(f"share of the {what}", name, abs(fmean(ours)), within, 1.0))
        if eager_error > LARGE_EAGER_ERROR:
            sizes.append(_size(f"size of the {what}", name, own, others, index))
    return [nearest(margins) for margins in (errors, shares, sizes) if margins]


def _outliers(found: ErrorSamples, names: Sequence[str]) -> list[Margin]:
    """The tensor whose share differs from eager's, step by step, by much more than the shares of other tensors do.

    In bf16, eager itself may lose 1 % of a layer, so that a layer which is 1 % too large may even be nearer to the
    reference. But a candidate that only rounds differently does so in many layers.
    """
    if not found.yardsticks or not names:
        return []
    apart = [
        [
            ours.gradients.shares[index] - theirs.gradients.shares[index]
            for ours, theirs in zip(found.candidate, found.yardsticks[0], strict=True)
        ]
        for index in range(len(names))
    ]
    means = [abs(fmean(each)) for each in apart]
    usual = OUTLIER_FACTOR * median(means)
    return [
        nearest(
            [
                margin_of(
                    "share, beside eager's, of the gradient of",
                    name,
                    mean,
                    max(OUTLIER_FLOOR, usual, SHARE_SPREADS * pstdev(each) / math.sqrt(len(each))),
                    1.0,
                )
                for name, mean, each in zip(names, means, apart, strict=True)
            ]
        )
    ]


def _share_allowed(ours: Sequence[float], yardsticks: Sequence[Sequence[float]], floor: float) -> float:
    """Allowed error of the mean share: the worst yardstick's mean, plus half of it or the standard error of the means.

    The candidate's own spread counts, too: late in a training gradients are small, and the effect of rounding on their
    sums differs from step to step (last norm of a correct nanoGPT on an H100: 0.2 to 4.2 % within 20 steps). But a
    gradient that is wrong now and then must not widen its own limit: its spread is a robust one, and it is capped.
    """
    if not any(yardsticks):
        return floor
    most = max(abs(fmean(one)) for one in yardsticks)
    theirs, own = (SHARE_SPREADS * each / math.sqrt(len(ours)) for each in (_deviation(yardsticks), _robust(ours)))
    return most + max(floor, most / 2, theirs, min(math.hypot(theirs, own), OWN_SHARE * floor))


def _deviation(yardsticks: Sequence[Sequence[float]]) -> float:
    """Pooled standard deviation within the yardsticks."""
    return math.sqrt(fmean(map(pvariance, yardsticks)))


def _robust(values: Sequence[float]) -> float:
    """The standard deviation estimated from the median absolute deviation, which is robust against outliers."""
    middle = median(values)
    return MAD_TO_DEVIATION * median(abs(value - middle) for value in values)


def _size(
    what: str, name: str, own: Sequence[TensorErrors], others: Sequence[Sequence[TensorErrors]], index: int
) -> Margin:
    """Where eager loses the direction of a gradient by rounding, its norm must be eager's within a factor of 2."""
    ours = math.sqrt(fmean(each.sizes[index] ** 2 for each in own))
    eager = math.sqrt(fmean(each.sizes[index] ** 2 for one in others for each in one))
    times = max(ours, 0.1) / max(eager, 0.1)
    return margin_of(what, name, max(times, 1 / times), SIZE_FACTOR, 1.0)


def window_errors(ours: Sequence[float], theirs: Sequence[float], window: int) -> list[float]:
    """Error of the mean loss of each window of steps, relative to the mean loss of all steps.

    Steps whose loss is not finite on either side are left out; a window without any step has no error.
    """
    pairs = [(a, b) for a, b in zip(ours, theirs, strict=False)]
    known = [abs(b) for _, b in pairs if math.isfinite(b)]
    scale = fmean(known) if known else 1.0
    errors = []
    for begin in range(0, len(pairs), window):
        part = [(a, b) for a, b in pairs[begin : begin + window] if math.isfinite(a) and math.isfinite(b)]
        off = abs(fmean(a for a, _ in part) - fmean(b for _, b in part)) if part else 0.0
        errors.append(ratio(off, max(scale, 1e-12)))
    return errors


def lasting(errors: Sequence[float]) -> list[float]:
    """The middle error of each IN_A_ROW windows in a row; of all windows, where there are fewer."""
    last = max(0, len(errors) - IN_A_ROW)
    return [median_low(errors[begin : begin + IN_A_ROW]) for begin in range(last + 1)] if errors else []


def judge_windows(ours: Sequence[float], yardsticks: Sequence[Sequence[float]]) -> Margin:
    """Judges errors that last by a multiple of the yardsticks' largest up to then; their later errors do not count.

    Trainings that differ only by rounding drift apart exponentially, and when they do is a matter of chance.
    """
    theirs = [lasting(one) for one in yardsticks]
    margins, most = [], 0.0
    for index, error in enumerate(lasting(ours)):
        most = max([most, *(one[index] for one in theirs if index < len(one))])
        within = max(DRIFT_FLOOR, DRIFT_FACTOR * most)
        margins.append(margin_of("mean loss of steps", f"from window {index + 1} on", error, within, 1.0))
    return nearest(margins)
