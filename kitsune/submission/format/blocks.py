"""Blocks of nodes: JSON format and validation of operators, arguments and references. Does not import torch.

A block has no branches. Its values are numbered: first its inputs, then the result of each node. A node refers to
earlier values only, as "%7". Other arguments are JSON: null, booleans, numbers, lists, and objects of one key for what
JSON lacks (`{"dtype": "float32"}`, `{"device": "own"}`, `{"slice": [0, null, 1]}`, `{"float": "inf"}`, ...).
"""

import keyword
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Final

from kitsune.submission.format.limits import ITEM_BYTES, MAX_INTEGER, MAX_NODES, MAX_REGION_DEPTH
from kitsune.submission.format.ops import is_allowed, takes

_REFERENCE = re.compile(r"%(0|[1-9][0-9]{0,6})", re.ASCII)
_SOURCE = re.compile(r"[txyo](0|[1-9][0-9]{0,6})", re.ASCII)
_NAME = re.compile(r"[a-zA-Z_][a-zA-Z0-9_]{0,31}", re.ASCII)
_TEXT = re.compile(r"[A-Za-z0-9_ .,>-]{0,64}", re.ASCII)
_MAX_LIST_DEPTH = 4
# Objects of one key -> allowed values, for keys with a fixed set of values.
_WORDS: Final = {
    "dtype": frozenset(ITEM_BYTES),
    "memory_format": frozenset(("contiguous_format", "channels_last", "channels_last_3d", "preserve_format")),
    "layout": frozenset(("strided",)),
    "device": frozenset(("own", "cpu")),
    "float": frozenset(("inf", "-inf", "nan")),
}


@dataclass(frozen=True, slots=True)
class Node:
    """One call of an operator."""

    op: str
    args: list[Any]
    kwargs: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Region:
    """Nodes that run with gradients disabled or enabled, or under autocast. `block.inputs` are the values in `args`."""

    kind: str  # "grad" or "autocast"
    enabled: bool
    args: list[Any]
    block: "Block"
    dtype: str | None = None
    cache: bool = True
    device: str = "own"


@dataclass(frozen=True, slots=True)
class Block:
    """Nodes in order. `inputs` are sources: t3 a tensor, x0/y1 a leaf of the batch, o0 an output of the forward."""

    inputs: list[str]
    nodes: list[Node | Region] = field(default_factory=list)
    outputs: list[Any] = field(default_factory=list)


class _Budget:
    """Limits the number of nodes in all blocks of an archive."""

    def __init__(self) -> None:
        self.left = MAX_NODES

    def take(self, where: str) -> None:
        self.left -= 1
        if self.left < 0:
            raise ValueError(f"{where}: more than {MAX_NODES} nodes")


def read_block(value: Any) -> Block:
    """A validated block, from JSON or from a block. Raises ValueError naming the invalid node and argument."""
    if isinstance(value, Block):
        value = block_json(value)
    _expect_keys(value, "block", {"inputs", "nodes", "outputs"})
    inputs = value["inputs"]
    if not isinstance(inputs, list) or not all(isinstance(name, str) and _SOURCE.fullmatch(name) for name in inputs):
        raise ValueError('inputs must be a list of sources such as "t0", "x1", "y0" or "o0"')
    if len(set(inputs)) != len(inputs):
        raise ValueError("inputs: a source is named twice")
    return _block(value, inputs, "", 0, _Budget())


def block_json(block: Block) -> dict[str, Any]:
    """The inverse of `read_block`."""
    return {"inputs": block.inputs, **_body_json(block)}


def walk(block: Block) -> Iterator[Node | Region]:
    """Every node and region of a block, including those inside regions."""
    for node in block.nodes:
        yield node
        if isinstance(node, Region):
            yield from walk(node.block)


def _body_json(block: Block) -> dict[str, Any]:
    return {"nodes": [_node_json(node) for node in block.nodes], "outputs": block.outputs}


def _node_json(node: Node | Region) -> dict[str, Any]:
    if isinstance(node, Node):
        return {"op": node.op, "args": node.args, **({"kwargs": node.kwargs} if node.kwargs else {})}
    common = {"region": node.kind, "enabled": node.enabled, "args": node.args, **_body_json(node.block)}
    if node.kind == "autocast":
        common |= {"dtype": node.dtype, "cache": node.cache, "device": node.device}
    return common


def _block(value: dict[str, Any], inputs: list[str], where: str, depth: int, budget: _Budget) -> Block:
    nodes = value["nodes"]
    if not isinstance(nodes, list):
        raise ValueError(f"{where}nodes must be a list")
    parsed: list[Node | Region] = []
    for number, node in enumerate(nodes):
        here = f"{where}nodes[{number}]"
        budget.take(here)
        parsed.append(_node(node, len(inputs) + number, here, depth, budget))
    outputs = value["outputs"]
    if not isinstance(outputs, list) or not (outputs or depth):  # a region may have side effects only
        raise ValueError(f"{where}outputs must be a list that is not empty")
    for index, output in enumerate(outputs):
        _check_reference(output, len(inputs) + len(parsed), f"{where}outputs[{index}]")
    return Block(inputs, parsed, outputs)


