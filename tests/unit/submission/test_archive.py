"""Hostile bytes give ArchiveError and nothing else; valid ones come back as they were."""

import io
import json
import os
import pickle
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kitsune.errors import ArchiveError
from kitsune.submission.archive import Archive
from kitsune.submission.limits import MAX_ARCHIVE_BYTES, MAX_GRAPH_BYTES
from tests.unit.submission.hostile import DOCUMENT, NORMAL, NPY, edited, node, put, valid, with_graph, zipped

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
    "a large graph": (with_graph(b" " * (MAX_GRAPH_BYTES + 1)), "graph.json: 8388609 bytes"),
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
    # the graph's JSON
    "not JSON": (with_graph(b"{"), "not JSON"),
    "not an object": (with_graph(b"[]"), "graph.json"),
    "escapes": (with_graph(b'{"\\u0061": 1}'), "escapes"),
    "not ASCII": (with_graph('{"ä": 1}'.encode()), "ASCII"),
    "too deep": (deep(65), "64 deep"),
    "far too deep": (deep(200_000), "64 deep"),
    "too many lists": (with_graph(b"[" + b"[]," * 400_000 + b"[]]"), "300000 lists"),
    "too many values": (with_graph(b"[" + b"1," * 1_500_000 + b"1]"), "1000000 values"),
    "NaN": (with_graph(GRAPH.replace(b"0.1", b"NaN")), "NaN is not a number"),
    "Infinity": (with_graph(GRAPH.replace(b"0.1", b"-Infinity")), "Infinity is not a number"),
    "an integer of many digits": (with_graph(GRAPH.replace(b"0.1", b"9" * 5000)), "an integer has 5000 digits"),
    "a float too large": (with_graph(GRAPH.replace(b"0.1", b"1e999")), "too large"),
    "an endless integer": (with_graph(GRAPH.replace(b"0.1", b"9" * 5000)), "not JSON that we accept"),
    "a key twice": (with_graph(GRAPH.replace(b'"version": 1', b'"version": 1, "version": 1')), "named twice"),
    "too many keys": (put("sizes", {f"s{i}": 1 for i in range(300)}), "300 keys"),
    # the document
    "another format": (put("format", "keras"), "format"),
    "another version": (put("version", 2), "version"),
    "a version as text": (put("version", "1"), "version"),
    "an unknown key": (put("code", "import os"), "code"),
    "an unknown key in a tensor": (put("tensors", 0, "hook", 1), "tensors.0.hook"),
    "a missing key": (edited(lambda d: d.pop("optimizer")), "optimizer"),
    "an object dtype": (put("tensors", 0, "dtype", "object"), "tensors.0.dtype"),
    "too many tensors": (edited(lambda d: d["tensors"].extend([d["tensors"][0]] * 17_000)), "tensors"),
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
    # the optimizer
    "an unknown optimizer": (put("optimizer", "name", "os"), "optimizer.name"),
    "an unknown option": (put("optimizer", "groups", 0, "options", {"hook": 1}), "not an option"),
    "an option that is a dict": (put("optimizer", "groups", 0, "options", {"lr": {}}), "optimizer.groups.0.options.lr"),
    "a parameter twice": (put("optimizer", "groups", 0, "parameters", [0, 0]), "named twice"),
    "a buffer as parameter": (put("optimizer", "groups", 0, "parameters", [1]), "not a parameter"),
    "no groups": (put("optimizer", "groups", []), "optimizer.groups"),
    # the buffers
    "a pickled array": (
        zipped([("graph.json", GRAPH), ("b/0.npy", NPY.replace(b"'<f4'", b"'|O' "))]), "not a C-ordered"),
    "Fortran order": (zipped([("graph.json", GRAPH), ("b/0.npy", NPY.replace(b"False", b"True "))]), "not a C-ordered"),
    "another shape": (zipped([("graph.json", GRAPH), ("b/0.npy", NPY.replace(b"(3,)", b"(9,)"))]), "not a C-ordered"),
    "another dtype": (zipped([("graph.json", GRAPH), ("b/0.npy", NPY.replace(b"<f4", b"<i4"))]), "not a C-ordered"),
    "values missing": (zipped([("graph.json", GRAPH), ("b/0.npy", NPY[:-1])]), "its shape needs 12"),
    "values to spare": (zipped([("graph.json", GRAPH), ("b/0.npy", NPY + b"\0")]), "its shape needs 12"),
}  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_archive_is_refused_quickly_and_the_message_names_the_field(name):
    data, expected = HOSTILE[name]
    start = time.perf_counter()
    with pytest.raises(ArchiveError) as caught:
        Archive.from_bytes(data)
    assert time.perf_counter() - start < 5
    assert expected in str(caught.value)
    assert str(caught.value).isascii()
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 900


def test_valid_archive_comes_back_and_is_written_the_same_way_twice():
    archive = Archive.from_bytes(GOOD)
    assert archive == valid()
    assert archive.to_bytes() == GOOD


