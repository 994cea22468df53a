"""Two steps from one and the same state in, their differences tensor by tensor out; and the verdict over many steps.

A reference is put where the candidate is, at many moments of its training, so that trajectories that drift apart are
never compared. Beside each error stands the tensor's *share*: how much of the reference's gradient is in the
candidate's, <ours, theirs> / <theirs, theirs>. Rounding that points anywhere leaves it at 1, to the square root of the
number of elements better than the error is small; a layer's gradient that is 1 % too large does not, in bf16 either.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean, median, pstdev, pvariance
from typing import Final

import torch

from kitsune.long_proof import Margin
from kitsune.techniques.technique import Tolerance
from tuner.numerics.distance import Tensors
from tuner.numerics.trace_errors import LOST, SINGLE_FACTOR, SIZE_FACTOR, allowed, margin_of, nearest

#: What a share may be off on average over the steps, beyond the yardsticks: below it nobody asks.
SHARE_FLOOR: Final = 2e-3
#: Beside it, of what the format's gradients may be off: 0.5 % in bf16. Compiled code keeps digits where eager rounds
#: them, at every moment alike (a right nanoGPT on an H100: off by 0.46 %).
SHARE_OF_FORMAT: Final = 0.1
#: Standard errors of the mean share. Among 1000 tensors of a right candidate the largest is 3 to 4.
SHARE_SPREADS: Final = 5.0
#: Times the floor, for what lies between the candidate's own moments: 2 % in bf16.
OWN_SHARE: Final = 4.0
MAD_TO_DEVIATION: Final = 1.4826  # of normally distributed values
#: Of how far shares lie from eager's: what nobody asks for, and how many times the median over all tensors.
OUTLIER_FLOOR: Final = 5e-3
OUTLIER_FACTOR: Final = 10.0
#: A tensor whose true gradient is 0, as of a bias before batch norm, is measured by this part of its fair share.
LEAST: Final = 0.01
#: Among fewer moments every one counts; a rare one may be off by so many times what is allowed.
FEW: Final = 6
RARE: Final = 30.0
#: Of the mean loss of a window. What is wrong by less shows where a reference begins from the same state.
DRIFT_FLOOR: Final = 1e-2
DRIFT_FACTOR: Final = 10.0


@dataclass(frozen=True, slots=True)
class Taken:
    """One step from a given state: its loss, its gradients, and what it added to the buffers of real numbers."""

    loss: float
    gradients: Tensors
    buffers: Sequence[torch.Tensor]
    counters: Sequence[torch.Tensor] = ()

    def is_finite(self) -> bool:
        return math.isfinite(self.loss) and all(
            bool(torch.isfinite(gradient).all()) for gradient in self.gradients if gradient is not None
        )


@dataclass(frozen=True, slots=True)
class Parts:
    """Of each tensor: its error, its share, and its size, all relative to the reference's."""

    errors: Sequence[float]
    shares: Sequence[float]
    sizes: Sequence[float]


@dataclass(frozen=True, slots=True)
class Reading:
    """One step beside the reference's from the same state."""

    loss: float
    whole: float
    gradients: Parts
    buffers: Parts
    counters_agree: bool = True


