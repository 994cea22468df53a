"""The proof: checks that a graph computes what the step computes.

Both run from the same state over the same batches, and must come to the same bits. If the step does not repeat to the
bit itself (atomic additions), the graph may differ by four times as much as the step differs from itself. Single runs
are not enough to measure that: Adam moves a weight by the full rate even if its gradient is only noise, so some runs
differ ten thousand times as much as others. A graph that differs too much is therefore run again, up to EXTRA_RUNS
times. docs/streams-design.md, "Prove", gives the measurements.
"""

import math
import random
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final, Self

import torch

from kitsune.device.backend import release_cached
from kitsune.device.cuda_graph import tensors_in
from kitsune.device.saved_state import SavedState
from kitsune.device.tensor_bytes import as_bytes, bytes_of, equal
from kitsune.errors import ErraticError
from kitsune.launches.model.recording import Recording, places_of

STEPS: Final = 3
SLACK: Final = 4.0  # tolerance, as a multiple of the step's own run-to-run variation (atomics vary by chance)
SELF_RUNS: Final = 4  # runs that measure the step's own variation
ROUNDING: Final = 1e-2  # largest relative variation of the loss (the first result of the first step) that is rounding
BY_THE_HOST: Final = "something on the host decides what it does"
FLOAT_DTYPES: Final = (torch.float32, torch.bfloat16, torch.float16, torch.float64)  # see `distances`
EXTRA_RUNS: Final = 12  # further runs of the step and of the graph, if the graph still differs too much

Trace = list[torch.Tensor]


class EquivalenceCheck:
    """Runs a recorded step and replays of it, and compares them.

    `inputs` are the static tensors of the batch, which gets another order for every step; `rates` those of the learning
    rates, which change too. A context manager for all further runs of the step: on exit it restores memory from before
    the step that no launch declares to write, if an undeclared write has changed it.
    """

    def __init__(
        self,
        recording: Recording,
        step: Callable[[], Any],
        inputs: Sequence[torch.Tensor] = (),
        rates: Sequence[torch.Tensor] = (),
    ) -> None:
        self.recording = recording
        self.step = step
        self._inputs = inputs
        self._rates = rates
        storages = unwritten_storages(recording, (*inputs, *rates))
        self._unwritten = SavedState(lambda: [as_bytes(storage) for storage in storages])

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._unwritten.has_changed():
            self._unwritten.restore()

    def mismatch(self, replay: Callable[[], Any]) -> str | None:
        """Why `replay` does not do what the step does, or None if it does. State and inputs are restored.

        Raises ErraticError when the step differs from itself by more than rounding, or when something on the host
        decides what it does.
        """
        try:
            return self._mismatch(replay)
        finally:
            release_cached(self.recording.device)  # on an H200, 65 MiB for cuBLAS alone

    def _mismatch(self, replay: Callable[[], Any]) -> str | None:
        with InitialState(self.recording, self._inputs, self._rates) as start:
            expected, found = start.trace(self.step), start.trace(replay)
            if self._unwritten.has_changed():
                return "an operation writes memory that its schema says it only reads"
            if same(expected, found):
                return None
            return self._why_apart(replay, start, expected, found)

    def _why_apart(self, replay: Callable[[], Any], start: "InitialState", expected: Trace, found: Trace) -> str | None:
        """As `mismatch`, for a replay that did not come to the bits of the step."""
        checksums = {checksum_of(expected)}
        own = [0.0] * len(expected)
        for _ in range(SELF_RUNS):
            again = start.trace(self.step)
            checksums.add(checksum_of(again))
            own = largest_distances([own, distances(expected, again)])
        if not any(own):
            return f"its numbers differ from those of the step, first {start.name_of(expected, found)}"
        if own[0] > ROUNDING:
            raise ErraticError(f"the step differs from itself by more than rounding: {BY_THE_HOST}")
        # If each run of the step has other numbers, and all runs of the graph have the same, atomics are not the cause.
        if len(checksums) == 1 + SELF_RUNS and all(same(found, start.trace(replay)) for _ in range(SELF_RUNS)):
            raise ErraticError(f"the step differs from itself in each run, and its launches do not: {BY_THE_HOST}")
        nearest = distances(expected, found)
        for _ in range(EXTRA_RUNS):
            if is_as_near(nearest, own):
                return None
            own = largest_distances([own, distances(expected, start.trace(self.step))])
            nearest = list(map(min, nearest, distances(expected, start.trace(replay))))
        if is_as_near(nearest, own):
            return None
        return "its numbers differ from those of the step by more than those of several runs of the step do"


class InitialState:
    """The state and the batch from which every run begins. A context manager: restores them on exit."""

    def __init__(self, recording: Recording, inputs: Sequence[torch.Tensor], rates: Sequence[torch.Tensor]) -> None:
        self._recording = recording
        self._inputs = inputs
        self._rates = rates
        self._changed = recording.changed()
        self._dtypes = dtypes_of(recording)
        self._state = recording.saved_state()
        self._batch = SavedState(lambda: (*inputs, *rates))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.restore()

    def restore(self) -> None:
        self._batch.restore()
        self._state.restore()

    def trace(self, one_step: Callable[[], Any]) -> Trace:
        """Runs STEPS steps from the start. Returns copies of what each returned, and of the final state."""
        self.restore()
        found: Trace = []
        for number in range(STEPS):
            reorder(self._inputs, number)
            for rate in self._rates:
                rate.mul_(0.5)
            found += [tensor.clone() for tensor in tensors_in(one_step())]
        return [*found, *self._typed(self._recording.saved_state().copies)]

    def _typed(self, state: Trace) -> Trace:
        """The state in the dtype of each storage, if that has only one, so that distances can be computed."""
        both = zip(self._changed, state, strict=True)
        return [copy.view(self._dtypes.get(number, torch.uint8)) for number, copy in both]

    def name_of(self, expected: Trace, found: Trace) -> str:
        """Where two traces first differ, in words."""
        at = next(at for at, (one, two) in enumerate(zip(expected, found, strict=True)) if not equal(one, two))
        graph, changed = self._recording.graph, self._changed
        if (of_state := at - len(expected) + len(changed)) < 0:
            return "in what it returns"
        number = changed[of_state]
        writers = (one for one in graph.launches if any(span.storage == number for span in one.writes))
        return f"in what {next(writers).name} writes"


