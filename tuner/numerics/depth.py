"""Chooses how thorough the long numerics gate can be within a time budget."""

from dataclasses import dataclass
from typing import Final

#: What adds least is reduced first: steps beyond 50, then restarts and directions. Recomputed updates stay numerous.
LEAST_STEPS: Final = 50
MOST_STEPS: Final = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class Depth:
    """Amounts of work: settled steps, restarts of the reference at some of them, recomputed updates, yardstick runs;
    for steps with random numbers also draws (seeds) and directions of derivatives."""

    steps: int
    restarts: int
    updates: int
    yardsticks: int
    draws: int
    directions: int

    def cost_s(self, step_s: float, double_s: float, *, is_random: bool) -> float:
        """A rough estimate. An eager step takes `step_s`, in float64 `double_s`; a candidate counts as eager."""
        trajectories = self.steps * (2 + self.yardsticks) * step_s
        restarts = self.restarts * (double_s + self.yardsticks * step_s)
        updates = 4 * self.updates * step_s
        return trajectories + restarts + updates + (self.masks_s(step_s) if is_random else 0.0)

    def masks_s(self, step_s: float) -> float:
        """Estimated seconds of the checks with random numbers, for the candidate and an eager step."""
        return 2 * (self.draws + 4 * self.directions) * step_s


DEPTHS: Final = (
    Depth(steps=MOST_STEPS, restarts=48, updates=16, yardsticks=3, draws=128, directions=64),
    Depth(steps=100, restarts=16, updates=12, yardsticks=3, draws=64, directions=32),
    Depth(steps=LEAST_STEPS, restarts=10, updates=12, yardsticks=3, draws=64, directions=16),
    Depth(steps=LEAST_STEPS, restarts=8, updates=12, yardsticks=2, draws=32, directions=8),
    Depth(steps=20, restarts=6, updates=9, yardsticks=2, draws=32, directions=8),
)


def depth_of(step_s: float, double_s: float, budget_s: float, *, is_random: bool) -> tuple[Depth, str]:
    """The most thorough depth that fits the budget, and a note if not even 50 steps fit."""
    for depth in DEPTHS:
        if depth.cost_s(step_s, double_s, is_random=is_random) <= budget_s and depth.steps >= LEAST_STEPS:
            return depth, ""
    least = DEPTHS[-2].cost_s(step_s, double_s, is_random=is_random)
    why = f"{LEAST_STEPS} steps would take about {least:.0f} s, more than the {budget_s:.0f} s there were"
    return DEPTHS[-1], f"{why}: fewer were made"
