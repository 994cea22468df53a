"""Finds the model that an optimizer trains, by its first forward, and routes its later forwards.

The root is the outermost module whose parameters cover the optimizer's. Its `_compiled_call_impl` is set, as public
`Module.compile()` does: class, hooks, names and `state_dict` keys stay, and copies and pickles of the model are plain.
"""

import contextlib
import warnings
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.nn.modules import module as modules
from torch.utils.hooks import RemovableHandle

Forward = Callable[..., Any]


# torch.compile warns that a hook on all modules fires again for the module that it makes. That is intended here.
TOLD_TWICE = "Using `torch.compile\\(module\\)` when there are global hooks on modules"


class Route:
    """Replaces the call of a routed model; `owner` is the attachment that set it."""

    __slots__ = ("owner", "run")

    def __init__(self, owner: "Attachment", run: Forward) -> None:
        self.owner = owner
        self.run = run

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.run(*args, **kwargs)


class Lookout:
    """A hook on all forwards of the process. It holds its attachment weakly: the optimizer may be deleted before."""

    is_ours = True  # see `kitsune.autograd.hooks.has_global_hooks`

    def __init__(self, attachment: "Attachment") -> None:
        self.attachment = weakref.ref(attachment)
        self._handle: RemovableHandle = modules.register_module_forward_pre_hook(self)
        warnings.filterwarnings("ignore", TOLD_TWICE, UserWarning)
        self._filter = warnings.filters[0]

    def __call__(self, module: torch.nn.Module, _: Any) -> None:
        if torch.compiler.is_compiling() or not module.training:
            return
        attachment = self.attachment()
        if attachment is None:
            self.remove()
        else:
            attachment.look(module)

    def wants(self, parameters: set[int]) -> bool:
        """Whether a parameter of its optimizer is among these (ids)."""
        attachment = self.attachment()
        return attachment is not None and any(id(parameter) in parameters for parameter in attachment._parameters())

    def remove(self) -> None:
        self._handle.remove()
        with contextlib.suppress(ValueError):  # somebody has put the filters back as they were before us
            warnings.filters.remove(self._filter)  # type: ignore[attr-defined]


class Attachment:
    """Watches all forwards of the process, from `start` on and until the root is found.

    `found` gives the root's forward, or None to leave it plain; `lost` is called when a newer optimizer of the same
    parameters takes the root over.
    """

    def __init__(
        self,
        parameters: Callable[[], Iterable[torch.nn.Parameter]],
        found: Callable[[torch.nn.Module], Forward | None],
        lost: Callable[[], None],
    ) -> None:
        self._parameters = parameters
        self._found = found
        self._lost = lost
        self._root: weakref.ref[torch.nn.Module] | None = None
        self._lookout: Lookout | None = None

    def start(self) -> None:
        self._lookout = Lookout(self)

    @property
    def is_looking(self) -> bool:
        return self._lookout is not None

    @property
    def root(self) -> torch.nn.Module | None:
        """The model whose forwards are routed."""
        return self._root() if self._root is not None else None

    def detach(self) -> None:
        """Stops routing and watching: every forward of the model is plain again."""
        self._stop_looking()
        root, self._root = self.root, None
        if root is not None and is_routed(root) and root._compiled_call_impl.owner is self:  # type: ignore[union-attr]
            del root._compiled_call_impl

    def look(self, module: torch.nn.Module) -> None:
        """Takes the module as the root if its parameters cover the optimizer's: outermost modules are called first.

        The current forward stays plain: a route takes effect with the next call.
        """
        wanted = {id(parameter) for parameter in self._parameters()}
        if not wanted <= {id(parameter) for parameter in module.parameters()}:
            return
        self._stop_looking()
        self._take_over(module, wanted)
        self.route(module)

    def route(self, module: torch.nn.Module) -> None:
        """The module's later forwards are those that `found` gives for it."""
        forward = self._found(module)
        if forward is not None:
            self._root = weakref.ref(module)
            module._compiled_call_impl = Route(self, forward)

    def _stop_looking(self) -> None:
        if self._lookout is not None:
            self._lookout.remove()
            self._lookout = None

    def _take_over(self, module: torch.nn.Module, wanted: set[int]) -> None:
        """The newest optimizer of the same parameters wins: a notebook cell may run again."""
        route = module._compiled_call_impl
        if isinstance(route, Route) and wanted & {id(parameter) for parameter in route.owner._parameters()}:
            route.owner._lost()


def is_routed(model: torch.nn.Module) -> bool:
    """Whether a KitsuneOptimizer runs this model's forwards."""
    return isinstance(model._compiled_call_impl, Route)


def is_looked_for(model: torch.nn.Module) -> bool:
    """Whether another optimizer still looks for this model: a replay would hide its forward."""
    lookouts = [hook for hook in modules._global_forward_pre_hooks.values() if isinstance(hook, Lookout)]
    if not lookouts:
        return False
    own = {id(parameter) for parameter in model.parameters()}
    return any(lookout.wants(own) for lookout in lookouts)
