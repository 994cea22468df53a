"""A machine of made-up speed with a clock of its own: its children answer as real ones do, at once."""

import random
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from kitsune.class_tables import ClassTable
from kitsune.knobs import KNOBS
from kitsune.long_proof import LongProof, Margin
from kitsune.plan import Environment, Numerics
from kitsune.timeline import ClassTime
from tuner.measuring.child_process import Check, go_on
from tuner.measuring.crew import Finished
from tuner.measuring.protocol import Inspection, Job, Limits, Outcome, misfit
from tuner.records import Arm, Failure, FailureKind, Measurement, Phase, Run, Source, Spent, Trial
from tuner.search.space import Configuration
from tuner.statistics.plan_evidence import words
from tuner.statistics.process_statistics import ROUNDS
from tuner.tuning.confirmation import Conclusion
from tuner.tuning.events import Event, Tried
from tuner.tuning.run import Tuning

NOON = datetime(2026, 11, 20, 12, tzinfo=UTC)
ENVIRONMENT = Environment(device="cpu", gpu="a CPU", memory_bytes=1, torch="2.13.0", python="3.11.7", kitsune="0.1.0")
USUAL_MS = 10.0
INSPECTION_S = 5.0

PROOF = LongProof(
    steps=50, restarts=10, updates=12, directions=0, margins=(Margin(what="gradient", error=0.1, allowed=1.0),)
)

Answer = Callable[[int, Job], Failure | None]


def only(*choices: str) -> dict[str, str]:
    """The reasons of a device on which nothing but these choices ("precision=bf16") applies."""
    every = (f"{name}={choice}" for name, knob in KNOBS.items() for choice in knob.choices)
    return {item: "not on this machine" for item in every if item not in choices}


#: Of stock torch: eager, bf16 and compiled. Beyond it: one graph around the step, and fp16.
SMALL = only("precision=bf16", "precision=fp16", "compile=default", "update=fused", "capture=step")
COMPILED = "precision=bf16, compile=default, update=fused"
GRAPH = f"{COMPILED}, capture=step"
GRAPH_WINS = {COMPILED: 8.0, GRAPH: 5.0}
#: The best two play off where the step as given drifts by 20 %: the host launches them as well.
CLOSE = {COMPILED: 5.0, "precision=fp16, compile=default, update=fused": 4.6}
#: The same of steps that are captured, which are ranked without a play-off.
CLOSE_GRAPHS = {**GRAPH_WINS, "precision=fp16, update=fused, capture=step": 4.6}


def failure(reason: str = "it broke", kind: FailureKind = FailureKind.CRASHED) -> Failure:
    return Failure(kind=kind, phase=Phase.NUMERICS, reason=reason)


def numerics(error: float) -> Numerics:
    allowed = dict.fromkeys(("loss_allowed", "gradient_allowed", "parameter_allowed"), 1.0)
    return Numerics(steps=5, loss_error=error, gradient_error=error, parameter_error=error, **allowed)


def nothing_special(_number: int, _job: Job) -> None:
    return None


@dataclass
class Machine:
    """`step_ms` by configuration in words. `answer(number, job)` may fail a child, or raise; children count from 0.

    What child number n says of its arm number k can be told from all others: peak_bytes is 100 n + k, first_step_s is
    n + k / 10 thousandths, and every numeric error is n + 1 millionths. More rounds than 15 take more time; a child
    that confirms proves no numbers, and takes what building and two or three arms take.
    """

    step_ms: Mapping[str, float] = field(default_factory=dict)
    inapplicable: Mapping[str, str] = field(default_factory=dict)
    answer: Answer = nothing_special
    child_s: float = 10.0
    noise: float = 0.0005
    drift: float = 0.0  # of the step as given, from child to child
    disturbed: bool = False
    fingerprint: str = "f"
    most_rounds: int = 1000
    ablates: bool = False
    now_s: float = 0.0
    as_given: Failure | None = None  # instead of an inspection
    wrong: Failure | None = None  # instead of a proof
    proof_s: float = 0.0
    unexplained: Failure | None = None  # instead of the classes of the launches
    explain_s: float = 0.0
    explained: list[Job] = field(default_factory=list)
    proven: list[Job] = field(default_factory=list)
    asked: list[tuple[str, str]] = field(default_factory=list)
    inspected: list[Job] = field(default_factory=list)
    jobs: list[Job] = field(default_factory=list)
    limits: list[Limits] = field(default_factory=list)
    check: Check = go_on  # of the child of the moment: an `answer` that takes long asks it, as waiting for a child does

    def clock(self) -> float:
        return self.now_s

    def now(self) -> datetime:
        return NOON + timedelta(seconds=self.now_s)

    def crew(self, workload: str, device: str, _spares: int) -> "OneByOne":
        self.asked.append((workload, device))
        return OneByOne(self)

    def inspect(self, job: Job) -> Inspection | Failure:
        self.now_s += INSPECTION_S
        self.inspected.append(job)
        return self.as_given or Inspection(
            environment=ENVIRONMENT,
            fingerprint=self.fingerprint,
            inapplicable=dict(self.inapplicable),
            random=False,
            step_ms=USUAL_MS,
            peak_bytes=1,
            parameters=1,
        )

    def prove(self, job: Job) -> LongProof | Failure:
        self.proven.append(job)
        self.now_s += self.proof_s
        return self.wrong or PROOF

    def explain(self, job: Job, limits: Limits) -> ClassTable | Failure:
        self.explained.append(job)
        if limits.total_s is not None and self.explain_s > limits.total_s:
            self.now_s += limits.total_s
            return failure("no time was left", FailureKind.TIMEOUT)
        self.now_s += self.explain_s
        return self.unexplained or classes_of(job.arms[0].knobs)

    def measure(self, job: Job, limits: Limits) -> Measurement | Failure:
        number = len(self.jobs)
        self.jobs.append(job)
        self.limits.append(limits)
        takes_s = self.child_s * (0.2 + 0.2 * len(job.arms) if is_confirmation(job) else max(1, job.rounds / 15))
        if limits.total_s is not None and takes_s > limits.total_s:
            self.now_s += limits.total_s
            return failure("no time was left", FailureKind.TIMEOUT)
        self.now_s += takes_s
        return self.answer(number, job) or self.measurement(number, job)

    def measurement(self, number: int, job: Job) -> Measurement:
        arms = tuple(self._arm(job, number, index) for index in range(len(job.arms)))
        found = Measurement(
            arms=arms,
            steps_per_block=(1,) * len(arms),
            numerics=numerics((number + 1) * 1e-6) if job.numerics else None,
            environment=ENVIRONMENT,
            disturbed=self.disturbed,
        )
        assert misfit(job, found) is None
        return found

    def _arm(self, job: Job, number: int, index: int) -> Arm:
        spec = job.arms[index]
        rng = random.Random(f"{number}:{index}")
        usual_ms = self.step_ms.get(words(spec.knobs), USUAL_MS)
        if not spec.knobs:
            usual_ms *= random.Random(number).uniform(1 - self.drift, 1 + self.drift)
        blocks = min(job.rounds, self.most_rounds)
        return Arm(
            name=spec.name,
            knobs=spec.knobs,
            step_ms=tuple(usual_ms * rng.lognormvariate(0, self.noise) for _ in range(blocks)),
            peak_bytes=100 * number + index,
            first_step_s=(number + index / 10) / 1000,
        )

    def tuning(self, run: Run, trials: list[Trial] | None = None) -> Tuning:
        return self.make(run=run, spec=run.workload, trials=list(trials or []))

    def make(self, **given: Any) -> Tuning:
        """For `carry_out(make=...)`."""
        acting = {"crew": self.crew, "clock": self.clock, "now": self.now}
        return Tuning(**{"ablates": self.ablates, **given, **acting})


