"""LongProof: the errors that the long numerics check of a winning plan found, each with its tolerance."""

from typing import Annotated, Final

from pydantic import Field

from kitsune.base.base_record import Record

#: Stands for an error relative to a tolerance of 0.
LARGEST_ERROR: Final = 1e9


class Margin(Record):
    """An error and its tolerance, both relative to the norm of what was compared."""

    what: str = Field(max_length=200)
    where: str = Field(default="", max_length=1000)
    error: float = Field(ge=0)
    allowed: float = Field(ge=0)

    @property
    def is_kept(self) -> bool:
        return self.error <= self.allowed

    @property
    def used(self) -> float:
        """The error as a fraction of its tolerance; more than 1 means that the check failed."""
        if self.error == 0:
            return 0.0
        return self.error / self.allowed if self.allowed > 0 else LARGEST_ERROR

    def __str__(self) -> str:
        return f"{self.what} {self.where}".strip() + f": off by {self.error:.2e}, {self.allowed:.2e} is allowed"


class LongProof(Record):
    """What the long numerics check found. `margins`: for each compared quantity the error closest to its tolerance.

    `steps`: steps after warm-up, at the given learning rates. `restarts`: how often the reference was restarted from
    the candidate's own state. `updates`: optimizer updates recomputed in float64. `directions`: directional derivatives
    compared, where the step draws random numbers.
    """

    steps: int = Field(ge=0)
    restarts: int = Field(ge=0)
    updates: int = Field(ge=0)
    directions: int = Field(ge=0)
    margins: tuple[Margin, ...] = Field(max_length=100)
    notes: tuple[Annotated[str, Field(max_length=2000)], ...] = Field(default=(), max_length=100)

    @property
    def nearest(self) -> Margin | None:
        """The margin closest to its tolerance."""
        return max(self.margins, key=lambda margin: margin.used, default=None)
