"""Planner: runs the stages that put a training step on several CUDA streams.

record -> transform -> time the launches -> plan -> race -> prove -> capture. docs/streams-design.md explains each stage
and gives its measurements; docs/decisions/0008-planned-launches.md says why the design is as it is.
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
from kitsune.launches.execution.equivalence import Untouched, mismatch
from kitsune.launches.execution.graph_benchmark import MAX_RATIO, MAX_RATIO_AMONG, Clock, is_faster, replay_ms
from kitsune.launches.execution.issue import CudaLanes, HostLane, HostLanes, Lanes, in_recorded_order, issue
from kitsune.launches.execution.kernel_trace import difference, kernels_of
from kitsune.launches.model.recording import Recording
from kitsune.launches.model.step_state import State
from kitsune.launches.plans import WORKSPACES_OF_HALF, WORKSPACES_OF_STEP, Planned, costs_of, most_taken, plans
from kitsune.launches.recording.copy_on_write import HIDDEN, Undo, are_hidden
from kitsune.launches.recording.recorder import record
from kitsune.launches.timing_cache import TimingCache, key_of
from kitsune.launches.transforms.partition import first_half, held_by, second_half

Step = Callable[[], Any]

#: Most plans to prove before a step stays on one stream. On an H200 one plan of BERT-base in fp32 did not come to the
#: bits of the step, and another one did, 10 % faster than one stream.
PROOFS: Final = 2
#: Time limit of a race in seconds, or the time of RACE_STEPS steps if that is longer. Plans that were best for most
#: models come first. On eight streams, H200 hosts got through 11 to 22 of the 23 to 27 plans of BERT-base, depending on
#: the speed of the host.
RACE_S: Final = 3.0
RACE_STEPS: Final = 500
WON_BEFORE: Final = "; it won when this step was planned before, and raced against one stream only"


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


Pair = tuple[Captured, Captured]


class Planner:
    """Captures steps as graphs on up to `streams` streams.

    After a capture, `plan` is the plan that was chosen, or `refusal` says why there is none. `is_erratic`: the step
    cannot be captured on one stream either, because a replay would not do what the step does. `cache` keeps timings and
    winners between processes; None: nothing is looked up or kept.
    On a GPU the candidates are captured and raced; on a CPU the one with the shortest predicted time is used.
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
        """Runs the step once, for real. Returns (graph, its static tensors), or (None, the result of that run).

        The static tensors hold the result of that run. `inputs` and `rates` are the static tensors of the batch and of
        the learning rates; the proof changes them from step to step and restores them.
        """
        recorded = record(step, self._recorder.device)
        self.refusal, self.is_erratic = recorded.refusal, recorded.is_erratic
        if recorded.recording is None:
            return None, recorded.result
        try:
            with Untouched(recorded.recording, (*inputs, *rates)) as untouched:
                graph, static = self._proven(recorded.recording, step, inputs, rates, untouched)
        # The step has run and must not run again, so any error, also one of the user's code, only ends the planning.
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
        """Two graphs: one of `first`, and one of `second`, which uses what `first` made. None: see `refusal`.

        `prepare` is called after `first` has run, and returns the static tensors of both. All effects of the runs on
        tensors and generators are rolled back. That is declined if `gc.freeze()` hides the `parameters`.
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
        """The plan, captured in a pool that is freed with its graph: a losing plan must not enlarge the step's pool."""
        return self._captured(plan, self._recorder.apart())

    def quickest(self, found: Sequence[Planned], workspaces: int, before: Planned | None = None) -> tuple[Planned, str]:
        """The winner of a race, and a note about the race. The first plan wins unless another one is faster.

        The race changes the step's state. `workspaces`: how many more workspaces a plain graph has (see `most_taken`).
        `before`: the plan that won in an earlier process. It races against the first plan alone; the others are tried
        only if it loses.
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
        one = self._best(first, self._plans(first), WORKSPACES_OF_HALF)
        with State(first):
            # A capture runs nothing, so without a replay an index among the tensors that cross could be any number.
            one.graph.replay()
        returned, crossed = one.static
        found = [replace(plan, recording=held_by(crossed, plan.recording)) for plan in uncaptured]

        def problem_of(two: Captured) -> str | None:
            def replay() -> Any:
                one.graph.replay()
                two.graph.replay()
                return returned, two.static

            return self._mismatch(recording, both, replay, inputs, (), untouched)

        two = self._accepted(second_half(recording, cut, crossed), found, WORKSPACES_OF_HALF, problem_of)
        self.plan = two.plan
        return one, two

    def _plans_of_second(self, recording: Recording, cut: int, first: Recording) -> list[Planned]:
        """Candidates for the second half, timed on the output of an uncaptured run of the first half.

        They do not hold the memory of what crosses yet. Output of a captured run will not do: torch's efficient
        attention leaves the seed of its dropout on the GPU in a capture, and its uncaptured backward reads it on the
        host (SIGSEGV).
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
            return self._mismatch(recording, step, replaying(captured), inputs, rates, untouched)

        found = self._accepted(recording, self._plans(recording), WORKSPACES_OF_STEP, problem_of)
        self.plan, self.passing_bytes = found.plan, found.passing_bytes
        return found.graph, found.static

    def _accepted(
        self,
        recording: Recording,
        found: Sequence[Planned],
        workspaces: int,
        problem_of: Callable[[Captured], str | None],
    ) -> Captured:
        """The fastest plan that passes the proof. Raises CaptureError when PROOFS plans have failed it."""
        refused = ""
        for _ in range(PROOFS):
            best = self._best(recording, found, workspaces)
            problem = problem_of(best)
            if problem is None:
                return with_note(best, refused)
            refused = f"; a faster one was refused: {problem}"
            found = [plan for plan in found if plan.schedule is not best.plan.schedule]
            del best  # frees its memory for the next one
            if not found:
                break
        raise CaptureError(f"the planned launches do not do what the step does: {problem}")

    def _plans(self, recording: Recording) -> list[Planned]:
        return plans(recording, self._streams, self._pool_bytes, self._costs_us)

    def _costs_us(self, recording: Recording) -> list[float]:
        if self._cache is None or recording.device.type != "cuda":  # times on a CPU vary too much to be kept
            return costs_of(recording)
        return self._cache.costs_us(recording, costs_of)

    def _mismatch(
        self,
        recording: Recording,
        step: Step,
        replay: Step,
        inputs: Sequence[torch.Tensor],
        rates: Sequence[torch.Tensor],
        untouched: Untouched,
    ) -> str | None:
        """As `mismatch`. Then releases the memory that the proof took: on an H200, 65 MiB for cuBLAS alone."""
        try:
            return mismatch(recording, step, replay, inputs, rates, untouched)
        finally:
            release_cached(recording.device)

    def _best(self, recording: Recording, found: Sequence[Planned], workspaces: int) -> Captured:
        """The fastest of these plans, captured in the step's pool."""
        if self._recorder.executes or len(found) == 1:
            return self._captured(min(found, key=lambda plan: plan.schedule.makespan_us), self._recorder)
        with State(recording):
            plan, said = self._winner(recording, found, workspaces)
            release_cached(recording.device)
            return with_note(self._captured(plan, self._recorder), said)

    def _winner(self, recording: Recording, found: Sequence[Planned], workspaces: int) -> tuple[Planned, str]:
        """As `quickest`, but uses the winner of earlier processes from the cache, and stores the new winner there."""
        if self._cache is None:
            return self.quickest(found, workspaces)
        key = key_of(recording, self._streams, self._pool_bytes)
        plan, said = self.quickest(found, workspaces, self._cache.winner(key, found[1:]))
        self._cache.keep_winner(key, plan)
        return plan, said

    def _raced(self, best: Captured, others: Sequence[Planned], most_bytes: float) -> tuple[Captured, str]:
        # In CPU time of this thread: a measuring process is suspended while another one is timed.
        until_s = time.thread_time() + max(RACE_S, RACE_STEPS * best.plan.schedule.makespan_us / 1e6)
        for number, plan in enumerate(others):
            if time.thread_time() > until_s:
                return best, f"; {len(others) - number} of {len(others) + 1} plans were not tried: no time"
            try:
                challenger = self.tried(plan)
            except CaptureError:  # such as no memory for one more graph
                continue
            by = MAX_RATIO if best.plan.schedule.streams == 1 else MAX_RATIO_AMONG
            if challenger.taken_bytes <= most_bytes and is_faster(best.graph, challenger.graph, self.clock, by):
                best = challenger
        return best, ""

    def _check_kernels(self, recording: Recording, step: Step) -> None:
        """Raises CaptureError when the step launches kernels that are not in the recording.

        Always issues the recorded launches once as a warm-up: libraries such as cuDNN initialise themselves at their
        first call on a thread, which must not happen during a capture.
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
        """Captures the plan. The step's state is unchanged afterwards, also if the recorder runs what it captures."""

        lanes = lanes_of(plan)

        def issued() -> Any:
            return issue(plan.recording, plan.schedule, plan.memory, lanes)

        device = recorder.device
        reset_peak(device)
        with State(plan.recording) if recorder.executes else nullcontext():
            graph, static = recorder.capture(issued)
        passing_bytes = peak_bytes(device) - allocated_bytes(device)
        return Captured(plan, graph, static, passing_bytes, recorder.taken_bytes())


def with_note(captured: Captured, note: str) -> Captured:
    """Copy with a note appended to the plan's name."""
    return replace(captured, plan=replace(captured.plan, name=captured.plan.name + note))


def reason_of(error: Exception) -> str:
    """Why planning failed: the message of a CaptureError; for any other error, its type and first line."""
    if isinstance(error, CaptureError):
        return str(error)
    return f"planning its launches failed: {type(error).__name__}: {first_line(error)}"


def replaying(captured: Captured) -> Step:
    def replay() -> Any:
        captured.graph.replay()
        return captured.static

    return replay


def lanes_of(plan: Planned) -> Lanes:
    """CUDA streams on a GPU. On a CPU, threads; a single lane if launches draw random numbers, to keep their order."""
    if plan.recording.device.type == "cuda":
        return CudaLanes(plan.schedule, plan.recording.device, plan.priorities, plan.multiprocessors)
    draws = any(launch.draws for launch in plan.recording.graph.launches)
    return HostLane() if draws else HostLanes(plan.schedule.streams)
