"""The page of a training step: its runs and plans over time, by GPU."""

from typing import Annotated, Final

from fastapi import Path, Request
from fastapi.responses import Response

from kitsune.errors import NotFoundError
from server.charts.trend import trend
from server.http.auth import caller
from server.http.context import Here
from server.pages.frame import PageRouter, render
from server.pages.render_charts import drawn
from server.pages.views.model_view import model_view
from tuner.store.queries import runs
from tuner.store.queries.tokens import Scope
from tuner.terminal.views import standing

#: The newest runs are shown; the list of runs has the older ones.
MOST_RUNS: Final = 200

router = PageRouter(Scope.READ)

Fingerprint = Annotated[str, Path(pattern=r"^[0-9a-f]{64}$")]


@router.get("/models/{fingerprint}")
def show(request: Request, here: Here, fingerprint: Fingerprint) -> Response:
    with here.database.read() as connection:
        found = runs.page(connection, team=caller(request).team, fingerprint=fingerprint, limit=MOST_RUNS)
    if not found.runs:
        raise NotFoundError(f"there is no run of a step with the fingerprint {fingerprint!r}; the list has all runs")
    view = model_view(found.runs)
    charts = {gpu.gpu: drawn(trend, gpu.moments) for gpu in view.gpus}
    has_more = found.after is not None
    return render(
        request,
        "model.html",
        view=view,
        charts=charts,
        fingerprint=fingerprint,
        has_more=has_more,
        standing=standing,
    )
