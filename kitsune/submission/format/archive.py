"""Archive: a training step as data. Reads, validates and writes `.ksn` files. Does not import torch.

For any bytes, reading gives an Archive or raises an ArchiveError that names the field.
"""

import json
import math
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NoReturn, Self

from pydantic import ValidationError

from kitsune.base.atomic_write import write_whole
from kitsune.base.base_record import canonical_json
from kitsune.base.digest import digest_of_json
from kitsune.errors import ArchiveError
from kitsune.plan import shapes_text
from kitsune.submission.format.blocks import block_json
from kitsune.submission.format.container import GRAPH, member_name, pack, unpack
from kitsune.submission.format.document import Document
from kitsune.submission.format.forward import forward_part
from kitsune.submission.format.limits import (
    MAX_ARCHIVE_BYTES,
    MAX_COMMAS,
    MAX_CONTAINERS,
    MAX_DEPTH,
    MAX_DIGITS,
    MAX_GRAPH_BYTES,
    MAX_KEYS,
    MAX_MEMBERS,
)
from kitsune.submission.format.npy import npy_header, read_npy

_NOT_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))
# Not part of a fingerprint: schedulers change the learning rate during training.
_LEFT_OUT_OPTIONS = frozenset(("lr",))


@dataclass(frozen=True)
class Archive:
    """A document and the raw little-endian values of its small buffers, as `buffers[entry.blob]`."""

    document: Document
    buffers: tuple[bytes, ...]

    @classmethod
    def from_bytes(cls, data: bytes) -> Self:
        """The archive in these bytes. Raises only ArchiveError, for invalid bytes and for archives above the limits."""
        graph, *members = unpack(data)
        document = checked_document(_parsed(graph))
        entries = [entry for entry in document.tensors if entry.blob is not None]
        if len(entries) != len(members):
            raise ArchiveError(f"tensors: {len(entries)} of them have a blob, but the archive holds {len(members)}")
        pairs = zip(entries, members, strict=True)
        return cls(
            document,
            tuple(read_npy(m, e.dtype, e.shape, member_name(index + 1)) for index, (e, m) in enumerate(pairs)),
        )

    def to_bytes(self) -> bytes:
        """The `.ksn` file: a zip (STORED) of graph.json and .npy buffers. Raises ArchiveError when it is too large."""
        graph = canonical_json(_json_of(self.document, exclude_defaults=True)).encode()
        if len(graph) > MAX_GRAPH_BYTES:
            raise ArchiveError(f"{GRAPH}: {len(graph)} bytes, more than the {MAX_GRAPH_BYTES} that are allowed")
        if len(self.buffers) >= MAX_MEMBERS:
            raise ArchiveError(f"tensors: {len(self.buffers)} buffers with values; at most {MAX_MEMBERS - 1} fit")
        entries = (entry for entry in self.document.tensors if entry.blob is not None)
        pairs = zip(entries, self.buffers, strict=True)
        return pack([graph, *(npy_header(entry.dtype, entry.shape) + data for entry, data in pairs)])

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """The archive in a file. Raises ArchiveError, also when the file cannot be read."""
        try:
            with Path(path).open("rb") as file:
                data = file.read(MAX_ARCHIVE_BYTES + 1)
        except (OSError, ValueError) as error:
            raise ArchiveError(f"{path} cannot be read: {error}") from error
        return cls.from_bytes(data)

    def save(self, path: str | Path) -> None:
        """Writes the file atomically. Raises OSError, and ArchiveError as `to_bytes` does."""
        write_whole(path, self.to_bytes())

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 of what decides how the step runs, as 64 hexadecimal digits.

        Included: operators, their arguments and their order; shapes, dtypes, layouts, ties and requires_grad of
        parameters, buffers and batch; which sizes vary; train or eval mode; the optimizer's class, groups and flags,
        and for each of its numbers whether it is zero (a momentum of zero saves a buffer; 0.9 and 0.95 cost the same).
        Excluded: values and their statistics, names, the learning rate, the batch size where it may vary.
        """
        document = _json_of(self.document)
        del document["sizes"]
        return _digest(document)

    @cached_property
    def model_fingerprint(self) -> str:
        """The fingerprint of the model and its optimizer alone, for callers that have no loss function.

        Included, as above: the forward, x, the model's parameters, the buffers that it reads, the optimizer. Excluded:
        the loss, y, and which values of the forward the loss reads.
        """
        return _digest(forward_part(self.document))

    @cached_property
    def batch(self) -> str:
        """The shapes of the tensors in x, in the format of `Plan.batch`."""
        return shapes_text(map(self.document.input_shape, range(self.document.x_leaves)))


def _json_of(document: Document, *, exclude_defaults: bool = False) -> dict[str, Any]:
    """As `model_dump`, which would traverse every argument of every node once more."""
    rest = document.model_dump(mode="json", exclude={"forward", "loss"}, exclude_defaults=exclude_defaults)
    loss = None if document.loss is None else block_json(document.loss)
    return {**rest, "forward": block_json(document.forward), "loss": loss}


def _digest(document: dict[str, Any]) -> str:
    """SHA-256 of the JSON of a document or a part of it, without what does not affect how it runs."""
    for entry in (*document["tensors"], *document["inputs"]):
        for key in ("names", "blob", "spread"):
            entry.pop(key, None)
    for group in document["optimizer"]["groups"]:
        options = ((key, _kind(value)) for key, value in group["options"].items() if key not in _LEFT_OUT_OPTIONS)
        group["options"] = {key: kind for key, kind in options if kind}
    return digest_of_json(document)


def _kind(value: Any) -> Any:
    """Strings unchanged; numbers and flags as a boolean. None, False and zero are all false."""
    if isinstance(value, list):
        return [_kind(part) for part in value]
    return value if isinstance(value, str) else bool(value)


def checked_document(value: Any) -> Document:
    """Validates a document. Raises ArchiveError naming the invalid field."""
    try:
        return Document.model_validate(value)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(str(part) for part in first["loc"][:8])
        message = first["msg"].removeprefix("Value error, ")
        text = f"{where}: {message}" if where else message
        raise ArchiveError(f"{GRAPH}: {ascii(text)[1:-1][:600]}") from error


def _parsed(graph: bytes) -> Any:
    """Parses JSON, after counting brackets and commas to limit the memory that the result takes."""
    if not graph.isascii() or b"\\" in graph:
        raise ArchiveError(f"{GRAPH}: holds bytes that are not plain ASCII, or escapes")
    outside = b"".join(graph.split(b'"')[::2])
    brackets = outside.translate(None, delete=_NOT_BRACKETS)
    if len(brackets) > 2 * MAX_CONTAINERS or outside.count(b",") > MAX_COMMAS:
        raise ArchiveError(f"{GRAPH}: holds more than {MAX_CONTAINERS} lists and objects, or {MAX_COMMAS} values")
    depth = 0
    for bracket in brackets:
        depth += 1 if bracket in b"[{" else -1
        if depth > MAX_DEPTH:
            raise ArchiveError(f"{GRAPH}: is nested more than {MAX_DEPTH} deep")
    try:
        return json.loads(
            graph, object_pairs_hook=_unique, parse_constant=_refuse, parse_float=_finite, parse_int=_short
        )
    except (ValueError, RecursionError) as error:
        raise ArchiveError(f"{GRAPH}: is not JSON of the expected form: {ascii(str(error))[1:-1][:200]}") from error


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(pairs) > MAX_KEYS:
        raise ValueError(f"an object has {len(pairs)} keys, more than the {MAX_KEYS} that are allowed")
    value = dict(pairs)
    if len(value) != len(pairs):
        raise ValueError("a key is named twice in one object")
    return value


def _refuse(literal: str) -> NoReturn:
    raise ValueError(f"{literal} is not a number")


def _short(literal: str) -> int:
    if len(literal) > MAX_DIGITS:
        raise ValueError(f"an integer has {len(literal)} digits")
    return int(literal)


def _finite(literal: str) -> float:
    value = float(literal)
    if not math.isfinite(value):
        raise ValueError(f"{literal[:40]} is too large")
    return value
