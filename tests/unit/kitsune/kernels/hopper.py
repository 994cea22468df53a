"""Compiles the kernels in Gluon for Hopper, without a GPU and outside the interpreter; prints what came of each."""

import json
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon._runtime import GluonASTSource

from kitsune.kernels import gated_linear_hopper, linear_activation_hopper
from kitsune.kernels.ping_pong import DEEP, HIGH, PIECE, WIDE, layout_of

PTXAS = Path(triton.__file__).parent / "backends/nvidia/bin/ptxas"

PLAIN, TRANSPOSED = {"IS_TRANSPOSED": False}, {"IS_TRANSPOSED": True}

#: Name -> (kernel, tiles of its matrices, pointers, its constants in each variant). `right` has tiles of its own.
KERNELS = {
    "linear_activation": (
        linear_activation_hopper.forward_kernel,
        {"x": (HIGH, DEEP), "a": (HIGH, PIECE), "slopes": (HIGH, PIECE)},
        {"bias": "*bf16"},
        ({"KIND": "gelu", **TRANSPOSED}, {"KIND": "gelu", **PLAIN}, {"KIND": "relu", **TRANSPOSED}),
    ),
    "linear_activation_backward": (
        linear_activation_hopper.backward_kernel,
        {"dy": (HIGH, DEEP), "slopes": (HIGH, PIECE), "dh": (HIGH, PIECE)},
        {"sums": "*fp32"},
        (PLAIN, TRANSPOSED),
    ),
    "gated_linear": (
        gated_linear_hopper.forward_kernel,
        {"x": (HIGH, DEEP), "gate": (PIECE, DEEP), "up": (PIECE, DEEP)}
        | dict.fromkeys(("hidden", "activation", "slopes"), (HIGH, PIECE)),
        {},
        ({"KIND": "silu"},),
    ),
    "gated_linear_backward": (
        gated_linear_hopper.backward_kernel,
        {"dy": (HIGH, DEEP), "down": (DEEP, WIDE)}
        | dict.fromkeys(("slopes", "activation", "dgate", "dup"), (HIGH, PIECE)),
        {},
        ({},),
    ),
}


def compiled(kernel, tiles, pointers, constants):
    right = (WIDE, DEEP) if constants.get("IS_TRANSPOSED") else (DEEP, WIDE)
    described = {
        given: descriptor(high.value, wide.value) for given, (high, wide) in (tiles | {"right": right}).items()
    }
    numbers = dict.fromkeys(("inner", "rows", "columns"), "i32")
    types = {**described, **pointers, **numbers, **dict.fromkeys(constants, "constexpr")}
    signature = {given: types[given] for given in kernel.arg_names}
    at = kernel.arg_names.index
    known = {(at(given),): value for given, value in constants.items()}
    divisible = {(at(given),): [["tt.divisibility", 16]] for given in ("inner", "columns", *pointers)}
    source = GluonASTSource(kernel, signature, known, divisible)
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4})


def descriptor(high, wide):
    return f"tensordesc<bf16[{high}, {wide}],{layout_of(high, wide)!r}>"


def results() -> Iterator[dict[str, Any]]:
    for name, (kernel, tiles, pointers, variants) in KERNELS.items():
        for constants in variants:
            code = compiled(kernel, tiles, pointers, constants)
            told = told_by_ptxas(code.asm["ptx"])
            yield {"name": name, **constants, "shared": code.metadata.shared, "told": told}


def told_by_ptxas(ptx: str) -> str:
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "kernel.ptx"
        source.write_text(ptx)
        command = [PTXAS, "-v", "-arch=sm_90a", source, "-o", f"{folder}/kernel.cubin"]
        return subprocess.run(command, capture_output=True, text=True, check=True).stderr


if __name__ == "__main__":
    print(json.dumps(list(results())))
