"""Checks of requests after authentication: refuses unknown query parameters, and parses JSON bodies into records."""

from typing import Any, Generic, TypeVar

from fastapi import Request
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from pydantic import ValidationError
from starlette.exceptions import HTTPException

from kitsune.base.base_record import Record

_Kind = TypeVar("_Kind", bound=Record)


def check_query(request: Request) -> None:
    """Raises RequestValidationError for unknown parameters: a misspelled filter would otherwise match every run.

    Routes that document their parameters in `openapi_extra` are skipped: they check them themselves.
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


def refused(error: ValidationError) -> RequestValidationError:
    """The same errors of pydantic, without what was sent, as FastAPI raises them for an invalid request."""
    return RequestValidationError(error.errors(include_url=False, include_input=False))


class JsonBody(Generic[_Kind]):
    """Dependency that parses the body as `kind`. FastAPI would parse it before the token is checked."""

    def __init__(self, kind: type[_Kind]) -> None:
        self.kind = kind

    async def __call__(self, request: Request) -> _Kind:
        """Raises HTTPException 415 for another content type, RequestValidationError for an invalid body."""
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != "application/json":
            raise HTTPException(415, "send JSON, with the header 'Content-Type: application/json'")
        try:
            return self.kind.model_validate_json(await request.body())
        except ValidationError as error:
            raise refused(error) from error


def body_of(kind: type[Record]) -> dict[str, Any]:
    """The documentation of a body that `JsonBody` reads; `server/http/openapi.py` adds the schema."""
    schema = {"$ref": f"#/components/schemas/{kind.__name__}"}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}
