"""The document of an archive, `graph.json`: its records and their validation. Does not import torch.

It holds no tensor values: a parameter is a shape, a dtype and value statistics (`spread`). Only buffers of at most 64
KiB are stored with their values, outside the document.
"""

from math import prod
from typing import Annotated, Any, Final, Literal, Self, TypeVar

from pydantic import ConfigDict, Field, PlainSerializer, PlainValidator, model_validator

from kitsune.base.base_record import Record
from kitsune.submission.format import recurrent
from kitsune.submission.format.blocks import Block, Node, block_json, read_block
from kitsune.submission.format.limits import (
    ITEM_BYTES,
    MAX_BUFFER_BYTES,
    MAX_INPUTS,
    MAX_NUMEL,
    MAX_RANK,
    MAX_SAMPLE,
    MAX_TENSORS,
    MAX_TOTAL_BYTES,
)
from kitsune.submission.format.structure import checked_structure, leaf_paths

_Item = TypeVar("_Item")
# JSON has lists, the records hold tuples. Fail-fast, since the errors of a million invalid items would fill the memory.
Items = Annotated[tuple[_Item, ...], Field(strict=False, fail_fast=True)]
Dtype = Literal[
    "float32", "float64", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8", "bool", "complex64",
    "complex128",
]  # fmt: skip
Layout = Literal["contiguous", "channels_last", "channels_last_3d"]
Count = Annotated[int, Field(ge=0, le=2**40)]
Symbol = Annotated[str, Field(pattern=r"^s(0|[1-9][0-9]{0,2})$")]
Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9_.:/ -]{1,256}$")]
Sample = Annotated[int, Field(ge=-MAX_SAMPLE, le=MAX_SAMPLE)]
Graph = Annotated[Block, PlainValidator(read_block), PlainSerializer(block_json)]
Structure = Annotated[dict[str, Any], PlainValidator(checked_structure)]
Option = bool | int | float | Annotated[str, Field(pattern=r"^[a-z_]{1,32}$")] | None
OptimizerName = Literal[
    "SGD", "Adam", "AdamW", "NAdam", "RAdam", "Adamax", "Adadelta", "Adagrad", "RMSprop", "Rprop", "ASGD", "Adafactor",
    "Muon",
]  # fmt: skip
_OPTION_NAMES = """
lr betas eps weight_decay momentum dampening nesterov maximize foreach differentiable fused amsgrad capturable
decoupled_weight_decay momentum_decay rho lr_decay initial_accumulator_value alpha centered etas step_sizes lambd t0
beta2_decay d ns_coefficients ns_steps adjust_lr_fn
"""
OPTIONS: Final = frozenset(_OPTION_NAMES.split())


