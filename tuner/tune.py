"""A run in, trials out one by one, and in the end the plan. Knows children and search, but no database."""

import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime

from kitsune.errors import BaselineError, NoTrialError
from kitsune.knobs import Choice
from kitsune.plan import Plan
from tuner import measure as measuring
from tuner.events import Confirming, Event, Inspected, Tried, Trying
from tuner.protocol import ArmSpec, Inspection, Job, Limits
from tuner.records import Comparison, Failure, Measurement, Run, Source, Trial, Verdict
from tuner.search import Proposal, best_stock, is_success, propose, speedup
from tuner.space import Space
from tuner.stats import noise_floor
from tuner.verdicts import CANDIDATE, EAGER, STOCK, compare_arms, plan_from

SEARCH_ROUNDS = 15
CONFIRM_ROUNDS = 30
MAX_CONFIRMATIONS = 3
MIN_PHASE_S = 30.0

Clock = Callable[[], float]
Steps = Generator[Event, None, "Conclusion"]


@dataclass(frozen=True, slots=True)
class Conclusion:
    """What a run came to. `interrupted` when the user ended the search early."""

    plan: Plan
    verdict: Verdict
    interrupted: bool


@dataclass(slots=True)
class Tuning:
    """One run on its way. `trials` are those that were stored before, so that a run goes on where it stopped.

    `spec` is what the children load: the run's workload, or the archive that stands for a live model.
    """

    run: Run
    spec: str
    trials: list[Trial] = field(default_factory=list)
    measure: Callable[..., Measurement | Failure] = measuring.measure
    inspect: Callable[..., Inspection | Failure] = measuring.inspect
    clock: Clock = time.monotonic
    interrupted: bool = False
    _begin_s: float = 0.0

    def steps(self) -> Steps:
        """Yields events; the Conclusion is the generator's return value.

        Raises BaselineError when the workload fails as given, NoTrialError when nothing at all could be measured.
        KeyboardInterrupt during a trial ends the search, and what is best so far is confirmed.
        """
        self._begin_s = self.clock()
        inspection = self.inspect(self.spec, self.run.device, seed=self.run.seed, limits=self._limits())
        if isinstance(inspection, Failure):
            raise BaselineError(f"the workload fails as given: {inspection.reason}")
        yield Inspected(inspection)
        yield from self._search(Space.of(inspection.inapplicable))
        return (yield from self._conclude(inspection))

    def _search(self, space: Space) -> Iterator[Event]:
        while not self.interrupted and self._may_go_on():
            proposal = propose(space, self._searched(), self.run.seed)
            if proposal is None:
                return
            yield Trying(len(self.trials), self.run.budget_trials, proposal)
            trial = self._try(proposal)
            if trial is not None:
                yield Tried(trial)

    def _try(self, proposal: Proposal) -> Trial | None:
        started_at = datetime.now(UTC)
        job = self._job((ArmSpec(name=CANDIDATE, knobs=proposal.knobs),), SEARCH_ROUNDS, self._to_beat(proposal))
        try:
            outcome = self.measure(job, limits=self._limits())
        except KeyboardInterrupt:
            self.interrupted = True
            return None
        comparison = None if isinstance(outcome, Failure) else self._compared(outcome, EAGER)
        return self._keep(proposal.source, proposal.knobs, outcome, comparison, started_at)

    def _conclude(self, inspection: Inspection) -> Steps:
        """Measures the best again in a fresh process, against eager and the best stock configuration."""
        refused: set[str] = set()
        for _ in range(MAX_CONFIRMATIONS):
            candidate = self._leader(refused)
            if candidate is None:
                break
            yield Confirming(candidate.knobs)
            trial = self._confirm(candidate)
            yield Tried(trial)
            if trial.measurement is not None:
                plan, verdict, _ = plan_from(trial.measurement, self.run.id, inspection.fingerprint, self._noise())
                return Conclusion(plan, verdict, self.interrupted)
            refused.add(candidate.model_dump_json(include={"knobs"}))
        raise NoTrialError(self._why_nothing())

    def _confirm(self, candidate: Trial) -> Trial:
        started_at = datetime.now(UTC)
        stock = best_stock(self.trials)
        arms = [ArmSpec(name=CANDIDATE, knobs=candidate.knobs)]
        if stock is not None and stock.knobs and stock.knobs != candidate.knobs:
            arms.insert(0, ArmSpec(name=STOCK, knobs=stock.knobs))
        outcome = self.measure(self._job(tuple(arms), CONFIRM_ROUNDS, None), limits=Limits())
        comparison = None
        if not isinstance(outcome, Failure):
            comparison = self._compared(outcome, STOCK if len(arms) > 1 else EAGER)
        return self._keep(Source.CONFIRM, candidate.knobs, outcome, comparison, started_at)

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
            number=len(self.trials),
            source=source,
            knobs=dict(knobs),
            measurement=outcome if isinstance(outcome, Measurement) else None,
            comparison=comparison,
            failure=outcome if isinstance(outcome, Failure) else None,
            started_at=started_at,
            finished_at=datetime.now(UTC),
        )
        self.trials.append(trial)
        return trial

    def _job(self, arms: Sequence[ArmSpec], rounds: int, best_speedup: float | None) -> Job:
        return Job(
            workload=self.spec,
            device=self.run.device,
            seed=self.run.seed,
            arms=(ArmSpec(name=EAGER), *arms),
            rounds=rounds,
            best_speedup=best_speedup,
        )

    def _compared(self, measurement: Measurement, baseline: str) -> Comparison:
        return compare_arms(measurement, baseline, CANDIDATE, self._noise())

    def _searched(self) -> list[Trial]:
        return [trial for trial in self.trials if trial.source is not Source.CONFIRM]

    def _leader(self, refused: set[str]) -> Trial | None:
        """The best trial whose confirmation has not failed."""
        open_trials = [
            trial
            for trial in self._searched()
            if is_success(trial) and trial.model_dump_json(include={"knobs"}) not in refused
        ]
        return max(open_trials, key=speedup, default=None)

    def _to_beat(self, proposal: Proposal) -> float | None:
        """The speedup below which a trial may be stopped early; baselines are measured in full."""
        if proposal.source in (Source.BASELINE, Source.STOCK):
            return None
        leader = self._leader(set())
        return None if leader is None else speedup(leader)

    def _noise(self) -> float:
        """The noise floor that the step measured against itself."""
        for trial in self.trials:
            if trial.source is Source.BASELINE and trial.comparison is not None:
                return noise_floor(trial.comparison)
        return 0.0

    def _may_go_on(self) -> bool:
        if self.run.budget_trials is not None and len(self._searched()) >= self.run.budget_trials:
            return False
        return self.run.budget_s is None or self._left_s() > self._confirmation_s()

    def _left_s(self) -> float:
        assert self.run.budget_s is not None
        return self.run.budget_s - (self.clock() - self._begin_s)

    def _confirmation_s(self) -> float:
        """What confirming the leader may take: its own trial's time and that of the best stock configuration."""
        wanted = [trial for trial in (self._leader(set()), best_stock(self.trials)) if trial is not None]
        return sum((trial.finished_at - trial.started_at).total_seconds() for trial in wanted)

    def _limits(self) -> Limits:
        """A time budget bounds each phase of a trial too."""
        if self.run.budget_s is None:
            return Limits()
        left_s = max(MIN_PHASE_S, self._left_s())
        return Limits(**{name: min(value, left_s) for name, value in Limits().model_dump().items()})

    def _why_nothing(self) -> str:
        failures = [trial.failure for trial in self.trials if trial.failure is not None]
        if self.interrupted and not failures:
            return "the search was interrupted before anything was measured"
        if not failures:
            return "the budget ended before anything was measured; give more trials or time"
        return f"all {len(failures)} trials failed; the first: {failures[0].reason}"
