"""Every error that Kitsune raises on purpose.

KitsuneError
├── PlanError              a plan is malformed, was altered, or holds an unknown choice (names the field)
├── SubmissionError
│   ├── ExportError        a model cannot be exported to an archive (names the op or line, and the fix)
│   └── ArchiveError       the bytes are not a valid archive
├── WorkloadError          a workload cannot be found, loaded or run
├── DeclinedError          a part of a plan cannot be applied and the caller asked for `on_decline="raise"`
├── CaptureError           a step cannot be captured into a CUDA graph
│   └── ErraticError       no graph can reproduce the step: it is not deterministic, or replaces a tensor it reads
├── UnplannedError         no launch schedule exists, so there is nothing to draw (says why)
├── MeasureError           the measuring process violated its protocol
├── TuneError              a tuning run has no result
│   ├── BaselineError      the unmodified workload fails, before anything was tuned
│   └── NoTrialError       every trial failed
├── StoreError
│   ├── StoreBusyError     the database stayed locked for too long
│   ├── StoreFullError     the disk or the database is full
│   ├── SchemaError        the database was written by another version
│   ├── NotFoundError      the database holds nothing under this name
│   ├── CursorError        the pagination cursor is not valid
│   ├── ConflictError      an idempotency key was reused with a different request
│   ├── QuotaError         a team has reached a quota
│   └── LeaseLostError     another worker holds the lease of the run now; the write is refused
├── StoppedError           this process received a signal to stop and ended its work
├── RemoteError
│   ├── UnreachableError   no Kitsune server answers in time, or it cannot answer now
│   └── RefusedError       the server refuses the request (status and reason)
├── ChartError             a value cannot be drawn in a chart (names it, and says why)
├── SettingsError          an environment variable or option has an invalid value
└── UnfitError             this machine lacks something that the command needs
    └── GpuError           the GPU is broken or returns errors: measuring on it stops
"""

#: HTTP status of a request without a valid token.
UNAUTHORIZED = 401
#: What user code, or torch called by it, may raise on unexpected input. None of them is a KitsuneError.
SURPRISES = (RuntimeError, ValueError, IndexError, KeyError, TypeError, AssertionError, ArithmeticError)


class KitsuneError(Exception):
    """Base of all errors of Kitsune. The message says what happened, why, and what to do."""


class PlanError(KitsuneError):
    """A plan is malformed, was altered, or holds a choice that does not exist."""

    def __init__(self, field: str, problem: str) -> None:
        super().__init__(f"plan field {field!r}: {problem}")
        self.field = field


class SubmissionError(KitsuneError):
    """A model cannot be submitted as an archive."""


class ExportError(SubmissionError):
    """A model cannot be exported to an archive."""


class ArchiveError(SubmissionError):
    """The bytes are not a valid archive."""


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
    """No CUDA graph can reproduce the step: it gives different numbers each time it runs from the same state, or it
    replaces a tensor that it reads by a new one."""


class UnplannedError(KitsuneError):
    """The step has no launch schedule, so there is nothing to draw."""


class MeasureError(KitsuneError):
    """The measuring process violated its protocol."""


class TuneError(KitsuneError):
    """A tuning run has no result."""


class BaselineError(TuneError):
    """The unmodified workload fails, so there is no baseline to compare with."""


class NoTrialError(TuneError):
    """Every trial failed."""


class StoreError(KitsuneError):
    """The database cannot be used, or refused an operation."""


class StoreBusyError(StoreError):
    """The database stayed locked for too long."""


class StoreFullError(StoreError):
    """The disk or the database is full."""


class SchemaError(StoreError):
    """The database was written by another version of Kitsune."""


class NotFoundError(StoreError):
    """The database holds nothing under this name."""


class CursorError(StoreError):
    """The pagination cursor is not valid."""


class ConflictError(StoreError):
    """An idempotency key was reused with a different request."""


class QuotaError(StoreError):
    """A team has reached a quota."""


class LeaseLostError(StoreError):
    """Another worker holds the lease of the run now."""


class StoppedError(KitsuneError):
    """This process received a signal to stop and ended its work."""


class RemoteError(KitsuneError):
    """A request to a server failed."""


class UnreachableError(RemoteError):
    """No Kitsune server answers in time, or it cannot answer now: retrying later may help."""


class RefusedError(RemoteError):
    """The server refuses the request."""

    def __init__(self, server: str, status: int, detail: str) -> None:
        way_out = "; set KITSUNE_TOKEN to a token of this server" if status == UNAUTHORIZED else ""
        super().__init__(f"{server} refuses ({status}): {detail}{way_out}")
        self.status = status
        self.detail = detail


class ChartError(KitsuneError):
    """A value cannot be drawn in a chart."""

    def __init__(self, what: str, problem: str) -> None:
        super().__init__(f"cannot be drawn: {what} {problem}")


class SettingsError(KitsuneError):
    """A setting has an invalid value."""


class UnfitError(KitsuneError):
    """This machine lacks something that the command needs."""


class GpuError(UnfitError):
    """The GPU is broken or returns errors: nothing more is measured on it."""
