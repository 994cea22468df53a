"""Suite kernels: each of our kernels against eager torch and Inductor; raw us of every block to a result file.

    python -m benchmarks.kernels --only layer_norm softmax_causal --out results.jsonl
    python -m benchmarks.kernels --shard 1/4 --out results.jsonl

Every arm is captured in a CUDA graph of many runs, so that neither Python nor the launch of a graph decides. All arms
of a case are interleaved in one process. One that fails is told of in its notes, and the rest goes on.
"""

import argparse
import gc
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from triton.errors import TritonError

from benchmarks import results_file
from benchmarks.kernel_cases import KERNELS
from benchmarks.kernel_runs import DTYPES, Place, Run
from benchmarks.training_step import DEVICE, Arm, block_ms, interleave
from kitsune.errors import SURPRISES

#: Of a case. What torch, Inductor or Triton says to what it cannot do; Ctrl-C is none of them.
FAILURES = (*SURPRISES, AttributeError, OSError, TritonError)

WARM_RUNS = 3
#: A graph holds as many runs as fill this time, so that a run of 10 us does not wait for the launch of its graph.
GRAPH_MS = 0.5
MOST_RUNS = 64
BLOCK_MS = 20.0


@dataclass(frozen=True, slots=True)
class KernelCase:
    kernel: str
    shape: str
    dtype: str

    @property
    def name(self) -> str:
        return f"{self.kernel}/{self.shape}/{self.dtype}"

    def builds(self, device: torch.device) -> Mapping[str, Callable[[], Run]]:
        torch.manual_seed(0)
        kernel = KERNELS[self.kernel]
        return kernel.make(kernel.shapes[self.shape], Place(DTYPES[self.dtype], device)).builds()


@dataclass(frozen=True, slots=True)
class Shard:
    """Part `number`, from 1, of `count` parts of the cases."""

    number: int
    count: int

    @classmethod
    def parse(cls, text: str) -> "Shard":
        number, slash, count = text.partition("/")
        if not (slash and number.isdecimal() and count.isdecimal() and 1 <= int(number) <= int(count)):
            raise argparse.ArgumentTypeError(f"{text!r} is no part of the cases; write 1/4 to 4/4")
        return cls(int(number), int(count))

    def of(self, cases: list[KernelCase]) -> list[KernelCase]:
        """Every `count`-th: neighbours are alike, so that each part takes about as long."""
        return cases[self.number - 1 :: self.count]


@dataclass
class Graphed(Arm):
    """An arm whose step is the replay of a graph of `runs` runs. `run` owns what the graph reads by address."""

    runs: int = 1
    run: Run | None = None

    @property
    def us(self) -> list[float]:
        return [1000 * ms / self.runs for ms in self.step_ms]


def cases_of(kernels: Iterable[str], dtypes: Iterable[str]) -> list[KernelCase]:
    wanted = set(dtypes)
    return [
        KernelCase(name, shape, dtype)
        for name in kernels
        for shape in KERNELS[name].shapes
        for dtype in KERNELS[name].dtypes
        if dtype in wanted
    ]


def prepare(name: str, build: Callable[[], Run]) -> Graphed:
    """Warms an arm up, takes its peak, and captures it, all on one stream, as a capture demands."""
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    begin = time.perf_counter()
    with torch.cuda.stream(stream):
        run = build()
        run()
        torch.cuda.synchronize()
        first_step_s = time.perf_counter() - begin
        for _ in range(WARM_RUNS):
            run()
        peak_bytes = peak_of(run)
    arm = Graphed(name, captured(run, 1, stream), first_step_s, peak_bytes, run=run)
    block_ms(arm, WARM_RUNS)
    arm.runs = max(1, min(MOST_RUNS, round(GRAPH_MS / block_ms(arm, 10))))
    if arm.runs > 1:
        arm.step = captured(run, arm.runs, stream)
        block_ms(arm, WARM_RUNS)
    arm.steps_per_block = max(1, round(BLOCK_MS / block_ms(arm, WARM_RUNS)))
    return arm


