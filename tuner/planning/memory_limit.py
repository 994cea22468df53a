"""What the memory limit of a run changes in its search."""

import re
from collections.abc import Mapping

from tuner.measuring.protocol import Inspection
from tuner.records import Run
from tuner.search.fitting import MemoryLimit
from tuner.search.space import Space


def space_of(run: Run, inapplicable: Mapping[str, str] | None = None) -> Space:
    """The space of a run, with what saves memory if it has a limit. `inapplicable`: as inspected; default as stored."""
    reasons = run.inapplicable if inapplicable is None else inapplicable
    return Space.of(reasons, is_limited=run.memory_limit_bytes is not None)


def limited(run: Run, inspection: Inspection) -> Run:
    """The run with the memory of the device as its limit, if the step as given needs more and there is no other one."""
    if not inspection.checkpointed or run.memory_limit_bytes is not None:
        return run
    return run.evolve(memory_limit_bytes=inspection.environment.memory_bytes)


def limit_of(run: Run, inspection: Inspection) -> MemoryLimit | None:
    """None if the run has no limit."""
    if run.memory_limit_bytes is None:
        return None
    return MemoryLimit(run.memory_limit_bytes, is_random=inspection.random, rows=rows_of(inspection.batch))


def rows_of(batch: str) -> int | None:
    """The first dimension of the first tensor of a batch, from its shapes ("8x512"); None if there is none."""
    found = re.match(r"\d+", batch)
    return int(found[0]) if found else None
