"""The CPU twin of a captured graph."""

import pytest
import torch

from kitsune.device.cuda_graph import HostGraph, Recorder

CPU = torch.device("cpu")


def test_a_host_graph_overwrites_the_results_of_its_recording():
    source, runs = torch.zeros(2), []

    def function():
        runs.append(1)
        return source * 2, {"sum": source.sum()}, None, source

    recorder = Recorder(CPU)
    assert recorder.executes
    graph, (double, rest, nothing, same) = recorder.capture(function)
    assert isinstance(graph, HostGraph)
    address = double.data_ptr()
    source.fill_(3.0)
    assert double.tolist() == [0.0, 0.0]
    graph.replay()
    assert (double.tolist(), rest["sum"].item(), nothing) == ([6.0, 6.0], 6.0, None)
    assert double.data_ptr() == address
    assert same is source
    assert len(runs) == 2


def test_the_error_of_a_recorded_function_is_not_changed_on_a_cpu():
    with pytest.raises(ZeroDivisionError):
        Recorder(CPU).capture(lambda: 1 / 0)
