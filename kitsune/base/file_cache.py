"""Short texts by key, each in a file of a folder: what a process found out, and the next need not find out again."""

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

MOST_BYTES: Final = 2**20  # what is longer is not ours


@dataclass(frozen=True, slots=True)
class KeyedFiles:
    """A file that cannot be read or written costs finding it out again, never the step."""

    folder: Path

    def read(self, key: str) -> str | None:
        with contextlib.suppress(OSError, UnicodeDecodeError), (self.folder / key).open("rb") as file:
            return file.read(MOST_BYTES).decode()
        return None

    def write(self, key: str, text: str) -> None:
        """Whole or not at all, also when others write at the same time."""
        with self._noting():
            self.folder.mkdir(parents=True, exist_ok=True)
            write_whole(self.folder / key, text.encode())

    def add(self, key: str, text: str) -> None:
        """As `write`; what is there already stays: of those that add at the same time, one does."""
        draft = self.folder / f".{key}.{secrets.token_hex(8)}"
        with self._noting():
            self.folder.mkdir(parents=True, exist_ok=True)
            try:
                draft.write_bytes(text.encode())
                with contextlib.suppress(FileExistsError):
                    os.link(draft, self.folder / key)
            finally:
                draft.unlink(missing_ok=True)

    @contextlib.contextmanager
    def _noting(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            log.info("what was found out is not kept in %s: %s", self.folder, error)
