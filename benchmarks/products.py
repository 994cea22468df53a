"""Suite products: the matrix products of models by each algorithm that cuBLASLt proposes, beside torch's choice.

    python -m benchmarks.products
    python -m benchmarks.products --cases gpt2_small/8x512

A case is a layer (n -> m) of a model in one of its three products. `torch`: as torch runs it; `torch, cublaslt`: with
torch's preference for cuBLASLt; `algorithm 0` to `7`: what cuBLASLt proposes, best guess first. In bf16.
"""

import argparse
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Final, Literal, get_args

import torch

from benchmarks import results_file
from benchmarks.cublaslt import Product
from benchmarks.kernel_runs import Run
from benchmarks.kernels import keep, race
from benchmarks.training_step import DEVICE

Kind = Literal["forward", "input", "weight"]
KINDS: Final[tuple[Kind, ...]] = get_args(Kind)
#: Model -> its rows, and layers (n, m) -> how many of them a step has.
MODELS: Final[Mapping[str, tuple[int, Mapping[tuple[int, int], int]]]] = {
    "gpt2_small/8x512": (4096, {(768, 2304): 12, (768, 768): 12, (768, 3072): 12, (3072, 768): 12, (768, 50304): 1}),
    "vit_b16/64": (12608, {(768, 2304): 12, (768, 768): 12, (768, 3072): 12, (3072, 768): 12}),
    "bert_base/16x128": (2048, {(768, 2304): 12, (768, 768): 12, (768, 3072): 12, (3072, 768): 12}),
    "llama_125m/8x1024": (8192, {(768, 768): 48, (768, 2048): 24, (2048, 768): 12, (768, 32000): 1}),
    "nanogpt/12x1024": (12288, {(768, 2304): 12, (768, 768): 12, (768, 3072): 12, (3072, 768): 12, (768, 50304): 1}),
}
MOST: Final = 8


def operands(rows: int, layer: tuple[int, int], kind: Kind) -> tuple[torch.Tensor, torch.Tensor]:
    n, m = layer
    torch.manual_seed(0)
    x, weight, dy = (torch.randn(size, device=DEVICE).to(torch.bfloat16) for size in ((rows, n), (m, n), (rows, m)))
    return {"forward": (x, weight.t()), "input": (dy, weight), "weight": (dy.t(), x)}[kind]


def builds(rows: int, layer: tuple[int, int], kind: Kind) -> dict[str, Callable[[], Run]]:
    one, other = operands(rows, layer, kind)
    out = torch.mm(one, other)
    product = Product(one, other, torch.empty_like(out), MOST)

    def by(preferred: str) -> Run:
        def run() -> torch.Tensor:
            torch.backends.cuda.preferred_blas_library(preferred)
            return torch.mm(one, other, out=out)

        return run

    def proposed(at: int) -> Run:
        if not torch.allclose(product.run(at), out, rtol=2e-2, atol=2e-2 * float(out.abs().max())):
            raise RuntimeError("it computes something else")
        return lambda: product.run(at)

    return {
        "torch": partial(by, "default"),
        "torch, cublaslt": partial(by, "cublaslt"),
        **{f"algorithm {at}": partial(proposed, at) for at in range(len(product.found))},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="*", default=list(MODELS), choices=MODELS, metavar="CASE")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--out", type=Path, help="result file to add to; a new one under benchmarks/results otherwise")
    arguments = parser.parse_args()
    torch.cuda.set_device(DEVICE)
    chosen = [(case, layer, kind) for case in arguments.cases for layer in MODELS[case][1] for kind in KINDS]
    cases = (
        race(
            "products",
            f"{case}: {MODELS[case][1][layer]} x {layer[0]} -> {layer[1]}, {kind}",
            partial(builds, MODELS[case][0], layer, kind),
            arguments.rounds,
        )
        for case, layer, kind in chosen
    )
    keep(arguments.out or results_file.free_path("products"), cases)


if __name__ == "__main__":
    main()
