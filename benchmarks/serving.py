"""A real `kitsune serve` as a process of its own, for as long as a `with` lasts."""

import contextlib
import os
import re
import shutil
import subprocess
import sysconfig
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

KITSUNE = shutil.which("kitsune", path=sysconfig.get_path("scripts")) or shutil.which("kitsune") or "kitsune"


@dataclass(frozen=True)
class Serving:
    """A server that runs; its home holds the token of this user."""

    host: str
    port: int
    token: str
    database: str
    log: Path
    process: subprocess.Popen[bytes]

    @property
    def url(self) -> str:
        return f"http://{self.host}:{self.port}"


@contextlib.contextmanager
def serving(home: Path, database: str, command: Sequence[str] = (KITSUNE,)) -> Iterator[Serving]:
    """`home` is its KITSUNE_HOME; `command` is what to call in place of `kitsune`."""
    log = home / "server.log"
    with log.open("w") as written:
        process = subprocess.Popen(
            [*command, "serve", "--port", "0", "--database", database],
            env={**os.environ, "KITSUNE_HOME": str(home)},
            stderr=written,
        )
    try:
        while (found := re.search(r"http://(\S+):(\d+)", log.read_text())) is None:
            if process.poll() is not None:
                raise SystemExit(f"the server did not start: {log.read_text()}")
            time.sleep(0.05)
        token = (home / "token").read_text().strip()
        yield Serving(found[1], int(found[2]), token, database, log, process)
    finally:
        process.terminate()
        process.wait()
