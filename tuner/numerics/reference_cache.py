"""What is computed once for all children of a run and kept on disk: the gate's reference, and what precisions lose.

The first child that needs something computes it, the others wait for it: a lock on a file beside it ends with the
process that holds it, however that ends, and then the next one computes. Where there is no room it is not kept.
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

from tuner.numerics.trace_errors import Errors, Snapshot, Start, Trace

ROOM = 2.0  # times what is kept must be free

Made = TypeVar("Made")

_errors: TypeAdapter[Errors] = TypeAdapter(Errors)


@dataclass(frozen=True, slots=True)
class Keep:
    """Files of traces from one start with one batch. Without a folder nothing is kept, and everything computed.

    A workload that draws its weights anew in each process has another digest in each, and shares nothing.
    """

    folder: Path | None
    digest: str = ""

    def trace(self, name: str, make: Callable[[], tuple[Trace, str]]) -> tuple[Trace, str]:
        """The trace and its note. Gradients come back in fp32, parameters and buffers as they were."""
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
            except OSError:  # no room: the next child computes it again
                fresh.unlink(missing_ok=True)
            return made


def keep_of(folder: str | None, start: Start, batch: Any) -> Keep:
    """For traces that begin with these weights and train on this batch."""
    return Keep(None) if folder is None else Keep(Path(folder), digest_of(start, batch))


def digest_of(start: Start, batch: Any) -> str:
    """Of the bytes of all tensors. 1 GB takes about a second."""
    digest = hashlib.sha256()
    for leaf in (*start.parameters, *start.buffers, *pytree.tree_leaves(batch)):
        if isinstance(leaf, torch.Tensor):
            digest.update(leaf.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()[:16]


@contextlib.contextmanager
def _held(path: Path) -> Iterator[None]:
    """The lock of this file; waits for it."""
    with path.open("wb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _save_trace(made: tuple[Trace, str], path: Path) -> None:
    trace, note = made
    snapshots = {
        index: (taken.loss, [_single(each) for each in taken.gradients]) for index, taken in trace.snapshots.items()
    }
    whole = {
        "note": note,
        "snapshots": snapshots,
        "steps": trace.steps,
        "parameters": list(trace.parameters),
        "buffers": list(trace.buffers),
    }
    if shutil.disk_usage(path.parent).free < ROOM * _bytes_of(whole):
        raise OSError("too little room")
    torch.save(whole, path)


def _load_trace(path: Path) -> tuple[Trace, str]:
    found: Mapping[str, Any] = torch.load(path, mmap=True, weights_only=True)
    snapshots = {index: Snapshot(loss, gradients) for index, (loss, gradients) in found["snapshots"].items()}
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
