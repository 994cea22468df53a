"""Errors between recorded training runs, and the verdict of the numerics gate."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from kitsune.long_proof import LARGEST_ERROR, Margin
from kitsune.plan import Numerics
from kitsune.techniques.technique import Tolerance
from tuner.numerics.distance import HOST, Lengths, Ruler, Tensors

YARDSTICK_FACTOR = 3.0  # how many times eager's own error in the same dtype is allowed
# A single tensor may be this many times worse than all together. Without a check of single tensors, a missing or
# doubled gradient would not be noticed.
SINGLE_FACTOR = 10.0
# In the first steps, before trajectories drift apart, a larger error is no rounding, even if eager's own is as large.
LOSS_CEILING = 0.1
GRADIENT_CEILING = 0.95  # an error of 1 would be no gradient at all
# ResNet-50 as initialised, bf16 autocast against fp64: all gradients together differ by 1.31, the norm of each is 0.75
# to 1.26 times as large. Where eager itself loses so much, a missing or too large gradient is still found by its norm.
LARGE_EAGER_ERROR = 0.5
EAGER_ERROR_FACTOR = 1.5
TOTAL_FACTOR = 1.5
SIZE_FACTOR = 2.0
LEAST_SIZE = 0.1
EARLY_STEPS = 2
LATE_STEPS = 3


@dataclass(frozen=True, slots=True)
class TraceStep:
    """Loss and gradients of one step."""

    loss: float
    gradients: Tensors

    def first_not_finite(self, names: Sequence[str]) -> str | None:
        """What is NaN or infinite, or None."""
        if not math.isfinite(self.loss):
            return f"the loss is {self.loss}"
        for name, gradient in zip(names, self.gradients, strict=True):
            if gradient is not None and not torch.isfinite(gradient).all():
                return f"the gradient of {name} is not finite"
        return None


@dataclass(slots=True)
class Trace:
    """A training run: snapshots of some steps, the steps whose update was skipped for an overflow, and the final
    tensors. `early` are its first steps that were not skipped."""

    snapshots: dict[int, TraceStep] = field(default_factory=dict)
    skipped: set[int] = field(default_factory=set)
    steps: int = 0
    parameters: Sequence[torch.Tensor] = ()
    buffers: Sequence[torch.Tensor] = ()

    @property
    def early(self) -> list[int]:
        return sorted(self.snapshots.keys() - self.skipped)[:EARLY_STEPS]


@dataclass(frozen=True, slots=True)
class Errors:
    """Errors of a trace relative to a reference: by step, at the end, and (early steps only) of each gradient.

    `size` is the norm of all gradients relative to the reference's. `sizes` are the norms of the single gradients,
    relative to their fair share of the reference's norm (as if all elements were equal). Both are the largest of the
    early steps, the last of which is `last_early`.
    """

    loss: Mapping[int, float]
    gradient: Mapping[int, float]
    singles: Sequence[float]
    size: float
    sizes: Sequence[float]
    parameter: float
    buffer: float
    last_early: int = EARLY_STEPS - 1


@dataclass(frozen=True, slots=True)
class ModelState:
    """Copies of a model's parameters and buffers at one moment."""

    parameters: Sequence[torch.Tensor]
    buffers: Sequence[torch.Tensor]


@dataclass(frozen=True, slots=True)
class TrainingStart(ModelState):
    """The state that all traces start from, with the names of the parameters."""

    names: Sequence[str]


