"""Every error that Kitsune raises on purpose.

KitsuneError
├── PlanError              a plan is malformed, tampered with, or holds an unknown choice (names the field)
├── SubmissionError
│   ├── ExportError        a live model cannot become an archive (names the op or line, and the way out)
│   └── ArchiveError       bytes are not an archive that we accept
├── WorkloadError          a workload cannot be found, loaded or run
├── DeclinedError          a part of a plan cannot be applied and the caller asked for `on_decline="raise"`
├── CaptureError           a step cannot be captured into a CUDA graph
│   └── ErraticError       no graph would do the same: its numbers differ each time, or it replaces what it reads
├── UnplannedError         no launches were planned, so there is nothing to draw (says why)
├── MeasureError           the measuring child broke its protocol
├── TuneError              a tuning run has no result to give
│   ├── BaselineError      the workload itself fails, as given, before anything was tuned
│   └── NoTrialError       every trial failed
├── StoreError
│   ├── StoreBusyError     the database stayed locked for too long
│   ├── StoreFullError     the disk or the database is full
│   ├── SchemaError        the database was written by another version
│   ├── NotFoundError      the database holds nothing under this name
│   ├── CursorError        the cursor of a page is not one that we gave
│   ├── ConflictError      a key that was used before comes with another request
│   ├── QuotaError         a team has as much of something as it may
│   └── LeaseLostError     another worker owns the run now; what was being written is refused
├── StoppedError           this process was asked to end, and what it was doing with it
├── RemoteError
│   ├── UnreachableError   no server answers there in time, it cannot answer now, or it is not ours
│   └── RefusedError       the server says no (status and reason)
├── ChartError             what should be drawn cannot be (names it, and says why)
├── SettingsError          an environment variable or option has a value that makes no sense
└── UnfitError             this machine lacks something that the command needs
    └── GpuError           the GPU is broken, or answers with errors: nothing more is measured on it
"""

#: The status by which a server asks for a token.
UNAUTHORIZED = 401
#: What a step, or torch within it, says to what it did not expect: no errors of ours.
SURPRISES = (RuntimeError, ValueError, IndexError, KeyError, TypeError, AssertionError, ArithmeticError)


class KitsuneError(Exception):
    """Base of all errors of ours. The message says what happened, why, and the way out."""


class PlanError(KitsuneError):
    """A plan is malformed, was tampered with, or holds a choice that does not exist."""

    def __init__(self, field: str, problem: str) -> None:
        super().__init__(f"plan field {field!r}: {problem}")
        self.field = field


class SubmissionError(KitsuneError):
    """A model cannot travel as a submission."""


class ExportError(SubmissionError):
    """A live model cannot be exported to an archive."""


class ArchiveError(SubmissionError):
    """The bytes are not an archive that we accept."""


class WorkloadError(KitsuneError):
    """A workload cannot be found, loaded or run."""


class DeclinedError(KitsuneError):
    """A part of the plan cannot be applied here."""

    def __init__(self, knob: str, reason: str) -> None:
        super().__init__(f"{knob} cannot be applied: {reason}")
        self.knob = knob
        self.reason = reason


class CaptureError(KitsuneError):
    """A step cannot be captured into a CUDA graph."""


class ErraticError(CaptureError):
    """No graph of a step would do the same: it comes to other numbers each time that it is run from the same state, or
    it reads a tensor and has another one in its place the next time."""


class UnplannedError(KitsuneError):
    """No launches of the step were planned, so there is nothing to draw."""


class MeasureError(KitsuneError):
    """The measuring child broke its protocol."""


class TuneError(KitsuneError):
    """A tuning run has no result to give."""


class BaselineError(TuneError):
    """The workload fails as given, so there is nothing to compare with."""


class NoTrialError(TuneError):
    """Every trial failed."""


class StoreError(KitsuneError):
    """The database refused."""


class StoreBusyError(StoreError):
    """The database stayed locked for too long."""


class StoreFullError(StoreError):
    """The disk or the database is full."""


class SchemaError(StoreError):
    """The database was written by another version of Kitsune."""


class NotFoundError(StoreError):
    """The database holds nothing under this name."""


class CursorError(StoreError):
    """The cursor of a page is not one that we gave."""


class ConflictError(StoreError):
    """A key that was used before comes with another request."""


class QuotaError(StoreError):
    """A team has as much of something as it may."""


class LeaseLostError(StoreError):
    """Another worker owns the run now."""


class StoppedError(KitsuneError):
    """This process was asked to end, and what it was doing with it."""


class RemoteError(KitsuneError):
    """A server did not do what it was asked for."""


class UnreachableError(RemoteError):
    """No server answers there in time, or what answers is not a Kitsune server that works: asking later may help."""


class RefusedError(RemoteError):
    """The server says no."""

    def __init__(self, server: str, status: int, detail: str) -> None:
        way_out = "; set KITSUNE_TOKEN to a token of this server" if status == UNAUTHORIZED else ""
        super().__init__(f"{server} refuses ({status}): {detail}{way_out}")
        self.status = status
        self.detail = detail


class ChartError(KitsuneError):
    """What should be drawn has no place in a chart."""

    def __init__(self, what: str, problem: str) -> None:
        super().__init__(f"cannot be drawn: {what} {problem}")


class SettingsError(KitsuneError):
    """A setting has a value that makes no sense."""


class UnfitError(KitsuneError):
    """This machine lacks something that the command needs."""


class GpuError(UnfitError):
    """The GPU is broken, or answers with errors: nothing more is measured on it."""
