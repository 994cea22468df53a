"""The part of a document that does not depend on the loss, for the model fingerprint. Does not import torch.

Splitting a step into forward and loss leaves traces of the loss in the forward: its outputs and their order, tensors
that it only passes on, and so the numbering of all values. `forward_part` removes them.
"""

from typing import Any

from kitsune.submission.format.blocks import block_json
from kitsune.submission.format.document import Document


def forward_part(document: Document) -> dict[str, Any]:
    """The forward's nodes, the tensors of the model, the leaves of x and the optimizer, as JSON.

    All parameters are kept in order, whether the forward reads them or not, since the update does. Buffers and
    constants are kept if the forward reads them, in the order in which it does first.
    """
    block = document.forward
    nodes = block_json(block)["nodes"]
    kept = _kept_tensors(document)
    names = {f"t{index}": f"t{place}" for place, index in enumerate(kept)}
    number = {index: place for place, index in enumerate(kept)}
    optimizer = document.optimizer.model_dump(mode="json")
    for group in optimizer["groups"]:
        group["parameters"] = [number[index] for index in group["parameters"]]
    return {
        "format": document.format,
        "version": document.version,
        "training": document.training,
        "tensors": [document.tensors[index].model_dump(mode="json") for index in kept],
        "inputs": [entry.model_dump(mode="json") for entry in document.inputs[: document.x_leaves]],
        "x": _as_arguments(document.x),
        "forward": _renamed(nodes, [names.get(source, source) for source in block.inputs]),
        "optimizer": optimizer,
    }


def _kept_tensors(document: Document) -> list[int]:
    trained = {index for group in document.optimizer.groups for index in group.parameters}
    parameters = [
        index
        for index, entry in enumerate(document.tensors)
        if entry.kind == "parameter" and (index in trained or not all(name.startswith(":") for name in entry.names))
    ]
    read = [int(source[1:]) for source in document.forward.inputs if source[0] == "t"]
    return [*parameters, *(index for index in read if document.tensors[index].kind != "parameter")]


def _as_arguments(x: dict[str, Any]) -> dict[str, Any]:
    """The structure of x in normal form: `model(x)` and `model(*(x,))` are the same call."""
    return x if x.keys() & {"tuple", "dict"} else {"tuple": [x]}


def _renamed(nodes: list[dict[str, Any]], sources: list[str]) -> list[dict[str, Any]]:
    """The nodes with inputs referred to by source, and results of nodes renumbered from 0."""

    def renamed(argument: Any) -> Any:
        if isinstance(argument, str) and argument.startswith("%"):
            number = int(argument[1:])
            return sources[number] if number < len(sources) else f"%{number - len(sources)}"
        if isinstance(argument, list):
            return [renamed(part) for part in argument]
        return {key: renamed(part) for key, part in argument.items()} if isinstance(argument, dict) else argument

    return [{**node, **{key: renamed(node[key]) for key in ("args", "kwargs") if key in node}} for node in nodes]
