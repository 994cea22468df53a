"""MemoryPool: sizes go in, uninitialised tensors come out of blocks that are used again and again.

A block goes back when the last tensor on it is gone. Each tensor gets a storage of its own, made from memory that
belongs to somebody else (the buffer protocol on a CPU, the CUDA array interface on a GPU): torch drops its reference to
the owner when the last tensor, view or saved activation on that storage goes, in whichever thread that is.
"""

import ctypes
import threading
import weakref
from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from operator import index
from typing import Any, SupportsIndex

import torch

from kitsune.device.backend import pick_device
from kitsune.errors import SettingsError
from kitsune.launches.planning.memory_plan import BLOCK_BYTES
from kitsune.memory.geometry import bytes_of, tensor_on
from kitsune.memory.order import Marks, Order, order_of, refuse_capture


@dataclass(frozen=True, slots=True)
class PoolStats:
    """What a pool did so far.

    `allocations`: tensors handed out; `hits`: those that took a block which was there already.
    `used_bytes`: blocks that tensors lie on now; `peak_bytes`: the most that ever were. `reserved_bytes`: all blocks,
    those that wait to be used again counted in. Blocks are counted whole, not only what was asked for.
    """

    allocations: int
    hits: int
    used_bytes: int
    peak_bytes: int
    reserved_bytes: int

    @property
    def hit_rate(self) -> float | None:
        """Which part of the allocations, 0 to 1, were hits; None before the first."""
        return self.hits / self.allocations if self.allocations else None


@dataclass(eq=False, slots=True)
class Block:
    """Memory of the pool. `marks`: what must have ended before another stream may write to it."""

    base: torch.Tensor
    marks: Marks = ()

    @property
    def nbytes(self) -> int:
        return self.base.numel()


@dataclass(eq=False, slots=True)
class Lease:
    """A block in the hands of one storage, which `key` names. `is_over`: it was given back while the storage lives."""

    block: Block
    stream: Any
    key: int = 0
    is_over: bool = False


@dataclass(eq=False)
class DeviceBytes:
    """Bytes of a GPU, as the CUDA array interface (version 3) names them."""

    address: int
    nbytes: int

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {"shape": (self.nbytes,), "typestr": "|u1", "data": (self.address, False), "strides": None, "version": 3}


# What came back: the lease, and what its streams had still to do; None where a capture makes that unknowable.
Released = deque[tuple[Lease, Marks | None]]


