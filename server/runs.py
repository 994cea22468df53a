"""Requests to tune in, runs out: submit, list, look at, cancel."""

from typing import Annotated, Final

from anyio import to_thread
from fastapi import Depends, Header, Query, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import Response
from pydantic import ValidationError
from starlette.exceptions import HTTPException

from kitsune.errors import NotFoundError
from server.auth import GuardedRouter, caller
from server.context import Context, Here
from server.problems import API
from server.schemas import Key, RunId, RunsView, RunView, Sha256, Submit, TrialsView, Word, answer, documented, run_json
from tuner.records import Run, RunStatus, Verdict
from tuner.store import runs, submits, trials
from tuner.store.tokens import Scope

_BODY: Final = {
    "requestBody": {
        "required": True,
        "content": {"application/json": {"schema": {"$ref": "#/components/schemas/Submit"}}},
    }
}

reading = GuardedRouter(Scope.READ, prefix="/api/v1/runs", tag="runs")
submitting = GuardedRouter(Scope.SUBMIT, prefix="/api/v1/runs", tag="runs")


async def submit_of(request: Request) -> Submit:
    """The body, read only after the token was checked. Raises HTTPException or RequestValidationError."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise HTTPException(415, "send JSON, with the header 'Content-Type: application/json'")
    try:
        return Submit.model_validate_json(await request.body())
    except ValidationError as error:
        raise RequestValidationError(error.errors(include_url=False, include_input=False)) from error


@submitting.post(
    "",
    responses={
        200: {"model": RunView, "description": "It was asked for before: that run"},
        201: {"model": RunView, "description": "A new run, queued"},
        **documented(404, 409, 415),
    },
    openapi_extra=_BODY,
)
async def submit(
    request: Request,
    here: Here,
    body: Annotated[Submit, Depends(submit_of)],
    idempotency_key: Annotated[Key | None, Header(description="Repeat a submit with its key: it starts once")] = None,
) -> Response:
    """Ask for a tuning run. Without a key, an unfinished run of the same content is taken for this one."""
    run, is_new = await to_thread.run_sync(_submit, here, body, caller(request).id, idempotency_key)
    headers = {"location": f"{API}/runs/{run.id}"}
    if idempotency_key is not None:
        headers["idempotency-key"] = idempotency_key
    return answer(run_json(run), 201 if is_new else 200, headers)


def _submit(here: Context, body: Submit, owner: str, key: str | None) -> tuple[Run, bool]:
    with here.database.begin() as connection:
        return submits.submit(connection, body.request(), owner=owner, key=key)


@reading.get("", responses={200: {"model": RunsView}})
def list_runs(
    here: Here,
    status: RunStatus | None = None,
    fingerprint: Annotated[Sha256 | None, Query()] = None,
    gpu: Annotated[Word | None, Query()] = None,
    workload: Annotated[Word | None, Query()] = None,
    verdict: Verdict | None = None,
    after: Annotated[str | None, Query(max_length=200, description='"after" of the page before')] = None,
    limit: Annotated[int, Query(ge=1, le=200)] = 50,
) -> Response:
    """Runs that match every filter, newest first, a page at a time."""
    with here.database.read() as connection:
        page = runs.page(
            connection,
            status=status,
            fingerprint=fingerprint,
            gpu=gpu,
            workload=workload,
            verdict=verdict,
            after=after,
            limit=limit,
        )
    return answer({"runs": [run_json(run) for run in page.runs], "after": page.after})


@reading.get("/{run_id}", responses={200: {"model": RunView}, **documented(404)})
def show_run(here: Here, run_id: RunId) -> Response:
    """How a run stands."""
    with here.database.read() as connection:
        run = runs.get(connection, run_id)
    return answer(run_json(existing(run, run_id)))


@reading.get("/{run_id}/trials", responses={200: {"model": TrialsView}, **documented(404)})
def list_trials(
    here: Here,
    run_id: RunId,
    after: Annotated[int, Query(ge=-1, lt=2**63, description="only trials of a higher number")] = -1,
    limit: Annotated[int, Query(ge=1, le=1000)] = 200,
) -> Response:
    """What a run has tried, with every sample or the reason of the failure."""
    with here.database.read() as connection:
        existing(runs.get(connection, run_id), run_id)
        tried = trials.list_of(connection, run_id, after=after, limit=limit)
    return answer({"trials": [trial.model_dump(mode="json") for trial in tried]})


@submitting.post("/{run_id}/cancel", responses={200: {"model": RunView}, **documented(404)})
def cancel(here: Here, run_id: RunId) -> Response:
    """End a run. One that has ended stays as it is."""
    with here.database.begin() as connection:
        run = runs.cancel(connection, run_id)
    return answer(run_json(existing(run, run_id)))


def existing(run: Run | None, run_id: str) -> Run:
    if run is None:
        raise NotFoundError(f"there is no run {run_id!r}; GET {API}/runs lists them")
    return run
