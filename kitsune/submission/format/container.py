"""The container of an archive: a zip of `graph.json` and the members `b/0.npy`, `b/1.npy`, ...

It has its own reader, since `zipfile` accepts what must be refused: bytes before and after the archive, two members of
one name, compressed members that expand a thousandfold, headers that contradict the directory.
"""

import io
import struct
import zipfile
import zlib
from collections.abc import Sequence
from typing import Final

from kitsune.errors import ArchiveError
from kitsune.submission.format.limits import MAX_ARCHIVE_BYTES, MAX_BUFFER_BYTES, MAX_GRAPH_BYTES, MAX_MEMBERS

GRAPH: Final = "graph.json"
_MAX_NPY_BYTES = MAX_BUFFER_BYTES + 1024
_DIRECTORY_END = struct.Struct("<4s4H2IH")
_DIRECTORY_ENTRY = struct.Struct("<4s6H3I5H2I")
_LOCAL_HEADER = struct.Struct("<4s5H3I2H")
_EPOCH = (1980, 1, 1, 0, 0, 0)


def member_name(index: int) -> str:
    """Name of the index-th member: the graph, then the buffers in order."""
    return GRAPH if index == 0 else f"b/{index - 1}.npy"


def pack(members: Sequence[bytes]) -> bytes:
    """A zip (STORED, fixed dates) of the graph and the buffers. Deterministic: equal members give equal bytes."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as zipped:
        for index, member in enumerate(members):
            zipped.writestr(zipfile.ZipInfo(member_name(index), _EPOCH), member)
    return file.getvalue()


def unpack(data: bytes) -> list[bytes]:
    """The members of an archive. Raises ArchiveError for anything but what `pack` writes.

    Dates, operating system and permissions in the zip are ignored, since nothing is extracted to disk.
    """
    if len(data) > MAX_ARCHIVE_BYTES:
        raise ArchiveError(f"archive: {len(data)} bytes, more than the {MAX_ARCHIVE_BYTES} that are allowed")
    count, directory, end = _directory(data)
    members = []
    offset, position = 0, directory
    for index in range(count):
        name = member_name(index)
        size, crc, position = _entry(data, position, end, name, offset)
        members.append(_member(data, offset, name, size, crc))
        offset += _LOCAL_HEADER.size + len(name) + size
    if position != end or offset != directory:
        raise ArchiveError("archive: there are bytes that belong to no member")
    return members


def _directory(data: bytes) -> tuple[int, int, int]:
    """Number of members, and where the directory starts and ends."""
    end = len(data) - _DIRECTORY_END.size
    if end < 0:
        raise ArchiveError("archive: too short to be a zip file")
    signature, disk, first_disk, here, count, size, start, comment = _DIRECTORY_END.unpack_from(data, end)
    if signature != b"PK\x05\x06" or comment:
        raise ArchiveError("archive: not a zip file that ends with its directory, or it has a comment")
    if disk or first_disk or here != count:
        raise ArchiveError("archive: spans several disks")
    if not 1 <= count <= MAX_MEMBERS:
        raise ArchiveError(f"archive: {count} members; there must be 1 to {MAX_MEMBERS}")
    if start + size != end:
        raise ArchiveError("archive: there are bytes before, between or after its parts")
    return count, start, end


def _entry(data: bytes, position: int, end: int, name: str, offset: int) -> tuple[int, int, int]:
    """Size and checksum of the directory entry at `position`, and where the next entry starts."""
    if position + _DIRECTORY_ENTRY.size + len(name) > end:
        raise ArchiveError(f"{name}: its directory entry is cut off")
    fields = _DIRECTORY_ENTRY.unpack_from(data, position)
    signature, _, _, flags, method, _, _, crc, packed, size, name_bytes, extra, comment, disk, _, _, local = fields
    here = position + _DIRECTORY_ENTRY.size
    if signature != b"PK\x01\x02" or name_bytes != len(name) or data[here : here + len(name)] != name.encode():
        raise ArchiveError(f"{name}: is not the member that comes next in the archive")
    if method != zipfile.ZIP_STORED or packed != size:
        raise ArchiveError(f"{name}: is compressed; only stored members are accepted")
    if flags or extra or comment or disk:
        raise ArchiveError(f"{name}: has flags, extra fields or a comment")
    if local != offset:
        raise ArchiveError(f"{name}: starts at byte {local}, not right after the member before it ({offset})")
    limit = MAX_GRAPH_BYTES if name == GRAPH else _MAX_NPY_BYTES
    if size > limit:
        raise ArchiveError(f"{name}: {size} bytes, more than the {limit} that are allowed")
    return size, crc, here + len(name)


def _member(data: bytes, offset: int, name: str, size: int, crc: int) -> bytes:
    start = offset + _LOCAL_HEADER.size + len(name)
    if start + size > len(data):
        raise ArchiveError(f"{name}: is cut off")
    fields = _LOCAL_HEADER.unpack_from(data, offset)
    signature, _, flags, method, _, _, local_crc, packed, local_size, name_bytes, extra = fields
    agrees = (flags, method, local_crc, packed, local_size, name_bytes, extra) == (0, 0, crc, size, size, len(name), 0)
    if signature != b"PK\x03\x04" or not agrees or data[start - len(name) : start] != name.encode():
        raise ArchiveError(f"{name}: its header contradicts the directory")
    member = data[start : start + size]
    if zlib.crc32(member) != crc:
        raise ArchiveError(f"{name}: its checksum is wrong; the file was damaged")
    return member
