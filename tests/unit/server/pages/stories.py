"""Complete runs as test data for pages: one was really measured, the others have synthetic times."""

import json
import random
from collections.abc import Mapping, Sequence
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import Any

from kitsune.knobs import Choice
from kitsune.plan import Numerics, Plan
from kitsune.timeline import Timeline
from tests.store.samples import START, a_run, an_environment
from tuner.measuring.protocol import Inspection
from tuner.planning.ablation import WITHOUT, arms_without, chunks
from tuner.planning.pace import WITH_EAGER
from tuner.records import (
    Arm,
    Cause,
    CauseKind,
    Comparison,
    Failure,
    FailureKind,
    Measurement,
    Phase,
    Run,
    RunStatus,
    Source,
    Spent,
    Trial,
)
from tuner.search.space import Space
from tuner.statistics.plan_evidence import CANDIDATE, EAGER, STOCK, compare_arms, decide, plan_from

Story = tuple[Run, list[Trial], Plan | None]

HERE = Path(__file__).parent
FINGERPRINT = "a" * 64
GIB = 2**30
PROVEN = Numerics(
    steps=5,
    loss_error=2.1e-5,
    gradient_error=3.4e-3,
    parameter_error=8.8e-3,
    loss_allowed=1e-3,
    gradient_allowed=2e-2,
    parameter_allowed=5e-2,
)
#: The phases of a trial of 45 s.
SPENT = Spent(start_s=0.5, build_s=3.0, numerics_s=12.0, warmup_s=8.5, waited_s=9.0, timing_s=12.0)
HALF = {"precision": "bf16"}
COMPILED = {"precision": "bf16", "compile": "reduce-overhead", "update": "fused"}
BEST = {"layout": "channels_last", "precision": "bf16", "compile": "default", "update": "fused", "capture": "step"}
BEST_STREAMS = {**BEST, "streams": 4}
INAPPLICABLE = {
    **{f"attention={name}": "the model does not call scaled_dot_product_attention" for name in ("flash", "cudnn")},
    "attention=efficient": "the model does not call scaled_dot_product_attention",
    "attention=math": "the model does not call scaled_dot_product_attention",
}
HOSTILE = "<script>alert(1)</script>\"'&\u202e{{ 7*7 }}"


def measured_on_a_cpu() -> Story:
    """`kitsune tune 'zoo:mlp?batch=64&size=tiny' --trials 5 --device cpu`, as `kitsune runs show --json` told it."""
    return recorded("mlp_on_a_cpu.json")


def lenet5_on_a_cpu() -> Story:
    """`kitsune tune 'zoo:lenet5?batch=16' --trials 5 --device cpu`: a real gain, and what each choice gave."""
    return recorded("lenet5_on_a_cpu.json")


def resnet18_on_an_h200() -> Story:
    """`kitsune tune zoo:resnet18 --trials 7` on an NVIDIA H200, at commit 6a5d580."""
    return recorded("resnet18_on_an_h200.json")


def streams_of_resnet18() -> Timeline:
    """The timeline of the plan of that run."""
    return timeline("resnet18_on_an_h200_timeline.json")


def branches_on_a_cpu() -> Timeline:
    """A timeline of a model like that of tests/e2e/test_timeline.py, measured with threads as streams."""
    return timeline("branches_on_a_cpu.json")


def timeline(name: str) -> Timeline:
    return Timeline.model_validate_json((HERE / name).read_text("utf-8"))


def recorded(name: str) -> Story:
    told = json.loads((HERE / name).read_text("utf-8"))
    trials = [Trial.model_validate(trial) for trial in told["trials"]]
    return Run.model_validate(told["run"]), trials, Plan.from_json(told["plan"])


def with_a_gain(**changes: Any) -> Story:
    """A run of 9 trials on a GPU that ends with a plan and its ablation."""
    run = a_gpu_run(**changes)
    trials = [*searched(run), playoff(run), *confirmation(run, 2.51, 3.31)]
    plan = plan_of(run, trials)
    trials += ablation(run)
    evidence = plan.evidence
    assert evidence is not None
    ratio = evidence.peak_bytes / evidence.baseline_peak_bytes
    told = {"plan_id": plan.plan_id, "verdict": "faster", "speedup": evidence.speedup, "memory_ratio": ratio}
    return finished(run, trials, **told), trials, plan


def without_a_gain() -> Story:
    """The best of the search is not confirmed."""
    run = a_gpu_run()
    trials = [*searched(run), *confirmation(run, 3.32, 3.31)]
    plan = plan_of(run, trials)
    return finished(run, trials, plan_id=plan.plan_id, verdict="same"), trials, plan


def measured_again() -> Story:
    """The winner of an earlier run is confirmed in two processes, without a search."""
    run = a_gpu_run()
    trials = confirmation(run, 2.51, 3.31)[:2]
    plan = plan_of(run, trials)
    assert plan.evidence is not None
    told = {"plan_id": plan.plan_id, "verdict": plan.evidence.verdict, "speedup": plan.evidence.speedup}
    return finished(run, trials, **told), trials, plan


