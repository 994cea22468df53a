"""LongProof: what the winner's gate compared, how far each thing was off, and how far it might have been."""

from typing import Annotated, Final

from pydantic import Field

from kitsune.base.base_record import Record

#: An error that has no size to be relative to.
LARGEST_ERROR: Final = 1e9


class Margin(Record):
    """An error beside what is allowed of it, both relative to the size of what was compared."""

    what: str = Field(max_length=200)
    where: str = Field(default="", max_length=1000)
    error: float = Field(ge=0)
    allowed: float = Field(ge=0)

    @property
    def is_kept(self) -> bool:
        return self.error <= self.allowed

    @property
    def used(self) -> float:
        """What part of the allowed was needed; more than 1 is wrong."""
        if self.error == 0:
            return 0.0
        return self.error / self.allowed if self.allowed > 0 else LARGEST_ERROR

    def __str__(self) -> str:
        return f"{self.what} {self.where}".strip() + f": off by {self.error:.2e}, {self.allowed:.2e} is allowed"


class LongProof(Record):
    """What the winner's gate found: of each thing that it compared the error that came nearest to its limit.

    `steps` settled steps at the given learning rates, `restarts` of a reference from the candidate's own state among
    them, `updates` recomputed in float64, and with random numbers in the step `directions` along which it was derived.
    """

    steps: int = Field(ge=0)
    restarts: int = Field(ge=0)
    updates: int = Field(ge=0)
    directions: int = Field(ge=0)
    margins: tuple[Margin, ...] = Field(max_length=100)
    notes: tuple[Annotated[str, Field(max_length=2000)], ...] = Field(default=(), max_length=100)

    @property
    def nearest(self) -> Margin | None:
        """The error that came nearest to its limit."""
        return max(self.margins, key=lambda margin: margin.used, default=None)
