"""Records to store: plain ones by function, arbitrary ones by strategy."""

from datetime import UTC, datetime, timedelta, timezone
from itertools import count
from typing import Any

from hypothesis import strategies as st

from kitsune.class_tables import ClassTable, ClassTables
from kitsune.knobs import KNOBS
from kitsune.plan import Environment, Evidence, Interval, Numerics, Plan
from kitsune.submission.format.archive import Archive
from kitsune.timeline import ClassTime, Launched, Timeline
from tests.unit.kitsune.submission.hostile import put, valid
from tuner.records import (
    Arm,
    Comparison,
    Failure,
    FailureKind,
    Measurement,
    Phase,
    Run,
    RunStatus,
    Source,
    Trial,
    Verdict,
)

START = datetime(2026, 11, 20, 12, 0, 0, 123456, tzinfo=UTC)
_ids = count()


def after(seconds: float) -> datetime:
    """The fake clock: so many seconds after the start of the test."""
    return START + timedelta(seconds=seconds)


def a_run(**changes: Any) -> Run:
    return Run(**{"id": f"run-{next(_ids)}", "workload": "zoo:mlp", "device": "cpu", "created_at": START, **changes})


def an_archive(*change: Any) -> Archive:
    """A small step; `change` is a path into its document and what to put there."""
    return Archive.from_bytes(put(*change)) if change else valid()


#: Another batch size: other bytes, and the same fingerprints.
OTHER_BATCH = ("sizes", "s0", 9)
#: The sum instead of the mean: another step of the same model.
OTHER_LOSS = ("loss", "nodes", 0, "args", ["%0", "%1", None, 2])
#: Without momentum: another model, as far as a plan goes.
OTHER_MODEL = ("optimizer", "groups", 0, "options", {"lr": 0.1, "momentum": 0.0})


def an_environment(**changes: Any) -> Environment:
    given = {"device": "cuda", "gpu": "NVIDIA H200", "compute_capability": "9.0", "memory_bytes": 150_000_000_000}
    software = {"driver": "580", "cuda": "13.0", "torch": "2.13.0", "triton": "3.7.1", "python": "3.11", "kitsune": "0"}
    return Environment(**{**given, **software, **changes})


def a_plan(speedup: float = 1.5, environment: Environment | None = None, **changes: Any) -> Plan:
    """A plan with evidence, `speedup` times as fast as the step as given."""
    gain = Interval(median=speedup, low=speedup * 0.9, high=speedup * 1.1)
    errors = dict.fromkeys(("loss_error", "gradient_error", "parameter_error"), 1e-4)
    allowed = dict.fromkeys(("loss_allowed", "gradient_allowed", "parameter_allowed"), 1e-2)
    evidence = Evidence(
        run_id="run-x",
        verdict="faster",
        baseline="compile=default",
        baseline_step_ms=10.0,
        step_ms=10.0 / speedup,
        speedup=gain,
        eager_step_ms=10.0,
        speedup_over_eager=gain,
        baseline_peak_bytes=1,
        peak_bytes=1,
        first_step_s=1.0,
        blocks=20,
        samples_sha256="0" * 64,
        numerics=Numerics(steps=3, **errors, **allowed),
    )
    given = {"knobs": {"precision": "bf16"}, "fingerprint": "f", "environment": environment or an_environment()}
    return Plan(**{**given, "evidence": evidence, **changes})


def a_trial(run: Run, number: int = 0, **changes: Any) -> Trial:
    failure = Failure(kind=FailureKind.OUT_OF_MEMORY, phase=Phase.WARMUP, reason="out of memory")
    given = {"run_id": run.id, "number": number, "source": Source.SEED, "knobs": {"precision": "bf16"}}
    return Trial(**{**given, "failure": failure, "started_at": after(1), "finished_at": after(2), **changes})


