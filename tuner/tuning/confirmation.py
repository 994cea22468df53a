"""The best of a search in; measured afresh in several processes and proven at length, out.

Its numbers are looked at in one more process, which works beside those that are timed and stands still while they are.
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
from tuner.planning.memory_fit import Room
from tuner.planning.pace import eager_processes
from tuner.planning.prior_runs import AGAIN
from tuner.records import Comparison, Failure, FailureKind, Measurement, Phase, Source, Trial
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
from tuner.statistics.process_statistics import PROCESSES, ROUNDS, Extent, Prior
from tuner.tuning.events import Confirming, Crowded, Event, Tried
from tuner.tuning.trials_in_flight import Begun, Work, is_for_want_of_room

#: What says nothing of the numbers: they were not looked at to the end.
UNSEEN: Final = (FailureKind.TIMEOUT, FailureKind.OUT_OF_MEMORY)

UNLOOKED: Final = "its numbers were not looked at for longer"
OUT_OF_TIME: Final = Failure(
    kind=FailureKind.TIMEOUT, phase=Phase.TIMING, reason="time was over before the step as given was timed beside it"
)


@dataclass(frozen=True, slots=True)
class Confirmed:
    """What fresh processes measured, what they allow to be said, and the long look at the numbers.

    `unproven`: why there is no proof, where there is none; the step as given needs none.
    """

    measured: Sequence[Measurement]
    decision: Decision
    numerics: dict[str, Numerics]
    proof: LongProof | None
    unproven: str

    def plan(self, run_id: str, inspection: Inspection, *, budget_s: float | None, interrupted: bool) -> Plan:
        """The last two: what the search was given, and whether the user ended it."""
        plan = plan_from(self.measured, self.decision, run_id, inspection, self.numerics)
        assert plan.evidence is not None
        evidence = plan.evidence.model_copy(update={"budget_s": budget_s, "interrupted": interrupted})
        return plan.model_copy(update={"evidence": self._with_proof(evidence) if self._is_of_candidate else evidence})

    def timeline(self) -> Timeline | None:
        """The launches of a step, where the plan is the candidate and has them."""
        return next((each.timeline for each in self.measured if self._is_of_candidate and each.timeline), None)

    def is_for(self, knobs: Configuration) -> bool:
        """Whether these are the choices of the plan."""
        return dict(arms_of(self.measured, self.decision.chosen)[0].knobs) == dict(knobs)

    @property
    def _is_of_candidate(self) -> bool:
        return self.decision.chosen == self.measured[0].arms[-1].name

    def _with_proof(self, evidence: Evidence) -> Evidence:
        note = "; ".join(filter(None, (evidence.note, self.unproven)))
        return evidence.model_copy(update={"proof": self.proof, "note": note})


@dataclass(slots=True)
class Confirmation:
    """One candidate on its way. `job` makes jobs of this run, `left_s` is what is left of its time."""

    work: Work
    first: Trial
    stock: Trial | None
    job: Callable[..., Job]
    limits: Callable[[], Limits]
    left_s: Callable[[], float]
    check: Check
    at_once: int
    room: Room
    extent: Extent
    _proof: LongProof | None = None
    _measured: list[Measurement] = field(default_factory=list)
    _has_timeline: bool = False
    _longest_s: float = 0.0
    _is_cut_off: bool = False
    _unproven: str = ""

    def steps(self) -> Generator[Event, None, Confirmed | None]:
        """One trial for each process that is timed; None when one of them failed, or the numbers are wrong."""
        yield Confirming(self.first.knobs)
        while True:
            while (job := self._next()) is not None:
                self.work.begin(Source.CONFIRM, self.first.knobs, job, self.limits())
            if not self.work.begun:
                break
            begun, done = self.work.finished(self.check)
            if is_for_want_of_room(done):
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
        decision, proof = decide(self._measured, self._prior()), self._proof or self.extent.proof
        return Confirmed(self._measured, decision, self._numerics(), proof, unproven)

    def _next(self) -> Job | None:
        """The first job that is due and has memory beside what is at work; None where there is none."""
        at_work = self._at_work()
        if len(at_work) >= self.at_once:
            return None
        return next((job for job in self._due() if not at_work or self.room.fits(job, at_work)), None)

    def _due(self) -> Iterator[Job]:
        """What may be begun next, as time has gone. The look at the numbers, which takes longest, first; then what
        times the step as given too, until enough of these were not disturbed."""
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
        """One process that times the arms; one of them tells the launches of a step too."""
        stock = None if self.stock is None else self.stock.knobs
        arms = confirmation_arms(self.first.knobs, stock, with_eager=with_eager)
        is_asked = self._has_timeline or any(job.timeline for job in self._at_work())
        return self.job(arms, ROUNDS, numerics=False, timeline=not is_asked)

    def _compared(self) -> Comparison | None:
        """What is to be said so far."""
        return decide(self._measured, self._prior()).comparison if has_eager(self._measured) else None

    def _at_work(self) -> list[Job]:
        return [begun.job for begun in self.work.begun.values() if begun.job is not None]

    def _count(self) -> int:
        """Processes that have been timed, or will have been."""
        return len(self._measured) + sum(job.kind == "measure" for job in self._at_work())

    def _eager_count(self) -> int:
        """Of these, those that time the step as given, on a machine that is not disturbed."""
        quiet = [measurement for measurement in self._measured if not measurement.disturbed]
        at_work = [arm for job in self._at_work() if job.kind == "measure" for arm in job.arms]
        return len(arms_of(quiet, EAGER)) + sum(arm.name == EAGER for arm in at_work)

    def _lacks_proof(self) -> bool:
        """Whether nobody has looked at its numbers for longer, or tried to."""
        return bool(self.first.knobs) and not (self._proof or self.extent.proof or self._unproven)

    def _is_late(self) -> bool:
        return self.left_s() <= 0

    def _is_enough(self) -> bool:
        """Whether no other process is begun: time is over, or would be before it ends.

        The least are enough, where the step as given is among them; fewer go on while there is time, however little.
        """
        is_known = has_eager(self._measured) or self._eager_count() > 0
        is_enough, is_late = is_known and self._count() >= self.extent.least, self._is_late()
        return is_enough or is_late if self._is_in_vain() else is_enough and is_late

    def _is_in_vain(self) -> bool:
        """Whether one more process would be ended before it answers, as one was, or as those took that have ended."""
        limit_s = self.limits().total_s
        return self._is_cut_off or (limit_s is not None and self._longest_s > limit_s)

    def _is_time_for_another(self) -> bool:
        """Whatever was measured so far: to go on until a gain shows would make the interval wrong."""
        return bool(self._measured) and self._count() < self._most() and self._longest_s <= self.left_s()

    def _most(self) -> int:
        """As many as where nothing is known, where the first of these contradict what is known.

        How far apart they lie says nothing of the gain, so to go on for that leaves the interval right (Stein 1945).
        """
        if self.extent.prior is None or self._prior() is not None or not self._seems_faster():
            return self.extent.most
        return PROCESSES

    def _seems_faster(self) -> bool:
        """Whether it is worth going on: to stop for a loss makes no false gain."""
        found = self._compared()
        return found is not None and found.speedup.median > 1

    def _prior(self) -> Prior | None:
        """What is known of how far processes lie apart, unless the first ones that were asked for contradict it."""
        first = self._measured[: self.extent.processes]
        if self.extent.prior is None or len(first) < AGAIN or not has_eager(first):
            return self.extent.prior
        return self.extent.prior if decide(first, self.extent.prior).found.has_prior else None

    def _is_harmless(self, begun: Begun, done: Finished) -> bool:
        """Whether a failure says nothing of the configuration: time ended it, or the proof had too little memory."""
        failure = done.outcome
        assert isinstance(failure, Failure) and begun.job is not None
        if begun.job.kind == "prove" and failure.kind in UNSEEN:
            self._unproven = f"{UNLOOKED}: {failure.reason}"
            return True
        self._is_cut_off = failure.kind is FailureKind.TIMEOUT and self._is_late()
        return has_eager(self._measured) and self._is_cut_off

    def _numerics(self) -> dict[str, Numerics]:
        """What was proven of the arms when they were first tried."""
        found = {CANDIDATE: self.first, STOCK: self.stock or self.first}
        return {
            name: trial.measurement.numerics
            for name, trial in found.items()
            if trial.measurement is not None and trial.measurement.numerics is not None
        }
