"""`kitsune` as a process of its own, with a KITSUNE_HOME of its own."""

import contextlib
import os
import signal
import subprocess
import sysconfig
import time
from collections.abc import Iterator
from pathlib import Path

KITSUNE = Path(sysconfig.get_path("scripts")) / "kitsune"


@contextlib.contextmanager
def ctrl_c_heard() -> Iterator[None]:
    """Children of a background job inherit that SIGINT is ignored; a handler is not inherited, so it ends that."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


class Command:
    """A running `kitsune`; what it says goes to files, so that it never waits for a reader."""

    def __init__(self, folder: Path, *words: str, **environment: str) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.home = folder / "home"
        self.out, self.err = folder / "out", folder / "err"
        variables = {**os.environ, "KITSUNE_HOME": str(self.home), "OMP_NUM_THREADS": "1", **environment}
        with self.out.open("wb") as out, self.err.open("wb") as err, ctrl_c_heard():
            self.process = subprocess.Popen(
                [KITSUNE, *words],
                cwd=folder,
                env=variables,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                start_new_session=True,
            )

    def wait(self, timeout_s: float = 150) -> tuple[int, str, str]:
        """Exit code, stdout and stderr, in which nothing of ours may be a traceback."""
        code = self.process.wait(timeout_s)
        out, err = self.out.read_text("utf-8"), self.err.read_text("utf-8")
        assert "Traceback" not in err
        return code, out, err

    def wait_for(self, text: str, timeout_s: float = 120) -> None:
        end = time.monotonic() + timeout_s
        while text not in self.err.read_text("utf-8"):
            assert self.process.poll() is None, self.err.read_text("utf-8")
            assert time.monotonic() < end, f"no {text!r} in {self.err.read_text('utf-8')}"
            time.sleep(0.05)

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
