"""Checks that the weights of a recurrent operator fit its other arguments. Does not import torch.

torch checks this only in Python, in `nn.LSTM.forward`. The operator itself does not: on a CPU, torch 2.13 passes a
weight of a wrong shape to oneDNN, which writes out of bounds.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

Shape = Sequence[int]

_GATES: Final = {"aten.lstm.input": 4, "aten.gru.input": 3, "aten.rnn_tanh.input": 1, "aten.rnn_relu.input": 1}
_LSTM: Final = "aten.lstm.input"
# input, hx, params, has_biases, num_layers, dropout, train, bidirectional, batch_first
_ARGUMENTS: Final = 9

OPERATORS: Final = frozenset(_GATES)


def settings_problem(args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
    """The reason why these are not valid arguments of a recurrent operator, or ""."""
    if len(args) != _ARGUMENTS or kwargs:
        return f"takes {_ARGUMENTS} arguments by position, not {len(args)} and {len(kwargs)} by name"
    if not isinstance(args[2], list):
        return "params must be a list"
    biases, layers, bidirectional = _settings(args)
    if any(type(flag) is not bool for flag in (biases, bidirectional, args[8])):
        return "has_biases, bidirectional and batch_first must be booleans"
    return "" if type(layers) is int and layers > 0 else "num_layers must be a positive integer"


def weights_problem(op: str, args: Sequence[Any], shapes: Sequence[Shape]) -> str:
    """The reason why the weights of these shapes do not fit each other, or ""."""
    biases, layers, bidirectional = _settings(args)
    stacks = layers * (1 + bidirectional)
    # An LSTM with proj_size has one more weight for each layer and direction.
    projected = op == _LSTM and len(shapes) == stacks * (3 + 2 * biases)
    count = stacks * (2 + 2 * biases + projected)
    if len(shapes) != count:
        return f"params holds {len(shapes)} weights, and must hold {count}"
    gates = _GATES[op]
    if any(len(shape) != 2 for shape in shapes[:2]) or not shapes[0][0] or shapes[0][0] % gates:
        return f"params: {list(shapes[0])} and {list(shapes[1])} are not the first two weights of {gates} gates"
    rows, width = shapes[0]
    hidden = rows // gates
    output = shapes[1][1] if projected else hidden
    for name, shape in zip(_names(biases, layers, bidirectional, projected), shapes, strict=True):
        inner = width if "_l0" in name else output * (1 + bidirectional)
        matrices = {"weight_ih": [rows, inner], "weight_hh": [rows, output], "weight_hr": [output, hidden]}
        expected = matrices.get(name[:9], [rows])
        if list(shape) != expected:
            return f"params: {name} has shape {list(shape)}, and must have {expected}"
    return ""


def state_problem(op: str, args: Sequence[Any], weights: Sequence[Shape], x: Shape, states: Sequence[Shape]) -> str:
    """The reason why input and states do not fit the weights, which fit each other, or ""."""
    _, layers, bidirectional = _settings(args)
    if len(x) != 3 or x[2] != weights[0][1]:
        return f"input has shape {list(x)}, and must have 3 dimensions, the last of {weights[0][1]}"
    sizes = [weights[1][1], weights[0][0] // _GATES[op]] if op == _LSTM else [weights[1][1]]
    if len(states) != len(sizes):
        return f"hx holds {len(states)} states, and must hold {len(sizes)}"
    batch = x[0] if args[8] else x[1]
    for state, size in zip(states, sizes, strict=True):
        expected = [layers * (1 + bidirectional), batch, size]
        if list(state) != expected:
            return f"hx: a state has shape {list(state)}, and must have {expected}"
    return ""


def _settings(args: Sequence[Any]) -> tuple[bool, int, bool]:
    """has_biases, num_layers, bidirectional."""
    return args[3], args[4], args[7]


def _names(biases: bool, layers: int, bidirectional: bool, projected: bool) -> Iterator[str]:
    """The names of the weights in nn.RNNBase, in its order."""
    parts = ["weight_ih", "weight_hh", *["bias_ih", "bias_hh"] * biases, *["weight_hr"] * projected]
    for layer in range(layers):
        for direction in ("", "_reverse") if bidirectional else ("",):
            yield from (f"{part}_l{layer}{direction}" for part in parts)
