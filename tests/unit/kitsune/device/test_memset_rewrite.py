"""Kernels in place of memsets, on a stand-in for the driver; tests/gpu/test_graphs.py has the real one."""

import ctypes
import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kitsune.device import memset_rewrite
from kitsune.device.memset_rewrite import (
    FIRST_NODES,
    KERNEL_NODE,
    MEMSET_NODE,
    KernelLaunch,
    Memset,
    pattern_of,
    replace_memsets,
    starts,
)
from kitsune.errors import CaptureError

AT = 4096


def memset(value=0, element_bytes=1, width=4, height=1, at=AT):
    return Memset(at, 0, value, element_bytes, width, height)


@given(st.integers(0, 2**32 - 1), st.sampled_from([1, 2, 4]), st.integers(1, 50), st.integers(1, 2), st.integers(0, 3))
def test_a_pattern_stores_the_same_bytes(value, element_bytes, width, height, offset):
    params = memset(value, element_bytes, width, height, AT + offset)
    nbytes = width * element_bytes
    pattern = pattern_of(params)
    if height > 1 or offset or nbytes % 4:
        assert pattern is None
    else:
        stored, count = pattern
        element = value.to_bytes(4, "little")[:element_bytes]
        assert stored.to_bytes(4, "little") * count == element * width


def test_nothing_to_fill_stays():
    assert pattern_of(memset(width=0)) is None


def none(positions):
    return ()


def refusing(index):
    raise CaptureError("the CUDA driver refused cuModuleLoadData with error 222")


class Driver:
    """Nodes of one graph, and edges between them. `fails`: a function of the driver that says no."""

    def __init__(self, nodes, edges, fails=""):
        self.nodes = dict(nodes)  # handle -> Memset, or the priority of a kernel
        self.edges = set(edges)
        self.filled = {}
        self.fails = fails

    def __getattr__(self, name):
        if not name.startswith("cu") or name == self.__dict__.get("lacks"):
            raise AttributeError(name)

        def call(*arguments):
            if name == self.fails:
                return 801
            getattr(self, "do_" + name)(*arguments)
            return 0

        return call

    def give(self, found, into, count):
        if into is None:
            count._obj.value = len(found)
        else:
            into[:] = found

    def do_cuGraphGetNodes(self, graph, into, count):
        self.give(list(self.nodes), into, count)

    def do_cuGraphNodeGetDependencies(self, node, into, count):
        self.give(sorted(one for one, two in self.edges if two == node.value), into, count)

    def do_cuGraphNodeGetDependentNodes(self, node, into, count):
        self.give(sorted(two for one, two in self.edges if one == node.value), into, count)

    def do_cuGraphNodeGetType(self, node, kind):
        kind._obj.value = MEMSET_NODE if isinstance(self.nodes[node.value], Memset) else KERNEL_NODE

    def do_cuGraphMemsetNodeGetParams(self, node, into):
        ctypes.memmove(into, ctypes.byref(self.nodes[node.value]), ctypes.sizeof(Memset))

    def do_cuGraphAddKernelNode_v2(self, into, graph, before, count, launch):
        node, params = max(self.nodes) + 1, launch._obj
        assert isinstance(params, KernelLaunch)
        kinds = (ctypes.c_uint64, ctypes.c_uint64, ctypes.c_uint32)
        values = [ctypes.cast(params.arguments[at], ctypes.POINTER(kind))[0] for at, kind in enumerate(kinds)]
        self.filled[node] = (params.function, params.grid[0], params.block[0], *values)
        self.nodes[node] = 0
        self.edges |= {(before[at], node) for at in range(count.value)}
        into._obj.value = node

    def do_cuGraphAddDependencies(self, graph, one, two, count):
        self.edges |= {(one[at], two[at]) for at in range(count.value)}

    def do_cuGraphKernelNodeGetAttribute(self, node, kind, value):
        value[0:1] = bytes([self.nodes[node.value]])

    def do_cuGraphKernelNodeSetAttribute(self, node, kind, value):
        self.nodes[node.value] = value[0][0]

    def do_cuGraphDestroyNode(self, node):
        del self.nodes[node.value]
        self.edges = {edge for edge in self.edges if node.value not in edge}


class Captured:
    def raw_cuda_graph(self):
        return 77


