"""What is written anew gets memory of its own: less waits for less, and every number stays what it was."""

import pytest
import torch

from kitsune.launches.execution.issue import HostLane, HostLanes, issue
from kitsune.launches.planning.memory_plan import plan_memory
from kitsune.launches.planning.schedule import in_order, on_streams
from kitsune.launches.transforms.renaming import renamed
from tests.unit.kitsune.launches.steps import CASES, equal, recorded, warmed

A, B, C = (torch.rand(4, 4, generator=torch.Generator().manual_seed(seed)) for seed in range(3))


torch.library.define("kitsune_test::half_of_it", "(Tensor x, *, Tensor(a!) out) -> ()")


@torch.library.impl("kitsune_test::half_of_it", "CPU")
def half_of_it(x, *, out):
    out[:2].copy_(x[:2])


def reusing(write):
    """As Inductor does it: the memory of a product that is done with is given to what is written next."""

    def step():
        memory = torch.mm(A, B)
        first = memory.sum()
        write(memory)
        return first, memory.sum(), memory

    return step


WRITES = {
    "a product": lambda memory: torch.mm(B, C, out=memory),
    "a copy": lambda memory: memory.copy_(C),
    "zeros": lambda memory: memory.zero_(),
    "a transposed copy": lambda memory: memory.t().copy_(C),
}
KEPT = {
    "a part": lambda memory: memory[:2].copy_(C[:2]),
    "a column": lambda memory: memory[:, :1].copy_(C[:, :1]),
    "what was there, added to": lambda memory: memory.add_(C),
    "elements that overlap": lambda memory: memory.as_strided((4, 4), (1, 1)).copy_(C),
    "by an operation of the user's": lambda memory: torch.ops.kitsune_test.half_of_it(C, out=memory),
}


def waits_of(recording):
    """For the launch that writes again, and the one that reads that: what each waits for, by name."""
    names = [launch.name for launch in recording.graph.launches]
    return [[names[before] for before in after] for after in recording.graph.after]


def run(recording, schedule, lanes):
    return issue(recording, schedule, plan_memory(recording.graph, schedule), lanes)


@pytest.mark.parametrize("name", WRITES)
def test_what_overwrites_memory_does_not_wait_for_those_who_read_it(name):
    step = reusing(WRITES[name])
    plain = recorded(step)
    apart = renamed(plain)
    assert waits_of(plain)[2:] == [["sum"], [plain.graph.launches[2].name]]
    assert waits_of(apart)[2] == []
    assert len(apart.graph.storages) == len(plain.graph.storages) + 1
    costs_us = [1.0, 50.0, 1.0, 1.0]
    assert equal(run(apart, on_streams(apart.graph, costs_us, 2, 0.0), HostLanes(2)), step())


def test_only_the_newest_memory_of_what_is_returned_outlives_the_step():
    apart = renamed(recorded(reusing(WRITES["a product"])))
    newest = apart.result[2].storage
    first = apart.graph.launches[0].writes[0].storage
    assert newest != first
    assert apart.graph.storages[newest].is_kept
    assert not apart.graph.storages[first].is_kept


@pytest.mark.parametrize("name", KEPT)
def test_what_is_written_in_part_or_read_as_well_stays_where_it_is(name):
    step = reusing(KEPT[name])
    plain = recorded(step)
    apart = renamed(plain)
    assert apart.graph == plain.graph
    assert equal(run(apart, in_order(apart.graph, [1.0] * len(apart.calls)), HostLane()), step())


def test_what_was_there_before_the_step_stays_where_it_is():
    memory = torch.zeros(4, 4)

    def step():
        torch.mm(A, B, out=memory)
        first = memory.sum()
        torch.mm(B, C, out=memory)
        return first, memory.sum()

    plain = recorded(step)
    assert renamed(plain).graph == plain.graph


@pytest.mark.parametrize("name", CASES)
def test_a_training_step_stays_what_it_is(name):
    step, twin = warmed(name)
    torch.manual_seed(3)
    apart = renamed(recorded(step))
    torch.manual_seed(3)
    twin()
    for seed in range(3):
        torch.manual_seed(seed)
        result = run(apart, on_streams(apart.graph, [1.0] * len(apart.calls), 4, 0.0), HostLane())
        torch.manual_seed(seed)
        assert equal(result[1], twin()[1])
        assert equal(step.state(), twin.state())
