import pytest
import torch
from torch import fx, nn

from kitsune.submission.format.rnn import flatten_rnn_weights, layer_around


@pytest.mark.filterwarnings("ignore:LSTM with projections")
@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(
    ("layer", "op", "options"),
    [
        (nn.LSTM, torch.ops.aten.lstm.input, {}),
        (nn.LSTM, torch.ops.aten.lstm.input, {"proj_size": 2}),
        (nn.GRU, torch.ops.aten.gru.input, {}),
        (nn.RNN, torch.ops.aten.rnn_tanh.input, {}),
        (nn.RNN, torch.ops.aten.rnn_relu.input, {"nonlinearity": "relu"}),
    ],
)
def test_layer_around_a_node_is_the_layer_it_came_from(layer, op, options, bias, bidirectional):
    original = layer(3, 5, 2, bias=bias, batch_first=True, bidirectional=bidirectional, **options)
    graph = fx.Graph()
    weights = list(original.parameters())
    node = graph.call_function(op, (None, None, [], bias, 2, 0.0, True, bidirectional, True))
    rebuilt = layer_around(node, weights)
    assert [id(weight) for weight in rebuilt.parameters()] == [id(weight) for weight in weights]
    x = torch.randn(4, 6, 3)
    assert torch.equal(rebuilt(x)[0], original(x)[0])


def test_weights_on_a_cpu_are_left_alone():
    class Holder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.randn(4, 4))

        def forward(self, x):
            return x

    graph = fx.Graph()
    x, weight = graph.placeholder("x"), graph.get_attr("w")
    graph.output(graph.call_function(torch.ops.aten.gru.input, (x, x, [weight], False, 1, 0.0, True, False, True)))
    module = fx.GraphModule(Holder(), graph)
    before = module.w.data_ptr()
    flatten_rnn_weights(module)
    assert module.w.data_ptr() == before
