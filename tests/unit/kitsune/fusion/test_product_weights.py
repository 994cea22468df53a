"""Which inputs of a captured graph are weights that one product reads, and nothing else."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from kitsune.fusion.product_weights import examples_with, product_weights
from tests.unit.kitsune.fusion.fused import ROWS, TARGETS, Activated, GatedMlp, Head, Mlp, engine

WIDTH = 8


def shapes_found(model, *inputs, dtype=torch.bfloat16):
    """Shapes of the weights that are found in the graph of the model under autocast, in the order of its inputs."""
    found = []

    def look(graph, examples):
        found.extend(tuple(examples[at].shape) for at in product_weights(graph, examples, torch.bfloat16))
        return graph.forward

    torch._dynamo.reset()
    with torch.autocast("cpu", dtype=dtype, enabled=dtype is not None):
        torch.compile(model, backend=look)(*inputs)
    return found


def rows():
    return torch.randn(4, WIDTH)


class Net(nn.Module):
    def __init__(self, forward, **layers):
        super().__init__()
        self.own = forward
        for name, layer in layers.items():
            setattr(self, name, layer)

    def forward(self, x):
        return self.own(self, x)


def linear(bias=True):
    return nn.Linear(WIDTH, 6, bias=bias)


def test_a_linear_layer_with_its_bias():
    assert shapes_found(linear(), rows()) == [(6, WIDTH), (6,)]


def test_a_convolution():
    assert shapes_found(nn.Conv2d(3, 5, 2), torch.randn(2, 3, 4, 4)) == [(5, 3, 2, 2), (5,)]


def test_norms_and_embeddings_stay_in_fp32():
    model = nn.Sequential(nn.Embedding(10, WIDTH), nn.LayerNorm(WIDTH), linear())
    assert shapes_found(model, torch.tensor([1, 2])) == [(6, WIDTH), (6,)]


def test_a_weight_of_the_users_own_class():
    model = Net(lambda self, x: torch.addmm(self.bias, x, self.weight))
    model.weight, model.bias = nn.Parameter(torch.randn(WIDTH, 6)), nn.Parameter(torch.randn(6))
    assert sorted(shapes_found(model, rows())) == [(6,), (WIDTH, 6)]


def test_a_transposed_weight():
    model = Net(lambda self, x: x @ self.layer.weight.t(), layer=linear(bias=False))
    assert shapes_found(model, rows()) == [(6, WIDTH)]
    model = Net(lambda self, x: torch.matmul(x, self.layer.weight.t()), layer=linear(bias=False))
    assert shapes_found(model, rows()) == [(6, WIDTH)]


@pytest.mark.parametrize(
    "forward",
    [
        lambda self, x: self.layer(x).sum() + self.layer.weight.square().sum(),
        lambda self, x: F.linear(x, self.layer.weight * 2),
        lambda self, x: self.layer(self.layer(x) @ torch.ones(6, WIDTH)),
        lambda self, x: F.linear(self.layer.weight, self.layer.weight),
        lambda self, x: checkpoint(self.layer, x, use_reentrant=False),
    ],
    ids=["in a penalty", "scaled", "used twice", "by itself", "in a checkpoint"],
)
def test_a_weight_that_is_read_otherwise(forward):
    assert (6, WIDTH) not in shapes_found(Net(forward, layer=linear(bias=False)), rows())


def test_a_tied_weight():
    model = Net(lambda self, x: self.head(self.embedding(x)), embedding=nn.Embedding(6, WIDTH), head=linear(bias=False))
    model.head.weight = model.embedding.weight
    assert shapes_found(model, torch.tensor([1, 2])) == []


def test_where_the_model_sets_autocast_by_itself():
    def forward(self, x):
        with torch.autocast("cpu", enabled=False):
            return self.layer(x)

    assert shapes_found(Net(forward, layer=linear()), rows()) == []


@pytest.mark.parametrize("dtype", [None, torch.float16])
def test_under_another_autocast_there_are_none(dtype):
    assert shapes_found(linear(), rows(), dtype=dtype) == []


def test_where_the_model_turns_autocast_off_and_on():
    def forward(self, x):
        torch.set_autocast_enabled("cpu", False)
        try:
            return self.layer(x)
        finally:
            torch.set_autocast_enabled("cpu", True)

    assert shapes_found(Net(forward, layer=linear()), rows()) == []


def test_a_weight_that_shares_its_memory_with_another_input():
    def forward(self, x):
        self.same.mul_(0.5)
        return self.layer(x)

    model = Net(forward, layer=linear(bias=False))
    model.register_buffer("same", model.layer.weight.data.view(-1), persistent=False)
    assert shapes_found(model, rows()) == []


def test_a_weight_with_a_hook_on_its_gradient():
    model = linear()
    model.weight.register_hook(lambda gradient: gradient * 2)
    model.bias.register_post_accumulate_grad_hook(lambda _: None)
    assert shapes_found(model, rows()) == []


def test_a_weight_in_half_precision():
    assert shapes_found(linear().bfloat16(), rows().bfloat16()) == []


@pytest.mark.parametrize(
    ("make", "inputs", "found"),
    [
        (Mlp, (ROWS,), ["up.weight", "down.weight"]),
        (GatedMlp, (ROWS,), ["gate.weight", "up.weight", "down.weight"]),
        (Activated, (ROWS,), ["linear.weight"]),
        (lambda: Head(bias=True), (ROWS, TARGETS), ["head.weight"]),
    ],
    ids=["mlp", "gated_mlp", "linear_activation", "linear_cross_entropy"],
)
def test_the_weights_of_a_fused_call_that_has_products_inside(make, inputs, found):
    model = make()
    fusing = engine()
    names = []

    def look(graph, examples):
        graph = fusing.rewrite(graph)
        weights = {id(parameter): name for name, parameter in model.named_parameters()}
        names.extend(weights[id(examples[at])] for at in product_weights(graph, examples, torch.bfloat16))
        return graph.forward

    with torch.autocast("cpu", dtype=torch.bfloat16):
        torch.compile(model, backend=look)(*inputs)
    assert sum(fusing.get_fusion_stats().matches.values()) == 1
    assert names == found


def test_examples_are_fake_and_of_static_shapes():
    model = linear()
    seen = []

    def look(graph, inputs):
        positions = product_weights(graph, inputs, torch.bfloat16)
        seen.extend(examples_with(torch.bfloat16, graph, inputs, positions)[at] for at in positions)
        return graph.forward

    torch._dynamo.reset()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        torch.compile(model, backend=look)(rows())
    assert [tuple(map(type, one.shape)) for one in seen] == [(int, int), (int,)]
    assert all(one.dtype == torch.bfloat16 and one.requires_grad for one in seen)
    assert model.weight.dtype == torch.float32