@pytest.fixture
def replaced(monkeypatch):
    """Replaces memsets of what the stand-in holds, and gives how many those were."""
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "device", lambda device: torch.no_grad())
    monkeypatch.setattr(memset_rewrite, "fill_function", lambda index: 99)

    def replaced(driver, **options):
        monkeypatch.setattr(memset_rewrite, "driver", lambda: driver)
        return replace_memsets(Captured(), torch.device("cuda", 0), **options)

    return replaced


def test_a_kernel_stands_where_the_memset_stood(replaced):
    driver = Driver({1: 3, 2: memset(0xAB), 3: 5, 4: 6}, {(1, 2), (2, 3), (2, 4), (1, 4)})
    assert replaced(driver, staying=none) == 1
    assert driver.edges == {(1, 5), (5, 3), (5, 4), (1, 4)}
    assert driver.filled == {5: (99, 1, 1, AT, 1, 0xABABABAB)}
    assert driver.nodes == {1: 3, 3: 5, 4: 6, 5: 5}  # as urgent as what waits for it


def test_memsets_in_a_row_and_long_ones(replaced):
    driver = Driver({1: memset(), 2: memset(7, 4, 2**20), 3: 1}, {(1, 2), (2, 3)})
    assert replaced(driver, staying=none) == 2
    assert driver.edges == {(4, 5), (5, 3)}
    assert driver.filled == {4: (99, 1, 1, AT, 1, 0), 5: (99, 1024, 256, AT, 2**20, 7)}


def test_what_is_no_row_of_words_stays(replaced):
    driver = Driver({1: memset(height=2), 2: memset(width=3), 3: 1}, {(1, 2), (2, 3)})
    assert replaced(driver, staying=none) == 0
    assert sorted(driver.nodes) == [1, 2, 3]


@pytest.mark.parametrize(
    "fails",
    [
        "cuGraphGetNodes",
        "cuGraphNodeGetDependencies",
        "cuGraphNodeGetDependentNodes",
        "cuGraphAddKernelNode_v2",
        "cuGraphAddDependencies",
        "cuGraphKernelNodeSetAttribute",
    ],
)
def test_what_the_driver_does_not_let_go_of_stays(replaced, fails):
    driver = Driver({1: 2, 2: memset(), 3: 1}, {(1, 2), (2, 3)}, fails)
    assert replaced(driver, staying=none) == 0
    assert sorted(driver.nodes) == [1, 2, 3]
    assert driver.edges == {(1, 2), (2, 3)}


def test_a_graph_that_is_half_changed_is_no_graph(replaced):
    driver = Driver({1: memset(), 2: 1}, {(1, 2)}, fails="cuGraphDestroyNode")
    with pytest.raises(CaptureError, match="the CUDA driver refused cuGraphDestroyNode with error 801"):
        replaced(driver, staying=none)


def test_without_a_driver_that_loads_kernels_all_stay(replaced, monkeypatch):
    monkeypatch.setattr(memset_rewrite, "fill_function", refusing)
    assert replaced(Driver({1: memset(), 2: 1}, {(1, 2)}), staying=none) == 0


def test_without_memsets_no_kernel_is_loaded(replaced, monkeypatch):
    monkeypatch.setattr(memset_rewrite, "fill_function", refusing)
    assert replaced(Driver({1: 1, 2: 1}, {(1, 2)}), staying=none) == 0


def test_an_old_driver_lacks_functions(replaced):
    driver = Driver({1: memset(), 2: 1}, {(1, 2)})
    driver.lacks = "cuGraphGetNodes"
    assert replaced(driver, staying=none) == 0


def test_a_long_graph_keeps_some(replaced):
    """So that the GPU begins while the host hands over the rest."""
    nodes = {number: memset() if number % 10 == 0 else 0 for number in range(1, 301)}
    driver = Driver(nodes, {(number, number + 1) for number in range(1, 300)})
    assert replaced(driver) == 27
    kept = [number for number, node in driver.nodes.items() if isinstance(node, Memset)]
    assert kept == [70, 130, 260]
    assert len(driver.nodes) == 300


@given(st.sets(st.integers(0, 5000)).map(sorted))
def test_one_stays_in_each_doubling(positions):
    kept = sorted(starts(positions))
    assert set(kept) <= set(positions)
    assert all(one.bit_length() < two.bit_length() for one, two in itertools.pairwise(kept))
    for position in positions:
        assert position < FIRST_NODES or any(each <= position < 2 * each for each in kept)


def test_without_cuda_there_is_nothing_to_replace(monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", None)
    assert replace_memsets(Captured(), torch.device("cuda", 0)) == 0
