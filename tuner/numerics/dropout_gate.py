"""A step that draws random numbers, judged with them on: how much its gradients vary, and whether they derive its loss.

Compiled code draws other masks than eager code does, so no step is compared with one of another run. All steps here
begin from the same weights and batch and differ in their seed: how a gradient varies over seeds tells the keep rate of
each dropout around it, and with the seed held the loss is a function whose derivative along a direction must be the
gradient's: a backward that draws masks anew gives another function's.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import fmean, stdev
from typing import Any, Final

import torch

from kitsune.long_proof import Margin
from kitsune.techniques.technique import Tolerance
from kitsune.workload import Workload
from tuner.building.arms import Rates
from tuner.numerics.trace_errors import YARDSTICK_FACTOR, allowed, margin_of, nearest
from tuner.numerics.training_trace import held

#: Draws of a group: each gives one estimate of the variance, and groups tell how far estimates lie apart.
GROUP: Final = 8
#: Standard errors. Of 8 groups, chance exceeds 8 of them once in 10^5 tensors.
SPREADS: Final = 8.0
MEAN_SPREADS: Final = 5.0
#: Of a count of elements that are dropped independently.
COUNT_SPREADS: Final = 6.0
#: A part of the variance that nobody asks for.
VARIANCE_FLOOR: Final = 0.15
#: Of its fair share of all variance: a tensor that varies by less, as a bias before batch norm, does so by rounding.
LEAST_VARIANCE: Final = 1e-3
#: The part of the loss by which it is moved along a direction, by the format of the candidate: rounding of the loss
#: must be small beside it, and the curvature too.
REACH: Final = {"fp32": 3e-3, "tf32": 1e-2, "fp16": 1e-2, "bf16": 3e-2}
SLOPE_FLOOR: Final = {"fp32": 1e-2, "tf32": 2e-2, "fp16": 2e-2, "bf16": 3e-2}
#: Of one direction alone, over the floor of their sum.
SINGLE_SLOPE: Final = 5.0


class Runner:
    """A step on its own workload, put back to the same weights and buffers before each run."""

    def __init__(self, workload: Workload, step: Callable[[Any, Any], torch.Tensor]) -> None:
        self.workload = workload
        self._step = step
        self.parameters = list(workload.model.parameters())
        self._buffers = list(workload.model.buffers())
        Rates(workload.optimizer).scale(0.0)

    def begin(self, parameters: Sequence[torch.Tensor], buffers: Sequence[torch.Tensor]) -> None:
        self._begin = [held(each) for each in parameters]
        self._begin_buffers = [held(each) for each in buffers]

    def run(self, seed: int, along: Sequence[torch.Tensor | None] = (), distance: float = 0.0) -> float:
        """The loss with these random numbers, moved by so much along a direction; gradients stay in `p.grad`."""
        with torch.no_grad():
            for parameter, value in zip(self.parameters, self._begin, strict=True):
                parameter.copy_(value)
            for buffer, value in zip(self._buffers, self._begin_buffers, strict=True):
                buffer.copy_(value)
            for parameter, direction in zip(self.parameters, along, strict=bool(along)):
                if direction is not None:
                    parameter.add_(direction.to(parameter.dtype), alpha=distance)
        torch.manual_seed(seed)
        return float(self._step(*self.workload.batch))

    def gradients(self) -> list[torch.Tensor | None]:
        return [None if each.grad is None else each.grad.detach() for each in self.parameters]


@dataclass(frozen=True, slots=True)
class Spread:
    """Of many draws: the losses, the mean gradient, and for each group and tensor the variance of its gradient."""

    losses: Sequence[float]
    means: Sequence[torch.Tensor | None]
    variances: Sequence[Sequence[float]]

    def variance(self, index: int) -> float:
        return fmean(group[index] for group in self.variances)

    def error(self, index: int) -> float:
        """The standard error of the variance."""
        values = [group[index] for group in self.variances]
        return stdev(values) / math.sqrt(len(values))


def spread_of(runner: Runner, draws: int, seed: int) -> Spread:
    """`draws` is at least two groups. Draws whose gradients overflowed are left out."""
    losses: list[float] = []
    totals: list[torch.Tensor | None] = [None] * len(runner.parameters)
    variances = []
    for group in range(draws // GROUP):
        sums: list[torch.Tensor | None] = [None] * len(runner.parameters)
        squares = torch.zeros(len(runner.parameters), dtype=torch.float64)
        count = 0
        for draw in range(GROUP):
            loss = runner.run(seed + group * GROUP + draw)
            gradients = runner.gradients()
            sizes = torch.tensor(_sizes(gradients), dtype=torch.float64)
            if not math.isfinite(loss) or not bool(torch.isfinite(sizes).all()):
                continue
            count += 1
            losses.append(loss)
            squares += sizes
            _add(sums, gradients)
        if count < 2:
            continue
        mean = torch.tensor(_sizes(sums), dtype=torch.float64) / count
        variances.append(((squares - mean) / (count - 1)).clamp(min=0.0).tolist())
        _add(totals, sums)
    means = [None if total is None else total / max(1, len(losses)) for total in totals]
    return Spread(losses, means, variances)


def _add(sums: list[torch.Tensor | None], gradients: Sequence[torch.Tensor | None]) -> None:
    for index, gradient in enumerate(gradients):
        if gradient is not None:
            before = sums[index]
            sums[index] = gradient.double() if before is None else before.add_(gradient)


def _sizes(tensors: Sequence[torch.Tensor | None]) -> list[float]:
    """Squared norms; one wait for the device."""
    zero = torch.zeros((), dtype=torch.float64)
    device = next((each.device for each in tensors if each is not None), zero.device)
    found = [
        zero.to(device) if each is None else torch.linalg.vector_norm(each.abs(), dtype=torch.float64) ** 2
        for each in tensors
    ]
    sizes: list[float] = torch.stack(found).tolist()
    return sizes


def judge_spread(ours: Spread, theirs: Spread, floor: Tolerance, names: Sequence[str]) -> list[Margin]:
    """Whether the candidate's random numbers are those of the step as given: by variance, mean loss, mean gradient."""
    if min(len(ours.variances), len(theirs.variances)) < 2:
        return []
    margins = [_mean_loss(ours, theirs, floor)]
    variances, means = [], []
    elements = [0 if mean is None else mean.numel() for mean in theirs.means]
    density = sum(map(theirs.variance, range(len(names)))) / max(1, sum(elements))
    for index, name in enumerate(names):
        size = _sizes([theirs.means[index]])[0]
        one, other = ours.variance(index), theirs.variance(index)
        if max(one, other) <= LEAST_VARIANCE * density * elements[index]:
            continue
        within = max(VARIANCE_FLOOR * other, SPREADS * math.hypot(ours.error(index), theirs.error(index)))
        variances.append(margin_of("variance over seeds of the gradient of", name, abs(one - other), within, other))
        apart = math.sqrt(_distance(ours.means[index], theirs.means[index]))
        chance = math.sqrt(one / len(ours.losses) + other / len(theirs.losses))
        allowance = MEAN_SPREADS * chance + YARDSTICK_FACTOR * floor.gradient * math.sqrt(size)
        means.append(margin_of("mean over seeds of the gradient of", name, apart, allowance, math.sqrt(size)))
    return margins + [nearest(each) for each in (variances, means) if each]


