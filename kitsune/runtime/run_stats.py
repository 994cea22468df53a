"""What a plan gained in a run: measured, or the reason why not; and its summary as text."""

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields
from math import nan
from typing import Any

from kitsune.fusion.stats import FusionStats
from kitsune.profiler.streams import StreamProfile
from kitsune.runtime.report import Report


@dataclass(frozen=True, kw_only=True, slots=True)
class Stats:
    """What the plan gained in this run. What was not measured is nan or None, with the reason in `missing`.

    `given_ms` and `planned_ms` are medians of the steps as given and by the plan, `speedup` their ratio. Peaks are
    bytes in tensors, with what graphs keep for themselves; `memory_saved_mb` is in MiB, and negative where the plan
    needs more. Of one step as given and one by the plan: launches are the kernels that torch.profiler saw, and hit
    rates the part, 0 to 1, of the requests for memory that torch's pools served without asking CUDA. `overlap` is the
    part of the busy time of the step by the plan in which two streams or more were busy. `missing`: field -> reason.
    """

    speedup: float = nan
    memory_saved_mb: float = nan
    given_ms: float = nan
    planned_ms: float = nan
    given_steps: int = 0
    planned_steps: int = 0
    given_peak_bytes: float = nan
    planned_peak_bytes: float = nan
    given_launches: int | None = None
    planned_launches: int | None = None
    given_hit_rate: float | None = None
    planned_hit_rate: float | None = None
    overlap: float | None = None
    missing: Mapping[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        given, planned = words(self.given_launches, ""), words(self.planned_launches, "")
        lines = [
            f"step as given  {words(self.given_ms, ' ms')} (median of {self.given_steps})",
            f"step by plan   {words(self.planned_ms, ' ms')} (median of {self.planned_steps})",
            f"speedup        {words(self.speedup, ' x')}",
            f"memory saved   {words(self.memory_saved_mb, ' MiB')}",
            f"launches       {given} as given, {planned} by plan",
            f"pool hit rate  {share(self.given_hit_rate)} as given, {share(self.planned_hit_rate)} by plan",
            f"overlap        {share(self.overlap)}",
        ]
        unknown: dict[str, list[str]] = {}
        for name, reason in self.missing.items():
            unknown.setdefault(reason, []).append(name)
        return "\n".join([*lines, *(f"not measured: {', '.join(names)}: {why}" for why, names in unknown.items())])


def is_missing(value: float | None) -> bool:
    return value is None or value != value


def unmeasured(reason: str) -> Stats:
    """Stats of a run on which nothing was measured."""
    return Stats(missing={one.name: reason for one in fields(Stats) if is_missing(one.default)})  # type: ignore[arg-type]


def words(value: float | None, unit: str) -> str:
    return "-" if value is None or is_missing(value) else f"{value:.4g}{unit}"


def share(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"


def as_json(stats: Stats) -> dict[str, Any]:
    """For a file: null for what was not measured."""
    return {name: None if value != value else value for name, value in asdict(stats).items()}


def summary_of(report: Report, stats: Stats, streams: StreamProfile | None) -> str:
    """What was applied and declined, what it came to, how busy each stream was, and what was fused."""
    parts = [str(report), str(stats)]
    if streams is not None:
        parts.append(f"the step by plan, stream by stream\n{streams}")
    if report.fusion is not None:
        parts.append("\n".join(["fusion", *fused_words(report.fusion)]))
    return "\n\n".join(parts)


def fused_words(fusion: FusionStats) -> Iterator[str]:
    yield str(fusion)
    for kept in fusion.kept:
        gain = ""
        if kept.benefit is not None:
            times = f"{kept.benefit.original_ms:.3f} ms became {kept.benefit.fused_ms:.3f}"
            gain = f", {kept.benefit.ratio:.2f} times as fast: {times}"
        yield f"{kept.pattern}: {kept.operations} operations{gain}"
    for refused in fusion.refused:
        yield f"{refused.pattern} stays: {refused.reason}"
    yield from fusion.notes
