"""A script that tests a confined process: which addresses it can still reach, and whether measuring would work.

    python -I self_test.py DEVICE

It prints one line of JSON, `{"open": [...], "broken": [...]}`. It does not import torch, which takes seconds, nor
Kitsune: whatever else torch needs of the system is available in any process.
"""

import ctypes
import json
import multiprocessing
import os
import socket
import sys
from collections.abc import Callable, Iterator
from typing import Final

#: Addresses reserved for documentation (RFC 5737, RFC 3849), and this machine.
PLACES: Final = (
    (socket.AF_INET, "192.0.2.1"),
    (socket.AF_INET, "127.0.0.1"),
    (socket.AF_INET6, "2001:db8::1"),
    (socket.AF_INET6, "::1"),
)
DISCARD: Final = 9
BYTES: Final = 2**20


def main(device: str) -> None:
    told = {"open": list(still_open()), "broken": list(broken(device))}
    sys.stdout.write(json.dumps(told) + "\n")


def still_open() -> Iterator[str]:
    """The addresses that have a route. Connecting a datagram socket looks up the route and sends nothing."""
    for family, host in PLACES:
        try:
            with socket.socket(family, socket.SOCK_DGRAM) as way:
                way.connect((host, DISCARD))
        except OSError:
            continue
        yield host


def broken(device: str) -> Iterator[str]:
    """What measuring needs but does not work, each with the reason."""
    needs: dict[str, Callable[[], None]] = {"processes": start_processes}
    if device.startswith("cuda"):
        index = int(device.partition(":")[2] or 0)
        needs["the GPU"] = lambda: use_gpu(index)
    for name, need in needs.items():
        try:
            need()
        except (OSError, RuntimeError, AttributeError) as error:
            yield f"{name}: {error}"


def start_processes() -> None:
    """Starts a process pool as Inductor does for compiling: with pipes, semaphores and a feeder thread."""
    with multiprocessing.get_context("fork").Pool(1) as pool:
        if pool.apply(os.getpid) == os.getpid():
            raise RuntimeError("a process pool ran its task in this process")


def use_gpu(index: int) -> None:
    """Writes GPU memory and reads it back, through the driver API only."""
    driver = ctypes.CDLL("libcuda.so.1")
    device, context, place = ctypes.c_int(), ctypes.c_void_p(), ctypes.c_uint64()
    found = ctypes.create_string_buffer(BYTES)

    def ask(name: str, *arguments: object) -> None:
        status = getattr(driver, name)(*arguments)
        if status:
            raise RuntimeError(f"{name} answered {status}")

    ask("cuInit", 0)
    ask("cuDeviceGet", ctypes.byref(device), index)
    ask("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
    ask("cuCtxSetCurrent", context)
    ask("cuMemAlloc_v2", ctypes.byref(place), ctypes.c_size_t(BYTES))
    ask("cuMemsetD8_v2", place, ctypes.c_ubyte(7), ctypes.c_size_t(BYTES))
    ask("cuMemcpyDtoH_v2", found, place, ctypes.c_size_t(BYTES))
    if found.raw != bytes([7]) * BYTES:
        raise RuntimeError("its memory does not hold what was written")


if __name__ == "__main__":
    main(sys.argv[1])
