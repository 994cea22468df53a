"""The functions of a device that the runtime uses, implemented for CUDA and the CPU."""

import contextlib
import functools
import os
import platform
import sys
import warnings
from collections.abc import Iterator
from types import FrameType
from typing import Any

import torch

import kitsune
from kitsune import __version__
from kitsune.base.optional_imports import installed_version
from kitsune.errors import CaptureError, UnfitError
from kitsune.plan import Environment

#: Source file and line of a host synchronisation.
Sync = tuple[str, int]
#: Folders and files whose stack frames are not user code.
NOT_THE_USERS = tuple(
    os.path.dirname(file) + os.sep
    for file in (kitsune.__file__, torch.__file__, warnings.__file__, contextlib.__file__)
)
TUNER = os.path.join(os.path.dirname(os.path.dirname(kitsune.__file__)), "tuner") + os.sep


def pick_device(name: torch.device | str | None = None) -> torch.device:
    """The named device; by default the current GPU, else the CPU. Raises UnfitError when it does not exist."""
    if name is None:
        if not torch.cuda.is_available():
            return torch.device("cpu")
        return torch.device("cuda", torch.cuda.current_device())
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise UnfitError(f"'{name}' is not a device; use cpu, cuda or cuda:N") from error
    if device.type == "cpu":
        return torch.device("cpu")
    if device.type != "cuda":
        raise UnfitError(f"'{name}' is not supported; use cpu, cuda or cuda:N")
    if not torch.cuda.is_available():
        raise UnfitError(f"'{name}' was asked for, but torch sees no GPU here; use cpu, or check the driver")
    index = torch.cuda.current_device() if device.index is None else device.index
    if index >= torch.cuda.device_count():
        raise UnfitError(f"'{name}' was asked for, but there are only {torch.cuda.device_count()} GPUs")
    return torch.device("cuda", index)


def make_current(device: torch.device) -> None:
    """Makes a GPU the current device, which kernels and events use by default. Does nothing for a CPU."""
    if device.type == "cuda":
        torch.accelerator.set_device_index(device.index)


def environment(device: torch.device) -> Environment:
    common = {"torch": torch.__version__, "python": platform.python_version(), "kitsune": __version__}
    if device.type != "cuda":
        return Environment(device="cpu", gpu=_cpu_name(), memory_bytes=_host_memory_bytes(), **common)
    properties = torch.cuda.get_device_properties(device)
    return Environment(
        device="cuda",
        gpu=properties.name,
        compute_capability=f"{properties.major}.{properties.minor}",
        memory_bytes=properties.total_memory,
        driver=_driver(),
        cuda=torch.version.cuda or "",
        triton=installed_version("triton"),
        **common,
    )


def _driver() -> str:
    with contextlib.suppress(OSError), open("/proc/driver/nvidia/version", encoding="utf-8") as file:
        words = file.readline().split()
        return next((word for word in words if word[0].isdigit() and "." in word), "")
    return ""


def _cpu_name() -> str:
    with contextlib.suppress(OSError), open("/proc/cpuinfo", encoding="utf-8") as file:
        for line in file:
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _host_memory_bytes() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def gpu_uuid(device: torch.device) -> str:
    """The UUID of a GPU, as NVML writes it."""
    return f"GPU-{torch.cuda.get_device_properties(device).uuid}"


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def allocated_bytes(device: torch.device) -> int:
    """Bytes allocated by tensors now; 0 on a CPU, where torch does not count them."""
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else 0


def free_bytes(device: torch.device) -> int:
    """Bytes of the GPU that are free, plus those that torch has reserved and no tensor uses; 0 on a CPU."""
    if device.type != "cuda":
        return 0
    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return torch.cuda.mem_get_info(device)[0] + unused


def peak_bytes(device: torch.device) -> int:
    """The most bytes allocated by tensors since `reset_peak`; 0 on a CPU."""
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0


