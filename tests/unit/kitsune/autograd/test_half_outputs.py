"""Outputs in half precision are fp32 tensors to a loop, whatever it does with them; a loss reads them as they are."""

import copy
import math
import sys

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from kitsune.autograd.fused_loss import FusedLoss
from kitsune.autograd.half_outputs import HalfOutput, StaticOutputs, stays_half

CLASSES = 100
TARGET = torch.randint(0, CLASSES, (4, 7), generator=torch.Generator().manual_seed(0))


class Counted(FusedLoss):
    """How many losses the kernel has computed."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def forward(self, *given):
        self.count += 1
        return super().forward(*given)


class Head:
    """A product under autocast, whose output is given to the loop by `give`."""

    def __init__(self):
        torch.manual_seed(0)
        self.weight = nn.Parameter(torch.randn(16, CLASSES))
        self.x = torch.randn(4, 7, 16)
        self.fused = Counted()
        self.outputs = StaticOutputs(self.fused)

    def half(self):
        with torch.autocast("cpu", torch.bfloat16):
            return self.x @ self.weight

    def give(self):
        return self.outputs.output(self.half())


def flat(output, **options):
    return F.cross_entropy(output.view(-1, CLASSES), TARGET.view(-1), **options)


def read_first(output):
    assert output.argmax(-1).shape == TARGET.shape
    return flat(output)


FUSED = {
    "flat": flat,
    "classes in the middle": lambda output: F.cross_entropy(output.transpose(1, 2), TARGET),
    "a module": lambda output: nn.CrossEntropyLoss(label_smoothing=0.1)(output.flatten(0, 1).float(), TARGET.flatten()),
    "by name": lambda output: F.cross_entropy(
        input=output.reshape(-1, CLASSES), target=TARGET.view(-1), reduction="sum"
    ),
    "read first": read_first,
    "ignored targets": lambda output: flat(output, ignore_index=3),
}


def probabilities(output):
    return F.cross_entropy(output.view(-1, CLASSES), torch.full((28, CLASSES), 1 / CLASSES))


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


READ = {
    "probabilities": probabilities,
    "another loss": lambda output: output.pow(2).mean(),
    "shifted": lambda output: F.cross_entropy(output[:, :-1].contiguous().view(-1, CLASSES), TARGET[:, 1:].reshape(-1)),
    "weights of classes": lambda output: flat(output, weight=torch.linspace(1, 2, CLASSES)),
    "a list": lambda output: torch.stack([output, output]).mean(),
    "a hook": hooked,
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
    torch.testing.assert_close(loss, plain)
    is_fused = name in (*FUSED, "a hook")
    # The gradient of the values is rounded to bf16 by the kernel, and by the cast: where it is small, by another bit.
    if is_fused:
        torch.testing.assert_close(gradient, plain_gradient, rtol=1e-2, atol=1e-2)
    else:
        assert torch.equal(gradient, plain_gradient)
    assert ours.fused.count == int(is_fused)


def test_a_loss_beside_another_use():
    def both(output):
        return flat(output) + output.square().mean()

    ours, theirs = Head(), Head()
    loss, gradient = result(both, ours, ours.give())
    plain, plain_gradient = result(both, theirs, theirs.half().float())
    torch.testing.assert_close(loss, plain)
    torch.testing.assert_close(gradient, plain_gradient, rtol=1e-2, atol=1e-3)


class Graph:
    """A head whose output's gradient is read in a memory of its own."""

    def __init__(self):
        self.head = Head()
        self.half = self.head.half().detach().requires_grad_()
        self.memory = torch.zeros_like(self.half)
        self.outputs = StaticOutputs(self.head.fused, self.memory)
        self.output = self.outputs.output(self.half)


