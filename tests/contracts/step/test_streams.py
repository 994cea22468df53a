"""TrainStep with launches on several streams.

Where an optimizer asks the host for its step, as Adam does on a CPU, the plan is declined, and all else holds.
"""

import pytest
import torch
import torch.nn.functional as F

from tests.contracts.step.test_numbers import Recomputed
from tests.contracts.worlds import STEPS
from tests.step_cases import OPTIMIZERS, assert_same, batches, is_captured, pair, tolerance_on, train_both

pytestmark = pytest.mark.only_on_streams


def test_what_a_loss_keeps_from_inside_the_step_is_that_of_the_last_step(device):
    """So the step stays in one graph, whose own memory it is."""
    kept = {}

    def keeping_as(name):
        def keeping(output, y):
            kept[name] = output.detach() * 1
            return F.mse_loss(output, y)

        return keeping

    sgd = OPTIMIZERS["sgd by hand fused"]
    planned, plain = pair(device, {"capture": "step"}, loss_fn=keeping_as("planned"), optimizer=sgd)
    plain.loss_fn = keeping_as("plain")
    for batch in batches(8):
        planned.do(batch)
        plain.do(batch)
        torch.testing.assert_close(kept["planned"], kept["plain"], **tolerance_on(device))
    (graph,) = STEPS
    assert "the step keeps a tensor that it made: what mul" in graph.streams_refusal
    assert "test_streams.py" in graph.streams_refusal


@pytest.mark.parametrize("share", [0.0, 0.2])
def test_what_is_computed_again_is_planned_unless_it_draws_again(device, share):
    sgd = OPTIMIZERS["sgd by hand fused"]
    planned, plain = pair(device, {"capture": "step"}, model=lambda: Recomputed(share, reentrant=False), optimizer=sgd)
    train_both(planned, plain, batches(8))
    assert_same(planned, plain)
    (graph,) = STEPS
    assert ("sets a random number generator" in graph.streams_refusal) == bool(share)
    assert share or graph.plan.schedule.streams > 1


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_which_optimizers_are_planned(device, name):
    planned, plain = pair(device, {"capture": "step"}, optimizer=OPTIMIZERS[name])
    train_both(planned, plain, batches(10))
    assert_same(planned, plain)
    assert is_captured(planned.step)
    (graph,) = STEPS
    asks_the_host = device.type == "cpu" and name in ("adamw", "adam")  # on a GPU, capturable ends that
    assert ("depends on the data" in graph.streams_refusal) == bool(graph.streams_refusal) == asks_the_host
    assert asks_the_host or graph.plan.schedule.streams > 1
