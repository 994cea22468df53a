"""Records a step and proves that its launches, issued in the recorded order, do what the step does."""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from kitsune.autograd.backward_thread import on_one_thread
from kitsune.device.backend import first_line
from kitsune.errors import ErraticError
from kitsune.launches.execution.equivalence import EquivalenceCheck
from kitsune.launches.execution.issue import in_recorded_order
from kitsune.launches.recording.recorder import Recorded, record


@on_one_thread()
def verified(
    step: Callable[[], Any], device: torch.device, inputs: Sequence[torch.Tensor], rates: Sequence[torch.Tensor]
) -> Recorded:
    """Runs the step once, for real; the effects of the proof are undone.

    `inputs` and `rates` are as for `EquivalenceCheck`. If recording or proof fail, the result has the reason in place
    of a recording.
    """
    found = record(step, device)
    recording = found.recording
    if recording is None:
        return found
    try:
        with EquivalenceCheck(recording, step, inputs, rates) as check:
            problem = check.mismatch(in_recorded_order(recording))
    except ErraticError as error:
        problem = str(error)
    # The step has run and must not run again, so any error, also one of the user's code, only ends the proof.
    except Exception as error:  # noqa: BLE001
        problem = f"{type(error).__name__}: {first_line(error)}"
    return (
        found if problem is None else Recorded(None, f"issued again they differ from the step: {problem}", found.result)
    )
