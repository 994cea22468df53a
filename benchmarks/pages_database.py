"""A number in, a database of so many runs with 30 trials each out, as a team has them after some years.

The trials of one run of each story are made one by one; the other runs of the story get theirs as copies, which the
database makes itself.
"""

import hashlib
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from itertools import product
from typing import TypeVar

from sqlalchemy import Connection, insert, literal, select, text

from kitsune.plan import Environment, Interval, Plan
from tests.store.samples import an_environment
from tests.unit.server.pages import stories
from tuner.records import Run, RunStatus, Source, Trial, Verdict
from tuner.store import tables
from tuner.store.database import Database
from tuner.store.queries import plans, runs
from tuner.store.rows import to_row

T = TypeVar("T")

#: Of each run: a search, a play-off, a confirmation, and what each choice gives.
TRIALS = 30
MODELS = ("resnet18", "resnet50", "bert", "gpt2", "googlenet", "dlrm", "vit", "mlp")
GPUS = {
    "NVIDIA H200": ("9.0", 150_000_000_000),
    "NVIDIA A100-SXM4-80GB": ("8.0", 85_000_000_000),
    "NVIDIA L4": ("8.9", 24_000_000_000),
}
#: How runs end, and of a hundred how many.
ENDS = {RunStatus.FINISHED: 90, RunStatus.FAILED: 6, RunStatus.CANCELLED: 4}
VERDICTS = {Verdict.FASTER: 80, Verdict.SAME: 16, Verdict.AMBIGUOUS: 4}
TAGS = {(): 93, ("weekly",): 6, ("paper", "batch-128"): 1}
#: The oldest run is so old.
AGE = timedelta(days=900)


@dataclass(frozen=True, slots=True)
class Story:
    """What the runs of one model on one GPU have in common."""

    number: int
    model: str
    environment: Environment
    plan: Plan

    @property
    def fingerprint(self) -> str:
        return hashlib.sha256(self.model.encode()).hexdigest()


def fill(database: Database, number: int, queued: int, *, seed: int = 0) -> list[Run]:
    """So many runs that have ended, with their trials, and beside them some that wait. Gives the former."""
    drawn = random.Random(seed)
    trials, plan = tried()
    told = [Story(number, model, machine(gpu), plan) for number, (model, gpu) in enumerate(product(MODELS, GPUS))]
    ages = sorted((drawn.random() for _ in range(number)), reverse=True)
    ended = [_ended(drawn, told[index % len(told)], age) for index, age in enumerate(ages)]
    with database.begin() as connection:
        for run, plan in ended:
            if plan is not None:
                plans.put(connection, plan, now=run.finished_at)
            runs.add(connection, run)
        for _ in range(queued):
            runs.add(connection, _waiting(drawn))
    for one in told:
        mine = [run for run, _ in ended if run.seed == one.number]
        with database.begin() as connection:
            _tell(connection, trials, mine)
    if database.engine.dialect.name == "postgresql":  # which does so by itself within minutes; SQLite never does
        with database.begin() as connection:
            connection.execute(text("ANALYZE"))
    return [run for run, _ in ended]


def tried() -> tuple[list[Trial], Plan]:
    """The trials of a run, and the plan that came of them."""
    run = stories.a_gpu_run()
    search, confirmed = stories.searched(run), stories.confirmation(run, 2.51, 3.31)
    rest = [stories.playoff(run), *confirmed, *stories.ablation(run)]
    for number in range(len(search), TRIALS - len(rest)):
        found = stories.against_eager(stories.BEST, 2.8 + 0.05 * number, 0.5, number)
        search.append(stories.trial(run, number, Source.TPE, stories.BEST, found))
    trials = [trial.model_copy(update={"number": number}) for number, trial in enumerate([*search, *rest])]
    assert len(trials) == TRIALS
    return trials, stories.plan_of(run, [*search, *confirmed])


def machine(gpu: str) -> Environment:
    capability, memory_bytes = GPUS[gpu]
    return an_environment(gpu=gpu, compute_capability=capability, memory_bytes=memory_bytes)


def _ended(drawn: random.Random, told: Story, age: float) -> tuple[Run, Plan | None]:
    status, tags = _one_of(drawn, ENDS), _one_of(drawn, TAGS)
    created = datetime.now(UTC) - AGE * age
    run = stories.a_gpu_run(
        id=_id(drawn, created),
        workload=f"zoo:{told.model}?batch={drawn.choice((16, 32, 64, 128))}",
        fingerprint=told.fingerprint,
        environment=told.environment,
        seed=told.number,
        status=status,
        created_at=created,
        started_at=created + timedelta(seconds=2),
        finished_at=created + timedelta(minutes=31),
        trials=TRIALS,
        budget_trials=25,
        tags=tags,
    )
    if status is not RunStatus.FINISHED:
        return run.evolve(error="the step ran out of memory" if status is RunStatus.FAILED else None), None
    verdict = _one_of(drawn, VERDICTS)
    if verdict is not Verdict.FASTER:
        return run.evolve(verdict=verdict), None
    evidence = told.plan.evidence
    assert evidence is not None
    gain = evidence.speedup.median * drawn.uniform(0.7, 1.4)
    evidence = evidence.model_copy(
        update={"run_id": run.id, "speedup": Interval(median=gain, low=0.98 * gain, high=1.03 * gain)}
    )
    plan = told.plan.model_copy(
        update={"fingerprint": told.fingerprint, "environment": told.environment, "evidence": evidence}
    )
    ratio = drawn.uniform(0.5, 1.1)
    return run.evolve(verdict=verdict, speedup=evidence.speedup, memory_ratio=ratio, plan_id=plan.plan_id), plan


def _waiting(drawn: random.Random) -> Run:
    now = datetime.now(UTC)
    return Run(id=_id(drawn, now), workload=f"zoo:{drawn.choice(MODELS)}", device="", budget_trials=9, created_at=now)


def _tell(connection: Connection, trials: Sequence[Trial], mine: Sequence[Run]) -> None:
    """Stores the trials of the first of these runs, and copies them for the others."""
    first = mine[0]
    rows = [
        to_row(
            trial.model_copy(update={"run_id": first.id}),
            attempt=first.attempt,
            verdict=trial.comparison.verdict if trial.comparison else None,
            speedup=trial.comparison.speedup.median if trial.comparison else None,
            failure_kind=trial.failure.kind if trial.failure else None,
        )
        for trial in trials
    ]
    connection.execute(insert(tables.trials), rows)
    names = [column.name for column in tables.trials.c if column.name != "run_id"]
    copies = (
        select(tables.runs.c.id, *(tables.trials.c[name] for name in names))
        .join_from(tables.runs, tables.trials, literal(True))
        .where(tables.trials.c.run_id == first.id, tables.runs.c.seed == first.seed, tables.runs.c.id != first.id)
        .where(tables.runs.c.trials == TRIALS)
        .order_by(tables.runs.c.id, tables.trials.c.number)
    )
    connection.execute(insert(tables.trials).from_select(["run_id", *names], copies))


def _id(drawn: random.Random, created: datetime) -> str:
    """As long as those of `tuner.ids`, and sorted by time as those are."""
    return f"{int(created.timestamp() * 1000):012x}{drawn.getrandbits(56):014x}"


def _one_of(drawn: random.Random, shares: Mapping[T, int]) -> T:
    return drawn.choices(list(shares), list(shares.values()))[0]
