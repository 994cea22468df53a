"""Attach: finds the model that an optimizer trains, by its first forward, and routes the later ones.

The root is the outermost module whose parameters cover the optimizer's. Its `_compiled_call_impl` is set, as public
`Module.compile()` does: class, hooks, names and `state_dict` keys stay, and copies and pickles of the model are plain.
"""

import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.nn.modules.module import register_module_forward_pre_hook

Route = Callable[..., Any]


class Attachment:
    """Watches all forwards of the process until the root is found, then none."""

    def __init__(
        self, parameters: Callable[[], Iterable[torch.nn.Parameter]], found: Callable[[torch.nn.Module], Route | None]
    ) -> None:
        self._parameters = parameters
        self._found = found
        self._root: weakref.ref[torch.nn.Module] | None = None
        self._hook = register_module_forward_pre_hook(self._look)

    @property
    def root(self) -> torch.nn.Module | None:
        return self._root() if self._root is not None else None

    def detach(self) -> None:
        """Every forward of the model is plain again."""
        self._hook.remove()
        root = self.root
        if root is not None:
            root._compiled_call_impl = None

    def _look(self, module: torch.nn.Module, _: Any) -> None:
        if torch.compiler.is_compiling() or not module.training:
            return
        wanted = {id(parameter) for parameter in self._parameters()}
        if not wanted <= {id(parameter) for parameter in module.parameters()}:
            return
        # Outermost modules are called first, so the first that covers is the root. This forward stays plain: the
        # route takes effect with the next call.
        self._hook.remove()
        route = self._found(module)
        if route is not None:
            self._root = weakref.ref(module)
            module._compiled_call_impl = route
