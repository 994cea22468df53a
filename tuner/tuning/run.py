"""The tuning loop of one run: inspection, search, play-off, confirmation and ablation. It does not use the database."""

import math
import os
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Any

from kitsune.class_tables import ClassTables
from kitsune.errors import BaselineError, NoTrialError
from kitsune.plan import Plan
from tuner.measuring.child_process import Check, go_on
from tuner.measuring.crew import Children, Crew, Finished
from tuner.measuring.gpu_health import DEATHS_OF_A_TRIAL, GIVEN_UP, is_starved
from tuner.measuring.protocol import ArmSpec, Inspection, Job, Limits
from tuner.measuring.scratch import scratch
from tuner.planning.ablation import Chunk, arms_without, expected_s, next_chunk
from tuner.planning.budget import SHORT, budget_message, compile_s, suggested_budget_s, trials_within
from tuner.planning.memory_fit import MemoryFit
from tuner.planning.memory_limit import limit_of, limited, space_of
from tuner.planning.next_trial import next_trial
from tuner.planning.pace import at_once, elapsed_s, is_in_vain, limits_within, spares, timing_s
from tuner.planning.prior_runs import Knowledge, nothing_known
from tuner.planning.reserve import Reserve
from tuner.planning.standings import (
    MAX_CONFIRMATIONS,
    failed_confirmations,
    is_played_off,
    is_unsearched,
    leader,
    rival,
    searched,
    stock_beside,
    to_beat,
    why_nothing,
)
from tuner.records import FailureKind, Measurement, Run, Source, Trial, Verdict
from tuner.search.fitting import MemoryLimit
from tuner.search.space import Space
from tuner.statistics.plan_evidence import CANDIDATE, EAGER, RIVAL, compare_arms, decide, over
from tuner.tuning.class_recording import ENDED, UNASKED, VANISHED, ClassRecording, without
from tuner.tuning.confirmation import Conclusion, Confirmation, Confirmed
from tuner.tuning.events import Ablating, Budgeted, Crowded, Event, Inspected, PlayingOff, Recalled, Tried, Trying
from tuner.tuning.first_look import first_look
from tuner.tuning.interrupts import no_interrupts
from tuner.tuning.trials_in_flight import Begun, Work, ran_out_of_shared_memory
from tuner.wall_clock import utcnow

SEARCH_ROUNDS = 10
PLAYOFF_ROUNDS = 30
SHORT_AT_ONCE = 3  # parallel trials of a short run: step as given, best guess and rival; more would slow them down
ABLATION_ROUNDS = 20
OVERTIME = 0.03  # fraction of the budget by which a confirmation may exceed its expected time
SEARCH_SHARE = 0.5  # fraction of the budget kept for a search in case an earlier plan is not confirmed
REFERENCE_SHARE = 0.05  # fraction of the budget for the numerics reference; the error of each precision takes as much
UNSEARCHED = "nothing but the step as given could be measured in this time; give the run more"
ENDED_EARLY = "the search was ended before anything but the step as given was measured"
#: If the step as given fails like this against itself, every other trial will fail too.
FAILS_ALWAYS = (FailureKind.RAISED, FailureKind.WRONG, FailureKind.NOT_FINITE)

Steps = Generator[Event, None, Conclusion]


def cores() -> int:
    return len(os.sched_getaffinity(0))


class OutOfTime(Exception):  # noqa: N818 - it ends a search and is not an error
    """The rest of the budget is needed to confirm the leader."""


