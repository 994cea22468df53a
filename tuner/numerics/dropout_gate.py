"""Checks a step with its random numbers on: variance of the gradients over seeds, and directional derivatives.

Compiled code draws other masks than eager code, so single steps of two runs cannot be compared. All steps here start
from the same weights and batch and differ only in their seed. The variance of a gradient over seeds depends on the keep
rate of each dropout before it. With a fixed seed the loss is a deterministic function, and its numerical derivative
along a direction must agree with the gradient: a backward that draws new masks would give another function's gradient.
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
from tuner.numerics.trace_errors import YARDSTICK_FACTOR, ModelState, allowed, margin_of, nearest
from tuner.numerics.training_trace import load_state

#: Draws per group. Each group gives one estimate of the variance; their spread gives the error of the estimate.
GROUP: Final = 8
#: Allowed standard errors of a variance. With 8 groups, chance exceeds 8 of them in one of 10^5 tensors.
SPREADS: Final = 8.0
#: Allowed standard errors of a mean.
MEAN_SPREADS: Final = 5.0
#: Allowed standard errors of a count of elements that are dropped independently.
COUNT_SPREADS: Final = 6.0
#: Relative difference of variances that is always allowed.
VARIANCE_FLOOR: Final = 0.15
#: A tensor whose variance is below this part of its fair share (as of a bias before batch norm) varies only by
#: rounding, and is skipped.
LEAST_VARIANCE: Final = 1e-3
#: Relative change of the loss along a direction, by the candidate's format: large against the rounding of the loss,
#: small enough that the curvature does not matter.
REACH: Final = {"fp32": 3e-3, "tf32": 1e-2, "fp16": 1e-2, "bf16": 3e-2}
SLOPE_FLOOR: Final = {"fp32": 1e-2, "tf32": 2e-2, "fp16": 2e-2, "bf16": 3e-2}
#: A single direction is allowed so many times the floor of the mean.
SINGLE_SLOPE: Final = 5.0


class SeededStep:
    """A step on its own workload, reset to the same start before each run."""

    def __init__(self, workload: Workload, step: Callable[[Any, Any], torch.Tensor], start: ModelState) -> None:
        self.workload = workload
        self._step = step
        self._start = start
        self.parameters = list(workload.model.parameters())
        Rates(workload.optimizer).scale(0.0)

    def run(self, seed: int, along: Sequence[torch.Tensor | None] = (), distance: float = 0.0) -> float:
        """The loss with this seed, with the weights moved by `distance` in the direction `along`.

        Gradients stay in `p.grad`.
        """
        load_state(self.workload, self._start)
        with torch.no_grad():
            for parameter, direction in zip(self.parameters, along, strict=bool(along)):
                if direction is not None:
                    parameter.add_(direction.to(parameter.dtype), alpha=distance)
        torch.manual_seed(seed)
        return float(self._step(*self.workload.batch))

    def gradients(self) -> list[torch.Tensor | None]:
        return [None if each.grad is None else each.grad.detach() for each in self.parameters]


@dataclass(frozen=True, slots=True)
class GradientSpread:
    """Statistics of many draws: losses, mean gradients, and `variances[group][tensor]` of the gradients."""

    losses: Sequence[float]
    means: Sequence[torch.Tensor | None]
    variances: Sequence[Sequence[float]]

    def variance(self, index: int) -> float:
        return fmean(group[index] for group in self.variances)

    def error(self, index: int) -> float:
        """The standard error of the variance."""
        values = [group[index] for group in self.variances]
        return stdev(values) / math.sqrt(len(values))


def spread_of(runner: SeededStep, draws: int, seed: int) -> GradientSpread:
    """Runs `draws` seeds, at least two groups. Draws whose gradients overflowed are left out."""
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
    return GradientSpread(losses, means, variances)


def _add(sums: list[torch.Tensor | None], gradients: Sequence[torch.Tensor | None]) -> None:
    for index, gradient in enumerate(gradients):
        if gradient is not None:
            before = sums[index]
            sums[index] = gradient.double() if before is None else before.add_(gradient)


def _sizes(tensors: Sequence[torch.Tensor | None]) -> list[float]:
    """Squared norms, with one synchronization with the device."""
    zero = torch.zeros((), dtype=torch.float64)
    device = next((each.device for each in tensors if each is not None), zero.device)
    found = [
        zero.to(device) if each is None else torch.linalg.vector_norm(each.abs(), dtype=torch.float64) ** 2
        for each in tensors
    ]
    sizes: list[float] = torch.stack(found).tolist()
    return sizes


def judge_spread(ours: GradientSpread, theirs: GradientSpread, floor: Tolerance, names: Sequence[str]) -> list[Margin]:
    """Compares variance of the gradients, mean loss and mean gradient of the candidate with those of an eager step."""
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


def _mean_loss(ours: GradientSpread, theirs: GradientSpread, floor: Tolerance) -> Margin:
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
    """The derivative along one direction: measured from the loss, and predicted by the gradient."""

    measured: float
    predicted: float

    @property
    def relative_error(self) -> float:
        return self.measured / self.predicted - 1 if self.predicted else 0.0


def slopes_of(runner: SeededStep, count: int, seed: int, precision: str) -> list[Slope]:
    """Derivatives along `count` random directions (the gradient with randomly scaled elements), each with its own seed.

    Measured by central differences. The distance is chosen so that the loss changes by REACH of its size.
    """
    slopes = []
    for index in range(count):
        loss = runner.run(seed + index)
        gradients = runner.gradients()
        direction = _direction(gradients, seed + index)
        predicted = _along(gradients, direction)
        if not (math.isfinite(loss) and math.isfinite(predicted)) or predicted <= 0:
            continue
        distance = REACH[precision] * max(abs(loss), 1e-6) / predicted
        up = runner.run(seed + index, direction, distance)
        down = runner.run(seed + index, direction, -distance)
        if math.isfinite(up) and math.isfinite(down):
            slopes.append(Slope((up - down) / (2 * distance), predicted))
    return slopes


def repeats(runner: SeededStep, seed: int, precision: str) -> bool:
    """Whether a torch seed fixes the step's random numbers; it does not fix those of NumPy, for example."""
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
    """Margins of the mean error over all directions and of the largest, given those of eager in the same precision."""
    floor = SLOPE_FLOOR[precision]
    errors, own = [slope.relative_error for slope in ours], [slope.relative_error for slope in theirs]
    spread = stdev(own) / math.sqrt(len(ours)) if len(own) > 1 else 0.0
    mean = max(allowed(abs(fmean(own)) if own else 0.0, floor), MEAN_SPREADS * spread)
    single = allowed(max(map(abs, own), default=0.0), SINGLE_SLOPE * floor)
    return [
        margin_of("mean derivative along directions", "", abs(fmean(errors)), mean, 1.0),
        margin_of("derivative along a direction", "", max(map(abs, errors)), single, 1.0),
    ]


def given_rates(workload: Workload) -> dict[str, float]:
    """Name -> probability of each active dropout module of the step as given."""
    return {
        name: module.p
        for name, module in workload.model.named_modules()
        if isinstance(module, torch.nn.Dropout) and module.training and 0 < module.p < 1
    }


def keep_rates(runner: SeededStep, given: Mapping[str, float], draws: int, seed: int) -> list[Margin]:
    """Compares the counted rate of zeros of each dropout module with the given one.

    Only for a step that calls its modules, since it uses forward hooks.
    """
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
