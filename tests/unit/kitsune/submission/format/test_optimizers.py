from typing import get_args

import pytest
import torch
from torch import nn

from kitsune.errors import ArchiveError, ExportError
from kitsune.submission.format.document import Group, OptimizerEntry, OptimizerName
from kitsune.submission.format.optimizers import build_optimizer, describe_optimizer


def described(optimizer, tensors):
    return describe_optimizer(optimizer, {id(tensor): index for index, tensor in enumerate(tensors)})


@pytest.mark.parametrize("name", get_args(OptimizerName))
def test_optimizer_is_rebuilt_with_its_groups_and_steps_alike(name):
    torch.manual_seed(0)
    ours = [nn.Parameter(torch.randn(3, 4)), nn.Parameter(torch.randn(4, 3))]
    theirs = [nn.Parameter(tensor.detach().clone()) for tensor in ours]
    groups = [
        {"params": [ours[1]], "lr": 0.05},
        {"params": [ours[0]], "weight_decay": 0.25} if name != "Rprop" else {"params": [ours[0]]},
    ]
    original = getattr(torch.optim, name)(groups, lr=0.01)
    rebuilt = build_optimizer(described(original, ours), theirs)
    assert type(rebuilt) is type(original)
    for _ in range(3):
        for one, other in zip(ours, theirs, strict=True):
            one.grad = torch.randn_like(one)
            other.grad = one.grad.clone()
        original.step()
        rebuilt.step()
    torch.testing.assert_close(theirs, ours, rtol=0, atol=0)


def test_groups_keep_every_option():
    tensors = [nn.Parameter(torch.ones(2))]
    original = torch.optim.AdamW(tensors, lr=torch.tensor(0.25), betas=(0.5, 0.75), amsgrad=True, foreach=False)
    torch.optim.lr_scheduler.StepLR(original, 3)
    (group,) = build_optimizer(described(original, tensors), tensors).param_groups
    assert (group["lr"], tuple(group["betas"]), group["amsgrad"], group["foreach"]) == (0.25, (0.5, 0.75), True, False)


def test_capturable_is_dropped_where_there_is_no_gpu():
    tensors = [nn.Parameter(torch.ones(2))]
    entry = OptimizerEntry(name="Adam", groups=(Group(parameters=(0,), options={"capturable": True}),))
    rebuilt = build_optimizer(entry, tensors)
    tensors[0].grad = torch.ones(2)
    rebuilt.step()
    assert rebuilt.param_groups[0]["capturable"] is False


def test_foreign_class_and_option_are_refused():
    tensors = [nn.Parameter(torch.ones(2))]
    foreign = type("SGD", (torch.optim.SGD,), {})
    with pytest.raises(ExportError, match="SGD cannot be exported"):
        described(foreign(tensors), tensors)
    odd = torch.optim.Adam(tensors)
    odd.param_groups[0]["eps"] = object()
    with pytest.raises(ExportError, match="eps, a object, cannot"):
        described(odd, tensors)


def test_options_that_torch_refuses_are_archive_errors():
    tensors = [nn.Parameter(torch.ones(2))]
    with pytest.raises(ArchiveError, match="no option betas"):
        build_optimizer(OptimizerEntry(name="SGD", groups=(Group(parameters=(0,), options={"betas": 1.0}),)), tensors)
    with pytest.raises(ArchiveError, match="SGD cannot be built"):
        build_optimizer(OptimizerEntry(name="SGD", groups=(Group(parameters=(0,), options={"lr": -1.0}),)), tensors)
    with pytest.raises(ArchiveError, match="Adam cannot be built"):
        build_optimizer(OptimizerEntry(name="Adam", groups=(Group(parameters=(0,), options={"betas": ()}),)), tensors)
