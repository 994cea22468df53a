"""Which environment variables a measuring process sees, and how it is cut off from the network."""

import logging

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kitsune.errors import SettingsError
from tuner.sandbox import confinement
from tuner.sandbox.confinement import UNCONFINED, Means, confinement_here, confinement_of, environment_of, runs_code

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
