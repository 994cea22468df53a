"""Archives on stdin, what became of each on stdout: a process that does what the server does, and can be lost.

Each comes as its length in eight bytes and its bytes; each is answered by a line of JSON. With `rebuild` those that are
accepted, and small, also become a model and an optimizer of torch, as in a measuring process. Any error but ours is
what is looked for.
"""

import hashlib
import importlib
import json
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from math import prod
from typing import BinaryIO, Final

from kitsune.errors import ArchiveError
from kitsune.submission.format.archive import Archive
from kitsune.submission.format.limits import ITEM_BYTES

#: Of all tensors of an archive together; more could not be made for each of thousands.
SMALL_BYTES: Final = 2**24


@dataclass(frozen=True)
class Outcome:
    """`kept`: the SHA-256 of the bytes that would be kept. `fault`: what must not happen, in words."""

    seconds: float
    kept: str | None = None
    fault: str = ""
    is_rebuilt: bool = False


def main() -> None:
    rebuild: Callable[[Archive], object] | None = None
    if sys.argv[1:] == ["rebuild"]:
        rebuild = importlib.import_module(
            "kitsune.submission.rebuilding.rebuild"
        ).rebuild  # with torch, which others do without
    for data in frames(sys.stdin.buffer):
        print(json.dumps(asdict(outcome(data, rebuild))), flush=True)


def frames(file: BinaryIO) -> Iterator[bytes]:
    while head := file.read(8):
        yield file.read(int.from_bytes(head, "big"))


def frame(data: bytes) -> bytes:
    return len(data).to_bytes(8, "big") + data


def outcome(data: bytes, rebuild: Callable[[Archive], object] | None) -> Outcome:
    begin = time.perf_counter()
    try:
        archive = Archive.from_bytes(data)
        content = archive.to_bytes()
        names = archive.fingerprint, archive.model_fingerprint
    except ArchiveError:
        return Outcome(time.perf_counter() - begin)
    except Exception as error:  # noqa: BLE001
        return Outcome(time.perf_counter() - begin, fault=f"{type(error).__name__}: {error}")
    seconds = time.perf_counter() - begin
    again = Archive.from_bytes(content)
    if (again, again.to_bytes(), (again.fingerprint, again.model_fingerprint)) != (archive, content, names):
        return Outcome(seconds, fault="what was accepted does not come back as it was")
    fault, is_rebuilt = _rebuilt(archive, rebuild) if rebuild and is_small(archive) else ("", False)
    return Outcome(seconds, hashlib.sha256(content).hexdigest(), fault, is_rebuilt)


def _rebuilt(archive: Archive, rebuild: Callable[[Archive], object]) -> tuple[str, bool]:
    """A fault, if there was one, and whether there is a workload now."""
    try:
        rebuild(archive)
    except ArchiveError:
        return "", False
    except Exception as error:  # noqa: BLE001
        return f"rebuilding raised {type(error).__name__}: {error}", False
    return "", True


def is_small(archive: Archive) -> bool:
    document = archive.document
    sizes = [prod(entry.shape) * ITEM_BYTES[entry.dtype] for entry in document.tensors]
    sizes += [prod(document.input_shape(at)) * ITEM_BYTES[one.dtype] for at, one in enumerate(document.inputs)]
    return sum(sizes) <= SMALL_BYTES
