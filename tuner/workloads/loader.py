"""Loads a workload by its name: "zoo:resnet18?batch=64", "train.py:make_workload" or "model.ksn"."""

import contextlib
import difflib
import importlib.util
import os
import re
import sys
import traceback
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from enum import StrEnum
from functools import partial
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Final
from urllib.parse import parse_qsl

import torch

from kitsune.base.digest import digest_of
from kitsune.device.backend import pick_device, rng_state, set_rng_state
from kitsune.errors import WorkloadError
from kitsune.submission.format.archive import Archive
from kitsune.submission.rebuilding.rebuild import rebuild
from kitsune.workload import Workload, check_trains, move_batch
from tuner.workloads.copies import copies_here
from tuner.zoo import ZOO
from tuner.zoo.recipe import SIZES, Recipe

ZOO_PREFIX: Final = "zoo:"
ARCHIVE_SUFFIX: Final = ".ksn"
FILE_AND_FUNCTION: Final = re.compile(r"(?P<path>.+\.py):(?P<function>[^:/\\]+)", re.DOTALL)
MAX_ERROR_CHARS: Final = 1000


class WorkloadSource(StrEnum):
    """The kind of a workload's name."""

    ZOO = "zoo"
    FILE = "file"
    ARCHIVE = "archive"


def workload_source(spec: str) -> WorkloadSource:
    """The kind of this name, by its form alone. Raises WorkloadError when it is none of them."""
    if spec.startswith(ZOO_PREFIX):
        return WorkloadSource.ZOO
    if FILE_AND_FUNCTION.fullmatch(spec):
        return WorkloadSource.FILE
    if spec.endswith(ARCHIVE_SUFFIX):
        return WorkloadSource.ARCHIVE
    if spec.removesuffix(":").endswith(".py"):
        raise WorkloadError(f"{spec!r} names no function; did you mean {spec.removesuffix(':') + ':make_workload'!r}?")
    raise WorkloadError(
        f"{spec!r} is not a workload; write zoo:NAME, FILE.py:FUNCTION or FILE{ARCHIVE_SUFFIX}"
        f"{_did_you_mean(spec, ZOO, prefix=ZOO_PREFIX)}"
    )


def load_workload(spec: str, device: str, seed: int = 0, *, randomness: bool = True) -> Workload:
    """The named workload on the device ("cpu", "cuda", "cuda:N"), with weights drawn from this seed.

    Without randomness every dropout of an archive has p = 0; user code is not changed. The caller's random state on
    host and device is restored. FILE.py:FUNCTION runs the user's code. Raises WorkloadError when there is no such
    workload or it cannot be built, ArchiveError for an invalid archive, UnfitError when there is no such device;
    torch.OutOfMemoryError passes through.
    """
    source = workload_source(spec)
    place = pick_device(device)
    with _seeded(seed, place):
        if source is WorkloadSource.ZOO:
            return _of_zoo(spec, place, seed)
        if source is WorkloadSource.FILE:
            return _of_file(spec, place, seed)
        return rebuild(Archive.load(_existing(spec)), device=str(place), seed=seed, randomness=randomness)


def check_spec(spec: str) -> None:
    """Checks that the named workload exists, without building it or running user code.

    Raises WorkloadError and ArchiveError like `load_workload`.
    """
    source = workload_source(spec)
    if source is WorkloadSource.ZOO:
        _recipe(spec)
    elif source is WorkloadSource.FILE:
        _existing(spec.rpartition(":")[0])
    else:
        Archive.load(_existing(spec))


def located(spec: str) -> str:
    """The name with an absolute path, since user code may change the working directory.

    Raises WorkloadError when there is no such file.
    """
    source = workload_source(spec)
    if source is WorkloadSource.ZOO:
        return spec
    if source is WorkloadSource.ARCHIVE:
        return str(_existing(spec))
    file, _, function = spec.rpartition(":")
    return f"{_existing(file)}:{function}"


