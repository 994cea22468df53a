"""Entry point of a measuring process, started by tuner/measuring/child_process.py only.

It reads a Job from stdin and writes messages to the descriptor given in argv. It may be started before there is a job,
and then imports what a job will need. A second line on stdin is its turn to time.

Whatever a workload or a technique raises becomes a Failure here; what kills the process becomes one in the parent.
"""

import gc
import importlib
import os
import select
import sys
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Final, NoReturn

import torch

from kitsune.class_tables import ClassTable
from kitsune.device.backend import first_line
from kitsune.errors import DeclinedError, KitsuneError, MeasureError
from kitsune.long_proof import LongProof
from tuner.building.arms import prepare
from tuner.child.explain_job import explain_job
from tuner.child.inspection import inspect_workload
from tuner.child.measure_job import measure_job
from tuner.measuring.compile_lock import sharing
from tuner.measuring.protocol import GO, Inspection, Job, Message, Outcome, one_line
from tuner.numerics.long_gate import prove_job
from tuner.records import Failure, FailureKind, Phase
from tuner.sandbox.confinement import leave_no_core
from tuner.sandbox.lockdown import go_first
from tuner.workloads.copies import copying

PRELOADED: Final = ("torch._dynamo", "torch._inductor.compile_fx", "torch._functorch.aot_autograd")
OUT_OF_MEMORY = ("out of memory", "can't allocate memory", "cannot allocate memory", "not enough memory")
# Errors after which no GPU call of the process works any more.
LOST_CONTEXT = ("CUDA error", "device-side assert", "unspecified launch failure", "illegal memory access")


class Channel:
    """Sends messages to the parent, and remembers the current phase."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self.phase = Phase.START

    def enter(self, phase: Phase) -> None:
        """Reports that a phase begins. For timing, waits until it is this process's turn."""
        self.phase = phase
        self._send(Message(phase=phase))
        if phase is Phase.TIMING and sys.stdin.buffer.readline() != GO:
            raise MeasureError("the tuner ended before it was this process's turn to time")

    def answer(self, outcome: Outcome, queued_s: Mapping[Phase, float]) -> None:
        """Sends the outcome. `queued_s`: seconds that each phase has waited for other children's compilations."""
        if isinstance(outcome, Failure):
            self._send(Message(failure=outcome, queued_s=queued_s))
        elif isinstance(outcome, Inspection):
            self._send(Message(inspection=outcome))
        elif isinstance(outcome, LongProof):
            self._send(Message(proof=outcome, queued_s=queued_s))
        elif isinstance(outcome, ClassTable):
            self._send(Message(classes=outcome))
        else:
            self._send(Message(measurement=outcome, timeline=outcome.timeline, queued_s=queued_s))

    def _send(self, message: Message) -> None:
        rest = memoryview(message.line())
        while rest:
            rest = rest[os.write(self._descriptor, rest) :]


def start() -> NoReturn:
    """Runs the job, then exits without clean-up: destroying a compiled step and its graphs takes up to 7 s (H200)."""
    gc.freeze()  # nothing imported so far is garbage: the collector need not scan it
    gc.enable()
    main(int(sys.argv[1]))
    sys.stderr.flush()
    os._exit(0)


def main(descriptor: int) -> None:
    go_first()
    leave_no_core()
    channel = Channel(descriptor)
    if not is_waiting(sys.stdin):
        preload()
    job = Job.model_validate_json(sys.stdin.buffer.readline())
    channel.enter(Phase.BUILD)
    with copying(), sharing(job.folder, lambda: channel.phase) as queued_s:
        channel.answer(outcome_of(job, channel), queued_s)


def outcome_of(job: Job, channel: Channel) -> Outcome:
    try:
        return run(job, channel)
    except Exception as error:  # noqa: BLE001 - top level of the process
        traceback.print_exc()
        return failure_of(error, channel.phase)


def is_waiting(file: IO[str]) -> bool:
    """Whether the file has something to read."""
    return bool(select.select([file], [], [], 0)[0])


def preload() -> None:
    """Imports what the first step of a compiled candidate needs, which takes 2 to 4 s, while there is no job yet."""
    for module in PRELOADED:
        importlib.import_module(module)


def run(job: Job, channel: Channel) -> Outcome:
    prepare(job)
    if job.kind == "prove":
        return prove_job(job, channel.enter)
    if job.kind == "explain":
        return explain_job(job, channel.enter)
    return inspect_workload(job) if job.kind == "inspect" else measure_job(job, channel.enter)


def failure_of(error: BaseException, phase: Phase) -> Failure:
    """The Failure for an exception. Its kind follows from the type, then from the text of torch's messages."""
    return Failure(kind=kind_of(error), phase=phase, reason=one_line(described(error)))


def kind_of(error: BaseException) -> FailureKind:
    if isinstance(error, DeclinedError):
        # Planning and capturing turn whatever stops them into a decline.
        return FailureKind.OUT_OF_MEMORY if "out of memory" in str(error).lower() else FailureKind.DECLINED
    chain = causes(error)
    if any(isinstance(link, (torch.OutOfMemoryError, MemoryError)) for link in chain):
        return FailureKind.OUT_OF_MEMORY
    words = [str(link) for link in chain if isinstance(link, RuntimeError)]
    if any(sign in text.lower() for text in words for sign in OUT_OF_MEMORY):
        return FailureKind.OUT_OF_MEMORY
    if any(sign in text for text in words for sign in LOST_CONTEXT):
        return FailureKind.CRASHED
    return FailureKind.RAISED


def causes(error: BaseException) -> list[BaseException]:
    """The error and what it was raised from, outermost first."""
    chain: list[BaseException] = []
    link: BaseException | None = error
    while link is not None and link not in chain:
        chain.append(link)
        link = link.__cause__
    return chain


def described(error: BaseException) -> str:
    """The message of one of our errors; of any other, its type, first line and place."""
    if isinstance(error, KitsuneError):
        return str(error)
    frames = traceback.extract_tb(error.__traceback__)
    place = f" ({Path(frames[-1].filename).name}:{frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {first_line(error)}{place}"
