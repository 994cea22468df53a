"""Finds lines of user code for the error messages of export."""

import inspect
import re
import traceback
from pathlib import Path
from typing import Final

import torch
from torch.fx import Node as FxNode

WAY_OUT: Final = "write a workload file and tune it locally instead: kitsune tune FILE.py:make_workload"
_TORCH = str(Path(torch.__file__).parent)
_KITSUNE = str(Path(__file__).parents[2])
_FRAME = re.compile(r'File "([^"\n]+)", line (\d+), in .*\n\s*(\S.*)')


def line_of_error(error: BaseException) -> str:
    """The innermost line outside torch and Kitsune in a traceback, as ` (model.py:12: h = f(x))`, or ""."""
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if _is_theirs(frame.filename):
            return f" ({frame.filename}:{frame.lineno}: {frame.line})"
    return ""


def line_of_class(kind: type) -> str:
    """The line where a class is defined, in the same format, or ""."""
    try:
        lines, number = inspect.getsourcelines(kind)
        return f" ({inspect.getsourcefile(kind)}:{number}: {lines[0].strip().removesuffix(':')})"
    except (OSError, TypeError):
        return ""


def line_of_node(node: FxNode) -> str:
    """The line that created a node of an exported graph, in the same format, or ""."""
    for file, line, code in reversed(_FRAME.findall(node.meta.get("stack_trace") or "")):
        if _is_theirs(file):
            return f" ({file}:{line}: {code.strip()})"
    return ""


def _is_theirs(file: str) -> bool:
    inside = file.startswith((_TORCH, _KITSUNE, "torch/", "<"))
    return not inside and not file.endswith("contextlib.py")
