"""The pages that explain problem types. They need no session."""

from fastapi import Request
from fastapi.responses import Response
from starlette.exceptions import HTTPException

from server.pages.frame import OpenPageRouter, render
from server.payloads.problem_types import PLACE, TYPES

router = OpenPageRouter()


@router.get(PLACE)
def every(request: Request) -> Response:
    return render(request, "problem_types.html", types=TYPES, place=PLACE)


@router.get(PLACE + "/{slug}")
def show(request: Request, slug: str) -> Response:
    if slug not in TYPES:
        raise HTTPException(404, f"there is no problem of this name; {PLACE} lists them")
    return render(request, "problem_type.html", slug=slug, found=TYPES[slug], place=PLACE)
