"""The name of a style sheet or script in, its address and its bytes out.

The address holds the beginning of the digest of the content: browsers keep a file for good, and a new one has another
address.
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

#: Open to all: the page where one signs in needs them, and they tell nothing.
router = APIRouter(prefix=PLACE, redirect_slashes=False, include_in_schema=False)


@dataclass(frozen=True)
class Asset:
    content: bytes
    media_type: str
    digest: str


@cache
def assets() -> dict[str, Asset]:
    """Every file that a page may ask for, by name, read once: no path of a request ever reaches the disk."""
    return {
        file.name: _asset(file.read_bytes(), MEDIA_TYPES[file.suffix])
        for file in sorted(FOLDER.iterdir())
        if file.suffix in MEDIA_TYPES
    }


def _asset(content: bytes, media_type: str) -> Asset:
    return Asset(content, media_type, hashlib.sha256(content).hexdigest()[:16])


def address(name: str) -> str:
    """For templates: `{{ asset("kitsune.css") }}`."""
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
