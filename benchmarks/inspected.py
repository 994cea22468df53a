"""What a measuring process says of a workload before anything is tried."""

from tuner.measuring.child_process import go_on
from tuner.measuring.crew import Children
from tuner.measuring.protocol import Inspection, Job, Limits


def inspected(spec: str, device: str) -> Inspection:
    """The workload and the choices that apply to it. Raises SystemExit when it fails as given."""
    with Children(spec, device, 0) as crew:
        crew.begin(Job(kind="inspect", workload=spec, device=device), Limits())
        found = crew.finished(go_on).outcome
    if not isinstance(found, Inspection):
        raise SystemExit(f"{spec} fails as given: {getattr(found, 'reason', found)}")
    return found
