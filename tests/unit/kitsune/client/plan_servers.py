"""Servers that have a plan, and a model that asks them for it."""

import logging
import socket
import threading
import urllib.parse

import torch

import kitsune
from kitsune.client.plan_lookup import NO_STEP
from kitsune.device.backend import environment
from kitsune.plan import Plan
from tests.scripted_server import Play, Request, ScriptedServer, answers, of_json
from tests.step_cases import Mlp

#: What the network may cost a training script is 2 s; the rest is for a machine that is busy with other tests. A
#: server that hangs would hold it for 30 s.
LIMIT_S = 7.0
PLANS = "GET /api/v1/plans"
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n"
CPU = environment(torch.device("cpu"))
NO_PLAN = {"match": "none", "reason": "it was never tuned here", "plan": None}


def parts():
    torch.manual_seed(0)
    model = Mlp()
    return model, torch.optim.SGD(model.parameters(), lr=0.1), (torch.randn(4, 8), torch.randint(0, 4, (4,)))


def plan_for(knobs: dict[str, str] | None = None, **changes: object) -> Plan:
    here = CPU.model_copy(update=changes)
    return Plan(knobs={"precision": "bf16"} if knobs is None else knobs, fingerprint="f" * 64, environment=here)


def found(plan: Plan | None) -> bytes:
    value = {"match": "exact", "reason": "same machine type and software", "plan": plan.to_json()} if plan else NO_PLAN
    return of_json(value)


def knows(plan: Plan) -> Play:
    """As a server that was asked for this plan before: it has one for whatever model is asked for."""

    def play(request: Request, connection: socket.socket, over: threading.Event) -> None:
        asked = dict(urllib.parse.parse_qsl(request.query)).get("fingerprint", "")
        of_the_model = plan.model_copy(update={"model_fingerprint": asked}) if asked != NO_STEP.fingerprint else None
        answers({PLANS: found(of_the_model)})(request, connection, over)

    return play


def serves(plan: Plan) -> ScriptedServer:
    return ScriptedServer(knows(plan))


def fetch(url: str | None) -> Plan | None:
    model, optimizer, batch = parts()
    return kitsune.fetch_plan(model, optimizer, batch, server=url)


def warnings_in(caplog) -> list[str]:
    of_ours = [record for record in caplog.records if record.name == "kitsune"]
    return [record.getMessage() for record in of_ours if record.levelno >= logging.WARNING]