def errors_between(trace: Trace, reference: Trace, start: TrainingStart, ruler: Ruler = HOST) -> Errors:
    """‖trace - reference‖ / ‖reference‖; for parameters and buffers relative to the norm of the reference's update.

    Steps that an overflow skipped in the trace are left out.
    """
    common = sorted((trace.snapshots.keys() & reference.snapshots.keys()) - trace.skipped)
    pairs = {step: (trace.snapshots[step], reference.snapshots[step]) for step in common}
    found = {step: ruler.lengths(ours.gradients, theirs.gradients) for step, (ours, theirs) in pairs.items()}
    early = [found[step] for step in trace.early if step in found]
    scale = sum(abs(reference.loss) for _, reference in pairs.values()) / max(1, len(pairs))
    return Errors(
        loss={step: ratio(abs(ours.loss - theirs.loss), scale) for step, (ours, theirs) in pairs.items()},
        gradient={step: ratio(lengths.distance, lengths.their_size) for step, lengths in found.items()},
        singles=_largest_of(map(_singles, early), len(start.names)),
        size=max((ratio(lengths.size, lengths.their_size) for lengths in early), default=1.0),
        sizes=_largest_of(map(_sizes, early), len(start.names)),
        parameter=_drift(trace.parameters, reference.parameters, start.parameters, ruler),
        buffer=_buffer_error(trace.buffers, reference.buffers, start.buffers, ruler),
        last_early=max(trace.early, default=EARLY_STEPS - 1),
    )


def _drift(ours: Tensors, theirs: Tensors, start: Tensors, ruler: Ruler) -> float:
    return ratio(ruler.distance(ours, theirs), ruler.distance(theirs, start))


def _buffer_error(
    ours: Sequence[torch.Tensor], theirs: Sequence[torch.Tensor], start: Sequence[torch.Tensor], ruler: Ruler
) -> float:
    """Floating-point buffers are compared like parameters; all others, such as counters, must be equal."""
    real = [index for index, tensor in enumerate(theirs) if tensor.is_floating_point()]
    exact = [index for index in range(len(theirs)) if index not in real]
    if ruler.distance([ours[index] for index in exact], [theirs[index] for index in exact]) > 0:
        return LARGEST_ERROR
    a, b, before = ([tensors[index] for index in real] for tensors in (ours, theirs, start))
    return _drift(a, b, before, ruler)


def margin_of(what: str, where: str, error: float, allowed: float, size: float) -> Margin:
    """A margin with `error` and `allowed` relative to `size`, the norm of the quantity; absolute if that is 0."""
    over = size if size > 0 and math.isfinite(size) else 1.0
    return Margin(what=what, where=where[:1000], error=_bounded(error / over), allowed=_bounded(allowed / over))


def _bounded(value: float) -> float:
    return min(value, LARGEST_ERROR) if math.isfinite(value) else LARGEST_ERROR


def nearest(margins: Sequence[Margin]) -> Margin:
    """The margin that is nearest to its limit or exceeds it most. Raises ValueError for an empty sequence."""
    return max(margins, key=lambda margin: margin.used)


def judge(
    candidate: Errors, yardstick: Errors, floor: Tolerance, names: Sequence[str], steps: int, note: str = ""
) -> tuple[Numerics, str | None]:
    """The numbers to publish, and the reason why the candidate is wrong, or None.

    The limit is the larger of the floor and three times the yardstick's own error in the same part of the run.
    """
    eager_error = max(
        (error for step, error in yardstick.gradient.items() if step <= candidate.last_early), default=0.0
    )
    if eager_error > LARGE_EAGER_ERROR:
        change = f"{eager_error:.2g} of their size"
        said = f"this precision alone changes the first gradients by {change}: also sizes were compared"
        note = "; ".join(filter(None, [note, said]))
    last, ceiling = candidate.last_early, max(GRADIENT_CEILING, EAGER_ERROR_FACTOR * eager_error)
    loss = _worst(candidate.loss, yardstick.loss, floor.loss, LOSS_CEILING, last)
    gradient = _worst(candidate.gradient, yardstick.gradient, floor.gradient, ceiling, last)
    parameter_allowed = allowed(yardstick.parameter, floor.parameter)
    buffer_allowed = allowed(yardstick.buffer, floor.parameter)
    numerics = Numerics(
        steps=steps,
        loss_error=loss.error,
        gradient_error=gradient.error,
        parameter_error=candidate.parameter,
        loss_allowed=loss.allowed,
        gradient_allowed=gradient.allowed,
        parameter_allowed=parameter_allowed,
        note=note,
    )
    for what, worst in (("loss", loss), ("gradients", gradient)):
        if worst.error > worst.allowed:
            return numerics, _wrong(f"{what} at step {worst.step}", worst.error, worst.allowed)
    for what, error, limit in (
        (f"parameters after {steps} steps", candidate.parameter, parameter_allowed),
        (f"buffers after {steps} steps", candidate.buffer, buffer_allowed),
    ):
        if error > limit:
            return numerics, _wrong(what, error, limit)
    wrong = _wrong_single(candidate, yardstick, floor, names)
    return numerics, wrong or (_wrong_size(candidate, yardstick, names) if eager_error > LARGE_EAGER_ERROR else None)


