"""nn.Transformer asks the values of a mask whether it is causal, and export has no values: eager answers for it."""

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch import nn
from torch.nn.modules import transformer

_ASKED = "_detect_is_causal_mask"


def asks(root: nn.Module) -> bool:
    """Whether there is a module in it that looks at its mask."""
    return any(isinstance(module, nn.TransformerEncoder | nn.TransformerDecoder) for module in root.modules())


@contextlib.contextmanager
def noted() -> Iterator[list[bool]]:
    """The list of what was answered, call by call."""
    answers: list[bool] = []

    def note(ask: Callable[..., bool], *args: Any, **kwargs: Any) -> bool:
        answers.append(ask(*args, **kwargs))
        return answers[-1]

    with _replaced(note):
        yield answers


@contextlib.contextmanager
def repeated(answers: Sequence[bool]) -> Iterator[None]:
    """Gives the same answers in the same order; a call beyond them looks for itself."""
    left = iter(answers)

    def repeat(ask: Callable[..., bool], *args: Any, **kwargs: Any) -> bool:
        answer = next(left, None)
        return ask(*args, **kwargs) if answer is None else answer

    with _replaced(repeat):
        yield


@contextlib.contextmanager
def _replaced(answer: Callable[..., bool]) -> Iterator[None]:
    """`answer` in place of torch's function, which is its first argument. Other threads keep torch's."""
    ask: Callable[..., bool] = getattr(transformer, _ASKED)
    mine = threading.get_ident()

    def asked(*args: Any, **kwargs: Any) -> bool:
        return answer(ask, *args, **kwargs) if threading.get_ident() == mine else ask(*args, **kwargs)

    setattr(transformer, _ASKED, asked)
    try:
        yield
    finally:
        setattr(transformer, _ASKED, ask)
