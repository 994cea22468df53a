"""Serves style sheets, scripts and the icon.

Their URLs contain a digest of the content, so that browsers can cache them forever.
"""

import hashlib
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Annotated, Final

from fastapi import APIRouter, Header
from fastapi.responses import Response
from starlette.exceptions import HTTPException

PLACE: Final = "/static"
FOLDER: Final = Path(__file__).with_name("static")
MEDIA_TYPES: Final = {".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
_KEPT: Final = "public, max-age=31536000, immutable"

#: Open without a session: the sign-in page needs these files, and they disclose nothing.
router = APIRouter(prefix=PLACE, redirect_slashes=False, include_in_schema=False)


@dataclass(frozen=True)
class Asset:
    content: bytes
    media_type: str
    digest: str


@cache
def assets() -> dict[str, Asset]:
    """All files that may be requested, by name. Read once, so that no path of a request reaches the disk."""
    return {
        file.name: _asset(file.read_bytes(), MEDIA_TYPES[file.suffix])
        for file in sorted(FOLDER.iterdir())
        if file.suffix in MEDIA_TYPES
    }


def _asset(content: bytes, media_type: str) -> Asset:
    return Asset(content, media_type, hashlib.sha256(content).hexdigest()[:16])


def address(name: str) -> str:
    """The URL of a file; in templates `{{ asset("kitsune.css") }}`."""
    return f"{PLACE}/{assets()[name].digest}/{name}"


@router.get("/{digest}/{name}")
async def asset(digest: str, name: str, if_none_match: Annotated[str | None, Header()] = None) -> Response:
    found = assets().get(name)
    if found is None or found.digest != digest:
        raise HTTPException(404)
    headers = {"etag": f'"{digest}"', "cache-control": _KEPT}
    if if_none_match == headers["etag"]:
        return Response(status_code=304, headers=headers)
    return Response(found.content, headers=headers, media_type=found.media_type)
