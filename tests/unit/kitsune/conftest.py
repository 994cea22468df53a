"""What makes Triton's interpreter more than twice as fast.

It does not look for overflows of integers: the sizes here are far from any. tests/gpu has those at which an index
could, without an interpreter. For each function that a kernel calls it does not look through all of triton.language
again for what it puts its own functions in place of.
"""

import inspect
from dataclasses import replace
from functools import cache
from typing import Any

import triton.language as tl
from triton.runtime import interpreter

BUILDER = interpreter.interpreter_builder
BUILDER.options = replace(BUILDER.options, sanitize_overflow=False)


@cache
def builtins_of(package: Any) -> list[str]:
    """Names of its builtins. First called before the interpreter replaces any of them."""
    return [name for name, member in inspect.getmembers(package) if tl.core.is_builtin(member)]


def patch_builtin(package: Any, builder: Any, scope: Any) -> None:
    names = builtins_of(package)
    if names and tl.core.is_builtin(getattr(package, names[0])):
        for name in names:
            interpreter._patch_attr(package, name, getattr(package, name), builder, scope)


interpreter._patch_builtin = patch_builtin
