"""What the names of a Triton kernel's arguments say of what it reads and writes. Kernels that run are in tests/gpu."""

from types import SimpleNamespace

import pytest
import torch
from torch._inductor.runtime.hints import HeuristicType

from kitsune.launches.recording.triton_adapter import _inductors

NAMES = ["in_ptr0", "arg_A", "out_ptr0", "in_out_ptr0", "xnumel"]


@pytest.mark.parametrize(
    ("kind", "mutated", "reads", "writes"),
    [
        (HeuristicType.POINTWISE, [], (0, 1, 3), (2, 3)),
        (HeuristicType.POINTWISE, ["in_ptr0", "out_ptr0"], (0, 1, 2, 3), (0, 2, 3)),
        (HeuristicType.TEMPLATE, [], (0, 1, 3), (2, 3)),
        (HeuristicType.USER_AUTOTUNE, [], (0, 1, 2, 3), (0, 1, 2, 3)),
    ],
)
def test_of_inductors_kernels_names_tell_and_of_users_nothing(kind, mutated, reads, writes):
    seen, ran = [], []
    function = SimpleNamespace(__name__="kernel", arg_names=NAMES)
    tuner = SimpleNamespace(fn=function, mutated_arg_names=mutated, heuristic_type=kind)
    given = (*[torch.ones(2) for _ in range(4)], 2)
    _inductors(lambda *arguments, **named: ran.append(named), seen.append, tuner, *given, stream=7)
    (launch,) = seen
    assert (launch.name, launch.reads, launch.writes) == ("kernel", reads, writes)
    assert launch.arguments == given
    assert ran == [{"stream": 7}]
