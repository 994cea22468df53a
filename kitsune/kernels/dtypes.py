"""The dtypes that kernels support, and those that references compute in. Does not import Triton."""

from typing import Final

import torch

DTYPES: Final = (torch.float32, torch.bfloat16, torch.float16)


def wide_of(tensor: torch.Tensor) -> torch.dtype:
    """fp64 for fp64, fp32 for everything else."""
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32
