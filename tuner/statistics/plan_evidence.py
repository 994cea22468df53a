"""Decides by the measurements of a confirmation which arm becomes the plan, and builds the plan with its evidence."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from statistics import median
from typing import Final, cast

from kitsune.base.byte_sizes import size_words
from kitsune.knobs import KNOBS, Choice
from kitsune.plan import Evidence, Interval, Numerics, Plan, Said
from tuner.measuring.protocol import ArmSpec, Inspection
from tuner.records import Arm, CauseKind, Comparison, Measurement, Verdict
from tuner.statistics.block_statistics import SAME_WITHIN, compare, samples_digest, verdict
from tuner.statistics.process_statistics import (
    FAR_APART,
    ConfirmedComparison,
    Prior,
    apart,
    confirm,
    has_too_large_spread,
    is_plainly_faster,
    scatter,
)

EAGER, STOCK, CANDIDATE = "eager", "stock", "candidate"
#: The baseline arm of a trial if that is the best configuration so far.
RIVAL: Final = "rival"

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
ARM_NAMES: Final = {EAGER: "the step as given", STOCK: "the best stock configuration"}
CERTAIN: Final = (Verdict.FASTER, Verdict.SLOWER)
REMEDIES: Final[Mapping[CauseKind, str]] = {
    CauseKind.LOAD: "end what else runs here, or tune when this machine is idle",
    CauseKind.STEAL: "tune at another hour, or on a machine whose cores are not shared",
    CauseKind.QUOTA: "give this container more CPU time",
    CauseKind.GPU_PROCESS: "end the other processes on the GPU, or choose another one",
    CauseKind.GPU_CLOCK: "let the GPU cool, or lock its clocks (nvidia-smi --lock-gpu-clocks)",
}
REMEDY_UNSEEN: Final = (
    "no cause of it was seen: close what else runs here and tune again; kitsune doctor --measure shows what this "
    "machine can tell"
)


@dataclass(frozen=True, slots=True)
class Decision:
    """Which arm becomes the plan, which arm its gain is quoted against, and what decided.

    Both are the same arm unless the verdict is FASTER or FITS. Verdicts: FASTER (the candidate beats the best stock
    configuration), SAME (a gain of 1 % is excluded), AMBIGUOUS or TOO_NOISY (the samples do not decide; `note` says
    why, and what to do), FITS (nothing of plain torch that was tried fits into the memory limit). `found` compares the
    candidate with the best stock configuration, or with the step as given where none fits.
    """

    chosen: str
    baseline: str
    verdict: Verdict
    found: ConfirmedComparison
    note: str = ""

    @property
    def comparison(self) -> Comparison:
        return self.found.comparison


def compare_arms(measurement: Measurement, baseline: str, candidate: str) -> Comparison:
    """The candidate arm against the baseline arm in one process, paired by round. Not sufficient as evidence.

    AMBIGUOUS where disturbed rounds had to be kept.
    """
    first, second = _arm(measurement, baseline), _arm(measurement, candidate)
    compared = compare(first.step_ms, second.step_ms)
    return compared.model_copy(update={"verdict": Verdict.AMBIGUOUS}) if measurement.disturbed else compared


def over(found: Comparison, rival: Comparison) -> Comparison:
    """Converts a comparison over a rival into one over the rival's own baseline, by multiplying the speedups.

    The rival's interval is ignored, because it is the same for all trials that are ranked against this rival.
    """
    factor = rival.speedup.median
    low, middle, high = (factor * each for each in (found.speedup.low, found.speedup.median, found.speedup.high))
    is_clear = low > 1 or high < 1
    said = verdict(math.log(low), math.log(high), 0.0 if is_clear else 1.0)
    return found.model_copy(
        update={
            "speedup": Interval(median=middle, low=low, high=high),
            "verdict": found.verdict if found.verdict is Verdict.AMBIGUOUS and not is_clear else said,
        }
    )


def words(knobs: Mapping[str, Choice]) -> str:
    """A configuration as text, in the order of the knobs table; "eager" when all knobs are at their defaults."""
    return ", ".join(f"{name}={knobs[name]}" for name in KNOBS if name in knobs) or EAGER


def confirmation_arms(
    candidate: Mapping[str, Choice], stock: Mapping[str, Choice] | None, *, with_eager: bool = True
) -> tuple[ArmSpec, ...]:
    """The step as given, the best stock configuration and the candidate, without duplicates; the candidate is last."""
    arms = [ArmSpec(name=EAGER)] if with_eager else []
    if stock:
        arms.append(ArmSpec(name=STOCK, knobs=stock))
    if not stock or candidate != stock:
        arms.append(ArmSpec(name=CANDIDATE, knobs=candidate))
    return tuple(arms)


def decide(
    processes: Sequence[Measurement],
    prior: Prior | None = None,
    memory_limit_bytes: int | None = None,
    *,
    given_fits: bool = True,
) -> Decision:
    """The decision of a confirmation. `processes`: a Measurement of each fresh process, with the candidate as last arm.

    All have the same arms, except that some (not all) may lack the step as given. A speedup uses the processes that
    have both arms.
    The candidate becomes the plan if it is FASTER than the best stock configuration, which is the better one of the
    step as given and the search's best stock configuration by these samples. Otherwise the plan is a stock
    configuration: the step as given, unless the other one is FASTER or has a median gain above 1 %. That choice is
    certain with any number of processes if most rounds of each show a gain above any noise.
    `prior`: from `prior_of` the evidence of an equal plan with equal torch, driver and model; two processes then decide
    nearly as well as five.
    `memory_limit_bytes`: where the step as given needs more, it is no stock configuration, and never becomes the plan.
    So it is where it does not fit into the memory of the device (`given_fits`), and was timed with checkpoints.
    """
    used = undisturbed(processes)
    is_within = memory_limit_bytes is None or _peak_bytes(arms_of(used, EAGER)) <= memory_limit_bytes
    eager_fits = given_fits and is_within
    stock = _best_stock(used) if eager_fits or not arms_of(used, STOCK) else STOCK
    candidate = used[0].arms[-1].name if used[0].arms[-1].knobs else EAGER
    is_known = prior is not None and prior.baseline == words(arms_of(used, stock)[0].knobs)
    over_stock, noise = judged(used, stock, candidate, prior if is_known else None)
    asides = "; ".join(_asides(len(processes) - len(used), len(processes), given_fits=given_fits))
    if stock == EAGER and not eager_fits:
        note = "; ".join(filter(None, (_fits_alone(used, memory_limit_bytes, given_fits=given_fits), asides)))
        return Decision(candidate, EAGER, Verdict.FITS, over_stock, note)
    if over_stock.comparison.verdict is Verdict.FASTER:
        note = "; ".join(filter(None, (_throttled(used), asides)))
        return Decision(candidate, stock, Verdict.FASTER, over_stock, note)
    over_eager, noise_of_eager = judged(used, EAGER, stock)
    kept = stock if _seems_faster(over_eager.comparison) or not eager_fits else EAGER
    is_settled = not eager_fits or (len(used) > 1 and _is_plainly_faster(used, EAGER, stock))
    said = _least_certain((over_stock,) if is_settled else (over_stock, over_eager))
    note = ""
    if said is Verdict.TOO_NOISY:
        note = too_noisy(noise or noise_of_eager, used)
    elif said is Verdict.AMBIGUOUS:
        note = _undecided(over_stock, over_eager)
    return Decision(kept, kept, said, over_stock, "; ".join(filter(None, (note, asides))))


def judged(
    processes: Sequence[Measurement], baseline: str, candidate: str, prior: Prior | None = None
) -> tuple[ConfirmedComparison, str]:
    """The comparison of two arms, and why it is too noisy (empty if it is not). A certain verdict is never replaced.

    An arm compared with itself is SAME, even from one process, unless its times are too noisy.
    """
    processes = _of_both(processes, baseline, candidate)
    found = confirm(_times(processes, baseline), _times(processes, candidate), prior)
    if baseline == candidate:
        found = replace(found, comparison=found.comparison.model_copy(update={"verdict": Verdict.SAME}))
    disturbed = any(measurement.disturbed for measurement in processes)
    if found.comparison.verdict in CERTAIN and not disturbed:
        return found, ""
    noise = next(_noise_signs(processes, baseline, found), "")
    if not noise:
        return found, ""
    comparison = found.comparison.model_copy(update={"verdict": Verdict.TOO_NOISY})
    return replace(found, comparison=comparison), noise


def too_noisy(noise: str, processes: Sequence[Measurement]) -> str:
    """The message for a verdict of TOO_NOISY: the noise, the causes that were seen (one per kind), and what to do."""
    causes = {cause.kind: cause.seen for cause in chain.from_iterable(each.causes for each in processes)}
    if not causes:
        return f"{noise}; {REMEDY_UNSEEN}"
    ways = dict.fromkeys(REMEDIES[kind] for kind in causes)
    return f"{noise}, while {' and '.join(causes.values())}; {'; '.join(ways)}"


def undisturbed(processes: Sequence[Measurement]) -> Sequence[Measurement]:
    """The processes without disturbed rounds if these are at least two, one with the step as given; else all."""
    quiet = [measurement for measurement in processes if not measurement.disturbed]
    return quiet if len(quiet) > 1 and has_eager(quiet) else processes


def has_eager(processes: Sequence[Measurement]) -> bool:
    """Whether a process has timed the step as given, which every result needs."""
    return bool(arms_of(processes, EAGER))


def arms_of(processes: Sequence[Measurement], name: str) -> list[Arm]:
    """The arms of this name in all processes that timed it."""
    return [arm for measurement in processes for arm in measurement.arms if arm.name == name]


def prior_of(evidence: Evidence) -> Prior | None:
    """The spread between processes from a plan's evidence, for `decide`; None if the evidence has none."""
    if evidence.process_spread is None:
        return None
    return Prior(evidence.process_spread, evidence.process_degrees, evidence.baseline)


