"""What each launch of a recording has to do at least, and what the device can do at best."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final

import torch
from torch.utils.flop_counter import flop_registry

from kitsune.launches.execution.graph_benchmark import gpu_ms
from kitsune.launches.execution.launch_costs import START_US, host_us
from kitsune.launches.model.launch_graph import Launch
from kitsune.launches.model.recording import Call, Recording, TensorView, places_of
from kitsune.launches.planning.kernel_classes import Ceilings, Work, class_times
from kitsune.timeline import ClassTime

#: Bytes that are copied, and rows of the square matrices that are multiplied. Beside these the start of a kernel counts
#: for little.
COPIED_BYTES: Final = {"cuda": 2**29, "cpu": 2**26}
ROWS: Final = {"cuda": 8192, "cpu": 512}
RUNS: Final = 5


def class_times_of(recording: Recording, costs_us: Sequence[float]) -> tuple[ClassTime, ...]:
    """The time of each class of launches, against the floor of this device. Measures its `ceilings`.

    Empty if there is no memory for that.
    """
    work = work_of(recording)
    try:
        best = ceilings(recording.device, {each.dtype for each in work if each.flops})
    except torch.OutOfMemoryError:
        return ()
    names = [launch.name for launch in recording.graph.launches]
    return class_times(names, costs_us, work, best, START_US if recording.device.type == "cuda" else 0.0)


def work_of(recording: Recording) -> list[Work]:
    """For each launch: bytes from its first to its last element of each tensor, and the operations of its product.

    Kernels that Inductor makes for products have no known number of operations.
    """
    return [work(launch, call) for launch, call in zip(recording.graph.launches, recording.calls, strict=True)]


def work(launch: Launch, call: Call) -> Work:
    nbytes = sum(span.end - span.begin for span in (*launch.reads, *launch.writes))
    first = next(places_of((call.arguments, call.named)), None)
    return Work(nbytes, flops_of(call), name_of(first.dtype) if first else "")


def flops_of(call: Call) -> int:
    """By torch's own formulas (`torch.utils.flop_counter`); 0 for what is no product."""
    formula = flop_registry.get(getattr(call.function, "overloadpacket", None))
    if formula is None:
        return 0
    results = tuple(map(size_of, call.results))
    try:
        arguments = [size_of(each) for each in call.arguments]
        return int(formula(*arguments, out_val=results[0] if len(results) == 1 else results))
    except (AssertionError, IndexError, TypeError, ValueError):  # a form of the operation that has no formula
        return 0


def size_of(value: Any) -> Any:
    return torch.Size(value.size) if isinstance(value, TensorView) else value


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def ceilings(device: torch.device, dtypes: Iterable[str]) -> Ceilings:
    """Measures a large copy, and a large product for each floating-point dtype. Takes 1 GiB for a moment on a GPU."""
    made = torch.empty(COPIED_BYTES[device.type], dtype=torch.uint8, device=device)
    copied = torch.empty_like(made)
    copy_us = shortest_us(device, lambda: copied.copy_(made))
    found = {name: flops_per_us(device, getattr(torch, name)) for name in dtypes if is_floating(name)}
    return Ceilings(2 * made.numel() / copy_us, found)


def is_floating(name: str) -> bool:
    dtype = getattr(torch, name, None)
    return isinstance(dtype, torch.dtype) and dtype.is_floating_point and dtype.itemsize > 1


def flops_per_us(device: torch.device, dtype: torch.dtype) -> float:
    rows = ROWS[device.type]
    own = torch.Generator(device)  # the step's random numbers stay as they are; products of zeros would be too fast
    one, other = (torch.randn(rows, rows, device=device, generator=own).to(dtype) for _ in range(2))
    return float(2 * rows**3 / shortest_us(device, lambda: one @ other))


def shortest_us(device: torch.device, run: Callable[[], Any]) -> float:
    """The shortest of RUNS times, after a warm-up."""
    run()
    return min(one_us(device, run) for _ in range(RUNS))


def one_us(device: torch.device, run: Callable[[], Any]) -> float:
    return gpu_ms(run) * 1000 if device.type == "cuda" else host_us(run)
