import re

import pytest
import torch
from torch import nn

from kitsune.engine.record import HIDDEN_WRITES, Observer, record
from kitsune.engine.recording import places_of
from kitsune.engine.triton_launches import TritonLaunch
from tests.unit.engine.steps import CPU, adamw, names, recorded, warmed


def numbers(spans):
    return {span.storage for span in spans}


def test_views_and_empty_memory_launch_nothing():
    x = torch.randn(4, 6)
    recording = recorded(lambda: torch.empty(6, 4).copy_(x.t().contiguous().view(6, 4)[:]))
    assert names(recording) == ["clone", "copy_"]


def test_what_a_launch_touches_is_told_in_bytes():
    x = torch.randn(4, 8)
    recording = recorded(lambda: x[1:3, 2:].mul_(2))
    (launch,) = recording.graph.launches
    (span,) = launch.writes
    assert (span.begin, span.end) == (4 * (8 + 2), 4 * 3 * 8)
    assert launch.reads == launch.writes


def test_the_state_was_there_before_and_activations_were_not():
    step, _ = warmed("mlp")
    recording = recorded(step)
    held = {storage.data_ptr() for storage in recording.held.values()}
    assert {tensor.data_ptr() for tensor in step.state()} <= held
    own = [storage for storage in recording.graph.storages if storage.is_own]
    assert len(own) + len(held) == len(recording.graph.storages)
    kept = [storage for storage in own if storage.is_kept]
    assert len(kept) == 1 + len(list(step.model.parameters()))  # the loss, and the gradients


def test_nothing_of_the_step_stays_in_memory_but_what_it_returns():
    step, _ = warmed("mlp")
    found = record(step, CPU)
    alive = {tensor.untyped_storage()._cdata for tensor in (found.result[0], *found.result[1])}
    ours = {storage._cdata for storage in found.recording.held.values()}
    assert not alive & ours


@pytest.mark.parametrize("training", [True, False])
def test_batch_norm_writes_its_statistics_though_its_schema_does_not_say_so(training):
    norm = nn.BatchNorm1d(4).train(training)
    x = torch.randn(8, 4)
    recording = recorded(lambda: norm(x).detach())
    at = names(recording).index("native_batch_norm")
    written = numbers(recording.graph.launches[at].writes)
    mean, variance = (
        next(n for n, s in recording.held.items() if s.data_ptr() == buffer.data_ptr())
        for buffer in (norm.running_mean, norm.running_var)
    )
    assert {mean, variance} <= written


@pytest.mark.parametrize("name", HIDDEN_WRITES)
def test_hidden_writes_name_arguments_of_the_operation(name):
    packet = getattr(torch.ops.aten, name.removeprefix("aten::"))
    arguments = {argument.name for argument in packet.default._schema.arguments}
    assert set(HIDDEN_WRITES[name]) <= arguments


def test_an_out_argument_is_written_and_not_read():
    x, out = torch.randn(3), torch.empty(3)
    recording = recorded(lambda: torch.mul(x, 2, out=out))
    (launch,) = recording.graph.launches
    assert not numbers(launch.reads) & numbers(launch.writes)


def test_memory_that_the_user_keeps_is_written_where_it_is():
    x, out = torch.randn(3), torch.empty(3)
    recording = recorded(lambda: torch.mul(x, 2, out=out).sum())
    assert out.data_ptr() in {storage.data_ptr() for storage in recording.held.values()}


def test_random_numbers_are_told():
    recording = recorded(lambda: torch.native_dropout(torch.ones(4), 0.5, True)[0] + torch.rand(4))
    assert [launch.name for launch in recording.graph.launches if launch.draws] == ["native_dropout", "rand"]


def by_item(x):
    return x * x.sum().item()


def by_shape(x):
    return x[x > 0].sum()


def out_of_sight(x):
    hidden = torch.empty(3)
    hidden.numpy()[:] = 1.0
    return hidden + x


def resized(x):
    y = x.clone()
    y.resize_(7)
    return y


def sparse(x):
    return torch.sparse_coo_tensor(torch.tensor([[0, 1]]), x[:2], (5,), check_invariants=True).to_dense()


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (by_item, r"_local_scalar_dense returns depends on the data \(.*test_record.py:\d+\)"),
        (by_shape, "depends on the data"),
        (out_of_sight, "reads memory that nothing in our sight has written"),
        (resized, "resize_ changes which memory a tensor means"),
        (sparse, "cannot be followed"),
    ],
)
def test_what_cannot_be_issued_again_is_refused_after_the_step_has_run(function, words):
    x = torch.ones(3)
    found = record(lambda: (function(x), x.add_(1)), CPU)
    assert found.recording is None
    assert re.search(words, found.refusal)
    assert torch.equal(x, torch.full((3,), 2.0))


def test_indexing_with_numbers_does_not_depend_on_the_data():
    x, at = torch.randn(4, 3), torch.tensor([2, 0])
    recording = recorded(lambda: x[at, 1:])
    assert names(recording) == ["index"]


def test_memory_of_nobodys_may_be_given_to_a_launch_that_writes_it():
    """As Inductor gives it to a reduction, and a user to a kernel of their own."""
    recording = recorded(lambda: torch.empty(3).mul_(0.0).fill_(1.0))
    first, _ = recording.graph.launches
    assert first.reads == first.writes
    assert recording.calls[0].allocates == (first.writes[0].storage,)
    assert not recording.held


def test_an_empty_tensor_may_be_set_on_the_memory_of_others():
    """As an LSTM of cuDNN looks at its flat weights."""
    x = torch.ones(3)
    recording = recorded(lambda: torch.empty(0).set_(x.untyped_storage()).mul_(2))
    assert names(recording) == ["mul_"]
    assert [storage.data_ptr() for storage in recording.held.values()] == [x.data_ptr()]
    assert torch.equal(x, torch.full((3,), 2.0))


def test_an_optimizer_that_asks_for_its_step_is_refused():
    step, _ = warmed("mlp", lambda parameters: torch.optim.Adam(parameters, foreach=False))
    assert "depends on the data" in record(step, CPU).refusal


def test_recording_changes_nothing():
    step, twin = warmed("branches", adamw)
    result = record(step, CPU).result
    expected = twin()
    assert torch.equal(result[0], expected[0])
    assert all(map(torch.equal, step.state(), twin.state()))


def test_places_are_found_in_any_structure():
    recording = recorded(lambda: {"a": [torch.ones(2)], "b": None})
    assert len(list(places_of(recording.result))) == 1


def launch_of(name, tensor):
    return TritonLaunch(name, lambda _: None, (tensor,), {}, (0,), (0,))


@torch.library.custom_op("kitsune_test::with_a_kernel_in_it", mutates_args=())
def with_a_kernel_in_it(x: torch.Tensor) -> torch.Tensor:
    watching[-1].saw_triton(launch_of("inner", x))
    return x + 1


watching: list[Observer] = []


def test_a_kernel_within_an_operation_is_part_of_it():
    observer, x = Observer(CPU), torch.ones(4)
    watching.append(observer)
    with observer:
        result = with_a_kernel_in_it(x)
        observer.saw_triton(launch_of("outer", result))
    assert names(observer.recording(result)) == ["with_a_kernel_in_it", "outer"]
