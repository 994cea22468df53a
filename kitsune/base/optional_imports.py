"""The name of a module that needs an extra in; the module, or an UnfitError that says what to install, out."""

import importlib
from collections.abc import Collection
from typing import Any

from kitsune.errors import UnfitError


def load(module: str, *, extra: str, packages: Collection[str]) -> Any:
    """`packages` are those of the extra, by the names under which they are imported."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if missing not in packages:
            raise
        raise UnfitError(
            f"this needs {missing}, which is not installed; pip install 'kitsune-torch[{extra}]'"
        ) from error