@contextlib.contextmanager
def _seeded(seed: int, device: torch.device) -> Iterator[None]:
    before = rng_state(device)
    if device.type == "cpu":
        torch.default_generator.manual_seed(seed)  # torch.manual_seed would reseed every GPU too
    else:
        torch.manual_seed(seed)
    try:
        yield
    finally:
        set_rng_state(device, before)


# --- zoo:NAME?batch=N&seq=N&size=tiny|base


def _of_zoo(spec: str, device: torch.device, seed: int) -> Workload:
    recipe, copies = _recipe(spec), copies_here()
    if copies is None:
        return recipe.build(device)
    move = partial(_moved, spec=spec, device=device)
    return copies.get((spec, device, seed), recipe.build, move, device, is_ours=True)


def _recipe(spec: str) -> Recipe:
    name, _, query = spec.removeprefix(ZOO_PREFIX).partition("?")
    entry = ZOO.get(name)
    if entry is None:
        raise WorkloadError(f"the zoo has no {name!r}; there are {', '.join(ZOO)}{_did_you_mean(name, ZOO)}")
    options = _options(name, query)
    wanted = options.pop("size", "base")
    size = next((size for size in SIZES if size == wanted), None)
    if size is None:
        raise WorkloadError(f"zoo:{name} has no size {wanted!r}; there are {', '.join(SIZES)}")
    recipe = entry.recipe(size)
    limits = recipe.data.limits
    chosen = {option: _number(name, option, text, limits) for option, text in options.items()}
    return recipe.resized(chosen)


def _options(name: str, query: str) -> dict[str, str]:
    if not query:
        return {}
    try:
        pairs = parse_qsl(query, keep_blank_values=True, strict_parsing=True)
    except ValueError as error:
        raise WorkloadError(f"{query!r} of zoo:{name} is not a list of options; write NAME=VALUE&NAME=VALUE") from error
    options = dict(pairs)
    if len(options) < len(pairs):
        raise WorkloadError(f"{query!r} of zoo:{name} gives an option twice")
    return options


def _number(name: str, option: str, text: str, limits: Mapping[str, int]) -> int:
    if option not in limits:
        known = [*limits, "size"]
        raise WorkloadError(
            f"zoo:{name} has no option {option!r}; there are {', '.join(known)}{_did_you_mean(option, known)}"
        )
    if not re.fullmatch(r"[0-9]{1,9}", text) or not 1 <= int(text) <= limits[option]:
        raise WorkloadError(f"{option}={text!r} of zoo:{name} is not a whole number from 1 to {limits[option]}")
    return int(text)


def _did_you_mean(word: str, known: Iterable[str], prefix: str = "") -> str:
    close = difflib.get_close_matches(word, list(known), n=1)
    return f"; did you mean {prefix + close[0]!r}?" if close else ""


# --- FILE.py:FUNCTION


def _of_file(spec: str, device: torch.device, seed: int) -> Workload:
    file, _, function = spec.rpartition(":")
    path = _existing(file)  # resolved once: user code may change the working directory

    def moved(workload: Workload) -> Workload:
        with _UserCode(spec, path):
            return _moved(workload, spec, device)

    build, copies = partial(_from_file, spec, path, function), copies_here()
    workload = moved(build()) if copies is None else copies.get((spec, device, seed), build, moved, device)
    check_trains(workload.model, workload.optimizer)
    return workload


def _from_file(spec: str, path: Path, name: str) -> Workload:
    with _sibling_imports(path):
        with _UserCode(spec, path):
            module = _imported(path)
        function = getattr(module, name, None)
        if not callable(function):
            raise WorkloadError(_no_such_function(module, path, name))
        with _UserCode(spec, path):
            workload = function()
    if not isinstance(workload, Workload):
        raise WorkloadError(
            f"{spec} returned a value of type {type(workload).__name__}; "
            "it must return kitsune.Workload(model, loss_fn, optimizer, (x, y))"
        )
    return workload


