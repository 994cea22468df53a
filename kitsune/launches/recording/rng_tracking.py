"""Draws: tracks the states of random number generators, to find launches that draw and steps that set a state."""

from collections.abc import Iterable
from typing import Final

import torch

from kitsune.device.backend import default_generator
from kitsune.errors import CaptureError
from kitsune.launches.recording.storages import at_line

STATE_WAS_SET: Final = (
    "the step sets a random number generator, as a checkpoint of layers with dropout does, "
    "or another thread draws from it"
)


States = dict[torch.Generator, torch.Tensor]


class Draws:
    """The generator states after the last draw: of the default generator, and of the user's own that were seen.

    A step must not set a state in between: a graph continues from the last draw instead.
    """

    def __init__(self, device: torch.device) -> None:
        generator = default_generator(device)
        self._left: States = {generator: generator.get_state()}

    def check(self, own: Iterable[torch.Generator] = ()) -> None:
        """Call it before every draw, and at the end. Raises CaptureError when a state was set since the last draw.

        `own`: generators of the user's that are about to be drawn from.
        """
        for generator in own:
            self._left.setdefault(generator, generator.get_state())
        if self._differ(self._now()):
            raise CaptureError(f"{STATE_WAS_SET}{at_line()}")

    def have_moved(self) -> bool:
        """Call it after an operation that may draw. Returns whether it did."""
        now = self._now()
        moved = self._differ(now)
        self._left = now
        return moved

    def _now(self) -> States:
        return {generator: generator.get_state() for generator in self._left}

    def _differ(self, now: States) -> bool:
        return any(not torch.equal(state, self._left[generator]) for generator, state in now.items())
