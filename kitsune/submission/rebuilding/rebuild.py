"""Rebuilds a workload from an archive: modules around its graphs, an optimizer and a synthesised batch."""

from typing import Any

import torch
from torch import fx, nn

from kitsune.submission.format.archive import Archive
from kitsune.submission.format.document import Document, TensorEntry
from kitsune.submission.format.optimizers import build_optimizer
from kitsune.submission.format.rnn import flatten_rnn_weights
from kitsune.submission.format.structure import Path, assemble, leaf_paths
from kitsune.submission.rebuilding.decode import DTYPES, MEMORY_FORMATS, Decoder
from kitsune.submission.rebuilding.value_statistics import sample
from kitsune.workload import Workload


class RebuiltModel(nn.Module):
    """The forward of an archive. Takes x as the original model, returns what the loss needs: a tensor or a tuple.

    Its parameters are named t0, t1, ... in the order of the archive. Train or eval mode is part of the graph.
    """

    def __init__(self, graph: fx.GraphModule, structure: dict[str, Any]) -> None:
        super().__init__()
        self.graph = graph
        self.form = next(iter(structure))
        self.paths: tuple[Path, ...] = tuple(path for _, path in leaf_paths(structure))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        x = kwargs if self.form == "dict" else args if self.form == "tuple" else args[0]
        return self.graph(*[_at(x, path) for path in self.paths])


class RebuiltLoss(nn.Module):
    """The loss of an archive, from the output of RebuiltModel and y as the original loss function took it."""

    def __init__(self, graph: fx.GraphModule, structure: dict[str, Any]) -> None:
        super().__init__()
        self.graph = graph
        self.paths: tuple[Path, ...] = tuple(path for _, path in leaf_paths(structure))

    def forward(self, output: Any, y: Any) -> torch.Tensor:
        outputs = output if isinstance(output, tuple) else (output,)
        return self.graph(*outputs, *[_at(y, path) for path in self.paths])


def _at(value: Any, path: Path) -> Any:
    for key in path:
        value = value[key]
    return value


def rebuild(archive: Archive, device: str | torch.device = "cpu", seed: int = 0, randomness: bool = True) -> Workload:
    """A workload on `device` with the original's step, and with weights and batch drawn with `seed`.

    With `randomness=False` every dropout has p = 0. The global random state does not change. Raises ArchiveError when
    this torch lacks an operator or an option of the optimizer.
    """
    place = torch.device(device)
    document = archive.document
    generator = torch.Generator().manual_seed(seed)
    tensors = [_tensor(archive, entry, generator).to(place) for entry in document.tensors]
    tensors = [_registered(entry, tensor) for entry, tensor in zip(document.tensors, tensors, strict=True)]
    model, loss_fn = assemble_modules(document, tensors, place, randomness)
    flatten_rnn_weights(model.graph)
    leaves = [_leaf(document, index, generator, place) for index in range(len(document.inputs))]
    batch = (assemble(document.x, leaves), assemble(document.y, leaves))
    return Workload(model, loss_fn, build_optimizer(document.optimizer, tensors), batch)


def assemble_modules(
    document: Document, tensors: list[torch.Tensor], device: torch.device, randomness: bool = True
) -> tuple[RebuiltModel, RebuiltLoss | None]:
    """The modules of a document around the given tensors, one for each entry of `document.tensors`."""
    decoder = Decoder(device, randomness)
    sources = {f"t{index}": tensor for index, tensor in enumerate(tensors)}
    theirs = {name: sources.pop(name) for name in (document.loss.inputs if document.loss else ()) if name in sources}
    split = document.x_leaves
    forward = decoder.module(document.forward, [f"x{index}" for index in range(split)], sources)
    model = RebuiltModel(forward, document.x).train(document.training)
    if document.loss is None:
        return model, None
    names = [f"o{index}" for index in range(len(document.forward.outputs))]
    names += [f"y{index}" for index in range(split, len(document.inputs))]
    loss = decoder.module(document.loss, names, theirs)
    return model, RebuiltLoss(loss, document.y).train(document.training)


def _tensor(archive: Archive, entry: TensorEntry, generator: torch.Generator) -> torch.Tensor:
    if entry.spread is not None:
        return sample(entry.spread, entry.shape, entry.dtype, entry.layout, generator)
    data = archive.buffers[entry.blob or 0]
    values = torch.frombuffer(bytearray(data), dtype=DTYPES[entry.dtype]) if data else torch.empty(0)
    shaped = values.to(DTYPES[entry.dtype]).reshape(entry.shape)
    return shaped.clone(memory_format=MEMORY_FORMATS[entry.layout])


def _registered(entry: TensorEntry, tensor: torch.Tensor) -> torch.Tensor:
    if entry.kind == "parameter":
        return nn.Parameter(tensor, entry.requires_grad)
    return tensor.requires_grad_(entry.requires_grad)


def _leaf(document: Document, index: int, generator: torch.Generator, device: torch.device) -> torch.Tensor:
    entry = document.inputs[index]
    values = sample(entry.spread, document.input_shape(index), entry.dtype, entry.layout, generator)
    return values.to(device).requires_grad_(entry.requires_grad)
