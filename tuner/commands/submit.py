"""`kitsune submit` and `kitsune plan fetch`: start a run on a server, and get a plan from one."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kitsune.cli import output
from kitsune.cli.exit_codes import ExitCode
from kitsune.client.http_client import Client
from kitsune.client.remote_run import check_budget, check_switched_on, send
from kitsune.client.server_address import Server
from kitsune.device.backend import environment, pick_device
from kitsune.errors import NotFoundError
from kitsune.plan import PlanQuery
from kitsune.submission.exporting.export import to_archive
from kitsune.submission.format.archive import Archive
from tuner.commands.runs import save, watch_run
from tuner.commands.server_runs import ServerLedger
from tuner.workloads.loader import WorkloadSource, load_workload, workload_source


def submit(spec: str, server: Server, options: Mapping[str, Any], *, wait: bool, as_json: bool) -> ExitCode:
    """Starts a run and prints its id; with `wait`, watches it. `options`: see `kitsune.client.remote_run.send`.

    Raises WorkloadError, ExportError, ArchiveError, SettingsError, UnreachableError and RefusedError.
    """
    check_switched_on()
    check_budget(options["trials"], options["budget"], options["memory_limit"])
    client = Client(server)
    client.check_presence()
    run = send(client, archive_of(spec), **options)
    if wait or as_json:
        output.note(f"run {run.id} on {server.url}")
    if wait:
        return watch_run(ServerLedger(client), run.id, as_json=as_json)
    if as_json:
        output.emit({"run_id": run.id, "server": server.url})
    else:
        output.stdout().print(run.id)
        output.note(f"Follow it: kitsune runs watch {run.id} --server {server.url}")
    return ExitCode.OK


def fetch(spec: str, server: Server, out: Path | None, *, device: str | None, as_json: bool) -> None:
    """Writes the server's plan for this workload on this machine as JSON, to stdout or to a file.

    Raises NotFoundError when it has none, and the errors of `submit`.
    """
    client = Client(server)
    client.check_presence()
    archive = archive_of(spec)
    found = client.find_plan(PlanQuery(archive.fingerprint, archive.batch), environment(pick_device(device)))
    if found.plan is None:
        raise NotFoundError(f"{server.url} has no plan for {spec} on this machine: {found.reason}")
    output.note(found.reason)
    if out is not None:
        save(found.plan, out, kept="the server has the plan")
    if as_json or out is None:
        output.emit(found.plan.to_json())


def archive_of(spec: str) -> Archive:
    """The workload as an archive; an archive file is only read."""
    if workload_source(spec) is WorkloadSource.ARCHIVE:
        return Archive.load(spec)
    with output.aside():
        return to_archive(load_workload(spec, "cpu"))
