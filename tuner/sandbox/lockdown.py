"""Run as a script: takes the network and more from this very process, then becomes the command that it was given.

    python -I -S lockdown.py MEANS COMMAND...

What is set here lasts through the command and all that it starts. Needs the standard library only, and nothing of ours,
since it goes before every measuring process. `tuner/sandbox/confinement.py` chooses the means.
"""

import ctypes
import errno
import os
import resource
import signal
import struct
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Final, NamedTuple

CLONE_NEWNET: Final = 0x40000000
CLONE_NEWUSER: Final = 0x10000000
PR_SET_PDEATHSIG: Final = 1
PR_SET_NO_NEW_PRIVS: Final = 38
PR_CAPBSET_DROP: Final = 24
SECCOMP_SET_MODE_FILTER: Final = 1
#: Without it kernels before 5.16 make every branch of a filtered process slower (speculative store bypass).
SECCOMP_FILTER_FLAG_SPEC_ALLOW: Final = 1 << 2
SECCOMP_RET_ALLOW: Final = 0x7FFF0000
SECCOMP_RET_ERRNO: Final = 0x00050000
BPF_LOAD: Final = 0x20  # a word of struct seccomp_data
BPF_EQUAL: Final = 0x15
BPF_AT_LEAST: Final = 0x35
BPF_RETURN: Final = 0x06
AT_NUMBER, AT_ARCHITECTURE, AT_FIRST_ARGUMENT = 0, 4, 16  # in struct seccomp_data; of the argument the low half
AF_UNIX: Final = 1
AF_NETLINK: Final = 16
IO_URING_SETUP: Final = 425  # makes sockets that no filter sees
LANDLOCK_CREATE_RULESET: Final = 444
LANDLOCK_RESTRICT_SELF: Final = 446
LANDLOCK_CREATE_RULESET_VERSION: Final = 1
LANDLOCK_ACCESS_FS_MAKE_CHAR: Final = 1 << 6
LANDLOCK_ACCESS_NET_TCP: Final = 0b11  # to bind and to connect
LANDLOCK_SCOPES: Final = 0b11  # abstract sockets of others, and signals to them
WITH_NETWORK, WITH_SCOPES = 4, 6  # versions of Landlock
X32: Final = 0x40000000  # from here on the same calls under other numbers

#: What root may go on doing with files and its own processes; CUDA needs no more, as in containers. Of the rest it
#: loses the right: above all to enter the network of another process (CAP_SYS_ADMIN) or that process itself
#: (CAP_SYS_PTRACE), and to lift the bounds again (CAP_SYS_RESOURCE).
KEPT_CAPABILITIES: Final = frozenset(
    {
        0,  # CAP_CHOWN
        1,  # CAP_DAC_OVERRIDE
        2,  # CAP_DAC_READ_SEARCH
        3,  # CAP_FOWNER
        4,  # CAP_FSETID
        5,  # CAP_KILL
        14,  # CAP_IPC_LOCK
    }
)
#: The largest file. What Inductor and Triton write for a model is far below 1 GiB.
FILE_BYTES: Final = 16 * 2**30
OPEN_FILES: Final = 65_536
#: So many threads and processes more than the machine has now: on a host of 128 cores Inductor starts 32 compilers with
#: up to 128 threads each. Linux does not hold root to it.
MORE_PROCESSES: Final = 16_384
#: The most there is. When memory ends, the kernel ends the process with the highest score.
FIRST_TO_GO: Final = 1000


class Machine(NamedTuple):
    """How the kernel names a kind of processor, and numbers of its calls."""

    audit: int
    socket: int
    seccomp: int


MACHINES: Final[Mapping[str, Machine]] = {
    "x86_64": Machine(audit=0xC000003E, socket=41, seccomp=317),
    "aarch64": Machine(audit=0xC00000B7, socket=198, seccomp=277),
}


