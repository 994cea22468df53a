"""Which failures are attributed to the GPU, and when a worker quarantines it."""

import sys
from datetime import UTC, datetime

import pytest

from tuner import fault_injection
from tuner.measuring.gpu_health import Blame, Fitness, blame, is_starved
from tuner.records import Failure, FailureKind, Phase, Source, Trial

ASSERT = "CUDA error: device-side assert triggered\nCUDA kernel errors might be asynchronously reported"
NOW = datetime(2026, 11, 26, tzinfo=UTC)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (ASSERT, Blame.CONTEXT),
        ("AcceleratorError: CUDA error: an illegal memory access was encountered", Blame.CONTEXT),
        ("RuntimeError: CUDA error: misaligned address", Blame.CONTEXT),
        ("CUDA error: unspecified launch failure", Blame.CONTEXT),
        ("CUDA driver error: CUDA_ERROR_ILLEGAL_ADDRESS", Blame.CONTEXT),
        ("RuntimeError: No CUDA-capable device is detected", Blame.CONTEXT),
        ("CUDA error: uncorrectable ECC error encountered", Blame.GPU),
        ("Unable to determine the device handle for GPU0: GPU is lost.  Reboot the system to recover", Blame.GPU),
        ("NVRM: GPU at PCI:0000:3b:00: GPU has fallen off the bus", Blame.GPU),
        ("NVRM: Xid (PCI:0000:3b:00): 79, pid=1234", Blame.GPU),
        ("CUDA error: CUDA-capable device(s) is/are busy or unavailable", Blame.GPU),
        ("the measuring process cannot be killed: the GPU hangs", Blame.GPU),
        ("NVRM: Xid (PCI:0000:3b:00): 31, pid=1234", Blame.CANDIDATE),
        ("CUDA out of memory. Tried to allocate 2.00 GiB", Blame.CANDIDATE),
        ("the measuring process was killed by SIGKILL (the system does that when memory runs out)", Blame.CANDIDATE),
        ("AssertionError: shapes differ", Blame.CANDIDATE),
        ("", Blame.CANDIDATE),
    ],
)
def test_failures_are_classified_by_their_message(text, expected):
    assert blame(text) is expected


def says(answer: str) -> Fitness:
    return Fitness("cuda:0", (sys.executable, "-c", answer), patience_s=20)


WELL = "print('{\"broken\": []}')"
BROKEN = 'print(\'{"broken": ["the GPU: cuInit answered 999"]}\')'


def test_no_self_test_is_run_on_broken_hardware():
    why = says("raise AssertionError").why_unfit("CUDA error: uncorrectable ECC error encountered")
    assert why is not None
    assert "uncorrectable ECC" in why


@pytest.mark.parametrize("device", ["cuda:0", "cpu"])
def test_other_failures_do_not_start_a_self_test(device):
    fitness = Fitness(device, ("/does/not/exist",))
    assert fitness.why_unfit("CUDA out of memory") is None
    assert Fitness("cpu", (sys.executable, "-c", BROKEN)).why_unfit(ASSERT) is None


def test_the_fault_gpu_sick_quarantines_the_gpu(caplog):
    fault_injection.plant(fault_injection.parsed("gpu-sick"))
    try:
        assert "planted" in (says(WELL).why_unfit(ASSERT) or "")
    finally:
        fault_injection.plant(())
    assert "planted fault gpu-sick strikes" in caplog.text


def trial(number: int, reason: str | None) -> Trial:
    failed = None if reason is None else Failure(kind=FailureKind.CRASHED, phase=Phase.BUILD, reason=reason)
    return Trial(
        run_id="r", number=number, source=Source.TPE, knobs={}, failure=failed, started_at=NOW, finished_at=NOW
    )


@pytest.mark.parametrize(
    ("reasons", "expected"),
    [
        (["[Errno 28] No space left on device: '/tmp/x'"] * 3, True),
        (
            ["it broke", "OSError: [Errno 122] Disk quota exceeded", "no space left", "no usable temporary directory"],
            True,
        ),
        (["no space left"] * 2, False),
        (["no space left", "it broke", "no space left"], False),
        (["no space left", None, "no space left"], False),
        ([], False),
    ],
)
def test_a_search_whose_last_trials_found_no_space_ends(reasons, expected):
    assert is_starved([trial(number, reason) for number, reason in enumerate(reasons)]) is expected
