"""The event stream of a run (server-sent events): `run` on each change, `trial` for each trial, until the run ends.

The id of an event is the number of trials sent so far. A client that reconnects with Last-Event-ID gets the trials
that it missed. No database connection is held between polls. The token is checked again before each poll, so that a
stream ends when its token does.
"""

import time
from collections.abc import AsyncIterator
from typing import Annotated, Any, Final

import anyio
from anyio import to_thread
from fastapi import Header, Request
from fastapi.responses import StreamingResponse
from fastapi.sse import KEEPALIVE_COMMENT, format_sse_event

from kitsune.base.base_record import canonical_json
from server.api.runs import require_run
from server.http.auth import GuardedRouter, caller, secret_of
from server.http.context import Context, Here
from server.payloads.schemas import RunId, documented, run_json
from tuner.records import Run, Trial
from tuner.store.queries import runs, trials
from tuner.store.queries.tokens import Scope

#: Fields that change with every heartbeat or trial; a change of only these sends no `run` event.
_SILENT: Final = frozenset({"heartbeat_at", "lease_until", "trials"})
_BATCH: Final = 50
_MEDIA_TYPE: Final = "text/event-stream"
_STREAM: Final = {
    "description": "Events `run` and `trial`, whose data are the JSON of /runs/{id} and of one of its trials",
    "content": {
        _MEDIA_TYPE: {
            "itemSchema": {
                "type": "object",
                "required": ["event", "data", "id"],
                "properties": {
                    "event": {"enum": ["run", "trial"]},
                    "data": {"type": "string", "contentMediaType": "application/json"},
                    "id": {"type": "string", "pattern": "^[0-9]+$"},
                },
            }
        }
    },
}

router = GuardedRouter(Scope.READ, prefix="/api/v1/runs", tag="runs")


@router.get("/{run_id}/events", response_class=StreamingResponse, responses={200: _STREAM, **documented(404)})
async def events(
    request: Request,
    here: Here,
    run_id: RunId,
    last_event_id: Annotated[str, Header(pattern="^[0-9]{1,18}$", description="id of the last event seen")] = "0",
) -> StreamingResponse:
    """Watch a run until it ends, or until the token expires or is revoked."""
    secret = secret_of(request)
    assert secret is not None
    seen = int(last_event_id)
    first = await to_thread.run_sync(_look, here, run_id, caller(request).team, seen)
    return StreamingResponse(_stream(here, secret, first, seen), media_type=_MEDIA_TYPE)


async def _stream(here: Context, secret: str, look: tuple[Run, list[Trial]], seen: int) -> AsyncIterator[bytes]:
    told: dict[str, Any] = {}
    spoke = time.monotonic()
    while True:
        run, tried = look
        for trial in tried:
            seen, spoke = trial.number + 1, time.monotonic()
            yield _event("trial", trial.model_dump(mode="json"), seen)
        if len(tried) < _BATCH:
            news = {name: value for name, value in run_json(run).items() if name not in _SILENT}
            if news != told:
                told, spoke = news, time.monotonic()
                yield _event("run", run_json(run), seen)
            if run.status.is_finished or here.is_stopping():
                return
            if time.monotonic() - spoke >= here.settings.events_ping_s:
                spoke = time.monotonic()
                yield KEEPALIVE_COMMENT
            await anyio.sleep(here.settings.events_poll_s)
        if await here.token_cache.token_of(secret) is None:
            return
        look = await to_thread.run_sync(_look, here, run.id, run.team, seen)


def _look(here: Context, run_id: str, team: str, seen: int) -> tuple[Run, list[Trial]]:
    """The run and its next trials, from one snapshot. Raises NotFoundError."""
    with here.database.read() as connection:
        run = require_run(runs.get(connection, run_id, team=team), run_id)
        return run, trials.list_of(connection, run_id, after=seen - 1, limit=_BATCH)


def _event(name: str, data: dict[str, Any], seen: int) -> bytes:
    return format_sse_event(data_str=canonical_json(data), event=name, id=str(seen))