@dataclass(slots=True)
class Tuning:
    """One run. `trials` are those that were stored before, so that a run continues where it stopped.

    `spec` is what the children load: the run's workload, or the archive of a live model. `crew` creates the measuring
    processes from a workload, a device and a number of idle children to keep. An exception from `check` kills the
    running children and propagates. `ablates`: whether `class_tables` and `ablation` measure anything. `interrupts`
    returns how often the user has pressed Ctrl-C; it is polled between trials and while waiting for one. `knows`
    returns results of earlier runs for an inspection and a budget in seconds. `begun_s`: start of the budget by
    `clock`; default now.
    """

    run: Run
    spec: str
    trials: list[Trial] = field(default_factory=list)
    crew: Callable[[str, str, int], Crew] = Children
    clock: Callable[[], float] = time.monotonic
    now: Callable[[], datetime] = utcnow
    check: Check = go_on
    ablates: bool = True
    interrupts: Callable[[], int] = no_interrupts
    knows: Callable[[Inspection, float | None], Knowledge] = nothing_known
    begun_s: float | None = None
    interrupted: bool = False
    _begin_s: float = field(init=False)
    _budget_s: float | None = field(init=False)
    _deaths: int = field(init=False)
    _space: Space = field(init=False)
    _known: Knowledge = field(init=False, default_factory=Knowledge)
    _at_once: int = field(init=False, default=1)
    _step_s: float = field(init=False, default=0.0)
    _is_random: bool = field(init=False, default=False)
    _is_checkpointed: bool = field(init=False, default=False)
    _limit: MemoryLimit | None = field(init=False, default=None)
    _compile_s: float = field(init=False, default=0.0)
    _trials_within: float = field(init=False, default=math.inf)
    _is_recalled: bool = field(init=False, default=False)
    _folder: str | None = field(init=False, default=None)
    _work: Work = field(init=False)

    def __post_init__(self) -> None:
        begun_s = self.clock() if self.begun_s is None else self.begun_s
        self._begin_s = begun_s - elapsed_s(self.trials)
        self._budget_s, self._deaths = self.run.budget_s, self.run.deaths
        self._space = space_of(self.run)

    def steps(self) -> Steps:
        """Yields events; the Conclusion is the generator's return value.

        Raises BaselineError when the step as given fails, NoTrialError when nothing could be measured, and
        WorkloadError when the stored trials are of another workload or machine. An interrupt ends the search, and the
        best so far is confirmed. KeyboardInterrupt has the same effect while waiting for a trial; elsewhere it
        propagates.
        """
        idle = spares(self.run.device, cores())
        with closing(self.crew(self.spec, self.run.device, idle)) as crew, scratch() as folder:
            self._folder = str(folder)
            limits, check = lambda: limits_within(self._left_s()), self._check_or_abort
            inspection = first_look(crew, self.run, self.spec, limits, check, trials=len(self.trials))
            yield Inspected(inspection)
            self._is_checkpointed = inspection.checkpointed
            self.run = limited(self.run, inspection)
            self._limit = limit_of(self.run, inspection)
            self._work = Work(self.run, self.trials, crew, self.now)
            self._space = space_of(self.run, inspection.inapplicable)
            self._at_once, self._step_s = at_once(inspection, cores()), inspection.step_ms / 1e3
            self._is_random, self._compile_s = inspection.random, compile_s(inspection, self._space)
            if self.run.budget_s is None and self.run.budget_trials is None:
                self._budget_s = suggested_budget_s(inspection, self._space, at_once=self._at_once)
                yield Budgeted(self._budget_s, budget_message(self._budget_s, self._space))
            self._trials_within = trials_within(self._left_s() + elapsed_s(self.trials), inspection, self._space)
            if self._trials_within < SHORT:
                self._at_once = min(self._at_once, SHORT_AT_ONCE)
            self._known = self.knows(inspection, self._budget_s)
            again = yield from self._recalled(inspection)
            if again is not None:
                return again
            yield from self._search()
            yield from self._play_off()
            return (yield from self._conclude(inspection))

    def class_tables(
        self, conclusion: Conclusion, *, is_taken_over: bool = False
    ) -> Generator[Event, None, ClassTables]:
        """Records where the time of a step goes within the rest of the budget, after `steps` and before `ablation`.

        `is_taken_over`: as in `ablation`; then nothing is recorded, as that may be what took the worker down.
        """
        if not self.ablates or is_taken_over or self._is_ended():
            return without(VANISHED if is_taken_over else ENDED if self.ablates else UNASKED)
        timeline, idle = conclusion.timeline, min(1, spares(self.run.device, cores()))
        with closing(self.crew(self.spec, self.run.device, idle)) as crew:
            self._folder = None
            recording = ClassRecording(crew, self._job, self._left_s, self._check_or_abort, self.trials)
            return (yield from recording.steps(conclusion.plan, timeline.classes if timeline else ()))

    def ablation(self, plan: Plan, *, is_taken_over: bool = False) -> Generator[Event, None, None]:
        """Measures the contribution of each choice of the confirmed plan within the rest of the budget, after `steps`.

        One trial per process; none for a recalled plan, because the earlier run has them. `is_taken_over`: the plan was
        stored already when the run's earlier worker vanished. The chunk that was being measured is then given up, so
        that each attempt makes progress. An interrupt, or KeyboardInterrupt while waiting for a trial, ends the
        ablation and leaves the plan unchanged.
        """
        if not self.ablates or self._is_recalled or self._is_ended() or self._chunk(plan) is None:
            return
        with closing(self.crew(self.spec, self.run.device, 1)) as crew:
            self._work, self._folder = Work(self.run, self.trials, crew, self.now), None
            if is_taken_over:
                yield Tried(self._work.give_up(Source.ABLATION, plan.knobs, GIVEN_UP))
            while (chunk := self._chunk(plan)) is not None:
                if self._left_s() < expected_s(plan.knobs, chunk, self.trials, self._space) or self._is_ended():
                    return
                yield Ablating(chunk)
                job = self._job(arms_without(plan.knobs, chunk, self._space), ABLATION_ROUNDS, numerics=False)
                self._work.begin(Source.ABLATION, plan.knobs, job, limits_within(self._left_s()))
                done = self._wait()
                if done is None:
                    return
                yield Tried(self._work.keep(*done))

    def _search(self) -> Iterator[Event]:
        """Keeps as many trials running as allowed; a trial that ran out of memory beside others is repeated alone."""
        again: list[Begun] = []
        while True:
            while (begun := self._next(again)) is not None:
                assert begun.proposal is not None
                number = self._work.next_number + len(self._work.begun) - 1
                yield Trying(number, self.run.budget_trials, begun.proposal)
                if begun.job is None:
                    yield Tried(self._work.give_up(begun.source, begun.knobs, GIVEN_UP))
            if not self._work.begun:
                return
            done = self._wait(self._check_search)
            if done is None:
                return
            if ran_out_of_shared_memory(done[1]):
                again.append(done[0])
                yield Crowded(done[0].knobs)
                continue
            trial = self._work.keep(*done)
            yield Tried(trial)
            if trial.source is Source.BASELINE and trial.failure is not None and trial.failure.kind in FAILS_ALWAYS:
                raise BaselineError(f"the step as given fails against itself: {trial.failure.reason}")

    def _next(self, again: list[Begun]) -> Begun | None:
        """Starts the next trial and returns it; None if none can start now."""
        tried, at_work = searched(self.trials), self._work.underway()
        if self._is_ended() or is_starved(tried) or len(at_work) >= (1 if again else self._at_once):
            return None
        if again:
            self._at_once = max(1, self._at_once - 1)
            return self._work.again(again.pop(), self._search_limits())
        if self.run.budget_trials is not None and len(tried) + len(at_work) >= self.run.budget_trials:
            return None
        found = next_trial(
            self._space,
            self.trials,
            self.run.seed,
            left_s=self._left_s() - self._reserve().confirmation_s() - self._reserve().playoff_s(),
            compile_s=self._compile_s,
            at_work=at_work,
            known=self._known.winners,
            trials_within=self._trials_within,
            limit=self._limit,
        )
        if found is None:
            return None
        if self._deaths >= DEATHS_OF_A_TRIAL and found.source is not Source.BASELINE:
            self._deaths = 0  # several workers in a row vanished during this trial
            return Begun(found.source, found.knobs, None, self.now(), proposal=found)
        against = rival(self.trials)
        base = ArmSpec(name=EAGER) if against is None else ArmSpec(name=RIVAL, knobs=against.knobs)
        arms = (base, ArmSpec(name=CANDIDATE, knobs=found.knobs))
        budget_s = timing_s(self._step_s) if against is None else None
        more = {"ahead": self._is_random and self._at_once > 1, "budget_s": budget_s}
        job = self._job(arms, SEARCH_ROUNDS, best_speedup=to_beat(self.trials, found), **more)
        return self._work.begin(found.source, found.knobs, job, self._search_limits(), rival=against, proposal=found)

    def _play_off(self) -> Iterator[Event]:
        """Ranks the best few in one process. Without it (interrupted, no time) the ranking of their trials stands."""
        contenders = self._reserve().contenders(self._left_s() - self._reserve().confirmation_s())
        if len(contenders) < 2 or self._is_ended() or is_played_off(self.trials):
            return
        yield PlayingOff(tuple(trial.knobs for trial in contenders))
        names = [f"contender {number}" for number in range(1, len(contenders) + 1)]
        arms = [ArmSpec(name=name, knobs=trial.knobs) for name, trial in zip(names, contenders, strict=True)]
        job = self._job(tuple(arms), PLAYOFF_ROUNDS, numerics=False)
        self._work.begin(Source.PLAYOFF, contenders[0].knobs, job, self._search_limits())
        done = self._wait()
        if done is not None:
            yield Tried(self._ranked(contenders, names, *done))

    def _ranked(self, contenders: Sequence[Trial], names: Sequence[str], begun: Begun, done: Finished) -> Trial:
        """The play-off stored as a trial of its winner. The first contender is the baseline of the others."""
        first = contenders[0].comparison
        if not isinstance(done.outcome, Measurement) or first is None:
            return self._work.keep(begun, done)
        compared = [first] + [over(compare_arms(done.outcome, names[0], name), first) for name in names[1:]]
        place = max(range(len(names)), key=lambda each: compared[each].speedup.median)
        return self._work.keep(replace(begun, knobs=contenders[place].knobs), done, compared[place])

    def _recalled(self, inspection: Inspection) -> Generator[Event, None, Conclusion | None]:
        """Confirms the plan of an earlier run. None if there is none, it is not confirmed, or this run has trials."""
        proven = self._known.proven
        if proven is None or self.trials or self._deaths:
            return None
        yield Recalled(proven.run_id)
        kept_s = SEARCH_SHARE * (self._budget_s or 0.0)
        confirmed = yield from self._confirmation(inspection, proven.first, proven.stock, kept_s).steps()
        self._is_recalled = confirmed is not None and confirmed.is_for(proven.first.knobs)
        self._known = replace(self._known, proven=replace(proven, prior=None))  # a search confirms without it
        return self._concluded(confirmed, inspection) if confirmed is not None and self._is_recalled else None

    def _conclude(self, inspection: Inspection) -> Steps:
        """Measures the best again in fresh processes, against eager and the best stock configuration.

        An undecided result is not measured again: repeating until a verdict appears would widen every interval
        (decision 0060). If only the step as given was measured, there is no choice that needs a confirmation.
        """
        alone = leader(self.trials)
        if alone is not None and is_unsearched(self.trials, self._space):
            return self._concluded(self._unsearched(alone), inspection)
        while len(failed_confirmations(self.trials)) < MAX_CONFIRMATIONS:
            first = leader(self.trials)
            if first is None:
                break
            confirmed = yield from self._confirmation(inspection, first, stock_beside(first, self.trials)).steps()
            if confirmed is not None:
                return self._concluded(confirmed, inspection)
        raise NoTrialError(why_nothing(self.trials, is_interrupted=self._is_ended()))

    def _confirmation(
        self, inspection: Inspection, first: Trial, stock: Trial | None, kept_s: float = 0.0
    ) -> Confirmation:
        return Confirmation(
            self._work,
            first,
            stock,
            self._job,
            lambda: limits_within(self._left_s() + OVERTIME * (self._budget_s or 0.0)),
            lambda: self._left_s() - kept_s,
            self.check,
            self._at_once,
            MemoryFit.of(inspection, first, stock),
            self._reserve().extent(first, self._left_s()),
            given_fits=not self._is_checkpointed,
        )

    def _unsearched(self, alone: Trial) -> Confirmed:
        """The result of a run that measured only the step as given."""
        assert alone.measurement is not None
        note = ENDED_EARLY if self._is_ended() else UNSEARCHED
        decided = replace(decide([alone.measurement]), verdict=Verdict.AMBIGUOUS, note=note)
        return Confirmed([alone.measurement], decided, {}, None, "")

    def _concluded(self, confirmed: Confirmed, inspection: Inspection) -> Conclusion:
        plan = confirmed.plan(self.run, inspection, budget_s=self._budget_s, interrupted=self._is_ended())
        return Conclusion(plan, confirmed.decision.verdict, self._is_ended(), confirmed.timeline())

    def _wait(self, check: Check | None = None) -> tuple[Begun, Finished] | None:
        """Waits for the first trial to end. None if the user or `check` ended the wait; then all trials are dropped."""
        try:
            return self._work.finished(check or self._check_or_abort)
        except OutOfTime:
            self._work.drop()
            return None
        except KeyboardInterrupt:
            self._work.drop()
            if self.interrupts() > 1:
                raise
            self.interrupted = True
            return None

    def _check_or_abort(self) -> None:
        """Like `check`, but Ctrl-C aborts. Confirmations use `check`, so that Ctrl-C does not end them."""
        self.check()
        if self.interrupts():
            raise KeyboardInterrupt

    def _check_search(self) -> None:
        """The `check` of a search. Raises OutOfTime when the rest of the budget is needed to confirm the leader, or no
        running trial can end before that; never before the step as given, which every result needs, was measured."""
        self._check_or_abort()
        tried = searched(self.trials)
        left_s = self._left_s() - self._reserve().least_s()
        if tried and (left_s < 0 or is_in_vain(self._work.underway(), tried, self._space, left_s)):
            raise OutOfTime

    def _is_ended(self) -> bool:
        self.interrupted = self.interrupted or self.interrupts() > 0
        return self.interrupted

    def _chunk(self, plan: Plan) -> Chunk | None:
        return next_chunk(plan.knobs, self.trials, self._space)

    def _job(self, arms: tuple[ArmSpec, ...], rounds: int, **more: object) -> Job:
        reference_s = None if self._budget_s is None else REFERENCE_SHARE * self._budget_s
        given: dict[str, Any] = self.run.model_dump(include={"device", "seed", "memory_limit_bytes"})
        given |= {"workload": self.spec, "folder": self._folder, "step_ms": 1e3 * self._step_s or None}
        given["checkpointed"] = self._is_checkpointed
        return Job.model_validate({**given, "reference_s": reference_s, "arms": arms, "rounds": rounds, **more})

    def _left_s(self) -> float:
        """Seconds left in the budget; infinite when only trials are counted."""
        return math.inf if self._budget_s is None else self._budget_s - (self.clock() - self._begin_s)

    def _reserve(self) -> Reserve:
        return Reserve(self.trials, self._known, self._at_once, self._budget_s, self._step_s, self._is_random)

    def _search_limits(self) -> Limits:
        return limits_within(self._left_s() - self._reserve().confirmation_s())
