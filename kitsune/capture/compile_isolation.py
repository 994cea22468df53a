"""Gives a function a code object of its own, so that torch.compile shares none of its cache with other functions."""

from collections.abc import Callable
from typing import Any

import torch


def own_code(function: Callable[..., Any], otherwise: Callable[[], None] | None = None) -> Callable[..., Any]:
    """The function to pass to torch.compile; `otherwise` is called in each call that is not compiled.

    torch.compile caches by code object: after eight plans or models (`recompile_limit`) it would silently stop
    compiling, and one plan could run the code of another.
    """

    def call(*args: Any, **kwargs: Any) -> Any:
        if otherwise is not None and not torch.compiler.is_compiling():
            otherwise()
        return function(*args, **kwargs)

    call.__code__ = call.__code__.replace()
    return call
