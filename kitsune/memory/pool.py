"""MemoryPool: allocates uninitialised tensors from reusable blocks.

A block returns to the pool with the last tensor on it. Each tensor has its own storage on memory owned by another
object (the buffer protocol on a CPU, the CUDA array interface on a GPU): torch drops its reference to the owner when
the last tensor, view or saved activation on that storage is destroyed, in whichever thread that happens.
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
    """Statistics of a pool.

    `allocations`: tensors allocated. `hits`: allocations served by an existing block. `used_bytes`: blocks in use now.
    `peak_bytes`: the maximum of `used_bytes`. `reserved_bytes`: all blocks, including free ones. Blocks count in full,
    not only the requested bytes.
    """

    allocations: int
    hits: int
    used_bytes: int
    peak_bytes: int
    reserved_bytes: int

    @property
    def hit_rate(self) -> float | None:
        """`hits` over `allocations`, 0 to 1; None before the first allocation."""
        return self.hits / self.allocations if self.allocations else None


@dataclass(eq=False, slots=True)
class Block:
    """Memory of the pool. `marks`: the events after which another stream may write to it."""

    base: torch.Tensor
    marks: Marks = ()

    @property
    def nbytes(self) -> int:
        return self.base.numel()


@dataclass(eq=False, slots=True)
class Lease:
    """A block used by the storage `key`. `is_over`: it was freed while the storage still exists."""

    block: Block
    stream: Any
    key: int = 0
    is_over: bool = False


@dataclass(eq=False)
class DeviceBytes:
    """Bytes of a GPU, with the CUDA array interface (version 3)."""

    address: int
    nbytes: int

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {"shape": (self.nbytes,), "typestr": "|u1", "data": (self.address, False), "strides": None, "version": 3}


# Released leases, each with the marks of its streams; None during a capture, in which no mark can be taken.
Released = deque[tuple[Lease, Marks | None]]


class MemoryPool:
    """A memory pool of one device, with blocks of powers of two from 512 bytes on. Thread-safe.

    `pool_size`: the most bytes of all blocks together, as a number or a string like '512MB' or '2GB'. Blocks are
    allocated when needed. `device`: None means the current GPU, or the CPU without one.

    On a GPU a freed block is reused at once by the stream that had it. Another stream first waits for the work issued
    before the release to two streams: the one that allocated the block, and the current one of the thread that released
    it. Wait for work on any other stream before you drop the tensor, since `Tensor.record_stream` has no effect on
    memory of a pool.

    Raises SettingsError for an invalid size, UnfitError when the device does not exist.
    """

    def __init__(self, pool_size: int | str, device: torch.device | str | None = None) -> None:
        self.pool_size = bytes_of("pool_size", pool_size)
        self.device = pick_device(device)
        self._order = order_of(self.device)
        self._lock = threading.Lock()
        self._free: defaultdict[int, list[Block]] = defaultdict(list)  # bytes -> free blocks, oldest first
        self._leases: dict[int, Lease] = {}
        # Appended to without the lock: the garbage collector may destroy tensors while this thread holds it.
        self._released: Released = deque()
        self._allocations = self._hits = 0
        self._used_bytes = self._peak_bytes = self._reserved_bytes = 0

    def allocate(self, size: int | Sequence[int], dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """An uninitialised, contiguous tensor of this shape (an int is one dimension) on the pool's device.

        Its memory returns to the pool with the last reference to it and to all its views, or with `free`.

        Raises SettingsError for an invalid size or dtype, and when the pool has too little free memory; CaptureError
        during a CUDA graph capture.
        """
        shape, nbytes = checked(size, dtype)
        why = "the graph would write to memory that the pool has reused since"
        refuse_capture(self._order, "a pool was asked for memory", why)
        stream = self._order.current()
        with self._lock:
            self._collect()
            block = self._take(size_class(nbytes), stream)
            self._order.wait(stream, block.marks)
            self._order.hold(block.base, stream)
            return self._lend(Lease(block, stream), nbytes, shape, dtype)

    def free(self, tensor: torch.Tensor) -> None:
        """Returns the memory of a tensor, or of a view of one, to the pool now. None of them may be used afterwards.

        Raises SettingsError when it was freed already, or is not of this pool.
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
                raise SettingsError("this tensor was freed already; call free() once")
            lease.is_over = True
            self._put_back(lease.block, marks_of(lease, self._order))

    def trim(self) -> None:
        """Returns all free blocks to torch."""
        with self._lock:
            self._collect()
            self._drop_free(self._reserved_bytes)

    @property
    def stats(self) -> PoolStats:
        """Counts of allocations and hits so far, and bytes in use, at the peak and reserved."""
        with self._lock:
            self._collect()
            return PoolStats(self._allocations, self._hits, self._used_bytes, self._peak_bytes, self._reserved_bytes)

    def _collect(self) -> None:
        """Processes the leases released since the last call."""
        while self._released:
            lease, marks = self._released.popleft()
            if self._leases.get(lease.key) is lease:  # else the key may belong to a new storage by now
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
        """A free block of this size, preferably one without a wait for another stream, or a new one."""
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
        """Frees blocks of other sizes for a new one. Raises SettingsError when there is too little free memory."""
        if self._used_bytes + nbytes > self.pool_size:
            raise SettingsError(
                f"a block of {nbytes:,} bytes does not fit into the pool: {self._used_bytes:,} of its pool_size of "
                f"{self.pool_size:,} bytes are in use; free tensors, or make the pool larger"
            )
        self._drop_free(self._reserved_bytes + nbytes - self.pool_size)

    def _drop_free(self, wanted_bytes: int) -> None:
        """Returns free blocks to torch, largest first, until so many bytes are returned or no block is free."""
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
    """The shape and its bytes. Raises SettingsError for an invalid size or dtype."""
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
    """The smallest power of two, from 512 on, of at least so many bytes."""
    return max(BLOCK_BYTES, 1 << max(nbytes - 1, 0).bit_length())


def lent_storage(lease: Lease, nbytes: int, order: Order, released: Released) -> torch.UntypedStorage:
    """A non-owning storage on the block. When it is destroyed, the lease is appended to `released`.

    Its finalizer references the block, so that the memory outlives the pool as long as a tensor uses it.
    """
    owner, bytes_ = borrowed(lease.block.base, max(nbytes, 1))
    weakref.finalize(owner, release, lease, order, released).atexit = False
    return bytes_.untyped_storage()


def borrowed(base: torch.Tensor, nbytes: int) -> tuple[Any, torch.Tensor]:
    """The first bytes of a tensor as a tensor with its own storage, and the object that this storage references."""
    if base.device.type == "cuda":
        span = DeviceBytes(base.data_ptr(), nbytes)
        return span, torch.as_tensor(span, device=base.device)
    buffer = (ctypes.c_uint8 * nbytes).from_address(base.data_ptr())
    return buffer, torch.frombuffer(buffer, dtype=torch.uint8)


def release(lease: Lease, order: Order, released: Released) -> None:
    """Finalizer of a storage. Takes no lock, since it runs in any thread that drops the last reference."""
    released.append((lease, () if lease.is_over else marks_of(lease, order)))


def marks_of(lease: Lease, order: Order) -> Marks | None:
    """Marks on the streams that may use the block; None while one of them is being captured.

    Captured work has not run, so there is nothing to wait for: such a block is returned to torch instead.
    """
    streams = (lease.stream, order.current())
    for stream in streams:
        order.hold(lease.block.base, stream)
    return None if any(map(order.is_capturing, streams)) else order.mark(streams)
