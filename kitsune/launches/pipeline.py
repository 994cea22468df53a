"""Planner: runs the stages that put a training step on several CUDA streams.

record -> transform -> time the launches -> plan -> race -> capture -> prove. docs/streams-design.md explains each stage
and gives its measurements; docs/decisions/0008-planned-launches.md says why the design is as it is.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Final

import torch

from kitsune.autograd.backward_thread import on_one_thread
from kitsune.device.backend import first_line
from kitsune.device.cuda_graph import Graph, Recorder, fill
from kitsune.errors import CaptureError, ErraticError
from kitsune.launches.captured import Captured
from kitsune.launches.execution.equivalence import EquivalenceCheck
from kitsune.launches.execution.issue import in_recorded_order
from kitsune.launches.execution.kernel_trace import difference, kernels_of
from kitsune.launches.model.recording import Recording
from kitsune.launches.plan_race import PlanRace
from kitsune.launches.plans import WORKSPACES_OF_HALF, WORKSPACES_OF_STEP, Planned
from kitsune.launches.recording.copy_on_write import HIDDEN, Undo, are_hidden
from kitsune.launches.recording.recorder import record
from kitsune.launches.timing_cache import TimingCache
from kitsune.launches.transforms.partition import first_half, held_by, second_half

Step = Callable[[], Any]
Pair = tuple[Captured, Captured]

#: Most plans to prove before a step stays on one stream. On an H200 one plan of BERT-base in fp32 did not come to the
#: bits of the step, and another one did, 10 % faster than one stream.
PROOFS: Final = 2


class Planner:
    """Captures steps as graphs on up to `streams` streams.

    After a capture, `plan` is the plan that was chosen, or `refusal` says why there is none. `is_erratic`: the step
    cannot be captured on one stream either, because a replay would not do what the step does. `cache` keeps timings and
    winners between processes; None: nothing is looked up or kept.
    """

    def __init__(
        self, recorder: Recorder, streams: int, pool_bytes: int | None = None, cache: TimingCache | None = None
    ) -> None:
        self.race = PlanRace(recorder, streams, pool_bytes, cache)
        self._device = recorder.device
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
        recorded = record(step, self._device)
        self.refusal, self.is_erratic = recorded.refusal, recorded.is_erratic
        if recorded.recording is None:
            return None, recorded.result
        try:
            with EquivalenceCheck(recorded.recording, step, inputs, rates) as check:
                found = self._proven(check)
        # The step has run and must not run again, so any error, also one of the user's code, only ends the planning.
        except Exception as error:  # noqa: BLE001
            self._refuse(error)
            return None, recorded.result
        self.plan, self.passing_bytes = found.plan, found.passing_bytes
        fill(found.static, recorded.result)
        return found.graph, found.static

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

    def _proven(self, check: EquivalenceCheck) -> Captured:
        check_kernels(check.recording, check.step, self._cache)
        found = self.race.plans(check.recording)
        return self._accepted(check.recording, found, WORKSPACES_OF_STEP, lambda one: check.mismatch(one.replay))

    def _undone_pair(self, first: Step, second: Step, prepare: Callable[[], Sequence[torch.Tensor]]) -> Pair | None:
        undo = Undo(self._device)
        try:
            record(first, self._device, undo=undo)
            inputs = prepare()
            recorded = record(first, self._device, second, undo)
            self.refusal, self.is_erratic = recorded.refusal, recorded.is_erratic
            if recorded.recording is None:
                return None
            with EquivalenceCheck(recorded.recording, lambda: (first(), second()), inputs) as check:
                pair = self._proven_pair(check, recorded.cut)
            self.plan = pair[1].plan
            return pair
        finally:
            undo.restore()

    def _proven_pair(self, check: EquivalenceCheck, cut: int) -> Pair:
        recording = check.recording
        check_kernels(recording, check.step, self._cache)
        first = first_half(recording, cut)
        uncaptured = self._plans_of_second(recording, cut, first)
        one = self.race.best(first, self.race.plans(first), WORKSPACES_OF_HALF)
        with first.saved_state():
            # A capture runs nothing, so without a replay an index among the tensors that cross could be any number.
            one.graph.replay()
        returned, crossed = one.static
        found = [replace(plan, recording=held_by(crossed, plan.recording)) for plan in uncaptured]

        def problem_of(two: Captured) -> str | None:
            def replay() -> Any:
                one.graph.replay()
                return returned, two.replay()

            return check.mismatch(replay)

        return one, self._accepted(second_half(recording, cut, crossed), found, WORKSPACES_OF_HALF, problem_of)

    def _plans_of_second(self, recording: Recording, cut: int, first: Recording) -> list[Planned]:
        """Candidates for the second half, timed on the output of an uncaptured run of the first half.

        They do not hold the memory of what crosses yet. Output of a captured run will not do: torch's efficient
        attention leaves the seed of its dropout on the GPU in a capture, and its uncaptured backward reads it on the
        host (SIGSEGV).
        """
        with first.saved_state():
            _, crossed = in_recorded_order(first)()
        found = self.race.plans(second_half(recording, cut, crossed))
        return [replace(plan, recording=replace(plan.recording, held=recording.held)) for plan in found]

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
            best = self.race.best(recording, found, workspaces)
            problem = problem_of(best)
            if problem is None:
                return best.with_note(refused)
            refused = f"; a faster one was refused: {problem}"
            found = [plan for plan in found if plan.schedule is not best.plan.schedule]
            del best  # frees its memory for the next one
            if not found:
                break
        raise CaptureError(f"the planned launches do not do what the step does: {problem}")


def check_kernels(recording: Recording, step: Step, cache: TimingCache | None) -> None:
    """Raises CaptureError when the step launches kernels that are not in the recording.

    Always issues the recorded launches once as a warm-up: libraries such as cuDNN initialise themselves at their first
    call on a thread, which must not happen during a capture.
    """
    if recording.device.type != "cuda":
        return
    again = in_recorded_order(recording)
    with recording.saved_state() as before:
        if cache is not None and cache.are_kernels_known(recording):
            again()
            return
        expected = kernels_of(step)
        before.restore()
        found = kernels_of(again)
    if unseen := difference(expected, found):
        raise CaptureError(unseen)
    if cache is not None:
        cache.keep_kernels_known(recording)


def reason_of(error: Exception) -> str:
    """Why planning failed: the message of a CaptureError; for any other error, its type and first line."""
    if isinstance(error, CaptureError):
        return str(error)
    return f"planning its launches failed: {type(error).__name__}: {first_line(error)}"