def _existing(file: str) -> Path:
    path = Path(os.path.expanduser(file))
    if os.path.isfile(path):  # unlike Path.is_file, returns False for names that no file can have
        return path.resolve()
    if os.path.isdir(path):
        raise WorkloadError(f"{file!r} is a folder; name a file")
    similar = _did_you_mean(str(path), _siblings(path))
    raise WorkloadError(f"there is no file {file!r} (looked from {Path.cwd()}){similar}")


def _siblings(path: Path) -> list[str]:
    """The files with the same suffix in the folder of the path; none if there is no such folder."""
    try:
        names = os.listdir(path.parent)
    except (OSError, ValueError):  # ValueError: a null byte
        return []
    return [str(path.parent / name) for name in names if name.endswith(path.suffix)]


def _imported(path: Path) -> ModuleType:
    """Runs the file as a new module with a private name, so its `if __name__ == "__main__"` block does not run."""
    name = f"_kitsune_workload_{digest_of(str(path))[:16]}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise WorkloadError(f"{path} cannot be imported as Python source")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses, pickle and torch.compile look a class's module up by name
    with contextlib.ExitStack() as undo:
        undo.callback(sys.modules.pop, name, None)
        spec.loader.exec_module(module)
        undo.pop_all()
    return module


def _no_such_function(module: ModuleType, path: Path, name: str) -> str:
    functions = sorted(
        known
        for known, value in vars(module).items()
        if callable(value) and not known.startswith("_") and getattr(value, "__module__", None) == module.__name__
    )
    return (
        f"{path} has no function {name!r}; there are {', '.join(functions) or 'none'}{_did_you_mean(name, functions)}"
    )


@contextlib.contextmanager
def _sibling_imports(path: Path) -> Iterator[None]:
    """Lets the file import modules from its own folder, as `python FILE.py` does."""
    before = list(sys.path)
    sys.path.insert(0, str(path.parent))
    try:
        yield
    finally:
        sys.path[:] = before


class _UserCode:
    """Turns an exception of the user's file into a WorkloadError that names the user's line.

    Ctrl-C and torch.OutOfMemoryError pass through; the measuring process reports the latter as such.
    """

    def __init__(self, spec: str, path: Path) -> None:
        self.spec = spec
        self.path = path

    def __enter__(self) -> None:
        return None

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(error, Exception | SystemExit) and not isinstance(error, torch.OutOfMemoryError):
            place = _place_in(self.path, error, trace)
            text = f"{type(error).__name__}: {error}"[:MAX_ERROR_CHARS]
            raise WorkloadError(f"{self.spec} failed at {place}: {text}") from error


def _place_in(path: Path, error: BaseException, trace: TracebackType | None) -> str:
    """FILE:LINE of the innermost line of the file in the traceback; FILE alone when there is none."""
    lines = [frame.lineno for frame in traceback.extract_tb(trace) if frame.filename == str(path)]
    if isinstance(error, SyntaxError) and error.filename == str(path):
        lines.append(error.lineno)
    return f"{path}:{lines[-1]}" if lines else str(path)


def _moved(workload: Workload, spec: str, device: torch.device) -> Workload:
    """Moves model, optimizer and loss to the device. Parameters move in place, so the optimizer keeps them."""
    before = {id(parameter) for parameter in workload.model.parameters()}
    workload.model.to(device)
    if any(id(parameter) not in before for parameter in workload.model.parameters()):
        raise WorkloadError(
            f"moving the model of {spec} to {device} replaced its parameters, so its optimizer would update the old "
            "ones; build the model on that device in the function itself"
        )
    if isinstance(workload.loss_fn, torch.nn.Module):
        workload.loss_fn.to(device)
    if workload.optimizer.state:
        # loading a state casts every tensor of it to the device of its parameter
        workload.optimizer.load_state_dict(workload.optimizer.state_dict())
    return replace(workload, batch=move_batch(workload.batch, device))
