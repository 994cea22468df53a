"""The nesting of a batch: converts a value to JSON plus a flat list of leaves, and back. Does not import torch.

{"leaf": 3}   {"tuple": [...]}   {"list": [...]}   {"dict": {"key": ...}}   {"value": 1.5}
"""

import math
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from kitsune.submission.format.limits import MAX_INTEGER

Path = tuple[str | int, ...]
_KEY = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,63}", re.ASCII)
_TEXT = re.compile(r"[A-Za-z0-9_ .:/-]{0,64}", re.ASCII)
_MAX_DEPTH = 8


def describe(value: Any, is_leaf: Callable[[Any], bool], leaves: list[Any], where: str) -> dict[str, Any]:
    """The structure of `value`. Its leaves are appended to `leaves`, those of a dict in order of sorted keys.

    Raises ValueError naming the part that an archive cannot represent.
    """
    if is_leaf(value):
        leaves.append(value)
        return {"leaf": len(leaves) - 1}
    if isinstance(value, dict):
        for key in value:
            if not isinstance(key, str) or not _KEY.fullmatch(key):
                raise ValueError(f"{where} has the key {key!r}; keys must be identifiers")
        return {"dict": {key: describe(value[key], is_leaf, leaves, f"{where}[{key!r}]") for key in sorted(value)}}
    if isinstance(value, (tuple, list)):
        kind = "tuple" if isinstance(value, tuple) else "list"
        return {kind: [describe(part, is_leaf, leaves, f"{where}[{i}]") for i, part in enumerate(value)]}
    if not _is_constant(value):
        raise ValueError(
            f"{where} is a {type(value).__name__}; a batch may hold tensors, numbers, None and plain words, "
            "in tuples, lists and dicts"
        )
    return {"value": value}


def substitute(value: Any, is_leaf: Callable[[Any], bool], leaves: Iterator[Any]) -> Any:
    """`value` with other leaves, in the order in which `describe` lists them. Named tuples keep their type."""
    if is_leaf(value):
        return next(leaves)
    if isinstance(value, dict):
        replaced = {key: substitute(value[key], is_leaf, leaves) for key in sorted(value)}
        return {key: replaced[key] for key in value}
    if isinstance(value, tuple):
        parts = [substitute(part, is_leaf, leaves) for part in value]
        return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)
    if isinstance(value, list):
        return [substitute(part, is_leaf, leaves) for part in value]
    return value


def assemble(structure: dict[str, Any], leaves: Sequence[Any]) -> Any:
    """The value with this structure and these leaves. Inverse of `describe`."""
    ((kind, content),) = structure.items()
    if kind == "leaf":
        return leaves[content]
    if kind == "dict":
        return {key: assemble(part, leaves) for key, part in content.items()}
    if kind == "value":
        return content
    parts = [assemble(part, leaves) for part in content]
    return tuple(parts) if kind == "tuple" else parts


def leaf_paths(structure: dict[str, Any], path: Path = ()) -> Iterator[tuple[int, Path]]:
    """The index and path of every leaf, in order."""
    ((kind, content),) = structure.items()
    if kind == "leaf":
        yield content, path
    elif kind == "dict":
        for key in sorted(content):
            yield from leaf_paths(content[key], (*path, key))
    elif kind != "value":
        for index, part in enumerate(content):
            yield from leaf_paths(part, (*path, index))


def checked_structure(value: Any, where: str = "structure", depth: int = 0) -> dict[str, Any]:
    """Validates a structure and returns it. Raises ValueError naming the invalid part."""
    if not isinstance(value, dict) or len(value) != 1 or depth > _MAX_DEPTH:
        raise ValueError(f"{where} must be an object of one key, at most {_MAX_DEPTH} deep")
    ((kind, content),) = value.items()
    if kind == "leaf":
        if type(content) is not int or content < 0:
            raise ValueError(f"{where}.leaf must be the number of a leaf")
    elif kind in ("tuple", "list"):
        if not isinstance(content, list):
            raise ValueError(f"{where}.{kind} must be a list")
        for index, part in enumerate(content):
            checked_structure(part, f"{where}.{kind}[{index}]", depth + 1)
    elif kind == "dict":
        if not isinstance(content, dict) or not all(_KEY.fullmatch(key) for key in content):
            raise ValueError(f"{where}.dict must be an object whose keys are identifiers")
        for key, part in content.items():
            checked_structure(part, f"{where}.dict.{key}", depth + 1)
    elif kind != "value" or not _is_constant(content):
        raise ValueError(f"{where} must be a leaf, tuple, list, dict or value")
    return value


def _is_constant(value: Any) -> bool:
    if isinstance(value, str):
        return _TEXT.fullmatch(value) is not None
    if isinstance(value, float):
        return math.isfinite(value)
    return value is None or isinstance(value, bool) or (type(value) is int and abs(value) <= MAX_INTEGER)
