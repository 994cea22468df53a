"""The fingerprint of a model: the same when its loss is not known, another one for another model."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from kitsune.submission.exporting.export import model_fingerprint_of, to_archive
from kitsune.submission.format.archive import Archive
from kitsune.workload import Workload
from tests.unit.kitsune.submission import hf_steps, layers
from tests.unit.kitsune.submission.hostile import edited, put, valid
from tests.unit.kitsune.submission.steps import (
    DEAR,
    STEPS,
    adamw,
    archive_of,
    make,
    mlp,
    named,
    some_ids,
    some_images,
    some_labels,
)

assert hf_steps.HF_STEPS.keys() <= STEPS.keys()


def asked(workload: Workload) -> str:
    """What a training script asks by."""
    return model_fingerprint_of(workload.model, workload.optimizer, workload.batch[0])


@pytest.mark.parametrize("name", named())
def test_asked_without_the_loss_it_is_that_of_the_archive(name):
    assert asked(make(name, seed=7)) == archive_of(name).model_fingerprint


@pytest.mark.parametrize("names", [STEPS.keys() - DEAR, pytest.param(STEPS.keys(), marks=pytest.mark.minutes)], ids=len)
def test_models_differ(names):
    assert len({archive_of(name).model_fingerprint for name in names}) == len(names)


def test_it_is_no_fingerprint_of_a_step():
    names = STEPS.keys() - DEAR
    assert not {archive_of(n).fingerprint for n in names} & {archive_of(n).model_fingerprint for n in names}


def square(out, y):
    return (out - F.one_hot(y, 5)).pow(2).mean()


class WeightedLoss(nn.Module):
    """A loss with a buffer and a mask of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("weight", torch.rand(5))
        self.register_buffer("large", torch.rand(200, 200))

    def forward(self, out, y):
        return F.cross_entropy(out, y["target"], weight=self.weight) + self.large[y["target"]].mean()


@pytest.mark.parametrize(
    ("loss_fn", "y"),
    [
        (F.cross_entropy, some_labels()),
        (square, some_labels()),
        (WeightedLoss(), {"target": some_labels()}),
        (lambda out, y: F.cross_entropy(out, y[0]) + y[1].mean(), (some_labels(), torch.rand(4, 3))),
        (lambda out, y: out.exp().mean() + F.cross_entropy(out.flip(0), y), some_labels()),
    ],
)
def test_any_loss_gives_the_same(loss_fn, y):
    model = layers.ResNet()
    workload = Workload(model, loss_fn, adamw(model), (some_images(16), y))
    assert to_archive(workload).model_fingerprint == archive_of("resnet").model_fingerprint


def test_a_penalty_on_parameters_is_the_losses_own():
    model = layers.LeNet()

    def loss(out, y):
        return F.cross_entropy(out, y) + 1e-3 * sum(parameter.abs().sum() for parameter in model.parameters())

    workload = Workload(model, loss, adamw(model), (some_images(28, 1), some_labels()))
    assert to_archive(workload).model_fingerprint == archive_of("lenet").model_fingerprint


def test_an_output_that_the_loss_leaves_unread_is_part_of_the_model():
    model = layers.Inception()

    def loss(out, y):
        return F.cross_entropy(out["logits"], y)

    workload = Workload(model, loss, adamw(model), (some_images(12), some_labels()))
    assert to_archive(workload).model_fingerprint == asked(workload) == archive_of("inception").model_fingerprint


def changed(change) -> str:
    workload = mlp()
    return asked(change(workload) or workload)


def test_another_width_dropout_mode_dtype_or_optimizer_is_another_model():
    found = [
        changed(lambda w: None),
        asked(mlp(width=17)),
        asked(mlp(p=0.2)),
        changed(lambda w: w.model.eval() and None),
        changed(lambda w: Workload(w.model.double(), None, w.optimizer, (w.batch[0].double(), None))),
        changed(lambda w: Workload(w.model, None, adamw(w.model), w.batch)),
        changed(lambda w: Workload(w.model, None, torch.optim.SGD(w.model.parameters(), lr=0.1), w.batch)),
        changed(lambda w: w.model.requires_grad_(True).first.requires_grad_(False) and None),
        changed(lambda w: Workload(w.model, None, w.optimizer, ({"x": w.batch[0]}, None))),
    ]
    assert len(set(found)) == len(found)


def test_weights_batch_size_and_learning_rate_do_not_matter():
    base = asked(mlp())
    torch.manual_seed(9)
    assert asked(mlp(batch=7)) == base
    workload = mlp()
    workload.optimizer.param_groups[0]["lr"] = 0.3
    assert asked(workload) == base


def test_one_positional_argument_is_a_tuple_of_one():
    workload = mlp()
    assert model_fingerprint_of(workload.model, workload.optimizer, (workload.batch[0],)) == asked(workload)


def test_a_model_that_returns_its_loss_is_asked_for_with_its_labels():
    ids = some_ids()
    workload = make("llama_hf")
    assert model_fingerprint_of(workload.model, workload.optimizer, {"input_ids": ids, "labels": ids}) == (
        archive_of("llama_hf").model_fingerprint
    )
    without = model_fingerprint_of(workload.model, workload.optimizer, {"input_ids": ids})
    assert without != archive_of("llama_hf").model_fingerprint


# Archives made by hand -----------------------------------------------------------------------------------------------

SAME = {
    "the loss": put("loss", "nodes", 0, "op", "aten.mse_loss.default"),
    "the nesting of y": put("y", {"list": [{"leaf": 1}]}),
    "the dtype of y": put("inputs", 1, "dtype", "int32"),
    "names": put("tensors", 0, "names", ["other"]),
    "the learning rate": put("optimizer", "groups", 0, "options", "lr", 0.3),
    "x as a tuple": edited(lambda d: d.update(x={"tuple": [d["x"]]})),
}
OTHER = {
    "a width": put("tensors", 0, "shape", [5, 4]),
    "an operator": put("forward", "nodes", 0, "nodes", 0, "op", "aten.addmm.default"),
    "an argument": put("forward", "nodes", 2, "kwargs", {"copy": False}),
    "what an operator reads": put("forward", "nodes", 2, "args", 0, "%2"),
    "the mode": put("training", False),
    "the optimizer": put("optimizer", "name", "Adam"),
    "a fixed batch": edited(
        lambda d: (d["inputs"][0].update(shape=[8, 4]), d["inputs"][1].update(shape=[8]), d.update(sizes={}))
    ),
}


@pytest.mark.parametrize("name", SAME)
def test_it_does_not_see(name):
    assert Archive.from_bytes(SAME[name]).model_fingerprint == valid().model_fingerprint


@pytest.mark.parametrize("name", OTHER)
def test_it_sees(name):
    assert Archive.from_bytes(OTHER[name]).model_fingerprint != valid().model_fingerprint
