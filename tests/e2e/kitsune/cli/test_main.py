"""What only a process of its own shows of the command line: its streams, its signals, what it loads."""

import json
import os
import resource
import subprocess
import sys
from typing import IO

import pytest

from tests.unit.kitsune.cli.test_main import STOPPED


def python(code: str, *arguments: str, stdout: int | IO[bytes] = subprocess.PIPE) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", code, *arguments]
    return subprocess.run(command, stdout=stdout, stderr=subprocess.PIPE, text=True, check=False, timeout=150)


def cpu_s(code: str) -> tuple[float, subprocess.CompletedProcess[str]]:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = python(code)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, done


def test_help_is_quick_and_loads_nothing_heavy():
    """Within four times what its libraries take to load, which is 0.4 s on one machine and 0.7 on another."""
    code = (
        "import sys; from kitsune.cli import main as cli; done = cli.run(['tune', '--help']);"
        "heavy = {'torch', 'numpy', 'optuna', 'sqlalchemy', 'alembic'} & set(sys.modules); sys.exit(f'{done} {heavy}')"
    )
    ratios: list[float] = []
    while not ratios or (min(ratios) >= 4.0 and len(ratios) < 6):  # one that nobody disturbed is enough
        libraries_s, _ = cpu_s("import typer, rich.console, rich.table, pydantic")
        took_s, done = cpu_s(code)
        ratios.append(took_s / libraries_s)
        assert done.stderr == "0 set()\n"
        assert "--budget" in done.stdout
    assert min(ratios) < 4.0


BOOM = """
from kitsune.cli import main as cli
def boom(words): raise ZeroDivisionError("by zero\\nand more")
cli.run = boom
cli.main()
"""

WAIT = """
import os, signal
from kitsune.cli import main as cli
def wait(words):
    try:
        os.kill(os.getpid(), signal.SIGNAME)
        signal.pause()
    finally:
        print("cleaned up")
signal.signal(signal.SIGNAME, signal.SIG_DFL)
cli.run = wait
cli.main()
"""


def test_an_unforeseen_error_is_one_line_without_a_traceback():
    done = python(BOOM, "doctor", "--json")
    assert done.returncode == 1
    told = "unexpected ZeroDivisionError: by zero; run with --debug for the traceback"
    assert done.stderr == f"Error: {told}\n"
    assert json.loads(done.stdout)["error"] == {"type": "ZeroDivisionError", "message": told, "exit_code": 1}


def test_debug_shows_the_traceback_wherever_it_stands():
    done = python(BOOM, "doctor", "--debug")
    assert done.returncode == 1
    assert "Traceback" in done.stderr
    assert "in boom" in done.stderr


CALLS = """
import sys
from kitsune.cli import main as cli, output as screen
from kitsune.errors import NotFoundError
def shows(words): screen.emit({"a": "b" * 20_000})
def prints(words): screen.stdout().print("b" * 20_000)
def fails(words): raise NotFoundError("it is not there")
cli.doctor.checks = lambda: CALL(None) or []
cli.main()
"""


@pytest.mark.parametrize(
    ("call", "code", "told"),
    [
        ("shows", 3, "the result cannot be written to stdout: No space left on device"),
        ("prints", 3, "the result cannot be written to stdout: No space left on device"),
        ("fails", 4, "it is not there"),
    ],
)
@pytest.mark.parametrize("words", [["doctor"], ["doctor", "--json"]])
def test_a_full_disk_is_one_line_and_a_code(call, code, told, words):
    with open("/dev/full", "wb") as full:
        done = python(CALLS.replace("CALL", call), *words, stdout=full)
    assert (done.returncode, done.stderr) == (code, f"Error: {told}\n")


def test_an_unforeseen_error_is_told_of_without_a_stdout():
    with open("/dev/full", "wb") as full:
        done = python(BOOM, "doctor", "--json", stdout=full)
    told = "unexpected ZeroDivisionError: by zero; run with --debug for the traceback"
    assert (done.returncode, done.stderr) == (1, f"Error: {told}\n")


def test_a_reader_that_left_is_one_line_and_a_code():
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "wb") as gone:
        done = python(CALLS.replace("CALL", "shows"), "doctor", stdout=gone)
    assert (done.returncode, done.stderr) == (3, "Error: the result cannot be written to stdout: Broken pipe\n")


