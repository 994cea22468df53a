"""The peak memory of a step on a CPU, where torch keeps no count: by the events of its profiler."""

from collections.abc import Callable, Iterable
from itertools import accumulate
from typing import Any

import torch
from torch.utils import _pytree as pytree

from kitsune.workload import Workload


def peak_of_step(step: Callable[[], object], workload: Workload) -> int:
    """Bytes at the peak of one call of `step`: what the workload holds before it, and the most that is added to that.

    Only tensors count, in the allocator's sizes.
    """
    before_bytes = held_bytes(workload)
    host = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=host, profile_memory=True, acc_events=True) as profile:  # 2.11 warns without
        step()
    recorded: Any = profile.profiler
    events = [event for event in recorded.kineto_results.events() if event.name() == "[memory]"]
    changes = [event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())]
    return before_bytes + max(accumulate(changes), default=0)


def held_bytes(workload: Workload) -> int:
    """Bytes of the memory of its weights, gradients, buffers, optimizer states and batch, each once."""
    modules = [each for each in (workload.model, workload.loss_fn) if isinstance(each, torch.nn.Module)]
    parameters = [parameter for module in modules for parameter in module.parameters()]
    buffers = [buffer for module in modules for buffer in module.buffers()]
    gradients = [parameter.grad for parameter in parameters]
    states = pytree.tree_leaves(list(workload.optimizer.state.values()))
    batch = pytree.tree_leaves(workload.batch)
    return bytes_of_tensors([*parameters, *buffers, *gradients, *states, *batch])


def bytes_of_tensors(values: Iterable[object]) -> int:
    storages = [value.untyped_storage() for value in values if isinstance(value, torch.Tensor)]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())
