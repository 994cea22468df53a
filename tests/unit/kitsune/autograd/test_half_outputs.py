"""Outputs in half precision are fp32 tensors to a loop, whatever it does with them; a loss reads them as they are."""

import copy
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from kitsune.autograd.half_outputs import FusedLoss, HalfOutput, StaticOutputs, stays_half

CLASSES = 100
TARGET = torch.randint(0, CLASSES, (4, 7), generator=torch.Generator().manual_seed(0))


class Head:
    """A product under autocast, whose output is given to the loop by `give`."""

    def __init__(self):
        torch.manual_seed(0)
        self.weight = nn.Parameter(torch.randn(16, CLASSES))
        self.x = torch.randn(4, 7, 16)
        self.compiled = []
        self.outputs = StaticOutputs(FusedLoss(self._compiled))

    def half(self):
        with torch.autocast("cpu", torch.bfloat16):
            return self.x @ self.weight

    def give(self):
        return self.outputs.output(self.half())

    def _compiled(self, function):
        self.compiled.append(function)
        return function


def flat(output, **options):
    return F.cross_entropy(output.view(-1, CLASSES), TARGET.view(-1), **options)


FUSED = {
    "flat": flat,
    "classes in the middle": lambda output: F.cross_entropy(output.transpose(1, 2), TARGET),
    "a module": lambda output: nn.CrossEntropyLoss(label_smoothing=0.1)(output.flatten(0, 1).float(), TARGET.flatten()),
    "by name": lambda output: F.cross_entropy(
        input=output.reshape(-1, CLASSES), target=TARGET.view(-1), reduction="sum"
    ),
    "ignored targets": lambda output: flat(output, ignore_index=3),
    "probabilities": lambda output: (
        F.cross_entropy(output[..., :], torch.softmax(torch.ones(4, CLASSES), -1))
        if output.dim() == 2
        else F.cross_entropy(output.view(-1, CLASSES), torch.full((28, CLASSES), 1 / CLASSES))
    ),
}


def hooked(output):
    output.register_hook(lambda gradient: gradient * 3)
    return flat(output)


def written(output):
    output.mul_(2)
    return flat(output)


def written_beside_a_view(output):
    view = output.view(-1, CLASSES)
    output.mul_(2)
    return F.cross_entropy(view, TARGET.view(-1))


def written_through_a_view(output):
    output.view(-1, CLASSES).mul_(2)
    return flat(output)


def read_first(output):
    assert output.argmax(-1).shape == TARGET.shape
    return flat(output)


READ = {
    "another loss": lambda output: output.pow(2).mean(),
    "shifted": lambda output: F.cross_entropy(output[:, :-1].contiguous().view(-1, CLASSES), TARGET[:, 1:].reshape(-1)),
    "weights of classes": lambda output: flat(output, weight=torch.linspace(1, 2, CLASSES)),
    "a list": lambda output: torch.stack([output, output]).mean(),
    "a hook": hooked,
    "read first": read_first,
    "written": written,
    "written beside a view": written_beside_a_view,
    "written through a view": written_through_a_view,
    "an operator": lambda output: (1.0 - output).square().mean(),
    "a target that trains": lambda output: F.cross_entropy(
        output.view(-1, CLASSES), torch.full((28, CLASSES), 1 / CLASSES, requires_grad=True)
    ),
}


def result(use, head, output):
    loss = use(output)
    loss.backward()
    return loss.detach(), head.weight.grad


@pytest.mark.parametrize("name", [*FUSED, *READ])
def test_losses_and_gradients_are_those_of_an_fp32_tensor(name):
    use = {**FUSED, **READ}[name]
    ours, theirs = Head(), Head()
    loss, gradient = result(use, ours, ours.give())
    plain, plain_gradient = result(use, theirs, theirs.half().float())
    assert type(loss) is torch.Tensor
    assert torch.equal(loss, plain)
    assert torch.equal(gradient, plain_gradient)
    assert bool(ours.compiled) == (name in FUSED)


