"""Gives a function a code object of its own, so that torch.compile shares none of its cache with other functions."""

import logging
from collections.abc import Callable, Iterator
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


class Unlisted(set[Any]):
    """A set that shows no members. Torch 2.11 logs its settings as JSON, and an error if it finds functions there."""

    def __iter__(self) -> Iterator[Any]:
        return iter(())


def leave_out_repeated_logs() -> None:
    """Lets torch.compile leave out the methods of loggers that log a message once, such as `warning_once`.

    Otherwise each breaks the graph in two. GPT2LMHeadModel of transformers 5 calls one between its last layer and its
    loss, so its logits, 0.4 GiB for 8 sequences of 512, leave the first graph. Compiled code logs no such message.
    """
    once = {getattr(logging.Logger, name) for name in vars(logging.Logger) if name.endswith("_once")}
    config: Any = torch._dynamo.config
    left_out = config.ignore_logger_methods
    if not all(one in left_out for one in once):
        config.ignore_logger_methods = Unlisted(once.union(left_out))
