"""What a process asks of the kernel to confine itself: rules, limits, the program of the filter."""

import ctypes
import errno
import os
import platform
import socket
import struct
from types import SimpleNamespace

import pytest

from tuner.sandbox import lockdown
from tuner.sandbox.lockdown import MACHINES, Machine, instructions


@pytest.mark.parametrize(
    ("version", "rules"),
    [(1, [1 << 6]), (3, [1 << 6]), (4, [0, 3]), (5, [0, 3]), (6, [0, 3, 3]), (7, [0, 3, 3])],
)
def test_only_rules_that_the_kernel_supports_are_used(version, rules, monkeypatch):
    calls: list[tuple[object, ...]] = []

    def called(name: str, number: int, *arguments: object) -> int:
        calls.append((number, *arguments))
        return version if arguments[0] is None else os.open(os.devnull, os.O_RDONLY)

    monkeypatch.setattr(lockdown, "called", called)
    lockdown.stay_apart()
    _, (create, attributes, size, _), (restrict, _, flags) = calls
    assert (create, restrict, flags) == (444, 446, 0)
    assert list(struct.unpack(f"{len(rules)}Q", attributes)) == rules
    assert size.value == len(attributes)


def test_a_kernel_without_landlock_is_accepted(monkeypatch):
    def called(*_: object) -> int:
        raise OSError(errno.ENOSYS, "no such call")

    monkeypatch.setattr(lockdown, "called", called)
    lockdown.stay_apart()


def test_a_read_only_oom_score_is_accepted(monkeypatch):
    def write(*_: object) -> None:
        raise OSError(errno.EROFS, "read-only")

    monkeypatch.setattr(lockdown, "write", write)
    lockdown.go_first()


# The program of the filter, by hand: not every machine has both kinds of processors -----------------------------------


def verdict(machine: Machine, audit: int, number: int, argument: int) -> int:
    """What the program returns for a call: 0x7FFF0000 allows it, 0x00050000 + n refuses it with error n."""
    data = struct.pack("<iIQ6Q", number - (1 << 32) if number >= 1 << 31 else number, audit, 0, argument, *[0] * 5)
    program = [struct.unpack("HBBI", each) for each in instructions(machine)]
    held, at = 0, 0
    while True:
        code, if_true, if_false, value = program[at]
        at += 1
        if code == lockdown.BPF_LOAD:
            held = struct.unpack_from("<I", data, value)[0]
        elif code == lockdown.BPF_RETURN:
            return value
        else:
            holds = held == value if code == lockdown.BPF_EQUAL else held >= value
            at += if_true if holds else if_false


@pytest.mark.parametrize("machine", MACHINES.values(), ids=MACHINES)
@pytest.mark.parametrize(
    ("family", "refused_with"),
    [(1, 0), (16, 0), (0, errno.EACCES), (2, errno.EACCES), (10, errno.EACCES), (17, errno.EACCES), (40, errno.EACCES)],
)
def test_a_socket_is_refused_by_its_family(machine, family, refused_with):
    expected = lockdown.SECCOMP_RET_ERRNO | refused_with if refused_with else lockdown.SECCOMP_RET_ALLOW
    assert verdict(machine, machine.audit, machine.socket, family) == expected
    # the kernel takes the low half of the argument, and so must the filter
    assert verdict(machine, machine.audit, machine.socket, family | 7 << 32) == expected


@pytest.mark.parametrize("machine", MACHINES.values(), ids=MACHINES)
def test_other_ways_to_a_socket_do_not_exist(machine):
    refused = lockdown.SECCOMP_RET_ERRNO | errno.ENOSYS
    assert verdict(machine, machine.audit, lockdown.IO_URING_SETUP, 0) == refused
    assert verdict(machine, machine.audit, machine.socket | lockdown.X32, 1) == refused
    assert verdict(machine, 0x40000003, 102, 1) == refused  # socketcall of a 32-bit program
    assert verdict(machine, machine.audit, 0xFFFFFFFF, 1) == refused


@pytest.mark.parametrize("machine", MACHINES.values(), ids=MACHINES)
def test_every_other_call_passes(machine):
    others = set(range(600)) - {machine.socket, lockdown.IO_URING_SETUP}
    assert {verdict(machine, machine.audit, number, 2) for number in others} == {lockdown.SECCOMP_RET_ALLOW}


def test_an_unknown_architecture_has_no_filter(monkeypatch):
    monkeypatch.setattr(lockdown.os, "uname", lambda: SimpleNamespace(machine="sparc"))
    with pytest.raises(OSError, match="no filter for sparc"):
        lockdown.filter_calls()


def test_limits_are_never_raised(monkeypatch):
    found: list[tuple[int, int]] = []
    for given in ((5, 100), (-1, -1), (10, -1), (100, 100)):
        monkeypatch.setattr(lockdown.resource, "getrlimit", lambda _, given=given: given)
        monkeypatch.setattr(lockdown.resource, "setrlimit", lambda _, limits: found.append(limits))
        lockdown.lower(0, 10)
    assert found == [(5, 10), (10, 10), (10, 10), (10, 10)]


def test_system_call_numbers_are_those_of_this_machine():
    """A socket made by its number is a socket; the filter takes no arguments that are no filter."""
    machine = MACHINES[platform.machine()]
    libc = ctypes.CDLL(None, use_errno=True)
    descriptor = libc.syscall(machine.socket, socket.AF_UNIX, socket.SOCK_DGRAM, 0)
    with socket.socket(fileno=descriptor) as made:
        assert made.family is socket.AF_UNIX
    assert libc.syscall(machine.seccomp, lockdown.SECCOMP_SET_MODE_FILTER, 0, None) == -1
    assert ctypes.get_errno() in (errno.EFAULT, errno.EACCES)