class Part(Record):
    """Base of the records of a document. Strict: no value is converted to another type."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, strict=True)


class Normal(Part):
    """Floats drawn from N(mean, std), clamped to [low, high]."""

    kind: Literal["normal"]
    mean: float
    std: Annotated[float, Field(ge=0)]
    low: float
    high: float

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        _check_order(self.low, self.high)
        return self


class Integers(Part):
    """Integers drawn uniformly from [low, high]; a share of them is `marker` (padding, an ignored label, a flag)."""

    kind: Literal["integers"]
    low: Sample
    high: Sample
    marker: Sample | None = None
    share: Annotated[float, Field(ge=0, le=1)] = 0.0
    order: Literal["any", "sorted", "prefix"] = "any"

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        _check_order(self.low, self.high)
        return self


Spread = Annotated[Normal | Integers, Field(discriminator="kind")]


def _check_order(low: float, high: float) -> None:
    if low > high:
        raise ValueError("low is greater than high")


class TensorEntry(Part):
    """A parameter, buffer or constant. Tied tensors are one entry with several names of the state_dict."""

    kind: Literal["parameter", "buffer", "constant"]
    names: Items[Name]
    shape: Annotated[Items[Count], Field(max_length=MAX_RANK)]
    dtype: Dtype
    layout: Layout = "contiguous"
    requires_grad: bool = False
    blob: Annotated[int, Field(ge=0)] | None = None
    spread: Spread | None = None

    @model_validator(mode="after")
    def _values(self) -> Self:
        _check_form(self)
        if (self.blob is None) == (self.spread is None):
            raise ValueError("must have either blob or spread")
        if self.blob is not None and self.kind == "parameter":
            raise ValueError("a parameter never carries its values")
        if self.blob is not None and prod(self.shape) * ITEM_BYTES[self.dtype] > MAX_BUFFER_BYTES:
            raise ValueError(f"a buffer with values is larger than {MAX_BUFFER_BYTES} bytes")
        return self


class InputEntry(Part):
    """A tensor of the batch. Sizes that may vary from batch to batch are symbols."""

    shape: Annotated[Items[Count | Symbol], Field(max_length=MAX_RANK)]
    dtype: Dtype
    layout: Layout = "contiguous"
    requires_grad: bool = False
    spread: Spread

    @model_validator(mode="after")
    def _form_fits(self) -> Self:
        _check_form(self)
        return self


def _check_form(entry: TensorEntry | InputEntry) -> None:
    rank = len(entry.shape)
    if entry.layout != "contiguous" and rank != (5 if entry.layout.endswith("3d") else 4):
        raise ValueError(f"layout {entry.layout} does not fit a tensor of {rank} dimensions")
    is_real = "float" in entry.dtype or "complex" in entry.dtype
    if entry.requires_grad and not is_real:
        raise ValueError(f"a tensor of {entry.dtype} cannot require gradients")
    if entry.spread is not None and (entry.spread.kind == "normal") != is_real:
        raise ValueError(f"spread {entry.spread.kind} does not fit {entry.dtype}")


class Group(Part):
    """One parameter group: the indices of its tensors, and its arguments of the optimizer."""

    parameters: Items[Annotated[int, Field(ge=0)]]
    options: dict[str, Option | Annotated[Items[float | int | None], Field(max_length=8)]]

    @model_validator(mode="after")
    def _known_options(self) -> Self:
        unknown = self.options.keys() - OPTIONS
        if unknown:
            raise ValueError(f"{ascii(min(unknown))[:60]} is not an option of an optimizer")
        return self


class OptimizerEntry(Part):
    """A class of torch.optim and its parameter groups."""

    name: OptimizerName
    groups: Annotated[Items[Group], Field(min_length=1, max_length=MAX_TENSORS)]


class Document(Part):
    """One training step: forward takes the leaves of x, loss takes the forward's outputs and the leaves of y.

    Without `loss` the forward has one output, which is the loss.
    """

    format: Literal["kitsune-archive"]
    version: Annotated[int, Field(ge=1, le=1)]  # Literal[1] would accept true
    training: bool
    tensors: Annotated[Items[TensorEntry], Field(max_length=MAX_TENSORS)]
    inputs: Annotated[Items[InputEntry], Field(min_length=1, max_length=MAX_INPUTS)]
    sizes: dict[Symbol, Annotated[int, Field(ge=1, le=2**31)]]
    x: Structure
    y: Structure
    forward: Graph
    loss: Graph | None
    optimizer: OptimizerEntry

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        _check_leaves(self)
        _check_sizes(self)
        _check_blobs(self)
        _check_optimizer(self)
        _check_graphs(self)
        return self

    def input_shape(self, index: int) -> tuple[int, ...]:
        """The shape of this input in the example batch."""
        return tuple(self.sizes[size] if isinstance(size, str) else size for size in self.inputs[index].shape)

    @property
    def x_leaves(self) -> int:
        return sum(1 for _ in leaf_paths(self.x))


def _check_leaves(document: Document) -> None:
    numbers = [number for part in (document.x, document.y) for number, _ in leaf_paths(part)]
    if numbers != list(range(len(document.inputs))):
        raise ValueError("x and y: their leaves must be 0, 1, 2, ... and there must be one for each of inputs")


def _check_sizes(document: Document) -> None:
    used: dict[str, None] = {}
    for entry in document.inputs:
        used |= {size: None for size in entry.shape if isinstance(size, str)}
    if list(used) != [f"s{index}" for index in range(len(used))] or used.keys() != document.sizes.keys():
        raise ValueError("sizes: must hold s0, s1, ... in the order in which the shapes of inputs use them")
    shapes = [(entry.shape, entry.dtype) for entry in document.tensors]
    shapes += [(document.input_shape(index), entry.dtype) for index, entry in enumerate(document.inputs)]
    total = 0
    for shape, dtype in shapes:
        if prod(shape) > MAX_NUMEL:
            raise ValueError(f"a tensor of shape {list(shape)} has more than {MAX_NUMEL} elements")
        total += prod(shape) * ITEM_BYTES[dtype]
    if total > MAX_TOTAL_BYTES:
        raise ValueError(f"all tensors together need {total} bytes, more than the {MAX_TOTAL_BYTES} that are allowed")


def _check_blobs(document: Document) -> None:
    blobs = [entry.blob for entry in document.tensors if entry.blob is not None]
    if blobs != list(range(len(blobs))):
        raise ValueError("tensors: blobs must be numbered 0, 1, 2, ... in order")


def _check_optimizer(document: Document) -> None:
    seen: set[int] = set()
    for number, group in enumerate(document.optimizer.groups):
        for index in group.parameters:
            where = f"optimizer.groups[{number}].parameters: {index}"
            if index >= len(document.tensors) or document.tensors[index].kind != "parameter":
                raise ValueError(f"{where} is not a parameter")
            if index in seen:
                raise ValueError(f"{where} is named twice")
            seen.add(index)


def _check_graphs(document: Document) -> None:
    split = document.x_leaves
    forward, loss = document.forward, document.loss
    tensors = range(len(document.tensors))
    _check_sources(forward, "forward", {"t": tensors, "x": range(split)})
    _check_recurrent(forward, _tensor_shapes(document, forward), "forward.")
    if loss is None:
        if len(forward.outputs) != 1:
            raise ValueError("forward.outputs: without a loss graph there must be one output, the loss")
        return
    if len(loss.outputs) != 1:
        raise ValueError("loss.outputs: there must be one output, the loss")
    outputs, leaves = range(len(forward.outputs)), range(split, len(document.inputs))
    _check_sources(loss, "loss", {"t": tensors, "y": leaves, "o": outputs})
    _check_recurrent(loss, _tensor_shapes(document, loss), "loss.")
    theirs = set(forward.inputs)
    for name in loss.inputs:
        if name[0] == "t" and (document.tensors[int(name[1:])].kind == "parameter" or name in theirs):
            raise ValueError(f"loss.inputs: {name} belongs to the forward, which must hand it over as an output")


def _check_sources(block: Block, where: str, allowed: dict[str, range]) -> None:
    for name in block.inputs:
        kind, index = name[0], int(name[1:])
        if index not in allowed.get(kind, ()):
            raise ValueError(f"{where}.inputs: there is no {name} here")


_Shapes = dict[str, tuple[int, ...]]


def _tensor_shapes(document: Document, block: Block) -> _Shapes:
    """Reference -> shape, for the inputs of a block that are tensors of the archive."""
    sources = ((f"%{number}", name) for number, name in enumerate(block.inputs) if name[0] == "t")
    return {reference: document.tensors[int(name[1:])].shape for reference, name in sources}


def _check_recurrent(block: Block, shapes: _Shapes, where: str) -> None:
    """Checks weights of recurrent operators that are tensors of the archive; `guards.py` checks all at run time."""
    for number, node in enumerate(block.nodes):
        here = f"{where}nodes[{number}]"
        if not isinstance(node, Node):
            inner = {f"%{index}": shapes[name] for index, name in enumerate(node.args) if name in shapes}
            _check_recurrent(node.block, inner, f"{here}.")
        elif node.op in recurrent.OPERATORS:
            problem = recurrent.settings_problem(node.args, node.kwargs)
            weights = [] if problem else node.args[2]
            known = [shapes[weight] for weight in weights if isinstance(weight, str) and weight in shapes]
            if not problem and len(known) == len(weights):
                problem = recurrent.weights_problem(node.op, node.args, known)
            if problem:
                raise ValueError(f"{here}: {node.op}: {problem}")
