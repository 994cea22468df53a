"""The command `python -m kitsune.profiler.memory_tracker` as a process, and a script of it that forks."""

import os
import subprocess
import sys

import pytest

from kitsune.profiler.gauge import RESIDENT
from tests.unit.kitsune.profiler.test_memory_tracker import command  # noqa: F401


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_child_that_the_script_forks_tells_no_table(command):  # noqa: F811
    script = "import os\nchild = os.fork()\nif not child: raise SystemExit\nstatus = os.waitpid(child, 0)[1]"
    try:
        found = command(script)
    except SystemExit:  # the child has come here, and must not go on with the tests
        os._exit(int(RESIDENT in command.out))
    assert found.module.status == 0
    assert RESIDENT in found.out


def test_the_command_shows_an_error_as_python_does_and_warns_of_nothing(tmp_path):
    (tmp_path / "script.py").write_text("import sys\nprint(sys.argv)\nraise ValueError('no')\n", "utf-8")
    plain, tracked = (
        subprocess.run(
            [sys.executable, "-W", "error", *how, "script.py", "a b"],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=150,
            check=False,
        )
        for how in ((), ("-m", "kitsune.profiler.memory_tracker"))
    )
    assert tracked.stderr == plain.stderr
    assert tracked.returncode == plain.returncode == 1
    assert tracked.stdout.startswith(plain.stdout)
    assert RESIDENT in tracked.stdout
