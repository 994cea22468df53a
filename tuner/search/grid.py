"""Grid: all allowed configurations of a search space as arrays, since a search ranks all of them for each proposal."""

import math
from collections.abc import Iterator, Mapping
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kitsune.knobs import Choice

#: Of an exclusion: (knob, its choices, other knob, choices of that one). They must not be chosen together.
Excluded = tuple[str, tuple[Choice, ...], str, tuple[Choice, ...]]


class Grid:
    """The choices of searched knobs, in every combination that no exclusion forbids; the default first.

    `searchable`: knobs with their choices, the default first. `defaults`: of all knobs, for those that are not
    searched.
    """

    def __init__(
        self,
        searchable: tuple[tuple[str, tuple[Choice, ...]], ...],
        defaults: tuple[tuple[str, Choice], ...],
        excluded: tuple[Excluded, ...],
    ) -> None:
        self._searchable = dict(searchable)
        sizes = [len(choices) for _, choices in searchable]
        self._chosen = np.indices(sizes, dtype=np.int8).reshape(len(sizes), math.prod(sizes))
        self._chosen = self._chosen[:, ~self._clashing(dict(defaults), excluded)]

    def __len__(self) -> int:
        return self._chosen.shape[1]

    def __iter__(self) -> Iterator[dict[str, Choice]]:
        """Every configuration, as its choices that differ from the defaults."""
        return (self._knobs(chosen) for chosen in self._chosen.T)

    @cached_property
    def rows(self) -> NDArray[np.floating[Any]]:
        """A row for each configuration: 1, then a 0 or 1 for each choice of each knob except defaults."""
        pairs = zip(self._chosen, self._searchable.values(), strict=True)
        columns = [here == number for here, choices in pairs for number in range(1, len(choices))]
        return np.stack([np.ones(len(self)), *columns], axis=1).astype(float)

    def row(self, knobs: Mapping[str, Choice]) -> NDArray[np.floating[Any]]:
        """The row of a configuration; choices that are not searched are ignored."""
        items = [knobs.get(knob) == choice for knob, choices in self._searchable.items() for choice in choices[1:]]
        return np.array([1.0, *items])

    def knobs(self, number: int) -> dict[str, Choice]:
        return self._knobs(self._chosen[:, number])

    def _knobs(self, chosen: NDArray[np.int8]) -> dict[str, Choice]:
        pairs = zip(self._searchable.items(), chosen.tolist(), strict=True)
        return {knob: choices[index] for (knob, choices), index in pairs if index > 0}

    def _clashing(self, defaults: Mapping[str, Choice], excluded: tuple[Excluded, ...]) -> NDArray[np.bool_]:
        place = {knob: number for number, knob in enumerate(self._searchable)}

        def is_among(knob: str, wanted: tuple[Choice, ...]) -> NDArray[np.bool_]:
            if knob not in place:
                return np.full(len(self), knob in defaults and defaults[knob] in wanted)
            are_among = np.array([choice in wanted for choice in self._searchable[knob]])
            found: NDArray[np.bool_] = are_among[self._chosen[place[knob]]]
            return found

        clashing = np.zeros(len(self), dtype=bool)
        for knob, choices, other, other_choices in excluded:
            clashing |= is_among(knob, choices) & is_among(other, other_choices)
        return clashing
