"""`kitsune export`: writes a workload as an archive file."""

from pathlib import Path

from kitsune.base.atomic_write import writing
from kitsune.cli import output
from kitsune.errors import WorkloadError
from kitsune.submission.exporting.export import to_archive
from tuner.workloads.loader import WorkloadSource, load_workload, workload_source


def export(spec: str, out: Path, *, as_json: bool) -> None:
    """Raises WorkloadError, ExportError, or SettingsError when `out` cannot be written."""
    if workload_source(spec) is WorkloadSource.ARCHIVE:
        raise WorkloadError(f"{spec!r} is an archive already; export takes zoo:NAME or FILE.py:FUNCTION")
    target = out.absolute()  # the user's code may change to another folder
    with output.aside():
        archive = to_archive(load_workload(spec, "cpu"))
    with writing(f"--out {out}"):
        archive.save(target)
    size = target.stat().st_size
    if as_json:
        output.emit({"fingerprint": archive.fingerprint, "bytes": size, "file": str(out)})
    else:
        output.stdout().print(f"fingerprint {archive.fingerprint}\n{size} bytes in {out}", soft_wrap=True)
