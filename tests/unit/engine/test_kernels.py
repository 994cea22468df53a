import os
from collections import Counter
from contextlib import suppress

import pytest
import torch
from torch._C._autograd import DeviceType
from torch.autograd.profiler import profile

from kitsune.engine.kernels import TEARDOWN, can_finalize, cupti_finalized, difference, ran_on


def test_what_ran_is_told_in_order_without_the_names_of_parts():
    x = torch.ones(1000)
    with profile(use_kineto=True) as profiled, torch.profiler.record_function("a part"):
        x.exp()
        x.tanh()
    kernels = ran_on(DeviceType.CPU, profiled)
    names = [kernel.name for kernel in kernels if kernel.name.startswith("aten::")]
    assert names == ["aten::exp", "aten::tanh"]
    assert "a part" not in [kernel.name for kernel in kernels]
    assert all(kernel.took_us > 0 for kernel in kernels if kernel.name in names)
    assert [kernel.begin_us for kernel in kernels] == sorted(kernel.begin_us for kernel in kernels)
    assert ran_on(DeviceType.CUDA, profiled) == []


def test_kernels_that_are_missing_are_told_and_more_are_none_of_our_business():
    assert difference(Counter(a=2, b=1), Counter(b=1, a=2)) == ""
    assert difference(Counter(a=1), Counter(a=1, b=3)) == ""
    told = difference(Counter(gemm=3, copy=1), Counter(gemm=1))
    assert told == "3 kernels are launched out of our sight, among them 2 of gemm"


@pytest.mark.parametrize(("cuda", "expected"), [(None, False), ("12.8", False), ("13.0", True), ("14.1", True)])
def test_cupti_is_finalized_where_graphs_do_not_crash_for_it(cuda, expected):
    assert can_finalize(cuda) == expected


@pytest.mark.parametrize("before", [None, "0"])
def test_what_the_user_says_of_cupti_holds_again_after_a_look(monkeypatch, before):
    monkeypatch.delenv(TEARDOWN, raising=False)
    if before is not None:
        monkeypatch.setenv(TEARDOWN, before)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    with suppress(ZeroDivisionError), cupti_finalized() as is_finalized:
        assert (is_finalized, os.environ[TEARDOWN]) == (True, "1")
        raise ZeroDivisionError
    assert os.environ.get(TEARDOWN) == before


def test_cupti_stays_where_it_cannot_be_finalized(monkeypatch):
    monkeypatch.delenv(TEARDOWN, raising=False)
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    with cupti_finalized() as is_finalized:
        assert not is_finalized
        assert TEARDOWN not in os.environ
