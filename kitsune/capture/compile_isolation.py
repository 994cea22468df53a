"""Gives a function a code object of its own, so that torch.compile shares none of its cache with other functions."""

import contextlib
import logging
import weakref
from collections.abc import Callable, Iterable, Iterator
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
    """A set of functions that iterates over the user's own only. Torch 2.11 writes its settings to a log as JSON, and
    logs an error where it finds functions."""

    def __init__(self, users: Iterable[Any]) -> None:
        self._users = tuple(users)
        self.holders = 0
        super().__init__(self._users)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._users)


def leave_out_repeated_logs(undo: contextlib.ExitStack) -> None:
    """Until `undo`, torch.compile leaves out those methods of loggers by which transformers logs a message once.

    Otherwise each breaks the graph in two. GPT2LMHeadModel of transformers 5 calls one between its last layer and its
    loss, so its logits, 0.4 GiB for 8 sequences of 512, leave the first graph. Several may be in force.
    """
    config: Any = torch._dynamo.config
    left_out = config.ignore_logger_methods
    if not isinstance(left_out, Unlisted):
        left_out = config.ignore_logger_methods = Unlisted(left_out)
    left_out.update(
        method for name, method in vars(logging.Logger).items() if name.endswith("_once") and is_of_transformers(method)
    )
    left_out.holders += 1
    undone = weakref.finalize(undo, give_back, left_out)  # also where nobody closes a step that is forgotten
    undone.atexit = False  # torch's modules are gone by then
    undo.callback(undone)


def give_back(left_out: Unlisted) -> None:
    config: Any = torch._dynamo.config
    left_out.holders -= 1
    if not left_out.holders and config.ignore_logger_methods is left_out:
        config.ignore_logger_methods = set(iter(left_out))


def is_of_transformers(function: Any) -> bool:
    return callable(function) and (getattr(function, "__module__", None) or "").startswith("transformers.")