def allowed(yardstick: float, floor: float, ceiling: float = LARGEST_ERROR) -> float:
    return max(floor, min(YARDSTICK_FACTOR * yardstick, ceiling))


@dataclass(frozen=True, slots=True)
class _Worst:
    step: int
    error: float
    allowed: float


def _worst(
    errors: Mapping[int, float], own: Mapping[int, float], floor: float, ceiling: float, last_early: int
) -> _Worst:
    """The step whose error is nearest to its limit or exceeds it most.

    The yardstick's error is the largest of a part of the run (early or late): at a single step it may be small by
    chance.
    """
    worst = _Worst(0, 0.0, floor)
    for early, limit in ((True, ceiling), (False, LARGEST_ERROR)):
        part = {step: error for step, error in errors.items() if (step <= last_early) is early}
        yardstick = max((error for step, error in own.items() if (step <= last_early) is early), default=0.0)
        bound = allowed(yardstick, floor, limit)
        for step, error in part.items():
            if error / bound >= worst.error / worst.allowed:
                worst = _Worst(step, error, bound)
    return worst


def _singles(found: Lengths) -> list[float]:
    """The error of each gradient, relative to its norm, or to a hundredth of its fair share if that is larger."""
    density = found.density
    least = [0.01 * density * math.sqrt(count) for count in found.elements]
    return [ratio(apart, max(norm, fair)) for apart, norm, fair in zip(found.apart, found.theirs, least, strict=True)]


def _sizes(found: Lengths) -> list[float]:
    """The norm of each gradient, relative to its fair share of the reference's norm."""
    density = found.density
    return [ratio(norm, density * math.sqrt(count)) for norm, count in zip(found.ours, found.elements, strict=True)]


def _largest_of(steps: Iterable[Sequence[float]], count: int) -> list[float]:
    """The largest value of all steps, for each of `count` tensors."""
    return [max(values) for values in zip([0.0] * count, *steps, strict=True)]


def _wrong_size(candidate: Errors, yardstick: Errors, names: Sequence[str]) -> str | None:
    if not 1 / TOTAL_FACTOR <= candidate.size <= TOTAL_FACTOR:
        return f"gradients in the first {EARLY_STEPS} steps: {candidate.size:.2g} times the size of the reference's"
    for name, size, own in zip(names, candidate.sizes, yardstick.sizes, strict=True):
        times = max(size, LEAST_SIZE) / max(own, LEAST_SIZE)
        if not 1 / SIZE_FACTOR <= times <= SIZE_FACTOR:
            return (
                f"gradient of {name} in the first {EARLY_STEPS} steps: {times:.2g} times the size that eager gives it"
            )
    return None


def _wrong_single(candidate: Errors, yardstick: Errors, floor: Tolerance, names: Sequence[str]) -> str | None:
    for name, error, own in zip(names, candidate.singles, yardstick.singles, strict=True):
        limit = SINGLE_FACTOR * max(floor.gradient, own)
        if error > limit:
            return _wrong(f"gradient of {name} in the first {EARLY_STEPS} steps", error, limit)
    return None


def _wrong(what: str, error: float, limit: float) -> str:
    return f"{what}: relative error {error:.2e} against the reference, {limit:.2e} is allowed"


def ratio(error: float, size: float) -> float:
    if error == 0:
        return 0.0
    return _bounded(error / size) if size > 0 else LARGEST_ERROR