def plan_from(
    processes: Sequence[Measurement],
    decision: Decision,
    run_id: str,
    inspection: Inspection,
    numerics: Mapping[str, Numerics],
) -> Plan:
    """The plan of a decision. `numerics`: arm -> numerics of the best stock configuration and of the candidate."""
    used = undisturbed(processes)
    return Plan(
        knobs=dict(arms_of(used, decision.chosen)[0].knobs),
        fingerprint=inspection.fingerprint,
        model_fingerprint=inspection.model_fingerprint,
        batch=inspection.batch,
        environment=used[0].environment,
        evidence=evidence(used, decision, run_id, numerics),
    )


def evidence(
    processes: Sequence[Measurement], decision: Decision, run_id: str, proven: Mapping[str, Numerics]
) -> Evidence:
    """The evidence for the chosen arm. The speedup of an arm over itself is exactly 1."""
    is_gain = decision.chosen != decision.baseline
    spread = decision.found.spread
    both = _of_both(processes, decision.baseline, decision.chosen)
    winners, baselines = arms_of(both, decision.chosen), arms_of(both, decision.baseline)
    return Evidence(
        run_id=run_id,
        verdict=cast("Said", decision.verdict.value),
        note=decision.note,
        baseline=words(baselines[0].knobs),
        baseline_step_ms=_step_ms(baselines),
        step_ms=_step_ms(winners),
        speedup=decision.comparison.speedup if is_gain else _itself(),
        prediction=decision.found.prediction if is_gain else None,
        process_spread=spread.deviation if is_gain and spread.degrees else None,
        process_degrees=spread.degrees if is_gain else 0,
        eager_step_ms=_step_ms(arms_of(processes, EAGER)),
        speedup_over_eager=_speedup(processes, EAGER, decision.chosen),
        baseline_peak_bytes=_peak_bytes(baselines),
        peak_bytes=_peak_bytes(winners),
        first_step_s=median([arm.first_step_s for arm in winners]),
        blocks=sum(len(arm.step_ms) for arm in winners),
        processes=len(both),
        samples_sha256=samples_digest(processes),
        numerics=_numerics(processes, decision.chosen, proven),
    )


