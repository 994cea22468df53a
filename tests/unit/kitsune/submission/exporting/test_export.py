"""A live step and what its archive trains as: the same numbers to the bit, and no trace left on the user's objects."""

import copy
import functools
import json
import zipfile
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from kitsune.submission.exporting.export import export, to_archive
from kitsune.submission.format.archive import Archive
from kitsune.submission.rebuilding.rebuild import rebuild
from kitsune.workload import Workload, call_model, loss_of
from tests.unit.kitsune.submission.hf_steps import TRACED_OTHERWISE
from tests.unit.kitsune.submission.steps import FIXED, adamw, archive_of, make, named


def weights_of(workload: Workload) -> dict[str, torch.Tensor]:
    """Every tensor of the original under the name that an archive gives it."""
    found = {}
    parts = [("", workload.model)]
    if isinstance(workload.loss_fn, nn.Module):
        parts.append((":loss_fn.", workload.loss_fn))
    for prefix, part in parts:
        for name, tensor in (*part.named_parameters(remove_duplicate=False), *part.named_buffers()):
            found[prefix + name] = tensor
    return found


def load_weights(rebuilt: Workload, weights: dict[str, torch.Tensor]) -> None:
    """Copies tensors into a rebuilt workload by their index in the archive: t0, t1, ..."""
    modules = [part.graph for part in (rebuilt.model, rebuilt.loss_fn) if isinstance(part, nn.Module)]
    own = {key: value for module in modules for key, value in module.state_dict(keep_vars=True).items()}
    with torch.no_grad():
        for name, value in weights.items():
            own[name].copy_(value)


def step(workload: Workload, batch) -> torch.Tensor:
    torch.manual_seed(11)
    workload.optimizer.zero_grad()
    loss = loss_of(call_model(workload.model, batch[0]), workload.loss_fn, batch[1])
    loss.backward()
    workload.optimizer.step()
    return loss.detach()


@pytest.mark.parametrize("name", named())
def test_rebuilt_step_has_the_modules_loss_gradients_and_update(name):
    original = make(name)
    archive = archive_of(name)
    rebuilt = rebuild(archive)
    names = {name: f"t{index}" for index, entry in enumerate(archive.document.tensors) for name in entry.names}
    load_weights(rebuilt, {names[key]: value for key, value in weights_of(original).items() if key in names})
    graph = rebuilt.model.graph
    close = functools.partial(torch.testing.assert_close, rtol=0, atol=1e-6 if name in TRACED_OTHERWISE else 0)
    for _ in range(2):
        close(step(rebuilt, original.batch), step(original, original.batch))
        for key, parameter in original.model.named_parameters():
            twin = getattr(graph, names[key])
            assert (parameter.grad is None) == (twin.grad is None)
            if parameter.grad is not None:
                close(twin.grad, parameter.grad)
            if name not in TRACED_OTHERWISE:  # Adam turns a rounding error of a tiny gradient into a full step
                close(twin, parameter)
        for key, buffer in original.model.named_buffers():
            if key in names:
                close(getattr(graph, names[key]), buffer)


@pytest.mark.parametrize("name", named())
def test_archive_survives_its_bytes_and_is_small(name):
    archive = archive_of(name)
    data = archive.to_bytes()
    assert Archive.from_bytes(data) == archive
    assert Archive.from_bytes(data).fingerprint == archive.fingerprint
    assert len(data) < 30_000


@pytest.mark.parametrize("name", named())
def test_batch_may_vary_unless_the_model_fixes_it(name):
    sizes = archive_of(name).document.sizes
    assert bool(sizes) == (name not in FIXED)


def test_ties_and_frozen_parameters_are_kept():
    archive = archive_of("mixed")
    tied = [entry for entry in archive.document.tensors if len(entry.names) > 1]
    assert [entry.names for entry in tied] == [("first.weight", "tied.weight")]
    frozen = {name for entry in archive.document.tensors if not entry.requires_grad for name in entry.names}
    assert {"second.weight", "second.bias"} <= frozen
    assert "unused" in {name for entry in archive.document.tensors for name in entry.names}


def test_no_weight_or_batch_value_is_in_the_file(tmp_path: Path):
    workload = make("resnet")
    path = tmp_path / "step.ksn"
    fingerprint = export(workload.model, workload.loss_fn, workload.optimizer, workload.batch, path)
    assert fingerprint == Archive.load(path).fingerprint
    data = path.read_bytes()
    secrets = [tensor for tensor in (*workload.model.parameters(), *workload.batch) if len(tensor.unique()) > 2]
    assert len(secrets) > 5
    for tensor in secrets:
        assert tensor.detach().numpy().tobytes()[:64] not in data
    assert not blobs_in(path)


