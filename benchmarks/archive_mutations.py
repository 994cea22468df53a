"""A valid archive and chance in, one that is broken somewhere out: in its bytes, its zip, its JSON or its buffers."""

import copy
import io
import json
import re
import struct
import zipfile
from collections.abc import Iterator
from random import Random
from typing import Any, Final

from kitsune.submission.format.container import pack, unpack
from kitsune.submission.format.limits import MAX_COMMAS, MAX_CONTAINERS, MAX_NODES, MAX_TENSORS
from tests.unit.kitsune.submission.hostile_archives import CODE, OBJECTS, PICKLE

#: Of every place in a document, and of every header of a zip: where parsers are known to slip.
NUMBERS: Final = (
    0,
    1,
    -1,
    2,
    7,
    127,
    255,
    256,
    65535,
    2**31 - 1,
    2**31,
    2**32 - 1,
    2**53,
    2**62,
    2**63 - 1,
    2**63,
    -(2**63),
)
WORDS: Final = (
    "", "%0", "%1", "%5", "%999999", "%-1", "t0", "x0", "y1", "o0", "s0", "s999", "float32", "object", "own", "cuda:0",
    "aten.relu.default", "aten.add.Tensor", "aten.add_.Tensor", "aten.add.out", "aten.set_.source_Storage",
    "aten.as_strided.default", "aten.item.default", "aten.lstm.input", "py.getitem", "py.pow", "os.system",
    "builtins.exec", "torch.load", "aten.add.__globals__", "__class__", "../../etc/passwd", "/etc/passwd", "w" * 300,
    CODE,
)  # fmt: skip
VALUES: Final[tuple[Any, ...]] = (
    None, True, False, 0.5, -0.0, 1e308, 5e-324, [], {}, [[]], [{}], ["%0"], [["%0"], "%0"], {"leaf": 0}, {"leaf": -1},
    {"dtype": "float64"}, {"float": "nan"}, {"text": CODE}, {"slice": [0, None, 1]}, {"device": "own"}, {"value": None},
    {"complex": [0.0, 1.0]}, {"kind": "normal", "mean": 0.0, "std": 1.0, "low": -1.0, "high": 1.0},
)  # fmt: skip
LITERALS: Final = (
    b"NaN", b"Infinity", b"-Infinity", b"1e999", b"-0", b"00", b"0x10", b"1.", b"+1", b"9" * 40, b"9" * 5000, b"1_0",
    b"''", b"/**/1", b'"\\u0000"', b'"\\ud800"', b'"\xc3\xa9"', b'"\xef\xbc\x90"', b'"\x00"', b"undefined", b"//",
)  # fmt: skip
DESCRIPTIONS: Final = (
    b"'|O'",
    b"'<f8'",
    b"'>f4'",
    b"'<V4'",
    b"'<U4'",
    b"[('a', '<f4')]",
    CODE.encode(),
    b"'<f4' " * 40,
)
SHAPES: Final = (b"()", b"(-1,)", b"(3, 1)", b"(2**40,)", b"(99999999999,)", b"(3.0,)", CODE.encode(), b"(" * 900)
DEPTHS: Final = (3, 5, 9, 40, 63, 64, 65, 200, 20_000)
COUNTS: Final = (2, 30, 300, 3000, MAX_TENSORS, MAX_NODES, MAX_CONTAINERS, MAX_COMMAS)


def mutated(bases: tuple[bytes, ...], chance: Random) -> Iterator[tuple[str, bytes]]:
    """For ever: the name of a mutation, and what it made of one of the archives."""
    while True:
        for mutation in MUTATIONS:
            yield mutation.__name__, mutation(chance.choice(bases), chance)


def some_bytes(base: bytes, chance: Random) -> bytes:
    """Flipped, replaced, cut out, doubled or put in, anywhere in the file."""
    data = bytearray(base)
    for _ in range(chance.choice((1, 1, 2, 4, 16))):
        start = chance.randrange(len(data) + 1)
        end = min(len(data), start + chance.choice((1, 1, 2, 8, 64, 1000)))
        put = (
            bytes(byte ^ 1 << chance.randrange(8) for byte in data[start:end]),
            chance.randbytes(end - start),
            b"",
            bytes(data[start:end]) * 2,
            chance.randbytes(chance.choice((1, 4, 30))) + bytes(data[start:end]),
            bytes(end - start),
        )
        data[start:end] = chance.choice(put)
    return bytes(data)


def headers(base: bytes, chance: Random) -> bytes:
    """A number in a header of the zip, or its first bytes."""
    data = bytearray(base)
    for _ in range(chance.choice((1, 1, 2))):
        places = [found.start() for found in re.finditer(rb"PK[\x01\x03\x05][\x02\x04\x06]", base)]
        start = chance.choice(places) + chance.randrange(0, 46, 2)
        size, form = chance.choice(((1, "<B"), (2, "<H"), (4, "<I")))
        if start + size <= len(data):
            struct.pack_into(form, data, start, chance.choice(NUMBERS) % 2 ** (8 * size))
    return bytes(data)


