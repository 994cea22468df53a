"""Suite memsets: what a graph takes with all of its memsets, with some of them, and with none.

    python -m benchmarks.memsets --case bert_base/2x128

One compiled step, as recorded (`k1`) and as the planner has it on up to eight streams (`k8`), each captured three
times: with all of its memsets, with kernels in place of most as Kitsune has it (`some`), and of all (`none`). An arm is
timed with one step behind the other, and once more with steps that are `waited for`, as in a loop that reads each loss.
"""

import argparse
import json
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import Final
from unittest.mock import patch

import torch

from benchmarks.engine import ENGINE_CASES, facts, step_of
from benchmarks.plans import recording_of
from benchmarks.rivals import Step
from benchmarks.training_step import DEVICE, Build, race, write
from kitsune.device.cuda_graph import Recorder
from kitsune.device.memset_rewrite import replace_memsets, starts
from kitsune.launches.pipeline import Planner
from kitsune.launches.plans import WORKSPACES_OF_STEP, Planned, plans

STREAMS: Final = 8
Staying = Callable[[Sequence[int]], Collection[int]]

#: Which memsets stay, by their positions among the nodes.
STAYING: Final[dict[str, Staying]] = {"all": frozenset, "some": starts, "none": lambda _: ()}


def replayed(planner: Planner, plan: Planned, staying: Staying, *, is_waited_for: bool) -> Build:
    def build() -> tuple[Step, Callable[[], str]]:
        replaced: list[int] = []

        def replace_some(graph: torch.cuda.CUDAGraph, device: torch.device) -> int:
            replaced.append(replace_memsets(graph, device, staying))
            return replaced[-1]

        with patch("kitsune.device.cuda_graph.replace_memsets", replace_some):
            replay = planner.race.tried(plan).replay

        def waited() -> torch.Tensor:
            result = replay()
            torch.cuda.synchronize()
            return result

        return waited if is_waited_for else replay, lambda: json.dumps(facts(plan, 0.0) | {"replaced": replaced[0]})

    return build


def builds(planner: Planner, chosen: dict[str, Planned]) -> Iterator[tuple[str, Build]]:
    for way, plan in chosen.items():
        for name, staying in STAYING.items():
            for suffix, is_waited_for in (("", False), (", waited for", True)):
                yield f"{way}, {name}{suffix}", replayed(planner, plan, staying, is_waited_for=is_waited_for)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", required=True, choices=ENGINE_CASES)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--out", type=Path, help="result file to add to; a new one under benchmarks/results otherwise")
    arguments = parser.parse_args()
    case = ENGINE_CASES[arguments.case]
    torch.cuda.set_device(DEVICE)
    workload, step = step_of(case, STREAMS)
    found = plans(recording_of(workload, step), STREAMS, None)
    planner = Planner(Recorder(DEVICE), STREAMS)
    chosen = {"k1": found[0], "k8": planner.race.quickest(found, WORKSPACES_OF_STEP)[0]}
    arms = race(dict(builds(planner, chosen)), arguments.rounds)
    write("memsets", case, arms, "", arguments.out)


if __name__ == "__main__":
    main()
