"""The read-only page of a run behind a share link, without a session."""

from fastapi import Request
from fastapi.responses import Response
from starlette.exceptions import HTTPException

from server.http.context import Context, Here
from server.pages.frame import OpenPageRouter
from server.pages.run import LoadedRun, Seen, look, news, render_run
from tuner.store.queries import shares

router = OpenPageRouter()


@router.get("/shared/{secret}")
def show(request: Request, here: Here, secret: str) -> Response:
    return render_run(request, "shared.html", _look(here, secret), None, place=f"/shared/{secret}")


@router.get("/shared/{secret}/live")
def live(request: Request, here: Here, secret: str, seen: Seen = 0) -> Response:
    return news(request, _look(here, secret), seen, f"/shared/{secret}")


def _look(here: Context, secret: str) -> LoadedRun:
    """The run of the link. Raises HTTPException 404, with the same text for revoked and unknown links."""
    with here.database.read() as connection:
        share = shares.find(connection, secret)
        if share is None:
            raise HTTPException(404, "this link shows nothing, or no longer; ask whoever gave it to you for another")
        return look(connection, share.run_id, team=share.team)
