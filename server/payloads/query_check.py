"""The query of a request in; refused when it has a parameter that its route does not know.

A word that is spelled wrong would otherwise look like a filter that every run matches.
"""

from fastapi import Request
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute


def check_query(request: Request) -> None:
    """Raises RequestValidationError. A route that documents its parameters itself reads and checks them itself."""
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