def members(base: bytes, chance: Random) -> bytes:
    """Other names, other orders, other ways to pack, written by another writer of zips."""
    parts = list(enumerate(unpack(base)))
    named = [("graph.json" if index == 0 else f"b/{index - 1}.npy", part) for index, part in parts]
    for _ in range(chance.choice((1, 2))):
        at = chance.randrange(len(named))
        name, part = named[at]
        others = (
            "../" + name,
            "/" + name,
            name.replace("/", "\\"),
            name.upper(),
            name + " ",
            name + "\0",
            "b/",
            CODE,
            "",
        )
        change = chance.randrange(5)
        if change == 0:
            named[at] = chance.choice(others), part
        elif change == 1:
            named.insert(at, (f"b/{len(named)}.npy", chance.choice((part, PICKLE, b""))))
        elif change == 2:
            chance.shuffle(named)
        elif change == 3 and len(named) > 1:
            del named[at]
        else:
            named[at] = name, chance.choice((b"", part[: len(part) // 2], part * 2, PICKLE, base))
    return _zipped(named, chance)


def document(base: bytes, chance: Random) -> bytes:
    """Values of the graph replaced, dropped, doubled, moved or named otherwise."""
    graph, *buffers = unpack(base)
    value = json.loads(graph)
    for _ in range(chance.choice((1, 1, 1, 2, 4))):
        place, key = chance.choice(list(_places(value)))
        change = chance.randrange(6)
        if change <= 2:
            place[key] = copy.deepcopy(
                chance.choice((chance.choice(NUMBERS), chance.choice(WORDS), chance.choice(VALUES)))
            )
        elif change == 3:
            del place[key]
        elif change == 4:
            other, name = chance.choice(list(_places(value)))
            place[key] = copy.deepcopy(other[name])
        elif isinstance(place, dict):
            place[chance.choice(WORDS)] = place.pop(key)
        else:
            place.insert(key, copy.deepcopy(place[key]))
    return pack([json.dumps(value).encode(), *buffers])


def text(base: bytes, chance: Random) -> bytes:
    """What json.dumps would not write: other numbers, escapes, letters, brackets and commas."""
    graph, *buffers = unpack(base)
    spots = [found.span() for found in re.finditer(rb'-?\d+(\.\d+)?|"[^"]*"|[\[\]{},:]', graph)]
    start, end = chance.choice(spots)
    put = chance.choice(
        (chance.choice(LITERALS), b"", graph[start:end] * 2, graph[start:end].upper(), b"\xef\xbb\xbf", b" " * 99)
    )
    return pack([graph[:start] + put + graph[end:], *buffers])


def buffers(base: bytes, chance: Random) -> bytes:
    """Headers and values of the arrays."""
    graph, *arrays = unpack(base)
    if not arrays:
        return pack([graph, chance.choice((PICKLE, OBJECTS, b""))])
    at = chance.randrange(len(arrays))
    array = arrays[at]
    put = (
        re.sub(rb"'descr': '[^']*'", lambda _: b"'descr': " + chance.choice(DESCRIPTIONS), array),
        re.sub(rb"\([\d, ]*\)", lambda _: chance.choice(SHAPES), array),
        array.replace(b"False", b"True "),
        array[:6] + bytes((chance.choice((1, 2, 3, 255)), 0)) + array[8:],
        array[:8] + struct.pack("<H", chance.choice((0, 1, 65535))) + array[10:],
        array[: chance.randrange(len(array))],
        array + chance.randbytes(chance.choice((1, 4, 70_000))),
        PICKLE,
        OBJECTS,
        some_bytes(array, chance),
    )
    arrays[at] = chance.choice(put)
    return pack([graph, *arrays])


def nesting(base: bytes, chance: Random) -> bytes:
    """A value of the graph wrapped many times over, in lists, objects, tuples or regions."""
    graph, *buffers = unpack(base)
    value, depth = json.loads(graph), chance.choice(DEPTHS)
    place, key = chance.choice(list(_places(value)))
    before, after = chance.choice(
        ((b"[", b"]"), (b'{"tuple":[', b"]}"), (b'{"dict":{"a":', b"}}"), (_REGION, b'],"outputs":[]}'))
    )
    inner = json.dumps(place[key]).encode()
    place[key] = _MARK
    wrapped = json.dumps(value).encode().replace(f'"{_MARK}"'.encode(), before * depth + inner + after * depth)
    return pack([wrapped, *buffers])


def counts(base: bytes, chance: Random) -> bytes:
    """A part of the graph so many times, or so many bytes long."""
    graph, *buffers = unpack(base)
    value, number = json.loads(graph), chance.choice(COUNTS)
    place, key = chance.choice(list(_places(value)))
    found = place[key]
    if isinstance(found, list):
        place[key] = found * min(number, 3_000_000 // (len(json.dumps(found)) + 1))
    elif isinstance(found, dict):
        place[key] = found | {f"k{index}": None for index in range(number)}
    else:
        place[key] = chance.choice(("w" * number, [found] * number, 10 ** min(number, 4000)))
    return pack([json.dumps(value).encode(), *buffers])


#: `document` twice: most of what the others make is refused early.
MUTATIONS: Final = (some_bytes, headers, members, document, document, text, buffers, nesting, counts)
_MARK: Final = "here"
_REGION: Final = b'{"region":"grad","enabled":false,"args":[],"nodes":['


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Every list or object within, with each of its keys."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, part in items:
        yield value, key
        yield from _places(part)


def _zipped(named: list[tuple[str, bytes]], chance: Random) -> bytes:
    file = io.BytesIO()
    methods = (zipfile.ZIP_STORED, zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2)
    with zipfile.ZipFile(file, "w", chance.choice(methods)) as archive:
        archive.comment = chance.choice((b"", b"", b"kitsune"))
        for name, part in dict(named).items():
            info = zipfile.ZipInfo(name, (1980, 1, 1, 0, 0, 0))
            info.external_attr = chance.choice((0, 0o100600 << 16, 0o120777 << 16))
            info.extra = chance.choice((b"", b"", struct.pack("<HHQ", 1, 8, 2**40)))
            archive.writestr(info, part)
    return file.getvalue()
