"""Builds the OpenAPI document of the application."""

from typing import Any, Final

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from fastapi.routing import RouteContext, iter_route_contexts

from server.http.auth import SCHEME
from server.payloads.problems import Problem
from server.payloads.schemas import Annotation, Submit

_REFERENCE: Final = "#/components/schemas/{model}"
#: Schemas that FastAPI does not find in the signatures of routes.
_SCHEMAS: Final = (Problem, Submit, Annotation)


def document(app: FastAPI) -> dict[str, Any]:
    """The document of FastAPI, with the schemas of bodies and problems and the scopes of routes added."""
    found = get_openapi(title=app.title, version=app.version, description=app.description, routes=app.routes)
    schemas = found.setdefault("components", {}).setdefault("schemas", {})
    for model in _SCHEMAS:
        schema = model.model_json_schema(ref_template=_REFERENCE)
        schemas.update(schema.pop("$defs", {}))
        schemas[model.__name__] = schema
    for route in iter_route_contexts(app.routes):
        for method in route.methods or ():
            operation = found["paths"].get(route.path_format, {}).get(method.lower())
            if operation is not None and (scopes := scopes_of(route)):
                operation["security"] = [{SCHEME: scopes}]
    return found


def scopes_of(route: RouteContext) -> list[str]:
    """The scopes that a route and its router require; a token with `admin` has all of them."""
    asked = (getattr(depends.dependency, "scope", None) for depends in route.dependencies)
    return [scope.value for scope in asked if scope is not None]
