"""The plans of a recorded step: its launches timed, split, and put on streams, with memory plans."""

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields, replace
from itertools import zip_longest
from pathlib import Path
from typing import Final, Self

from kitsune.device.backend import few_multiprocessors
from kitsune.launches.execution.launch_costs import measured_us
from kitsune.launches.execution.launch_work import class_times_of
from kitsune.launches.model.recording import Recording
from kitsune.launches.planning.candidates import Candidate, candidates, recorded_order
from kitsune.launches.planning.trace_export import svg_of, timeline_of, touched_of, trace_of
from kitsune.launches.transforms.renaming import renamed
from kitsune.launches.transforms.splitting import split
from kitsune.timeline import ClassTime, Timeline

#: Maximum sizes of a bucket of parameters that one launch updates. 24 MiB of fp32 are the 96 blocks that 48
#: multiprocessors of an H200 hold at once; in probes there 24 MiB was better for ViT-B/16 on 4 images and for BERT-base
#: on 2 sequences, and 32 MiB for ResNet-18. With 64 MiB, a layer of BERT-base was one kernel of 118 blocks, of which 22
#: began only when the others had ended. With 4 MiB, the update of BERT-base takes three times as long as in one launch.
BUCKETS_BYTES: Final = (2**25, 3 * 2**23)
EXTRA_DIVISOR: Final = 5  # several streams may need a fifth of the whole step more, with parameters and optimizer state
MIN_EXTRA_BYTES: Final = 2**25
WORKSPACE_BYTES: Final = 2**25  # cuBLAS takes this much for every stream on an H200; plans do not count it
#: How many more workspaces a plain graph has than the planner's on one stream. For a whole step, one for the backward,
#: which runs on a thread of its own there, and two left by earlier steps on both threads. Forward or backward alone: 1.
WORKSPACES_OF_STEP: Final = 3
WORKSPACES_OF_HALF: Final = 1
TAKEN_DIVISOR: Final = 4  # a quarter more as measured, with workspaces and what the allocator cannot fill

#: Times each launch of a recording alone, in us.
Costs = Callable[[Recording], Sequence[float]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned(Candidate):
    """A candidate with its launches. The timing cache finds the last winner by its name."""

    recording: Recording

    @classmethod
    def of(cls, recording: Recording, plan: Candidate) -> Self:
        return cls(recording=recording, **{each.name: getattr(plan, each.name) for each in fields(plan)})

    def timeline(self, told: str = "", at_most: int | None = None) -> Timeline:
        """The timeline as data. With `at_most`, only that many of the longest launches."""
        return timeline_of(self.recording.graph, self.schedule, self.memory, told, at_most)

    def class_times(self) -> tuple[ClassTime, ...]:
        """The launches by class of kernels, longest first. Takes some milliseconds, and 1 GiB of a GPU's memory.

        Empty if there is less.
        """
        return class_times_of(self.recording, self.costs_us)

    def save_trace(self, path: str | Path) -> None:
        """Writes a JSON trace for Perfetto (https://ui.perfetto.dev)."""
        trace = trace_of(self.timeline(self.name), touched_of(self.recording.graph, self.schedule))
        Path(path).write_text(json.dumps(trace), encoding="utf-8")

    def save_svg(self, path: str | Path) -> None:
        Path(path).write_text(svg_of(self.recording.graph, self.schedule), encoding="utf-8")


def costs_of(recording: Recording) -> list[float]:
    """The measured time of each launch in us. The step's state is restored."""
    with recording.saved_state():
        return measured_us(recording)


def plans(recording: Recording, streams: int, pool_bytes: int | None, costs: Costs = costs_of) -> list[Planned]:
    """Those of `all_plans` that fit into a pool of `pool_bytes`, or of `budget_of` if that is None.

    If none fits, only the one that needs the least memory, with a note in its name.
    """
    return fitting(all_plans(recording, streams, costs), pool_bytes)


def all_plans(recording: Recording, streams: int, costs: Costs = costs_of) -> list[Planned]:
    """Plans for a recorded step on 1 to `streams` streams. The first is the recorded order on one stream.

    The step's state is restored. Raises CaptureError when its launches cannot be timed.
    """
    alone_us = costs(recording)
    alone = Planned.of(recording, recorded_order(recording.graph, alone_us))
    if streams == 1:
        return [alone]
    return [
        alone,
        *interleaved(
            [named_candidates(name, variant, streams, costs) for name, variant in variants(recording).items()]
        ),
    ]


def fitting(found: Sequence[Planned], pool_bytes: int | None) -> list[Planned]:
    """As `plans`, for plans that were made before. The first of `found` must be the recorded order on one stream."""
    budget_bytes = budget_of(found[0], pool_bytes)
    small = [plan for plan in found if plan.memory.peak_bytes <= budget_bytes]
    return small or [with_size_note(min(found, key=lambda plan: plan.memory.peak_bytes), budget_bytes)]


def named_candidates(name: str, variant: Recording, streams: int, costs: Costs) -> list[Planned]:
    found = candidates(variant.graph, costs(variant), streams, few_multiprocessors(variant.device))
    return [Planned.of(variant, replace(plan, name=f"{plan.name}; {name}")) for plan in found]


def interleaved(lists: Iterable[Sequence[Planned]]) -> list[Planned]:
    """The first of each list, then the second of each, and so on."""
    return [plan for those in zip_longest(*lists) for plan in those if plan is not None]


def with_size_note(plan: Planned, pool_bytes: int) -> Planned:
    """Copy whose name says that it does not fit."""
    needed, given = (nbytes / 2**20 for nbytes in (plan.memory.peak_bytes, pool_bytes))
    return replace(plan, name=f"{plan.name}, which takes {needed:.1f} MiB: no plan fits into a pool of {given:.1f} MiB")


def variants(recording: Recording) -> dict[str, Recording]:
    """The step after renaming and splitting, once for each bucket size, by a name for the split."""
    apart = renamed(recording)
    found = {f"updates in buckets of {nbytes >> 20} MiB": split(apart, nbytes) for nbytes in BUCKETS_BYTES}
    # Steps of few parameters are split alike for all sizes: such variants are listed once.
    last = {variant.graph.launches: name for name, variant in found.items()}
    return {name: found[name] for name in last.values()}


def budget_of(alone: Planned, pool_bytes: int | None) -> int:
    """Limit in bytes for the planned pool: `pool_bytes` if given, else the pool on one stream and a share of the step.

    The share is a fifth of the whole step, parameters and optimizer state included, or 32 MiB if that is more.
    """
    if pool_bytes is not None:
        return pool_bytes
    alone_bytes = alone.memory.peak_bytes
    return alone_bytes + max((held_bytes(alone.recording) + alone_bytes) // EXTRA_DIVISOR, MIN_EXTRA_BYTES)


def most_taken(recording: Recording, alone_bytes: int, workspaces: int) -> int:
    """Limit in bytes for the measured pool on several streams, if the recorded order on one takes `alone_bytes`.

    It is the memory of a plain graph, which has `workspaces` more workspaces, and a quarter of the whole step with such
    a graph. Without this limit DLRM on eight streams took 1.52 times the memory, for 1 % less time than on four.
    """
    plain_bytes = alone_bytes + workspaces * WORKSPACE_BYTES
    return plain_bytes + (held_bytes(recording) + plain_bytes) // TAKEN_DIVISOR


def held_bytes(recording: Recording) -> int:
    """Bytes that were allocated before the step: parameters, the optimizer's state, the batch."""
    return sum(storage.nbytes() for storage in recording.held.values())
