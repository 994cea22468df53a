"""Inspects a workload: its fingerprint, its cost as given, and the choices that do not apply to it here."""

import ast
import contextlib
import inspect
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch

from kitsune.base.digest import digest_of, digest_of_json
from kitsune.device.backend import environment, pick_device
from kitsune.errors import SubmissionError
from kitsune.submission.exporting.export import to_archive
from kitsune.submission.format.archive import Archive
from kitsune.techniques import inapplicable, observed_facts
from kitsune.workload import Workload, shapes_of
from tuner.building.arms import DOES_NOT_FIT, fresh_workload
from tuner.building.probe import probe_workload
from tuner.measuring.protocol import Inspection, Job, one_line
from tuner.records import Failure
from tuner.workloads.loader import WorkloadSource, workload_source


def inspect_workload(job: Job) -> Inspection | Failure:
    """Runs the job's workload as given and describes it. Raises whatever the workload raises."""
    probe = probe_workload(job)
    if isinstance(probe, Failure):
        return probe
    device = pick_device(job.device)
    workload = fresh_workload(
        job, as_given=False
    )  # steps have changed the buffers of the probed one, which are part of its identity
    fingerprint, model_fingerprint, note = fingerprints_of(job.workload, workload)
    observed = fresh_workload(job) if job.checkpointed else workload
    return Inspection(
        environment=environment(device),
        fingerprint=fingerprint,
        model_fingerprint=model_fingerprint,
        batch=shapes_of(workload.batch[0]),
        inapplicable=inapplicable(observed_facts(observed, device)),
        random=probe.random,
        step_ms=probe.step_ms,
        peak_bytes=probe.peak_bytes,
        checkpointed=job.checkpointed,
        parameters=probe.parameters,
        notes=(*probe.notes, *filter(None, [note, DOES_NOT_FIT if job.checkpointed else ""])),
    )


def fingerprints_of(spec: str, workload: Workload) -> tuple[str, str, str]:
    """(fingerprint of the step, of its model, note).

    Computed from the exported graph. If the workload cannot be exported, the first one is local to this code, the
    second is empty, and the note says why.
    """
    try:
        is_archive = workload_source(spec) is WorkloadSource.ARCHIVE
        archive = Archive.load(spec) if is_archive else to_archive(workload)
        return archive.fingerprint, archive.model_fingerprint, ""
    except SubmissionError as error:
        note = one_line(f"not exportable, so its plan holds for this code only: {error}")
        return local_fingerprint(workload, spec.rpartition(":")[2]), "", note


def local_fingerprint(workload: Workload, built_by: str) -> str:
    """A hash of the model, the code of the model and its loss, and the optimizer's options.

    `built_by`: the function that makes the workload. It is left out, so that it may change, for example to return
    batches for `kitsune verify`.
    """
    model, loss_fn, optimizer = workload.model, workload.loss_fn, workload.optimizer
    code = {code_in(path, built_by) for path in files_of([*map(type, model.modules()), loss_fn])}
    identity = [
        f"{type(model).__module__}.{type(model).__qualname__}",
        [[name, list(value.shape), str(value.dtype)] for name, value in model.named_parameters()],
        repr(model),
        repr(loss_fn) if isinstance(loss_fn, torch.nn.Module) else source_of(loss_fn),
        type(optimizer).__name__,
        [{name: repr(value) for name, value in group.items() if name != "params"} for group in optimizer.param_groups],
        sorted(code),
    ]
    return "local-" + digest_of_json(identity)


def files_of(objects: Iterable[object]) -> Iterator[Path]:
    """The Python files that define the objects, except torch's own."""
    names = {str(getattr(each, "__module__", "")) for each in objects}
    for module in [sys.modules.get(name) for name in names if name.partition(".")[0] != "torch"]:
        path = Path(getattr(module, "__file__", None) or "")
        if path.suffix == ".py" and path.is_file():
            yield path


def code_in(path: Path, built_by: str) -> str:
    """A digest of the code of a file without comments and without one function."""
    nodes = [node for node in ast.parse(path.read_bytes()).body if getattr(node, "name", "") != built_by]
    return digest_of("\n".join(map(ast.dump, nodes)))


def source_of(loss_fn: object) -> str:
    """The source of a function, since `code_in` leaves out what the workload's function defines; else the name."""
    with contextlib.suppress(OSError):
        if inspect.isfunction(loss_fn):
            return inspect.getsource(loss_fn)
    return getattr(loss_fn, "__qualname__", "")
