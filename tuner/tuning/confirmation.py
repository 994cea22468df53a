"""Confirms the best configuration of a search: times it in fresh processes and runs the long numerics gate.

The gate runs in one more process in parallel and pauses while another process is timed.
"""

from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final

from kitsune.long_proof import LongProof
from kitsune.plan import Evidence, Numerics, Plan
from kitsune.timeline import Timeline
from tuner.measuring.child_process import Check
from tuner.measuring.crew import Finished
from tuner.measuring.protocol import ArmSpec, Inspection, Job, Limits
from tuner.planning.memory_fit import MemoryFit
from tuner.planning.pace import eager_processes
from tuner.planning.prior_runs import AGAIN
from tuner.records import Comparison, Failure, FailureKind, Measurement, Phase, Run, Source, Trial, Verdict
from tuner.search.space import Configuration
from tuner.statistics.plan_evidence import (
    CANDIDATE,
    EAGER,
    STOCK,
    Decision,
    arms_of,
    confirmation_arms,
    decide,
    has_eager,
    plan_from,
)
from tuner.statistics.process_statistics import PROCESSES, ROUNDS, ConfirmationSize, Prior
from tuner.tuning.events import Confirming, Crowded, Event, Tried
from tuner.tuning.trials_in_flight import Begun, Work, ran_out_of_shared_memory

#: Failures after which the long numerics gate has no result.
UNSEEN: Final = (FailureKind.TIMEOUT, FailureKind.OUT_OF_MEMORY)

UNLOOKED: Final = "its numbers were not looked at for longer"
OUT_OF_TIME: Final = Failure(
    kind=FailureKind.TIMEOUT, phase=Phase.TIMING, reason="time was over before the step as given was timed beside it"
)


@dataclass(frozen=True, slots=True)
class Confirmed:
    """The result of a confirmation: measurements, decision and the result of the long numerics gate (`proof`).

    `unproven`: why there is no proof; empty if there is one, or if the plan is the step as given, which needs none.
    """

    measured: Sequence[Measurement]
    decision: Decision
    numerics: dict[str, Numerics]
    proof: LongProof | None
    unproven: str

    def plan(self, run: Run, inspection: Inspection, *, budget_s: float | None, interrupted: bool) -> Plan:
        """The plan with its evidence. `budget_s`: budget of the search; `interrupted`: whether the user ended it."""
        plan = plan_from(self.measured, self.decision, run.id, inspection, self.numerics)
        assert plan.evidence is not None
        search = {"budget_s": budget_s, "memory_limit_bytes": run.memory_limit_bytes, "interrupted": interrupted}
        evidence = plan.evidence.model_copy(update=search)
        return plan.model_copy(update={"evidence": self._with_proof(evidence) if self._is_of_candidate else evidence})

    def timeline(self) -> Timeline | None:
        """The launches of a step if the plan is the candidate and they were recorded, else None."""
        return next((each.timeline for each in self.measured if self._is_of_candidate and each.timeline), None)

    def is_for(self, knobs: Configuration) -> bool:
        """Whether the plan has exactly these choices."""
        return dict(arms_of(self.measured, self.decision.chosen)[0].knobs) == dict(knobs)

    @property
    def _is_of_candidate(self) -> bool:
        return self.decision.chosen == self.measured[0].arms[-1].name

    def _with_proof(self, evidence: Evidence) -> Evidence:
        note = "; ".join(filter(None, (evidence.note, self.unproven)))
        return evidence.model_copy(update={"proof": self.proof, "note": note})


@dataclass(frozen=True, slots=True)
class Conclusion:
    """The result of a run. `interrupted`: whether the user ended the search early.

    `timeline`: the launches of a step under the plan, if the plan schedules launches.
    """

    plan: Plan
    verdict: Verdict
    interrupted: bool
    timeline: Timeline | None = None


