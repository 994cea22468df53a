"""Writes the reference of routes and schemas as Markdown, from the OpenAPI description of the server. Pure."""

import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final

from server.payloads.problem_types import BY_STATUS, TYPES

#: In the order of the page; a part that is missing here comes last.
PARTS: Final = ("archives", "runs", "plans", "health")
BOUNDS: Final = {
    "minimum": "at least {}",
    "exclusiveMinimum": "more than {}",
    "maximum": "at most {}",
    "exclusiveMaximum": "less than {}",
    "minLength": "at least {} characters",
    "maxLength": "at most {} characters",
    "maxItems": "at most {}",
}
_FAILURE: Final = 400


def reference(document: Mapping[str, Any]) -> str:
    routes = [
        (method.upper(), path, operation)
        for path, operations in document["paths"].items()
        for method, operation in operations.items()
    ]
    routes.sort(key=lambda route: (place_of(route[2]), route[1]))
    schemas = document["components"]["schemas"]
    everywhere = common(operation for *_, operation in routes)
    return "\n\n".join(
        [
            f"Beside what stands with it, every route may answer {', '.join(map(refusal, everywhere))}.",
            *("\n\n".join(route(*one, everywhere)) for one in routes),
            "## Schemas",
            *("\n\n".join(schema(name, schemas[name])) for name in sorted(schemas)),
        ]
    )


def place_of(operation: Mapping[str, Any]) -> int:
    tag = operation.get("tags", [""])[0]
    return PARTS.index(tag) if tag in PARTS else len(PARTS)


def common(operations: Iterable[Mapping[str, Any]]) -> list[str]:
    """The refusals that all have."""
    found = [{status for status in operation["responses"] if int(status) >= _FAILURE} for operation in operations]
    return sorted(set.intersection(*found))


def route(method: str, path: str, operation: Mapping[str, Any], everywhere: Iterable[str]) -> Iterator[str]:
    yield f"## `{method} {path}`"
    yield operation.get("description", "")
    yield needs(operation)
    if parameters := operation.get("parameters"):
        yield table(("parameter", "in", "type", "meaning"), map(parameter_row, parameters))
    if body := operation.get("requestBody"):
        yield f"The body: {body.get('description', '')} {kinds(body['content'])}".replace("  ", " ")
    rows = [answer_row(*one) for one in sorted(operation["responses"].items()) if one[0] not in everywhere]
    yield table(("status", "answer"), rows)


def needs(operation: Mapping[str, Any]) -> str:
    scopes = [scope for one in operation.get("security", ()) for scopes in one.values() for scope in scopes]
    return f"Needs a token with {' and '.join(f'`{scope}`' for scope in scopes)}." if scopes else "Needs no token."


def parameter_row(parameter: Mapping[str, Any]) -> tuple[str, ...]:
    schema = parameter["schema"]
    name = f"`{parameter['name']}`{'' if parameter.get('required') else ' (optional)'}"
    return name, parameter["in"], spelled(schema), meaning({**schema, **parameter})


def answer_row(status: str, answer: Mapping[str, Any]) -> tuple[str, str]:
    if int(status) >= _FAILURE:
        return status, refusal(status)
    said = "" if answer["description"] == "Successful Response" else f"{answer['description']}: "
    return status, (said + kinds(answer.get("content", {}))).removesuffix(": ") or "no body"


def refusal(status: str) -> str:
    slug = BY_STATUS[int(status)]
    return f"[{TYPES[slug].title}](../troubleshooting.md#{slug})"


def kinds(content: Mapping[str, Any]) -> str:
    return "; ".join(
        f"`{kind}`" + (f", {spelled(one['schema'])}" if "$ref" in one.get("schema", {}) else "")
        for kind, one in content.items()
    )


def schema(name: str, found: Mapping[str, Any]) -> Iterator[str]:
    yield f"### {name}"
    yield found.get("description", "")
    if "enum" in found:
        yield listed(found["enum"])
    required = found.get("required", ())
    if fields := found.get("properties"):
        rows = (
            (f"`{field}`{'' if field in required else ' (optional)'}", spelled(one), meaning(one))
            for field, one in fields.items()
        )
        yield table(("field", "type", "meaning"), rows)
    for example in found.get("examples", ()):
        yield f"```json\n{json.dumps(example, indent=2, ensure_ascii=False)}\n```"


def spelled(found: Mapping[str, Any]) -> str:
    """A type in words, with a link to the schema that it is."""
    if "$ref" in found:
        name = found["$ref"].rpartition("/")[2]
        return f"[{name}](#{name.lower()})"
    if "anyOf" in found:
        return " or ".join(dict.fromkeys(map(spelled, found["anyOf"])))
    if "enum" in found:
        return listed(found["enum"])
    if "const" in found:
        return f"`{json.dumps(found['const'])}`"
    if found.get("type") == "array":
        items = found.get("items") or next(iter(found.get("prefixItems", ())), {})
        return f"list of {spelled(items)}"
    if found.get("type") == "object" and isinstance(found.get("additionalProperties"), Mapping):
        return f"object of {spelled(found['additionalProperties'])}"
    return str(found.get("format") or found.get("type", "anything"))


def meaning(found: Mapping[str, Any]) -> str:
    """What is said of a field or a parameter, with its bounds, its default and an example."""
    places = [found, *found.get("anyOf", ())]
    said = [found["description"]] if found.get("description") else []
    said += [words.format(f"{place[name]:,}") for name, words in BOUNDS.items() for place in places if name in place]
    said += [f"as the pattern `{place['pattern']}`" for place in places if "pattern" in place]
    if found.get("default") not in (None, ""):
        said.append(f"default `{json.dumps(found['default'])}`")
    examples = next((place["examples"] for place in places if place.get("examples")), ())
    said += [f"as `{json.dumps(example, ensure_ascii=False)}`" for example in examples[:1]]
    return "; ".join(said)


def listed(words: Iterable[str]) -> str:
    return ", ".join(f"`{word}`" if word else '`""`' for word in words)


def table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    lines = [head, ("---",) * len(head), *(tuple(cell.replace("|", "\\|") for cell in row) for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