def main(means: str, command: list[str]) -> None:
    """Raises OSError where the kernel does not allow it; nothing is run then."""
    bound()
    called("prctl", PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    for take in MEANS[means]:
        take()
    drop_capabilities()
    os.execv(command[0], command)  # noqa: S606 - a list of ours, and no shell is wanted


def bound() -> None:
    go_first()
    lower(resource.RLIMIT_FSIZE, FILE_BYTES)
    lower(resource.RLIMIT_NOFILE, OPEN_FILES)
    lower(resource.RLIMIT_NPROC, threads_now() + MORE_PROCESSES)


def die_with(parent: int) -> None:
    """Asks Linux to kill this process when its parent dies; leaves at once when it is dead already."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        sys.exit("the process that asked is gone")


def go_first() -> None:
    """When memory ends, this process does, and what it has started: not the worker, nor a database beside it."""
    try:
        write("/proc/self/oom_score_adj", str(FIRST_TO_GO))
    except OSError:  # a container may have mounted it read-only
        return


def lower(kind: int, most: int) -> None:
    """Both limits to at most that."""
    soft, hard = (most if limit == resource.RLIM_INFINITY else min(most, limit) for limit in resource.getrlimit(kind))
    resource.setrlimit(kind, (soft, hard))


def threads_now() -> int:
    """Of all users: the limit counts those of the user, wherever they are."""
    return int(read("/proc/loadavg").split()[3].partition("/")[2])


def drop_capabilities() -> None:
    """For good, from the next exec on. Who has none to drop may not drop any."""
    last = int(read("/proc/sys/kernel/cap_last_cap"))
    for capability in set(range(last + 1)) - KEPT_CAPABILITIES:
        try:
            called("prctl", PR_CAPBSET_DROP, capability, 0, 0, 0)
        except PermissionError:
            return


def enter_namespaces() -> None:
    """A network of its own, with nothing in it: even its loopback is down.

    Who may not make one as he is does so in a user namespace, in which he has the same number. Root of the machine is
    left in the namespace that it is in: in one of its own it could not read the files of others any more.
    """
    try:
        called("unshare", CLONE_NEWNET)
    except PermissionError:
        user, group = os.geteuid(), os.getegid()
        called("unshare", CLONE_NEWUSER | CLONE_NEWNET)
        write("/proc/self/setgroups", "deny")
        write("/proc/self/uid_map", f"{user} {user} 1")
        write("/proc/self/gid_map", f"{group} {group} 1")


def stay_apart() -> None:
    """It may not look into processes outside of it, nor (Linux 6.12) send them signals, where there is Landlock.

    That comes with any rule: the one here is no TCP, or on an older kernel no device files.
    """
    try:
        version = called("syscall", LANDLOCK_CREATE_RULESET, None, 0, LANDLOCK_CREATE_RULESET_VERSION)
    except OSError:
        return
    rules = [LANDLOCK_ACCESS_FS_MAKE_CHAR]
    if version >= WITH_NETWORK:
        rules = [0, LANDLOCK_ACCESS_NET_TCP, *([LANDLOCK_SCOPES] if version >= WITH_SCOPES else [])]
    attributes = struct.pack(f"{len(rules)}Q", *rules)
    ruleset = called("syscall", LANDLOCK_CREATE_RULESET, attributes, ctypes.c_size_t(len(attributes)), 0)
    called("syscall", LANDLOCK_RESTRICT_SELF, ruleset, 0)
    os.close(ruleset)


def filter_calls() -> None:
    """The kernel refuses it every socket but those that stay on the machine, for good."""
    name = os.uname().machine
    machine = MACHINES.get(name)
    if machine is None or sys.byteorder != "little":
        raise OSError(errno.ENOSYS, f"no filter for {name}")
    program = b"".join(instructions(machine))
    held = ctypes.create_string_buffer(program, len(program))
    filters = struct.pack("HxxxxxxP", len(program) // 8, ctypes.addressof(held))
    flags = ctypes.c_ulong(SECCOMP_FILTER_FLAG_SPEC_ALLOW)
    called("syscall", ctypes.c_long(machine.seccomp), ctypes.c_uint(SECCOMP_SET_MODE_FILTER), flags, filters)


def instructions(machine: Machine) -> Iterator[bytes]:
    """In BPF. The offsets count the instructions that are passed over."""
    yield instruction(BPF_LOAD, AT_ARCHITECTURE)
    yield instruction(BPF_EQUAL, machine.audit, 1, 0)
    yield refusal(errno.ENOSYS)
    yield instruction(BPF_LOAD, AT_NUMBER)
    yield instruction(BPF_AT_LEAST, X32, 1, 0)
    yield instruction(BPF_EQUAL, IO_URING_SETUP, 0, 1)
    yield refusal(errno.ENOSYS)
    yield instruction(BPF_EQUAL, machine.socket, 0, 4)
    yield instruction(BPF_LOAD, AT_FIRST_ARGUMENT)
    yield instruction(BPF_EQUAL, AF_UNIX, 2, 0)
    yield instruction(BPF_EQUAL, AF_NETLINK, 1, 0)
    yield refusal(errno.EACCES)
    yield instruction(BPF_RETURN, SECCOMP_RET_ALLOW)


def instruction(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("HBBI", code, if_true, if_false, value)


def refusal(error: int) -> bytes:
    return instruction(BPF_RETURN, SECCOMP_RET_ERRNO | error)


#: By the last one the process keeps the network, and only the bounds hold.
MEANS: Final[Mapping[str, Sequence[Callable[[], None]]]] = {
    "namespaces": (enter_namespaces, stay_apart),
    "filter": (filter_calls, stay_apart),
    "bounds": (),
}


def called(name: str, *arguments: object) -> int:
    """What a function of libc returns. Raises OSError."""
    found: int = getattr(ctypes.CDLL(None, use_errno=True), name)(*arguments)
    if found == -1:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), name)
    return found


def read(path: str) -> str:
    """Without pathlib, which takes as long to load as all else here."""
    with open(path, encoding="ascii") as file:
        return file.read()


def write(path: str, text: str) -> None:
    with open(path, "w", encoding="ascii") as file:
        file.write(text)


if __name__ == "__main__":
    try:
        main(sys.argv[1], sys.argv[2:])
    except OSError as error:
        sys.exit(f"this process cannot be confined: {error}")
