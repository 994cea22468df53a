"""SHA-256 digests in hex, by which contents are named and compared."""

import hashlib
from typing import Any

from kitsune.base.base_record import canonical_json


def digest_of(content: str | bytes) -> str:
    return hashlib.sha256(content.encode() if isinstance(content, str) else content).hexdigest()


def digest_of_json(value: Any) -> str:
    """The digest of the value's canonical JSON."""
    return digest_of(canonical_json(value))
