"""Planner: a step in, a graph of its launches on several streams out, once it is proven to be the same step.

record -> rename -> split -> measure -> schedule -> plan memory -> capture -> race -> prove (docs/decisions/0008).
"""

import math
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any, Final

import torch

from kitsune.autograd.backward_thread import on_one_thread
from kitsune.device.backend import allocated_bytes, first_line, peak_bytes, release_cached, reset_peak
from kitsune.device.cuda_graph import Graph, Recorder, fill
from kitsune.errors import CaptureError, ErraticError
from kitsune.launches.execution.equivalence import Untouched, refuted
from kitsune.launches.execution.graph_benchmark import BY, BY_AMONG, Clock, is_faster, replay_ms
from kitsune.launches.execution.issue import CudaLanes, HostLane, HostLanes, Lanes, in_recorded_order, issue
from kitsune.launches.execution.kernel_trace import difference, kernels_of
from kitsune.launches.model.recording import Recording
from kitsune.launches.model.step_state import State
from kitsune.launches.plans import OF_A_HALF, OF_A_STEP, Planned, costs_of, most_taken, plans
from kitsune.launches.recording.copy_on_write import HIDDEN, Undo, are_hidden
from kitsune.launches.recording.recorder import record
from kitsune.launches.timing_cache import TimingCache, key_of
from kitsune.launches.transforms.partition import first_half, held_by, second_half

Step = Callable[[], Any]

#: Plans that are proven before a step stays on one stream. On an H200 one plan of BERT-base in fp32 was not the step to
#: the bit, where another one of it was, 10 % faster than one stream.
PROOFS: Final = 2
#: How long plans race, the best of most models first, or how many of their steps where those take longer. On eight
#: streams the hosts of H200s came to 11 to 22 of the 23 to 27 plans of BERT-base, as fast as they were.
RACE_S: Final = 3.0
RACE_STEPS: Final = 500
WON_BEFORE: Final = "; it won when this step was planned before, and raced against one stream only"


@dataclass(frozen=True, slots=True)
class Captured:
    """A plan, its graph, and the tensors that the graph writes.

    `passing_bytes`: what it needs besides, as it runs. `taken_bytes`: what the pool that it was captured in has taken.
    """

    plan: Planned
    graph: Graph
    static: Any
    passing_bytes: int
    taken_bytes: int


Pair = tuple[Captured, Captured]


