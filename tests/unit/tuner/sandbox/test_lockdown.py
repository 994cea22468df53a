"""A confined process reaches no network, can still measure, and gets its arguments and descriptors."""

import ctypes
import errno
import json
import os
import platform
import socket
import struct
import subprocess
import sys
from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from tuner.sandbox import confinement, lockdown
from tuner.sandbox.confinement import UNCONFINED, Confinement, Means, confinement_here, problem_of
from tuner.sandbox.lockdown import MACHINES, Machine, instructions

KEPT_OUT = (Means.NAMESPACES, Means.FILTER)
PYTHON = (sys.executable, "-I")
CALL_OUT = """
import json, socket, sys
told = {}
for host, port in json.loads(sys.argv[1]):
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    for name, kind in (("TCP", socket.SOCK_STREAM), ("UDP", socket.SOCK_DGRAM)):
        try:
            with socket.socket(family, kind) as way:
                way.settimeout(2)
                way.connect((host, port))
                way.send(b"secret")
            told[f"{name} {host}"] = "sent"
        except OSError as error:
            told[f"{name} {host}"] = error.strerror
print(json.dumps(told))
"""
RAW = """
import ctypes, socket, sys
libc = ctypes.CDLL(None, use_errno=True)
for family in map(int, sys.argv[1:]):
    descriptor = libc.socket(family, socket.SOCK_DGRAM, 0)
    print("made" if descriptor >= 0 else ctypes.get_errno())
print("made" if libc.syscall(425, 4, ctypes.create_string_buffer(256)) >= 0 else ctypes.get_errno())
"""


RAISE = """
import resource
for kind in (resource.RLIMIT_FSIZE, resource.RLIMIT_NOFILE):
    try:
        resource.setrlimit(kind, (2**40, 2**40))
        print("raised")
    except (OSError, ValueError):
        print("refused")
"""


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    """A server on this machine, which whoever has a network can reach."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(0.2)
        yield server


def output_of(confined: Confinement, script: str, *arguments: str) -> str:
    command = confined.command([*PYTHON, "-c", script, *arguments])
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=150).stdout


def calls_out(confined: Confinement, listener: socket.socket) -> dict[str, str]:
    places = [listener.getsockname(), ("192.0.2.1", 9), ("2001:db8::1", 9), ("::1", 9)]
    return json.loads(output_of(confined, CALL_OUT, json.dumps(places)))


def works_here(means: Means) -> bool:
    """Whether this kernel allows it. Where it does not, it must not be what is chosen."""
    if problem_of(Confinement(means), "cpu") is None:
        return True
    assert confinement_here("cpu").means is not means
    return False


@pytest.mark.parametrize("means", KEPT_OUT)
def test_a_process_without_network_reaches_no_address(means, listener):
    if works_here(means):
        told = calls_out(Confinement(means), listener)
        assert len(told) == 8
        assert "sent" not in told.values()
        with pytest.raises(TimeoutError):
            listener.accept()


@pytest.mark.parametrize("confined", [UNCONFINED, Confinement(Means.BOUNDS)])
def test_a_process_with_network_reaches_this_machine(confined, listener):
    assert calls_out(confined, listener)["TCP 127.0.0.1"] == "sent"
    caller, _ = listener.accept()
    with caller:
        assert caller.recv(6) == b"secret"


def test_a_filtered_process_makes_sockets_of_this_machine_only_and_no_ring():
    if works_here(Means.FILTER):
        families = [socket.AF_UNIX, socket.AF_NETLINK, socket.AF_INET, socket.AF_INET6, socket.AF_PACKET, 40]
        told = output_of(Confinement(Means.FILTER), RAW, *(str(int(family)) for family in families)).split()
        assert told == ["made", "made", *[str(errno.EACCES)] * 4, str(errno.ENOSYS)]


@pytest.mark.parametrize("means", [*KEPT_OUT, Means.BOUNDS])
def test_what_was_handed_to_it_reaches_the_command(means, tmp_path, monkeypatch):
    if not works_here(means):
        return
    monkeypatch.setenv("HANDED_ON", "as it was")
    script = (
        "import os, sys; open(sys.argv[1], 'w').write(sys.stdin.read()); os.write(int(sys.argv[2]), b'heard'); "
        "print(os.getpid(), os.getuid(), os.environ['HANDED_ON']); sys.exit(3)"
    )
    read, write = os.pipe()
    try:
        command = Confinement(means).command([*PYTHON, "-c", script, str(tmp_path / "made"), str(write)])
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, pass_fds=(write,), text=True, close_fds=True
        )
        told, _ = process.communicate("a job", timeout=150)
        assert os.read(read, 100) == b"heard"
    finally:
        os.close(read)
        os.close(write)
    assert told.split(maxsplit=2) == [str(process.pid), str(os.getuid()), "as it was\n"]
    assert process.returncode == 3
    assert (tmp_path / "made").read_text() == "a job"
    assert (tmp_path / "made").stat().st_uid == os.getuid()


@pytest.mark.parametrize("means", [*KEPT_OUT, Means.BOUNDS])
def test_there_is_no_way_to_more_rights_and_an_end_to_what_it_may_use(means):
    if not works_here(means):
        return
    script = (
        "import json, resource as r, sys; told = dict(line.split(':') for line in open('/proc/self/status')); "
        "print(json.dumps([int(told['NoNewPrivs']), int(told['CapEff'], 16), int(told['CapBnd'], 16), "
        "*(r.getrlimit(kind) for kind in (r.RLIMIT_FSIZE, r.RLIMIT_NOFILE, r.RLIMIT_NPROC))]))"
    )
    no_new, effective, bounding, file_bytes, files, processes = json.loads(output_of(Confinement(means), script))
    kept = sum(1 << capability for capability in lockdown.KEPT_CAPABILITIES)
    assert no_new == 1
    assert effective & ~kept == 0
    assert os.geteuid() != 0 or bounding & ~kept == 0
    assert max(file_bytes) <= lockdown.FILE_BYTES
    assert max(files) <= lockdown.OPEN_FILES
    assert 0 < max(processes) <= lockdown.threads_now() + 2 * lockdown.MORE_PROCESSES
    assert output_of(Confinement(means), RAISE).split() == ["refused"] * 2
    script = "print(open('/proc/self/oom_score_adj').read())"
    assert int(output_of(Confinement(means), script)) == lockdown.FIRST_TO_GO


LOOK = """
import json, os, signal, socket, sys
told = []
for act in (
    lambda: open(f"/proc/{sys.argv[1]}/environ").read(),
    lambda: os.close(os.open(f"/proc/{sys.argv[1]}/mem", os.O_RDWR)),
    lambda: os.kill(int(sys.argv[1]), 0),
    lambda: socket.socket(socket.AF_UNIX).connect(sys.argv[2].replace("@", chr(0))),
):
    try:
        act()
        told.append(True)
    except OSError:
        told.append(False)
