"""Measurements in, the plan with its evidence out. Pure."""

from collections.abc import Mapping

from kitsune.knobs import KNOBS, Choice
from kitsune.plan import Evidence, Interval, Numerics, Plan
from tuner.records import Arm, Comparison, Measurement, Verdict
from tuner.stats import compare, median, samples_digest

EAGER, STOCK, CANDIDATE = "eager", "stock", "candidate"


def arm(measurement: Measurement, name: str) -> Arm | None:
    return next((arm for arm in measurement.arms if arm.name == name), None)


def compare_arms(measurement: Measurement, baseline: str, candidate: str, noise_floor: float = 0.0) -> Comparison:
    """The candidate arm against the baseline arm, paired by round."""
    first, second = arm(measurement, baseline), arm(measurement, candidate)
    assert first is not None and second is not None
    return compare(first.step_ms, second.step_ms, noise_floor=noise_floor)


def words(knobs: Mapping[str, Choice]) -> str:
    """A configuration in words, in the order of the knobs table: "eager" when nothing is changed."""
    return ", ".join(f"{name}={knobs[name]}" for name in KNOBS if name in knobs) or EAGER


def plan_from(
    measurement: Measurement, run_id: str, fingerprint: str, noise_floor: float = 0.0
) -> tuple[Plan, Verdict, Comparison]:
    """The plan that a confirmation allows, its verdict, and the comparison that decided.

    Only a candidate that is FASTER than the best stock configuration becomes the plan. Otherwise the plan is the stock
    configuration itself, where that is faster than the step as given; else it changes nothing.
    """
    baseline = STOCK if arm(measurement, STOCK) is not None else EAGER
    decided = compare_arms(measurement, baseline, CANDIDATE, noise_floor)
    if decided.verdict is Verdict.FASTER:
        chosen, verdict = CANDIDATE, Verdict.FASTER
    else:
        over_eager = compare_arms(measurement, EAGER, baseline, noise_floor)
        chosen = baseline if over_eager.verdict is Verdict.FASTER else EAGER
        verdict = Verdict.SAME
    plan = Plan(
        knobs=dict(_arm(measurement, chosen).knobs),
        fingerprint=fingerprint,
        environment=measurement.environment,
        evidence=evidence(measurement, run_id, verdict, baseline, chosen),
    )
    return plan, verdict, decided


def evidence(measurement: Measurement, run_id: str, verdict: Verdict, baseline: str, chosen: str) -> Evidence:
    """What the samples say of the chosen arm; a speedup of an arm over itself is exactly 1."""
    base, winner, eager = (_arm(measurement, name) for name in (baseline, chosen, EAGER))
    return Evidence(
        run_id=run_id,
        verdict="faster" if verdict is Verdict.FASTER else "same",
        baseline=words(base.knobs),
        baseline_step_ms=median(base.step_ms),
        step_ms=median(winner.step_ms),
        speedup=_speedup(measurement, baseline, chosen),
        eager_step_ms=median(eager.step_ms),
        speedup_over_eager=_speedup(measurement, EAGER, chosen),
        baseline_peak_bytes=base.peak_bytes,
        peak_bytes=winner.peak_bytes,
        first_step_s=winner.first_step_s,
        blocks=len(winner.step_ms),
        samples_sha256=samples_digest(measurement),
        numerics=measurement.numerics or UNCHANGED,
    )


#: The step as given is its own reference.
UNCHANGED = Numerics(
    steps=1,
    loss_error=0.0,
    gradient_error=0.0,
    parameter_error=0.0,
    loss_allowed=0.0,
    gradient_allowed=0.0,
    parameter_allowed=0.0,
    note="the step as given",
)


def _arm(measurement: Measurement, name: str) -> Arm:
    found = arm(measurement, name)
    assert found is not None
    return found


def _speedup(measurement: Measurement, baseline: str, chosen: str) -> Interval:
    if baseline == chosen:
        return Interval(median=1.0, low=1.0, high=1.0)
    return compare_arms(measurement, baseline, chosen).speedup
