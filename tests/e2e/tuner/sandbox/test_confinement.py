"""Processes that are confined: cores, memory, and the self-test that looks for the network."""

import json
import re
import subprocess
import sys

from tests.unit.tuner.sandbox.test_confinement import untested  # noqa: F401
from tuner.sandbox import confinement, self_test
from tuner.sandbox.confinement import Confinement, Means, confinement_of, problem_of


def test_a_process_that_crashes_leaves_no_core():
    script = "from tuner.sandbox.confinement import leave_no_core; leave_no_core(); import resource as r; "
    script += "print(*r.getrlimit(r.RLIMIT_CORE))"
    told = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert told.stdout.split() == ["0", "0"]


def test_the_memory_of_a_process_on_the_cpu_is_bounded_and_torch_says_what_it_lacked(monkeypatch):
    """A sixteenth of a GiB here, on top of what the process has: torch itself would take half a minute to fill 3/4."""
    script = "import numpy; from tuner.sandbox import confinement; "
    script += "held = int(next(l for l in open('/proc/self/status') if l.startswith('VmData')).split()[1]) * 1024; "
    script += (
        "confinement.memory_bytes = lambda: (held + 2**26) / confinement.MEMORY_SHARE; confinement.bound_memory(); "
    )
    script += "numpy.empty(2**25, 'u1'); numpy.empty(2**27, 'u1')"
    told = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert "Unable to allocate 128. MiB" in told.stderr


def test_an_untrusted_workload_is_started_with_the_best_means_that_work(untested):  # noqa: F811
    found = confinement_of("zoo:mlp", "cpu")
    assert found == confinement_of("/tmp/a.ksn", "cpu")
    assert problem_of(found, "cpu") is None
    better = list(Means)[: list(Means).index(found.means)]
    assert [reason.partition(":")[0] for reason in found.refused] == [means.value for means in better]
    assert found.has_network == str(found).startswith("archives and models of the zoo are measured with the network: ")


def test_a_self_test_that_fails_is_a_problem_with_a_reason(monkeypatch, tmp_path):
    scripts = {
        "print('{')": "the self-test did not run",
        "import sys; sys.exit('no such luck')": "no such luck",
        "import os; os._exit(7)": "the self-test ended with code 7",
        "import time; time.sleep(60)": "the self-test did not run: .*timed out",
        told_by(open=["192.0.2.1"], broken=[]): "192.0.2.1 can still be reached",
        told_by(open=[], broken=["the GPU: gone"]): "measuring would fail: the GPU: gone",
    }
    patient_s = confinement.SELF_TEST_S
    for script, problem in scripts.items():
        monkeypatch.setattr(confinement, "SELF_TEST_S", 2.0 if "sleep" in script else patient_s)
        monkeypatch.setattr(confinement, "SELF_TEST", tmp_path / "script.py")
        (tmp_path / "script.py").write_text(script)
        found = problem_of(Confinement(Means.NAMESPACES), "cpu")
        # where the kernel allows no namespaces, that is the problem
        assert found is not None
        assert re.match(problem, found) or "cannot be confined" in found
    (tmp_path / "script.py").write_text(told_by(open=["192.0.2.1"], broken=[]))
    assert problem_of(Confinement(Means.BOUNDS), "cpu") is None


def told_by(**told: list[str]) -> str:
    return f"print({json.dumps(json.dumps(told))})"


def test_the_self_test_tells_what_is_open_and_what_is_broken(monkeypatch):
    assert "127.0.0.1" in set(self_test.still_open())
    assert list(self_test.broken("cpu")) == []
    monkeypatch.setattr(self_test.ctypes, "CDLL", lambda name: Driver(cuMemAlloc_v2=2))
    assert list(self_test.broken("cuda:0")) == ["the GPU: cuMemAlloc_v2 answered 2"]
    monkeypatch.setattr(self_test.ctypes, "CDLL", lambda name: Driver())
    assert list(self_test.broken("cuda:0")) == ["the GPU: its memory does not hold what was written"]


class Driver:
    """Answers each call with a number, 0 unless told otherwise, and does nothing."""

    def __init__(self, **answers: int) -> None:
        self._answers = answers

    def __getattr__(self, name: str):
        return lambda *arguments: self._answers.get(name, 0)
