"""Base class of records that are sent to other processes or stored: immutable, with a fixed set of fields."""

import json
from typing import Any

from pydantic import BaseModel, ConfigDict


class Record(BaseModel):
    """An immutable value. Unknown fields, NaN and infinities raise a ValidationError."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, strict=False)

    def canonical_json(self) -> str:
        """This record as canonical JSON: sorted keys, no spaces, ASCII (RFC 8785 for the values that occur here)."""
        return canonical_json(self.model_dump(mode="json"))


def canonical_json(value: Any) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False)