def _arm(measurement: Measurement, name: str) -> Arm:
    return next(arm for arm in measurement.arms if arm.name == name)


def _of_both(processes: Sequence[Measurement], *names: str) -> Sequence[Measurement]:
    """The processes that have timed all these arms."""
    return [each for each in processes if set(names) <= {arm.name for arm in each.arms}]


def _times(processes: Sequence[Measurement], name: str) -> list[tuple[float, ...]]:
    return [arm.step_ms for arm in arms_of(processes, name)]


def _step_ms(arms: Sequence[Arm]) -> float:
    """Median over the processes of their medians."""
    return median([median(arm.step_ms) for arm in arms])


def _best_stock(processes: Sequence[Measurement]) -> str:
    if not arms_of(processes, STOCK):
        return EAGER
    return STOCK if _speedup(processes, EAGER, STOCK).median > 1 else EAGER


def _noise_signs(processes: Sequence[Measurement], baseline: str, found: ConfirmedComparison) -> Iterator[str]:
    """Each sign that the machine was too noisy for a verdict, as text."""
    times = _times(processes, baseline)
    what = ARM_NAMES.get(baseline, f"the {baseline}")
    if any(measurement.disturbed for measurement in processes):
        yield "the machine was disturbed in nearly every round"
    if apart(times) > FAR_APART:
        yield f"{what} took {apart(times):.1f} times as long in one process as in another"
    if scatter(times) > FAR_APART:
        yield f"blocks of {what} lay {scatter(times):.1f} times apart in one process"
    if has_too_large_spread(found):
        speedup = found.comparison.speedup
        yield f"the gain lies anywhere between {speedup.low:.2f} and {speedup.high:.2f} times"