def peak_of(run: Run) -> int:
    """The most bytes in tensors during a run, over what was there before it: inputs and states do not count."""
    torch.cuda.synchronize()
    gc.collect()
    before_bytes = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    run()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before_bytes


def captured(run: Run, runs: int, stream: torch.cuda.Stream) -> Callable[[], None]:
    """The replay of a graph of so many runs. What they return is dropped: its memory stays the graph's own."""
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for _ in range(runs):
            run()
    return graph.replay


def measure(case: KernelCase, rounds: int) -> Iterator[dict[str, object]]:
    """The lines of a case."""
    torch.compiler.reset()  # or torch would run the ninth shape of one function uncompiled
    yield from race("kernels", case.name, partial(case.builds, DEVICE), rounds)


def race(
    suite: str, case: str, builds: Callable[[], Mapping[str, Callable[[], Run]]], rounds: int
) -> Iterator[dict[str, object]]:
    """The lines of a case, one for each arm; without samples for those that failed, with the reason."""
    arms: list[Graphed] = []
    failed: dict[str, str] = {}
    try:
        for name, build in builds().items():
            try:
                arms.append(prepare(name, build))
            except FAILURES as error:
                failed[name] = told(error)
        interleave(list(arms), rounds)
    except FAILURES as error:  # of the inputs, or of the device
        arms, failed = [], {**failed, "all": told(error)}
    yield from (line(suite, case, arm.name, arm) for arm in arms)
    yield from (line(suite, case, name, None, reason) for name, reason in failed.items())


def told(error: BaseException) -> str:
    text = str(error).strip().splitlines()
    return f"failed: {type(error).__name__}: {text[0] if text else ''}"[:300]


def line(suite: str, case: str, name: str, arm: Graphed | None, notes: str = "") -> dict[str, object]:
    return {
        "kind": "case",
        "suite": suite,
        "case": case,
        "arm": name,
        "us": arm.us if arm else [],
        "peak_bytes": arm.peak_bytes if arm else None,
        "first_step_s": arm.first_step_s if arm else None,
        "notes": notes,
    }


def release() -> None:
    """Gives the GPU back what a case held. Only after it: a graph uses cuBLAS's workspaces as long as it lives."""
    gc.collect()
    torch.cuda.synchronize()
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()


def show(told_of: dict[str, object]) -> None:
    samples, name = told_of["us"], f"{told_of['case']:44} {told_of['arm']:9}"
    if samples:
        peak_mib = told_of["peak_bytes"] / 2**20
        print(f"{name} {statistics.median(samples):10.2f} us {peak_mib:9.1f} MiB", flush=True)
    else:
        print(f"{name} {told_of['notes']}", file=sys.stderr, flush=True)


def keep(path: Path, cases: Iterable[Iterable[dict[str, object]]]) -> None:
    """Writes and shows the lines of each case, and frees the GPU after it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if not path.exists():
        results_file.append(path, results_file.environment_line(results_file.command_line()))
    for lines in cases:
        for measured in lines:
            results_file.append(path, measured)
            show(measured)
        release()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", default=list(KERNELS), choices=KERNELS, metavar="KERNEL")
    parser.add_argument("--dtypes", nargs="*", default=list(DTYPES), choices=DTYPES)
    parser.add_argument("--shard", type=Shard.parse, default=Shard(1, 1), help="1/4 to 4/4: one part on each of 4 GPUs")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--out", type=Path, help="result file to add to; a new one under benchmarks/results otherwise")
    arguments = parser.parse_args()
    torch.cuda.set_device(DEVICE)
    cases = arguments.shard.of(cases_of(arguments.only, arguments.dtypes))
    keep(arguments.out or results_file.free_path("kernels"), (measure(case, arguments.rounds) for case in cases))


if __name__ == "__main__":
    main()
