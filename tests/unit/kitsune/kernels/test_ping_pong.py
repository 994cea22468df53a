"""The kernels in Gluon, compiled for Hopper without a GPU: what fits on a multiprocessor, and what overlaps."""

import json
import os
import subprocess
import sys

import pytest

from kitsune.kernels import gated_linear, linear_activation
from kitsune.kernels.ping_pong import HIGH, PIECE, WIDE

#: Of a program, on an H100 or H200.
SHARED_BYTES = 232448


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    """What tests/unit/kitsune/kernels/hopper.py tells: the interpreter of these tests cannot compile."""
    own = {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path_factory.mktemp("triton"))}
    command = [sys.executable, "-m", "tests.unit.kitsune.kernels.hopper"]
    done = subprocess.run(command, env={**os.environ, **own}, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout)


@pytest.mark.minutes
def test_each_fits_on_a_multiprocessor(compiled):
    assert len(compiled) == 7
    assert all(kernel["shared"] <= SHARED_BYTES for kernel in compiled)


@pytest.mark.minutes
def test_the_products_of_each_overlap_but_with_relu(compiled):
    waiting = [(kernel["name"], kernel["KIND"]) for kernel in compiled if "are serialized" in kernel["told"]]
    assert waiting == [("linear_activation", "relu")]


@pytest.mark.minutes
def test_all_of_each_stays_in_registers(compiled):
    assert all("0 bytes spill stores, 0 bytes spill loads" in kernel["told"] for kernel in compiled)


def test_tiles_are_as_large_as_where_the_kernel_is_chosen():
    tilings = linear_activation.FORWARD, linear_activation.BACKWARD, gated_linear.BACKWARD
    assert {(tiling.high, tiling.wide) for tiling in tilings} == {(HIGH.value, WIDE.value)}
    assert (gated_linear.FORWARD.high, gated_linear.FORWARD.wide) == (HIGH.value, PIECE.value)
