"""Lookup: what to ask a server in, a plan or the reason why there is none out. It never raises, and it is quick.

A training script must run as well without a server, without a network, and beside a server that has gone mad. The model
is exported by PyTorch's tracer, which runs the user's code, so any error at all may come up here; whichever it is,
training goes on plain.
"""

import logging
from collections.abc import Callable
from typing import Final

from kitsune.base.environment import is_disabled, variable
from kitsune.client.http_client import Client, Found
from kitsune.client.plan_cache import PlanCache
from kitsune.client.server_address import server_of
from kitsune.errors import UnreachableError
from kitsune.plan import Asked, Environment, Match

log = logging.getLogger("kitsune")

#: All that the network may cost a training script: 2 s with what is not network around it.
NETWORK_S: Final = 1.6
#: Of it for finding out whether a server is there at all.
CALL_S: Final = 1.0
#: Of no step. Whether the server knows our token, and answers at all, is found out with it before the seconds that an
#: export takes (BERT-base 1.5 s).
NOBODYS: Final = Asked("0" * 64)

_told: set[str] = set()


def look_up(
    asked: Callable[[], Asked],
    environment: Callable[[], Environment],
    server: str | None = None,
    token: str | None = None,
) -> Found:
    """What the server, or while it is out of reach the cache, knows.

    `asked` is called only where the answer may help: it takes seconds. What went wrong is logged as a warning
    once in a process for each server.
    """
    try:
        if is_disabled():
            return Found(None, "KITSUNE_DISABLE is set")
        found, trouble = _answer(asked, environment, server, token)
    except Exception as error:  # noqa: BLE001  (see above)
        trouble = " ".join(f"{type(error).__name__}: {error}".split())
        found = Found(None, trouble)
    if trouble:
        follows = "training goes on plain" if found.plan is None else "the plan is the one it gave earlier"
        _tell_once(str(server or variable("server") or ""), f"no plan was fetched, {follows}: {trouble}")
    else:
        log.info("plan lookup: %s", found.reason)
    return found


def _answer(
    asked: Callable[[], Asked], environment: Callable[[], Environment], server: str | None, token: str | None
) -> tuple[Found, str]:
    """What was found, and what is wrong with the server, if anything."""
    there = server_of(server, token)
    client, cache = Client(there, call_s=CALL_S, in_all_s=NETWORK_S), PlanCache(there.url)
    here = environment()
    try:
        client.check_presence()
        client.find_plan(NOBODYS, here)
    except UnreachableError as error:
        if cache.is_empty:
            raise
        return _kept(cache, asked(), here), str(error)
    wanted = asked()
    try:
        found = client.find_plan(wanted, here)
    except UnreachableError as error:
        return _kept(cache, wanted, here), str(error)
    if found.plan is None:
        cache.forget(wanted, here)
        return found, ""
    misfit = _misfit(found.plan.environment, here)
    if misfit:
        return Found(None, misfit), misfit
    cache.keep(wanted, here, found.plan)
    return found, ""


def _kept(cache: PlanCache, asked: Asked, here: Environment) -> Found:
    plan = cache.get(asked, here)
    return Found(plan, "the server is out of reach; " + ("a plan that it gave earlier" if plan else "no plan is kept"))


def _misfit(tuned_on: Environment | None, here: Environment) -> str:
    """Why a plan may not be applied here, or ""."""
    if tuned_on is None:
        return "the server sent a plan that was measured nowhere"
    match, reason = tuned_on.match(here)
    return f"the server sent a plan {reason}" if match is Match.REFUSED else ""


def _tell_once(server: str, text: str) -> None:
    if server in _told:
        log.debug("%s", text)
        return
    _told.add(server)
    log.warning("%s", text)