def _undecided(over_stock: ConfirmedComparison, over_eager: ConfirmedComparison) -> str:
    """The message for an undecided comparison: of the candidate, else of the best stock configuration."""
    is_open = over_stock.comparison.verdict is Verdict.AMBIGUOUS
    what = "the best candidate" if is_open else "the best stock configuration, over the step as given,"
    found = over_stock if is_open else over_eager
    if found.processes == 1:
        return "one process alone cannot tell; give the run more time"
    speedup = found.comparison.speedup
    return (
        f"{what} is {speedup.low:.3f} to {speedup.high:.3f} times as fast in {found.processes} processes; more may tell"
    )


def _throttled(processes: Sequence[Measurement]) -> str:
    """A note if the GPU was throttled in more than half of the processes, which affects all arms; else empty."""
    seen = [cause.seen for each in processes for cause in each.causes if cause.kind is CauseKind.GPU_CLOCK]
    return f"measured while {seen[0]}" if 2 * len(seen) > len(processes) else ""


def _peak_bytes(arms: Sequence[Arm]) -> int:
    return max((arm.peak_bytes for arm in arms), default=0)


def _fits_alone(processes: Sequence[Measurement], limit_bytes: int | None, *, given_fits: bool) -> str:
    as_given = f"; as given it needs {size_words(_peak_bytes(arms_of(processes, EAGER)))}" if given_fits else ""
    return f"no stock configuration that was tried fits into {size_words(limit_bytes or 0)}{as_given}"


def _asides(count: int, of: int, *, given_fits: bool) -> Iterator[str]:
    """What a reader of any verdict must know. `count`: how many of the processes were left out."""
    if count:
        yield f"{count} of {of} processes left out, as the machine was disturbed"
    if not given_fits:
        yield "the step as given runs out of memory, so it was timed with its blocks as checkpoints"


def _least_certain(compared: Sequence[ConfirmedComparison]) -> Verdict:
    """The verdict of a run without a certain gain: the least certain one of the comparisons."""
    said = {found.comparison.verdict for found in compared}
    return next((unclear for unclear in (Verdict.TOO_NOISY, Verdict.AMBIGUOUS) if unclear in said), Verdict.SAME)


def _is_plainly_faster(processes: Sequence[Measurement], baseline: str, candidate: str) -> bool:
    both = _of_both(processes, baseline, candidate)
    return is_plainly_faster(_times(both, baseline), _times(both, candidate))


def _seems_faster(comparison: Comparison) -> bool:
    return comparison.verdict is Verdict.FASTER or comparison.speedup.median > 1 + SAME_WITHIN


def _numerics(processes: Sequence[Measurement], chosen: str, proven: Mapping[str, Numerics]) -> Numerics:
    """The newest numerics of this arm. A process checks the numerics of its last arm only."""
    if not arms_of(processes, chosen)[0].knobs:
        return UNCHANGED
    if chosen == processes[0].arms[-1].name:
        afresh = next((found.numerics for found in processes if found.numerics is not None), None)
        if afresh is not None:
            return afresh
    note = "; ".join(filter(None, [proven[chosen].note, PROVEN_BEFORE]))
    return proven[chosen].model_copy(update={"note": note})


def _speedup(processes: Sequence[Measurement], baseline: str, chosen: str) -> Interval:
    if baseline == chosen:
        return _itself()
    processes = _of_both(processes, baseline, chosen)
    return confirm(_times(processes, baseline), _times(processes, chosen)).comparison.speedup


def _itself() -> Interval:
    return Interval(median=1.0, low=1.0, high=1.0)
