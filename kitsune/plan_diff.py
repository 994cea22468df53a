"""Two plans in, what differs between them out: rows of a name and both values. No torch."""

from collections.abc import Iterator, Mapping
from typing import Any

from kitsune.knobs import KNOBS
from kitsune.plan import Plan

Row = tuple[str, str, str]


def differences(one: Plan, other: Plan) -> list[Row]:
    """In the order of the knobs table, then what was measured, then where; empty for plans that are the same."""
    chosen = ((f"knobs.{name}", str(one.choice(name)), str(other.choice(name))) for name in KNOBS)
    first, second = ({**_flat(plan.evidence), **_flat(plan.environment)} for plan in (one, other))
    names = [*first, *(name for name in second if name not in first)]
    rest = ((name, first.get(name, "-"), second.get(name, "-")) for name in names)
    rows = [*chosen, *rest, ("fingerprint", one.fingerprint or "-", other.fingerprint or "-")]
    return [row for row in rows if row[1] != row[2]]


def _flat(part: Any) -> dict[str, str]:
    """The fields of a record by their paths."""
    if part is None:
        return {}
    kind = type(part).__name__.lower()
    return {f"{kind}.{path}": value for path, value in _paths(part.model_dump(mode="json"))}


def _paths(fields: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    for name, value in fields.items():
        if isinstance(value, Mapping):
            yield from ((f"{name}.{path}", text) for path, text in _paths(value))
        else:
            yield name, f"{value:.4g}" if isinstance(value, float) else str(value)
