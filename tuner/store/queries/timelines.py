"""Timelines: the launches of a step under the plan of a run. Written once, deleted with the run."""

import logging
import zlib
from typing import Final

from sqlalchemy import Connection, select

from kitsune.errors import StoreError
from kitsune.timeline import Timeline
from tuner.records import Run
from tuner.store import tables
from tuner.store.lease import insert_if_held

#: Maximal size of a timeline's JSON. For 20,000 launches it is 1 MB, and 0.3 MB compressed.
MAX_BYTES: Final = 16 * 2**20

_log = logging.getLogger(__name__)
_timelines = tables.timelines


def put(connection: Connection, run: Run, timeline: Timeline) -> bool:
    """Stores the timeline of the claimed run unless it has one (then False). Raises LeaseLostError."""
    content = zlib.compress(timeline.model_dump_json().encode())
    return insert_if_held(connection, run, _timelines, {"run_id": run.id, "content": content})


def get(connection: Connection, run_id: str) -> Timeline | None:
    """The timeline of a run, if it has one. Raises StoreError when the stored one is damaged."""
    content = _content(connection, run_id)
    try:
        return None if content is None else _read(content)
    except ValueError as error:
        raise StoreError(
            f"row {run_id} of {_timelines.name} is not a Timeline ({' '.join(str(error).split())[:300]}): it was "
            "altered by hand or written by another version; restore the database from a backup"
        ) from error


def readable(connection: Connection, run_id: str) -> Timeline | None:
    """Like `get`, but logs a warning and returns None for a damaged timeline, so that a page can show the rest."""
    content = _content(connection, run_id)
    try:
        return None if content is None else _read(content)
    except ValueError as error:
        _log.warning("the timeline of run %s is left out: %s", run_id, error)
        return None


def _content(connection: Connection, run_id: str) -> bytes | None:
    found: bytes | None = connection.scalar(select(_timelines.c.content).where(_timelines.c.run_id == run_id))
    return found


def _read(content: bytes) -> Timeline:
    """Raises ValueError for damaged data, and for more than MAX_BYTES."""
    inflater = zlib.decompressobj()
    try:
        found = inflater.decompress(content, MAX_BYTES)
    except zlib.error as error:
        raise ValueError(str(error)) from error
    if not inflater.eof or inflater.unused_data:
        raise ValueError("it is cut, or too long")
    return Timeline.model_validate_json(found)