def too_noisy() -> Story:
    """One process is 1.5 times as slow, and the gain of the candidate varies."""
    run = a_gpu_run()
    trials = [*searched(run), *confirmation(run, 3.25, 3.31, restless=True)]
    plan = plan_of(run, trials)
    return finished(run, trials, plan_id=plan.plan_id, verdict="too_noisy"), trials, plan


def failed() -> Story:
    run = a_gpu_run(status=RunStatus.FAILED, error="the workload fails as given: CUDA error: an illegal address")
    return run.evolve(finished_at=at(9)), [], None


def queued() -> Story:
    return a_run(workload="zoo:resnet18?batch=128", device="cuda", budget_trials=12), [], None


def running(trials: int = 4) -> Story:
    run = a_gpu_run(status=RunStatus.RUNNING, lease_until=at(1e9))
    return run.evolve(trials=trials), searched(run)[:trials], None


def cancelled() -> Story:
    run, trials, _ = running()
    return run.evolve(status=RunStatus.CANCELLED, finished_at=at(400)), trials, None


def of_one_trial() -> Story:
    run = a_gpu_run(budget_trials=1)
    trials = [searched(run)[0]]
    return finished(run, trials), trials, None


def of_many_samples(blocks: int = 5000) -> Story:
    run = a_gpu_run()
    trials = [
        trial(run, 0, Source.BASELINE, {}, measurement(arm(EAGER, {}, 10.5, blocks), arm(CANDIDATE, {}, 10.5, blocks)))
    ]
    return finished(run, trials), trials, None


def of_hostile_names() -> Story:
    """A run in which every text that a user, a model or a worker can choose is hostile."""
    run, trials, plan = with_a_gain(
        name=HOSTILE,
        workload=f"zoo:{HOSTILE}",
        worker=HOSTILE,
        note=HOSTILE,
        tags=(HOSTILE,),
        inapplicable={"streams=2": HOSTILE},
        environment=an_environment(gpu=HOSTILE, driver=HOSTILE, kitsune=HOSTILE),
    )
    raised = Failure(kind=FailureKind.RAISED, phase=Phase.WARMUP, reason=HOSTILE)
    trials[1] = trials[1].model_copy(update={"measurement": None, "comparison": None, "failure": raised})
    noted = trials[0].measurement
    assert noted is not None
    trials[0] = trials[0].model_copy(update={"measurement": noted.model_copy(update={"notes": (HOSTILE,)})})
    return run, trials, plan


# Their parts ----------------------------------------------------------------------------------------------------------


def at(seconds: float) -> Any:
    return START + timedelta(seconds=seconds)


def a_gpu_run(**changes: Any) -> Run:
    given = {
        "workload": "zoo:resnet18?batch=128",
        "device": "cuda:0",
        "fingerprint": FINGERPRINT,
        "budget_trials": 9,
        "seed": 7,
        "attempt": 1,
        "worker": "gpu-host:4711:0a1b2c3d",
        "started_at": at(2),
        "environment": an_environment(),
        "inapplicable": INAPPLICABLE,
    }
    return a_run(**{**given, **changes})


def finished(run: Run, trials: Sequence[Trial], **changes: Any) -> Run:
    """A validated copy, as if read from the database."""
    ended = {"status": RunStatus.FINISHED, "finished_at": at(60 * len(trials)), "trials": len(trials)}
    return Run.model_validate({**run.model_dump(), **ended, **changes})


def plan_of(run: Run, trials: Sequence[Trial]) -> Plan:
    found = [trial.measurement for trial in trials if trial.source is Source.CONFIRM and trial.measurement]
    assert run.environment is not None
    looked = Inspection(
        environment=run.environment,
        fingerprint=FINGERPRINT,
        model_fingerprint="b" * 64,
        batch="128x3x32x32",
        inapplicable={},
        random=False,
        step_ms=10.5,
        peak_bytes=GIB,
        parameters=11_000_000,
    )
    return plan_from(found, decide(found), run.id, looked, {STOCK: PROVEN, CANDIDATE: PROVEN})


def searched(run: Run) -> list[Trial]:
    """The trials of a search: some work, some fail, some are declined."""
    out_of_memory = Failure(kind=FailureKind.OUT_OF_MEMORY, phase=Phase.WARMUP, reason="CUDA out of memory: 2.0 GiB")
    wrong = Failure(kind=FailureKind.WRONG, phase=Phase.NUMERICS, reason="gradients: relative error 0.4, 0.02 allowed")
    given: list[tuple[Source, Mapping[str, Choice], float, float | Failure]] = [
        (Source.BASELINE, {}, 10.5, 0.81),
        (Source.STOCK, HALF, 11.6, 0.53),
        (Source.STOCK, COMPILED, 3.30, 0.50),
        (Source.STOCK, {**COMPILED, "compile": "max-autotune"}, 3.35, 0.61),
        (Source.SEED, BEST, 2.75, 0.49),
        (Source.SEED, BEST_STREAMS, 2.50, 0.44),
        (Source.DESCENT, {**BEST_STREAMS, "precision": "fp16"}, 0, wrong),
        (Source.DESCENT, {**BEST_STREAMS, "streams": 8}, 2.53, 0.47),
        (Source.TPE, {**BEST, "compile": "max-autotune-no-cudagraphs"}, 0, out_of_memory),
    ]
    return [
        trial(run, number, source, knobs, more if isinstance(more, Failure) else against_eager(knobs, ms, more, number))
        for number, (source, knobs, ms, more) in enumerate(given)
    ]