class Planner:
    """Turns steps into graphs of several streams. `refusal` says why the last one was not, `plan` what it became.

    `is_erratic`: it cannot be on one stream either, since no graph would do the same. `cache`: of earlier processes;
    None where nothing is known, and nothing is kept.
    On a GPU the plans are captured and timed against each other; on a CPU the prediction decides.
    """

    clock: Clock = staticmethod(replay_ms)

    def __init__(
        self, recorder: Recorder, streams: int, pool_bytes: int | None = None, cache: TimingCache | None = None
    ) -> None:
        self._recorder = recorder
        self._streams = streams
        self._pool_bytes = pool_bytes
        self._cache = cache
        self.plan: Planned | None = None
        self.passing_bytes = 0
        self.refusal = ""
        self.is_erratic = False

    @on_one_thread()
    def capture(
        self, step: Step, inputs: Sequence[torch.Tensor] = (), rates: Sequence[torch.Tensor] = ()
    ) -> tuple[Graph | None, Any]:
        """(graph, the tensors that it writes), or (None, what the step returned). The step runs once, for real.

        The tensors hold what that run gave. `inputs` and `rates` are the static tensors of the batch and of the
        learning rates, which the proof changes from step to step.
        """
        recorded = record(step, self._recorder.device)
        self.refusal, self.is_erratic = recorded.refusal, recorded.is_erratic
        if recorded.recording is None:
            return None, recorded.result
        try:
            with Untouched(recorded.recording, (*inputs, *rates)) as untouched:
                graph, static = self._proven(recorded.recording, step, inputs, rates, untouched)
        # The step has run: whatever planning meets, of the user's code too, must not have it run again.
        except Exception as error:  # noqa: BLE001
            self._refuse(error)
            return None, recorded.result
        fill(static, recorded.result)
        return graph, static

    @on_one_thread()
    def capture_pair(
        self,
        first: Step,
        second: Step,
        prepare: Callable[[], Sequence[torch.Tensor]],
        parameters: Sequence[torch.Tensor] = (),
    ) -> Pair | None:
        """Two graphs: of `first`, and of `second`, which goes on with what it has made. None: `refusal` says why not.

        `prepare` is called once `first` has run, and gives the static tensors of both. No run leaves a trace: of what
        has to be put back for that the `parameters` must be seen, at least.
        """
        try:
            if are_hidden(parameters):
                raise CaptureError(HIDDEN)
            return self._undone_pair(first, second, prepare)
        except Exception as error:  # noqa: BLE001  (see above)
            self._refuse(error)
            return None

    def _refuse(self, error: Exception) -> None:
        self.refusal, self.is_erratic = reason_of(error), isinstance(error, ErraticError)

    def _undone_pair(self, first: Step, second: Step, prepare: Callable[[], Sequence[torch.Tensor]]) -> Pair | None:
        device = self._recorder.device
        undo = Undo(device)
        try:
            record(first, device, undo=undo)
            inputs = prepare()
            recorded = record(first, device, second, undo)
            self.refusal, self.is_erratic = recorded.refusal, recorded.is_erratic
            if recorded.recording is None:
                return None
            with Untouched(recorded.recording, inputs) as untouched:
                both = recorded.recording, recorded.cut, lambda: (first(), second())
                return self._proven_pair(*both, inputs, untouched)
        finally:
            undo.restore()

    def tried(self, plan: Planned) -> Captured:
        """In a pool that dies with the graph: in the step's own one, what a loser took would stay with the winner."""
        return self._captured(plan, self._recorder.apart())

    def quickest(self, found: Sequence[Planned], workspaces: int, before: Planned | None = None) -> tuple[Planned, str]:
        """The first, unless another one is faster; and what is to be said of the race. The step's state changes.

        `workspaces` are those that a plain graph of it has more (see `most_taken`). One of the others that won `before`
        races against the first alone, and the rest only where it loses.
        """
        first, most_bytes = self.tried(found[0]), math.inf
        if self._pool_bytes is None:
            most_bytes = most_taken(first.plan.recording, first.taken_bytes, workspaces)
        if before is not None:
            best, _ = self._raced(first, [before], most_bytes)
            if best is not first:
                return before, WON_BEFORE
        best, said = self._raced(first, [plan for plan in found[1:] if plan is not before], most_bytes)
        return best.plan, said

    def _proven_pair(
        self, recording: Recording, cut: int, both: Step, inputs: Sequence[torch.Tensor], untouched: Untouched
    ) -> Pair:
        self._check_kernels(recording, both)
        first = first_half(recording, cut)
        uncaptured = self._plans_of_second(recording, cut, first)
        one = self._best(first, self._plans(first), OF_A_HALF)
        with State(first):
            one.graph.replay()  # a capture runs nothing, and an index in what crosses would be any number
        returned, crossed = one.static
        found = [replace(plan, recording=held_by(crossed, plan.recording)) for plan in uncaptured]

        def problem_of(two: Captured) -> str | None:
            def replay() -> Any:
                one.graph.replay()
                two.graph.replay()
                return returned, two.static

            return self._refuted(recording, both, replay, inputs, (), untouched)

        two = self._accepted(second_half(recording, cut, crossed), found, OF_A_HALF, problem_of)
        self.plan = two.plan
        return one, two

    def _plans_of_second(self, recording: Recording, cut: int, first: Recording) -> list[Planned]:
        """Those of the second half, without the memory of what crosses, timed on what the first one makes uncaptured.

        In a capture it may lie elsewhere: torch's efficient attention leaves the seed of its dropout on the GPU there,
        and its backward, where it is not captured, reads it on the host (SIGSEGV).
        """
        with State(first):
            _, crossed = in_recorded_order(first)()
        found = self._plans(second_half(recording, cut, crossed))
        return [replace(plan, recording=replace(plan.recording, held=recording.held)) for plan in found]

    def _proven(
        self,
        recording: Recording,
        step: Step,
        inputs: Sequence[torch.Tensor],
        rates: Sequence[torch.Tensor],
        untouched: Untouched,
    ) -> tuple[Graph, Any]:
        self._check_kernels(recording, step)

        def problem_of(captured: Captured) -> str | None:
            return self._refuted(recording, step, replaying(captured), inputs, rates, untouched)

        found = self._accepted(recording, self._plans(recording), OF_A_STEP, problem_of)
        self.plan, self.passing_bytes = found.plan, found.passing_bytes
        return found.graph, found.static

    def _accepted(
        self,
        recording: Recording,
        found: Sequence[Planned],
        workspaces: int,
        problem_of: Callable[[Captured], str | None],
    ) -> Captured:
        """The quickest of these plans that the proof does not refuse. Raises CaptureError after PROOFS."""
        refused = ""
        for _ in range(PROOFS):
            best = self._best(recording, found, workspaces)
            problem = problem_of(best)
            if problem is None:
                return told(best, refused)
            refused = f"; a quicker one was refused: {problem}"
            found = [plan for plan in found if plan.schedule is not best.plan.schedule]
            del best  # what it took is free for the next one
            if not found:
                break
        raise CaptureError(f"the launches as they were planned are not the step: {problem}")

    def _plans(self, recording: Recording) -> list[Planned]:
        return plans(recording, self._streams, self._pool_bytes, self._costs_us)

    def _costs_us(self, recording: Recording) -> list[float]:
        if self._cache is None or recording.device.type != "cuda":  # a CPU's are a matter of the moment
            return costs_of(recording)
        return self._cache.costs_us(recording, costs_of)

    def _refuted(
        self,
        recording: Recording,
        step: Step,
        replay: Step,
        inputs: Sequence[torch.Tensor],
        rates: Sequence[torch.Tensor],
        untouched: Untouched,
    ) -> str | None:
        """The proof, and what its runs of the step took is given back: on an H200 65 MiB of cuBLAS alone."""
        try:
            return refuted(recording, step, replay, inputs, rates, untouched)
        finally:
            release_cached(recording.device)

    def _best(self, recording: Recording, found: Sequence[Planned], workspaces: int) -> Captured:
        """The quickest of these plans of the recording, captured."""
        if self._recorder.executes or len(found) == 1:
            return self._captured(min(found, key=lambda plan: plan.schedule.makespan_us), self._recorder)
        with State(recording):
            plan, said = self._winner(recording, found, workspaces)
            release_cached(recording.device)
            return told(self._captured(plan, self._recorder), said)

    def _winner(self, recording: Recording, found: Sequence[Planned], workspaces: int) -> tuple[Planned, str]:
        """As `quickest`. Looks up which plan won in earlier processes, and keeps the one that wins now."""
        if self._cache is None:
            return self.quickest(found, workspaces)
        key = key_of(recording, self._streams, self._pool_bytes)
        plan, said = self.quickest(found, workspaces, self._cache.winner(key, found[1:]))
        self._cache.keep_winner(key, plan)
        return plan, said

    def _raced(self, best: Captured, others: Sequence[Planned], most_bytes: float) -> tuple[Captured, str]:
        # By the time of this thread: a measuring process stands still while another one is timed.
        until_s = time.thread_time() + max(RACE_S, RACE_STEPS * best.plan.schedule.makespan_us / 1e6)
        for number, plan in enumerate(others):
            if time.thread_time() > until_s:
                return best, f"; {len(others) - number} of {len(others) + 1} plans were not tried: no time"
            try:
                challenger = self.tried(plan)
            except CaptureError:  # no memory for one more graph, say: the best so far stays
                continue
            by = BY if best.plan.schedule.streams == 1 else BY_AMONG
            if challenger.taken_bytes <= most_bytes and is_faster(best.graph, challenger.graph, self.clock, by):
                best = challenger
        return best, ""

    def _check_kernels(self, recording: Recording, step: Step) -> None:
        """Raises CaptureError when the step launches what the recording does not.

        Issues the recorded launches once in any case: at its first call on a thread a library sets up what it needs, as
        cuDNN does, and a capture is no place for that.
        """
        if recording.device.type != "cuda":
            return
        again = in_recorded_order(recording)
        with State(recording) as before:
            if self._cache is not None and self._cache.are_kernels_known(recording):
                again()
                return
            expected = kernels_of(step)
            before.restore()
            found = kernels_of(again)
        if unseen := difference(expected, found):
            raise CaptureError(unseen)
        if self._cache is not None:
            self._cache.keep_kernels_known(recording)

    def _captured(self, plan: Planned, recorder: Recorder) -> Captured:
        """Leaves the state of the step as it was, also where capturing runs it."""

        lanes = lanes_of(plan)

        def issued() -> Any:
            return issue(plan.recording, plan.schedule, plan.memory, lanes)

        device = recorder.device
        reset_peak(device)
        with State(plan.recording) if recorder.executes else nullcontext():
            graph, static = recorder.capture(issued)
        passing_bytes = peak_bytes(device) - allocated_bytes(device)
        return Captured(plan, graph, static, passing_bytes, recorder.taken_bytes())


def told(captured: Captured, more: str) -> Captured:
    """The same, and its name says more."""
    return replace(captured, plan=replace(captured.plan, name=captured.plan.name + more))


def reason_of(error: Exception) -> str:
    """Why planning failed; what is not a refusal of ours is told by its type."""
    if isinstance(error, CaptureError):
        return str(error)
    return f"planning its launches failed: {type(error).__name__}: {first_line(error)}"


def replaying(captured: Captured) -> Step:
    def replay() -> Any:
        captured.graph.replay()
        return captured.static

    return replay


def lanes_of(plan: Planned) -> Lanes:
    """On a CPU threads, or one lane where some launches draw random numbers: their order is that of the issue."""
    if plan.recording.device.type == "cuda":
        return CudaLanes(plan.schedule, plan.recording.device, plan.priorities, plan.multiprocessors)
    draws = any(launch.draws for launch in plan.recording.graph.launches)
    return HostLane() if draws else HostLanes(plan.schedule.streams)
