"""A script that confines its own process (network, capabilities, resource limits) and then executes a command.

    python -I -S lockdown.py MEANS COMMAND...

The restrictions are inherited by the command and all its children. It uses the standard library only, since it runs
before every measuring process. `tuner/sandbox/confinement.py` chooses the means.
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
BPF_LOAD: Final = 0x20  # loads a word of struct seccomp_data
BPF_EQUAL: Final = 0x15
BPF_AT_LEAST: Final = 0x35
BPF_RETURN: Final = 0x06
AT_NUMBER, AT_ARCHITECTURE, AT_FIRST_ARGUMENT = 0, 4, 16  # offsets in struct seccomp_data; the argument's low half
AF_UNIX: Final = 1
AF_NETLINK: Final = 16
IO_URING_SETUP: Final = 425  # can create sockets without a filtered system call
LANDLOCK_CREATE_RULESET: Final = 444
LANDLOCK_RESTRICT_SELF: Final = 446
LANDLOCK_CREATE_RULESET_VERSION: Final = 1
LANDLOCK_ACCESS_FS_MAKE_CHAR: Final = 1 << 6
LANDLOCK_ACCESS_NET_TCP: Final = 0b11  # to bind and to connect
LANDLOCK_SCOPES: Final = 0b11  # abstract sockets of others, and signals to them
WITH_NETWORK, WITH_SCOPES = 4, 6  # versions of Landlock that have these rules
X32: Final = 0x40000000  # system call numbers of the x32 ABI begin here

#: Capabilities that root keeps, for files and its own processes; CUDA needs no more, as in containers. All others are
#: dropped, above all those to enter another process's network namespace (CAP_SYS_ADMIN), to trace another process
#: (CAP_SYS_PTRACE) and to raise the limits again (CAP_SYS_RESOURCE).
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
#: Added to the number of threads now on the machine: on a host of 128 cores Inductor starts 32 compilers with up to 128
#: threads each. Linux does not enforce the limit for root.
MORE_PROCESSES: Final = 16_384
#: The highest oom_score_adj: when memory runs out, the kernel kills the process with the highest score.
FIRST_TO_GO: Final = 1000


class Machine(NamedTuple):
    """The kernel's audit constant of an architecture, and its numbers of two system calls."""

    audit: int
    socket: int
    seccomp: int


MACHINES: Final[Mapping[str, Machine]] = {
    "x86_64": Machine(audit=0xC000003E, socket=41, seccomp=317),
    "aarch64": Machine(audit=0xC00000B7, socket=198, seccomp=277),
}


def main(means: str, command: list[str]) -> None:
    """Confines this process and executes the command. Raises OSError, without running it, if the kernel refuses."""
    bound()
    called("prctl", PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    for take in MEANS[means]:
        take()
    drop_capabilities()
    os.execv(command[0], command)  # noqa: S606 - the command is built by us, and no shell is needed


def bound() -> None:
    go_first()
    lower(resource.RLIMIT_FSIZE, FILE_BYTES)
    lower(resource.RLIMIT_NOFILE, OPEN_FILES)
    lower(resource.RLIMIT_NPROC, threads_now() + MORE_PROCESSES)


def die_with(parent: int) -> None:
    """Asks Linux to kill this process when its parent dies; exits at once if the parent is dead already."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        sys.exit("the parent process is gone")


def go_first() -> None:
    """Makes the kernel kill this process and its children first when memory runs out, not the worker or a database."""
    try:
        write("/proc/self/oom_score_adj", str(FIRST_TO_GO))
    except OSError:  # a container may have mounted it read-only
        return


def lower(kind: int, most: int) -> None:
    """Lowers the soft and the hard limit to at most that."""
    soft, hard = (most if limit == resource.RLIM_INFINITY else min(most, limit) for limit in resource.getrlimit(kind))
    resource.setrlimit(kind, (soft, hard))


def threads_now() -> int:
    """Threads of all users: the limit counts the user's threads outside this container, too."""
    return int(read("/proc/loadavg").split()[3].partition("/")[2])


def drop_capabilities() -> None:
    """Drops them for good from the next exec on. Does nothing without the right to: then there are none to drop."""
    last = int(read("/proc/sys/kernel/cap_last_cap"))
    for capability in set(range(last + 1)) - KEPT_CAPABILITIES:
        try:
            called("prctl", PR_CAPBSET_DROP, capability, 0, 0, 0)
        except PermissionError:
            return


def enter_namespaces() -> None:
    """Moves this process into an empty network namespace, in which even loopback is down.

    A user without the right to create one creates a user namespace as well, with the same user id in it. Root stays in
    its user namespace: in a new one it could not read other users' files any more.
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
    """With Landlock, forbids tracing processes outside and (from Linux 6.12) sending them signals.

    Any Landlock rule set forbids tracing. The rule used here is no TCP, or on an older kernel no new device files.
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
    """Installs a seccomp filter that refuses all sockets but local ones (AF_UNIX, AF_NETLINK), for good."""
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
    """The filter in BPF. Jump offsets count the instructions to skip."""
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


#: With "bounds" the process keeps the network; only the resource limits apply.
MEANS: Final[Mapping[str, Sequence[Callable[[], None]]]] = {
    "namespaces": (enter_namespaces, stay_apart),
    "filter": (filter_calls, stay_apart),
    "bounds": (),
}


def called(name: str, *arguments: object) -> int:
    """Calls a function of libc and returns its result. Raises OSError when it is -1."""
    found: int = getattr(ctypes.CDLL(None, use_errno=True), name)(*arguments)
    if found == -1:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), name)
    return found


def read(path: str) -> str:
    """Does not use pathlib, whose import takes as long as everything else here."""
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
