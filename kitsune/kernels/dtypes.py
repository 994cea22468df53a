"""In which dtypes kernels take and give numbers, and in which references compute. No Triton here."""

from typing import Final

import torch

DTYPES: Final = (torch.float32, torch.bfloat16, torch.float16)


def wide_of(tensor: torch.Tensor) -> torch.dtype:
    """fp64 for fp64, fp32 for everything else."""
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32
