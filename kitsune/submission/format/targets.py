"""Maps the names of operators in an archive to torch's callables, and back."""

import math
import operator
from collections.abc import Callable
from typing import Any, Final

import torch

from kitsune.submission.format.ops import PYTHON, is_allowed

_SYMBOLIC = ("float", "int", "max", "min", "not", "sum", "ite")
_ARITHMETIC = ("add", "sub", "mul", "truediv", "floordiv", "mod", "neg", "abs", "eq", "ne", "lt", "le", "gt", "ge")
_PYTHON: Final[dict[str, Callable[..., Any]]] = {
    "py.getitem": operator.getitem,
    **{f"py.{name}": getattr(operator, name) for name in (*_ARITHMETIC, "and_", "or_", "not_")},
    **{f"py.sym_{name}": getattr(torch, f"sym_{name}") for name in _SYMBOLIC if hasattr(torch, f"sym_{name}")},
    # export writes torch._sym_sqrt, a private name; on numbers it is math.sqrt
    "py.sym_sqrt": math.sqrt,
    **{f"py.{name}": getattr(math, name) for name in ("ceil", "floor", "trunc", "sqrt")},
    "py.round": round,
}
_NAMES: Final = {function: name for name, function in _PYTHON.items() if name != "py.sym_sqrt"}


def target_name(target: Any) -> str:
    """The name of an operator, as `aten.add.Tensor` or `py.mul`; for others a name that `is_allowed` refuses."""
    if isinstance(target, torch._ops.OpOverload):
        return str(target)
    if callable(target) and target in _NAMES:
        return _NAMES[target]
    name = getattr(target, "__name__", str(target))
    return "py.sym_sqrt" if name == "_sym_sqrt" else name


def target(name: str) -> Callable[..., Any]:
    """The callable of a name. Raises LookupError when it is not allowed, or this torch does not have it."""
    if not is_allowed(name):
        raise LookupError(f"{name} is not an operator that an archive may hold")
    if name in PYTHON:
        return _PYTHON[name]
    _, base, overload = name.split(".")
    found = getattr(getattr(torch.ops.aten, base, None), overload, None)
    if not isinstance(found, torch._ops.OpOverload):
        raise LookupError(f"torch {torch.__version__} has no operator {name}")
    return found