def _node(value: Any, values: int, where: str, depth: int, budget: _Budget) -> Node | Region:
    """Parses a node. `values`: how many values exist before it."""
    if isinstance(value, dict) and "region" in value:
        return _region(value, values, where, depth, budget)
    _expect_keys(value, where, {"op", "args"}, {"kwargs"})
    op, args, kwargs = value["op"], value["args"], value.get("kwargs", {})
    if not isinstance(op, str) or not is_allowed(op):
        raise ValueError(f"{where}.op: {_shown(op)} is not an operator that an archive may hold")
    if not isinstance(args, list):
        raise ValueError(f"{where}.args must be a list")
    for index, argument in enumerate(args):
        _check_argument(argument, values, f"{where}.args[{index}]")
    if not isinstance(kwargs, dict):
        raise ValueError(f"{where}.kwargs must be an object")
    for name, argument in kwargs.items():
        if not _NAME.fullmatch(name) or keyword.iskeyword(name):
            raise ValueError(f"{where}.kwargs: {_shown(name)} is not an argument name")
        _check_argument(argument, values, f"{where}.kwargs.{name}")
    if not takes(op, len(args), len(kwargs)):
        raise ValueError(f"{where}: {op} cannot be called with {len(args)} arguments and {len(kwargs)} by name")
    return Node(op, args, kwargs)


def _region(value: dict[str, Any], values: int, where: str, depth: int, budget: _Budget) -> Region:
    if depth >= MAX_REGION_DEPTH:
        raise ValueError(f"{where}: regions are nested more than {MAX_REGION_DEPTH} deep")
    kind = value["region"]
    if kind not in ("grad", "autocast"):
        raise ValueError(f'{where}.region must be "grad" or "autocast"')
    settings = {"dtype", "cache", "device"} if kind == "autocast" else set()
    _expect_keys(value, where, {"region", "enabled", "args", "nodes", "outputs"} | settings)
    args = value["args"]
    if not isinstance(args, list):
        raise ValueError(f"{where}.args must be a list")
    for index, argument in enumerate(args):
        _check_reference(argument, values, f"{where}.args[{index}]")
    if type(value["enabled"]) is not bool or type(value.get("cache", True)) is not bool:
        raise ValueError(f"{where}: enabled and cache must be booleans")
    dtype, device = value.get("dtype"), value.get("device", "own")
    if dtype not in (None, "float16", "bfloat16", "float32", "float64"):
        raise ValueError(f"{where}.dtype: {_shown(dtype)} is not a dtype of autocast")
    if device not in ("own", "cpu", "cuda"):
        raise ValueError(f'{where}.device must be "own", "cpu" or "cuda"')
    inputs = [f"a{index}" for index in range(len(args))]
    block = _block(value, inputs, f"{where}.", depth + 1, budget)
    return Region(kind, value["enabled"], args, block, dtype, value.get("cache", True), device)


def _check_reference(value: Any, values: int, where: str) -> None:
    match = _REFERENCE.fullmatch(value) if isinstance(value, str) else None
    if match is None:
        raise ValueError(f'{where}: {_shown(value)} is not a reference such as "%3"')
    if int(match[1]) >= values:
        raise ValueError(f"{where}: {value} refers to a value that does not exist yet (there are {values})")


def _check_argument(value: Any, values: int, where: str, depth: int = 0) -> None:
    if value is None or isinstance(value, bool):
        return
    if isinstance(value, str):
        _check_reference(value, values, where)
    elif isinstance(value, int):
        if abs(value) > MAX_INTEGER:
            raise ValueError(f"{where}: does not fit in 64 bits")
    elif isinstance(value, float):
        if not math.isfinite(value):
            raise ValueError(f"{where}: not finite")
    elif isinstance(value, list):
        if depth >= _MAX_LIST_DEPTH:
            raise ValueError(f"{where}: lists are nested more than {_MAX_LIST_DEPTH} deep")
        for index, part in enumerate(value):
            _check_argument(part, values, f"{where}[{index}]", depth + 1)
    else:
        _check_special(value, values, where)


def _check_special(value: Any, values: int, where: str) -> None:
    if not isinstance(value, dict) or len(value) != 1:
        raise ValueError(f"{where}: an argument must be a value or an object of one key")
    ((kind, content),) = value.items()
    if kind in _WORDS:
        if not isinstance(content, str) or content not in _WORDS[kind]:
            raise ValueError(f"{where}.{kind}: {_shown(content)} is not known; use one of {sorted(_WORDS[kind])}")
    elif kind == "text":
        if not isinstance(content, str) or not _TEXT.fullmatch(content):
            raise ValueError(f"{where}.text: {_shown(content)} is not a plain word of at most 64 characters")
    elif kind == "slice":
        if not isinstance(content, list) or len(content) != 3:
            raise ValueError(f"{where}.slice must be [start, stop, step]")
        for part in content:
            if isinstance(part, (bool, float, list, dict)):
                raise ValueError(f"{where}.slice: bounds are integers, references or null")
            _check_argument(part, values, f"{where}.slice")
    elif kind == "complex":
        if not isinstance(content, list) or len(content) != 2 or not all(type(part) is float for part in content):
            raise ValueError(f"{where}.complex must be two floats")
    else:
        raise ValueError(f"{where}: {_shown(kind)} is not a kind of argument")


def _expect_keys(value: Any, where: str, needed: set[str], optional: set[str] | None = None) -> None:
    if not isinstance(value, dict):
        raise ValueError(f"{where} must be an object")
    missing, unknown = needed - value.keys(), value.keys() - needed - (optional or set())
    if missing:
        raise ValueError(f"{where}: {', '.join(sorted(missing))} is missing")
    if unknown:
        raise ValueError(f"{where}: {_shown(min(unknown))} is not a key that is known here")


def _shown(value: Any) -> str:
    """A received value, shortened for a message."""
    text = ascii(value)
    return text if len(text) <= 60 else text[:57] + "..."
