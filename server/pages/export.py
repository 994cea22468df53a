"""Downloads of a run: its page as a self-contained HTML file, JSON, CSV, and the trace.

The HTML file has inline styles. Its own Content-Security-Policy allows these by their digest and nothing else: no
scripts, no images, no requests.
"""

import base64
import hashlib
from functools import cache
from typing import Final

from fastapi import Request
from fastapi.responses import Response

from server.api import exports, traces
from server.http.auth import caller
from server.http.context import Here
from server.pages.assets import assets
from server.pages.frame import PageRouter
from server.pages.run import look, render_run
from server.payloads.schemas import RunId
from tuner.store.queries.tokens import Scope

STYLES: Final = ("kitsune.css", "charts.css", "run.css")

router = PageRouter(Scope.READ, prefix="/runs")


@router.get("/{run_id}/export.html")
def as_page(request: Request, here: Here, run_id: RunId) -> Response:
    with here.database.read() as connection:
        found = look(connection, run_id, team=caller(request).team)
    answer = render_run(request, "run_export.html", found, None, place="", style=style(), policy=policy())
    answer.headers["content-security-policy"] = f"{policy()}; frame-ancestors 'none'"
    answer.headers["content-disposition"] = f'attachment; filename="kitsune-run-{run_id}.html"'
    return answer


@router.get("/{run_id}/export.json")
def as_json(request: Request, here: Here, run_id: RunId) -> Response:
    """The export of the API, authorized by the session."""
    return exports.export(request, here, run_id, "json")


@router.get("/{run_id}/export.csv")
def as_csv(request: Request, here: Here, run_id: RunId) -> Response:
    return exports.export(request, here, run_id, "csv")


@router.get("/{run_id}/trace.json")
def as_trace(request: Request, here: Here, run_id: RunId) -> Response:
    return traces.trace(request, here, run_id)


@cache
def style() -> str:
    """All style sheets of the page of a run, concatenated."""
    return "\n".join(assets()[name].content.decode() for name in STYLES)


@cache
def policy() -> str:
    """The policy for the <meta> element, where browsers ignore frame-ancestors."""
    digest = base64.b64encode(hashlib.sha256(style().encode()).digest()).decode()
    return f"default-src 'none'; style-src 'sha256-{digest}'; base-uri 'none'; form-action 'none'"
