"""The route that receives an archive, validates it, and stores it as re-serialized by the server."""

import contextlib
import hashlib
from collections.abc import Iterator
from tempfile import SpooledTemporaryFile
from typing import IO, Final

from anyio import CapacityLimiter, WouldBlock, to_thread
from fastapi import Request
from fastapi.responses import Response
from starlette.exceptions import HTTPException

from kitsune.submission.format.archive import Archive
from server.http.auth import GuardedRouter, caller
from server.http.context import Context, Here
from server.payloads.schemas import ArchiveId, ArchiveView, answer, documented
from tuner.store.queries import archives
from tuner.store.queries.archives import StoredArchive
from tuner.store.queries.tokens import Scope

#: Bytes of an upload that are held in memory; a larger one is spooled to disk.
_IN_MEMORY: Final = 2**18
_BODY: Final = {
    "requestBody": {
        "required": True,
        "description": "The bytes of a .ksn file, as `kitsune export` writes it",
        "content": {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}},
    }
}
#: Concurrent validations: an archive of the maximum size takes some 0.1 GB and half a second of one core.
CHECKS: Final = CapacityLimiter(2)
#: Concurrent uploads: each takes up to 1.7 MB of memory, a file and 32 MiB of disk.
ARRIVALS: Final = CapacityLimiter(64)

router = GuardedRouter(Scope.SUBMIT, prefix="/api/v1/archives", tag="archives")


@router.put(
    "/{sha256}",
    responses={
        200: {"model": ArchiveView, "description": "It was stored already"},
        201: {"model": ArchiveView, "description": "It is stored now"},
        **documented(507),
    },
    openapi_extra=_BODY,
)
async def put(request: Request, sha256: ArchiveId, here: Here) -> Response:
    """Send an archive. The server reads it as data, validates all of it, and stores its own serialization of it.

    `sha256` of the answer is the digest of what is stored, and what `POST /api/v1/runs` takes.
    """
    with arriving(), SpooledTemporaryFile(_IN_MEMORY) as file:
        sent = await _receive(request, file)
        if sent != sha256:
            raise HTTPException(
                422, f"the bytes that arrived have the SHA-256 {sent}, not {sha256}; send them again, or to their name"
            )
        stored, is_new = await to_thread.run_sync(_keep, here, file, caller(request).team, limiter=CHECKS)
    return answer({**stored.model_dump(mode="json"), "sent_sha256": sent}, 201 if is_new else 200)


@contextlib.contextmanager
def arriving() -> Iterator[None]:
    """Holds one of the slots for concurrent uploads, through this route or a form.

    Raises HTTPException 503 when none is free; waiting for one would keep a connection busy.
    """
    try:
        ARRIVALS.acquire_nowait()
    except WouldBlock as error:
        full = f"{ARRIVALS.total_tokens:g} archives arrive already; send this one again in a moment"
        raise HTTPException(503, full, {"retry-after": "1"}) from error
    try:
        yield
    finally:
        ARRIVALS.release()


async def _receive(request: Request, file: IO[bytes]) -> str:
    """Writes the body into `file` and returns its SHA-256. The guard limits its size and its time.

    A thread writes it in blocks, so that a slow disk does not block other requests.
    """
    digest, block = hashlib.sha256(), bytearray()
    async for chunk in request.stream():
        digest.update(chunk)
        block += chunk
        if len(block) >= _IN_MEMORY:
            await to_thread.run_sync(file.write, bytes(block))
            block.clear()
    await to_thread.run_sync(file.write, bytes(block))
    return digest.hexdigest()


def _keep(here: Context, file: IO[bytes], team: str) -> tuple[StoredArchive, bool]:
    """Validates and stores the archive. Raises ArchiveError; nothing is stored then."""
    file.seek(0)
    archive = Archive.from_bytes(file.read())
    content = archive.to_bytes()
    with here.database.begin() as connection:
        return archives.put(connection, content, archive, team=team, most_bytes=here.settings.team_archive_bytes)
