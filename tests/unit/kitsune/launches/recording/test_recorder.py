import re

import pytest
import torch
from torch import nn
from torch._higher_order_ops.map import map as map_each
from torch.fx.experimental.proxy_tensor import make_fx
from torch.multiprocessing.reductions import StorageWeakRef

import kitsune
import tuner
from kitsune.device.backend import NOT_THE_USERS, user_line
from kitsune.launches.execution.issue import in_recorded_order
from kitsune.launches.model.recording import places_of
from kitsune.launches.recording.recorder import HIDDEN_WRITES, Observer, record
from kitsune.launches.recording.triton_adapter import TritonLaunch
from tests.unit.kitsune.launches.steps import CPU, adamw, names, recorded, warmed


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
    seen = []
    for layer in step.model:
        layer.register_forward_hook(lambda *given: seen.append(StorageWeakRef(given[-1].untyped_storage())))
    found = record(step, CPU)
    assert len(seen) == 4
    assert all(storage.expired() for storage in seen)
    returned = {tensor.untyped_storage()._cdata for tensor in (found.result[0], *found.result[1])}
    assert not returned & {storage._cdata for storage in found.recording.held.values()}


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


def test_an_operation_that_only_gathers_statistics_writes_them():
    x, mean, variance = torch.randn(8, 4), torch.zeros(4), torch.ones(4)
    recording = recorded(lambda: torch.batch_norm_update_stats(x, mean, variance, 0.1)[0])
    (launch,) = recording.graph.launches
    written = {recording.held[n].data_ptr() for n in numbers(launch.writes) if n in recording.held}
    assert written == {mean.data_ptr(), variance.data_ptr()}


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


@pytest.mark.parametrize(("layer", "its_backward"), [(nn.SiLU(), "silu_backward"), (nn.Mish(), "mish_backward")])
def test_an_operation_that_has_a_kernel_is_recorded_as_it_is_though_it_could_decompose(layer, its_backward):
    x = torch.randn(4, 8, requires_grad=True)
    recording = recorded(lambda: torch.autograd.grad(layer(x).sum(), x)[0])
    assert names(recording)[-1] == its_backward


def test_random_numbers_are_told():
    recording = recorded(lambda: torch.native_dropout(torch.ones(4), 0.5, True)[0] + torch.rand(4))
    assert [launch.name for launch in recording.graph.launches if launch.draws] == ["native_dropout", "rand"]


@torch.library.custom_op("kitsune_test::noised", mutates_args=())
def noised(x: torch.Tensor) -> torch.Tensor:
    return x + torch.rand_like(x)


def test_random_numbers_of_an_operation_of_the_users_are_seen_as_it_draws_them():
    x = torch.ones(4)
    recording = recorded(lambda: noised(x) + reading(x, [x]))
    assert [(launch.name, launch.draws) for launch in recording.graph.launches[:2]] == [
        ("noised", True),
        ("reading", False),
    ]


def test_a_generator_of_the_users_own_goes_on_from_where_it_was():
    own = torch.Generator().manual_seed(3)
    drawn = [torch.rand(2, generator=own) for _ in range(3)]
    own.manual_seed(3)
    again = in_recorded_order(recorded(lambda: torch.rand(2, generator=own)))
    assert torch.equal(again(), drawn[1])


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


def resized_by_out(x):
    return torch.mul(x, 2, out=torch.empty(0))


def conjugated(x):
    return torch.complex(x, x).conj() * 2


def negative(x):
    return torch._neg_view(x) * 2