class MemoryPool:
    """Memory of one device in blocks of powers of two, 512 bytes at least. For any number of threads.

    `pool_size`: bytes, or a string as '512MB' or '2GB': the most that all blocks together take. Blocks are made when
    they are needed. `device`: None takes the current GPU, or the CPU where there is none.

    On a GPU a block is given again to the stream that had it at once, and to another stream after that stream was made
    to wait for the end of what the streams had to do at the release: the stream that asked for it, and the current one
    of the thread that let go of it. Work on yet other streams must be waited for before the tensor goes, since
    `Tensor.record_stream` does not know memory of a pool.

    Raises SettingsError for a size that makes no sense, UnfitError when the device is not there.
    """

    def __init__(self, pool_size: int | str, device: torch.device | str | None = None) -> None:
        self.pool_size = bytes_of("pool_size", pool_size)
        self.device = pick_device(device)
        self._order = order_of(self.device)
        self._lock = threading.Lock()
        self._free: defaultdict[int, list[Block]] = defaultdict(list)  # bytes -> blocks, the longest free first
        self._leases: dict[int, Lease] = {}
        # The garbage collector may let go of tensors while this very thread holds the lock: that only appends here.
        self._released: Released = deque()
        self._allocations = self._hits = 0
        self._used_bytes = self._peak_bytes = self._reserved_bytes = 0

    def allocate(self, size: int | Sequence[int], dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """An uninitialised, contiguous tensor of this shape (an int stands for one dimension) on the pool's device.

        Its memory goes back to the pool with the last reference to it and to every view of it, or with `free`.

        Raises SettingsError for a size or dtype that makes no sense, and where the pool cannot hold it beside what is
        in use; CaptureError during the capture of a CUDA graph.
        """
        shape, nbytes = checked(size, dtype)
        why = "the graph would write to memory that the pool has given to somebody else since"
        refuse_capture(self._order, "a pool was asked for memory", why)
        stream = self._order.current()
        with self._lock:
            self._collect()
            block = self._take(size_class(nbytes), stream)
            self._order.wait(stream, block.marks)
            self._order.hold(block.base, stream)
            return self._lend(Lease(block, stream), nbytes, shape, dtype)

    def free(self, tensor: torch.Tensor) -> None:
        """Gives the memory of a tensor, or of a view of one, back now. None of them may be used afterwards.

        Raises SettingsError when it was given back already, or is not of this pool.
        """
        if not isinstance(tensor, torch.Tensor):
            raise SettingsError(f"free() takes a tensor of the pool, not {type(tensor).__name__}")
        with self._lock:
            self._collect()
            lease = self._leases.get(tensor.untyped_storage()._cdata)
            if lease is None:
                raise SettingsError(
                    "this tensor is not of this pool; free() takes what allocate() of the same pool gave"
                )
            if lease.is_over:
                raise SettingsError("this tensor was given back to the pool already; call free() once")
            lease.is_over = True
            self._put_back(lease.block, marks_of(lease, self._order))

    def trim(self) -> None:
        """Gives all blocks that no tensor lies on back to torch."""
        with self._lock:
            self._collect()
            self._drop_free(self._reserved_bytes)

    @property
    def stats(self) -> PoolStats:
        """Allocations so far, how many of them were served from the pool, and bytes in use, at most and held."""
        with self._lock:
            self._collect()
            return PoolStats(self._allocations, self._hits, self._used_bytes, self._peak_bytes, self._reserved_bytes)

    def _collect(self) -> None:
        """Takes in what came back since the last call."""
        while self._released:
            lease, marks = self._released.popleft()
            if self._leases.get(lease.key) is lease:  # its storage is gone, and its name may be another's by now
                del self._leases[lease.key]
            if not lease.is_over:
                self._put_back(lease.block, marks)

    def _put_back(self, block: Block, marks: Marks | None) -> None:
        self._used_bytes -= block.nbytes
        if marks is None:
            self._reserved_bytes -= block.nbytes
        else:
            block.marks = marks
            self._free[block.nbytes].append(block)

    def _take(self, nbytes: int, stream: Any) -> Block:
        """A free block of this size, if there is one whose streams this one need not wait for, or a new one."""
        if free := self._free[nbytes]:
            own = (place for place, block in enumerate(free) if all(mark.stream == stream for mark in block.marks))
            self._hits += 1
            return free.pop(next(own, 0))
        self._make_room(nbytes)
        try:
            base = torch.empty(nbytes, dtype=torch.uint8, device=self.device)
        except torch.OutOfMemoryError:
            self._drop_free(self._reserved_bytes)
            base = torch.empty(nbytes, dtype=torch.uint8, device=self.device)
        self._reserved_bytes += nbytes
        return Block(base)

    def _make_room(self, nbytes: int) -> None:
        """Free blocks of other sizes give way to a new one."""
        if self._used_bytes + nbytes > self.pool_size:
            raise SettingsError(
                f"a block of {nbytes:,} bytes does not fit into the pool: {self._used_bytes:,} of its pool_size of "
                f"{self.pool_size:,} bytes are in use; let go of tensors, or make the pool larger"
            )
        self._drop_free(self._reserved_bytes + nbytes - self.pool_size)

    def _drop_free(self, wanted_bytes: int) -> None:
        """Gives free blocks back to torch, the largest first, until so many bytes are gone or no block is free."""
        for nbytes in sorted(self._free, reverse=True):
            while wanted_bytes > 0 and self._free[nbytes]:
                self._free[nbytes].pop(0)
                self._reserved_bytes -= nbytes
                wanted_bytes -= nbytes

    def _lend(self, lease: Lease, nbytes: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        storage = lent_storage(lease, nbytes, self._order, self._released)
        lease.key = storage._cdata
        self._leases[lease.key] = lease
        self._allocations += 1
        self._used_bytes += lease.block.nbytes
        self._peak_bytes = max(self._peak_bytes, self._used_bytes)
        stride = torch.empty(shape, dtype=dtype, device="meta").stride()
        return tensor_on(storage, 0, dtype, shape, stride)


def checked(size: int | Sequence[int], dtype: torch.dtype) -> tuple[tuple[int, ...], int]:
    """The shape, and how many bytes it has. Raises SettingsError."""
    try:
        shape = tuple(map(index, [size] if isinstance(size, SupportsIndex) else size))
    except TypeError as error:
        raise SettingsError(f"size is {size!r}; use a number of elements or a shape") from error
    if min(shape, default=0) < 0:
        raise SettingsError(f"size is {size!r}; it must not be negative")
    if not isinstance(dtype, torch.dtype):
        raise SettingsError(f"dtype is {dtype!r}; use a torch.dtype")
    return shape, prod(shape) * dtype.itemsize


def size_class(nbytes: int) -> int:
    """The least power of two that is not less, from 512 on."""
    return max(BLOCK_BYTES, 1 << max(nbytes - 1, 0).bit_length())


def lent_storage(lease: Lease, nbytes: int, order: Order, released: Released) -> torch.UntypedStorage:
    """A storage on the bytes of the block that owns nothing; when it dies, the lease is appended to `released`.

    Whoever watches it keeps the block, so that the memory outlives the pool as long as a tensor lies on it.
    """
    owner, bytes_ = borrowed(lease.block.base, max(nbytes, 1))
    weakref.finalize(owner, let_go, lease, order, released).atexit = False
    return bytes_.untyped_storage()


def borrowed(base: torch.Tensor, nbytes: int) -> tuple[Any, torch.Tensor]:
    """The first bytes of a tensor as a tensor with a storage of its own, and the object that this storage refers to."""
    if base.device.type == "cuda":
        span = DeviceBytes(base.data_ptr(), nbytes)
        return span, torch.as_tensor(span, device=base.device)
    buffer = (ctypes.c_uint8 * nbytes).from_address(base.data_ptr())
    return buffer, torch.frombuffer(buffer, dtype=torch.uint8)


def let_go(lease: Lease, order: Order, released: Released) -> None:
    """Runs wherever the last reference was dropped, so it takes no lock."""
    released.append((lease, () if lease.is_over else marks_of(lease, order)))


def marks_of(lease: Lease, order: Order) -> Marks | None:
    """How far the streams have come that may work on the block; None while one of them is captured into a graph.

    What is captured has not run, so there is nothing to wait for: such a block goes back to torch instead.
    """
    streams = (lease.stream, order.current())
    for stream in streams:
        order.hold(lease.block.base, stream)
    return None if any(map(order.is_capturing, streams)) else order.mark(streams)
