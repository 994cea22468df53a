"""A workload in, an archive in a file out: `kitsune export`."""

from pathlib import Path

from kitsune import screen
from kitsune.errors import SettingsError, WorkloadError
from kitsune.submission.export import to_archive
from tuner.workloads import WorkloadSource, load_workload, workload_source


def export(spec: str, out: Path, *, as_json: bool) -> None:
    """Raises WorkloadError, ExportError, or SettingsError when `out` cannot be written."""
    if workload_source(spec) is WorkloadSource.ARCHIVE:
        raise WorkloadError(f"{spec!r} is an archive already; export takes zoo:NAME or FILE.py:FUNCTION")
    target = out.absolute()  # the user's code may change to another folder
    with screen.aside():
        archive = to_archive(load_workload(spec, "cpu"))
    try:
        archive.save(target)
    except OSError as error:
        raise SettingsError(f"--out {out} cannot be written: {error.strerror}") from error
    size = target.stat().st_size
    if as_json:
        screen.emit({"fingerprint": archive.fingerprint, "bytes": size, "file": str(out)})
    else:
        screen.stdout().print(f"fingerprint {archive.fingerprint}\n{size} bytes in {out}", soft_wrap=True)
