"""What was applied of a plan, what was declined and why, and the schedule of its launches."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from kitsune.errors import UnplannedError
from kitsune.knobs import Choice
from kitsune.timeline import ClassTime, Timeline


class Picture(Protocol):
    """The launches of a step as they were planned: `kitsune.launches.plans.Planned`, which loads torch."""

    def timeline(self, told: str = "", at_most: int | None = None) -> Timeline: ...

    def class_times(self) -> tuple[ClassTime, ...]: ...

    def save_trace(self, path: str | Path) -> None: ...

    def save_svg(self, path: str | Path) -> None: ...


@dataclass(slots=True)
class Report:
    """What was applied of a plan, as it is when it is asked for.

    `applied`: knob -> choice; `declined`: knob -> reason; `notes`: other facts, as text.

    `peak_bytes` is the peak of device memory in tensors while the step was captured, 0 when it was not. `picture` has
    the launches as planned and `planned` summarises them; of several batch shapes, those of the last. Where nothing is
    planned they are None and "". `fusion` is a `kitsune.fusion.FusionStats`: what was fused
    so far, and what was not and why; None without the knob. `scaler` is a `kitsune.amp.ScalerStatistics`: how often the
    gradients were scaled and how many of these steps were skipped; None where Kitsune scales no loss.
    """

    applied: dict[str, Choice] = field(default_factory=dict)
    declined: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    peak_bytes: int = 0
    picture: Picture | None = None
    planned: str = ""
    fusion: Any = None  # its package needs Triton
    scaler: Any = None  # its module needs torch

    def note(self, text: str) -> None:
        if text not in self.notes:
            self.notes.append(text)

    def timeline(self, at_most: int | None = None) -> Timeline | None:
        """The planned launches as data, of more than `at_most` those that take longest; None where none was planned."""
        return None if self.picture is None else self.picture.timeline(self.planned, at_most)

    def trace(self, path: str | Path) -> None:
        """Writes the planned launches, stream by stream, as JSON that https://ui.perfetto.dev opens.

        The times in it are predicted. Raises UnplannedError where nothing was planned.
        """
        self._drawn().save_trace(path)

    def svg(self, path: str | Path) -> None:
        """Writes the same as a picture for a browser. Raises UnplannedError where nothing was planned."""
        self._drawn().save_svg(path)

    def _drawn(self) -> Picture:
        if self.picture is None:
            raise UnplannedError(f"there is no plan of launches to draw: {self._why_unplanned()}")
        return self.picture

    def _why_unplanned(self) -> str:
        if "streams" in self.declined:
            asked = (knob for knob in ("streams", "capture") if knob in self.declined)
            return "; ".join(f"{knob} was declined, as {self.declined[knob]}" for knob in asked)
        if "streams" not in self.applied:
            return "no launches are planned for several streams, or no step has run; streams=4 in a plan asks for them"
        return "no step is captured now; run steps until one is, and ask before close()"

    def _fused(self) -> str:
        return "" if self.fusion is None else f"fusion {self.fusion}"

    def _scaled(self) -> str:
        if self.scaler is None:
            return ""
        return f"loss scaling: {self.scaler.skipped} of {self.scaler.steps} steps skipped, scale {self.scaler.scale:g}"

    def __str__(self) -> str:
        lines = [f"applied   {knob} = {choice}" for knob, choice in self.applied.items()]
        lines += [f"declined  {knob}: {reason}" for knob, reason in self.declined.items()]
        lines += [
            f"note      {note}" for note in [*self.notes, *filter(None, [self.planned, self._fused(), self._scaled()])]
        ]
        return "\n".join(lines) or "plain: the step runs as given"
