"""Recurrent layers: stores their weights contiguously, as cuDNN requires, and fixes the export of LSTM shapes."""

import contextlib
from collections.abc import Iterator
from typing import Any, Final

import torch
from torch import fx, nn
from torch._decomp import decompositions

_LAYERS: Final[dict[Any, type[nn.RNNBase]]] = {
    torch.ops.aten.lstm.input: nn.LSTM,
    torch.ops.aten.gru.input: nn.GRU,
    torch.ops.aten.rnn_tanh.input: nn.RNN,
    torch.ops.aten.rnn_relu.input: nn.RNN,
}


@contextlib.contextmanager
def mended_lstm_shapes() -> Iterator[None]:
    """Works around torch 2.11, which exports an LSTM's last states with an extra dimension (squeezes the wrong one)."""
    one_layer = decompositions.one_layer_lstm

    def mended(*args: Any, **kwargs: Any) -> Any:
        out, states = one_layer(*args, **kwargs)
        return out, tuple(state.squeeze(0) if state.dim() == 3 else state for state in states)

    decompositions.one_layer_lstm = mended
    try:
        yield
    finally:
        decompositions.one_layer_lstm = one_layer


def flatten_rnn_weights(graph: fx.GraphModule) -> None:
    """Makes the weights of each recurrent node contiguous, in place. Otherwise cuDNN copies them at every call.

    Does nothing on a CPU, and for layers whose weights are computed in the graph.
    """
    for node in graph.graph.nodes:
        if node.op == "call_function" and node.target in _LAYERS:
            weights = [_parameter(graph, weight) for weight in node.args[2]]
            if weights and all(isinstance(weight, nn.Parameter) and weight.is_cuda for weight in weights):
                layer_around(node, weights).flatten_parameters()


def layer_around(node: fx.Node, weights: list[Any]) -> nn.RNNBase:
    """A torch.nn layer with these parameters, whose public method flatten_parameters can be called."""
    arguments: tuple[Any, ...] = node.args
    bias, layers, _, _, bidirectional, batch_first = arguments[3:9]
    projected = 0
    if _LAYERS[node.target] is nn.LSTM and weights[0].shape[0] // 4 != weights[1].shape[1]:
        projected = weights[1].shape[1]
    gates = {nn.LSTM: 4, nn.GRU: 3, nn.RNN: 1}[_LAYERS[node.target]]
    options: dict[str, Any] = {"proj_size": projected} if projected else {}
    if node.target is torch.ops.aten.rnn_relu.input:
        options["nonlinearity"] = "relu"
    layer = _LAYERS[node.target](
        weights[0].shape[1], weights[0].shape[0] // gates, layers, bias=bias, batch_first=batch_first,
        bidirectional=bidirectional, device="meta", **options,
    )  # fmt: skip
    names = [name for name, _ in layer.named_parameters()]
    for name, weight in zip(names, weights, strict=True):
        setattr(layer, name, weight)
    return layer


def _parameter(graph: fx.GraphModule, node: Any) -> Any:
    return getattr(graph, str(node.target), None) if isinstance(node, fx.Node) and node.op == "get_attr" else None
