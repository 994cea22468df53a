"""Compares loss curves of trainings with and without a plan, and decides whether the plan trains equally well."""

import math
from collections.abc import Sequence
from enum import StrEnum
from statistics import fmean, variance
from typing import Final, Literal

from pydantic import Field

from kitsune.base.base_record import Record
from kitsune.plan import Environment
from tuner.statistics.student_t import quantile

#: Last fraction of a curve whose mean is compared, because a single point is noisy.
LAST_SHARE: Final = 0.25
#: Probability that two equal arms are found equal.
CONFIDENCE: Final = 0.99
#: Minimal tolerance relative to the loss, for seeds that are closer together than this.
FLOOR: Final = 1e-3
#: Minimal reduction of the loss, relative to the loss before training; with less the result is unclear.
LEAST_LEARNED: Final = 0.02
#: Maximal tolerance relative to the reduction of the loss; with more the result is unclear.
MOST_ALLOWED: Final = 0.5

ALL_ALIKE: Final = (
    "every seed gave the same training, so nothing tells how far two may lie apart: leave torch.manual_seed out of the "
    "workload's function, or give batches as a function of a seed"
)

ArmName = Literal["plain", "plan"]


class Learned(StrEnum):
    """Whether the plan trains like the step as given. Unclear: little is learnt, or the seeds are far apart."""

    SAME = "same"
    DIFFERS = "differs"
    UNCLEAR = "unclear"


class Curve(Record):
    """One training: the loss on the held-out batches before it (`start`) and after each of `steps`.

    `trained`: mean loss of the training steps since the previous point. `ended`: why it was aborted, or empty.
    """

    seed: int
    arm: ArmName
    start: float
    steps: tuple[int, ...] = ()
    trained: tuple[float, ...] = ()
    held_out: tuple[float, ...] = ()
    ended: str = Field(default="", max_length=1000)

    @property
    def final(self) -> float:
        """Mean held-out loss over the last quarter of the points."""
        return fmean(self.held_out[-max(1, round(LAST_SHARE * len(self.held_out))) :])


class CurvesVerdict(Record):
    """Final mean held-out loss of each arm, and the difference that the spread between seeds allows (`allowed`)."""

    verdict: Learned
    reason: str
    start: float
    plain: float | None = None
    plan: float | None = None
    spread: float | None = Field(default=None, description="standard deviation over the seeds, of both arms together")
    allowed: float | None = None


class Verification(Record):
    """The evidence of `kitsune verify`: plan, workload, environment and all curves."""

    plan_id: str
    workload: str
    environment: Environment
    steps: int
    seeds: int
    held_out_batches: int
    outcome: CurvesVerdict
    curves: tuple[Curve, ...]
    notes: tuple[str, ...] = ()


def judge(curves: Sequence[Curve]) -> CurvesVerdict:
    """Compares the mean final losses by Student's t-test with the pooled variance within the arms.

    Both arms start from the same weights and see the same batches, so they differ less by chance than the independent
    arms that the test assumes. Raises ValueError with fewer than two seeds.
    """
    plain, plan = ([curve for curve in curves if curve.arm == arm] for arm in ("plain", "plan"))
    if min(len(plain), len(plan)) < 2:
        raise ValueError("fewer than two seeds have no spread")
    start = fmean(curve.start for curve in plain)
    if ended := next((curve for curve in plain if curve.ended), None):
        why = f"the step as given does not train: seed {ended.seed}, {ended.ended}"
        return CurvesVerdict(verdict=Learned.UNCLEAR, reason=why, start=start)
    if ended := next((curve for curve in plan if curve.ended), None):
        why = f"by the plan, seed {ended.seed}: {ended.ended}; the step as given trains"
        return CurvesVerdict(verdict=Learned.DIFFERS, reason=why, start=start)
    if len({(curve.start, curve.held_out) for curve in plain}) == 1:
        return CurvesVerdict(verdict=Learned.UNCLEAR, reason=ALL_ALIKE, start=start)
    return _compared(start, [curve.final for curve in plain], [curve.final for curve in plan])


def _compared(start: float, plain: Sequence[float], plan: Sequence[float]) -> CurvesVerdict:
    means = fmean(plain), fmean(plan)
    spread = math.sqrt(fmean((variance(plain), variance(plan))))
    standard_error = spread * math.sqrt(1 / len(plain) + 1 / len(plan))
    allowed = max(FLOOR * abs(means[0]), quantile(len(plain) + len(plan) - 2, CONFIDENCE) * standard_error)
    verdict, reason = _verdict(start, *means, allowed)
    return CurvesVerdict(
        verdict=verdict, reason=reason, start=start, plain=means[0], plan=means[1], spread=spread, allowed=allowed
    )


def _verdict(start: float, plain: float, plan: float, allowed: float) -> tuple[Learned, str]:
    learnt = start - plain
    if learnt < LEAST_LEARNED * abs(start):
        return Learned.UNCLEAR, f"the step as given learns nothing: held-out loss {start:.4g} before, {plain:.4g} after"
    apart = f"held-out loss {plan:.4g} by the plan, {plain:.4g} as given; the seeds let them be {allowed:.2g} apart"
    if abs(plan - plain) > allowed:
        return Learned.DIFFERS, apart
    if allowed > MOST_ALLOWED * learnt:
        return Learned.UNCLEAR, f"{apart}, which proves little: more --seeds or more --steps are needed"
    return Learned.SAME, apart
