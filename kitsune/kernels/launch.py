"""Launch helpers of all kernels: whether Triton can run on a tensor, block and warp counts, the current device."""

import contextlib
import threading
from typing import Final

import torch
import triton

from kitsune.kernels.dtypes import DTYPES

_bound = threading.local()  # `devices`: those whose context is current in a thread

#: The longest row that one program holds in registers; longer rows are processed in blocks.
MOST_IN_A_BLOCK: Final = 65536

#: Read once, as Triton does when a kernel is defined: torch.compile cannot trace the access.
IS_INTERPRETED: Final[bool] = triton.knobs.runtime.interpret


def runs_in_triton(*tensors: torch.Tensor | None) -> bool:
    """Whether kernels can run on all of them: GPU tensors, or any with the interpreter, of dtypes in DTYPES."""
    there = [tensor for tensor in tensors if tensor is not None]
    can_launch = all(tensor.is_cuda for tensor in there) or IS_INTERPRETED
    return can_launch and all(tensor.dtype in DTYPES for tensor in there)


def are_rows(x: torch.Tensor, *weights: torch.Tensor | None) -> bool:
    """Whether a row of `x` fits into a block, and each weight is None or has the shape of a row."""
    columns = x.shape[-1:]
    return columns[0] <= MOST_IN_A_BLOCK and all(one is None or one.shape == columns for one in weights)


def block_of(columns: int) -> int:
    """The smallest power of two from 16 on that holds a row of so many elements."""
    return max(16, triton.next_power_of_2(columns))


def warps_of(block: int) -> int:
    """The number of warps for a block: 8 to 16 elements a thread, between 1 and 16 warps."""
    return min(16, max(1, block // 256))


def on_device_of(tensor: torch.Tensor) -> contextlib.AbstractContextManager[None]:
    """Makes the tensor's device current in the block, since Triton launches on the current device."""
    return torch.cuda.device_of(tensor) if tensor.is_cuda else contextlib.nullcontext()


def bind_context(device: torch.device) -> None:
    """Makes the context of a GPU current in this thread, as its first launch does: descriptors are made before that."""
    bound: set[torch.device] = vars(_bound).setdefault("devices", set())
    if device.type == "cuda" and device not in bound:
        torch.cuda.mem_get_info(device)  # any call of CUDA's runtime that does not depend on a stream
        bound.add(device)


def count(x: torch.Tensor) -> tuple[int, int]:
    """(rows, elements of a row)."""
    columns = x.shape[-1]
    return (x.numel() // columns if columns else 0), columns