@torch.library.custom_op("kitsune_test::lying", mutates_args=())
def lied(activation: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    activation.mul_(2)
    return x + 1


def lying(x):
    """About memory of the step's own."""
    return lied(x * 3, x)


@torch.library.custom_op("kitsune_test::observe", mutates_args=())
def observe(x: torch.Tensor) -> None:
    """Of what it does, as counting on the host, its schema says nothing."""


def mapped(x):
    return map_each(torch.sin, x)


def unwritten(x):
    return x * 2, torch.empty(0, 4)


def traced(x):
    """Somebody traces within the step, as flex_attention does for its backward."""
    make_fx(torch.sin, tracing_mode="fake")(x)
    return map_each(torch.cos, x)


def seeded(x):
    torch.manual_seed(1)
    return torch.rand_like(x)


def leaves_a_seed(x):
    drawn = torch.rand_like(x)
    torch.manual_seed(1)
    return drawn


def draws_again(x):
    before = torch.get_rng_state()
    drawn = torch.rand_like(x)
    torch.set_rng_state(before)
    return drawn - torch.rand_like(x)


def draws_again_from_its_own(x):
    own = torch.Generator()
    drawn = torch.rand(3, generator=own)
    own.manual_seed(own.initial_seed())
    return drawn - torch.rand(3, generator=own) + x


def test_a_check_on_the_device_is_issued_again():
    fine = torch.ones((), dtype=torch.bool)
    again = in_recorded_order(recorded(lambda: (torch._assert_async(fine), fine.clone())[1]))
    again()
    fine.fill_(False)
    with pytest.raises(RuntimeError, match="nonzero"):
        again()


@torch.library.custom_op("kitsune_test::reading", mutates_args=())
def reading(x: torch.Tensor, others: list[torch.Tensor]) -> torch.Tensor:
    return x + others[0]


@torch.library.custom_op("kitsune_test::writing", mutates_args=("x",))
def writing(x: torch.Tensor, same: torch.Tensor) -> None:
    x.add_(same)


def test_operations_of_the_users_that_keep_to_their_schemas_are_followed():
    x = torch.full((3,), torch.nan)

    def step():
        hidden = reading(x.expand(4, 3), [x, x * 2])
        writing(hidden, hidden)
        return hidden

    assert names(recorded(step)) == ["mul", "reading", "writing"]


def test_a_copy_for_which_there_is_no_memory_does_not_end_the_step(monkeypatch):
    def none(*_):
        raise torch.OutOfMemoryError

    monkeypatch.setattr("kitsune.launches.recording.recorder.copies_read", none)
    x = torch.ones(3)
    found = record(lambda: x.add_(1), CPU)
    assert "no memory" in found.refusal
    assert torch.equal(x, torch.full((3,), 2.0))


kept: dict[str, torch.Tensor] = {}


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (by_item, r"_local_scalar_dense returns depends on the data \(.*test_recorder.py:\d+\)"),
        (by_shape, "depends on the data"),
        (out_of_sight, "reads memory that no recorded launch has written"),
        (resized, "resize_ changes which memory a tensor refers to"),
        (resized_by_out, r"mul changes the size of a tensor that it writes \(.*test_recorder.py:\d+\)"),
        (sparse, r"a sparse tensor \(torch.sparse_coo\) cannot be followed"),
        (conjugated, r"a conjugated view \(resolve_conj\(\) .*\) cannot be followed"),
        (negative, r"a view with its negative bit set \(resolve_neg\(\) .*\) cannot be followed"),
        (lying, "kitsune_test::lying writes activation, which its schema says it only reads"),
        (observe, r"observe returns no tensor and declares no writes, so its effect is unknown \(.*\.py:\d+\)"),
        (mapped, r"what map_impl runs cannot be followed \(.*\.py:\d+\)"),
        (traced, "what map_impl runs cannot be followed"),
        (unwritten, "the step returns memory that no recorded launch has written"),
        (seeded, r"sets a random number generator.* \(.*test_recorder.py:\d+\)"),
        (leaves_a_seed, "sets a random number generator"),
        (draws_again, "sets a random number generator"),
        (draws_again_from_its_own, "sets a random number generator"),
    ],
)
def test_what_cannot_be_issued_again_is_refused_after_the_step_has_run(function, words):
    x = torch.ones(3)
    found = record(lambda: (function(x), x.add_(1)), CPU)
    assert found.recording is None
    assert re.search(words, found.refusal)
    assert torch.equal(x, torch.full((3,), 2.0))


def keeps_an_activation(x):
    kept["hidden"] = x.detach() * 2
    return kept["hidden"].sum()


def keeps_what_it_returns(x):
    loss = x.sum()
    kept["loss"] = loss.detach()
    return loss


def keeps_filled_memory(x):
    kept["copy"] = torch.empty(3).copy_(x)
    return x.sum()