def a_timeline(count: int = 12, streams: int = 2, **changes: Any) -> Timeline:
    """Launches that take turns on the streams; those of one name take equally long, and every third waits."""
    names = ("triton_poi_fused_relu", "aten.addmm", "aten.mm")
    launches = tuple(
        Launched(
            name=place % 3,
            stream=place % streams,
            begin_us=5.0 * (place // streams),
            end_us=5.0 * (place // streams) + 1 + place % 3,
            waits=(place - streams - 1,) if place % 3 == 0 and place > streams else (),
            used_bytes=2**20 * (1 + place % 5),
        )
        for place in range(count)
    )
    told = f"{count} launches on {streams} streams: 0.030 ms predicted, 0.024 ms one after the other; 3 waits; by rule"
    return Timeline(**{"told": told, "streams": streams, "names": names, "launches": launches, **changes})


def some_class_tables() -> ClassTables:
    """Matrix products that the plan halves, and copies that it adds."""
    given = (ClassTime("matrix products", 40, 2000.0, 500.0), ClassTime("gaps", 40, 100.0, 0.0))
    plan = (ClassTime("matrix products", 40, 1000.0, 500.0), ClassTime("copies and casts", 1200, 1234.5, 1000.0))
    return ClassTables(given=ClassTable(classes=given), plan=ClassTable(classes=plan, notes=("update: not fused",)))


# NUL is left out: PostgreSQL cannot hold it in a column (in JSON it can, escaped). So are lone surrogates: no UTF-8.
lines = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\x00"), max_size=30)
texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=30)
numbers = st.integers(min_value=0, max_value=2**63 - 1)
positive = st.floats(min_value=0, exclude_min=True, allow_infinity=False)
finite = st.floats(allow_nan=False, allow_infinity=False)
moments = st.datetimes(
    min_value=datetime(1970, 1, 2),
    max_value=datetime(2900, 1, 1),
    timezones=st.sampled_from([UTC, timezone(-timedelta(hours=7))]),
)
maybe_moments = st.none() | moments
knobs = st.fixed_dictionaries({}, optional={name: st.sampled_from(list(knob.choices)) for name, knob in KNOBS.items()})
intervals = st.builds(Interval, median=finite, low=finite, high=finite)
environments = st.builds(
    Environment,
    device=st.sampled_from(["cuda", "cpu"]),
    gpu=lines,
    compute_capability=lines,
    memory_bytes=numbers,
    driver=lines,
    cuda=lines,
    torch=lines,
    triton=lines,
    python=texts,
    kitsune=texts,
)
arms = st.builds(
    Arm,
    name=texts,
    knobs=knobs,
    step_ms=st.lists(positive, max_size=5).map(tuple),
    peak_bytes=numbers,
    first_step_s=positive,
    applied=st.lists(texts, max_size=2).map(tuple),
    declined=st.dictionaries(texts, texts, max_size=2),
)
measurements = st.builds(
    Measurement,
    arms=st.lists(arms, min_size=1, max_size=3).map(tuple),
    steps_per_block=st.lists(numbers, max_size=3).map(tuple),
    dropped_rounds=numbers,
    notes=st.lists(texts, max_size=2).map(tuple),
    numerics=st.none(),
    environment=environments,
)
comparisons = st.builds(
    Comparison,
    speedup=intervals,
    p_value=st.floats(min_value=0, max_value=1),
    verdict=st.sampled_from(Verdict),
    blocks=numbers,
)
failures = st.builds(Failure, kind=st.sampled_from(FailureKind), phase=st.sampled_from(Phase), reason=texts)
trials = st.builds(
    Trial,
    run_id=st.just("set by the test"),
    number=numbers,
    source=st.sampled_from(Source),
    knobs=knobs,
    measurement=st.none() | measurements,
    comparison=st.none() | comparisons,
    failure=st.none() | failures,
    started_at=moments,
    finished_at=moments,
)
runs = st.builds(
    Run,
    id=st.uuids().map(str),
    name=lines,
    workload=lines,
    archive=st.none(),
    fingerprint=lines,
    device=lines,
    budget_trials=st.none() | st.integers(min_value=1, max_value=2**63 - 1),
    budget_s=st.none() | positive,
    memory_limit_bytes=st.none() | st.integers(1, 2**63 - 1),
    seed=st.integers(min_value=-(2**63), max_value=2**63 - 1),
    status=st.sampled_from(RunStatus),
    attempt=numbers,
    deaths=numbers,
    worker=st.none() | lines,
    created_at=moments,
    started_at=maybe_moments,
    heartbeat_at=maybe_moments,
    lease_until=maybe_moments,
    finished_at=maybe_moments,
    environment=st.none() | environments,
    inapplicable=st.dictionaries(texts, texts, max_size=2),
    plan_id=st.none(),
    verdict=st.none() | st.sampled_from(Verdict),
    error=st.none() | lines,
    team=lines,
    trials=numbers,
    speedup=st.none() | intervals,
    memory_ratio=st.none() | positive,
    tags=st.lists(texts, max_size=3).map(tuple),
    note=lines,
)
plans = st.builds(
    lambda knobs, fingerprint, environment, speedup: a_plan(speedup, environment, knobs=knobs, fingerprint=fingerprint),
    knobs,
    lines,
    environments,
    st.floats(min_value=1e-3, max_value=1e3),
) | st.builds(lambda knobs: Plan.by_hand(**knobs), knobs)
