"""PlanRace: finds the fastest plan of a step by replays of its graphs."""

import math
import time
from collections.abc import Sequence
from typing import Final

from kitsune.device.backend import release_cached
from kitsune.device.cuda_graph import Recorder
from kitsune.errors import CaptureError
from kitsune.launches.captured import Captured, capture
from kitsune.launches.execution.graph_benchmark import MAX_RATIO, MAX_RATIO_AMONG, Clock, is_faster, replay_ms
from kitsune.launches.model.recording import Recording
from kitsune.launches.plans import Planned, costs_of, most_taken, plans
from kitsune.launches.timing_cache import TimingCache, key_of

#: Time limit of a race in seconds, or the time of RACE_STEPS steps if that is longer. Plans that were best for most
#: models come first. On eight streams, H200 hosts got through 11 to 22 of the 23 to 27 plans of BERT-base, depending on
#: the speed of the host.
RACE_S: Final = 3.0
RACE_STEPS: Final = 500
WON_BEFORE: Final = "; the winner of an earlier process, timed against one stream only"


class PlanRace:
    """Races the plans of a recording on up to `streams` streams. `cache` keeps timings and winners between processes.

    On a CPU there is no race: the plan with the shortest predicted time is used.
    """

    clock: Clock = staticmethod(replay_ms)

    def __init__(self, recorder: Recorder, streams: int, pool_bytes: int | None, cache: TimingCache | None) -> None:
        self._recorder = recorder
        self._streams = streams
        self._pool_bytes = pool_bytes
        self._cache = cache

    def plans(self, recording: Recording) -> list[Planned]:
        return plans(recording, self._streams, self._pool_bytes, self.costs_us)

    def costs_us(self, recording: Recording) -> list[float]:
        if self._cache is None or recording.device.type != "cuda":  # times on a CPU vary too much to be kept
            return costs_of(recording)
        return self._cache.costs_us(recording, costs_of)

    def best(self, recording: Recording, found: Sequence[Planned], workspaces: int) -> Captured:
        """The fastest of these plans, captured in the step's pool."""
        if self._recorder.executes or len(found) == 1:
            return capture(min(found, key=lambda plan: plan.schedule.makespan_us), self._recorder)
        with recording.saved_state():
            plan, said = self._winner(recording, found, workspaces)
            release_cached(recording.device)
            return capture(plan, self._recorder).with_note(said)

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

    def tried(self, plan: Planned) -> Captured:
        """The plan, captured in a pool that is freed with its graph: a losing plan must not enlarge the step's pool."""
        return capture(plan, self._recorder.apart())

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