def _mean_loss(ours: Spread, theirs: Spread, floor: Tolerance) -> Margin:
    one, other = fmean(ours.losses), fmean(theirs.losses)
    chance = math.hypot(*(stdev(each.losses) / math.sqrt(len(each.losses)) for each in (ours, theirs)))
    within = MEAN_SPREADS * chance + YARDSTICK_FACTOR * floor.loss * abs(other)
    return margin_of("mean loss over seeds", "", abs(one - other), within, abs(other))


def _distance(a: torch.Tensor | None, b: torch.Tensor | None) -> float:
    if a is None or b is None:
        return _sizes([b if a is None else a])[0]
    return _sizes([a - b])[0]


@dataclass(frozen=True, slots=True)
class Slope:
    """Along one direction: what the loss really does, and what the gradient says."""

    real: float
    told: float

    @property
    def off(self) -> float:
        return self.real / self.told - 1 if self.told else 0.0


def slopes_of(runner: Runner, count: int, seed: int, precision: str) -> list[Slope]:
    """Along seeded random directions, the gradient's with its elements at random sizes, each by a seed of its own.

    Central differences, whose distance moves the loss by a part that the format of the candidate can tell.
    """
    slopes = []
    for index in range(count):
        loss = runner.run(seed + index)
        gradients = runner.gradients()
        direction = _direction(gradients, seed + index)
        told = _along(gradients, direction)
        if not (math.isfinite(loss) and math.isfinite(told)) or told <= 0:
            continue
        distance = REACH[precision] * max(abs(loss), 1e-6) / told
        up = runner.run(seed + index, direction, distance)
        down = runner.run(seed + index, direction, -distance)
        if math.isfinite(up) and math.isfinite(down):
            slopes.append(Slope((up - down) / (2 * distance), told))
    return slopes


