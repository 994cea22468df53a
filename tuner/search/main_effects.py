"""Surrogate model of the search: main effects of the choices on the log step time, ranked by expected improvement.

The log of the step time is a sum of one effect for each choice that differs from the default (main effects, no
interactions). The effects are fitted by Bayesian linear regression with the prior N(0, PRIOR_SD^2), so that a choice
that was never tried is uncertain, not bad. Configurations are ranked by expected improvement over the best so far
(Mockus 1975; Jones et al. 1998). Choices interact, and differently far from the best than near it (a graph does not
speed up a step that fills the GPU), so slow trials have less weight.
"""

import math
from collections.abc import Iterator, Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from kitsune.knobs import Choice
from tuner.search.space import Configuration, Space

Matrix = NDArray[np.floating[Any]]
Vector = NDArray[np.floating[Any]]

PRIOR_SD: Final = 0.3  # in log time: two thirds of all choices change a step by less than a third
ERROR_SD: Final = 0.05  # model error at the best so far, from interactions and the noise of a trial
NEAR: Final = 0.5  # distance from the best, in log time, at which the variance of the error has grown e-fold
WORTH: Final = 0.003  # expected improvement, in log time, below which the model proposes nothing


def promising(
    space: Space, costs: Sequence[tuple[Configuration, float]], pending: Sequence[Configuration] = ()
) -> Iterator[dict[str, Choice]]:
    """Configurations by expected improvement, highest first, down to the minimum that is worth a trial.

    `costs`: log of the relative step time of each trial; at least one trial. `pending` trials are assumed to end as
    predicted, so that nearly equal configurations are not proposed while they run. 8 208 configurations take 15 ms.
    """
    grid = Grid(space)
    tried = np.array([grid.row(knobs) for knobs, _ in costs])
    logs = np.array([cost for _, cost in costs])
    variances = ERROR_SD**2 * np.exp((logs - logs.min()) / NEAR)
    running = np.array([grid.row(knobs) for knobs in pending]).reshape(len(pending), tried.shape[1])
    effects, covariance = regression(tried, logs, variances, running)
    gains = improvement(grid.rows @ effects, deviations(grid.rows, covariance), logs.min())
    for number in np.argsort(-gains, kind="stable"):
        if gains[number] < WORTH:
            return
        yield grid.knobs(int(number))


def regression(rows: Matrix, logs: Vector, variances: Vector, running: Matrix) -> tuple[Vector, Matrix]:
    """Posterior (mean, covariance) of the effects; `running` rows have no result yet and only reduce the covariance."""
    precision = np.full(rows.shape[1], PRIOR_SD**-2)
    precision[0] = 1e-6  # the base has no prior
    known = np.diag(precision) + rows.T @ (rows / variances[:, None])
    effects: Vector = np.linalg.solve(known, rows.T @ (logs / variances))
    covariance: Matrix = np.linalg.inv(known + running.T @ running / ERROR_SD**2)
    return effects, covariance


def deviations(rows: Matrix, covariance: Matrix) -> Vector:
    """Posterior standard deviation of each row's sum of effects."""
    found: Vector = np.sqrt(np.einsum("ij,ij->i", rows @ covariance, rows))
    return found


def improvement(means: Vector, deviations: Vector, best: float) -> Vector:
    """Expected improvement of each configuration over `best`, in log time."""
    z = (best - means) / deviations
    cumulative = 0.5 * np.fromiter(map(math.erfc, -z / math.sqrt(2)), float, len(z))
    density = np.exp(-z * z / 2) / math.sqrt(2 * math.pi)
    found: Vector = (best - means) * cumulative + deviations * density
    return found


class Grid:
    """Design matrix of all allowed configurations: a column of ones, then a 0/1 column per choice except defaults."""

    def __init__(self, space: Space) -> None:
        self._searchable = space.searchable()
        sizes = [len(choices) for choices in self._searchable.values()]
        chosen = np.indices(sizes, dtype=np.int8).reshape(len(sizes), math.prod(sizes))
        self._chosen = chosen[:, ~self._clashing(space, chosen)]
        columns = [here == number for here, size in zip(self._chosen, sizes, strict=True) for number in range(1, size)]
        self.rows: Matrix = np.stack([np.ones(self._chosen.shape[1]), *columns], axis=1).astype(float)

    def row(self, knobs: Configuration) -> Vector:
        """The row of a configuration; choices that are not searched are ignored."""
        items = [knobs.get(knob) == choice for knob, choices in self._searchable.items() for choice in choices[1:]]
        return np.array([1.0, *items])

    def knobs(self, number: int) -> dict[str, Choice]:
        chosen = zip(self._searchable.items(), self._chosen[:, number], strict=True)
        return {knob: choices[index] for (knob, choices), index in chosen if index > 0}

    def _clashing(self, space: Space, chosen: NDArray[np.int8]) -> NDArray[np.bool_]:
        """Mask of excluded configurations, vectorised: five times as fast as the checks of Space.configurations."""
        place = {knob: number for number, knob in enumerate(self._searchable)}

        def is_among(knob: str, wanted: tuple[Choice, ...]) -> NDArray[np.bool_]:
            if knob not in place:
                entry = space.table.get(knob)
                return np.full(chosen.shape[1], entry is not None and entry.default in wanted)
            are_among = np.array([choice in wanted for choice in self._searchable[knob]])
            found: NDArray[np.bool_] = are_among[chosen[place[knob]]]
            return found

        found = np.zeros(chosen.shape[1], dtype=bool)
        for knob in space.table.values():
            for exclusion in knob.excludes:
                found |= is_among(knob.name, exclusion.choices) & is_among(exclusion.other, exclusion.other_choices)
        return found
