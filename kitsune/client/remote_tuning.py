"""Tunes a training step on a server, or fetches a plan for it. Only a graph is sent: no weights, no code."""

from collections.abc import Callable
from typing import Any, Literal

import torch

from kitsune.client.http_client import Client, FoundPlan
from kitsune.client.plan_lookup import look_up
from kitsune.client.remote_run import RemoteRun, check_budget, check_switched_on, send
from kitsune.client.server_address import server_of
from kitsune.device.backend import environment
from kitsune.plan import Plan, PlanQuery
from kitsune.submission.exporting.export import fingerprint_of, model_fingerprint_of, to_archive
from kitsune.workload import Batch, LossFn, Workload, device_of, move_batch, shapes_of

#: In place of a plan: it is to be fetched from the server.
Auto = Literal["auto"]


def submit(
    model: torch.nn.Module,
    loss_fn: LossFn,
    optimizer: torch.optim.Optimizer,
    batch: Batch,
    *,
    budget: str | float | None = None,
    memory_limit: str | int | None = None,
    trials: int | None = None,
    server: str | None = None,
    token: str | None = None,
) -> RemoteRun:
    """Asks a server to tune this training step, and returns the run without waiting for it.

        run = kitsune.submit(model, loss_fn, optimizer, (x, y), budget="10m")
        run.wait()
        plan = run.plan()

    The server is `server`, KITSUNE_SERVER, or the one on this machine; the token is `token`, KITSUNE_TOKEN, or the one
    that `kitsune serve` keeps for this user. A model on a GPU is tuned on a GPU, another one on any device that a
    worker has. `memory_limit` is as in `kitsune.tune`. Raises ExportError when the model cannot be exported,
    UnreachableError, RefusedError, and SettingsError for invalid arguments.
    """
    check_switched_on()
    check_budget(trials, budget, memory_limit)
    workload = Workload(model, loss_fn, optimizer, batch)
    client = Client(server_of(server, token))
    client.check_presence()  # before the export, which takes seconds
    device = "cuda" if device_of(model).type == "cuda" else ""
    return send(client, to_archive(workload), trials=trials, budget=budget, memory_limit=memory_limit, device=device)


def fetch_plan(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    batch: Batch,
    *,
    server: str | None = None,
    token: str | None = None,
) -> Plan | None:
    """The plan that a server has for this model on this machine, or None to train without one. Never raises.

    The loss is not part of the lookup: a plan tuned with another loss is used too, since the forward decides. `batch`
    is `(x, y)`, and y may be None. An unreachable server costs less than 2 s and is logged once; a plan that it gave
    before is then taken from the cache on disk. `server` and `token` are as in `kitsune.submit`.
    """
    return plan_of_model(model, optimizer, lambda: batch[0], server, token).plan


def plan_of_model(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    x: Callable[[], Any],
    server: str | None = None,
    token: str | None = None,
) -> FoundPlan:
    """The plan for a model with any loss, or the reason why there is none. Never raises, even if `x` does."""
    return look_up(
        lambda: _asked_by_model(model, optimizer, x()),
        lambda: environment(device_of(model)),
        server,
        token,
    )


def plan_of_step(model: torch.nn.Module, loss_fn: LossFn, optimizer: torch.optim.Optimizer, batch: Batch) -> FoundPlan:
    """The plan for exactly this step, or the reason why there is none. Never raises."""
    return look_up(
        lambda: _asked_by_step(Workload(model, loss_fn, optimizer, move_batch(batch, device_of(model)))),
        lambda: environment(device_of(model)),
    )


def _asked_by_model(model: torch.nn.Module, optimizer: torch.optim.Optimizer, x: Any) -> PlanQuery:
    return PlanQuery(model_fingerprint_of(model, optimizer, move_batch(x, device_of(model))), shapes_of(x))


def _asked_by_step(workload: Workload) -> PlanQuery:
    return PlanQuery(fingerprint_of(workload), shapes_of(workload.batch[0]))