def repeats(runner: Runner, seed: int, precision: str) -> bool:
    """Whether a seed fixes the step's random numbers: those of NumPy, say, are not torch's to seed."""
    first, again = runner.run(seed), runner.run(seed)
    return abs(again - first) <= 0.1 * REACH[precision] * abs(first)


def _direction(gradients: Sequence[torch.Tensor | None], seed: int) -> list[torch.Tensor | None]:
    device = next((each.device for each in gradients if each is not None), torch.device("cpu"))
    generator = torch.Generator(device).manual_seed(seed)
    return [
        None
        if each is None
        else each.float() * 2 * torch.rand(each.shape, generator=generator, device=device)
        if not each.is_complex()
        else each.clone()
        for each in gradients
    ]


def _along(gradients: Sequence[torch.Tensor | None], direction: Sequence[torch.Tensor | None]) -> float:
    products = [
        (a.conj() * b).real.sum(dtype=torch.float64) if a.is_complex() else (a * b).sum(dtype=torch.float64)
        for a, b in zip(gradients, direction, strict=True)
        if a is not None and b is not None
    ]
    return float(torch.stack(products).sum()) if products else 0.0


def judge_slopes(ours: Sequence[Slope], theirs: Sequence[Slope], precision: str) -> list[Margin]:
    """The mean over all directions, and the one that is furthest off; beside those of eager in the same precision."""
    floor = SLOPE_FLOOR[precision]
    off, own = [slope.off for slope in ours], [slope.off for slope in theirs]
    spread = stdev(own) / math.sqrt(len(ours)) if len(own) > 1 else 0.0
    mean = max(allowed(abs(fmean(own)) if own else 0.0, floor), MEAN_SPREADS * spread)
    single = allowed(max(map(abs, own), default=0.0), SINGLE_SLOPE * floor)
    return [
        margin_of("mean derivative along directions", "", abs(fmean(off)), mean, 1.0),
        margin_of("derivative along a direction", "", max(map(abs, off)), single, 1.0),
    ]


def given_rates(workload: Workload) -> dict[str, float]:
    """Of each dropout module of the step as given what part it sets to zero."""
    return {
        name: module.p
        for name, module in workload.model.named_modules()
        if isinstance(module, torch.nn.Dropout) and module.training and 0 < module.p < 1
    }


def keep_rates(runner: Runner, given: Mapping[str, float], draws: int, seed: int) -> list[Margin]:
    """What each dropout module sets to zero, counted, beside what was given. For a step that calls its modules."""
    modules = {name: module for name, module in runner.workload.model.named_modules() if name in given}
    counts = {name: [0.0, 0.0] for name in modules}
    hooks = [module.register_forward_hook(partial(_count, counts[name])) for name, module in modules.items()]
    try:
        for draw in range(draws):
            runner.run(seed + draw)
    finally:
        for hook in hooks:
            hook.remove()
    margins = []
    for name, (dropped, seen) in counts.items():
        if seen:
            rate = given[name]
            chance = COUNT_SPREADS * math.sqrt(rate * (1 - rate) / seen)
            margins.append(margin_of("rate of the dropout", name, abs(dropped / seen - rate), chance, 1.0))
    return [nearest(margins)] if margins else []


def _count(counts: list[float], _: torch.nn.Module, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    there = inputs[0] != 0
    counts[0] += float(((output == 0) & there).sum())
    counts[1] += float(there.sum())