def blobs_in(path: Path) -> list[str]:
    """The names of the tensors whose values travel."""
    with zipfile.ZipFile(path) as zipped:
        entries = json.loads(zipped.read("graph.json"))["tensors"]
    return [name for entry in entries if "blob" in entry for name in entry["names"]]


class Learning(nn.Module):
    """Learns in many forms; only `mask` and `table` are as they were written."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(12, 5), nn.BatchNorm1d(5)
        self.frozen = nn.BatchNorm1d(5).eval()
        self.temperature = nn.Parameter(torch.tensor(0.0731))
        self.register_buffer("average", torch.randn(5))
        self.register_buffer("pointer", torch.tensor(770077))
        self.register_buffer("mask", torch.tensor([1.0, 0.0, 1.0, 1.0, 0.5]))
        self.register_buffer("table", torch.tensor([4, 2, 0, 1, 3]))

    def forward(self, x):
        x = self.frozen(self.norm(self.linear(x))) * self.mask * self.temperature
        with torch.no_grad():
            self.average.mul_(0.9).add_(x.detach().mean(0))
        self.pointer.view(1)[0:1].add_(1)
        return x[:, self.table]


@pytest.mark.parametrize("is_frozen", [False, True])
def test_what_is_learned_does_not_travel_and_the_rest_does(tmp_path: Path, is_frozen: bool):
    torch.manual_seed(0)
    model = Learning()
    for norm in (model.norm, model.frozen):
        norm.running_mean.normal_()
        norm.running_var.uniform_(0.5, 2.0)
    model.norm.train(not is_frozen)
    path = tmp_path / "step.ksn"
    batch = torch.randn(7, 12), torch.randint(5, (7,))
    export(model, F.cross_entropy, torch.optim.SGD(model.parameters(), lr=0.1), batch, path)
    assert sorted(blobs_in(path)) == ["mask", "table"]
    text = path.read_bytes().decode("latin-1") + str(Archive.load(path).document)
    learned = [*model.norm.running_var.tolist(), *model.average.tolist(), model.temperature.item(), 0.0731, 770077]
    assert not [value for value in learned if str(value) in text]
    rebuilt = rebuild(Archive.load(path))
    state = dict(rebuilt.model.named_buffers()).values()
    assert all(bool(buffer.isfinite().all()) for buffer in state if buffer.is_floating_point())


class Restless(nn.Module):
    """Changes its own attributes whenever it runs."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(12, 5), nn.BatchNorm1d(5)
        self.register_buffer("last", torch.zeros(5))
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        h = self.norm(self.linear(F.dropout(x, 0.5, self.training)))
        self.last = h.detach().mean(0)
        return h


def test_model_optimizer_and_random_state_are_left_as_they_were():
    torch.manual_seed(0)
    model = Restless()
    model.linear.train()
    model.norm.eval()
    optimizer = torch.optim.AdamW(model.parameters())
    x, y = torch.randn(4, 12), torch.randint(0, 5, (4,))
    F.cross_entropy(model(x), y).backward()
    optimizer.step()
    before = copy.deepcopy((model.state_dict(), optimizer.state_dict(), [p.grad for p in model.parameters()]))
    random_state, flags, last = torch.get_rng_state(), [m.training for m in model.modules()], model.last
    to_archive(Workload(model, F.cross_entropy, optimizer, (x, y)))
    after = (model.state_dict(), optimizer.state_dict(), [p.grad for p in model.parameters()])
    torch.testing.assert_close(after, before, rtol=0, atol=0)
    assert torch.equal(torch.get_rng_state(), random_state)
    assert [m.training for m in model.modules()] == flags
    assert model.calls == 1
    assert model.last is last
    assert type(model) is Restless


def test_lstm_keeps_its_own_weights():
    workload = make("lstm")
    to_archive(workload)
    lstm = workload.model.lstm
    assert all(
        weight is getattr(lstm, name) for weight, name in zip(lstm._flat_weights, lstm._flat_weights_names, strict=True)
    )
    step(workload, workload.batch)


def test_compiled_model_is_exported_as_what_it_wraps():
    workload = make("lenet")
    wrapped = torch.compile(workload.model, backend="eager")
    again = Workload(wrapped, workload.loss_fn, workload.optimizer, workload.batch)
    assert to_archive(again).fingerprint == archive_of("lenet").fingerprint


class OwnMultiheadAttention(nn.Module):
    """Named like torch's, and with a copy that is needed: a reshape would give it the memory of `z`."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        z = self.first(x)[:, :2]
        copy = z.contiguous().view(len(x), 16)
        copy.mul_(2)
        return self.last(copy.view(len(x), 2, 8) + z).mean((1, 2))


def test_a_copy_of_the_users_stays_a_copy():
    model = OwnMultiheadAttention()
    batch = torch.randn(3, 4, 8), torch.zeros(3)
    assert to_archive(Workload(model, nn.functional.mse_loss, adamw(model), batch))
