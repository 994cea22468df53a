"""Answers nn.Transformer's check whether a mask is causal: export has no values, so an eager run records the result."""

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch import nn
from torch.nn.modules import transformer

_ASKED = "_detect_is_causal_mask"


def asks(root: nn.Module) -> bool:
    """Whether a module in it checks the values of its mask."""
    return any(isinstance(module, nn.TransformerEncoder | nn.TransformerDecoder) for module in root.modules())


@contextlib.contextmanager
def noted() -> Iterator[list[bool]]:
    """Records the answer of every check in the block, in order."""
    answers: list[bool] = []

    def note(ask: Callable[..., bool], *args: Any, **kwargs: Any) -> bool:
        answers.append(ask(*args, **kwargs))
        return answers[-1]

    with _replaced(note):
        yield answers


@contextlib.contextmanager
def repeated(answers: Sequence[bool]) -> Iterator[None]:
    """Replays recorded answers in order; further calls check the values."""
    left = iter(answers)

    def repeat(ask: Callable[..., bool], *args: Any, **kwargs: Any) -> bool:
        answer = next(left, None)
        return ask(*args, **kwargs) if answer is None else answer

    with _replaced(repeat):
        yield


@contextlib.contextmanager
def _replaced(answer: Callable[..., bool]) -> Iterator[None]:
    """Replaces torch's function by `answer`, which gets torch's as its first argument. For this thread only."""
    ask: Callable[..., bool] = getattr(transformer, _ASKED)
    mine = threading.get_ident()

    def asked(*args: Any, **kwargs: Any) -> bool:
        return answer(ask, *args, **kwargs) if threading.get_ident() == mine else ask(*args, **kwargs)

    setattr(transformer, _ASKED, asked)
    try:
        yield
    finally:
        setattr(transformer, _ASKED, ask)
