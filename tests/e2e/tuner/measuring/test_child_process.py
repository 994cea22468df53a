import getpass
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time

import pytest

from kitsune.errors import StoppedError
from tests.one_job import outcome_of
from tests.processes import is_gone
from tuner.measuring.protocol import Job, Limits, Message
from tuner.records import Failure, FailureKind, Phase
from tuner.sandbox.confinement import confinement_here

JOB = Job(kind="inspect", workload="zoo:mlp", device="cpu")
PRELUDE = """
import json, os, signal, sys, time
out = int(sys.argv[1])
say = lambda text: os.write(out, text.encode())
"""
PHASE = Message(phase=Phase.NUMERICS).line().decode()
ANSWER = Message(failure=Failure(kind=FailureKind.RAISED, phase=Phase.BUILD, reason="as it says")).line().decode()


def run(script: str, **limits: float) -> Failure:
    command = (sys.executable, "-c", PRELUDE + script)
    outcome = outcome_of(JOB, Limits(**{"start_s": 50, **limits}), command)
    assert isinstance(outcome, Failure)
    return outcome


def test_the_job_arrives_on_stdin_and_the_answer_comes_back():
    script = f"job = json.loads(sys.stdin.readline()); say({ANSWER!r}.replace('as it says', job['workload']))"
    assert run(script) == Failure(kind=FailureKind.RAISED, phase=Phase.BUILD, reason="zoo:mlp")


def test_an_answer_in_pieces_is_one_answer():
    script = f"text = {ANSWER!r}\nfor start in range(0, len(text), 7):\n say(text[start:start + 7]); time.sleep(0.01)"
    assert run(script).reason == "as it says"


def test_output_of_user_code_does_not_disturb_the_protocol():
    script = f"print('x' * 200_000); print('y' * 200_000, file=sys.stderr); say({ANSWER!r})"
    assert run(script).reason == "as it says"


@pytest.mark.parametrize(
    ("script", "words"),
    [
        ("say('hello\\n')", "not a message"),
        ("say('{}\\n')", "exactly one of"),
        ('say(\'{"phase": "build", "surprise": 1}\\n\')', "surprise"),
        ("os.write(out, bytes(range(256)) + b'\\n')", "not a message"),
        (f"say({PHASE!r} * 2)", "from numerics back to numerics"),
        (f"say({ANSWER!r} * 2)", "sent a message after its answer"),
        ("say('[' * 100_000 + '\\n')", "not a message"),
    ],
)
def test_garbage_is_a_crash(script, words):
    failure = run(script + "; time.sleep(60)")
    assert failure.kind is FailureKind.CRASHED
    assert words in failure.reason


@pytest.mark.parametrize("script", ["say('x' * 65536)", "say(' ' * 65535 + chr(10))"])
def test_endless_output_is_cut_off(script):
    failure = run(f"while True: {script}")
    assert failure.kind is FailureKind.CRASHED


def test_endless_output_on_stderr_ends_at_the_time_limit():
    failure = run("while True: os.write(2, b'noise ' * 10_000)", start_s=1)
    assert failure.kind is FailureKind.TIMEOUT


def test_all_phases_together_have_a_limit():
    script = "for name in ('numerics', 'warmup'): say(json.dumps({'phase': name}) + chr(10)); time.sleep(1)"
    failure = run(script + "\ntime.sleep(60)", total_s=1.7)
    assert failure.kind is FailureKind.TIMEOUT
    assert re.fullmatch("all up to .* took longer than its limit of 1.7 s; the process was killed", failure.reason)


def test_exit_without_a_result_gives_the_last_words():
    failure = run("print('first\\nthe reason\\n', file=sys.stderr); sys.exit(3)")
    assert failure.kind is FailureKind.CRASHED
    assert "code 3" in failure.reason
    assert failure.reason.endswith("last words: the reason")


@pytest.mark.parametrize("script", ["pass", "os._exit(0)", f"say({ANSWER!r}.strip())"])
def test_exit_0_without_a_whole_result_is_a_crash(script):
    failure = run(script)
    assert failure.kind is FailureKind.CRASHED
    assert "code 0 without a result" in failure.reason


@pytest.mark.parametrize("name", ["SIGSEGV", "SIGKILL", "SIGABRT"])
def test_a_signal_is_named(name):
    failure = run(f"say({PHASE!r}); os.kill(os.getpid(), signal.{name})")
    assert (failure.kind, failure.phase) == (FailureKind.CRASHED, Phase.NUMERICS)
    assert name in failure.reason


def test_a_closed_result_pipe_is_a_crash_long_before_the_limit():
    begin = time.monotonic()
    failure = run("os.close(out); time.sleep(60)", start_s=50)
    assert failure.kind is FailureKind.CRASHED
    assert "closed" in failure.reason
    assert time.monotonic() - begin < 40


def test_each_phase_has_its_own_limit():
    begin = time.monotonic()
    failure = run(f"say({PHASE!r}); time.sleep(60)", numerics_s=0.5)
    assert (failure.kind, failure.phase) == (FailureKind.TIMEOUT, Phase.NUMERICS)
    assert "0.5 s" in failure.reason
    assert time.monotonic() - begin < 40


