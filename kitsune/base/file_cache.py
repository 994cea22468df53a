"""A cache on disk of short texts by key, one file each, shared by processes."""

import contextlib
import logging
import os
import secrets
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from kitsune.base.atomic_write import write_whole

log = logging.getLogger("kitsune")

MOST_BYTES: Final = 2**20  # an entry is never longer


@dataclass(frozen=True, slots=True)
class KeyedFiles:
    """A cache in a folder. A file that cannot be read or written is a cache miss, never an error."""

    folder: Path

    def read(self, key: str) -> str | None:
        with contextlib.suppress(OSError, UnicodeDecodeError), (self.folder / key).open("rb") as file:
            return file.read(MOST_BYTES).decode()
        return None

    def write(self, key: str, text: str) -> None:
        """Writes an entry atomically, also when other processes write it at the same time."""
        with self._logging_errors():
            self.folder.mkdir(parents=True, exist_ok=True)
            write_whole(self.folder / key, text.encode())

    def add(self, key: str, text: str) -> None:
        """As `write`, but keeps an entry that exists. Of concurrent calls, exactly one succeeds."""
        draft = self.folder / f".{key}.{secrets.token_hex(8)}"
        with self._logging_errors():
            self.folder.mkdir(parents=True, exist_ok=True)
            try:
                draft.write_bytes(text.encode())
                with contextlib.suppress(FileExistsError):
                    os.link(draft, self.folder / key)
            finally:
                draft.unlink(missing_ok=True)

    @contextlib.contextmanager
    def _logging_errors(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            log.info("cannot write to the cache in %s: %s", self.folder, error)
