"""Archives made by hand to do harm, each with what the refusal says of it.

Whoever runs what some of them hold makes the file CANARY.
"""

import io
import json
import os
import pickle
import struct
import tarfile
import tempfile
import zipfile
from pathlib import Path
from typing import Any, Final

from kitsune.submission.format.limits import (
    MAX_ARCHIVE_BYTES,
    MAX_COMMAS,
    MAX_CONTAINERS,
    MAX_GRAPH_BYTES,
    MAX_NODES,
    MAX_TENSORS,
)
from kitsune.submission.format.npy import npy_header
from tests.unit.kitsune.submission.hostile import DOCUMENT, NORMAL, NPY, edited, node, put, valid, with_graph, zipped

CANARY: Final = Path(tempfile.gettempdir(), f"kitsune-canary-{os.getpid()}")
CODE: Final = f"__import__('pathlib').Path({str(CANARY)!r}).touch()"
LOCAL, ENTRY, END = b"PK\x03\x04", b"PK\x01\x02", b"PK\x05\x06"
GRAPH = json.dumps(DOCUMENT).encode()
GOOD = valid().to_bytes()


def deep(levels: int) -> bytes:
    return with_graph(b"[" * levels + b"]" * levels)


def patched(data: bytes, old: bytes, new: bytes, which: int = 0) -> bytes:
    start = -1
    for _ in range(which + 1):
        start = data.index(old, start + 1)
    return data[:start] + new + data[start + len(old) :]


def nested_regions(levels: int) -> bytes:
    inner = {"op": "aten.relu.default", "args": ["%0"]}
    for _ in range(levels):
        inner = {"region": "grad", "enabled": False, "args": ["%0"], "nodes": [inner], "outputs": ["%1"]}
    return put("forward", "nodes", 2, inner)


def field(data: bytes, signature: bytes, place: int, value: int, form: str = "<H", which: int = 0) -> bytes:
    """Another number in a header of this kind, so many bytes from where it starts."""
    changed, start = bytearray(data), -1
    for _ in range(which + 1):
        start = data.index(signature, start + 1)
    struct.pack_into(form, changed, start + place, value)
    return bytes(changed)


def flagged(flags: int) -> bytes:
    """General-purpose flags on the graph, in header and directory alike."""
    return field(field(GOOD, LOCAL, 6, flags), ENTRY, 8, flags)