def test_any_zip_tool_can_look_into_an_archive():
    with zipfile.ZipFile(io.BytesIO(GOOD)) as archive:
        assert archive.namelist() == ["graph.json", "b/0.npy"]
        assert json.loads(archive.read("graph.json"))["optimizer"]["name"] == "SGD"


@settings(max_examples=300, deadline=None)
@given(st.lists(st.tuples(st.integers(0, len(GOOD) - 1), st.integers(0, 255)), min_size=1, max_size=4))
def test_changed_bytes_are_refused_or_harmless(changes):
    data = bytearray(GOOD)
    for place, value in changes:
        data[place] = value
    try:
        archive = Archive.from_bytes(bytes(data))
    except ArchiveError:
        return
    assert archive == valid()


@settings(max_examples=150, deadline=None)
@given(st.integers(0, len(GOOD)), st.integers(0, len(GOOD)), st.binary(max_size=40))
def test_cut_and_spliced_bytes_are_refused_or_harmless(start, end, middle):
    data = GOOD[:start] + middle + GOOD[end:]
    try:
        archive = Archive.from_bytes(data)
    except ArchiveError:
        return
    assert archive == valid()


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.sampled_from(["%0", "%9", "t0", "aten.relu.default", "s0"]),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from(["op", "args", "dtype", "leaf"]), inner)
    ),
    max_leaves=8,
)


def places(value, path=()):
    yield path
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, part in items:
        yield from places(part, (*path, key))


PLACES = [path for path in places(DOCUMENT) if path]


@settings(max_examples=400, deadline=None)
@given(st.sampled_from(PLACES), JSON)
def test_any_value_anywhere_in_the_document_is_accepted_or_refused(path, value):
    try:
        archive = Archive.from_bytes(put(*path, value))
    except ArchiveError:
        return
    assert Archive.from_bytes(archive.to_bytes()) == archive


def test_file_that_is_not_there_is_an_archive_error(tmp_path: Path):
    with pytest.raises(ArchiveError, match="cannot be read"):
        Archive.load(tmp_path / "none.ksn")
    with pytest.raises(ArchiveError, match="cannot be read"):
        Archive.load(tmp_path)


def test_save_and_load(tmp_path: Path):
    path = tmp_path / "step.ksn"
    valid().save(path)
    assert Archive.load(path) == valid()


def test_archives_are_read_without_torch():
    code = (
        "import sys; from pathlib import Path; from kitsune.submission.archive import Archive;"
        "a = Archive.from_bytes(Path(sys.argv[1]).read_bytes()); a.fingerprint;"
        "print(sorted(m for m in ('torch', 'numpy') if m in sys.modules))"
    )
    path = Path(os.environ["KITSUNE_HOME"])
    path.mkdir(parents=True)
    (path / "a.ksn").write_bytes(GOOD)
    done = subprocess.run([sys.executable, "-c", code, path / "a.ksn"], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


# --- fingerprint -----------------------------------------------------------------------------------------------------

SAME = {
    "names": put("tensors", 0, "names", ["other"]),
    "statistics": put("tensors", 0, "spread", "mean", 0.5),
    "the batch's size": put("sizes", "s0", 64),
    "the learning rate": put("optimizer", "groups", 0, "options", "lr", 0.3),
    "the momentum's value": put("optimizer", "groups", 0, "options", "momentum", 0.8),
    "an option that is off": put("optimizer", "groups", 0, "options", "nesterov", False),
}
OTHER = {
    "a width": put("tensors", 0, "shape", [5, 4]),
    "a dtype": put("tensors", 0, "dtype", "float64"),
    "a frozen parameter": put("tensors", 0, "requires_grad", False),
    "the mode": put("training", False),
    "a fixed batch": edited(
        lambda d: (d["inputs"][0].update(shape=[8, 4]), d["inputs"][1].update(shape=[8]), d.update(sizes={}))
    ),
    "an operator": put("forward", "nodes", 0, "nodes", 0, "op", "aten.addmm.default"),
    "an argument": put("forward", "nodes", 2, "kwargs", {"copy": False}),
    "the autocast dtype": put("forward", "nodes", 0, "dtype", "float16"),
    "the optimizer": put("optimizer", "name", "Adam"),
    "no momentum": put("optimizer", "groups", 0, "options", "momentum", 0),
    "a flag": put("optimizer", "groups", 0, "options", "nesterov", True),
    "no parameters": put("optimizer", "groups", 0, "parameters", []),
    "the nesting of y": put("y", {"list": [{"leaf": 1}]}),
}


@pytest.mark.parametrize("name", SAME)
def test_fingerprint_does_not_see(name):
    assert Archive.from_bytes(SAME[name]).fingerprint == valid().fingerprint


@pytest.mark.parametrize("name", OTHER)
def test_fingerprint_sees(name):
    assert Archive.from_bytes(OTHER[name]).fingerprint != valid().fingerprint


def test_fingerprints_of_all_of_them_differ():
    assert len({Archive.from_bytes(data).fingerprint for data in OTHER.values()}) == len(OTHER)
