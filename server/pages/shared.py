"""The read-only page of a run behind a share link, without a session."""

from fastapi import Request
from fastapi.responses import Response
from starlette.exceptions import HTTPException

from server.http.context import Context, Here
from server.pages.frame import OpenPageRouter, render
from server.pages.render_charts import charts_of
from server.pages.run import LoadedRun, Seen, look, news
from server.pages.views.run_view import run_view
from tuner.store.queries import shares
from tuner.wall_clock import utcnow

router = OpenPageRouter()


@router.get("/shared/{secret}")
def show(request: Request, here: Here, secret: str) -> Response:
    found = _look(here, secret)
    view = run_view(found.run, found.trials, found.plan, utcnow(), None, found.timeline)
    place = f"/shared/{secret}"
    return render(request, "shared.html", found=found, run=found.run, view=view, charts=charts_of(view), place=place)


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