@dataclass(slots=True)
class Confirmation:
    """The confirmation of one candidate. `job` makes jobs of this run; `left_s` gives the time left in seconds."""

    work: Work
    first: Trial
    stock: Trial | None
    job: Callable[..., Job]
    limits: Callable[[], Limits]
    left_s: Callable[[], float]
    check: Check
    at_once: int
    memory: MemoryFit
    extent: ConfirmationSize
    given_fits: bool = True  # whether the step as given fits into the memory of the device
    _proof: LongProof | None = None
    _measured: list[Measurement] = field(default_factory=list)
    _has_timeline: bool = False
    _longest_s: float = 0.0
    _is_cut_off: bool = False
    _unproven: str = ""

    def steps(self) -> Generator[Event, None, Confirmed | None]:
        """Yields one trial per timed process. Returns None if a process failed or the long numerics gate did."""
        yield Confirming(self.first.knobs)
        while True:
            while (job := self._next()) is not None:
                self.work.begin(Source.CONFIRM, self.first.knobs, job, self.limits())
            if not self.work.begun:
                break
            begun, done = self.work.finished(self.check)
            if ran_out_of_shared_memory(done):
                self.at_once = max(1, len(self.work.begun))
                yield Crowded(self.first.knobs)
            elif isinstance(done.outcome, LongProof):
                self._proof = done.outcome
            elif isinstance(done.outcome, Measurement):
                self._measured.append(done.outcome)
                self._has_timeline |= begun.job is not None and begun.job.timeline
                self._longest_s = max(self._longest_s, done.spent.total_s)
                yield Tried(self.work.keep(begun, done, self._compared()))
            elif not self._is_harmless(begun, done):
                self.work.drop()
                yield Tried(self.work.keep(begun, done))
                return None
        if not has_eager(self._measured):
            yield Tried(self.work.give_up(Source.CONFIRM, self.first.knobs, OUT_OF_TIME))
            return None
        unproven = self._unproven or (f"{UNLOOKED}: there was no time" if self._lacks_proof() else "")
        decision, proof = self._decided(), self._proof or self.extent.proof
        return Confirmed(self._measured, decision, self._numerics(), proof, unproven)

    def _next(self) -> Job | None:
        """The first due job that fits into memory beside the running ones; None if there is none."""
        at_work = self._at_work()
        if len(at_work) >= self.at_once:
            return None
        return next((job for job in self._due() if not at_work or self.memory.fits(job, at_work)), None)

    def _due(self) -> Iterator[Job]:
        """Jobs that may start now, in order of priority: the long numerics gate, which takes longest; processes that
        time the step as given too, until enough undisturbed ones exist; then the others."""
        if self._is_enough():
            return
        if self._lacks_proof() and self.extent.proof_s and not any(job.kind == "prove" for job in self._at_work()):
            arms = (ArmSpec(name=EAGER), ArmSpec(name=CANDIDATE, knobs=self.first.knobs))
            yield self.job(arms, ROUNDS, kind="prove", budget_s=self.extent.proof_s)
        left = max(self.extent.processes - self._count(), int(self._is_time_for_another()))
        with_eager = eager_processes(self.first, self.stock, self._most()) - self._eager_count()
        if left > 0 and with_eager > 0:
            yield self._timed(with_eager=True)
        if left > max(with_eager, 0):
            yield self._timed(with_eager=False)

    def _timed(self, *, with_eager: bool) -> Job:
        """A job that times the arms; the first of them also records the launches of a step."""
        stock = None if self.stock is None else self.stock.knobs
        arms = confirmation_arms(self.first.knobs, stock, with_eager=with_eager)
        is_asked = self._has_timeline or any(job.timeline for job in self._at_work())
        return self.job(arms, ROUNDS, numerics=False, timeline=not is_asked)

    def _compared(self) -> Comparison | None:
        """The comparison by the measurements so far."""
        return self._decided().comparison if has_eager(self._measured) else None

    def _decided(self) -> Decision:
        return decide(self._measured, self._prior(), self.work.run.memory_limit_bytes, given_fits=self.given_fits)

    def _at_work(self) -> list[Job]:
        return [begun.job for begun in self.work.begun.values() if begun.job is not None]

    def _count(self) -> int:
        """Number of timed processes, finished or running."""
        return len(self._measured) + sum(job.kind == "measure" for job in self._at_work())

    def _eager_count(self) -> int:
        """Number of processes that time the step as given: running ones, and finished ones without disturbance."""
        quiet = [measurement for measurement in self._measured if not measurement.disturbed]
        at_work = [arm for job in self._at_work() if job.kind == "measure" for arm in job.arms]
        return len(arms_of(quiet, EAGER)) + sum(arm.name == EAGER for arm in at_work)

    def _lacks_proof(self) -> bool:
        """Whether the long numerics gate has neither a result nor a failed attempt."""
        return bool(self.first.knobs) and not (self._proof or self.extent.proof or self._unproven)

    def _is_late(self) -> bool:
        return self.left_s() <= 0

    def _is_enough(self) -> bool:
        """Whether to start no more processes, because time is over or would be over before one ends.

        The minimal number of processes is enough if one of them timed the step as given. With fewer, another one
        starts while any time is left.
        """
        is_known = has_eager(self._measured) or self._eager_count() > 0
        is_enough, is_late = is_known and self._count() >= self.extent.least, self._is_late()
        return is_enough or is_late if self._is_in_vain() else is_enough and is_late

    def _is_in_vain(self) -> bool:
        """Whether one more process would time out: one already did, or the finished ones took longer than the limit."""
        limit_s = self.limits().total_s
        return self._is_cut_off or (limit_s is not None and self._longest_s > limit_s)

    def _is_time_for_another(self) -> bool:
        """Independent of the results so far: continuing until a gain shows would invalidate the interval."""
        return bool(self._measured) and self._count() < self._most() and self._longest_s <= self.left_s()

    def _most(self) -> int:
        """Maximal number of processes: the number without a prior if the first processes contradict the prior.

        The spread between processes is independent of the gain, so continuing because of it keeps the interval valid
        (Stein 1945).
        """
        if self.extent.prior is None or self._prior() is not None or not self._seems_faster():
            return self.extent.most
        return PROCESSES

    def _seems_faster(self) -> bool:
        """Whether more processes are worth it. Stopping early because of a loss cannot produce a false gain."""
        found = self._compared()
        return found is not None and found.speedup.median > 1

    def _prior(self) -> Prior | None:
        """The known spread between processes, unless the first measured processes contradict it."""
        first = self._measured[: self.extent.processes]
        if self.extent.prior is None or len(first) < AGAIN or not has_eager(first):
            return self.extent.prior
        return self.extent.prior if decide(first, self.extent.prior).found.has_prior else None

    def _is_harmless(self, begun: Begun, done: Finished) -> bool:
        """Whether a failure does not discredit the configuration: a timeout, or a long gate that ran out of memory."""
        failure = done.outcome
        assert isinstance(failure, Failure) and begun.job is not None
        if begun.job.kind == "prove" and failure.kind in UNSEEN:
            self._unproven = f"{UNLOOKED}: {failure.reason}"
            return True
        self._is_cut_off = failure.kind is FailureKind.TIMEOUT and self._is_late()
        return has_eager(self._measured) and self._is_cut_off

    def _numerics(self) -> dict[str, Numerics]:
        """Results of the numerics gate from the arms' own trials."""
        found = {CANDIDATE: self.first, STOCK: self.stock or self.first}
        return {
            name: trial.measurement.numerics
            for name, trial in found.items()
            if trial.measurement is not None and trial.measurement.numerics is not None
        }
