"""A run in, trials out one by one, and in the end the plan. Knows children and search, but no database."""

import math
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime

from kitsune.errors import BaselineError, NoTrialError, WorkloadError
from kitsune.knobs import Choice
from kitsune.plan import Match, Plan
from kitsune.timeline import Timeline
from tuner import measure as measuring
from tuner.ablation import Chunk, arms_without, next_chunk
from tuner.contenders import contenders_of, ranking_noise
from tuner.events import Ablating, Confirming, Event, Inspected, PlayingOff, Tried, Trying
from tuner.fitness import DEATHS_OF_A_TRIAL, GIVEN_UP, is_starved
from tuner.interrupts import no_interrupts
from tuner.protocol import ArmSpec, Inspection, Job, Limits
from tuner.records import Comparison, Failure, FailureKind, Measurement, Run, Source, Trial, Verdict
from tuner.search import Proposal, best, best_stock, is_success, propose, speedup
from tuner.space import Space
from tuner.stats import noise_floor
from tuner.supervise import Check, go_on
from tuner.verdicts import CANDIDATE, EAGER, Decision, compare_arms, confirmation_arms, decide, plan_from
from tuner.wall_clock import utcnow

SEARCH_ROUNDS = 15
CONFIRM_ROUNDS = 30
ABLATION_ROUNDS = 20
MAX_CONFIRMATIONS = 3  # that fail
SLOW_FACTOR = 4.0  # on an H200, autotuning over compiling: GPT-2 171 s and 40 s, ResNet-50 more than 222 s and 50 s
MIN_CHILD_S = 30.0  # importing torch and a first step take up to 15 s on a busy machine
#: A step that fails like this against itself does so in every other trial too.
FAILS_ALWAYS = (FailureKind.RAISED, FailureKind.WRONG, FailureKind.NOT_FINITE)

Steps = Generator[Event, None, "Conclusion"]
Confirmed = tuple[Measurement, Decision]


@dataclass(frozen=True, slots=True)
class Conclusion:
    """What a run came to. `interrupted` when the user ended the search early.

    `timeline`: the launches of a step by the plan, where the plan has them scheduled.
    """

    plan: Plan
    verdict: Verdict
    interrupted: bool
    timeline: Timeline | None = None


