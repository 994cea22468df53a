from collections import Counter

import torch
from torch._C._autograd import DeviceType
from torch.autograd.profiler import profile

from kitsune.launches.execution.kernel_trace import difference, ran_on


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
    assert told == "3 kernels are launched without being recorded, among them 2 of gemm"
