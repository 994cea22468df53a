"""The base of every record that crosses a border: frozen, closed, JSON in and out."""

import json
from typing import Any

from pydantic import BaseModel, ConfigDict


class Record(BaseModel):
    """An immutable value. Unknown fields, NaN and infinities are refused."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, strict=False)

    def canonical_json(self) -> str:
        """The one spelling of this record: sorted keys, no spaces, ASCII (after RFC 8785 for the values we use)."""
        return canonical_json(self.model_dump(mode="json"))


def canonical_json(value: Any) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False)
