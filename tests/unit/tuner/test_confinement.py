"""What of our environment a measuring process sees."""

import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tuner.confinement import SECRETS, environment_of, runs_code

CLOUD = {"AWS_SECRET_ACCESS_KEY": "a", "HF_TOKEN": "b", "SSH_AUTH_SOCK": "c", "WANDB_API_KEY": "d", "PGPASSWORD": "e"}
NEEDED = {"PATH": "/bin", "HOME": "/root", "CUDA_VISIBLE_DEVICES": "1", "TORCHINDUCTOR_COMPILE_THREADS": "2"}


@pytest.mark.parametrize("workload", ["zoo:resnet18?batch=4", "/tmp/depot/0a1b.ksn"])
def test_an_archive_or_a_model_of_the_zoo_sees_what_running_it_needs(workload):
    assert not runs_code(workload)
    assert environment_of({**CLOUD, **NEEDED}, workload) == NEEDED


def test_a_script_of_the_users_own_sees_all_but_our_secrets():
    assert environment_of({**CLOUD, **NEEDED, "KITSUNE_TOKEN": "ksn_"}, "train.py:make") == {**CLOUD, **NEEDED}


@given(
    given=st.dictionaries(st.sampled_from([*SECRETS, *CLOUD, *NEEDED]) | st.text(min_size=1), st.text()),
    workload=st.sampled_from(["zoo:mlp", "a.ksn", "a.py:make"]),
)
def test_secrets_are_seen_by_nobody_and_nothing_is_made_up(given, workload):
    seen = environment_of(given, workload)
    assert seen.items() <= given.items()
    assert not SECRETS & seen.keys()


def test_a_process_that_crashes_leaves_no_core():
    script = "from tuner.confinement import leave_no_core; leave_no_core(); import resource as r; "
    script += "print(*r.getrlimit(r.RLIMIT_CORE))"
    told = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert told.stdout.split() == ["0", "0"]
