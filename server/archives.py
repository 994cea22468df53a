"""Bytes of an archive in, a checked and re-emitted archive in the database out."""

import hashlib
from tempfile import SpooledTemporaryFile
from typing import IO, Final

from anyio import CapacityLimiter, to_thread
from fastapi import Request
from fastapi.responses import Response
from starlette.exceptions import HTTPException

from kitsune.submission.archive import Archive
from server.auth import GuardedRouter, caller
from server.context import Here
from server.schemas import ArchiveId, ArchiveView, answer, documented
from tuner.store import archives
from tuner.store.archives import StoredArchive
from tuner.store.database import Database
from tuner.store.tokens import Scope

#: What is larger waits on disk.
_IN_MEMORY: Final = 2**20
_BODY: Final = {
    "requestBody": {
        "required": True,
        "description": "The bytes of a .ksn file, as `kitsune export` writes it",
        "content": {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}},
    }
}
#: Checking an archive at the limits takes some 0.3 GB and a second of one core: so many at once.
CHECKS: Final = CapacityLimiter(2)

router = GuardedRouter(Scope.SUBMIT, prefix="/api/v1/archives", tag="archives")


@router.put(
    "/{sha256}",
    responses={
        200: {"model": ArchiveView, "description": "It was there already"},
        201: {"model": ArchiveView, "description": "It is kept now"},
        **documented(507),
    },
    openapi_extra=_BODY,
)
async def put(request: Request, sha256: ArchiveId, here: Here) -> Response:
    """Send an archive. It is read as data, checked whole, and kept as the server writes it down itself."""
    with SpooledTemporaryFile(_IN_MEMORY) as file:
        sent = await _receive(request, file)
        if sent != sha256:
            raise HTTPException(
                422, f"the bytes that arrived have the SHA-256 {sent}, not {sha256}; send them again, or to their name"
            )
        stored, is_new = await to_thread.run_sync(_keep, here.database, file, caller(request).team, limiter=CHECKS)
    return answer({**stored.model_dump(mode="json"), "sent_sha256": sent}, 201 if is_new else 200)


async def _receive(request: Request, file: IO[bytes]) -> str:
    """Writes the body into `file` and gives its SHA-256. The guard bounds its size and its time.

    Written by a thread in blocks: a disk that hangs does not stop the other requests.
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


def _keep(database: Database, file: IO[bytes], team: str) -> tuple[StoredArchive, bool]:
    """Raises ArchiveError, and then keeps nothing."""
    file.seek(0)
    archive = Archive.from_bytes(file.read())
    content = archive.to_bytes()
    with database.begin() as connection:
        return archives.put(connection, content, archive, team=team)