def reset_peak(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.init()  # without it the next call fails with "Invalid device argument"
        torch.cuda.reset_peak_memory_stats(device)


def graph_pool_bytes(device: torch.device) -> int:
    """Bytes in pools of CUDA graphs that no live tensor uses: graphs write to them in a replay, no peak counts them."""
    if device.type != "cuda":
        return 0
    of_graphs = (each for each in torch.cuda.memory_snapshot() if tuple(each["segment_pool_id"]) != (0, 0))
    return sum(each["total_size"] - each["allocated_size"] for each in of_graphs if each["device"] == device.index)


def release_cached(device: torch.device) -> None:
    """Returns unused memory to the GPU: cached blocks, pools of deleted graphs, and cuBLAS workspaces."""
    if device.type == "cuda":
        torch._C._cuda_clearCublasWorkspaces()
        torch.cuda.empty_cache()


@contextlib.contextmanager
def allocations(device: torch.device) -> Iterator[set[int]]:
    """Yields a set that at the end of the block holds the addresses of everything allocated on the GPU in it.

    Allocations of all threads count; they are read from the history of torch's allocator. A memory pool around the
    block would show them too, but torch treats it like a capture and reuses blocks shared by two streams too early
    (pytorch#175015; on an H200 it corrupted the heap). The set stays empty on a CPU, and when the user records that
    history already.
    """
    found: set[int] = set()
    if device.type != "cuda" or torch._C._cuda_isHistoryEnabled():
        yield found
        return
    without_frames = {"context": None, "stacks": "python"}
    torch.cuda.memory._record_memory_history("all", **without_frames)
    try:
        yield found
    finally:
        history = torch.cuda.memory._snapshot()["device_traces"][device.index or 0]
        torch.cuda.memory._record_memory_history(None, **without_frames)
        found |= {event["addr"] for event in history if event["action"] == "alloc"}


def rng_state(device: torch.device) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The states of the default generators of the host and of the GPU; None for the latter on a CPU."""
    gpu = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
    return torch.get_rng_state(), gpu


def set_rng_state(device: torch.device, state: tuple[torch.Tensor, torch.Tensor | None]) -> None:
    host, gpu = state
    torch.set_rng_state(host)
    if gpu is not None:
        torch.cuda.set_rng_state(gpu, device)


def default_generator(device: torch.device) -> torch.Generator:
    """The default random number generator of a device."""
    if device.type != "cuda":
        return torch.default_generator
    return torch.cuda.default_generators[torch.cuda.current_device() if device.index is None else device.index]


@functools.cache
def capture_stream(index: int) -> torch.cuda.Stream:
    """The stream of a GPU on which everything is warmed up and captured.

    There is one, since cuBLAS keeps a workspace for each thread and stream it has seen: 32 MiB on an H200, two a step.
    """
    return torch.cuda.Stream(index)


@functools.cache
def lane_stream(index: int, lane: int, priority: int, multiprocessors: int) -> torch.cuda.Stream:
    """A stream for scheduled launches. Cached for all captures, since a block of a memory pool belongs to its stream.

    With `multiprocessors` above 0 it is limited to so many and has no priority: torch supports none in green contexts.
    Raises CaptureError when the GPU cannot be partitioned.
    """
    if multiprocessors:
        try:
            return green_context(index, lane, multiprocessors).Stream()
        except RuntimeError as error:
            raise CaptureError(f"the GPU cannot be partitioned: {first_line(error)}") from error
    return torch.cuda.Stream(index, priority)


@functools.cache
def green_context(index: int, lane: int, multiprocessors: int) -> Any:  # noqa: ARG001 - lane is part of the key
    """A green context. Cached for the life of the process, since its stream does not keep it alive."""
    return torch.cuda.GreenContext.create(num_sms=multiprocessors, device_id=index)


@functools.cache
def few_multiprocessors(device: torch.device) -> int:
    """Three eighths of the GPU's multiprocessors, in Hopper's groups of 8: 48 of 132 on an H200. 0 where it cannot be
    partitioned: a CPU, a torch without streams of green contexts, an old driver, or a GPU partitioned already."""
    if device.type != "cuda" or not hasattr(getattr(torch.cuda, "GreenContext", None), "Stream"):
        return 0
    few: int = torch.cuda.get_device_properties(device).multi_processor_count * 3 // 8 // 8 * 8
    try:
        return few if few and green_context(device.index or 0, 0, few) else 0
    except RuntimeError:
        return 0


@contextlib.contextmanager
def side_stream(device: torch.device) -> Iterator[None]:
    """Runs the block on the capture stream, ordered after earlier and before later work of the current stream.

    Work to be captured must have run outside the default stream once, so that libraries and autograd bind their
    workspaces to a stream that can be captured.
    """
    if device.type != "cuda":
        yield
        return
    stream = capture_stream(device.index or 0)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        yield
    torch.cuda.current_stream(device).wait_stream(stream)


@contextlib.contextmanager
def watch_syncs(device: torch.device, found: list[Sync]) -> Iterator[None]:
    """Appends the source line of every host synchronisation in the block that torch detects."""
    if device.type != "cuda":
        yield
        return
    before = torch.cuda.get_sync_debug_mode()
    others: list[tuple[Any, ...]] = []

    def show(message: Any, category: Any, filename: str, lineno: int, *_: Any, **__: Any) -> None:
        if "synchronizing CUDA operation" in str(message):
            found.append(user_line() or (filename, lineno))
        elif "Synchronization debug mode" not in str(message):
            others.append((message, category, filename, lineno))

    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = show
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode(before)
    for warning in others:
        warnings.warn_explicit(*warning)


def user_line() -> Sync | None:
    """The innermost stack frame of user code: not of torch, Kitsune or Python. None when the tuner is found first."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_filename
        if name.startswith(TUNER):
            return None
        if not name.startswith((*NOT_THE_USERS, "<")):
            return name, frame.f_lineno
        frame = frame.f_back
    return None


def first_line(error: BaseException) -> str:
    """The first line of an error's message, at most 500 characters. A line that ends in ":" includes the next."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    announces = lines[0].endswith(":") and len(lines) > 1
    return (f"{lines[0]} {lines[1].strip()}" if announces else lines[0])[:500]
