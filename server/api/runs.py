"""The routes of runs: submit, list, show, cancel, retry, delete and annotate.

A token sees the runs of its team. A run of another team is answered like one that does not exist: 404, same text.
"""

from typing import Annotated, Final, Literal, TypeVar

from anyio import to_thread
from fastapi import Depends, Header, Query, Request
from fastapi.responses import Response
from pydantic import Field

from kitsune.errors import NotFoundError
from server.http.auth import GuardedRouter, caller, requires
from server.http.context import Context, Here
from server.payloads.problems import API
from server.payloads.request_checks import JsonBody, body_of
from server.payloads.schemas import (
    Annotation,
    Key,
    Moment,
    RunDeleted,
    RunId,
    RunsView,
    RunView,
    Sha256,
    Submit,
    Tag,
    TrialsView,
    Word,
    answer,
    documented,
    run_json,
)
from tuner.records import Run, RunStatus, Verdict
from tuner.store.queries import retention, runs, submits, trials
from tuner.store.queries.runs import Sort
from tuner.store.queries.tokens import Scope, Token
from tuner.terminal.views import LOST

reading = GuardedRouter(Scope.READ, prefix="/api/v1/runs", tag="runs")
submitting = GuardedRouter(Scope.SUBMIT, prefix="/api/v1/runs", tag="runs")

#: How the filters for a GPU and a workload match.
_PART: Final = "any part of the name, case-insensitive"

_Found = TypeVar("_Found")
Figure = Annotated[float, Field(ge=0, le=1e300, allow_inf_nan=False)]


@submitting.post(
    "",
    responses={
        200: {"model": RunView, "description": "Submitted before: that run"},
        201: {"model": RunView, "description": "A new run, queued"},
        **documented(404, 409, 415, 507),
    },
    openapi_extra=body_of(Submit),
)
async def submit(
    request: Request,
    here: Here,
    body: Annotated[Submit, Depends(JsonBody(Submit))],
    idempotency_key: Annotated[Key | None, Header(description="Requests with the same key start one run")] = None,
) -> Response:
    """Submit a tuning run: of 25 trials, unless a budget says otherwise.

    Without a key, an unfinished run of the same request is returned instead of a new one.
    """
    run, is_new = await to_thread.run_sync(_submit, here, body, caller(request), idempotency_key)
    headers = {"location": f"{API}/runs/{run.id}"}
    if idempotency_key is not None:
        headers["idempotency-key"] = idempotency_key
    return answer(run_json(run), 201 if is_new else 200, headers)


def _submit(here: Context, body: Submit, token: Token, key: str | None) -> tuple[Run, bool]:
    with here.database.begin() as connection:
        quota = here.settings.quota
        return submits.submit(connection, body.request(), owner=token.id, team=token.team, key=key, quota=quota)


@reading.get("", responses={200: {"model": RunsView}})
def list_runs(
    request: Request,
    here: Here,
    status: Annotated[
        RunStatus | Literal["lost"] | None,
        Query(description='"lost": running, but the lease of the worker has expired'),
    ] = None,
    fingerprint: Annotated[Sha256 | None, Query()] = None,
    gpu: Annotated[Word | None, Query(description=f"the GPU it ran on, or the device it asks for: {_PART}")] = None,
    workload: Annotated[Word | None, Query(description=f"the workload, or the name of the run: {_PART}")] = None,
    verdict: Verdict | None = None,
    tag: Annotated[Tag | None, Query()] = None,
    min_gain: Annotated[Figure | None, Query()] = None,
    min_gain_low: Annotated[Figure | None, Query(description="lower bound of the 95 % interval, at least")] = None,
    max_memory_ratio: Annotated[Figure | None, Query()] = None,
    min_trials: Annotated[int | None, Query(ge=0, lt=2**63)] = None,
    created_after: Moment | None = None,
    sort: Annotated[Sort, Query(description="runs without a value come last")] = Sort.CREATED,
    order: Literal["asc", "desc"] = "desc",
    after: Annotated[str | None, Query(max_length=10_000, description='"after" of the previous page')] = None,
    limit: Annotated[int, Query(ge=1, le=200)] = 50,
) -> Response:
    """Runs that match all filters, a page at a time; newest first by default."""
    with here.database.read() as connection:
        page = runs.page(
            connection,
            team=caller(request).team,
            status=status if isinstance(status, RunStatus) else None,
            is_lost=True if status == LOST else None,
            fingerprint=fingerprint,
            gpu=gpu,
            workload=workload,
            verdict=verdict,
            tag=tag,
            min_gain=min_gain,
            min_gain_low=min_gain_low,
            max_memory=max_memory_ratio,
            min_trials=min_trials,
            created_after=created_after,
            sort=sort,
            is_descending=order == "desc",
            after=after,
            limit=limit,
        )
    return answer({"runs": [run_json(run) for run in page.runs], "after": page.after})