@pytest.mark.parametrize("name", ["flat", "a module", "by name", "read first"])
def test_the_gradient_is_written_where_the_graph_reads_it(name):
    ours, theirs = Graph(), Graph()
    FUSED[name](ours.output).backward()
    FUSED[name](theirs.half.float()).backward()
    assert ours.half.grad.data_ptr() == ours.memory.data_ptr()
    torch.testing.assert_close(ours.memory, theirs.half.grad, rtol=1e-2, atol=1e-3)


@pytest.mark.parametrize("name", ["another loss", "shifted", "a list", "a hook", "written", "weights of classes"])
def test_another_gradient_is_right_wherever_it_is(name):
    ours, theirs = Graph(), Graph()
    READ[name](ours.output).backward()
    READ[name](theirs.half.float()).backward()
    torch.testing.assert_close(ours.half.grad, theirs.half.grad, rtol=1e-2, atol=1e-3)


def test_of_two_losses_one_writes_there():
    ours, theirs = Graph(), Graph()
    for graph, output in ((ours, ours.output), (theirs, theirs.half.float())):
        (flat(output) + 2 * flat(output, label_smoothing=0.2)).backward()
        assert graph.half.grad is not None
    torch.testing.assert_close(ours.half.grad, theirs.half.grad, rtol=1e-2, atol=1e-3)


def test_a_metric_leaves_the_memory_to_the_loss():
    graph = Graph()
    with torch.no_grad():
        flat(graph.output)
    flat(graph.output).backward()
    assert graph.half.grad.data_ptr() == graph.memory.data_ptr()


def test_a_second_backward_leaves_the_gradient_of_the_first():
    graph = Graph()
    loss = flat(graph.output)
    first, second = (torch.autograd.grad(loss, graph.half, retain_graph=True)[0] for _ in range(2))
    assert first.data_ptr() == graph.memory.data_ptr() != second.data_ptr()
    assert torch.equal(first, second)


def test_a_gradient_that_the_loop_keeps_is_copied_before_another_is_written_there():
    graph = Graph()
    graph.output.retain_grad()
    flat(graph.output).backward()
    kept = graph.output.grad
    wanted = graph.memory.float()
    graph.outputs.leave_gradient()
    graph.memory.zero_()
    assert torch.equal(kept + 0, wanted)


def test_a_loss_of_an_earlier_forward_has_its_values_and_writes_elsewhere():
    ours, theirs = Graph(), Graph()
    loss = flat(ours.output)
    wanted = flat(theirs.half.float())
    ours.outputs.end()
    with torch.no_grad():
        ours.half.zero_()  # as the next forward does
    (gradient,) = torch.autograd.grad(loss, ours.half)
    torch.testing.assert_close(gradient, torch.autograd.grad(wanted, theirs.half)[0], rtol=1e-2, atol=1e-3)
    assert not ours.memory.any()


def test_what_a_loss_reads_is_let_go_after_its_backward():
    graph = Graph()
    loss = flat(graph.output)
    graph.output = None
    loss.backward()
    held = [reference() for reference in graph.outputs._memories]
    assert held == [None, None]
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()


def test_losses_of_rows_may_be_weighted_in_place():
    ours, theirs = Graph(), Graph()
    for output in (ours.output, theirs.half.float()):
        losses = F.cross_entropy(output.transpose(1, 2), TARGET, reduction="none")
        losses *= torch.linspace(0, 1, 7)
        losses[0] = 0
        losses.sum().backward()
    torch.testing.assert_close(ours.half.grad, theirs.half.grad, rtol=1e-2, atol=1e-2)


def halves(output):
    one, other = output.split(2)
    one.mul_(2)
    other.zero_()
    return flat(output)


def rows(output):
    for row in output:
        row.add_(1)
    return flat(output * 2)


def strided(output):
    output.as_strided((2, 3), (CLASSES, 1)).zero_()
    return flat(output)


def replaced(output):
    output.data = output.data / 2
    return flat(output)


