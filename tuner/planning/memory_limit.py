"""What the memory limit of a run changes in its search."""

from collections.abc import Mapping

from tuner.records import Run
from tuner.search.fitting import MemoryLimit
from tuner.search.space import Space


def space_of(run: Run, inapplicable: Mapping[str, str] | None = None) -> Space:
    """The space of a run, with what saves memory if it has a limit. `inapplicable`: as inspected; default as stored."""
    reasons = run.inapplicable if inapplicable is None else inapplicable
    return Space.of(reasons, is_limited=run.memory_limit_bytes is not None)


def limit_of(run: Run, *, is_random: bool) -> MemoryLimit | None:
    """None if the run has no limit. `is_random`: whether the step draws random numbers."""
    return None if run.memory_limit_bytes is None else MemoryLimit(run.memory_limit_bytes, is_random=is_random)
