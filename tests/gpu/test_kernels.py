"""What torch.profiler sees of kernels, again and again in a process, and beside what the user looks at."""

import torch

from kitsune.launches.execution.kernel_trace import kernels_of

LOOKS = 5


def counted(device):
    x = torch.randn(64, 64, device=device)
    return kernels_of(lambda: x.exp().tanh().relu()).total()


def test_each_look_sees_all_kernels_between_captures(device):
    x = torch.randn(64, 64, device=device)
    assert counted(device) == 3
    for _ in range(LOOKS):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            x.exp_()
        assert kernels_of(graph.replay).total() == 1
        assert counted(device) == 3


def test_a_look_sees_kernels_after_one_of_the_users_and_the_user_after_it(device):
    x = torch.randn(64, 64, device=device)
    for _ in range(2):
        with torch.profiler.profile() as profiled:
            x.exp()
            torch.cuda.synchronize()
        on_gpu = [e for e in profiled.events() if e.device_type == torch.autograd.DeviceType.CUDA]
        assert len([e for e in on_gpu if "Mem" not in e.name]) == 1
        assert counted(device) == 3
