"""A run as the terminal hears of it: trials, failures, and the events of its course."""

from kitsune.plan import Plan
from tests.store.samples import a_plan, a_run, after, an_environment
from tuner.measuring.protocol import Inspection
from tuner.planning.ablation import arms_without, chunks
from tuner.records import Arm, Comparison, Failure, FailureKind, Measurement, Phase, Run, Source, Trial, Verdict
from tuner.search.proposal import Proposal
from tuner.search.space import Space
from tuner.tuning.events import Confirming, Event, Inspected, Started, Tried, Trying

BF16 = {"precision": "bf16"}


def a_trial(number: int, knobs: dict[str, str], source: Source = Source.SEED, speedup: float = 1.5) -> Trial:
    baseline = Arm(name="eager", knobs={}, step_ms=(3.0, 3.0), peak_bytes=0, first_step_s=0)
    candidate = Arm(name="candidate", knobs=knobs, step_ms=(3.0 / speedup,) * 2, peak_bytes=0, first_step_s=0)
    gain = {"median": speedup, "low": speedup - 0.01, "high": speedup + 0.01}
    return Trial(
        run_id="run",
        number=number,
        source=source,
        knobs=knobs,
        measurement=Measurement(arms=(baseline, candidate), steps_per_block=(1, 1), environment=an_environment()),
        comparison=Comparison(speedup=gain, p_value=0.001, verdict=Verdict.FASTER, blocks=15),
        started_at=after(10 * number),
        finished_at=after(10 * number + 10),
    )


def a_failure(number: int, reason: str = "no luck", kind: FailureKind = FailureKind.OUT_OF_MEMORY) -> Trial:
    failure = Failure(kind=kind, phase=Phase.WARMUP, reason=reason)
    changes = {"measurement": None, "comparison": None, "failure": failure}
    return a_trial(number, {"compile": "default"}, Source.TPE).model_copy(update=changes)


STREAMED = a_plan(knobs={"precision": "bf16", "capture": "step", "streams": 4})


def ablations(number: int, plan: Plan = STREAMED) -> list[Trial]:
    """10 ms as given, 4 ms by the plan; 7 ms without bf16, 5.5 ms on one stream, 6.25 ms without a graph either."""
    times = {
        "eager": 10.0,
        "without precision": 7.0,
        "without streams": 5.5,
        "without capture": 6.25,
        "candidate": 4.0,
    }
    found = []
    for chunk in chunks(plan.knobs, Space.of()):
        arms = tuple(
            Arm(name=arm.name, knobs=arm.knobs, step_ms=(times[arm.name],) * 8, peak_bytes=0, first_step_s=0)
            for arm in arms_without(plan.knobs, chunk, Space.of())
        )
        measurement = Measurement(arms=arms, steps_per_block=(1,) * len(arms), environment=an_environment())
        trial = a_trial(number + len(found), dict(plan.knobs), Source.ABLATION, 2.5)
        found.append(trial.model_copy(update={"measurement": measurement}))
    return found


#: What `ablations` say, a line each.
GIVEN = (
    "What each choice gives (a step takes 10.00 ms as given, 4.000 ms by the plan; 16 blocks):",
    "precision=bf16 +3.000 +3.000 to +3.000 50%",
    "capture=step, without streams +0.750 +0.750 to +0.750 12%",
    "streams=4 +1.500 +1.500 to +1.500 25%",
    "interaction: what these leave +0.750 +0.750 to +0.750 12%",
    "all together +6.000 +6.000 to +6.000 100%",
)


def in_words(out: str) -> list[str]:
    return [" ".join(line.split()) for line in out.splitlines()]


RUN = a_run(id="the-run", workload="zoo:mlp", device="cpu", budget_trials=2)
INSPECTED = Inspected(
    Inspection(
        environment=an_environment(),
        fingerprint="f",
        inapplicable={"capture=step": "no GPU"},
        random=False,
        step_ms=3.0,
        peak_bytes=0,
        parameters=1234567,
        notes=("a note",),
    )
)
TRIALS = (a_trial(0, {}, Source.BASELINE, 1.0), a_failure(1), a_trial(2, BF16, Source.CONFIRM))


def a_course(run: Run, tried: list[Trial]) -> list[Event]:
    searched = [trial for trial in tried if trial.source is not Source.CONFIRM]
    events: list[Event] = [Started(run), INSPECTED]
    for trial in searched:
        events += [Trying(trial.number, run.budget_trials, Proposal(trial.knobs, trial.source)), Tried(trial)]
    return [*events, Confirming(BF16), *(Tried(trial) for trial in tried if trial.source is Source.CONFIRM)]
