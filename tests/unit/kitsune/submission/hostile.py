"""A small valid archive, and ways to break it."""

import copy
import io
import json
import struct
import zipfile
from collections.abc import Callable
from typing import Any

from kitsune.submission.format.archive import Archive
from kitsune.submission.format.document import Document
from kitsune.submission.format.npy import npy_header

NORMAL = {"kind": "normal", "mean": 0.0, "std": 1.0, "low": -3.0, "high": 3.0}
DOCUMENT: dict[str, Any] = {
    "format": "kitsune-archive",
    "version": 1,
    "training": True,
    "tensors": [
        {"kind": "parameter", "names": ["w"], "shape": [3, 4], "dtype": "float32", "requires_grad": True,
         "spread": NORMAL},
        {"kind": "buffer", "names": ["b"], "shape": [3], "dtype": "float32", "blob": 0},
    ],
    "inputs": [
        {"shape": ["s0", 4], "dtype": "float32", "spread": NORMAL},
        {"shape": ["s0"], "dtype": "int64", "spread": {"kind": "integers", "low": 0, "high": 2}},
    ],
    "sizes": {"s0": 8},
    "x": {"leaf": 0},
    "y": {"dict": {"target": {"leaf": 1}}},
    "forward": {
        "inputs": ["t0", "t1", "x0"],
        "nodes": [
            {"region": "autocast", "enabled": True, "dtype": "bfloat16", "cache": True, "device": "own",
             "args": ["%2", "%0", "%1"], "nodes": [{"op": "aten.linear.default", "args": ["%0", "%1", "%2"]}],
             "outputs": ["%3"]},
            {"op": "py.getitem", "args": ["%3", 0]},
            {"op": "aten.to.dtype", "args": ["%4", {"dtype": "float32"}], "kwargs": {"copy": True}},
        ],
        "outputs": ["%5"],
    },
    "loss": {"inputs": ["o0", "y1"], "nodes": [{"op": "aten.cross_entropy_loss.default", "args": ["%0", "%1"]}],
             "outputs": ["%2"]},
    "optimizer": {"name": "SGD", "groups": [{"parameters": [0], "options": {"lr": 0.1, "momentum": 0.9}}]},
}  # fmt: skip
VALUES = struct.pack("<3f", 1.0, 2.0, 3.0)
NPY = npy_header("float32", [3]) + VALUES


def valid() -> Archive:
    return Archive(Document.model_validate(DOCUMENT), (VALUES,))


def zipped(members: list[tuple[str, bytes]], method: int = zipfile.ZIP_STORED) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", method) as archive:
        for name, data in members:
            archive.writestr(zipfile.ZipInfo(name, (1980, 1, 1, 0, 0, 0)), data, method)
    return file.getvalue()


def with_graph(graph: bytes) -> bytes:
    return zipped([("graph.json", graph), ("b/0.npy", NPY)])


def edited(change: Callable[[dict[str, Any]], None]) -> bytes:
    """The valid archive with a change to its document."""
    document = copy.deepcopy(DOCUMENT)
    change(document)
    return with_graph(json.dumps(document).encode())


def put(*path: Any) -> bytes:
    """The valid archive with the value at a path replaced: put("sizes", "s0", 9) sets sizes.s0 = 9."""
    *keys, last, value = path

    def change(document: dict[str, Any]) -> None:
        place = document
        for key in keys:
            place = place[key]
        place[last] = value

    return edited(change)


def node(op: str, *args: Any, **kwargs: Any) -> bytes:
    """The valid archive with another last node in its forward; five values exist before it."""
    return put("forward", "nodes", 2, {"op": op, "args": list(args), "kwargs": kwargs})
