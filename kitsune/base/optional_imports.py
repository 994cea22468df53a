"""Imports modules that need an optional dependency, and tells which version is installed."""

import importlib
from collections.abc import Collection
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from kitsune.errors import UnfitError


def installed_version(package: str) -> str:
    """The version of an installed package, else an empty string."""
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def load(module: str, *, extra: str, packages: Collection[str]) -> Any:
    """The imported module.

    Raises UnfitError that says what to install when one of `packages` is missing: the import names of the packages that
    the extra installs.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if missing not in packages:
            raise
        raise UnfitError(
            f"this needs {missing}, which is not installed; pip install 'kitsune-torch[{extra}]'"
        ) from error