@reading.get("/{run_id}", responses={200: {"model": RunView}, **documented(404)})
def show_run(request: Request, here: Here, run_id: RunId) -> Response:
    """A run and its status."""
    with here.database.read() as connection:
        run = runs.get(connection, run_id, team=caller(request).team)
    return answer(run_json(require_run(run, run_id)))


@reading.get("/{run_id}/trials", responses={200: {"model": TrialsView}, **documented(404)})
def list_trials(
    request: Request,
    here: Here,
    run_id: RunId,
    after: Annotated[int, Query(ge=-1, lt=2**63, description="only trials with a higher number")] = -1,
    limit: Annotated[int, Query(ge=1, le=1000)] = 200,
) -> Response:
    """The trials of a run, with all samples or the reason of the failure."""
    with here.database.read() as connection:
        require_run(runs.get(connection, run_id, team=caller(request).team), run_id)
        tried = trials.list_of(connection, run_id, after=after, limit=limit)
    return answer({"trials": [trial.model_dump(mode="json") for trial in tried]})


@submitting.post("/{run_id}/cancel", responses={200: {"model": RunView}, **documented(404, 507)})
def cancel(request: Request, here: Here, run_id: RunId) -> Response:
    """Cancel a run. A run that has ended does not change.

    A run that has its plan already becomes `finished`; its ablation then stays incomplete.
    """
    with here.database.begin() as connection:
        run = runs.cancel(connection, run_id, team=caller(request).team)
    return answer(run_json(require_run(run, run_id)))


@submitting.post(
    "/{run_id}/retry",
    responses={
        200: {"model": RunView, "description": "Its retry has not ended yet: that run"},
        201: {"model": RunView, "description": "A new run, queued"},
        **documented(404, 409, 507),
    },
)
def retry(request: Request, here: Here, run_id: RunId) -> Response:
    """Submit the request of a run that has ended once more.

    409 for a run that has not ended, and for one of a live model or of a file, which exists only on the machine where
    it was started.
    """
    with here.database.begin() as connection:
        token, quota = caller(request), here.settings.quota
        made = submits.retry(connection, run_id, owner=token.id, team=token.team, quota=quota)
    run, is_new = require_run(made, run_id)
    return answer(run_json(run), 201 if is_new else 200, {"location": f"{API}/runs/{run.id}"})


@submitting.delete("/{run_id}", responses={200: {"model": RunDeleted}, **documented(404, 409, 507)})
def delete(
    request: Request,
    here: Here,
    run_id: RunId,
    with_plan: Annotated[bool, Query(alias="plan", description="its plan too, unless another run has it")] = False,
) -> Response:
    """Delete a run that has ended, with its trials and links, and its archive if no other run of the team has it.

    Its plan stays, and look-ups still find it, unless `plan` is true.
    """
    with here.database.begin() as connection:
        run = retention.delete_run(connection, run_id, team=caller(request).team, with_plan=with_plan)
    return answer({"id": require_run(run, run_id).id})


@submitting.patch(
    "/{run_id}",
    dependencies=[requires(Scope.READ)],
    responses={200: {"model": RunView}, **documented(404, 415, 507)},
    openapi_extra=body_of(Annotation),
)
async def annotate(
    request: Request, here: Here, run_id: RunId, body: Annotated[Annotation, Depends(JsonBody(Annotation))]
) -> Response:
    """Set the tags or the note of a run. Fields that the body leaves out do not change."""
    run = await to_thread.run_sync(_annotate, here, run_id, caller(request).team, body)
    return answer(run_json(require_run(run, run_id)))


def _annotate(here: Context, run_id: str, team: str, body: Annotation) -> Run | None:
    with here.database.begin() as connection:
        return runs.annotate(connection, run_id, team=team, tags=body.tags, note=body.note)


def require_run(found: _Found | None, run_id: str, *, hint: str = f"GET {API}/runs lists them") -> _Found:
    """`found`, the result of a query about a run. Raises NotFoundError if it is None: there is no such run."""
    if found is None:
        raise NotFoundError(f"there is no run {run_id!r}; {hint}")
    return found
