"""TrainStep on a CPU with planned launches: what tests/step_semantics.py says of captured steps, on four streams.

Where an optimizer asks the host for its step, as Adam does on a CPU, the plan is declined, and all else holds.
"""

import pytest
import torch
import torch.nn.functional as F

from kitsune.capture.step_graph import StepGraph
from tests.step_cases import (
    OPTIMIZERS,
    assert_same,
    batches,
    capturing_cpu,
    is_captured,
    pair,
    tolerance_on,
    train_both,
)
from tests.step_semantics import (  # noqa: F401
    Recomputed,
    test_a_captured_step_trains_as_the_plain_loop,
    test_a_checkpoint_of_a_plan_goes_on_plain,
    test_a_frequent_other_shape_gets_a_program_of_its_own,
    test_a_model_that_returns_its_loss,
    test_a_plain_checkpoint_goes_on_by_a_plan,
    test_a_scheduler_is_honoured_at_every_step,
    test_a_user_may_clear_and_read_gradients_between_steps,
    test_activations_that_are_computed_again,
    test_an_overflow_skips_one_step_and_halves_the_scale,
    test_as_many_random_numbers_are_drawn_as_by_the_plain_loop,
    test_close_gives_everything_back,
    test_dropout_is_another_one_at_every_step,
    test_evaluation_in_between,
    test_fewer_rows_than_parts,
    test_freezing_and_thawing_in_mid_run,
    test_gradients_are_clipped,
    test_gradients_of_parts_of_a_batch_add_up,
    test_inputs_by_position_and_by_name,
    test_loading_an_optimizer_checkpoint_in_mid_run,
    test_loading_weights_in_mid_run,
    test_losses_that_are_kept_stay_what_they_were,
    test_replacing_a_layer_in_mid_run,
    test_the_odd_last_batch_runs_plain,
    test_the_scale_outlives_a_new_assembly,
    test_two_graphs_follow_one_learning_rate,
    test_weight_decay_may_change_in_mid_run,
    test_what_happens_on_the_host_is_not_captured,
)
from tests.unit.kitsune.launches.steps import even_us

MADE: list[StepGraph] = []


class OnStreams(StepGraph):
    def __init__(self, *arguments):
        super().__init__(*arguments[:4], streams=4)
        MADE.append(self)


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> torch.device:
    monkeypatch.setattr("kitsune.step.StepGraph", OnStreams)
    monkeypatch.setattr("kitsune.launches.plans.measured_us", even_us)
    MADE.clear()
    return capturing_cpu(monkeypatch)


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
    (graph,) = MADE
    assert "the step keeps a tensor that it made: what mul" in graph.streams_refusal
    assert "test_step_on_streams.py" in graph.streams_refusal


@pytest.mark.parametrize("share", [0.0, 0.2])
def test_what_is_computed_again_is_planned_unless_it_draws_again(device, share):
    sgd = OPTIMIZERS["sgd by hand fused"]
    planned, plain = pair(device, {"capture": "step"}, model=lambda: Recomputed(share, reentrant=False), optimizer=sgd)
    train_both(planned, plain, batches(8))
    assert_same(planned, plain)
    (graph,) = MADE
    assert ("sets a random number generator" in graph.streams_refusal) == bool(share)
    assert share or graph.plan.schedule.streams > 1


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_which_optimizers_are_planned(device, name):
    planned, plain = pair(device, {"capture": "step"}, optimizer=OPTIMIZERS[name])
    train_both(planned, plain, batches(10))
    assert_same(planned, plain)
    assert is_captured(planned.step)
    (graph,) = MADE
    asks_the_host = device.type == "cpu" and name in ("adamw", "adam")  # on a GPU, capturable ends that
    assert ("depends on the data" in graph.streams_refusal) == bool(graph.streams_refusal) == asks_the_host
    assert asks_the_host or graph.plan.schedule.streams > 1