def test_the_whole_group_is_killed(tmp_path):
    note = tmp_path / "grandchild"
    script = (
        "import subprocess\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])\n"
        f"open({str(note)!r}, 'w').write(str(child.pid)); say({PHASE!r}); time.sleep(60)"
    )
    assert run(script, numerics_s=0.5).kind is FailureKind.TIMEOUT
    assert is_gone(int(note.read_text()))


def test_a_process_that_leaves_the_group_is_killed_too(tmp_path):
    note = tmp_path / "stray"
    script = (
        "stray = os.fork()\n"
        "if stray == 0:\n"
        "    os.setsid(); os.close(out); time.sleep(60); os._exit(0)\n"
        f"open({str(note)!r}, 'w').write(str(stray)); time.sleep(0.5); os._exit(3)"
    )
    assert "code 3" in run(script).reason
    assert is_gone(int(note.read_text()))


def test_a_grandchild_that_keeps_the_pipe_open_does_not_hold_us():
    script = "import subprocess\nsubprocess.Popen(['sleep', '60'], pass_fds=(out,)); sys.exit(4)"
    begin = time.monotonic()
    assert "code 4" in run(script, start_s=50).reason
    assert time.monotonic() - begin < 40


def test_nothing_is_left_behind(tmp_path, monkeypatch):
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(scratch))
    before = set(os.listdir("/proc/self/fd"))
    for script in (f"say({ANSWER!r})", "open(os.environ['TMPDIR'] + '/file', 'w'); os._exit(1)", "say('?\\n')"):
        run(script)
    assert set(os.listdir("/proc/self/fd")) == before
    compiled = f"torchinductor_{getpass.getuser()}"  # torch's own, shared with every other process
    assert [path.name for path in scratch.iterdir()] == [compiled]
    assert list((scratch / compiled).iterdir()) == []


def test_an_untrusted_workload_sees_only_allowed_variables(monkeypatch):
    monkeypatch.setenv("KITSUNE_DATABASE_URL", "postgresql://user:password@host/db")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "key")
    monkeypatch.setenv("CUDA_MODULE_LOADING", "LAZY")
    names = ["KITSUNE_DATABASE_URL", "AWS_SECRET_ACCESS_KEY", "CUDA_MODULE_LOADING"]
    script = f"print(*map(os.environ.get, {names}), file=sys.stderr); sys.exit(1)"
    assert run(script).reason.endswith("None None LAZY")


def test_a_user_script_has_the_network_and_an_untrusted_workload_has_none():
    """Or it is said that he has."""
    script = "import socket\ntry:\n socket.create_connection(('127.0.0.1', {port}), 5).send(b'x'); told = 'reached'\n"
    script += "except OSError: told = 'refused'\n" + f"say({ANSWER!r}.replace('as it says', told))"
    with socket.create_server(("127.0.0.1", 0)) as server:
        command = (sys.executable, "-c", PRELUDE + script.replace("{port}", str(server.getsockname()[1])))
        own = outcome_of(JOB.model_copy(update={"workload": "train.py:make"}), Limits(), command)
        stranger = outcome_of(JOB, Limits(), command)
    assert isinstance(own, Failure)
    assert isinstance(stranger, Failure)
    assert own.reason == "reached"
    assert stranger.reason == ("reached" if confinement_here("cpu").has_network else "refused")


def test_ctrl_c_kills_the_child_and_propagates(tmp_path):
    note = tmp_path / "child"
    path = str(note)
    script = f"open({path!r} + '.new', 'w').write(str(os.getpid())); os.rename({path!r} + '.new', {path!r})"

    def interrupt() -> None:
        while not note.exists():
            time.sleep(0.02)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt, daemon=True)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        run(script + "\ntime.sleep(60)")
    thread.join()
    assert is_gone(int(note.read_text()))


def test_a_check_that_raises_kills_the_child_and_propagates(tmp_path):
    note = tmp_path / "child"
    path = str(note)
    script = f"open({path!r} + '.new', 'w').write(str(os.getpid())); os.rename({path!r} + '.new', {path!r})"

    def check() -> None:
        if note.exists():
            raise StoppedError("enough")

    command = (sys.executable, "-c", PRELUDE + script + "\ntime.sleep(60)")
    begin = time.monotonic()
    with pytest.raises(StoppedError, match="enough"):
        outcome_of(JOB, Limits(start_s=50), command, check)
    assert is_gone(int(note.read_text()))
    assert time.monotonic() - begin < 40


def test_check_is_called_while_an_answered_child_has_not_exited():
    asked = []

    def check() -> None:
        asked.append(time.monotonic())
        if len(asked) == 20:
            raise StoppedError("enough")

    command = (sys.executable, "-c", PRELUDE + f"say({ANSWER!r}); time.sleep(60)")
    with pytest.raises(StoppedError, match="enough"):
        outcome_of(JOB, Limits(start_s=50), command, check)
    assert asked[-1] - asked[0] < 40


def test_the_helper_is_gone_works():
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]) as process:
        assert not is_gone(process.pid, within_s=0.2)
        process.kill()
        assert is_gone(process.pid)
    assert json.loads(ANSWER)["failure"]["kind"] == "raised"
