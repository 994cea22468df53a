"""Checks of the doctor that start processes: all of them on this machine, a child, the self-test of confinement."""

import shutil
import sqlite3
import sys
from importlib.metadata import version

import pytest

from kitsune.cli import doctor
from kitsune.cli.doctor import Status
from tuner.sandbox import confinement
from tuner.sandbox.confinement import Confinement, Means, confinement_here


@pytest.fixture(scope="module")
def here():
    return {check.name: check for check in doctor.checks()}


def test_every_check_answers_once_and_offers_a_way_out(here):
    assert len(here) == len(doctor.CHECKS)
    assert all(check.detail for check in here.values())
    assert {name for name, check in here.items() if not check.fix} == {
        name for name, check in here.items() if check.status == Status.OK
    }


def test_nothing_fails_on_a_machine_that_runs_these_tests(here):
    assert [check for check in here.values() if check.status == Status.FAIL] == []
    assert here["torch"].detail.startswith(version("torch"))
    assert sys.executable in here["python"].detail
    assert sqlite3.sqlite_version in here["sqlite"].detail
    assert here["spawn"].status == Status.OK
    assert here["tuner"].status == Status.OK
    assert "optuna" in here["tuner"].detail


def test_a_check_is_json_and_back(here):
    for check in here.values():
        assert doctor.Check.model_validate_json(check.canonical_json()) == check


def test_a_child_that_says_nothing_is_a_failure(monkeypatch):
    monkeypatch.setattr(sys, "executable", shutil.which("true"))
    assert doctor.check_spawn().status == Status.FAIL


def test_it_is_said_whether_strangers_are_measured_without_a_network(monkeypatch):
    found = confinement_here("cpu")
    check = doctor.check_confinement()
    assert (check.status, check.detail) == (Status.WARN if found.has_network else Status.OK, str(found))
    refused = Confinement(Means.BOUNDS, ("namespaces: not permitted", "filter: no filter for sparc"))
    monkeypatch.setattr(confinement, "confinement_here", lambda device: refused)
    check = doctor.check_confinement()
    assert check.status == Status.WARN
    assert check.detail.endswith("with the network: namespaces: not permitted; filter: no filter for sparc")
