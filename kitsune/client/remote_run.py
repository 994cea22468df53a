"""RemoteRun: a tuning run on a server, from the archive that is sent to the plan that comes back. No torch."""

import time
import uuid
from collections.abc import Mapping
from numbers import Real
from typing import Any, Final

from kitsune.base.durations import seconds_of
from kitsune.base.environment import is_disabled
from kitsune.client.http_client import Client
from kitsune.errors import SettingsError, TuneError, UnfitError, UnreachableError
from kitsune.plan import Plan
from kitsune.run_status import RunStatus
from kitsune.submission.format.archive import Archive

#: A run takes minutes: asked for at first often, then every few seconds.
SHORTEST_PAUSE_S: Final = 0.5
LONGEST_PAUSE_S: Final = 5.0
#: So long a server may be away, as for a restart, before waiting gives up.
PATIENCE_S: Final = 60.0
ATTEMPTS: Final = 3


class RemoteRun:
    """A run that was asked for. Every method raises UnreachableError and RefusedError."""

    def __init__(self, client: Client, run_id: str) -> None:
        self._client = client
        self.id = run_id

    def __repr__(self) -> str:
        return f"RemoteRun({self.id!r}, {self._client.server.url!r})"

    def look(self) -> dict[str, Any]:
        """The run as the server tells it, as JSON."""
        return self._client.run(self.id)

    def status(self) -> RunStatus:
        """Where the run stands: "queued", "running", "finished", "failed" or "cancelled"."""
        return self._status_in(self.look())

    def wait(self, timeout: float | None = None) -> RunStatus:
        """Returns once the run has ended, or after `timeout` seconds, with where it stands then.

        A server that goes away for less than a minute, or whose database does, does not disturb it. Raises
        SettingsError for a timeout that is no number of seconds.
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
        """The plan that was found. Raises TuneError when the run has none: it failed, or has not ended."""
        run = self.look()
        plan_id, status = run.get("plan_id"), self._status_in(run)
        if isinstance(plan_id, str):
            return self._client.plan(plan_id)
        why = f": {run['error']}" if run.get("error") else "" if status.is_finished else "; wait() for it first"
        raise TuneError(f"run {self.id} has no plan, it is {status.value}{why}")

    def cancel(self) -> RunStatus:
        """Ends the run; one that has ended stays as it is."""
        return self._status_in(self._client.cancel_run(self.id))

    def _status_in(self, run: Mapping[str, Any]) -> RunStatus:
        try:
            return RunStatus(run.get("status", ""))
        except ValueError as error:
            raise UnreachableError(f"{self._client.server.url}: run {self.id} stands in no way that we know") from error


def check_budget(trials: int | None, budget: str | float | None) -> dict[str, Any]:
    """What of the two was given, as the server takes it. Raises SettingsError."""
    is_count = isinstance(trials, int) and not isinstance(trials, bool) and trials >= 1
    if trials is not None and not is_count:
        raise SettingsError(f"trials is {trials!r}; it must be a whole number of at least 1")
    given = {"trials": trials, "budget_s": None if budget is None else seconds_of(budget, "budget")}
    return {name: value for name, value in given.items() if value is not None}


def check_switched_on() -> None:
    """Raises UnfitError when Kitsune is switched off."""
    if is_disabled():
        raise UnfitError("KITSUNE_DISABLE is set, so nothing is tuned; unset it first")


def send(
    client: Client,
    archive: Archive,
    *,
    trials: int | None = None,
    budget: str | float | None = None,
    device: str = "",
    seed: int = 0,
    name: str = "",
) -> RemoteRun:
    """Asks the server to tune an archive. An answer that is lost on its way is asked for again, not the work."""
    request = {**check_budget(trials, budget), "device": device, "seed": seed, "name": name}
    stored = client.put_archive(archive.to_bytes())
    run = _started(client, {**request, "archive": stored})
    run_id = run.get("id")
    if not isinstance(run_id, str) or not run_id.isalnum():
        raise UnreachableError(f"{client.server.url}: the run that it started has no id")
    return RemoteRun(client, run_id)


def _started(client: Client, request: Mapping[str, Any]) -> dict[str, Any]:
    key = uuid.uuid4().hex
    for attempt in range(1, ATTEMPTS):
        try:
            return client.start_run(request, key)
        except UnreachableError:
            time.sleep(attempt * SHORTEST_PAUSE_S)
    return client.start_run(request, key)