@dataclass(slots=True)
class Tuning:
    """One run on its way. `trials` are those that were stored before, so that a run goes on where it stopped.

    `spec` is what the children load: the run's workload, or the archive that stands for a live model. What `check`
    raises kills the child of the moment and propagates. `ablates`: whether `ablation` measures anything. `interrupts`:
    how often the user has pressed Ctrl-C; it is asked between trials, and while one is waited for.
    """

    run: Run
    spec: str
    trials: list[Trial] = field(default_factory=list)
    measure: Callable[..., Measurement | Failure] = measuring.measure
    inspect: Callable[..., Inspection | Failure] = measuring.inspect
    clock: Callable[[], float] = time.monotonic
    now: Callable[[], datetime] = utcnow
    check: Check = go_on
    ablates: bool = True
    interrupts: Callable[[], int] = no_interrupts
    interrupted: bool = False
    _begin_s: float = field(init=False)
    _deaths: int = field(init=False)
    _space: Space = field(init=False)

    def __post_init__(self) -> None:
        self._begin_s = self.clock() - sum(trial.took_s for trial in self.trials)
        self._deaths = self.run.deaths
        self._space = Space.of(self.run.inapplicable)

    def steps(self) -> Steps:
        """Yields events; the Conclusion is the generator's return value.

        Raises BaselineError when the step fails as given, NoTrialError when nothing at all could be measured, and
        WorkloadError when the stored trials are of another workload or machine. An interrupt ends the search, and what
        is best so far is confirmed. KeyboardInterrupt does so too where a trial is waited for; elsewhere it propagates.
        """
        inspection = self._inspected()
        yield Inspected(inspection)
        self._space = Space.of(inspection.inapplicable)
        yield from self._search(self._space)
        yield from self._play_off()
        return (yield from self._conclude(inspection))

    def ablation(self, plan: Plan, *, is_taken_over: bool = False) -> Generator[Event, None, None]:
        """Measures what each choice of the confirmed plan gives, in what is left of the budget; may follow `steps`.

        One trial for each process. `is_taken_over`: by a run whose worker vanished when the plan was stored already.
        What it may have been about is given up, so each attempt comes forward. An interrupt, or KeyboardInterrupt
        where a trial is waited for, ends this, and the plan stays as it is.
        """
        if not self.ablates or self._is_ended():
            return
        if is_taken_over and self._chunk(plan) is not None:
            yield Tried(self._keep(Source.ABLATION, plan.knobs, GIVEN_UP, None, self.now()))
        while (chunk := self._chunk(plan)) is not None and self._left_s() >= self._ablation_s(plan, chunk):
            if self._is_ended():
                return
            yield Ablating(chunk)
            trial = self._leave_out(plan, chunk)
            if trial is None:
                return
            yield Tried(trial)

    def _inspected(self) -> Inspection:
        limits = limits_within(self._left_s())
        found = self.inspect(self.spec, self.run.device, seed=self.run.seed, limits=limits, check=self._ask)
        if isinstance(found, Failure):
            raise BaselineError(f"the workload fails as given: {found.reason}")
        if self.trials and (change := self._change(found)):
            raise WorkloadError(
                f"{change} since {len(self.trials)} trials of run {self.run.id} were made, so they say nothing about "
                "it; start a new run"
            )
        return found

    def _change(self, found: Inspection) -> str | None:
        """What is no longer as it was when the run was last worked on, in words."""
        before = self.run.environment
        if self.run.fingerprint not in ("", found.fingerprint):
            return f"{self.run.workload} has changed"
        if before is not None and before.match(found.environment)[0] is Match.REFUSED:
            return f"the run has moved from {before.gpu} to {found.environment.gpu}"
        return None

    def _search(self, space: Space) -> Iterator[Event]:
        while not self._is_ended() and self._may_go_on():
            proposal = propose(space, self._searched(), self.run.seed, is_patient=self._is_patient(space))
            if proposal is None:
                return
            yield Trying(self._next_number(), self.run.budget_trials, proposal)
            trial = self._given_up(proposal) or self._try(proposal)
            if trial is None:
                return
            yield Tried(trial)
            if trial.source is Source.BASELINE and trial.failure is not None and trial.failure.kind in FAILS_ALWAYS:
                raise BaselineError(f"the step as given fails against itself: {trial.failure.reason}")

    def _given_up(self, proposal: Proposal) -> Trial | None:
        """What workers in a row vanished over; None where it is to be tried, as the step as given always is."""
        if self._deaths < DEATHS_OF_A_TRIAL or proposal.source is Source.BASELINE:
            return None
        self._deaths = 0
        return self._keep(proposal.source, proposal.knobs, GIVEN_UP, None, self.now())

    def _try(self, proposal: Proposal) -> Trial | None:
        """None when the user interrupts it."""
        arms = (ArmSpec(name=EAGER), ArmSpec(name=CANDIDATE, knobs=proposal.knobs))
        job = self._job(arms, SEARCH_ROUNDS, self._to_beat(proposal))
        return self._measured(proposal.source, proposal.knobs, job, self._left_s() - self._confirmation_s())

    def _measured(self, source: Source, knobs: Mapping[str, Choice], job: Job, within_s: float) -> Trial | None:
        """A candidate beside the step as given; None when the user interrupts it."""
        started_at = self.now()
        outcome = self._waited_for(job, within_s)
        if outcome is None:
            return None
        comparison = (
            compare_arms(outcome, EAGER, CANDIDATE, self._noise()) if isinstance(outcome, Measurement) else None
        )
        return self._keep(source, knobs, outcome, comparison, started_at)

    def _waited_for(self, job: Job, within_s: float) -> Measurement | Failure | None:
        """None when the user interrupts it."""
        try:
            return self.measure(job, limits=limits_within(within_s), check=self._ask)
        except KeyboardInterrupt:
            if self.interrupts() > 1:
                raise
            self.interrupted = True
            return None

    def _ask(self) -> None:
        """The `check` of what an interrupt ends at once; to a confirmation that one begins, it does not matter."""
        self.check()
        if self.interrupts():
            raise KeyboardInterrupt

    def _is_ended(self) -> bool:
        self.interrupted = self.interrupted or self.interrupts() > 0
        return self.interrupted

    def _play_off(self) -> Iterator[Event]:
        """Ranks the best few in one process; interrupted, or short of time, the ranking of their own trials stands."""
        contenders = contenders_of(self._unrefused())
        longest_s = 2 * sum(trial.took_s for trial in contenders)
        if len(contenders) < 2 or self._is_ended() or self._left_s() < self._confirmation_s() + longest_s:
            return
        if self._is_played_off():
            return
        yield PlayingOff(tuple(trial.knobs for trial in contenders))
        started_at = self.now()
        names = [f"contender {number}" for number in range(1, len(contenders) + 1)]
        arms = [ArmSpec(name=name, knobs=trial.knobs) for name, trial in zip(names, contenders, strict=True)]
        job = self._job((ArmSpec(name=EAGER), *arms), SEARCH_ROUNDS, numerics=False)
        outcome = self._waited_for(job, self._left_s() - self._confirmation_s())
        if outcome is None:
            return
        if isinstance(outcome, Failure):
            yield Tried(self._keep(Source.PLAYOFF, contenders[0].knobs, outcome, None, started_at))
            return
        compared = {name: compare_arms(outcome, EAGER, name, self._noise()) for name in names}
        first = max(names, key=lambda name: compared[name].speedup.median)
        knobs = contenders[names.index(first)].knobs
        yield Tried(self._keep(Source.PLAYOFF, knobs, outcome, compared[first], started_at))

    def _conclude(self, inspection: Inspection) -> Steps:
        """Measures the best again in a fresh process, against eager and the best stock configuration.

        Where that leaves a gain open, once more with twice the rounds; then only those samples count. Taking the
        second look makes a false FASTER at most twice as likely (p < 0.01 in each).
        """
        while len(self._failed_confirmations()) < MAX_CONFIRMATIONS and (leader := self._leader()) is not None:
            confirmed = yield from self._confirm(leader, CONFIRM_ROUNDS)
            if confirmed is None:
                continue
            if self._may_look_again(confirmed[1]):
                confirmed = (yield from self._confirm(leader, 2 * CONFIRM_ROUNDS)) or confirmed
            measurement, decision = confirmed
            stock = best_stock(self._unrefused())
            numerics = stock.measurement.numerics if stock is not None and stock.measurement is not None else None
            plan = plan_from(measurement, decision, self.run.id, inspection, numerics)
            is_candidate = decision.chosen == measurement.arms[-1].name
            timeline = measurement.timeline if is_candidate else None
            return Conclusion(plan, decision.verdict, self._is_ended(), timeline)
        raise NoTrialError(self._why_nothing())

    def _confirm(self, leader: Trial, rounds: int) -> Generator[Event, None, Confirmed | None]:
        """None when it failed."""
        yield Confirming(leader.knobs)
        started_at = self.now()
        stock = best_stock(self._unrefused())
        arms = confirmation_arms(leader.knobs, None if stock is None else stock.knobs)
        limits = limits_within(max(self._left_s(), 2 * self._confirmation_s()))
        job = self._job(arms, rounds).model_copy(update={"timeline": True})
        outcome = self.measure(job, limits=limits, check=self.check)
        if isinstance(outcome, Failure):
            yield Tried(self._keep(Source.CONFIRM, leader.knobs, outcome, None, started_at))
            return None
        decision = decide(outcome, self._noise())
        yield Tried(self._keep(Source.CONFIRM, leader.knobs, outcome, decision.comparison, started_at))
        return outcome, decision

    def _leave_out(self, plan: Plan, chunk: Chunk) -> Trial | None:
        """None when the user interrupts it."""
        job = self._job(arms_without(plan.knobs, chunk, self._space), ABLATION_ROUNDS, numerics=False)
        return self._measured(Source.ABLATION, plan.knobs, job, self._left_s())

    def _chunk(self, plan: Plan) -> Chunk | None:
        return next_chunk(plan.knobs, self.trials, self._space)

    def _ablation_s(self, plan: Plan, chunk: Chunk) -> float:
        """What measuring it may take: for each step but the one as given the time of the plan's own trial."""
        of_plan = (trial.took_s for trial in self._searched() if trial.knobs == plan.knobs)
        return (len(arms_without(plan.knobs, chunk, self._space)) - 1) * max(of_plan, default=0.0)

    def _keep(
        self,
        source: Source,
        knobs: Mapping[str, Choice],
        outcome: Measurement | Failure,
        comparison: Comparison | None,
        started_at: datetime,
    ) -> Trial:
        trial = Trial(
            run_id=self.run.id,
            number=self._next_number(),
            source=source,
            knobs=dict(knobs),
            measurement=outcome if isinstance(outcome, Measurement) else None,
            comparison=comparison,
            failure=outcome if isinstance(outcome, Failure) else None,
            started_at=started_at,
            finished_at=self.now(),
        )
        self.trials.append(trial)
        return trial

    def _job(
        self, arms: tuple[ArmSpec, ...], rounds: int, best_speedup: float | None = None, *, numerics: bool = True
    ) -> Job:
        return Job(
            workload=self.spec,
            device=self.run.device,
            seed=self.run.seed,
            arms=arms,
            rounds=rounds,
            best_speedup=best_speedup,
            numerics=numerics,
        )

    def _next_number(self) -> int:
        return self.trials[-1].number + 1 if self.trials else 0

    def _searched(self) -> list[Trial]:
        return [trial for trial in self.trials if trial.source.is_search]

    def _is_played_off(self) -> bool:
        """Whether the best few have met since the last search, in this process or in one that died afterwards.

        To play off again would be a new trial of each attempt, by which a run that kills its workers in the
        confirmation looks as if it came forward, and is never given up.
        """
        ranked = [trial.source for trial in self.trials if trial.source.is_search or trial.source is Source.PLAYOFF]
        return ranked[-1:] == [Source.PLAYOFF]

    def _failed_confirmations(self) -> list[Trial]:
        return [trial for trial in self.trials if trial.source is Source.CONFIRM and trial.failure is not None]

    def _unrefused(self) -> list[Trial]:
        """What was searched, without what could not be confirmed."""
        refused = [trial.knobs for trial in self._failed_confirmations()]
        return [trial for trial in self._searched() if trial.knobs not in refused]

    def _leader(self) -> Trial | None:
        """The best trial whose confirmation has not failed.

        The last try goes to the best stock configuration: it needs one arm less, and what three arms in one process
        fail of (memory, above all) hits every other candidate alike.
        """
        is_last_try = len(self._failed_confirmations()) == MAX_CONFIRMATIONS - 1
        safest = best_stock(self._unrefused()) if is_last_try else None
        won = [trial.knobs for trial in self.trials if trial.source is Source.PLAYOFF and is_success(trial)]
        winners = [trial for trial in self._unrefused() if is_success(trial) and trial.knobs in won]
        return safest or best(winners) or best(self._unrefused())

    def _to_beat(self, proposal: Proposal) -> float | None:
        """The speedup below which a trial may be stopped early; rivals are measured in full."""
        leader = None if proposal.source in (Source.BASELINE, Source.STOCK) else self._leader()
        return None if leader is None else speedup(leader) * (1 - ranking_noise(self._searched()))

    def _noise(self) -> float:
        """The noise floor that the step measured against itself."""
        for trial in self.trials:
            if trial.source is Source.BASELINE and trial.comparison is not None:
                return noise_floor(trial.comparison)
        return 0.0

    def _may_go_on(self) -> bool:
        """Whether the budget holds another trial that is as quick as the quickest so far, and the confirmation."""
        searched = self._searched()
        if is_starved(searched) or (self.run.budget_trials is not None and len(searched) >= self.run.budget_trials):
            return False
        quickest_s = min((trial.took_s for trial in searched if is_success(trial)), default=0.0)
        return self._left_s() > quickest_s + self._confirmation_s()

    def _is_patient(self, space: Space) -> bool:
        """Whether the budget holds a trial that takes minutes to compile, by what trials took so far."""
        tried = list(filter(is_success, self._searched()))
        slow_s = [trial.took_s for trial in tried if space.is_slow(trial.knobs)]
        needed_s = max(slow_s) if slow_s else SLOW_FACTOR * max((trial.took_s for trial in tried), default=0.0)
        return self._left_s() > needed_s + self._confirmation_s()

    def _may_look_again(self, decision: Decision) -> bool:
        """Whether twice the rounds could help: not where time ended the first look, or the user did."""
        if not decision.is_open or self._is_ended() or decision.comparison.blocks < CONFIRM_ROUNDS:
            return False
        return self._left_s() > 2 * self.trials[-1].took_s

    def _left_s(self) -> float:
        """Seconds of the budget that are left; infinite when only trials are counted."""
        return math.inf if self.run.budget_s is None else self.run.budget_s - (self.clock() - self._begin_s)

    def _confirmation_s(self) -> float:
        """What confirming the leader may take: its own trial's time and that of the best stock configuration."""
        wanted = [trial for trial in (self._leader(), best_stock(self._unrefused())) if trial is not None]
        return sum(trial.took_s for trial in wanted)

    def _why_nothing(self) -> str:
        if unconfirmed := self._failed_confirmations():
            number = len(unconfirmed)
            return f"the best {number} failed when they were measured afresh; the first: {reason(unconfirmed)}"
        failed = [trial for trial in self.trials if trial.failure is not None]
        if failed:
            return f"all {len(failed)} trials failed; the first: {reason(failed)}"
        if self._is_ended():
            return "the search was interrupted before anything was measured"
        return "the budget ended before anything was measured; give more time"


def reason(failed: Iterable[Trial]) -> str:
    """Why the first of the failed trials failed."""
    return next(trial.failure.reason for trial in failed if trial.failure is not None)


def limits_within(left_s: float) -> Limits:
    """The limits of a child for which so many seconds are left."""
    return Limits() if left_s == math.inf else Limits(total_s=max(MIN_CHILD_S, left_s))