def classes_of(knobs: Configuration) -> ClassTable:
    """A table that can be told from those of other choices."""
    return ClassTable(classes=(ClassTime("matrix products", 4, 10.0, 5.0),), notes=(words(knobs),))


def spent_of(took_s: float) -> Spent:
    return Spent(build_s=0.4 * took_s, numerics_s=0.4 * took_s, timing_s=0.2 * took_s)


@dataclass
class OneByOne:
    """A crew whose children take their turns: the first that was given a job answers first."""

    machine: Machine
    waiting: dict[int, tuple[Job, Limits]] = field(default_factory=dict)
    tickets: int = 0

    def begin(self, job: Job, limits: Limits) -> int:
        self.tickets += 1
        self.waiting[self.tickets] = job, limits
        return self.tickets

    def finished(self, check: Check) -> Finished:
        self.machine.check = check
        alone = len(self.waiting) == 1
        ticket = next(iter(self.waiting))
        job, limits = self.waiting[ticket]
        begin_s = self.machine.now_s
        machine = self.machine
        outcome: Outcome
        if job.kind == "measure":
            outcome = machine.measure(job, limits)
        elif job.kind == "explain":
            outcome = machine.explain(job, limits)
        else:
            outcome = machine.inspect(job) if job.kind == "inspect" else machine.prove(job)
        del self.waiting[ticket]
        return Finished(ticket, outcome, spent_of(self.machine.now_s - begin_s), alone)

    def drop(self) -> None:
        self.waiting.clear()

    def close(self) -> None:
        self.waiting.clear()


def a_run(**changes: Any) -> Run:
    return Run(**{"id": "run", "workload": "zoo:mlp", "device": "cpu", "created_at": NOON, **changes})


def drained(tuning: Tuning) -> tuple[list[Event], Conclusion]:
    """Every event, and what the run came to."""
    events: list[Event] = []
    steps = tuning.steps()
    while True:
        try:
            events.append(next(steps))
        except StopIteration as end:
            return events, end.value


def is_playoff(job: Job) -> bool:
    return job.arms[0].name.startswith("contender")


def is_confirmation(job: Job) -> bool:
    return not job.numerics and job.rounds == ROUNDS and not is_playoff(job)


def failing(is_struck: Callable[[Job], bool], why: str = "it broke") -> Callable[[int, Job], Failure | None]:
    return lambda _, job: failure(why) if is_struck(job) else None


def interrupting(number: int) -> Callable[[int, Job], None]:
    def answer(child: int, job: Job) -> None:
        if child == number:
            raise KeyboardInterrupt

    return answer


def trials_of(events: Iterable[Event]) -> list[Trial]:
    return [event.trial for event in events if isinstance(event, Tried)]


def confirmations(trials: Iterable[Trial]) -> list[Trial]:
    return [trial for trial in trials if trial.source is Source.CONFIRM]


def sources(trials: Iterable[Trial]) -> list[Source]:
    return [trial.source for trial in trials]


def run_out(machine: Machine, run: Run) -> tuple[list[Trial], Conclusion]:
    events, conclusion = drained(machine.tuning(run))
    return trials_of(events), conclusion


def until_it_raises(machine: Machine, run: Run, error: type[Exception], match: str) -> list[Trial]:
    """The trials that were told of before the error came."""
    trials: list[Trial] = []
    with pytest.raises(error, match=match):
        trials.extend(event.trial for event in machine.tuning(run).steps() if isinstance(event, Tried))
    return trials
