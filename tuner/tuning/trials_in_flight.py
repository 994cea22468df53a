"""Running jobs of a tuning run, and how their outcomes become trials. Does not decide what to try next."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import datetime

from kitsune.knobs import Choice
from tuner.measuring.child_process import Check
from tuner.measuring.crew import Crew, Finished
from tuner.measuring.protocol import Job, Limits
from tuner.records import Comparison, Failure, FailureKind, Measurement, Run, Source, Spent, Trial
from tuner.search.proposal import Proposal
from tuner.search.ranking import rankable
from tuner.statistics.plan_evidence import CANDIDATE, compare_arms, over


@dataclass(frozen=True, slots=True)
class Begun:
    """A running trial. `rival`: the trial whose configuration is the baseline; None if that is the step as given."""

    source: Source
    knobs: Mapping[str, Choice]
    job: Job | None
    started_at: datetime
    rival: Trial | None = None
    proposal: Proposal | None = None


@dataclass(slots=True)
class Work:
    """The running trials of a run. Trials are numbered in the order in which they end, so that no reader misses one."""

    run: Run
    trials: list[Trial]
    crew: Crew
    now: Callable[[], datetime]
    begun: dict[int, Begun] = field(default_factory=dict)

    @property
    def next_number(self) -> int:
        return self.trials[-1].number + 1 if self.trials else 0

    def begin(
        self,
        source: Source,
        knobs: Mapping[str, Choice],
        job: Job,
        limits: Limits,
        *,
        rival: Trial | None = None,
        proposal: Proposal | None = None,
    ) -> Begun:
        begun = Begun(source, dict(knobs), job, self.now(), rival, proposal)
        self.begun[self.crew.begin(job, limits)] = begun
        return begun

    def again(self, begun: Begun, limits: Limits) -> Begun:
        """Starts the trial again in another child, which does not compile ahead in a process of its own."""
        assert begun.job is not None
        self.begun[self.crew.begin(begun.job.model_copy(update={"ahead": False}), limits)] = begun
        return begun

    def underway(self) -> list[tuple[Mapping[str, Choice], float]]:
        """Running configurations with the seconds since their start."""
        now = self.now()
        return [(begun.knobs, (now - begun.started_at).total_seconds()) for begun in self.begun.values()]

    def finished(self, check: Check) -> tuple[Begun, Finished]:
        """Waits for the first trial to end. An exception from `check` propagates and stops no trial."""
        done = self.crew.finished(check)
        return self.begun.pop(done.ticket), done

    def give_up(self, source: Source, knobs: Mapping[str, Choice], why: Failure) -> Trial:
        """Appends a failed trial without running it, such as one that a vanished worker has left unfinished."""
        return self.keep(Begun(source, dict(knobs), None, self.now()), Finished(0, why, Spent(), alone=True))

    def drop(self) -> None:
        """Stops all running trials and discards them."""
        self.crew.drop()
        self.begun.clear()

    def keep(self, begun: Begun, done: Finished, comparison: Comparison | None = None) -> Trial:
        """Appends the outcome as a trial and returns it.

        Without a `comparison`, its speedup is over the step as given, whatever its baseline was. The speedup of a
        search trial is the one by which it is ranked now.
        """
        outcome = done.outcome
        measured = outcome if isinstance(outcome, Measurement) else None
        if measured is not None and comparison is None:
            comparison = compare_arms(measured, measured.arms[0].name, CANDIDATE)
            if begun.rival is not None and begun.rival.comparison is not None:
                comparison = over(comparison, begun.rival.comparison)
        trial = Trial(
            run_id=self.run.id,
            number=self.next_number,
            source=begun.source,
            knobs=begun.knobs,
            measurement=measured,
            comparison=comparison,
            failure=outcome if isinstance(outcome, Failure) else None,
            started_at=begun.started_at,
            finished_at=self.now(),
            spent=done.spent,
        )
        trial = rankable([*self.trials, trial])[-1]
        self.trials.append(trial)
        return trial


def ran_out_of_shared_memory(done: Finished) -> bool:
    """Whether it ran out of memory beside other processes, so that it may succeed alone."""
    outcome = done.outcome
    return isinstance(outcome, Failure) and outcome.kind is FailureKind.OUT_OF_MEMORY and not done.alone