def reading(ours: Taken, theirs: Taken) -> Reading:
    pairs = list(zip(ours.gradients, theirs.gradients, strict=True))
    found = [_products(a, b) for a, b in pairs]
    elements = [0 if a is None and b is None else (b if a is None else a).numel() for a, b in pairs]  # type: ignore[union-attr]
    total = sum(theirs for _, theirs, _, _ in found)
    density = math.sqrt(total / max(1, sum(elements)))
    least = [LEAST * density * math.sqrt(count) for count in elements]
    wrong = math.sqrt(sum(error for _, _, _, error in found))
    return Reading(
        loss=abs(ours.loss - theirs.loss) / max(abs(theirs.loss), 1e-12),
        whole=_over(wrong, math.sqrt(total)),
        gradients=_parts(found, least),
        buffers=_parts(
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
        size = float(torch.dot(_some(ours, theirs), _some(ours, theirs)))
        return (0.0, size, 0.0, size) if ours is None else (size, 0.0, 0.0, size)
    wrong = ours - theirs
    products = torch.stack([torch.dot(ours, ours), torch.dot(theirs, theirs), torch.dot(ours, theirs)])
    found: list[float] = torch.cat([products, torch.dot(wrong, wrong)[None]]).tolist()
    return found[0], found[1], found[2], found[3]


def _some(a: torch.Tensor | None, b: torch.Tensor | None) -> torch.Tensor:
    found = b if a is None else a
    assert found is not None
    return found


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    real = torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor
    return real.detach().double().reshape(-1)


def _parts(found: Sequence[_Products], least: Sequence[float]) -> Parts:
    errors, shares, sizes = [], [], []
    for (own, theirs, both, wrong), floor in zip(found, least, strict=True):
        size = max(math.sqrt(theirs), floor)
        errors.append(_over(math.sqrt(wrong), size))
        shares.append(1 + (both - theirs) / size**2 if size > 0 else (1.0 if own == 0 else 0.0))
        sizes.append(_over(math.sqrt(own), size))
    return Parts(errors, shares, sizes)


def _over(error: float, size: float) -> float:
    if error == 0:
        return 0.0
    return min(error / size, 1e9) if size > 0 else 1e9


@dataclass(frozen=True, slots=True)
class Readings:
    """Of the same moments: the candidate's, and those of each yardstick, eager with the candidate's precision."""

    candidate: Sequence[Reading]
    yardsticks: Sequence[Sequence[Reading]]

    def every(self, value: Callable[[Reading], float]) -> float:
        """The largest among all yardsticks and moments: at one of them eager's own error may be small by luck."""
        return max((value(each) for one in self.yardsticks for each in one), default=0.0)


def judge_readings(found: Readings, floor: Tolerance, names: Sequence[str], buffers: Sequence[str]) -> list[Margin]:
    """Of each thing that is compared the margin nearest to its limit. There is one reading at least."""
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


def lasting(errors: Sequence[float]) -> float:
    """The error that recurs: a ReLU near 0, or a tie in a maximum, may fall otherwise by rounding at a rare moment.

    One moment in sixteen, and one at least, may be off by 30 times as much.
    """
    ordered = sorted(errors)
    if len(ordered) < FEW:
        return ordered[-1]
    return max(ordered[-1 - max(1, len(ordered) // 16)], ordered[-1] / RARE)


def _whole(found: Readings, what: str, value: Callable[[Reading], float], floor: float) -> Margin:
    error = lasting([value(each) for each in found.candidate])
    return margin_of(what, "", error, allowed(found.every(value), floor), 1.0)


def _tensors(
    found: Readings,
    what: str,
    parts: Callable[[Reading], Parts],
    floor: float,
    share_floor: float,
    names: Sequence[str],
) -> list[Margin]:
    errors, shares, sizes = [], [], []
    for index, name in enumerate(names):
        own = [parts(each) for each in found.candidate]
        others = [[parts(each) for each in one] for one in found.yardsticks]
        ours = [each.shares[index] - 1 for each in own]
        lost = max((each.errors[index] for one in others for each in one), default=0.0)
        worst = lasting([each.errors[index] for each in own])
        errors.append(margin_of(what, name, worst, SINGLE_FACTOR * max(floor, lost), 1.0))
        within = _share_allowed(ours, [[each.shares[index] - 1 for each in one] for one in others], share_floor)
        shares.append(margin_of(f"share of the {what}", name, abs(fmean(ours)), within, 1.0))
        if lost > LOST:
            sizes.append(_size(f"size of the {what}", name, own, others, index))
    return [nearest(margins) for margins in (errors, shares, sizes) if margins]


def _outliers(found: Readings, names: Sequence[str]) -> list[Margin]:
    """A tensor whose share leaves eager's by much more than those of the other tensors do, moment by moment.

    What eager itself loses of a layer in bf16 may be 1 %, so a layer that is 1 % too large may even come nearer to the
    reference. But a candidate that rounds otherwise does so in many layers.
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
    """The worst yardstick's mean, and beside it half of it again, or what chance leaves between two means of so many.

    Of the candidate's mean too: late in a training gradients are small, and what rounding leaves of their sums differs
    from moment to moment, as in a right nanoGPT's last norm on an H100: 0.2 to 4.2 % within 20 steps. But a gradient
    that is wrong now and then must not excuse itself: its spread is that of most moments, and counts to a limit.
    """
    if not any(yardsticks):
        return floor
    most = max(abs(fmean(one)) for one in yardsticks)
    theirs, own = (SHARE_SPREADS * each / math.sqrt(len(ours)) for each in (_deviation(yardsticks), _robust(ours)))
    return most + max(floor, most / 2, theirs, min(math.hypot(theirs, own), OWN_SHARE * floor))


def _deviation(yardsticks: Sequence[Sequence[float]]) -> float:
    """Standard deviation within them."""
    return math.sqrt(fmean(map(pvariance, yardsticks)))


def _robust(values: Sequence[float]) -> float:
    """The standard deviation by the median absolute deviation, which a few outliers leave as it is."""
    middle = median(values)
    return MAD_TO_DEVIATION * median(abs(value - middle) for value in values)


def _size(what: str, name: str, own: Sequence[Parts], others: Sequence[Sequence[Parts]], index: int) -> Margin:
    """Where eager loses the direction of a gradient, its size must still be eager's, within a factor of two."""
    ours = math.sqrt(fmean(each.sizes[index] ** 2 for each in own))
    eager = math.sqrt(fmean(each.sizes[index] ** 2 for one in others for each in one))
    ratio = max(ours, 0.1) / max(eager, 0.1)
    return margin_of(what, name, max(ratio, 1 / ratio), SIZE_FACTOR, 1.0)


def window_errors(ours: Sequence[float], theirs: Sequence[float], window: int) -> list[float]:
    """By how much the mean loss of each window of steps is off, relative to the mean loss of all.

    A step that either side skipped is not a number and is left out; windows without any step count as equal.
    """
    pairs = [(a, b) for a, b in zip(ours, theirs, strict=False)]
    known = [abs(b) for _, b in pairs if math.isfinite(b)]
    scale = fmean(known) if known else 1.0
    errors = []
    for begin in range(0, len(pairs), window):
        part = [(a, b) for a, b in pairs[begin : begin + window] if math.isfinite(a) and math.isfinite(b)]
        off = abs(fmean(a for a, _ in part) - fmean(b for _, b in part)) if part else 0.0
        errors.append(_over(off, max(scale, 1e-12)))
    return errors


def judge_windows(ours: Sequence[float], yardsticks: Sequence[Sequence[float]]) -> Margin:
    """Of a window is allowed what the yardsticks were off up to there, many times, and not what they are off later.

    Trainings that differ by rounding drift apart exponentially, sooner or later by chance.
    """
    margins, most = [], 0.0
    for index, error in enumerate(ours):
        most = max([most, *(one[index] for one in yardsticks if index < len(one))])
        within = max(DRIFT_FLOOR, DRIFT_FACTOR * most)
        margins.append(margin_of("mean loss of steps", f"in window {index + 1}", error, within, 1.0))
    return nearest(margins)
