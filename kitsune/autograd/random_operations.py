"""Finds out whether a graph draws random numbers, without running it on data."""

from collections.abc import Sequence
from typing import Any, Final

import torch
from torch._guards import detect_fake_mode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

#: What is said of a graph that draws where it must not.
DRAWS: Final = "the step draws random numbers, which AOTAutograd may draw anew when it recomputes (pytorch#190758)"


class RandomOperations(TorchDispatchMode):
    """Notes in `drew` whether an operation within it draws. Attention without dropout does not."""

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()
        self.drew = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded in getattr(func, "tags", ()):
            self.drew |= argument_of(func, "dropout_p", args, kwargs) != 0.0
        return func(*args, **kwargs)


def argument_of(func: Any, name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """The value of an operator's argument; None if it has none of that name."""
    for place, argument in enumerate(func._schema.arguments):
        if argument.name == name:
            return kwargs.get(name, args[place] if place < len(args) else argument.default_value)
    return None


def draws(graph: torch.fx.GraphModule, inputs: Sequence[Any]) -> bool:
    """Whether the graph draws random numbers, for inputs like these (fake or real tensors, numbers)."""
    fake_mode = detect_fake_mode(inputs) or torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True)

    def faked(leaf: Any) -> Any:
        return fake_mode.from_tensor(leaf) if isinstance(leaf, torch.Tensor) else leaf

    with torch.no_grad(), fake_mode, RandomOperations() as found:
        graph(*pytree.tree_map(faked, list(inputs)))
    return found.drew
