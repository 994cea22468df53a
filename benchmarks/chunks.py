"""Suite chunks: linear_cross_entropy by the most bytes of a chunk's logits, and by how a program reads a row of them.

    python -m benchmarks.chunks
    python -m benchmarks.chunks --cases gpt2_small/8x512

Forward and backward in bf16. All arms of a case are interleaved in one process. `128 MiB` is an arm; `8192 by 32` has
chunks of the size in use, whose rows are read 8192 classes at once by 32 warps.
"""

import argparse
import contextlib
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Final
from unittest import mock

import torch

from benchmarks import results_file
from benchmarks.kernel_runs import Run
from benchmarks.kernels import keep, race
from benchmarks.training_step import DEVICE
from kitsune.kernels import linear_cross_entropy as kernel

#: Case -> (rows, hidden, classes).
SHAPES: Final[Mapping[str, tuple[int, int, int]]] = {
    "gpt2_small/8x512": (4096, 768, 50257),
    "gpt2_small/16x1024": (16384, 768, 50257),
    "nanogpt/12x1024": (12288, 768, 50304),
    "llama_125m/8x1024": (8192, 768, 32000),
    "llama3_1b/4x2048": (8192, 2048, 128256),
    "bert_base_mlm/16x128": (2048, 768, 30522),
}
POWERS: Final = (27, 28, 29, 30, 31)
#: (classes that a program reads at once, its warps). The fewer programs are resident, the more of the rows that they
#: read a second time is still in the cache.
READS: Final = ((4096, 8), (4096, 16), (8192, 16), (8192, 32), (16384, 32))


def build(shape: tuple[int, int, int], most_bytes: int | None = None, read: tuple[int, int] | None = None) -> Run:
    rows, hidden, classes = shape
    torch.manual_seed(0)
    x = torch.randn(rows, hidden, device=DEVICE, dtype=torch.bfloat16, requires_grad=True)
    weight = (0.02 * torch.randn(classes, hidden, device=DEVICE, dtype=torch.bfloat16)).requires_grad_()
    target = torch.randint(classes, (rows,), device=DEVICE)

    def run() -> tuple[torch.Tensor, ...]:
        with changed(most_bytes, read):
            return torch.autograd.grad(kernel.linear_cross_entropy(x, weight, target), (x, weight))

    return run


@contextlib.contextmanager
def changed(most_bytes: int | None, read: tuple[int, int] | None) -> Iterator[None]:
    """The kernel with these settings in place of its own, in the block."""
    settings: dict[str, Any] = {} if most_bytes is None else {"LOGITS_BYTES": most_bytes}
    if read is not None:
        block, warps = read
        settings |= {"piece_of": lambda _: (1, block), "warps_of": lambda _: warps}
    with contextlib.ExitStack() as stack:
        for name, value in settings.items():
            stack.enter_context(mock.patch.object(kernel, name, value))
        yield


def builds(case: str) -> dict[str, Callable[[], Run]]:
    return {
        **{f"{2 ** (power - 20)} MiB": partial(build, SHAPES[case], 2**power) for power in POWERS},
        **{f"{block} by {warps}": partial(build, SHAPES[case], read=(block, warps)) for block, warps in READS},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="*", default=list(SHAPES), choices=SHAPES, metavar="CASE")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--out", type=Path, help="result file to add to; a new one under benchmarks/results otherwise")
    arguments = parser.parse_args()
    torch.cuda.set_device(DEVICE)
    cases = (race("chunks", case, partial(builds, case), arguments.rounds) for case in arguments.cases)
    keep(arguments.out or results_file.free_path("chunks"), cases)


if __name__ == "__main__":
    main()
