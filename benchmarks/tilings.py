"""Suite tilings: the forward of pointwise_convolution by tiling, beside the convolution with and without statistics.

    python -m benchmarks.tilings
    python -m benchmarks.tilings --cases 64x64x56-256 --dtypes bf16

A case is images x channels x side, then the channels of the result. A tiling that does not fit the GPU is told of.
"""

import argparse
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Final

import torch
import torch.nn.functional as F

from benchmarks import results_file
from benchmarks.kernel_runs import DTYPES, Run
from benchmarks.kernels import keep, race
from benchmarks.training_step import DEVICE
from kitsune.kernels import pointwise_convolution as kernel
from kitsune.kernels.products import Tiling

#: Name -> (images, channels, side, channels of the result), of a ResNet-50.
SHAPES: Final[Mapping[str, tuple[int, int, int, int]]] = {
    f"{images}x{channels}x{side}-{out}": (images, channels, side, out)
    for images, channels, side, out in (
        *((64, 64, 56, 64), (64, 64, 56, 256), (64, 256, 56, 64), (64, 512, 28, 128), (64, 128, 28, 512)),
        *((64, 256, 14, 1024), (64, 512, 7, 2048), (256, 64, 56, 256)),
    )
}
#: high, wide, deep, pieces, stages, warps, programs, registers
TILINGS: Final = tuple(
    Tiling(*numbers)
    for numbers in (
        *((128, 64, 64, 1, 3, 4, 3, None), (128, 64, 64, 1, 4, 4, 2, None), (128, 64, 128, 1, 3, 4, 1, None)),
        *((64, 64, 64, 1, 4, 4, 4, None), (256, 64, 64, 1, 3, 8, 1, 255), (64, 128, 64, 1, 4, 8, 3, 80)),
        *((64, 128, 64, 1, 3, 4, 3, None), (128, 128, 64, 1, 3, 8, 2, 128), (128, 128, 64, 2, 4, 8, 2, 128)),
        *((128, 128, 128, 2, 2, 8, 2, 128), (128, 128, 128, 1, 3, 8, 1, None), (64, 128, 128, 1, 3, 4, 2, None)),
        *((128, 128, 64, 2, 3, 8, 2, 128), (128, 128, 64, 1, 4, 8, 1, None), (128, 256, 64, 2, 3, 8, 1, None)),
        *((256, 128, 64, 2, 3, 8, 1, None),),
    )
)


def builds(shape: tuple[int, int, int, int], dtype: torch.dtype) -> dict[str, Callable[[], Run]]:
    images, channels, side, out = shape
    torch.compiler.reset()
    torch.manual_seed(0)
    drawn = torch.randn(images, channels, side, side, device=DEVICE, dtype=dtype)
    x = drawn.contiguous(memory_format=torch.channels_last)
    weight = torch.randn(out, channels, 1, 1, device=DEVICE).div(channels**0.5).to(dtype)
    given = kernel.tiling_of

    def tiled(tiling: Tiling | None) -> Run:
        def run() -> tuple[torch.Tensor, ...]:
            kernel.tiling_of = given if tiling is None else lambda *_: tiling
            return kernel.forward(x, weight)

        return run

    compiled = torch.compile(kernel.reference, dynamic=False)
    fitting = (tiling for tiling in TILINGS if tiling.wide == 64 or out > 64)
    return {
        "convolution": lambda: lambda: (F.conv2d(x, weight),),
        "inductor": lambda: lambda: compiled(x, weight),
        "kitsune": partial(tiled, None),
        **{str(tuple(tiling)): partial(tiled, tiling) for tiling in fitting},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="*", default=list(SHAPES), choices=SHAPES, metavar="CASE")
    parser.add_argument("--dtypes", nargs="*", default=["bf16", "fp16"], choices=["bf16", "fp16"])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--out", type=Path, help="result file to add to; a new one under benchmarks/results otherwise")
    arguments = parser.parse_args()
    torch.cuda.set_device(DEVICE)
    chosen = [(case, dtype) for case in arguments.cases for dtype in arguments.dtypes]
    cases = (
        race("tilings", f"{case}/{dtype}", partial(builds, SHAPES[case], DTYPES[dtype]), arguments.rounds)
        for case, dtype in chosen
    )
    keep(arguments.out or results_file.free_path("tilings"), cases)


if __name__ == "__main__":
    main()