def playoff(run: Run) -> Trial:
    found = measurement(arm(EAGER, {}, 10.5), arm("contender 1", BEST, 2.75), arm("contender 2", BEST_STREAMS, 2.51))
    return trial(run, 9, Source.PLAYOFF, BEST_STREAMS, found)


def confirmation(run: Run, best_ms: float, stock_ms: float, *, restless: bool = False) -> list[Trial]:
    """Five processes of ten rounds; only two of them time the step as given, unless it is an arm anyway."""
    processes, made = [], []
    for process in range(5):
        slow = 1.5 if restless and process == 2 else 1.0
        swing = 1 + 0.1 * (process % 3 - 1) if restless else 1.0
        as_given = [arm(EAGER, {}, 10.4 * slow, 10, 0.81, seed=process)] if restless or process < WITH_EAGER else []
        found = measurement(
            *as_given,
            arm(STOCK, COMPILED, stock_ms * slow, 10, 0.50, seed=process),
            arm(CANDIDATE, BEST_STREAMS, best_ms * slow * swing, 10, 0.44, seed=process),
            dropped_rounds=2 * (process == 0),
        )
        if restless:
            busy = Cause(kind=CauseKind.LOAD, seen="other processes kept 12.0 of 16 cores busy")
            found = found.model_copy(update={"causes": (busy,)})
        processes.append(found)
        tried = trial(run, 10 + process, Source.CONFIRM, BEST_STREAMS, found)
        made.append(tried.model_copy(update={"comparison": decide(processes).comparison}))
    return made


def ablation(run: Run) -> list[Trial]:
    """The plan without each of its knobs, two in a process; capture is removed together with streams."""
    gone = {"layout": 2.72, "precision": 4.41, "compile": 3.61, "update": 2.91, "streams": 2.77, "capture": 3.13}
    found = []
    for number, chunk in enumerate(chunks(BEST_STREAMS, Space.of(INAPPLICABLE)), 15):
        eager, *others, plan = arms_without(BEST_STREAMS, chunk, Space.of(INAPPLICABLE))
        left_out = [arm(spec.name, spec.knobs, gone[spec.name.removeprefix(WITHOUT)], 20) for spec in others]
        told = measurement(arm(eager.name, {}, 10.45, 20), *left_out, arm(plan.name, BEST_STREAMS, 2.51, 20))
        found.append(trial(run, number, Source.ABLATION, BEST_STREAMS, told))
    return found


def trial(run: Run, number: int, source: Source, knobs: Mapping[str, Choice], outcome: Measurement | Failure) -> Trial:
    is_measured = isinstance(outcome, Measurement)
    return Trial(
        run_id=run.id,
        number=number,
        source=source,
        knobs=dict(knobs),
        measurement=outcome if is_measured else None,
        comparison=compared(outcome.model_dump_json()) if is_measured else None,
        failure=None if is_measured else outcome,
        started_at=at(10 + 50 * number),
        finished_at=at(55 + 50 * number),
        spent=SPENT,
    )


@cache
def compared(measured: str) -> Comparison:
    """Cached per process: stories are built for every test, and this takes 20 ms."""
    found = Measurement.model_validate_json(measured)
    return compare_arms(found, found.arms[0].name, found.arms[-1].name)


def against_eager(knobs: Mapping[str, Choice], ms: float, gib: float, seed: int) -> Measurement:
    tried = arm(CANDIDATE, knobs, ms, peak_gib=gib, seed=seed)
    if knobs.get("streams") == 8:
        tried = tried.model_copy(update={"declined": {"streams": "5 streams are all that the launches can use"}})
    return measurement(arm(EAGER, {}, 10.5, seed=100 + seed), tried, dropped_rounds=int(seed == 3))


def measurement(*arms: Arm, dropped_rounds: int = 0) -> Measurement:
    return Measurement(
        arms=arms,
        steps_per_block=(5,) * len(arms),
        dropped_rounds=dropped_rounds,
        numerics=PROVEN,
        environment=an_environment(),
    )


def arm(
    name: str, knobs: Mapping[str, Choice], ms: float, blocks: int = 15, peak_gib: float = 0.5, seed: int = 0
) -> Arm:
    """Times around `ms`, with a few outliers."""
    drawn = random.Random(f"{name} {sorted(knobs.items())} {seed}")
    step_ms = [ms * drawn.gauss(1.0, 0.006) * (1.12 if drawn.random() < 0.04 else 1.0) for _ in range(blocks)]
    return Arm(
        name=name,
        knobs=dict(knobs),
        step_ms=tuple(step_ms),
        peak_bytes=int(peak_gib * GIB),
        first_step_s=0.4 + 8.0 * len(knobs),
        applied=tuple(sorted(knobs)),
    )