def linked() -> bytes:
    """The buffer is a symbolic link, as zip has them."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr(zipfile.ZipInfo("graph.json", (1980, 1, 1, 0, 0, 0)), GRAPH)
        link = zipfile.ZipInfo("b/0.npy", (1980, 1, 1, 0, 0, 0))
        link.external_attr = 0o120777 << 16
        archive.writestr(link, b"/etc/passwd")
    return file.getvalue()


def tar() -> bytes:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w") as archive:
        member = tarfile.TarInfo("../../graph.json")
        member.size = len(GRAPH)
        archive.addfile(member, io.BytesIO(GRAPH))
    return file.getvalue()


class Touch:
    """Unpickled, it makes the canary."""

    def __reduce__(self) -> tuple[Any, ...]:
        return exec, (CODE,)


PICKLE = pickle.dumps(Touch())
OBJECTS = NPY.replace(b"'<f4'", b"'|O' ")[:-12] + PICKLE
WEIGHTS = b'{"config": {"w": {"path_name": "w", "is_param": true, "use_pickle": true}}}'

HOSTILE = {
    # the shell
    "empty": (b"", "too short"),
    "garbage": (b"MZ" + bytes(200), "not a zip"),
    "a pickle": (pickle.dumps({"a": 1}) + bytes(40), "not a zip"),
    "too large": (bytes(MAX_ARCHIVE_BYTES + 1), "more than"),
    "bytes in front": (b"#!/bin/sh\n" + GOOD, "before, between or after"),
    "bytes behind": (GOOD + b"\0", "not a zip file that ends"),
    "a comment": (GOOD[:-2] + b"\x03\x00abc", "not a zip"),
    "cut off": (GOOD[:-30], "not a zip"),
    "deflated": (zipped([("graph.json", GRAPH), ("b/0.npy", NPY)], zipfile.ZIP_DEFLATED), "compressed"),
    "a bomb": (zipped([("graph.json", bytes(MAX_GRAPH_BYTES))], zipfile.ZIP_DEFLATED), "compressed"),
    "a large graph": (with_graph(b" " * (MAX_GRAPH_BYTES + 1)), f"graph.json: {MAX_GRAPH_BYTES + 1} bytes"),
    "a large buffer": (zipped([("graph.json", GRAPH), ("b/0.npy", bytes(70_000))]), "b/0.npy: 70000 bytes"),
    "no graph": (zipped([("b/0.npy", NPY)]), "graph.json"),
    "a path upwards": (zipped([("graph.json", GRAPH), ("../../0.npy", NPY)]), "b/0.npy"),
    "an extra member": (zipped([("graph.json", GRAPH), ("b/0.npy", NPY), ("b/1.npy", NPY)]), "archive holds 2"),
    "a missing member": (zipped([("graph.json", GRAPH)]), "archive holds 0"),
    "too many members": (zipped([("graph.json", GRAPH)] + [(f"b/{i}.npy", b"") for i in range(4096)]), "4097 members"),
    "a damaged member": (patched(GOOD, b'"SGD"', b'"SGX"'), "checksum"),
    "a header that lies": (patched(GOOD, b"graph.json", b"graph.jso_"), "contradicts"),
    "a directory that lies": (patched(GOOD, b"graph.json", b"graph.jso_", 1), "not the member that comes next"),
    "hidden bytes": (patched(GOOD, b"PK\x01\x02", b"....PK\x01\x02"), "before, between or after"),
    "an absolute path": (zipped([("graph.json", GRAPH), ("/etc/cron.d/0.npy", NPY)]), "b/0.npy: is not the member"),
    "a path by backslashes": (zipped([("graph.json", GRAPH), ("..\\..\\0.npy", NPY)]), "b/0.npy: is not the member"),
    "a drive": (zipped([("graph.json", GRAPH), ("C:/0.npy", NPY)]), "b/0.npy: is not the member"),
    "a path with a NUL": (patched(patched(GOOD, b"b/0.npy", b"b/0.np\0"), b"b/0.npy", b"b/0.np\0"), "b/0.npy"),
    "a name in other letters": (zipped([("graph.json", GRAPH), ("b/\uff10.npy", NPY)]), "b/0.npy: is not the member"),
    "a name that turns around": (zipped([("graph.json", GRAPH), ("b/\u202eypn.0", NPY)]), "b/0.npy: is not the member"),
    "a name in capitals": (zipped([("GRAPH.JSON", GRAPH), ("b/0.npy", NPY)]), "graph.json: is not the member"),
    "a name of another number": (zipped([("graph.json", GRAPH), ("b/00.npy", NPY)]), "b/0.npy: is not the member"),
    "a folder": (zipped([("graph.json", GRAPH), ("b/", b""), ("b/0.npy", NPY)]), "b/0.npy: is not the member"),
    "a symbolic link": (linked(), "not a C-ordered"),
    "members in another order": (zipped([("b/0.npy", NPY), ("graph.json", GRAPH)]), "graph.json: is not the member"),
    "a member twice": (
        zipped([("graph.json", GRAPH), ("b/0.npy", NPY), ("b/1.npy", NPY)]).replace(b"b/1.npy", b"b/0.npy"),
        "b/1.npy: is not the member"),
    "the graph twice": (
        zipped([("graph.json", GRAPH), ("graph.jso_", GRAPH)]).replace(b"graph.jso_", b"graph.json"),
        "b/0.npy: is not the member"),
    "encrypted": (flagged(1), "flags"),
    "a size that comes later": (flagged(8), "flags"),
    "encrypted in the header alone": (field(GOOD, LOCAL, 6, 1), "contradicts"),
    "a bomb of members that overlap": (field(GOOD, ENTRY, 42, 0, "<I", which=1), "starts at byte 0"),
    "a member that starts in the next": (field(GOOD, ENTRY, 42, 99, "<I", which=1), "starts at byte 99"),
    "a size that lies": (field(GOOD, ENTRY, 24, 9, "<I"), "compressed"),
    "sizes that lie together": (field(field(GOOD, ENTRY, 20, 9, "<I"), ENTRY, 24, 9, "<I"), "contradicts"),
    "sizes of a zip64": (field(GOOD, ENTRY, 24, 2**32 - 1, "<I"), "compressed"),
    "a directory of a zip64": (field(GOOD, END, 16, 2**32 - 1, "<I"), "before, between or after"),
    "more members than there are": (field(GOOD, END, 10, 3), "several disks"),
    "several disks": (field(GOOD, END, 4, 1), "several disks"),
    "a member on another disk": (field(GOOD, ENTRY, 34, 1), "flags, extra fields or a comment"),
    "no members": (END + bytes(18), "0 members"),
    "two archives": (GOOD + GOOD, "before, between or after"),
    "bzip2": (zipped([("graph.json", GRAPH), ("b/0.npy", NPY)], zipfile.ZIP_BZIP2), "compressed"),
    "LZMA": (zipped([("graph.json", GRAPH), ("b/0.npy", NPY)], zipfile.ZIP_LZMA), "compressed"),
    "an archive in the archive": (with_graph(GOOD), "not plain ASCII"),
    "a tar": (tar(), "not a zip"),
    "half of it": (GOOD[: len(GOOD) // 2], "not a zip"),
    "a page": (b"<!DOCTYPE html><script>alert(1)</script>" + bytes(40), "not a zip"),
    # what runs when it is loaded
    "a pickle that runs": (PICKLE + bytes(40), "not a zip"),
    "a pickle as the graph": (with_graph(PICKLE), "graph.json"),
    "a pickle as the buffer": (zipped([("graph.json", GRAPH), ("b/0.npy", PICKLE)]), "not a C-ordered"),
    "an array of objects that run": (zipped([("graph.json", GRAPH), ("b/0.npy", OBJECTS)]), "not a C-ordered"),
    "a file of torch.save": (zipped([("archive/data.pkl", PICKLE), ("archive/version", b"3")]), "graph.json"),
    "a file of torch.export": (
        zipped([("archive/data/weights/model_weights_config.json", WEIGHTS), ("archive/data/weights/w", PICKLE)]),
        "graph.json"),
    "a module": (zipped([("graph.json", GRAPH), ("sitecustomize.py", CODE.encode())]), "b/0.npy: is not the member"),
    "a zip that Python runs": (zipped([("__main__.py", CODE.encode())]), "graph.json: is not the member"),
    "code as the graph": (with_graph(CODE.encode()), "not JSON"),
    "code as YAML": (with_graph(f'!!python/object/apply:exec ["{CODE}"]'.encode()), "not JSON"),
    "code as operator": (node(CODE, "%4"), "is not an operator"),
    "code as text": (node("aten.einsum.default", {"text": CODE}, ["%4"]), "plain word"),
    "code as a reference": (node("aten.relu.default", CODE), "not a reference"),
    "code as argument name": (node("aten.relu.default", "%4", **{CODE: 1}), "not an argument name"),
    "code as a name": (put("tensors", 0, "names", [CODE]), "tensors.0.names.0"),
    "code as a size": (put("inputs", 0, "shape", [CODE, 4]), "inputs.0.shape.0"),
    "code as a symbol": (put("sizes", {CODE: 8}), "sizes"),
    "code as a source": (put("forward", "inputs", ["t0", CODE, "x0"]), "sources"),
    "code as a key": (put("x", {"dict": {CODE: {"leaf": 0}}}), "identifiers"),
    "code as a constant": (put("y", {"tuple": [{"leaf": 1}, {"value": CODE}]}), "must be a leaf"),
    "code as an optimizer": (put("optimizer", "name", CODE), "optimizer.name"),
    "code as an option": (put("optimizer", "groups", 0, "options", {"foreach": CODE}), "optimizer.groups.0.options"),
    "code as a dtype": (node("aten.to.dtype", "%4", {"dtype": CODE}), "is not known"),
    "code as a region": (put("forward", "nodes", 0, "region", CODE), "region"),
    # the graph's JSON
    "not JSON": (with_graph(b"{"), "not JSON"),
    "not an object": (with_graph(b"[]"), "graph.json"),
    "escapes": (with_graph(b'{"\\u0061": 1}'), "escapes"),
    "not ASCII": (with_graph('{"ä": 1}'.encode()), "ASCII"),
    "too deep": (deep(65), "64 deep"),
    "far too deep": (deep(MAX_CONTAINERS), "64 deep"),
    "too many lists": (with_graph(b"[" + b"[]," * MAX_CONTAINERS + b"[]]"), f"{MAX_CONTAINERS} lists"),
    "too many values": (with_graph(b"[" + b"1," * (MAX_COMMAS + 1) + b"1]"), f"{MAX_COMMAS} values"),
    "NaN": (with_graph(GRAPH.replace(b"0.1", b"NaN")), "NaN is not a number"),
    "Infinity": (with_graph(GRAPH.replace(b"0.1", b"-Infinity")), "Infinity is not a number"),
    "an integer of many digits": (with_graph(GRAPH.replace(b"0.1", b"9" * 5000)), "an integer has 5000 digits"),
    "a float too large": (with_graph(GRAPH.replace(b"0.1", b"1e999")), "too large"),
    "an endless integer": (with_graph(GRAPH.replace(b"0.1", b"9" * 5000)), "not JSON of the expected form"),
    "a key twice": (with_graph(GRAPH.replace(b'"version": 1', b'"version": 1, "version": 1')), "named twice"),
    "too many keys": (put("sizes", {f"s{i}": 1 for i in range(300)}), "300 keys"),
    "UTF-16": (with_graph(GRAPH.decode().encode("utf-16")), "not plain ASCII"),
    "a mark of byte order": (with_graph(b"\xef\xbb\xbf" + GRAPH), "not plain ASCII"),
    "bytes that are too long for their letter": (with_graph(GRAPH.replace(b"SGD", b"\xc1\x93GD")), "not plain ASCII"),
    "letters that look the same": (with_graph(GRAPH.replace(b"aten.", "\u0430ten.".encode())), "not plain ASCII"),
    "a control character": (with_graph(GRAPH.replace(b"SGD", b"S\0D")), "not JSON"),
    "a comment in the graph": (with_graph(b"// " + GRAPH), "not JSON"),
    "a comma too many": (with_graph(GRAPH[:-1] + b",}"), "not JSON"),
    "two values": (with_graph(GRAPH + b"{}"), "not JSON"),
    "a quote that never ends": (with_graph(GRAPH + b'"' + b"[" * 1000), "not JSON"),
    "brackets hidden by a word": (with_graph(b'{"' + b"[" * 999 + b'": ' + b"[" * 99 + b"]" * 99 + b"}"), "64 deep"),
    "a name of a megabyte": (put("tensors", 0, "names", ["w" * 2**20]), "tensors.0.names.0"),
    "a hexadecimal number": (with_graph(GRAPH.replace(b'"version": 1', b'"version": 0x1')), "not JSON"),
    "NaN as a word": (put("optimizer", "groups", 0, "options", {"lr": "NaN"}), "optimizer.groups.0.options.lr"),
    # the document
    "version 0": (put("version", 0), "version"),
    "a version that is true": (put("version", True), "version"),
    "a version with a point": (put("version", 1.5), "version"),
    "no version": (edited(lambda d: d.pop("version")), "version"),
    "sizes that overflow": (put("tensors", 0, "shape", [2**40] * 16), "elements"),
    "a size past 64 bits": (put("tensors", 0, "shape", [2**64]), "tensors.0.shape.0"),
    "integers that cannot be drawn": (put("inputs", 1, "spread", "high", 2**63), "inputs.1.spread"),
    "a deviation below zero": (put("inputs", 0, "spread", "std", -1.0), "spread.normal.std"),
    "a share of two": (
        put("inputs", 1, "spread", {"kind": "integers", "low": 0, "high": 2, "share": 2.0}), "inputs.1.spread"),
    "an x that holds itself": (put("x", {"tuple": [{"leaf": 0}, {"leaf": 0}]}), "leaves must be"),
    "another format": (put("format", "keras"), "format"),
    "another version": (put("version", 2), "version"),
    "a version as text": (put("version", "1"), "version"),
    "an unknown key": (put("code", "import os"), "code"),
    "an unknown key in a tensor": (put("tensors", 0, "hook", 1), "tensors.0.hook"),
    "a missing key": (edited(lambda d: d.pop("optimizer")), "optimizer"),
    "an object dtype": (put("tensors", 0, "dtype", "object"), "tensors.0.dtype"),
    "too many tensors": (edited(lambda d: d["tensors"].extend([d["tensors"][0]] * MAX_TENSORS)), "tensors"),
    "too many leaves": (edited(lambda d: d["inputs"].extend([d["inputs"][1]] * 1100)), "inputs"),
    "a negative size": (put("tensors", 0, "shape", [-1, 4]), "tensors.0.shape.0"),
    "a fractional size": (put("tensors", 0, "shape", [1.5, 4]), "tensors.0.shape.0"),
    "too many dimensions": (put("tensors", 0, "shape", [1] * 17), "tensors.0.shape"),
    "a huge tensor": (put("tensors", 0, "shape", [2**20, 2**20]), "elements"),
    "huge tensors together": (
        edited(lambda d: d["tensors"].extend([{**d["tensors"][0], "shape": [2**34]}] * 9)), "together need"),
    "a huge batch": (put("sizes", "s0", 2**31 + 1), "sizes.s0"),
    "an unknown symbol": (put("inputs", 0, "shape", ["s7", 4]), "sizes"),
    "a symbol that is code": (put("inputs", 0, "shape", ["__import__('os')", 4]), "inputs.0.shape.0"),
    "a parameter with values": (
        edited(lambda d: d["tensors"][1].update(kind="parameter")), "never carries its values"),
    "two kinds of values": (put("tensors", 1, "spread", NORMAL), "either blob or spread"),
    "a blob too large": (put("tensors", 1, "shape", [2**15]), "larger than 65536"),
    "a wrong blob": (put("tensors", 1, "blob", 1), "blobs must be numbered"),
    "a layout that does not fit": (put("tensors", 0, "layout", "channels_last"), "does not fit"),
    "integers that require gradients": (put("inputs", 1, "requires_grad", True), "cannot require gradients"),
    "floats as integers": (put("inputs", 1, "spread", NORMAL), "does not fit int64"),
    "a spread upside down": (put("inputs", 1, "spread", "low", 5), "low is greater"),
    "a name that is code": (put("tensors", 0, "names", ["w; import os"]), "tensors.0.names.0"),
    "a nested x": (put("x", json.loads('{"list": [' * 12 + '{"leaf": 0}' + "]}" * 12)), "deep"),
    "a leaf twice": (put("y", {"dict": {"target": {"leaf": 0}}}), "leaves must be"),
    "a key that is code": (put("y", {"dict": {"a); import os": {"leaf": 1}}}), "identifiers"),
    # nodes
    "an operator that saves": (node("aten.save.default", "%4", {"text": "f"}), "aten.save.default"),
    "an operator that reads files": (node("aten.from_file.default", {"text": "f"}), "aten.from_file.default"),
    "a view without bounds": (node("aten.as_strided.default", "%4", [99], [1]), "aten.as_strided.default"),
    "an unsafe index": (node("aten._unsafe_index.Tensor", "%4", ["%1"]), "aten._unsafe_index.Tensor"),
    "a new storage": (node("aten.set_.source_Storage", "%4", "%1"), "aten.set_.source_Storage"),
    "a resize": (node("aten.resize_.default", "%4", [99]), "aten.resize_.default"),
    "an out variant": (node("aten.add.out", "%4", "%1", out="%1"), "aten.add.out"),
    "a stream": (node("aten.record_stream.default", "%4"), "aten.record_stream.default"),
    "a print": (node("aten._print.default", {"text": "f"}), "aten._print.default"),
    "a module function": (node("os.system", {"text": "ls"}), "os.system"),
    "an attribute walk": (node("aten.add.__class__", "%4"), "aten.add.__class__"),
    "a dunder": (node("aten.__class__.default", "%4"), "aten.__class__.default"),
    "a power": (node("py.pow", 9, 9**9), "py.pow"),
    "an operator that is a list": (put("forward", "nodes", 2, "op", ["aten.relu.default"]), "op"),
    "a reference ahead": (node("aten.relu.default", "%5"), "forward: nodes[2].args[0]: %5 refers to a value"),
    "a reference far ahead": (node("aten.relu.default", "%99999999"), "not a reference"),
    "a reference backwards": (node("aten.relu.default", "%-1"), "not a reference"),
    "a bare string": (node("aten.relu.default", "n1; import os"), "not a reference"),
    "a text that is code": (node("aten.einsum.default", {"text": "a'+b"}, ["%4"]), "plain word"),
    "an argument name that is code": (node("aten.relu.default", "%4", **{"x=1, y": 1}), "not an argument name"),
    "a keyword as argument name": (node("aten.relu.default", "%4", **{"import": 1}), "not an argument name"),
    "an integer too large": (node("aten.add.Scalar", "%4", 2**63), "64 bits"),
    "an unknown argument": (node("aten.relu.default", {"pickle": "x"}), "not a kind of argument"),
    "an unknown dtype": (node("aten.to.dtype", "%4", {"dtype": "qint8"}), "qint8"),
    "an unknown device": (node("aten.to.device", "%4", {"device": "cuda:7"}), "cuda:7"),
    "lists in lists": (node("aten.relu.default", [[[[[1]]]]]), "nested more than"),
    "too many nodes": (
        edited(lambda d: d["forward"]["nodes"].extend([{"op": "aten.relu.default", "args": []}] * MAX_NODES)),
        f"more than {MAX_NODES} nodes"),
    "regions in regions": (nested_regions(8), "nested more than 6 deep"),
    "a region that reads outside": (
        put("forward", "nodes", 0, "nodes", 0, "args", ["%0", "%1", "%5"]), "nodes[0].nodes[0]"),
    "an unknown region": (put("forward", "nodes", 0, "region", "exec"), "region"),
    "a region with an odd flag": (put("forward", "nodes", 0, "enabled", 1), "booleans"),
    "an unknown key in a node": (put("forward", "nodes", 2, "meta", 1), "meta"),
    "no outputs": (put("forward", "outputs", []), "outputs"),
    "an output ahead": (put("forward", "outputs", ["%6"]), "outputs[0]"),
    "a forward that reads y": (put("forward", "inputs", ["t0", "t1", "y1"]), "forward.inputs: there is no y1"),
    "an unknown tensor": (put("forward", "inputs", ["t0", "t7", "x0"]), "there is no t7"),
    "an input twice": (put("forward", "inputs", ["t0", "t0", "x0"]), "named twice"),
    "a loss that reads a parameter": (put("loss", "inputs", ["t0", "y1"]), "belongs to the forward"),
    "a loss with two results": (put("loss", "outputs", ["%2", "%0"]), "one output"),
    "a function of Python": (node("builtins.exec", {"text": "1"}), "builtins.exec"),
    "a function that imports": (node("py.__import__", {"text": "os"}), "py.__import__"),
    "a function that looks up": (node("operator.attrgetter", {"text": "os"}), "operator.attrgetter"),
    "a loader": (node("torch.load", {"text": "f"}), "torch.load"),
    "globals of a function": (node("aten.add.Tensor.__globals__", "%4"), "__globals__"),
    "an operator without a name": (node("aten..default", "%4"), "aten..default"),
    "an operator with a control character": (node("aten.relu.default\n", "%4"), "escapes"),
    "an operator of a higher order": (node("higher_order.cond", "%4"), "higher_order.cond"),
    "an operator that talks to others": (node("c10d.allreduce_.default", "%4"), "c10d.allreduce_"),
    "a dunder that is none of the list": (node("aten.__reduce__.default", "%4"), "aten.__reduce__.default"),
    "a packed sequence": (node("aten.lstm.data", "%4", "%4", ["%4"], ["%4"], True, 1, 0.0, True, False), "lstm.data"),
    "no weights": (node("aten.lstm.input", "%4", ["%4"], [], True, 1, 0.0, True, False, False), "weights"),
    "a sum of one": (node("py.add", 1), "cannot be called with 1 arguments"),
    "a sum by name": (node("py.add", 1, 2, a=1), "cannot be called with 2 arguments and 1 by name"),
    "a node that needs itself": (put("forward", "nodes", 1, "args", ["%4", 0]), "refers to a value"),
    "nodes in a circle": (put("forward", "nodes", 1, "args", ["%5", 0]), "refers to a value"),
    "a region that needs itself": (put("forward", "nodes", 0, "args", ["%3", "%0", "%1"]), "refers to a value"),
    "a region that gives what is not there": (put("forward", "nodes", 0, "outputs", ["%4"]), "refers to a value"),
    "an output of the forward in the forward": (put("forward", "inputs", ["t0", "t1", "o0"]), "there is no o0"),
    "a reference in other digits": (node("aten.relu.default", "%04"), "not a reference"),
    "a slice of floats": (node("aten.relu.default", {"slice": [0.5, None, None]}), "bounds are integers"),
    "a number that is two": (node("aten.relu.default", {"dtype": "float32", "text": "x"}), "object of one key"),
    # the optimizer
    "an unknown optimizer": (put("optimizer", "name", "os"), "optimizer.name"),
    "an unknown option": (put("optimizer", "groups", 0, "options", {"hook": 1}), "not an option"),
    "an option that is a dict": (put("optimizer", "groups", 0, "options", {"lr": {}}), "optimizer.groups.0.options.lr"),
    "a parameter twice": (put("optimizer", "groups", 0, "parameters", [0, 0]), "named twice"),
    "a buffer as parameter": (put("optimizer", "groups", 0, "parameters", [1]), "not a parameter"),
    "no groups": (put("optimizer", "groups", []), "optimizer.groups"),
    "an option that is not finite": (put("optimizer", "groups", 0, "options", {"lr": 10**20}), "not JSON"),
    "too many betas": (put("optimizer", "groups", 0, "options", {"betas": [0.5] * 9}), "groups.0.options.betas"),
    "a dunder as option": (put("optimizer", "groups", 0, "options", {"__class__": 1}), "not an option"),
    "a tensor that is not there": (put("optimizer", "groups", 0, "parameters", [99]), "not a parameter"),
    # the buffers
    "a pickled array": (
        zipped([("graph.json", GRAPH), ("b/0.npy", NPY.replace(b"'<f4'", b"'|O' "))]), "not a C-ordered"),
    "Fortran order": (zipped([("graph.json", GRAPH), ("b/0.npy", NPY.replace(b"False", b"True "))]), "not a C-ordered"),
    "another shape": (zipped([("graph.json", GRAPH), ("b/0.npy", NPY.replace(b"(3,)", b"(9,)"))]), "not a C-ordered"),
    "another dtype": (zipped([("graph.json", GRAPH), ("b/0.npy", NPY.replace(b"<f4", b"<i4"))]), "not a C-ordered"),
    "values missing": (zipped([("graph.json", GRAPH), ("b/0.npy", NPY[:-1])]), "its shape needs 12"),
    "values to spare": (zipped([("graph.json", GRAPH), ("b/0.npy", NPY + b"\0")]), "its shape needs 12"),
}  # fmt: skip


def large() -> dict[str, bytes]:
    """Valid archives that take the longest, each at one of the limits."""
    buffer, relu = DOCUMENT["tensors"][1], {"op": "aten.relu.default", "args": ["%0"]}
    region = {"region": "grad", "enabled": False, "args": ["%0"], "nodes": [relu], "outputs": []}
    block = {**buffer, "shape": [2**14], "blob": None}
    body = npy_header("float32", [2**14]) + bytes(2**16)
    number = MAX_ARCHIVE_BYTES // (len(body) + 300) - 1
    blocks = [buffer, *({**block, "blob": index + 1} for index in range(number))]
    return {
        "nodes": nodes([relu] * (MAX_NODES - 5)),
        "nodes with arguments": nodes([{"op": "aten.add.Tensor", "args": ["%0", 1.5, {"dtype": "int8"}],
                                        "kwargs": {"a": 1, "b": [2]}}] * (MAX_CONTAINERS // 5 - 20)),
        "arguments": nodes([{"op": "aten.stack.default", "args": [["%0"] * (MAX_COMMAS - 100)]}]),
        "lists": nodes([{"op": "aten.stack.default", "args": [[[]] * (MAX_CONTAINERS - 100)]}]),
        "regions": nodes([region] * (MAX_NODES // 2 - 5)),
        "tensors": edited(lambda d: d["tensors"].extend([{**d["tensors"][0], "names": []}] * (MAX_TENSORS - 2))),
        "buffers": zipped([
            ("graph.json", json.dumps({**DOCUMENT, "tensors": [DOCUMENT["tensors"][0], *blocks]}).encode()),
            ("b/0.npy", NPY), *((f"b/{index + 1}.npy", body) for index in range(number)),
        ]),
    }  # fmt: skip


def nodes(more: list[dict[str, Any]]) -> bytes:
    return edited(lambda d: d["forward"]["nodes"].extend(more))
