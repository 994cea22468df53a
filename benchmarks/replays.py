"""Suite replays: one replay of a plain graph and of a planned one, kernel by kernel, as the profiler saw them.

    python -m benchmarks.replays --case bert_base/2x128 --traces traces/

How long it took, the sum of what its kernels took, for how long so many of them ran at once, and the kernels that took
longest in all, with how often they ran. `--traces` keeps what the profiler saw, for Perfetto. Under the profiler a
replay takes longer: compare within a file.
"""

import argparse
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Final

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks import results_file
from benchmarks.engine import ENGINE_CASES, graph_step, planned_step
from benchmarks.results_file import Figure
from benchmarks.rivals import Step
from benchmarks.training_step import DEVICE
from kitsune.launches.execution.kernel_trace import Kernel, timeline

STREAMS: Final = 8
LONGEST: Final = 10
REPLAYS: Final = 3


def at_once_us(kernels: Iterable[Kernel]) -> Mapping[int, float]:
    """For how long so many kernels ran at once, from the begin of the first to the end of the last."""
    changes: list[tuple[float, int]] = []
    for kernel in kernels:
        changes += [(kernel.begin_us, 1), (kernel.begin_us + kernel.took_us, -1)]
    found: defaultdict[int, float] = defaultdict(float)
    running, since_us = 0, min(changes, default=(0.0, 0))[0]
    for at_us, change in sorted(changes):
        found[running] += at_us - since_us
        running, since_us = running + change, at_us
    return {count: us for count, us in sorted(found.items()) if us}


def longest(kernels: Iterable[Kernel]) -> list[tuple[str, float, int]]:
    """(name, us in all, how often) of the kernels that took most."""
    took_us: defaultdict[str, float] = defaultdict(float)
    times: Counter[str] = Counter()
    for kernel in kernels:
        took_us[kernel.name] += kernel.took_us
        times[kernel.name] += 1
    return [(name, us, times[name]) for name, us in sorted(took_us.items(), key=lambda item: -item[1])[:LONGEST]]


def figures(what: str, kernels: Sequence[Kernel]) -> Iterator[Figure]:
    at_once = at_once_us(kernels)
    yield f"{what}: from begin to end", sum(at_once.values()), "us", len(kernels)
    yield f"{what}: kernels added up", sum(kernel.took_us for kernel in kernels), "us", len(kernels)
    for count, us in at_once.items():
        yield f"{what}: kernels at once: {count}", us, "us", len(kernels)
    for name, us, times in longest(kernels):
        yield f"{what}: {name}", us, "us", times


def replays(step: Step) -> None:
    """Several behind each other: the host is late for the first, by 0.9 ms where it was ResNet-50's."""
    for _ in range(REPLAYS):
        step()


def last_replay(step: Step) -> list[Kernel]:
    timeline(step)
    kernels = timeline(partial(replays, step))
    return kernels[-(len(kernels) // REPLAYS) :]


def save_trace(step: Step, path: Path) -> None:
    """Of several replays: look at the last."""
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        replays(step)
        torch.cuda.synchronize()
    seen.export_chrome_trace(str(path))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", required=True, choices=ENGINE_CASES)
    parser.add_argument("--out", type=Path, help="result file to make; a new one under benchmarks/results otherwise")
    parser.add_argument("--traces", type=Path, metavar="FOLDER", help="where to put what the profiler saw")
    arguments = parser.parse_args()
    case = ENGINE_CASES[arguments.case]
    torch.cuda.set_device(DEVICE)
    found: list[Figure] = []
    for name, (step, _) in {"graph": graph_step(case), "k8": planned_step(case, STREAMS, None)}.items():
        replays(step)
        found += figures(f"{case.name} {name}", last_replay(step))
        if arguments.traces is not None:
            save_trace(step, arguments.traces / f"{case.name.replace('/', '-')}-{name}-replay.json")
    results_file.write_figures(arguments.out or results_file.free_path("replays"), "replays", found)


if __name__ == "__main__":
    main()
