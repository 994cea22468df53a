"""A step in, its Recording out, once its launches, issued again one after the other, are proven to be the same step."""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from kitsune.engine.issue import HostLane, issue
from kitsune.engine.memory import plan_memory
from kitsune.engine.proof import refuted
from kitsune.engine.record import Recorded, record
from kitsune.engine.schedule import in_order


def verified(
    step: Callable[[], Any], device: torch.device, inputs: Sequence[torch.Tensor], rates: Sequence[torch.Tensor]
) -> Recorded:
    """Runs the step once, for real; what proves it leaves no trace. `inputs` and `rates` as for `refuted`."""
    found = record(step, device)
    recording = found.recording
    if recording is None:
        return found
    schedule = in_order(recording.graph, [0.0] * len(recording.calls))
    memory = plan_memory(recording.graph, schedule)
    problem = refuted(recording, step, lambda: issue(recording, schedule, memory, HostLane()), inputs, rates)
    return found if problem is None else Recorded(None, f"issued again they are not the step: {problem}", found.result)
