"""Finds Python hooks of a model, its parameters or the whole process. A replayed graph does not run them."""

from collections.abc import Collection, Iterator
from functools import partial
from operator import attrgetter
from types import MethodType
from typing import Any, Final

import torch
from torch.nn.modules import module as modules

HOOKS: Final = (
    ("_forward_pre_hooks", "a forward pre-hook"),
    ("_forward_hooks", "a forward hook"),
    ("_backward_pre_hooks", "a backward pre-hook"),
    ("_backward_hooks", "a backward hook"),
)
GRADIENT_HOOKS: Final = attrgetter("_backward_hooks")
ACCUMULATED_HOOKS: Final = attrgetter("_post_accumulate_grad_hooks")


class Hooks:
    """Guard on the number of hooks of a model's modules, which torch.compile does not check again."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._hooks = [getattr(module, name) for module in model.modules() for name, _ in HOOKS]
        self._seen = self._count()

    def unchanged(self) -> bool:
        return self._count() == self._seen

    def _count(self) -> tuple[int, bool]:
        return sum(map(len, self._hooks)), has_global_hooks()


def first_hook(model: torch.nn.Module, whole: str = "the model") -> str | None:
    """The first Python hook on a module or parameter, in words, or None. `whole`: what to call the model itself."""
    for name, module in model.named_modules():
        for attribute, words in HOOKS:
            if getattr(module, attribute):
                return f"{words} on {name or whole}"
    for name, parameter in model.named_parameters():
        if is_hooked(parameter):
            return f"a gradient hook on {name}"
    return None


def why_skipped(model: torch.nn.Module, loss_fn: Any = None) -> str | None:
    """Why a replay would skip Python code of the model, or of a loss that is a module; None if it would not.

    Hooks are one reason. The other is TorchScript, because changes of its members cannot be seen.
    """
    roots = zip(roots_of(model, loss_fn), ("the model", "the loss"), strict=False)
    found = next(filter(None, (first_hook(root, whole) for root, whole in roots)), None)
    if found is None and has_global_hooks():
        found = "a hook on all modules"
    if found is not None:
        return f"{found} would not run in a replayed graph"
    scripted = (name for name, module in named_modules(model, loss_fn) if isinstance(module, torch.jit.ScriptModule))
    name = next(scripted, None)
    return None if name is None else f"TorchScript runs {name or 'the model'}, which a replayed graph cannot watch"


def has_global_hooks() -> bool:
    """Whether there are hooks on all modules of the process, other than Kitsune's, which have `is_ours`."""
    return bool(
        modules._global_forward_hooks
        or modules._global_backward_hooks
        or modules._global_backward_pre_hooks
        or not all(getattr(hook, "is_ours", False) for hook in modules._global_forward_pre_hooks.values())
    )


def is_hooked(parameter: torch.nn.Parameter) -> bool:
    return are_hooked([parameter])


def are_hooked(parameters: Collection[torch.nn.Parameter]) -> bool:
    """Whether any of the parameters has a gradient hook."""
    return any(map(GRADIENT_HOOKS, parameters)) or any(map(ACCUMULATED_HOOKS, parameters))


def roots_of(model: torch.nn.Module, loss_fn: Any) -> list[torch.nn.Module]:
    """The model, and the loss if it is a module, a method of one, or a `partial` of either."""
    while isinstance(loss_fn, (partial, MethodType)):
        loss_fn = loss_fn.func if isinstance(loss_fn, partial) else loss_fn.__self__
    return [model, loss_fn] if isinstance(loss_fn, torch.nn.Module) else [model]


def named_modules(model: torch.nn.Module, loss_fn: Any) -> Iterator[tuple[str, torch.nn.Module]]:
    """The modules of the model, and those of the loss if it is a module, by name."""
    for root, prefix in zip(roots_of(model, loss_fn), ("", "loss_fn"), strict=False):
        yield from root.named_modules(prefix=prefix)