def test_a_help_on_a_full_disk_is_one_line_and_a_code():
    with open("/dev/full", "wb") as full:
        done = python("from kitsune.cli import main as cli; cli.main()", "plan", "--help", stdout=full)
    told = "the help cannot be written to stdout: No space left on device"
    assert (done.returncode, done.stderr) == (3, f"Error: {told}\n")


@pytest.mark.parametrize(
    ("words", "what"), [(["doctor"], "result"), (["doctor", "--json"], "result"), (["-h"], "help")]
)
def test_a_stdout_that_was_closed_is_one_line_and_a_code(words, what):
    closing = "import os, sys; os.close(1); os.execv(sys.executable, [sys.executable, '-c', *sys.argv[1:]])"
    done = python(closing, CALLS.replace("CALL", "shows"), *words)
    told = f"the {what} cannot be written to stdout: Bad file descriptor"
    assert (done.returncode, done.stderr) == (3, f"Error: {told}\n")


def test_a_stderr_that_was_closed_takes_nothing_away_from_the_result():
    closing = "import os, sys; os.close(2); os.execv(sys.executable, [sys.executable, '-c', *sys.argv[1:]])"
    calls = CALLS.replace("CALL", "notes").replace("cli.doctor", "def notes(_): screen.note('by the way')\ncli.doctor")
    done = python(closing, calls, "doctor", "--json")
    assert (done.returncode, json.loads(done.stdout)) == (0, {"fits": True, "checks": []})


PRESSED = """
import os, signal, sys
from kitsune.cli import main as cli
signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job ignores it
def press(): os.kill(os.getpid(), signal.SIGINT)
cli.doctor.checks = lambda: PRESS or []
cli.main()
"""


def test_ctrl_c_is_told_of_on_both_streams():
    done = python(PRESSED.replace("PRESS", "press()"), "doctor", "--json")
    assert (done.returncode, done.stderr, json.loads(done.stdout)) == (130, "Error: stopped by Ctrl-C\n", STOPPED)
    done = python(PRESSED.replace("PRESS", "press()"), "doctor")
    assert (done.returncode, done.stderr, done.stdout) == (130, "stopped by Ctrl-C\n", "")


LOADING = """
import os, runpy, signal, sys
signal.signal(signal.SIGINT, HANDLER)
class Pressing:
    def find_spec(self, name, *_):
        if name == "typer":
            os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, Pressing())
runpy.run_module("kitsune", run_name="__main__", alter_sys=True)
"""


def test_ctrl_c_while_the_command_line_is_loaded_is_told_of():
    loading = LOADING.replace("HANDLER", "signal.default_int_handler")
    done = python(loading, "doctor", "--json")
    assert (done.returncode, done.stderr, json.loads(done.stdout)) == (130, "Error: stopped by Ctrl-C\n", STOPPED)
    done = python(loading, "--help")
    assert (done.returncode, done.stderr, done.stdout) == (130, "stopped by Ctrl-C\n", "")


def test_ctrl_c_that_is_ignored_stays_so():
    done = python(LOADING.replace("HANDLER", "signal.SIG_IGN"), "--help")
    assert (done.returncode, done.stderr) == (0, "")
    assert "Usage: kitsune" in done.stdout


def test_ctrl_c_ends_the_process_in_an_import_that_swallows_it(tmp_path):
    """As that of torch does, now and then."""
    (tmp_path / "swallows.py").write_text(
        "import os, signal\ntry:\n    os.kill(os.getpid(), signal.SIGINT)\n    signal.pause()\n"
        "except KeyboardInterrupt:\n    pass\n"
    )
    importing = f"sys.path.insert(0, {str(tmp_path)!r}) or __import__('swallows') and None"
    done = python(PRESSED.replace("PRESS", importing), "doctor", "--json")
    assert (done.returncode, done.stderr, json.loads(done.stdout)) == (130, "Error: stopped by Ctrl-C\n", STOPPED)


@pytest.mark.parametrize(("name", "code"), [("SIGTERM", 143), ("SIGHUP", 129)])
def test_a_signal_unwinds_before_it_ends_the_process(name, code):
    done = python(WAIT.replace("SIGNAME", name))
    assert (done.returncode, done.stdout, done.stderr) == (code, "cleaned up\n", "")
