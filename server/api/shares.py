"""The routes that create and revoke share links, which show a run without a token."""

from typing import Annotated, Final

from fastapi import Query, Request
from fastapi.responses import Response

from server.api.runs import require_run
from server.http.auth import GuardedRouter, caller, requires
from server.http.context import Here
from server.payloads.schemas import RunId, SharesEnded, ShareView, answer, documented
from server.tokens import expiry
from tuner.store.queries import runs, shares
from tuner.store.queries.tokens import Scope

#: Path of the page of a link, followed by its secret.
SHARED: Final = "/shared"

router = GuardedRouter(Scope.SUBMIT, prefix="/api/v1/runs", tag="runs")


@router.post(
    "/{run_id}/share",
    status_code=201,
    dependencies=[requires(Scope.READ)],  # sharing discloses the run, so it needs the right to read it
    responses={201: {"model": ShareView, "description": "A new link; it is not shown again"}, **documented(404, 507)},
)
def share(
    request: Request,
    here: Here,
    run_id: RunId,
    expires: Annotated[
        str | None, Query(max_length=40, description='"12h", "30d"; without: never', examples=["30d"])
    ] = None,
) -> Response:
    """Create a link that shows this run, and nothing else. It is returned once; only its SHA-256 is stored."""
    until = expiry(expires, "expires")
    with here.database.begin() as connection:
        made = shares.create(connection, run_id, team=caller(request).team, expires_at=until)
    link, secret = require_run(made, run_id)
    path = f"{SHARED}/{secret}"
    return answer({"path": path, **link.model_dump(mode="json", include=set(ShareView.model_fields) - {"path"})}, 201)


@router.delete("/{run_id}/share", responses={200: {"model": SharesEnded}, **documented(404, 507)})
def unshare(request: Request, here: Here, run_id: RunId) -> Response:
    """Revoke all links to this run, with immediate effect."""
    team = caller(request).team
    with here.database.begin() as connection:
        require_run(runs.get(connection, run_id, team=team), run_id)
        ended = shares.end(connection, run_id, team=team)
    return answer({"ended": ended})