@pytest.mark.parametrize("use", [halves, rows, strided, replaced])
def test_writes_by_views_that_it_does_not_follow(use):
    ours, theirs = Graph(), Graph()
    with torch.no_grad():
        found, wanted = use(ours.output.detach()), use(theirs.half.float())
    torch.testing.assert_close(found, wanted)


def test_a_target_that_is_written_before_the_backward_is_told():
    target = TARGET.view(-1).clone()
    loss = F.cross_entropy(Head().give().view(-1, CLASSES), target)
    target.zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_what_it_says_of_itself():
    output = Head().give()
    assert output.dtype == torch.float32
    assert (output.shape, output.size(-1), output.dim(), len(output)) == ((4, 7, CLASSES), CLASSES, 3, 4)
    assert output.requires_grad
    assert output.device.type == "cpu"
    assert isinstance(output, torch.Tensor)
    assert output.float() is output
    assert output.to(torch.float32) is output
    assert output.memory._single is None
    assert "dtype=torch.bfloat16" not in str(output)


def test_what_is_read_is_a_plain_tensor():
    head = Head()
    output = head.give()
    for found in (output + 1, output.double().float(), output.relu(), copy.deepcopy(output.detach())):
        assert type(found) is torch.Tensor
        assert found.dtype == torch.float32
    assert torch.equal(output.detach(), head.half().float())


def test_where_the_kernel_fails_torch_computes_the_loss_from_then_on(monkeypatch):
    head, asked = Head(), []

    def fails(*_):
        asked.append(1)
        raise RuntimeError("no kernel image is available")

    monkeypatch.setattr(head.fused, "forward", fails)
    for _ in range(2):
        assert torch.equal(flat(head.give()), flat(head.half().float()))
    assert asked == [1]


def test_without_triton_there_is_no_such_loss(monkeypatch):
    assert FusedLoss.if_possible() is not None
    monkeypatch.setitem(sys.modules, "triton", None)
    monkeypatch.delitem(sys.modules, "kitsune.kernels.cross_entropy")
    assert FusedLoss.if_possible() is None


def test_a_gradient_of_its_gradient_is_refused():
    output = Head().give()
    (slope,) = torch.autograd.grad(flat(output), output, create_graph=True)
    with pytest.raises(RuntimeError, match="does not require grad"):
        slope.sum().backward()


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
    head.outputs.leave_graph()
    memory.fill_(math.nan)
    for found in (given.detach(), flattened.detach().view(4, 7, CLASSES), values):
        assert torch.equal(found, before)
    assert flat(given).isfinite()


def test_only_large_outputs_in_bf16_stay_so():
    large = torch.zeros(2**23, dtype=torch.bfloat16, requires_grad=True)
    assert stays_half(large)
    assert not stays_half(large[1:])
    assert not stays_half(large.float())
    assert not stays_half(large.half())
    assert not stays_half(large.detach())
    assert not stays_half(None)


def metric_before(output):
    with torch.no_grad():
        assert (output.argmax(-1) == TARGET).float().mean().isfinite()
    return flat(output) + 0.1 * output.logsumexp(-1).pow(2).mean()


def metric_in_inference_mode(output):
    with torch.inference_mode():
        assert flat(output).isfinite()
    return flat(output)


def view_without_gradient(output):
    with torch.no_grad():
        view = output.view(-1, CLASSES)
    return flat(output) + view.square().mean()


def checkpointed(output):
    return checkpoint(flat, output, use_reentrant=True)


def scripted(output):
    return torch.jit.trace(lambda given: given.square().mean(), torch.ones(4, 7, CLASSES))(output)


def by_name(output):
    rows = torch.reshape(input=output, shape=(-1, CLASSES))
    return torch.flatten(input=rows, start_dim=0).square().mean()


def mapped(output):
    return torch.func.vmap(F.cross_entropy)(output, TARGET).mean()


