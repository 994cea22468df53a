"""NVIDIA's assembler takes the kernel that replaces memsets."""

import subprocess
from pathlib import Path

import pytest

from kitsune.device.memset_rewrite import PTX


@pytest.mark.parametrize("architecture", ["sm_80", "sm_90"])
def test_the_assembler_takes_the_kernel(tmp_path, architecture):
    triton = pytest.importorskip("triton")
    source = tmp_path / "fill.ptx"
    source.write_bytes(PTX)
    assembler = Path(triton.__file__).parent / "backends/nvidia/bin/ptxas"
    subprocess.run([assembler, "--gpu-name", architecture, source, "-o", tmp_path / "fill.cubin"], check=True)
