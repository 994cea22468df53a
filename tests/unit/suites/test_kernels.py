"""Suite kernels: which cases there are, how shards part them, and that a failing arm leaves the others alone."""

import argparse

import pytest
import torch

from benchmarks import kernels
from benchmarks.kernel_cases import KERNELS
from benchmarks.kernel_runs import DTYPES
from benchmarks.kernels import Graphed, Shard, cases_of, measure

ALL = cases_of(KERNELS, DTYPES)


def test_every_case_has_a_name_of_its_own_in_three_parts():
    names = [case.name for case in ALL]
    assert len(set(names)) == len(names)
    assert all(len(name.split("/")) == 3 for name in names)


def test_only_what_is_asked_for_is_measured():
    assert {case.kernel for case in cases_of(["rope"], DTYPES)} == {"rope"}
    assert {case.dtype for case in cases_of(KERNELS, ["bf16"])} == {"bf16"}
    assert cases_of(["adamw"], ["bf16"]) == []


@pytest.mark.parametrize("count", [1, 2, 4, 7])
def test_shards_part_the_cases(count):
    parts = [Shard(number, count).of(ALL) for number in range(1, count + 1)]
    assert sorted(case.name for part in parts for case in part) == sorted(case.name for case in ALL)
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


def test_a_shard_is_written_as_one_of_several():
    assert Shard.parse("2/4") == Shard(2, 4)
    for text in ("", "2", "0/4", "5/4", "a/b", "1/"):
        with pytest.raises(argparse.ArgumentTypeError, match="1/4"):
            Shard.parse(text)


@pytest.fixture
def on_cpu(monkeypatch):
    """`prepare` without a GPU: what builds and runs is timed as if it took 1 ms, twice in a graph."""

    def prepare(name, build):
        run = build()
        run()
        return Graphed(name, lambda: None, 0.0, 8, runs=2, run=run)

    def interleave(arms, rounds):
        for arm in arms:
            arm.step_ms += [1.0] * rounds

    monkeypatch.setattr(kernels, "DEVICE", torch.device("cpu"))
    monkeypatch.setattr(kernels, "prepare", prepare)
    monkeypatch.setattr(kernels, "interleave", interleave)


def builds(**functions):
    def runs_of(self, device):
        return {name: lambda run=run: run for name, run in functions.items()}

    return runs_of


def test_a_line_holds_us_of_a_run(on_cpu, monkeypatch):
    monkeypatch.setattr(kernels.KernelCase, "builds", builds(eager=lambda: None))
    (line,) = measure(ALL[0], 3)
    assert line["case"] == ALL[0].name
    assert line["us"] == [500.0] * 3
    assert line["peak_bytes"] == 8


def test_an_arm_that_fails_says_so_and_leaves_the_others_alone(on_cpu, monkeypatch, capsys):
    def refuse():
        raise torch.OutOfMemoryError("no room\nat all")

    monkeypatch.setattr(kernels.KernelCase, "builds", builds(eager=lambda: None, inductor=refuse, kitsune=lambda: None))
    lines = list(measure(ALL[0], 1))
    assert {line["arm"]: line["notes"] for line in lines} == {
        "eager": "",
        "kitsune": "",
        "inductor": "failed: OutOfMemoryError: no room",
    }
    for line in lines:
        kernels.show(line)
    shown = capsys.readouterr()
    assert "failed: OutOfMemoryError: no room" in shown.err
    assert "500.00 us" in shown.out


def test_inputs_that_cannot_be_made_fail_the_whole_case(on_cpu, monkeypatch):
    def refuse(self, device):
        raise torch.OutOfMemoryError("no room")

    monkeypatch.setattr(kernels.KernelCase, "builds", refuse)
    (line,) = measure(ALL[0], 1)
    assert (line["arm"], line["us"]) == ("all", [])
