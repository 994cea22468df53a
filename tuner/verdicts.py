"""Measurements in, the plan with its evidence out. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass

from kitsune.knobs import KNOBS, Choice
from kitsune.plan import Evidence, Interval, Numerics, Plan
from tuner.protocol import ArmSpec, Inspection
from tuner.records import Arm, Comparison, Measurement, Verdict
from tuner.stats import THRESHOLD, compare, median, samples_digest

EAGER, STOCK, CANDIDATE = "eager", "stock", "candidate"

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
PROVEN_BEFORE = "proven when it was first tried"


@dataclass(frozen=True, slots=True)
class Decision:
    """Which arm becomes the plan, which arm its gain is quoted against, and the comparison that decided.

    They are one and the same arm when nothing is gained over what plain torch offers. `is_open`: these samples do not
    exclude a gain, and more of them could show it.
    """

    chosen: str
    baseline: str
    comparison: Comparison
    is_open: bool

    @property
    def verdict(self) -> Verdict:
        return Verdict.SAME if self.chosen == self.baseline else Verdict.FASTER


def compare_arms(measurement: Measurement, baseline: str, candidate: str, noise_floor: float = 0.0) -> Comparison:
    """The candidate arm against the baseline arm, paired by round."""
    first, second = _arm(measurement, baseline), _arm(measurement, candidate)
    return compare(first.step_ms, second.step_ms, noise_floor=noise_floor)


def words(knobs: Mapping[str, Choice]) -> str:
    """A configuration in words, in the order of the knobs table: "eager" when nothing is changed."""
    return ", ".join(f"{name}={knobs[name]}" for name in KNOBS if name in knobs) or EAGER


def confirmation_arms(candidate: Mapping[str, Choice], stock: Mapping[str, Choice] | None) -> tuple[ArmSpec, ...]:
    """The step as given, the best stock configuration and the candidate, none of them twice; the last one is proven."""
    arms = [ArmSpec(name=EAGER)]
    if stock:
        arms.append(ArmSpec(name=STOCK, knobs=stock))
    if not stock or candidate != stock:
        arms.append(ArmSpec(name=CANDIDATE, knobs=candidate))
    return tuple(arms)


def decide(measurement: Measurement, noise_floor: float = 0.0) -> Decision:
    """What a confirmation allows.

    The candidate becomes the plan when it is FASTER than the best stock configuration: the better one, by these very
    samples, of the step as given and of what was the best in the search. Otherwise the plan is the stock configuration
    itself, where that is FASTER than the step as given; else it changes nothing.
    """
    stock = _best_stock(measurement)
    candidate = measurement.arms[-1].name if measurement.arms[-1].knobs else EAGER
    decided = compare_arms(measurement, stock, candidate, noise_floor)
    if decided.verdict is Verdict.FASTER:
        return Decision(candidate, stock, decided, is_open=False)
    over_eager = compare_arms(measurement, EAGER, stock, noise_floor)
    kept = stock if over_eager.verdict is Verdict.FASTER else EAGER
    is_open = any(_may_gain(comparison, noise_floor) for comparison in (decided, over_eager))
    return Decision(kept, kept, decided, is_open)


def plan_from(
    measurement: Measurement,
    decision: Decision,
    run_id: str,
    inspection: Inspection,
    stock_numerics: Numerics | None = None,
) -> Plan:
    """The plan that was decided on. `stock_numerics` were found when the best stock configuration was first tried."""
    return Plan(
        knobs=dict(_arm(measurement, decision.chosen).knobs),
        fingerprint=inspection.fingerprint,
        model_fingerprint=inspection.model_fingerprint,
        batch=inspection.batch,
        environment=measurement.environment,
        evidence=evidence(measurement, decision, run_id, stock_numerics),
    )


def evidence(measurement: Measurement, decision: Decision, run_id: str, stock_numerics: Numerics | None) -> Evidence:
    """What the samples say of the chosen arm; a speedup of an arm over itself is exactly 1."""
    eager, base, winner = (_arm(measurement, name) for name in (EAGER, decision.baseline, decision.chosen))
    return Evidence(
        run_id=run_id,
        verdict="faster" if decision.verdict is Verdict.FASTER else "same",
        baseline=words(base.knobs),
        baseline_step_ms=median(base.step_ms),
        step_ms=median(winner.step_ms),
        speedup=_speedup(measurement, decision.baseline, decision.chosen),
        eager_step_ms=median(eager.step_ms),
        speedup_over_eager=_speedup(measurement, EAGER, decision.chosen),
        baseline_peak_bytes=base.peak_bytes,
        peak_bytes=winner.peak_bytes,
        first_step_s=winner.first_step_s,
        blocks=len(winner.step_ms),
        samples_sha256=samples_digest(measurement),
        numerics=_numerics(measurement, decision.chosen, stock_numerics),
    )


def _arm(measurement: Measurement, name: str) -> Arm:
    return next(arm for arm in measurement.arms if arm.name == name)


def _best_stock(measurement: Measurement) -> str:
    if all(arm.name != STOCK for arm in measurement.arms):
        return EAGER
    return STOCK if compare_arms(measurement, EAGER, STOCK).speedup.median > 1 else EAGER


def _may_gain(comparison: Comparison, noise_floor: float) -> bool:
    margin = max(THRESHOLD, noise_floor)
    return comparison.verdict is Verdict.AMBIGUOUS and comparison.speedup.high > 1 + margin


def _numerics(measurement: Measurement, chosen: str, stock_numerics: Numerics | None) -> Numerics:
    """A child proves its last arm only: what it found must not be told of another one."""
    if not _arm(measurement, chosen).knobs:
        return UNCHANGED
    if chosen == measurement.arms[-1].name:
        assert measurement.numerics is not None
        return measurement.numerics
    assert stock_numerics is not None
    note = "; ".join(filter(None, [stock_numerics.note, PROVEN_BEFORE]))
    return stock_numerics.model_copy(update={"note": note})


def _speedup(measurement: Measurement, baseline: str, chosen: str) -> Interval:
    if baseline == chosen:
        return Interval(median=1.0, low=1.0, high=1.0)
    return compare_arms(measurement, baseline, chosen).speedup
