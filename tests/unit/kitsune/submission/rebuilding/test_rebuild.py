"""What a measuring process gets from an archive: a workload that trains, wherever and however it is run."""

import copy

import pytest
import torch

from kitsune.errors import ArchiveError
from kitsune.submission.exporting.export import to_archive
from kitsune.submission.format.archive import Archive
from kitsune.submission.format.blocks import Node, walk
from kitsune.submission.format.ops import DROPOUT
from kitsune.submission.rebuilding.rebuild import RebuiltModel, rebuild
from kitsune.workload import Workload, call_model, loss_of
from tests.unit.kitsune.submission.hostile import node, put, valid
from tests.unit.kitsune.submission.steps import archive_of, make


def losses(workload: Workload, steps: int = 8, seed: int | None = 0) -> list[float]:
    x, y = workload.batch
    found = []
    for _ in range(steps):
        if seed is not None:
            torch.manual_seed(seed)
        workload.optimizer.zero_grad()
        loss = loss_of(call_model(workload.model, x), workload.loss_fn, y)
        loss.backward()
        workload.optimizer.step()
        found.append(loss.item())
    return found


@pytest.mark.parametrize("name", ["resnet", "llama", "graph", "towers", "own_loss"])
def test_rebuilt_workload_learns_its_batch(name):
    found = losses(rebuild(archive_of(name)))
    assert all(loss == loss for loss in found)
    assert found[-1] < found[0]


def test_same_seed_same_workload_and_random_state_is_left_alone():
    archive = archive_of("resnet")
    torch.manual_seed(5)
    state = torch.get_rng_state()
    one, two, other = rebuild(archive, seed=1), rebuild(archive, seed=1), rebuild(archive, seed=2)
    assert torch.equal(torch.get_rng_state(), state)
    assert losses(one, 2) == losses(two, 2)
    assert losses(other, 1) != losses(rebuild(archive, seed=1), 1)


def test_x_and_y_have_the_structure_of_the_original():
    archive = archive_of("towers")
    x, y = rebuild(archive).batch
    assert x.keys() == {"features", "scale", "flip"}
    assert x["flip"] is True
    assert x["features"]["right"][0].shape == (4, 4)
    assert y["weight"].shape == (4,)


def test_statistics_of_weights_are_those_of_the_original():
    workload, archive = make("vit"), archive_of("vit")
    rebuilt = rebuild(archive)
    index = next(i for i, entry in enumerate(archive.document.tensors) if "patch.weight" in entry.names)
    twin = getattr(rebuilt.model.graph, f"t{index}")
    original = workload.model.patch.weight
    assert not torch.equal(twin, original)
    assert abs(twin.std() - original.std()) < 0.2 * original.std()


@pytest.mark.parametrize("name", ["mlp", "encoder", "lstm", "vit"])
def test_without_randomness_every_dropout_has_p_zero(name):
    archive = archive_of(name)
    assert any(part.op in DROPOUT for part in walk(archive.document.forward) if isinstance(part, Node))
    plain, quiet = rebuild(archive), rebuild(archive, randomness=False)
    x, _ = plain.batch
    with torch.no_grad():
        torch.manual_seed(0)
        first, quiet_first = call_model(plain.model, x), call_model(quiet.model, x)
        torch.manual_seed(1)
        assert not torch.equal(call_model(plain.model, x), first)
        assert torch.equal(call_model(quiet.model, x), quiet_first)


@pytest.mark.parametrize("name", ["resnet", "mixed", "towers", "lstm"])
def test_torch_compile_takes_the_rebuilt_step_whole(name):
    archive = archive_of(name)
    plain, compiled = rebuild(archive, randomness=False), rebuild(archive, randomness=False)

    def step_of(workload: Workload):
        return lambda x, y: loss_of(call_model(workload.model, x), workload.loss_fn, y)

    run = torch.compile(step_of(compiled), backend="eager", fullgraph=True)
    torch.manual_seed(3)
    expected = step_of(plain)(*plain.batch)
    torch.manual_seed(3)
    found = run(*compiled.batch)
    torch.testing.assert_close(found, expected)
    found.backward()
    expected.backward()
    for one, other in zip(compiled.model.parameters(), plain.model.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad)


def test_larger_batch_runs_where_the_batch_may_vary():
    workload = rebuild(archive_of("llama"))
    x, y = (torch.cat((part, part)) for part in workload.batch)
    one = loss_of(call_model(workload.model, workload.batch[0]), workload.loss_fn, workload.batch[1])
    two = loss_of(call_model(workload.model, x), workload.loss_fn, y)
    torch.testing.assert_close(one, two)


def test_deep_copy_is_independent():
    workload = rebuild(archive_of("mlp"))
    twin = copy.deepcopy(workload.model)
    losses(workload, 1)
    assert not any(
        torch.equal(one, other) for one, other in zip(twin.parameters(), workload.model.parameters(), strict=True)
    )


def test_training_mode_and_layout_are_kept():
    workload = make("resnet_channels_last")
    workload.model.eval()
    rebuilt = rebuild(to_archive(workload))
    assert not rebuilt.model.training
    assert rebuilt.batch[0].is_contiguous(memory_format=torch.channels_last)
    assert any(p.is_contiguous(memory_format=torch.channels_last) and p.dim() == 4 for p in rebuilt.model.parameters())


def test_no_name_of_the_archive_reaches_generated_code():
    rebuilt = rebuild(valid())
    assert isinstance(rebuilt.model, RebuiltModel)
    names = {node.name for node in rebuilt.model.graph.graph.nodes}
    assert all(name[:1] in "tnxo" for name in names)
    assert "w" not in rebuilt.model.graph.code.replace("with", "").split()


def test_operator_that_this_torch_lacks_is_an_archive_error():
    archive = Archive.from_bytes(node("aten.relu.Nothing", "%4"))
    with pytest.raises(ArchiveError, match=r"has no operator aten.relu.Nothing"):
        rebuild(archive)


def test_option_that_this_torch_lacks_is_an_archive_error():
    archive = Archive.from_bytes(put("optimizer", "groups", 0, "options", {"amsgrad": True}))
    with pytest.raises(ArchiveError, match="no option amsgrad"):
        rebuild(archive)
