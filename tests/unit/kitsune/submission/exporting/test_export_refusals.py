"""Steps that cannot be exported: each is refused by the name of what is in the way, with its line."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from kitsune.errors import ExportError, WorkloadError
from kitsune.submission.exporting.export import to_archive
from kitsune.workload import Workload
from tests.unit.kitsune.submission.layers import MLP
from tests.unit.kitsune.submission.steps import adamw, some_labels


def refusal(model: nn.Module, loss_fn=F.cross_entropy, batch=None, optimizer=None) -> str:
    torch.manual_seed(0)
    batch = batch or (torch.randn(4, 12), torch.randint(0, 5, (4,)))
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ExportError) as caught:
        to_archive(Workload(model, loss_fn, optimizer, batch))
    return str(caught.value)


class Branches(MLP):
    def forward(self, x):
        h = super().forward(x)
        if h.sum() > 0:  # the branch
            h = h * 2
        return h


class Counts(MLP):
    def forward(self, x):
        h = super().forward(x)
        for _ in range(int(h.abs().sum().item()) % 3):  # the loop
            h = h * 2
        return h


class Straight(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.round()

    @staticmethod
    def backward(ctx, gradient):
        return gradient


class Quantized(MLP):
    def forward(self, x):
        return super().forward(Straight.apply(self.first(x)) @ torch.ones(16, 12))


class Strided(MLP):
    def forward(self, x):
        return super().forward(x.as_strided((2, 12), (12, 1))).repeat(2, 1)  # the view


class Numpy(MLP):
    def forward(self, x):
        h = super().forward(x)
        return h * float(h.detach().numpy().max())  # the conversion


def test_failed_export_is_quiet(capfd):
    refusal(Counts())
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("kind", [Branches, Counts])
def test_data_dependent_control_flow_names_its_line(kind):
    message = refusal(kind())
    assert "test_export_refusals.py" in message
    assert "# the branch" in message or "# the loop" in message
    assert "data-dependent" in message
    assert "kitsune tune FILE.py:make_workload" in message


class Clamped(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, gradient):
        return gradient.clamp(-1e6, 1e6) * 2  # no gradient of the example is as large


class Limited(MLP):
    def forward(self, x):
        return super().forward(Clamped.apply(self.first(x)) @ torch.ones(16, 12))


def test_custom_autograd_function_is_refused_also_where_the_example_hides_what_is_lost():
    message = refusal(Limited(p=0.0))
    assert f"custom autograd.Function {__name__}.Clamped ({__file__}:" in message
    assert "its backward is lost" in message
    assert "kitsune tune FILE.py:make_workload" in message


@pytest.mark.parametrize(
    ("hook", "named"),
    [
        (lambda model: model.first.weight.register_hook(lambda gradient: gradient.clamp(-1e6, 1e6)), "first.weight"),
        (lambda model: model.first.bias.register_post_accumulate_grad_hook(lambda parameter: None), "first.bias"),
        (lambda model: model.first.register_full_backward_hook(lambda *_: None), "module first"),
        (lambda model: model.first.register_full_backward_pre_hook(lambda *_: None), "module first"),
    ],
)
def test_hook_on_a_gradient_is_refused_by_name(hook, named):
    model = MLP()
    handle = hook(model)
    message = refusal(model)
    assert named in message
    assert "kitsune tune FILE.py:make_workload" in message
    handle.remove()
    to_archive(Workload(model, F.cross_entropy, adamw(model), (torch.randn(4, 12), some_labels())))


def test_custom_autograd_function_with_another_backward_is_refused():
    message = refusal(Quantized(p=0.0))
    assert "custom autograd.Function" in message
    assert "Straight" in message
    assert "backward is lost" in message
    assert "kitsune tune FILE.py:make_workload" in message


def test_operator_outside_the_allowlist_is_named_with_its_line():
    message = refusal(Strided())
    assert "aten.as_strided.default" in message
    assert "# the view" in message
    assert "kitsune tune FILE.py:make_workload" in message


def test_code_outside_torch_is_named_with_its_line():
    message = refusal(Numpy())
    assert "# the conversion" in message
    assert "numpy" in message


def test_custom_operator_is_named():
    @torch.library.custom_op("kitsunetest::twice", mutates_args=())
    def twice(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    twice.register_fake(torch.empty_like)
    twice.register_autograd(lambda ctx, gradient: gradient * 2)

    class Custom(MLP):
        def forward(self, x):
            return twice(super().forward(x))

    assert "kitsunetest.twice.default" in refusal(Custom(p=0.0))


def test_step_that_fails_by_itself_is_told_apart():
    message = refusal(MLP(), batch=(torch.randn(4, 13), torch.randint(0, 5, (4,))))
    assert "the step itself fails" in message
    assert "layers.py" in message


def test_loss_must_be_one_number():
    with pytest.raises(WorkloadError, match="one element"):
        refusal(MLP(), loss_fn=lambda out, y: out)


def test_loss_must_depend_on_a_parameter():
    assert "no training step" in refusal(MLP(), loss_fn=lambda out, y: out.detach().sum())


def test_optimizer_outside_torch_is_named():
    class Mine(torch.optim.SGD):
        pass

    model = MLP()
    assert "Mine" in refusal(model, optimizer=Mine(model.parameters(), lr=0.1))


def test_optimizer_of_other_parameters_is_refused():
    other = nn.Linear(3, 7)
    message = refusal(MLP(), optimizer=torch.optim.SGD(other.parameters(), lr=0.1))
    assert "2 tensors that are not parameters of the model" in message
    assert "[7, 3]" in message


def test_batch_of_unknown_things_is_named():
    batch = ({"x": torch.randn(4, 12), "when": object()}, None)
    message = refusal(MLP(), batch=batch)
    assert "x['when'] is a object" in message


def test_sparse_tensors_are_refused():
    class Sparse(MLP):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("adjacency", torch.eye(4).to_sparse())

        def forward(self, x):
            return super().forward(self.adjacency @ x)

    assert "kitsune tune FILE.py:make_workload" in refusal(Sparse())


def test_a_sparse_gradient_is_refused_with_the_way_out():
    model = nn.Sequential(nn.Embedding(10, 4, sparse=True), nn.Linear(4, 2))
    workload = Workload(
        model,
        F.cross_entropy,
        torch.optim.SGD(model.parameters(), lr=0.1),
        (torch.tensor([1, 2]), torch.tensor([0, 1])),
    )
    with pytest.raises(ExportError, match="sparse=False"):
        to_archive(workload)
