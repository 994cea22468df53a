"""Which environment variables a measuring process sees, and how it is cut off from the network."""

import json
import logging
import re
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kitsune.errors import SettingsError
from tuner.sandbox import confinement, self_test
from tuner.sandbox.confinement import (
    UNCONFINED,
    Confinement,
    Means,
    confinement_here,
    confinement_of,
    environment_of,
    problem_of,
    runs_code,
)

CLOUD = {"AWS_SECRET_ACCESS_KEY": "a", "HF_TOKEN": "b", "SSH_AUTH_SOCK": "c", "WANDB_API_KEY": "d", "PGPASSWORD": "e"}
OURS = {
    "KITSUNE_DATABASE_URL": "f",
    "KITSUNE_POSTGRES_PASSWORD": "g",
    "KITSUNE_TOKEN": "h",
    "KITSUNE_NEW_API_KEY": "i",
}
#: They begin as what is needed does.
ALIKE = {
    "NVIDIA_API_KEY": "j",
    "NVIDIA_BUILD_API_KEY": "k",
    "NV_API_KEY": "l",
    "PYTHON_GITLAB_TOKEN": "m",
    "PYTHONANYWHERE_API_TOKEN": "n",
    "TORCHX_TOKEN": "o",
    "TORCH_HUB_PASSWD": "p",
    "TRITON_CREDENTIALS": "q",
    "NVIDIA_client_secret": "r",
    "KITSUNE_SERVER": "s",
}
NEEDED = {
    "PATH": "/bin",
    "HOME": "/root",
    "CUDA_VISIBLE_DEVICES": "1",
    "TORCHINDUCTOR_COMPILE_THREADS": "2",
    "KITSUNE_HOME": "/k",
}


@pytest.mark.parametrize("workload", ["zoo:resnet18?batch=4", "/tmp/depot/0a1b.ksn"])
def test_an_archive_or_a_model_of_the_zoo_sees_what_running_it_needs(workload):
    assert not runs_code(workload)
    assert environment_of({**CLOUD, **OURS, **ALIKE, **NEEDED}, workload) == NEEDED


def test_a_script_of_the_users_own_sees_all_but_our_secrets():
    own = {**CLOUD, **ALIKE, **NEEDED}
    assert environment_of({**own, **OURS}, "train.py:make") == own


@given(
    given=st.dictionaries(st.sampled_from([*OURS, *CLOUD, *NEEDED]) | st.text(min_size=1), st.text()),
    workload=st.sampled_from(["zoo:mlp", "a.ksn", "a.py:make"]),
)
def test_secrets_are_never_passed_on_and_nothing_is_added(given, workload):
    seen = environment_of(given, workload)
    assert seen.items() <= given.items()
    assert not OURS.keys() & seen.keys()


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


def test_the_memory_is_that_of_the_container_where_it_has_less(monkeypatch, tmp_path):
    machine = confinement.memory_bytes()
    limit = tmp_path / "memory.max"
    monkeypatch.setattr(confinement, "CONTAINER_MEMORY", limit)
    physical = confinement.memory_bytes()
    assert machine <= physical
    for said, expected in (("max\n", physical), ("1048576\n", 2**20), (f"{2**60}\n", physical)):
        limit.write_text(said)
        assert confinement.memory_bytes() == expected


# The network ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def untested(monkeypatch):
    """As in a process that has not looked yet."""
    monkeypatch.delenv("KITSUNE_CONFINE", raising=False)
    confinement._tested.cache_clear()
    yield
    confinement._tested.cache_clear()


@pytest.mark.parametrize("workload", ["train.py:make", "/home/ada/a.ksn.py:make"])
def test_code_of_the_users_own_is_started_as_it_is(workload):
    assert confinement_of(workload, "cpu") is UNCONFINED
    assert UNCONFINED.command(["python", "-m", "tuner.child.main"]) == ["python", "-m", "tuner.child.main"]


def test_an_untrusted_workload_is_started_with_the_best_means_that_work(untested):
    found = confinement_of("zoo:mlp", "cpu")
    assert found == confinement_of("/tmp/a.ksn", "cpu")
    assert problem_of(found, "cpu") is None
    better = list(Means)[: list(Means).index(found.means)]
    assert [reason.partition(":")[0] for reason in found.refused] == [means.value for means in better]
    assert found.has_network == str(found).startswith("archives and models of the zoo are measured with the network: ")


@pytest.mark.parametrize(
    ("allowed", "refused"),
    [(Means.FILTER, 1), (Means.BOUNDS, 2), (Means.NOTHING, 3)],
)
def test_where_the_best_means_fail_the_next_ones_are_taken_and_it_is_said(
    allowed, refused, untested, monkeypatch, caplog
):
    problem = lambda confined, device: None if confined.means is allowed else f"no {device} in here"  # noqa: E731
    monkeypatch.setattr(confinement, "problem_of", problem)
    with caplog.at_level(logging.INFO, "kitsune"):
        found = confinement_here("cuda:1")
        assert confinement_here("cuda:1") is found
    assert found.means is allowed
    assert list(found.refused) == [f"{means.value}: no cuda:1 in here" for means in list(Means)[:refused]]
    (record,) = caplog.records
    assert record.levelno == (logging.INFO if allowed is Means.FILTER else logging.WARNING)
    assert ("no cuda:1 in here" in record.getMessage()) == found.has_network


def test_it_can_be_switched_off(untested, monkeypatch):
    monkeypatch.setenv("KITSUNE_CONFINE", "off")
    found = confinement_of("zoo:mlp", "cpu")
    assert found.command(["python"]) == ["python"]
    assert "KITSUNE_CONFINE is off" in str(found)
    monkeypatch.setenv("KITSUNE_CONFINE", "a little")
    with pytest.raises(SettingsError, match="KITSUNE_CONFINE is 'a little'"):
        confinement_of("zoo:mlp", "cpu")


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
