"""Suite ping_pong: products in Gluon whose consumers take turns, beside those in Triton's own pipeline, in bf16.

    python -m benchmarks.ping_pong
    python -m benchmarks.ping_pong --kinds gelu_tanh --rounds 7

All arms of a shape are interleaved in one process. `product` is cuBLAS's, without anything after it. For Hopper, with
the Triton of kitsune.kernels.products.HAS_GLUON.
"""

import argparse
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Final
from unittest import mock

import torch

from benchmarks import results_file
from benchmarks.kernel_runs import Run
from benchmarks.kernels import keep, race
from benchmarks.training_step import DEVICE
from kitsune.kernels import gated_linear, gated_linear_hopper, linear_activation, linear_activation_hopper
from kitsune.kernels.bias_activation import KINDS

#: (rows, inner size, hidden size): BERT-base, GPT-2, nanoGPT, ViT-B/16 and GPT-2 XL; Llama-125M and -1B.
BLOCKS: Final = (
    (2048, 768, 3072),
    (4096, 768, 3072),
    (12288, 768, 3072),
    (12608, 768, 3072),
    (4096, 1600, 6400),
)
GATED_BLOCKS: Final = ((8192, 768, 2048), (4096, 2048, 8192))


def in_triton(module: object, run: Run) -> Run:
    """The run with Triton's kernels."""

    def call() -> tuple[torch.Tensor, ...]:
        with mock.patch.object(module, "takes_turns", return_value=False):
            return run()

    return call


def in_gluon(module: object, hopper: object, run: Run) -> Run:
    """The run with the kernels in Gluon, also for activations for which they are not in use."""

    def call() -> tuple[torch.Tensor, ...]:
        with mock.patch.object(module, "takes_turns", return_value=True), mock.patch.object(hopper, "FASTER", KINDS):
            return run()

    return call


def block_arms(shape: tuple[int, int, int], kinds: list[str]) -> Mapping[str, Callable[[], Run]]:
    rows, inner, hidden = shape
    torch.manual_seed(0)
    x, dy = drawn(rows, inner), drawn(rows, inner)
    w1, b1, w2 = drawn(hidden, inner) / inner**0.5, drawn(hidden), drawn(inner, hidden) / hidden**0.5
    _, slopes = linear_activation.forward(x, w1, b1, "gelu")
    runs: dict[str, Run] = {
        f"forward, {kind}": partial(linear_activation.forward, x, w1, b1, kind) for kind in kinds
    } | {"backward": lambda: linear_activation.backward(dy, w2, slopes)}
    return {"product": lambda: partial(product, x, w1, b1), **both(linear_activation, linear_activation_hopper, runs)}


def product(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return (torch.addmm(bias, x, weight.t()),)


def gated_arms(shape: tuple[int, int, int], kinds: list[str]) -> Mapping[str, Callable[[], Run]]:
    rows, inner, hidden = shape
    torch.manual_seed(0)
    x, dy = drawn(rows, inner), drawn(rows, inner)
    gate, up = (drawn(hidden, inner) / inner**0.5 for _ in range(2))
    down = drawn(inner, hidden) / hidden**0.5
    _, activation, slopes = gated_linear.forward(x, gate, up, "silu")
    runs: dict[str, Run] = {f"forward, {kind}": partial(gated_linear.forward, x, gate, up, kind) for kind in kinds} | {
        "backward": lambda: (gated_linear.backward(dy, down, activation, slopes),)
    }
    return both(gated_linear, gated_linear_hopper, runs)


def both(module: object, hopper: object, runs: Mapping[str, Run]) -> dict[str, Callable[[], Run]]:
    """Arm -> what makes its run: each of them in Gluon, checked against Triton's, and in Triton."""

    def checked(run: Run) -> Run:
        ours = in_gluon(module, hopper, run)
        for one, other in zip(ours(), in_triton(module, run)(), strict=True):
            torch.testing.assert_close(one, other, rtol=2e-2, atol=2e-2)
        return ours

    gluon = {name: partial(checked, run) for name, run in runs.items()}
    return gluon | {f"{name}, Triton": partial(in_triton, module, run) for name, run in runs.items()}


def drawn(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, device=DEVICE, dtype=torch.bfloat16)


def races(kinds: list[str], rounds: int) -> Iterator[Iterator[dict[str, object]]]:
    for name, arms, shapes in (("linear_activation", block_arms, BLOCKS), ("gated_linear", gated_arms, GATED_BLOCKS)):
        for shape in shapes:
            rows, inner, hidden = shape
            yield race("ping_pong", f"{name}/{rows}x{inner}-{hidden}/bf16", partial(arms, shape, kinds), rounds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kinds", nargs="*", default=["gelu", "gelu_tanh", "silu"], choices=list(KINDS))
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--out", type=Path, help="result file to add to; a new one under benchmarks/results otherwise")
    arguments = parser.parse_args()
    torch.cuda.set_device(DEVICE)
    keep(arguments.out or results_file.free_path("ping_pong"), races(arguments.kinds, arguments.rounds))


if __name__ == "__main__":
    main()
