"""A confined process reaches no network, can still measure, and gets its arguments and descriptors."""

import errno
import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator

import pytest

from tuner.sandbox import confinement, lockdown
from tuner.sandbox.confinement import UNCONFINED, Confinement, Means, confinement_here, problem_of

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


def test_if_the_kernel_refuses_nothing_is_started():
    done = subprocess.run(
        [*PYTHON, "-S", str(confinement.LOCKDOWN), "bounds", "/nowhere"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert done.stderr.startswith("this process cannot be confined: ")
