import io

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kitsune.errors import ArchiveError
from kitsune.submission.format.limits import ITEM_BYTES
from kitsune.submission.format.npy import npy_header, read_npy

DTYPES = [dtype for dtype in ITEM_BYTES if dtype != "bfloat16"]


@given(st.sampled_from(DTYPES), st.lists(st.integers(0, 4), max_size=4))
def test_numpy_reads_and_writes_the_same_bytes(dtype, shape):
    array = np.zeros(shape, dtype=dtype)
    file = io.BytesIO()
    np.lib.format.write_array(file, array, allow_pickle=False)
    assert file.getvalue() == npy_header(dtype, shape) + array.tobytes()
    assert read_npy(file.getvalue(), dtype, shape, "b/0.npy") == array.tobytes()


def test_sizes_of_elements_are_those_of_torch():
    assert {dtype: getattr(torch, dtype).itemsize for dtype in ITEM_BYTES} == ITEM_BYTES


def test_bool_that_is_neither_true_nor_false_is_refused():
    with pytest.raises(ArchiveError, match="neither 0 nor 1"):
        read_npy(npy_header("bool", [3]) + b"\x00\x02\x01", "bool", [3], "b/0.npy")


def test_values_that_are_too_large_are_refused_before_anything_else():
    with pytest.raises(ArchiveError, match="more than the 65536"):
        read_npy(b"", "float32", [2**40], "b/0.npy")
