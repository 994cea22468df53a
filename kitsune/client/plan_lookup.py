"""Looks up a plan on a server, within a short deadline and without ever raising.

A training script must also run without a server, without a network, and with a faulty server. The model is exported by
PyTorch's tracer, which runs user code, so any exception may occur here; whatever it is, training continues without a
plan.
"""

import logging
from collections.abc import Callable
from typing import Final

from kitsune.base.environment import is_disabled, variable
from kitsune.client.http_client import Client, FoundPlan
from kitsune.client.plan_cache import PlanCache
from kitsune.client.server_address import server_of
from kitsune.errors import UnreachableError
from kitsune.plan import Environment, Match, PlanQuery

log = logging.getLogger("kitsune")

#: Deadline in seconds for all network calls: 2 s in all with the work around them.
NETWORK_S: Final = 1.6
#: Deadline of a single call, as the one that checks whether a server answers.
CALL_S: Final = 1.0
#: The fingerprint of no step. A request for it checks that the server answers and accepts the token, before the export,
#: which takes seconds (BERT-base 1.5 s).
NO_STEP: Final = PlanQuery("0" * 64)

_warned: set[str] = set()


def look_up(
    asked: Callable[[], PlanQuery],
    environment: Callable[[], Environment],
    server: str | None = None,
    token: str | None = None,
) -> FoundPlan:
    """The plan from the server, or from the cache while the server is unreachable.

    `asked` takes seconds, so it is called only once a server or a cached plan is known to exist. A failure is logged as
    a warning, once for each server in a process.
    """
    try:
        if is_disabled():
            return FoundPlan(None, "KITSUNE_DISABLE is set")
        found, trouble = _answer(asked, environment, server, token)
    except Exception as error:  # noqa: BLE001  (see above)
        trouble = " ".join(f"{type(error).__name__}: {error}".split())
        found = FoundPlan(None, trouble)
    if trouble:
        follows = "training goes on plain" if found.plan is None else "the plan is the one it gave earlier"
        _tell_once(str(server or variable("server") or ""), f"no plan was fetched, {follows}: {trouble}")
    else:
        log.info("plan lookup: %s", found.reason)
    return found


def _answer(
    asked: Callable[[], PlanQuery], environment: Callable[[], Environment], server: str | None, token: str | None
) -> tuple[FoundPlan, str]:
    """The result, and what is wrong with the server, or ""."""
    there = server_of(server, token)
    client, cache = Client(there, call_s=CALL_S, in_all_s=NETWORK_S), PlanCache(there.url)
    here = environment()
    try:
        client.check_presence()
        client.find_plan(NO_STEP, here)
    except UnreachableError as error:
        if cache.is_empty:
            raise
        return _cached(cache, asked(), here), str(error)
    wanted = asked()
    try:
        found = client.find_plan(wanted, here)
    except UnreachableError as error:
        return _cached(cache, wanted, here), str(error)
    if found.plan is None:
        cache.forget(wanted, here)
        return found, ""
    misfit = _misfit(found.plan.environment, here)
    if misfit:
        return FoundPlan(None, misfit), misfit
    cache.keep(wanted, here, found.plan)
    return found, ""


def _cached(cache: PlanCache, asked: PlanQuery, here: Environment) -> FoundPlan:
    plan = cache.get(asked, here)
    return FoundPlan(
        plan, "the server is unreachable; " + ("a plan that it gave earlier" if plan else "no plan is cached")
    )


def _misfit(tuned_on: Environment | None, here: Environment) -> str:
    """The reason why a plan may not be applied here, or ""."""
    if tuned_on is None:
        return "the server sent a plan without an environment"
    match, reason = tuned_on.match(here)
    return f"the server sent a plan {reason}" if match is Match.REFUSED else ""


def _tell_once(server: str, text: str) -> None:
    if server in _warned:
        log.debug("%s", text)
        return
    _warned.add(server)
    log.warning("%s", text)
