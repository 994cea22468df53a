"""RemoteRun: starts a tuning run on a server, follows it and fetches its plan. Does not import torch."""

import time
import uuid
from collections.abc import Mapping
from functools import partial
from itertools import islice
from numbers import Real
from typing import Any, Final

from kitsune.base.backoff import pauses, retried
from kitsune.base.byte_sizes import parse_memory_limit
from kitsune.base.durations import seconds_of
from kitsune.base.environment import is_disabled
from kitsune.client.http_client import Client
from kitsune.errors import SettingsError, TuneError, UnfitError, UnreachableError
from kitsune.plan import Plan
from kitsune.run_status import RunStatus
from kitsune.submission.format.archive import Archive

#: Pause between polls of a run, in seconds: it grows, since a run takes minutes. Also between tries to start one.
SHORTEST_PAUSE_S: Final = 0.5
LONGEST_PAUSE_S: Final = 5.0
#: How long a server may be unreachable, as for a restart, before `wait` raises.
PATIENCE_S: Final = 60.0
ATTEMPTS: Final = 3


class RemoteRun:
    """A tuning run on a server. Every method raises UnreachableError and RefusedError."""

    def __init__(self, client: Client, run_id: str) -> None:
        self._client = client
        self.id = run_id

    def __repr__(self) -> str:
        return f"RemoteRun({self.id!r}, {self._client.server.url!r})"

    def look(self) -> dict[str, Any]:
        """The run as JSON, as the server returns it."""
        return self._client.run(self.id)

    def status(self) -> RunStatus:
        """The state of the run: "queued", "running", "finished", "failed" or "cancelled"."""
        return self._status_in(self.look())

    def wait(self, timeout: float | None = None) -> RunStatus:
        """Waits until the run has ended, at most `timeout` seconds, and returns its state.

        Tolerates a server or database that is unreachable for less than a minute. Raises SettingsError when `timeout`
        is not a number of seconds.
        """
        if timeout is not None and not (isinstance(timeout, Real) and timeout >= 0):
            raise SettingsError(f"timeout is {timeout!r}; it must be a number of seconds, or None")
        began = answered = time.monotonic()
        while True:
            try:
                status = self.status()
                answered = time.monotonic()
                if status.is_finished:
                    return status
            except UnreachableError:
                if time.monotonic() - answered > PATIENCE_S:
                    raise
                status = RunStatus.RUNNING
            passed = time.monotonic() - began
            left = LONGEST_PAUSE_S if timeout is None else timeout - passed
            if left <= 0:
                return status
            time.sleep(min(left, LONGEST_PAUSE_S, max(SHORTEST_PAUSE_S, passed / 20)))

    def plan(self) -> Plan:
        """The plan of the run. Raises TuneError when it has none: it failed, or has not ended."""
        run = self.look()
        plan_id, status = run.get("plan_id"), self._status_in(run)
        if isinstance(plan_id, str):
            return self._client.plan(plan_id)
        why = f": {run['error']}" if run.get("error") else "" if status.is_finished else "; wait() for it first"
        raise TuneError(f"run {self.id} has no plan, it is {status.value}{why}")

    def cancel(self) -> RunStatus:
        """Cancels the run; one that has ended does not change. Returns its state."""
        return self._status_in(self._client.cancel_run(self.id))

    def _status_in(self, run: Mapping[str, Any]) -> RunStatus:
        try:
            return RunStatus(run.get("status", ""))
        except ValueError as error:
            raise UnreachableError(f"{self._client.server.url}: run {self.id} has an unknown status") from error


def check_budget(
    trials: int | None, budget: str | float | None, memory_limit: str | int | None = None
) -> dict[str, Any]:
    """What was given of these, as fields of the request. Raises SettingsError for an invalid one."""
    is_count = isinstance(trials, int) and not isinstance(trials, bool) and trials >= 1
    if trials is not None and not is_count:
        raise SettingsError(f"trials is {trials!r}; it must be a whole number of at least 1")
    given = {"trials": trials, "budget_s": None if budget is None else seconds_of(budget, "budget")}
    given["memory_limit_bytes"] = parse_memory_limit(memory_limit)
    return {name: value for name, value in given.items() if value is not None}


def check_switched_on() -> None:
    """Raises UnfitError when KITSUNE_DISABLE is set."""
    if is_disabled():
        raise UnfitError("KITSUNE_DISABLE is set, so nothing is tuned; unset it first")


def send(
    client: Client,
    archive: Archive,
    *,
    trials: int | None = None,
    budget: str | float | None = None,
    memory_limit: str | int | None = None,
    device: str = "",
    seed: int = 0,
    name: str = "",
) -> RemoteRun:
    """Starts tuning an archive on the server. Retries use one idempotency key, so the run is started only once."""
    request = {**check_budget(trials, budget, memory_limit), "device": device, "seed": seed, "name": name}
    stored = client.put_archive(archive.to_bytes())
    run = _started(client, {**request, "archive": stored})
    run_id = run.get("id")
    if not isinstance(run_id, str) or not run_id.isalnum():
        raise UnreachableError(f"{client.server.url}: the run that it started has no id")
    return RemoteRun(client, run_id)


def _started(client: Client, request: Mapping[str, Any]) -> dict[str, Any]:
    start = partial(client.start_run, request, uuid.uuid4().hex)
    return retried(start, UnreachableError, islice(pauses(SHORTEST_PAUSE_S, LONGEST_PAUSE_S), ATTEMPTS - 1))
