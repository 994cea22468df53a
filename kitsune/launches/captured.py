"""Captured: a plan of a step as a graph."""

from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any, Self

from kitsune.device.backend import allocated_bytes, peak_bytes, reset_peak
from kitsune.device.cuda_graph import Graph, Recorder
from kitsune.launches.execution.issue import CudaLanes, HostLane, HostLanes, Lanes, issue
from kitsune.launches.plans import Planned


@dataclass(frozen=True, slots=True)
class Captured:
    """A plan, its captured graph, and the static tensors that the graph writes.

    `passing_bytes`: peak of temporary memory while it ran. `taken_bytes`: size of the pool that it was captured in.
    """

    plan: Planned
    graph: Graph
    static: Any
    passing_bytes: int
    taken_bytes: int

    def replay(self) -> Any:
        """One step. Returns the static tensors."""
        self.graph.replay()
        return self.static

    def with_note(self, note: str) -> Self:
        """Copy with a note appended to the plan's name."""
        return replace(self, plan=replace(self.plan, name=self.plan.name + note))


def capture(plan: Planned, recorder: Recorder) -> Captured:
    """Captures the plan. The step's state is unchanged afterwards, also if the recorder runs what it captures."""
    lanes = lanes_of(plan)

    def issued() -> Any:
        return issue(plan.recording, plan.schedule, plan.memory, lanes)

    device = recorder.device
    reset_peak(device)
    with plan.recording.saved_state() if recorder.executes else nullcontext():
        graph, static = recorder.capture(issued)
    passing_bytes = peak_bytes(device) - allocated_bytes(device)
    return Captured(plan, graph, static, passing_bytes, recorder.taken_bytes())


def lanes_of(plan: Planned) -> Lanes:
    """CUDA streams on a GPU. On a CPU, threads; a single lane if launches draw random numbers, to keep their order."""
    if plan.recording.device.type == "cuda":
        return CudaLanes(plan.schedule, plan.recording.device, plan.priorities, plan.multiprocessors)
    draws = any(launch.draws for launch in plan.recording.graph.launches)
    return HostLane() if draws else HostLanes(plan.schedule.streams)
