"""Records a training run as a Trace, step by step from a given start.

The trace is kept on the device if it fits: moving the compared gradients of a GPT-2 of 124 M parameters to the host and
back takes 6 s of a trial on an H200.
"""

from collections.abc import Callable
from typing import Any

import torch

from kitsune.device.backend import free_bytes
from kitsune.workload import Workload, device_of
from tuner.building.arms import Rates
from tuner.numerics.trace_errors import LATE_STEPS, ModelState, Trace, TraceStep, TrainingStart
from tuner.workloads.batches import varied

# Factors of the learning rates. They are small: at the full rate a step of Adam moves every weight whose gradient is
# noise by the whole rate, and after one such step the gradients of ResNet-50 in fp32 have a relative error of 1.4
# against float64 (H200).
RATES = (0.01, 0.006, 0.003, 0.008)
PERTURBATION = 2.0**-21  # a few units in the last place of fp32

COPIES = 8  # of all parameters: the start, the gradients of six steps, and the end
SHARE = 0.125  # of the free memory: other children share the device, and steps may need more later
CPU = torch.device("cpu")

BatchAt = Callable[[int], Any]
Step = Callable[[int, Any, Any], torch.Tensor]


def follow(workload: Workload, step: Step, seed: int, batches: BatchAt, candidate: Trace) -> Trace:
    """Trains with the candidate's batches and rates, and records the same steps. Those that it skipped do not count."""
    rates = Rates(workload.optimizer)
    torch.manual_seed(seed)
    trace = Trace(skipped=set(candidate.skipped))
    for index in range(candidate.steps):
        rates.scale(RATES[index % len(RATES)])
        loss = step(index, *batches(index))
        if index in candidate.snapshots:
            trace.snapshots[index] = snapshot(workload, loss)
    trace.steps = candidate.steps
    trace.parameters, trace.buffers = state(workload)
    return trace


def batches_of(batch: Any, seed: int, *, vary: bool) -> BatchAt:
    """The batch of each step: first the example, then variations of it if `vary`."""
    return lambda index: batch if index == 0 or not vary else varied(batch, seed + index)


def place_for(model: torch.nn.Module, device: torch.device, step_bytes: int) -> torch.device:
    """Where to keep a candidate's trace: on the device if enough memory is free besides two of its steps, else the
    host."""
    needed = COPIES * sum(parameter.nbytes for parameter in model.parameters())
    return device if needed <= SHARE * (free_bytes(device) - 2 * step_bytes) else CPU


def start_of(workload: Workload, place: torch.device = CPU) -> TrainingStart:
    parameters, buffers = state(workload, place)
    return TrainingStart(parameters, buffers, [name for name, _ in workload.model.named_parameters()])


def load_state(workload: Workload, start: ModelState) -> None:
    """Sets parameters and buffers: a workload file may draw them with other generators than torch's.

    Copies in place, in the workload's own dtypes: a captured graph reads the tensors that it was captured with.
    """
    with torch.no_grad():
        for parameter, value in zip(workload.model.parameters(), start.parameters, strict=True):
            parameter.copy_(value)
        for buffer, value in zip(workload.model.buffers(), start.buffers, strict=True):
            buffer.copy_(value)


def perturb(workload: Workload, seed: int) -> None:
    """Changes the parameters by a few units in the last place; in half precision some elements, by one unit."""
    device = device_of(workload.model)
    generator = torch.Generator(device).manual_seed(seed)
    with torch.no_grad():
        for parameter in workload.model.parameters():
            if parameter.is_floating_point():
                noise = torch.randn(parameter.shape, generator=generator, device=device)
                scale = max(PERTURBATION, torch.finfo(parameter.dtype).eps / 4)
                parameter.copy_(parameter * (1 + scale * noise))


def remember(trace: Trace, index: int, snapshot: TraceStep) -> None:
    """Keeps the early steps and the last ones."""
    trace.snapshots[index] = snapshot
    trace.steps = index + 1
    old = index - LATE_STEPS
    if old >= 0 and old not in trace.early:
        del trace.snapshots[old]


def snapshot(workload: Workload, loss: torch.Tensor, place: torch.device = CPU) -> TraceStep:
    return TraceStep(float(loss), [_copy(parameter.grad, place) for parameter in workload.model.parameters()])


def state(workload: Workload, place: torch.device | None = CPU) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Copies of parameters and buffers; without a place, on their own device."""
    model = workload.model
    return [_copy(p, place) for p in model.parameters()], [_copy(b, place) for b in model.buffers()]


def model_state(workload: Workload) -> ModelState:
    """A copy on the device of the workload."""
    return ModelState(*state(workload, None))


def _copy(tensor: torch.Tensor | None, place: torch.device | None) -> Any:
    """None stays None."""
    return None if tensor is None else tensor.detach().to(place or tensor.device, copy=True)


def cloned(tensor: torch.Tensor) -> torch.Tensor:
    """A copy on the same device, with the same strides."""
    return tensor.detach().clone()
