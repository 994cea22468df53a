"""Suite flags: one compiled step in one CUDA graph under sets of Inductor's flags, interleaved in one process.

    python -m benchmarks.flags --case gpt2_small/8x512
    python -m benchmarks.flags --case gpt2_small/8x512 --arms default no_mix_order combo_kernels

A set with a flag that this version of torch does not have is left out, and named on stderr. Each set compiles anew,
which takes half a minute to two minutes on a cold cache.
"""

import argparse
import sys
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch
from torch._inductor import config

from benchmarks.cases import CASES, Case
from benchmarks.rivals import Step, at_its_best, compiled_step, graphed
from benchmarks.training_step import DEVICE, race, workload_of, write

SUITE: Final = "flags"
DEFAULT: Final = "default"
SETS: Final[Mapping[str, Mapping[str, Any]]] = {
    DEFAULT: {},
    "no_mix_order": {"triton.mix_order_reduction": False},
    "split_64": {"triton.mix_order_reduction_split_size": 64},
    "split_128": {"triton.mix_order_reduction_split_size": 128},
    "coordinate_descent": {"coordinate_descent_tuning": True},
    "no_loop_ordering": {"loop_ordering_after_fusion": False},
    "no_split_reductions": {"split_reductions": False},
    "no_padding": {"comprehensive_padding": False},
    "combo_kernels": {"combo_kernels": True, "benchmark_combo_kernel": True},
    "multi_kernel": {"triton.multi_kernel": 1},
    "cooperative_reductions": {"triton.cooperative_reductions": True},
    "dependent_launch": {"triton.enable_pdl": True},
    "benchmark_fusion": {"benchmark_fusion": True},
    "aggressive_fusion": {"aggressive_fusion": True},
    "conv_1x1_as_mm": {"conv_1x1_as_mm": True},
    "gemms": {"max_autotune_gemm": True, "max_autotune_gemm_backends": "ATEN,TRITON"},
    "persistent_gemms": {
        "max_autotune_gemm": True,
        "max_autotune_gemm_backends": "ATEN,TRITON",
        "triton.enable_persistent_tma_matmul": True,
    },
}


def unknown(flags: Iterable[str]) -> list[str]:
    """Those that this version of torch does not have."""
    there = set(config.get_config_copy())
    return [flag for flag in flags if flag not in there]


def sets_here(names: Iterable[str]) -> dict[str, Mapping[str, Any]]:
    found = {}
    for name in names:
        if missing := unknown(SETS[name]):
            print(f"{name} is left out: torch {torch.__version__} has no {', '.join(missing)}", file=sys.stderr)
        else:
            found[name] = SETS[name]
    return found


def step_of(case: Case, flags: Mapping[str, Any]) -> tuple[Step, Callable[[], str]]:
    torch._dynamo.reset()  # the same function would be found compiled, under the flags of the set before
    best = at_its_best(workload_of(case), channels_last=case.channels_last, capturable=True)
    return graphed(compiled_step(best, None, flags)), lambda: ", ".join(
        f"{name}={value}" for name, value in flags.items()
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", required=True, choices=CASES)
    parser.add_argument("--arms", nargs="*", default=list(SETS), choices=SETS)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--out", type=Path, help="result file to add to; a new one under benchmarks/results otherwise")
    arguments = parser.parse_args()
    case = CASES[arguments.case]
    torch.cuda.set_device(DEVICE)
    sets = sets_here(dict.fromkeys((DEFAULT, *arguments.arms)))
    arms = race({name: partial(step_of, case, flags) for name, flags in sets.items()}, arguments.rounds)
    write(SUITE, case, arms, "", arguments.out)


if __name__ == "__main__":
    main()
