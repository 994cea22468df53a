"""Suite chunks: linear_cross_entropy by the most bytes of a chunk's logits; raw us of every block to a result file.

    python -m benchmarks.chunks
    python -m benchmarks.chunks --cases gpt2_small/8x512

Forward and backward in bf16. All arms of a case are interleaved in one process; `128 MiB` is an arm.
"""

import argparse
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Final

import torch

from benchmarks import results_file
from benchmarks.kernel_cases import Run
from benchmarks.kernels import keep, race
from benchmarks.training_step import DEVICE
from kitsune.kernels import linear_cross_entropy

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


def build(shape: tuple[int, int, int], most_bytes: int) -> Run:
    rows, hidden, classes = shape
    torch.manual_seed(0)
    x = torch.randn(rows, hidden, device=DEVICE, dtype=torch.bfloat16, requires_grad=True)
    weight = (0.02 * torch.randn(classes, hidden, device=DEVICE, dtype=torch.bfloat16)).requires_grad_()
    target = torch.randint(classes, (rows,), device=DEVICE)

    def run() -> tuple[torch.Tensor, ...]:
        linear_cross_entropy.LOGITS_BYTES = most_bytes  # type: ignore[misc]
        return torch.autograd.grad(linear_cross_entropy.linear_cross_entropy(x, weight, target), (x, weight))

    return run


def builds(case: str) -> dict[str, Callable[[], Run]]:
    return {f"{2 ** (power - 20)} MiB": partial(build, SHAPES[case], 2**power) for power in POWERS}


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
