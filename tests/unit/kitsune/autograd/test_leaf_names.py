import pytest
import torch
import torch._dynamo.testing
from torch import nn

from kitsune.autograd.leaves import fresh_leaves, joined


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.second = nn.Linear(4, 4)
        self.second.weight = self.first.weight
        self.frozen = nn.Linear(4, 2).requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.frozen(self.second(torch.relu(self.first(x))))


def test_gradients_go_to_the_aliases_and_are_those_of_the_parameters() -> None:
    model, x = Tied(), torch.randn(3, 4)
    model(x).sum().backward()
    expected = {parameter: parameter.grad for parameter in model.parameters()}
    model.zero_grad()
    with fresh_leaves(model) as aliases:
        assert model.first.weight is model.second.weight is aliases[next(iter(expected))]
        model(x).sum().backward()
    assert all(parameter.grad is None for parameter in model.parameters())
    assert set(aliases) == {parameter for parameter in model.parameters() if parameter.requires_grad}
    for parameter, alias in aliases.items():
        assert alias.data_ptr() == parameter.data_ptr()
        assert torch.equal(alias.grad, expected[parameter])


def test_parameters_are_back_whatever_happens() -> None:
    model = Tied()
    before = list(model.named_parameters(remove_duplicate=False))
    with pytest.raises(ZeroDivisionError), fresh_leaves(model):
        raise ZeroDivisionError
    after = list(model.named_parameters(remove_duplicate=False))
    assert all(mine is theirs for (_, mine), (_, theirs) in zip(before, after, strict=True))


def test_a_graph_that_is_still_alive_does_not_lend_its_nodes() -> None:
    model, x = Tied(), torch.randn(3, 4)
    held = model(x).sum()
    old = held.grad_fn
    with fresh_leaves(model) as aliases:
        fresh = model(x).sum()
        gradients = torch.autograd.grad(fresh, [*aliases.values()])
    assert old is held.grad_fn
    assert all(gradient is not None for gradient in gradients)
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch, of torch
def test_compiled_code_serves_aliases_too() -> None:
    model, x = Tied(), torch.randn(3, 4)
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(lambda x: model(x).sum(), backend=counter, dynamic=False)
    compiled(x).backward()
    with fresh_leaves(model) as aliases:
        compiled(x).backward()
    assert counter.frame_count == 1
    for parameter, alias in aliases.items():
        assert torch.allclose(alias.grad, parameter.grad)


def test_joined() -> None:
    one, two = torch.ones(2), torch.full((2,), 2.0)
    assert joined(None, None) is None
    assert joined(one, None) is one
    assert joined(None, two) is two
    assert joined(one, two).tolist() == [3.0, 3.0]