def many_losses(output):
    return sum(flat(output) for _ in range(60)) / 60


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
@pytest.mark.parametrize(
    "use",
    [
        metric_before,
        metric_in_inference_mode,
        view_without_gradient,
        checkpointed,
        scripted,
        by_name,
        mapped,
        many_losses,
    ],
)
def test_whatever_a_loop_does_the_numbers_are_those_of_an_fp32_tensor(use):
    ours, theirs = Head(), Head()
    loss, gradient = result(use, ours, ours.give())
    plain, plain_gradient = result(use, theirs, theirs.half().float())
    torch.testing.assert_close(loss, plain)
    torch.testing.assert_close(gradient, plain_gradient, rtol=2e-2, atol=1e-3)


def test_the_gradient_of_the_output_itself_is_there_also_after_the_loss():
    ours, theirs = Head(), Head()
    seen = []
    for head, output in ((ours, ours.give()), (theirs, theirs.half().float())):
        loss = flat(output)
        output.retain_grad()
        output.register_hook(lambda gradient: seen.append(gradient.sum().item()))
        (asked,) = torch.autograd.grad(loss, output, retain_graph=True)
        loss.backward()
        seen.append((asked.float().abs().sum().item(), output.grad.abs().sum().item()))
        assert output.grad.dtype == torch.float32
        assert head.weight.grad is not None
    half = len(seen) // 2
    for own, other in zip(seen[:half], seen[half:], strict=True):
        assert own == pytest.approx(other, rel=1e-2, abs=1e-2)


class Duck:
    """Acts as a tensor, as operators of other libraries do."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        return type(args[0])


class Other(torch.Tensor):
    """A subclass of a library."""


def test_other_types_are_asked_as_ever():
    assert torch.matmul(Head().give(), Duck()) is torch.Tensor
    target = TARGET.view(-1).as_subclass(Other)
    assert type(F.cross_entropy(Head().give().view(-1, CLASSES), target)) is Other


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor", "ignore:.torch.jit.script_method. is deprecated")
@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
def test_code_that_the_user_has_compiled_reads_it_and_is_compiled_once(backend):
    torch._dynamo.reset()

    def loss(output, target):
        return F.cross_entropy(output.view(-1, CLASSES), target) + 0.1 * output.logsumexp(-1).mean()

    compiled = torch.compile(loss, backend=backend, fullgraph=True)
    for _ in range(12):
        ours, theirs = Head(), Head()
        found, gradient = result(lambda output: compiled(output, TARGET.view(-1)), ours, ours.give())
        plain, plain_gradient = result(lambda output: loss(output, TARGET.view(-1)), theirs, theirs.half().float())
        torch.testing.assert_close(found, plain)
        torch.testing.assert_close(gradient, plain_gradient, rtol=2e-2, atol=1e-3)


def test_as_numbers_and_in_files(tmp_path):
    head = Head()
    expected = head.half().float().detach()
    assert head.give().tolist() == expected.tolist()
    assert torch.equal(torch.from_numpy(head.give().detach().numpy()), expected)
    torch.save(head.give().detach(), tmp_path / "output")
    assert torch.equal(torch.load(tmp_path / "output"), expected)
    assert head.give().half().dtype == torch.float16


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


@pytest.mark.parametrize("of", [lambda y: y[:1, 0].expand(7, -1), lambda y: y[0, 0].expand_as(y).flatten(0, 1)])
def test_a_row_that_is_read_against_several_targets_gets_the_sum_of_their_gradients(of):
    """Its gradient is not written in place: the rows of an expanded tensor are one."""
    head, target = Head(), TARGET.view(-1)
    output = head.half()
    head.outputs = StaticOutputs(head.fused, torch.zeros_like(output))
    given = head.outputs.output(output)
    rows = of(given)
    (found,) = torch.autograd.grad(F.cross_entropy(rows, target[: len(rows)]), head.weight)
    plain = of(head.half().float())
    (wanted,) = torch.autograd.grad(F.cross_entropy(plain, target[: len(rows)]), head.weight)
    torch.testing.assert_close(found, wanted, rtol=2e-2, atol=1e-3)
