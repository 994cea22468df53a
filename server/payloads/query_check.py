"""Refuses query parameters that a route does not know.

A misspelled filter would otherwise be ignored, and every run would match.
"""

from fastapi import Request
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute


def check_query(request: Request) -> None:
    """Raises RequestValidationError for unknown parameters. Routes that document theirs in `openapi_extra` are skipped:
    they check them themselves.
    """
    route = request.scope["route"]
    assert isinstance(route, APIRoute)
    if "parameters" in (route.openapi_extra or {}):
        return
    known = {parameter.alias for parameter in route.dependant.query_params}
    unknown = [name for name in request.query_params if name not in known]
    if unknown:
        raise RequestValidationError(
            [{"loc": ("query", name), "msg": "there is no such parameter"} for name in unknown]
        )