print(json.dumps(told))
"""


def looks_into(confined: Confinement) -> list[bool]:
    """Whether a process of the same user tells it its secrets and memory, can be ended, and hears it."""
    name = f"@kitsune-test-{os.getpid()}"
    with socket.socket(socket.AF_UNIX) as server, subprocess.Popen(["/bin/sleep", "60"]) as other:
        server.bind(name.replace("@", "\0"))
        server.listen()
        try:
            return json.loads(output_of(confined, LOOK, str(other.pid), name))
        finally:
            other.kill()


@pytest.mark.parametrize("means", KEPT_OUT)
def test_it_may_not_look_into_other_processes_of_the_user_nor_end_them(means):
    try:
        version = lockdown.called("syscall", lockdown.LANDLOCK_CREATE_RULESET, None, 0, 1)
    except OSError:
        version = 0  # then a namespace alone keeps it, and of a filter nothing is said
    if works_here(means):
        secrets, memory, end, abstract = looks_into(Confinement(means))
        assert (secrets, memory) == (False, False) or (not version and means is Means.FILTER)
        assert not end or version < lockdown.WITH_SCOPES
        assert not abstract or (version < lockdown.WITH_SCOPES and means is Means.FILTER)


def test_an_unconfined_process_may():
    assert looks_into(UNCONFINED) == [True] * 4


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


def test_if_the_kernel_refuses_nothing_is_started():
    done = subprocess.run(
        [*PYTHON, "-S", str(confinement.LOCKDOWN), "bounds", "/nowhere"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert done.stderr.startswith("this process cannot be confined: ")


# The program of the filter, by hand: not every machine has both kinds of processors ----------------------------------


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
