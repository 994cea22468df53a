"""Kinds of failures of a measuring process."""

from kitsune.errors import DeclinedError
from tuner.child.main import kind_of
from tuner.records import FailureKind


def test_a_decline_for_lack_of_memory_is_out_of_memory():
    """Two long proofs beside it took the memory that planning several streams needs: alone it may have it."""
    full = DeclinedError("streams", "planning its launches failed: OutOfMemoryError: CUDA out of memory. Tried 500 MiB")
    assert kind_of(full) is FailureKind.OUT_OF_MEMORY
    assert kind_of(DeclinedError("streams", "there is nothing to run side by side")) is FailureKind.DECLINED