def unwritten_storages(recording: Recording, changing: Sequence[torch.Tensor]) -> list[torch.UntypedStorage]:
    """The memory from before the step that no launch declares to write, but for the tensors that are `changing`."""
    written = recording.graph.written()
    ours = {tensor.untyped_storage()._cdata for tensor in changing}
    held = recording.held.items()
    return [storage for number, storage in held if number not in written and storage._cdata not in ours]


def reorder(inputs: Sequence[torch.Tensor], number: int) -> None:
    """Puts the rows of all tensors with the batch's first dimension in the same new order, so the batch stays valid.

    If there are several first dimensions, that is the one of most tensors, then the one of labels (1-d tensors), then
    the largest. Others may be tables, and an index into one may be out of range after a move. If the batch is a single
    row, floating-point tensors are halved; integers stay, because they may be categories. Sorted integers stay, because
    they may be offsets.
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


def checksum_of(trace: Trace) -> tuple[int, ...]:
    """A checksum of each tensor: equal for equal bits, and mostly different otherwise."""
    return tuple(read_together([as_integers(each).sum(dtype=torch.int64) for each in trace]))


def same(one: Trace, two: Trace) -> bool:
    return all(map(equal, one, two))


def dtypes_of(recording: Recording) -> dict[int, torch.dtype]:
    """storage -> the dtype that the step uses it as; storages that are used as several are left out."""
    used: defaultdict[int, set[torch.dtype]] = defaultdict(set)
    for call in recording.calls:
        for place in places_of((call.arguments, call.named, call.results)):
            used[place.storage].add(place.dtype)
    fits = {n: dtypes for n, dtypes in used.items() if len(dtypes) == 1}
    widths = {n: recording.graph.storages[n].nbytes for n in fits}
    return {n: dtype for n, (dtype,) in fits.items() if widths[n] % dtype.itemsize == 0}


def is_as_near(nearest: Sequence[float], own: Sequence[float]) -> bool:
    """Whether each tensor of a graph is within the tolerance (SLACK) of the step's own variation."""
    return all(
        one <= SLACK * max(other, torch.finfo(torch.float32).eps) and (one == 0 or math.isfinite(other))
        for one, other in zip(nearest, own, strict=True)
    )


def largest_distances(runs: Iterable[Sequence[float]]) -> list[float]:
    """The largest distance of each tensor over several runs."""
    return [max(each) for each in zip(*runs, strict=True)]


def distances(one: Trace, two: Trace) -> list[float]:
    """The `distance` of each pair, with few synchronisations.

    `distance` waits for the GPU four times, after a dozen kernels, so it is called only for what the norms do not tell.
    """
    pairs = list(zip(one, two, strict=True))
    rough = [at for at, (first, second) in enumerate(pairs) if first.dtype in FLOAT_DTYPES and first.numel()]
    apart = read_together([torch.linalg.vector_norm(pairs[at][0] - pairs[at][1], math.inf).double() for at in rough])
    scales = read_together([torch.linalg.vector_norm(pairs[at][0], math.inf).double() for at in rough])
    known = {at: relative(*both) for at, *both in zip(rough, apart, scales, strict=True) if is_measurable(*both)}
    rest = [at for at in range(len(pairs)) if at not in known]
    differ = read_together([(as_integers(pairs[at][0]) != as_integers(pairs[at][1])).any() for at in rest])
    known |= {at: 0.0 for at, is_other in zip(rest, differ, strict=True) if not is_other}
    return [known[at] if at in known else distance(*pair) for at, pair in enumerate(pairs)]


def is_measurable(apart: float, scale: float) -> bool:
    """Whether these norms give a distance. NaN and infinity do not; nor does 0, since bits may differ nevertheless."""
    return 0 < apart < math.inf and scale < math.inf


def relative(apart: float, scale: float) -> float:
    """A relative distance; at least the smallest float, because 0 means equal bits."""
    return max(apart / max(scale, torch.finfo(torch.float32).tiny), sys.float_info.min)


def as_integers(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of the tensor as int64 if size and alignment allow, else as uint8.

    Eight bytes at a time, because each run of BERT-base sums up 1.3 GB.
    """
    flat = bytes_of(tensor)
    return flat if flat.numel() % 8 or flat.storage_offset() % 8 else flat.view(torch.int64)


def read_together(numbers: Sequence[torch.Tensor]) -> list[Any]:
    """The values of tensors of one element each, read with a single synchronisation."""
    return torch.stack([each.to(numbers[0].device) for each in numbers]).tolist() if numbers else []


def distance(one: torch.Tensor, two: torch.Tensor) -> float:
    """Relative distance in the maximum norm; for other dtypes than floats, the share of elements that differ.

    0 only for equal bits. Infinite if one is finite where the other is not, or where infinities and NaNs do not match.
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
