"""A step in, its Recording out, once its launches, issued again one after the other, are proven to be the same step."""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from kitsune.autograd.backward_thread import on_one_thread
from kitsune.device.backend import first_line
from kitsune.errors import ErraticError
from kitsune.launches.execution.equivalence import Untouched, refuted
from kitsune.launches.execution.issue import in_recorded_order
from kitsune.launches.recording.recorder import Recorded, record


@on_one_thread()
def verified(
    step: Callable[[], Any], device: torch.device, inputs: Sequence[torch.Tensor], rates: Sequence[torch.Tensor]
) -> Recorded:
    """Runs the step once, for real; what proves it leaves no trace. `inputs` and `rates` as for `refuted`."""
    found = record(step, device)
    recording = found.recording
    if recording is None:
        return found
    try:
        with Untouched(recording, (*inputs, *rates)) as untouched:
            problem = refuted(recording, step, in_recorded_order(recording), inputs, rates, untouched)
    except ErraticError as error:
        problem = str(error)
    # The step has run: whatever the proof meets, of the user's code too, must not have it run again.
    except Exception as error:  # noqa: BLE001
        problem = f"{type(error).__name__}: {first_line(error)}"
    return found if problem is None else Recorded(None, f"issued again they are not the step: {problem}", found.result)
