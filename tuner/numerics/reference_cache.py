"""Caches the reference and the yardstick errors of the numerics gate on disk, for all children of a run.

The first child that needs an entry computes it while the others wait for a file lock. The lock is released however its
process ends, and then the next child computes the entry. Nothing is stored if disk space is short.
"""

import contextlib
import fcntl
import hashlib
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from pydantic import TypeAdapter
from torch.utils import _pytree as pytree

from tuner.numerics.trace_errors import Errors, Trace, TraceStep, TrainingStart

FREE_SPACE_FACTOR = 2.0  # free disk space that is needed, as a multiple of what is stored

Made = TypeVar("Made")

_errors: TypeAdapter[Errors] = TypeAdapter(Errors)


@dataclass(frozen=True, slots=True)
class ReferenceCache:
    """Cache entries for one start and one batch, identified by a digest. Without a folder nothing is cached.

    A workload that draws different weights in each process has a different digest in each, and shares nothing.
    """

    folder: Path | None
    digest: str = ""

    def trace(self, name: str, make: Callable[[], tuple[Trace, str]]) -> tuple[Trace, str]:
        """The trace and its note. Gradients are loaded in fp32, parameters and buffers in their own dtype."""
        return self._of(f"{name}.pt", make, _save_trace, _load_trace)

    def errors(self, name: str, make: Callable[[], Errors]) -> Errors:
        return self._of(f"{name}.json", make, _save_errors, _load_errors)

    def _of(
        self,
        name: str,
        make: Callable[[], Made],
        save: Callable[[Made, Path], None],
        load: Callable[[Path], Made],
    ) -> Made:
        if self.folder is None:
            return make()
        path = self.folder / f"{self.digest}-{name}"
        with _held(path.with_suffix(".lock")):
            if path.exists():
                return load(path)
            made = make()
            fresh = path.with_suffix(".new")
            try:
                save(made, fresh)
                fresh.rename(path)
            except OSError:  # disk full: the next child computes it again
                fresh.unlink(missing_ok=True)
            return made


def cache_for(folder: str | None, start: TrainingStart, batch: Any) -> ReferenceCache:
    """The cache for traces that start with these weights and train on this batch."""
    return ReferenceCache(None) if folder is None else ReferenceCache(Path(folder), digest_of(start, batch))


def digest_of(start: TrainingStart, batch: Any) -> str:
    """A digest of the bytes of all tensors. 1 GB takes about a second."""
    digest = hashlib.sha256()
    for leaf in (*start.parameters, *start.buffers, *pytree.tree_leaves(batch)):
        if isinstance(leaf, torch.Tensor):
            digest.update(leaf.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()[:16]


@contextlib.contextmanager
def _held(path: Path) -> Iterator[None]:
    """Holds the lock of this file; waits for it."""
    with path.open("wb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _save_trace(made: tuple[Trace, str], path: Path) -> None:
    trace, note = made
    snapshots = {
        index: (recorded.loss, [_single(each) for each in recorded.gradients])
        for index, recorded in trace.snapshots.items()
    }
    whole = {
        "note": note,
        "snapshots": snapshots,
        "steps": trace.steps,
        "parameters": list(trace.parameters),
        "buffers": list(trace.buffers),
    }
    if shutil.disk_usage(path.parent).free < FREE_SPACE_FACTOR * _bytes_of(whole):
        raise OSError("too little disk space")
    torch.save(whole, path)


def _load_trace(path: Path) -> tuple[Trace, str]:
    found: Mapping[str, Any] = torch.load(path, mmap=True, weights_only=True)
    snapshots = {index: TraceStep(loss, gradients) for index, (loss, gradients) in found["snapshots"].items()}
    trace = Trace(snapshots=snapshots, steps=found["steps"], parameters=found["parameters"], buffers=found["buffers"])
    return trace, found["note"]


def _save_errors(made: Errors, path: Path) -> None:
    path.write_bytes(_errors.dump_json(made))


def _load_errors(path: Path) -> Errors:
    return _errors.validate_json(path.read_bytes())


def _single(tensor: torch.Tensor | None) -> torch.Tensor | None:
    return tensor.float() if tensor is not None and tensor.dtype is torch.float64 else tensor


def _bytes_of(whole: Mapping[str, Any]) -> int:
    return sum(leaf.nbytes for leaf in pytree.tree_leaves(whole) if isinstance(leaf, torch.Tensor))
