"""A function behind a code object of its own: what torch.compile keeps of it is kept apart from all else."""

from collections.abc import Callable
from typing import Any

import torch


def own_code(function: Callable[..., Any], otherwise: Callable[[], None] | None = None) -> Callable[..., Any]:
    """The function as torch.compile is to be given it; `otherwise` is called in each call that it does not compile.

    torch.compile keeps what it compiled by code object: eight plans or models later (`recompile_limit`) it would
    silently stop compiling, and it would hand one plan the code of another.
    """

    def call(*args: Any, **kwargs: Any) -> Any:
        if otherwise is not None and not torch.compiler.is_compiling():
            otherwise()
        return function(*args, **kwargs)

    call.__code__ = call.__code__.replace()
    return call
