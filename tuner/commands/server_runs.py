"""Access to runs on a server, for `kitsune runs --server`."""

from collections.abc import Callable, Iterator, Sequence
from datetime import datetime
from http import HTTPStatus
from typing import Any, Final, TypeVar

from pydantic import ValidationError

from kitsune.base.base_record import Record
from kitsune.client.http_client import Client
from kitsune.errors import CursorError, RefusedError, UnreachableError
from kitsune.plan import Plan
from tuner.records import Run, RunStatus, Trial

#: The largest page of runs that the server returns.
PAGE: Final = 200

_Kind = TypeVar("_Kind", bound=Record)


class ServerLedger:
    """A `tuner.commands.runs.Ledger` of a server. Raises UnreachableError, RefusedError and CursorError."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self.how_to_begin = f"kitsune submit 'zoo:lenet5?batch=64' --trials 12 --server {client.server.url}"

    def page(
        self, *, status: RunStatus | None = None, after: str | None = None, limit: int
    ) -> tuple[Sequence[Run], str | None]:
        found: list[Run] = []
        while True:
            asked = min(limit - len(found), PAGE)
            part, after = self._part(status, after, asked)
            found += part
            if after is None or len(part) < asked or len(found) >= limit:
                return found, after

    def _part(self, status: RunStatus | None, after: str | None, limit: int) -> tuple[list[Run], str | None]:
        """One page of the server."""
        query = {"limit": str(limit), "status": status.value if status else "", "after": after or ""}
        try:
            page = self._client.runs({name: value for name, value in query.items() if value})
        except RefusedError as error:
            if after and error.status == HTTPStatus.UNPROCESSABLE_ENTITY:  # only the cursor comes from the user
                raise CursorError(error.detail) from error
            raise
        cursor = page.get("after")
        return [self._record(Run, run) for run in page["runs"]], cursor if isinstance(cursor, str) else None

    def run(self, run_id: str) -> Run | None:
        return self._known(self._client.run, run_id)

    def trials(self, run_id: str, after: int = -1) -> Sequence[Trial]:
        found: list[Trial] = []
        while more := self._client.trials(run_id, after):
            found += [self._record(Trial, trial) for trial in more]
            if found[-1].number <= after:
                raise self._strange("it sent the same trials again")
            after = found[-1].number
        return found

    def plan(self, plan_id: str) -> Plan | None:
        return self._client.plan(plan_id)

    def cancel(self, run_id: str) -> Run | None:
        return self._known(self._client.cancel_run, run_id)

    def delete(self, run_id: str, *, with_plan: bool) -> object:
        try:
            return self._client.delete_run(run_id, with_plan=with_plan)
        except RefusedError as error:
            if error.status == HTTPStatus.NOT_FOUND:
                return None
            raise

    def count_ended(self, before: datetime) -> tuple[int, int]:
        found = list(self._ended(before))
        return len(found), sum(run.trials for run in found)

    def delete_ended(self, before: datetime, *, with_plans: bool) -> int:
        """Deletes one run at a time; runs that someone else deleted meanwhile are not counted."""
        return sum(self.delete(run.id, with_plan=with_plans) is not None for run in list(self._ended(before)))

    def _ended(self, before: datetime) -> Iterator[Run]:
        """Runs of the token's team that ended before `before`, oldest first within each status."""
        for status in (RunStatus.FINISHED, RunStatus.FAILED, RunStatus.CANCELLED):
            query, after = {"status": status.value, "sort": "created", "order": "asc", "limit": str(PAGE)}, ""
            while True:
                page = self._client.runs({**query, "after": after} if after else query)
                found = [self._record(Run, run) for run in page["runs"]]
                yield from (run for run in found if run.finished_at is not None and run.finished_at < before)
                after = page.get("after") or ""
                if not (found and after) or found[-1].created_at >= before:
                    break

    def _known(self, ask: Callable[[str], dict[str, Any]], run_id: str) -> Run | None:
        try:
            return self._record(Run, ask(run_id))
        except RefusedError as error:
            # 422: the given text cannot be the id of a run
            if error.status in (HTTPStatus.NOT_FOUND, HTTPStatus.UNPROCESSABLE_ENTITY):
                return None
            raise

    def _record(self, kind: type[_Kind], value: Any) -> _Kind:
        """The record from its known fields; a newer server may send more, and servers add links."""
        if not isinstance(value, dict):
            raise self._strange(f"a {kind.__name__.lower()} that it sent is none")
        try:
            return kind.model_validate({name: value[name] for name in kind.model_fields if name in value})
        except ValidationError as error:
            raise self._strange(f"a {kind.__name__.lower()} that it sent is of another version: {error}") from error

    def _strange(self, problem: str) -> UnreachableError:
        return UnreachableError(f"{self._client.server.url}: {' '.join(problem.split())[:500]}")
