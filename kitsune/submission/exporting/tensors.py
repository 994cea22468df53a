"""Converts the tensors of a step and of its batch to entries of a document, with the values of small buffers.

Learned values are not exported: parameters, buffers that the step changes, and the statistics of batch norms.
"""

import torch
from torch import nn
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind
from torch.fx import Node as FxNode

from kitsune.errors import ExportError
from kitsune.submission.exporting.encode import word
from kitsune.submission.exporting.mutated_inputs import written_inputs
from kitsune.submission.exporting.split_forward_loss import Origins
from kitsune.submission.format.document import InputEntry, Integers, Normal, TensorEntry
from kitsune.submission.format.limits import ITEM_BYTES, MAX_BUFFER_BYTES
from kitsune.submission.format.source import WAY_OUT
from kitsune.submission.rebuilding.value_statistics import spread_of


class Table:
    """The numbered tensors of a step: all parameters, then the buffers and constants that its graph reads.

    Tied parameters are one tensor with several names.
    """

    def __init__(self, step: nn.Module, program: ExportedProgram) -> None:
        self.tensors: list[torch.Tensor] = []
        self.kinds: list[str] = []
        self.names: list[list[str]] = []
        self.number: dict[int, int] = {}  # id(tensor) -> index
        self.of: dict[str, str] = {}  # name of a placeholder -> its source
        self.leaves: list[FxNode] = []
        for name, parameter in step.named_parameters(remove_duplicate=False):
            self._add(parameter, "parameter", name)
        buffers = dict(step.named_buffers(remove_duplicate=False))
        nodes = {node.name: node for node in program.graph.nodes if node.op == "placeholder"}
        written = {node.name for node in written_inputs(program.graph_module)}
        specs = (spec for spec in program.graph_signature.input_specs if spec.kind is InputKind.BUFFER)
        self.learned = statistics_of(step) | {id(buffers[str(s.target)]) for s in specs if s.arg.name in written}
        for spec in program.graph_signature.input_specs:
            node, name = nodes[spec.arg.name], str(spec.target)
            if spec.kind is InputKind.USER_INPUT:
                self.leaves.append(node)
            elif spec.kind is InputKind.PARAMETER:
                self._place(node, step.get_parameter(name), "parameter", "")
            elif spec.kind is InputKind.BUFFER and node.users:
                self._place(node, buffers[name], "buffer", name)
            elif spec.kind is InputKind.CONSTANT_TENSOR and node.users:
                self._place(node, program.constants[name], "constant", "")
            elif spec.kind not in (InputKind.BUFFER, InputKind.CONSTANT_TENSOR):
                raise ExportError(f"the model holds {name}, an object that is not a tensor; {WAY_OUT}")

    def _place(self, node: FxNode, tensor: torch.Tensor, kind: str, name: str) -> None:
        self.of[node.name] = f"t{self._add(tensor, kind, name)}"

    def _add(self, tensor: torch.Tensor, kind: str, name: str) -> int:
        index = self.number.setdefault(id(tensor), len(self.tensors))
        if index == len(self.tensors):
            self.tensors.append(tensor)
            self.kinds.append(kind)
            self.names.append([])
        if name:
            inside = name.removeprefix("model.")
            self.names[index].append(inside if inside != name else f":{name}")
        return index

    def origins(self, x_count: int) -> Origins:
        """The source of each placeholder; the first `x_count` leaves of the batch belong to x."""
        leaves = {node.name: f"{'x' if i < x_count else 'y'}{i}" for i, node in enumerate(self.leaves)}
        parameters = frozenset(f"t{index}" for index, kind in enumerate(self.kinds) if kind == "parameter")
        return Origins(self.of | leaves, parameters)

    def entries(self) -> tuple[tuple[TensorEntry, ...], tuple[bytes, ...]]:
        """The entries, and the raw values of small buffers. Raises ExportError for unsupported dtypes."""
        buffers: list[bytes] = []
        entries = []
        for tensor, kind, names in zip(self.tensors, self.kinds, self.names, strict=True):
            is_small = tensor.numel() * tensor.element_size() <= MAX_BUFFER_BYTES
            is_learned = id(tensor) in self.learned
            travels = is_small and kind != "parameter" and not is_learned
            spread = learned_spread if is_learned else spread_of
            entry = {
                "kind": kind, "names": names, "shape": list(tensor.shape), "dtype": dtype_of(tensor, kind),
                "layout": layout_of(tensor), "requires_grad": tensor.requires_grad,
            }  # fmt: skip
            entry |= {"blob": len(buffers)} if travels else {"spread": spread(tensor)}
            if travels:
                buffers.append(raw_values(tensor))
            entries.append(TensorEntry.model_validate(entry))
        return tuple(entries), tuple(buffers)

    def inputs(self, leaves: list[torch.Tensor]) -> tuple[tuple[InputEntry, ...], dict[str, int]]:
        """The entries of the batch, and the values in this batch of the sizes that may vary: s0, s1, ..."""
        symbols: dict[str, str] = {}
        sizes: dict[str, int] = {}
        entries = []
        for node, leaf in zip(self.leaves, leaves, strict=True):
            shape: list[int | str] = []
            for here, size in zip(node.meta["val"].shape, leaf.shape, strict=True):
                if str(here).isdigit():  # also a symbol that export has specialised to one size
                    shape.append(size)
                    continue
                if not str(here).isidentifier():
                    raise ExportError(f"a size of the batch depends on others ({here}); {WAY_OUT}")
                symbol = symbols.setdefault(str(here), f"s{len(symbols)}")
                sizes[symbol] = size
                shape.append(symbol)
            entry = {
                "shape": shape, "dtype": dtype_of(leaf, "batch"), "layout": layout_of(leaf),
                "requires_grad": leaf.requires_grad, "spread": spread_of(leaf),
            }  # fmt: skip
            entries.append(InputEntry.model_validate(entry))
        return tuple(entries), sizes


def statistics_of(step: nn.Module) -> set[int]:
    """The ids of the running statistics of batch norms, including frozen ones."""
    norms = (module for module in step.modules() if isinstance(module, nn.modules.batchnorm._NormBase))
    return {id(buffer) for norm in norms for buffer in norm.buffers(recurse=False)}


def learned_spread(tensor: torch.Tensor) -> Normal | Integers:
    """The statistics of a learned buffer: floats as for a parameter, counters as 0."""
    spread = spread_of(tensor)
    return spread if isinstance(spread, Normal) else Integers(kind="integers", low=0, high=0)


def dtype_of(tensor: torch.Tensor, what: str) -> str:
    """The name of its dtype, such as "float32". Raises ExportError for unsupported dtypes and layouts."""
    if word(tensor.dtype) not in ITEM_BYTES or tensor.layout is not torch.strided or tensor.is_quantized:
        raise ExportError(f"a {what} tensor is {tensor.dtype}, {tensor.layout}, which cannot be exported; {WAY_OUT}")
    return word(tensor.dtype)


def layout_of(tensor: torch.Tensor) -> str:
    if tensor.is_contiguous():
        return "contiguous"
    for rank, layout, form in (
        (4, "channels_last", torch.channels_last),
        (5, "channels_last_3d", torch.channels_last_3d),
    ):
        if tensor.dim() == rank and tensor.is_contiguous(memory_format=form):
            return layout
    return "contiguous"


def raw_values(tensor: torch.Tensor) -> bytes:
    """The values in C order, little-endian."""
    values = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous().flatten()
    return values.view(torch.uint8).numpy().tobytes() if values.numel() else b""
