"""Proof: does a graph do what the step does? Both run from the same state over the same batches, and every byte counts.

Where the step itself, run twice, does not come to the same bits (atomic additions), the graph may differ by four times
as much. How much that is can be a matter of luck: Adam moves a weight by the full rate also when its gradient is
nothing but noise, so one run in some differs ten thousand times as much as the others. What differs too much is
therefore looked at again.
"""

import math
import random
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final, Self

import torch

from kitsune.device.cuda_graph import tensors_in
from kitsune.errors import ErraticError
from kitsune.launches.model.recording import Recording, places_of
from kitsune.launches.model.step_state import State, as_bytes, bytes_of, equal

STEPS: Final = 3
SLACK: Final = 4.0  # how much further than the step from itself; atomics are a matter of chance
AGAIN: Final = 4  # runs to see how far the step is from itself
ROUNDING: Final = 1e-2  # relative, of what the first step returns first: its loss
BY_THE_HOST: Final = "something on the host decides what it does"
ROUGHLY: Final = (torch.float32, torch.bfloat16, torch.float16, torch.float64)  # known without another look, mostly
MORE: Final = 12  # further runs, of the step and of the graph, where that was not enough

Trace = list[torch.Tensor]


def refuted(
    recording: Recording,
    step: Callable[[], Any],
    replay: Callable[[], Any],
    inputs: Sequence[torch.Tensor],
    rates: Sequence[torch.Tensor],
    untouched: "Untouched",
) -> str | None:
    """Why `replay` is not the `step` that was recorded, or None. State and inputs end as they were.

    `inputs` are the static tensors of the batch, which is put into another order for every step; `rates` the learning
    rates, which change too. `untouched` is what no step may change. Raises ErraticError where the step differs from
    itself by more than rounding.
    """
    start = Start(recording, inputs, rates)
    try:
        expected, found = start.trace(step), start.trace(replay)
        if untouched.has_changed():
            return "an operation writes memory that it says it only reads"
        if same(expected, found):
            return None
        marks = {mark_of(expected)}
        own = [0.0] * len(expected)
        for _ in range(AGAIN):
            again = start.trace(step)
            marks.add(mark_of(again))
            own = furthest([own, distances(expected, again)])
        if not any(own):
            return f"its numbers are not those of the step, first {start.name_of(expected, found)}"
        if own[0] > ROUNDING:
            raise ErraticError(f"the step differs from itself by more than rounding: {BY_THE_HOST}")
        # Where every run of the step has numbers of its own, and all of the graph the same, no atomics are at work.
        if len(marks) == 1 + AGAIN and all(same(found, start.trace(replay)) for _ in range(AGAIN)):
            raise ErraticError(f"the step differs from itself in each run, and its launches do not: {BY_THE_HOST}")
        nearest = distances(expected, found)
        for _ in range(MORE):
            if is_as_near(nearest, own):
                return None
            own = furthest([own, distances(expected, start.trace(step))])
            nearest = list(map(min, nearest, distances(expected, start.trace(replay))))
        if is_as_near(nearest, own):
            return None
        return "its numbers are further from those of the step than the step's own from each other"
    finally:
        start.restore()


class Start:
    """Where all runs begin: a state of the training and a batch."""

    def __init__(self, recording: Recording, inputs: Sequence[torch.Tensor], rates: Sequence[torch.Tensor]) -> None:
        self._recording = recording
        self._inputs = inputs
        self._rates = rates
        self._state = State(recording)
        self._dtypes = dtypes_of(recording)
        self._given = [tensor.clone() for tensor in (*inputs, *rates)]

    def restore(self) -> None:
        self._state.restore()
        for tensor, value in zip((*self._inputs, *self._rates), self._given, strict=True):
            tensor.copy_(value)

    def trace(self, one_step: Callable[[], Any]) -> Trace:
        """What every one of some steps from here returned, and the state that they led to, as copies."""
        self.restore()
        found: Trace = []
        for number in range(STEPS):
            reorder(self._inputs, number)
            for rate in self._rates:
                rate.mul_(0.5)
            found += [tensor.clone() for tensor in tensors_in(one_step())]
        return [*found, *self._typed(State(self._recording))]

    def _typed(self, state: State) -> Trace:
        """As numbers, where all of a storage is of one dtype, so that one can say how far they are from others."""
        both = zip(state.numbers, state.values(), strict=True)
        return [copy.view(self._dtypes.get(number, torch.uint8)) for number, copy in both]

    def name_of(self, expected: Trace, found: Trace) -> str:
        """What the first difference of two traces is about."""
        at = next(at for at, (one, two) in enumerate(zip(expected, found, strict=True)) if not equal(one, two))
        graph, changed = self._recording.graph, self._state.numbers
        if (of_state := at - len(expected) + len(changed)) < 0:
            return "in what it returns"
        number = changed[of_state]
        writers = (one for one in graph.launches if any(span.storage == number for span in one.writes))
        return f"in what {next(writers).name} writes"


class Untouched:
    """Copies of what was there before the step and what, by all that its operations say, it leaves alone.

    Used as a context, around all that is run again of the step: what an operation has done in secret is put back.
    """

    def __init__(self, recording: Recording, changing: Sequence[torch.Tensor]) -> None:
        written = recording.graph.written()
        ours = {tensor.untyped_storage()._cdata for tensor in changing}
        self._storages = [
            storage
            for number, storage in recording.held.items()
            if number not in written and storage._cdata not in ours
        ]
        self._copies = [as_bytes(storage).clone() for storage in self._storages]

    def has_changed(self) -> bool:
        return any(not torch.equal(as_bytes(s), copy) for s, copy in zip(self._storages, self._copies, strict=True))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self.has_changed():
            for storage, copy in zip(self._storages, self._copies, strict=True):
                as_bytes(storage).copy_(copy)