def test_a_loss_beside_another_use():
    def both(output):
        return flat(output) + output.square().mean()

    ours, theirs = Head(), Head()
    loss, gradient = result(both, ours, ours.give())
    plain, plain_gradient = result(both, theirs, theirs.half().float())
    assert torch.equal(loss, plain)
    torch.testing.assert_close(gradient, plain_gradient, rtol=1e-2, atol=1e-3)


def test_what_it_says_of_itself():
    output = Head().give()
    assert output.dtype == torch.float32
    assert (output.shape, output.size(-1), output.dim(), len(output)) == ((4, 7, CLASSES), CLASSES, 3, 4)
    assert output.requires_grad
    assert output.device.type == "cpu"
    assert isinstance(output, torch.Tensor)
    assert output.float() is output
    assert output.to(torch.float32) is output
    assert output.read is None
    assert "dtype=torch.bfloat16" not in str(output)


def test_what_is_read_is_a_plain_tensor():
    head = Head()
    output = head.give()
    for found in (output.detach(), output + 1, output.cpu(), output[0], copy.deepcopy(output.detach())):
        assert type(found) is torch.Tensor
        assert found.dtype == torch.float32
    assert torch.equal(output.detach(), head.half().float())


def test_options_have_one_function_each():
    head = Head()
    for smoothing in (0.0, 0.1, 0.0, 0.1):
        flat(head.give(), label_smoothing=smoothing)
    assert len(head.compiled) == 2


def test_a_loss_that_does_not_compile_is_computed_as_given():
    def fails(_):
        def call(*_):
            raise RuntimeError("no compiler")

        return call

    head = Head()
    head.outputs = StaticOutputs(FusedLoss(fails))
    assert torch.equal(flat(head.give()), flat(head.half().float()))


def test_a_mistake_of_the_user_raises_what_it_always_raised():
    head = Head()
    with pytest.raises(ValueError, match="Expected input batch_size"):
        F.cross_entropy(head.give().view(-1, CLASSES), TARGET.view(-1)[:-1])


def test_what_is_held_is_copied_before_its_memory_is_written():
    head = Head()
    memory = head.half().detach()
    before = memory.float()
    given, view, read, gone = (head.outputs.output(memory.detach()) for _ in range(4))
    flattened, values = view.view(-1, CLASSES), read.detach()
    del gone
    head.outputs.leave_memory()
    memory.fill_(math.nan)
    for found in (given.detach(), flattened.detach().view(4, 7, CLASSES), values):
        assert torch.equal(found, before)
    assert flat(given).isfinite()
    assert head.compiled == []


def test_only_large_outputs_in_half_precision_stay_so():
    large = torch.zeros(2**23, dtype=torch.bfloat16, requires_grad=True)
    assert stays_half(large)
    assert not stays_half(large[1:])
    assert not stays_half(large.float())
    assert not stays_half(large.detach())
    assert not stays_half(None)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")
def test_code_that_the_user_has_compiled_reads_it():
    head = Head()
    compiled = torch.compile(lambda output, target: F.cross_entropy(output.view(-1, CLASSES), target), backend="eager")
    assert torch.equal(compiled(head.give(), TARGET.view(-1)), flat(head.half().float()))


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(context, given):
        return given * 2

    @staticmethod
    def backward(context, gradient):
        return gradient * 2


def test_a_function_of_the_users_own_gets_its_gradient():
    ours, theirs = Head(), Head()
    loss, gradient = result(lambda output: Doubled.apply(output).sum(), ours, ours.give())
    plain, plain_gradient = result(lambda output: Doubled.apply(output).sum(), theirs, theirs.half().float())
    assert torch.equal(loss, plain)
    assert torch.equal(gradient, plain_gradient)


def test_it_is_a_tensor_of_this_class_until_it_is_read():
    assert type(Head().give()) is HalfOutput