@pytest.mark.parametrize(
    ("function", "made"),
    [(keeps_an_activation, "mul"), (keeps_what_it_returns, "sum"), (keeps_filled_memory, "empty")],
)
def test_a_step_that_keeps_a_tensor_that_it_made_is_refused(function, made):
    """Replays would put it elsewhere, and what was kept would be that of the recorded step for ever."""
    x = torch.ones(3)
    found = record(lambda: function(x), CPU)
    assert re.search(
        rf"the step keeps a tensor that it made: what {made} \(.*test_recorder.py:\d+\) ret", found.refusal
    )
    kept.clear()


def test_a_step_that_puts_a_new_tensor_in_the_place_of_its_state_is_refused():
    kept["average"] = torch.zeros(3)
    x = torch.ones(3)

    def step():
        kept["average"] = kept["average"] * 0.9 + x

    words = r"mul \(.*test_recorder.py:\d+\) reads a tensor that the step releases, and that existed before it"
    assert re.search(words, record(step, CPU).refusal)
    kept.clear()


def test_state_that_was_there_before_may_be_kept_and_written():
    kept["average"] = torch.zeros(3)
    x = torch.ones(3)
    recorded(lambda: kept["average"].mul_(0.9).add_(x).sum())
    kept.clear()


def test_what_only_waits_for_the_garbage_collector_is_not_kept():
    def step():
        cycle = [x * 2]
        cycle.append(cycle)
        return cycle[0].sum()

    x = torch.ones(3)
    recorded(step)


def test_gradients_and_casts_that_autocast_remembers_are_not_kept():
    layer, x = nn.Linear(4, 4), torch.randn(2, 4)

    def step():
        layer.zero_grad()
        loss = layer(x).float().sum()
        loss.backward()
        return loss.detach()

    with torch.autocast("cpu", dtype=torch.bfloat16):
        step()
        torch.clear_autocast_cache()
        recorded(step)


@pytest.mark.parametrize("empty", [lambda: torch.empty(0, 4), lambda: torch.zeros(2, 4)[:0]])
def test_reading_no_bytes_of_memory_is_no_read(empty):
    x = torch.randn(3, 4)
    recording = recorded(lambda: torch.cat([empty(), x * 2]))
    assert torch.equal(in_recorded_order(recording)(), x * 2)


def test_an_empty_tensor_from_before_stays_where_it_is():
    x, none = torch.randn(3, 4), torch.empty(0, 4)
    recording = recorded(lambda: (torch.cat([none, x]), none))
    assert none.untyped_storage()._cdata in {storage._cdata for storage in recording.held.values()}


def test_memory_of_which_no_bytes_are_read_first_may_be_filled_later():
    x = torch.randn(3, 4)

    def step():
        later = torch.empty(3, 4)
        first = torch.cat([later[:0], x])
        return first + later.copy_(x)

    assert torch.equal(in_recorded_order(recorded(step))(), x + x)


@pytest.mark.parametrize("package", [kitsune, torch])
def test_our_own_sources_are_no_lines_of_the_users(package):
    assert package.__file__.startswith(NOT_THE_USERS)


@pytest.mark.parametrize(
    ("file", "found"),
    [("/home/ada/model.py", ("/home/ada/model.py", 1)), (tuner.__file__, None), (torch.__file__, None)],
)
def test_what_leads_to_the_tuner_is_no_line_of_the_users(file, found):
    """As with a model of torch's own layers that the command line has measured."""

    source = {"ask": user_line}
    exec(compile("def tuned(call): return call()", tuner.__file__, "exec"), source)
    exec(compile("def step(): return ask()", file, "exec"), source)
    assert source["tuned"](source["step"]) == found


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


@torch.library.custom_op("kitsune_test::failing", mutates_args=())
def failing(x: torch.Tensor) -> torch.Tensor:
    raise ConnectionError


def test_kernels_behind_an_operation_that_has_failed_are_seen():
    observer, x = Observer(CPU), torch.ones(4)
    with observer:
        with pytest.raises(ConnectionError):
            failing(x)
        observer.saw_triton(launch_of("outer", x))
    assert names(observer.recording(x)) == ["outer"]


watching: list[Observer] = []


def test_a_kernel_within_an_operation_is_part_of_it():
    observer, x = Observer(CPU), torch.ones(4)
    watching.append(observer)
    with observer:
        result = with_a_kernel_in_it(x)
        observer.saw_triton(launch_of("outer", result))
    assert names(observer.recording(result)) == ["with_a_kernel_in_it", "outer"]