def reorder(inputs: Sequence[torch.Tensor], number: int) -> None:
    """Rows of all tensors that share the first dimension, in the same new order: still a batch of the user's.

    Of several first dimensions that is the one of most tensors, or of labels, or the largest: others may be tables, and
    what is moved from one to another may be no index of it. A single row is halved, unless it is of integers: what is
    the number of a category is one after that, too. What never falls stays as it is: offsets must.
    """
    inputs = [tensor for tensor in inputs if tensor.numel() and not is_rising(tensor)]
    counts = Counter(tensor.shape[0] for tensor in inputs if tensor.dim())
    labels = {tensor.shape[0] for tensor in inputs if tensor.dim() == 1}
    rows = max(counts, key=lambda first: (counts[first], first in labels, first), default=0)
    if rows == 1:
        for tensor in filter(torch.Tensor.is_floating_point, inputs):
            tensor.mul_(0.5)
        return
    order = random.Random(number).sample(range(rows), rows)  # noqa: S311 - no secrets
    for tensor in inputs:
        if tensor.dim() and tensor.shape[0] == rows:
            tensor.copy_(tensor[order].clone())


def is_rising(tensor: torch.Tensor) -> bool:
    counts = not (tensor.is_floating_point() or tensor.is_complex() or tensor.dtype is torch.bool)
    return counts and tensor.dim() == 1 and bool((tensor[1:] >= tensor[:-1]).all())


def mark_of(trace: Trace) -> tuple[int, ...]:
    """Of each tensor a number that is the same for the same bits, and mostly another one for others."""
    return tuple(at_once([words_of(each).sum(dtype=torch.int64) for each in trace]))


def same(one: Trace, two: Trace) -> bool:
    return all(map(equal, one, two))


def dtypes_of(recording: Recording) -> dict[int, torch.dtype]:
    """storage -> the one dtype as which the step uses it; storages of several are left out."""
    used: defaultdict[int, set[torch.dtype]] = defaultdict(set)
    for call in recording.calls:
        for place in places_of((call.arguments, call.named, call.results)):
            used[place.storage].add(place.dtype)
    fits = {n: dtypes for n, dtypes in used.items() if len(dtypes) == 1}
    widths = {n: recording.graph.storages[n].nbytes for n in fits}
    return {n: dtype for n, (dtype,) in fits.items() if widths[n] % dtype.itemsize == 0}


def is_as_near(nearest: Sequence[float], own: Sequence[float]) -> bool:
    """Whether a graph comes as near to a run of the step as other runs of the step do, tensor by tensor."""
    return all(
        one <= SLACK * max(other, torch.finfo(torch.float32).eps) and (one == 0 or math.isfinite(other))
        for one, other in zip(nearest, own, strict=True)
    )


def furthest(runs: Iterable[Sequence[float]]) -> list[float]:
    """The largest distance of each tensor."""
    return [max(each) for each in zip(*runs, strict=True)]


def distances(one: Trace, two: Trace) -> list[float]:
    """`distance` of each pair. That looks at the GPU four times, with a dozen kernels before: only where it must."""
    pairs = list(zip(one, two, strict=True))
    rough = [at for at, (first, second) in enumerate(pairs) if first.dtype in ROUGHLY and first.numel()]
    apart = at_once([torch.linalg.vector_norm(pairs[at][0] - pairs[at][1], math.inf).double() for at in rough])
    scales = at_once([torch.linalg.vector_norm(pairs[at][0], math.inf).double() for at in rough])
    known = {at: relative(*both) for at, *both in zip(rough, apart, scales, strict=True) if is_told_by(*both)}
    rest = [at for at in range(len(pairs)) if at not in known]
    differ = at_once([(words_of(pairs[at][0]) != words_of(pairs[at][1])).any() for at in rest])
    known |= {at: 0.0 for at, is_other in zip(rest, differ, strict=True) if not is_other}
    return [known[at] if at in known else distance(*pair) for at, pair in enumerate(pairs)]


def is_told_by(apart: float, scale: float) -> bool:
    """Whether these numbers tell a distance: NaN does not, and no difference may be one of bits."""
    return 0 < apart < math.inf and scale < math.inf


def relative(apart: float, scale: float) -> float:
    """More than 0, which is for the same bits."""
    return max(apart / max(scale, torch.finfo(torch.float32).tiny), sys.float_info.min)


def words_of(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of the tensor, eight as one number where they can be: of BERT-base 1.3 GB are summed up in each run."""
    flat = bytes_of(tensor)
    return flat if flat.numel() % 8 or flat.storage_offset() % 8 else flat.view(torch.int64)


def at_once(numbers: Sequence[torch.Tensor]) -> list[Any]:
    """The values of tensors of one number each, by a single look at the device of the first."""
    return torch.stack([each.to(numbers[0].device) for each in numbers]).tolist() if numbers else []


def distance(one: torch.Tensor, two: torch.Tensor) -> float:
    """Relative, in the largest norm; of what is no real number the share that differs. 0 only for the same bits.

    Infinite where one has a number and the other has none, or another infinity.
    """
    if equal(one, two):
        return 0.0
    if not one.is_floating_point():
        return float((one != two).double().mean())
    numbers = one.isfinite() & two.isfinite()
    if not bool((numbers | (one == two) | (one.isnan() & two.isnan())).all()):
        return math.inf
    first, second = (torch.where(numbers, each, 0).double() for each in (one, two))
    return relative(float((first - second).abs().max()), float(first.abs().max()))
