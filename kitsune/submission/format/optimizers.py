"""Converts an optimizer of torch.optim to its entry in a document, and back."""

import inspect
from collections.abc import Mapping, Sequence
from typing import Any, get_args

import torch

from kitsune.errors import ArchiveError, ExportError
from kitsune.submission.format.document import OPTIONS, Group, OptimizerEntry, OptimizerName
from kitsune.submission.format.source import WAY_OUT
from kitsune.update.optimizer_flags import given_groups


def describe_optimizer(optimizer: torch.optim.Optimizer, number: Mapping[int, int]) -> OptimizerEntry:
    """The entry of an optimizer. `number[id(parameter)]` is the index of its tensor. Raises ExportError."""
    kind = type(optimizer)
    name = kind.__name__
    if name not in get_args(OptimizerName) or kind is not getattr(torch.optim, name, None):
        raise ExportError(
            f"optimizer {kind.__module__}.{name} cannot be exported; these of torch.optim can: "
            f"{', '.join(get_args(OptimizerName))}; {WAY_OUT}"
        )
    accepted = [option for option in _arguments(kind) if option in OPTIONS]
    groups = []
    for group in given_groups(optimizer):
        unknown = [parameter for parameter in group["params"] if id(parameter) not in number]
        if unknown:
            raise ExportError(
                f"the optimizer trains {len(unknown)} tensors that are not parameters of the model, the first of shape "
                f"{list(unknown[0].shape)}; register them in the model, or {WAY_OUT}"
            )
        options = {option: _plain(group[option], option) for option in accepted if option in group}
        groups.append(Group(parameters=tuple(number[id(parameter)] for parameter in group["params"]), options=options))
    return OptimizerEntry.model_validate({"name": name, "groups": groups})


def build_optimizer(entry: OptimizerEntry, tensors: Sequence[torch.Tensor]) -> torch.optim.Optimizer:
    """The optimizer of an entry, over `tensors`. Raises ArchiveError when torch cannot construct it."""
    kind = getattr(torch.optim, entry.name, None)
    if kind is None:
        raise ArchiveError(f"optimizer: torch {torch.__version__} has no {entry.name}")
    unknown = {option for group in entry.groups for option in group.options} - set(_arguments(kind))
    if unknown:
        raise ArchiveError(f"optimizer: {entry.name} of torch {torch.__version__} has no option {min(unknown)}")
    groups = [
        {"params": [tensors[index] for index in group.parameters], **_options(group, tensors)} for group in entry.groups
    ]
    defaults = {key: value for key, value in groups[0].items() if key != "params"}
    try:
        return kind(groups, **defaults)
    except (TypeError, ValueError, RuntimeError, IndexError) as error:
        raise ArchiveError(f"optimizer: {entry.name} cannot be built: {error}") from error


def _arguments(kind: type) -> list[str]:
    return list(inspect.signature(kind).parameters)


def _options(group: Group, tensors: Sequence[torch.Tensor]) -> dict[str, Any]:
    options = dict(group.options)
    if options.get("capturable") and not any(tensors[index].is_cuda for index in group.parameters):
        options["capturable"] = False  # torch refuses it on a CPU, where it has no meaning
    return options


def _plain(value: Any, option: str) -> Any:
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        return value.item()
    if isinstance(value, (tuple, list)):
        return [_plain(part, option) for part in value]
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    raise ExportError(f"the optimizer's option {option}, a {type(value).__name__}, cannot be exported; {WAY_OUT}")
