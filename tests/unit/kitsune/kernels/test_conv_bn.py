"""Folding a BatchNorm into the convolution before it: every kind of convolution, whole models, and what is refused."""

import copy

import pytest
import torch
from torch import nn

from kitsune.errors import SettingsError
from kitsune.kernels.conv_bn import fold_all, fold_conv_bn
from tuner.zoo.resnet import resnet18, resnet50


def settled(module, seed=0):
    """The module in evaluation mode, with statistics and weights as after some training."""
    torch.manual_seed(seed)
    for norm in module.modules():
        if isinstance(norm, nn.modules.batchnorm._BatchNorm):
            norm.running_mean.normal_()
            norm.running_var.uniform_(0.5, 2)
            if norm.affine:
                norm.weight.data.normal_(1, 0.2)
                norm.bias.data.normal_()
    return module.eval()


def norms_in(model):
    return [module for module in model.modules() if isinstance(module, nn.modules.batchnorm._BatchNorm)]


class Named(nn.Module):
    """As torchvision writes it: modules by name, and their order in the forward."""

    def __init__(self):
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)
        self.alias = nn.ModuleList([self.conv1, self.bn1])

    def forward(self, x):
        return torch.relu(self.bn1(self.conv1(x)))


class Twice(Named):
    """What the convolution gives is needed besides."""

    def forward(self, x):
        y = self.conv1(x)
        return self.bn1(y) + y


class Again(Named):
    """The convolution is called without the BatchNorm, too."""

    def forward(self, x):
        return self.bn1(self.conv1(x)) + self.conv1(x)


class Penalised(Named):
    """The weight is needed as it is."""

    def forward(self, x):
        return self.bn1(self.conv1(x)) + self.conv1.weight.sum()


class Branching(Named):
    def forward(self, x):
        return self.bn1(self.conv1(x)) if x.sum() > 0 else x


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(
    ("convolution", "batch_norm", "side"),
    [
        (nn.Conv1d, nn.BatchNorm1d, (9,)),
        (nn.Conv2d, nn.BatchNorm2d, (9, 8)),
        (nn.Conv3d, nn.BatchNorm3d, (5, 4, 6)),
        (nn.ConvTranspose1d, nn.BatchNorm1d, (9,)),
        (nn.ConvTranspose2d, nn.BatchNorm2d, (4, 5)),
        (nn.ConvTranspose3d, nn.BatchNorm3d, (3, 4, 2)),
    ],
)
@pytest.mark.parametrize("groups", [1, 2])
def test_one_convolution_computes_what_both_did(convolution, batch_norm, side, groups, bias):
    pair = settled(nn.Sequential(convolution(4, 6, 3, groups=groups, bias=bias), batch_norm(6)))
    before = copy.deepcopy(pair.state_dict())
    x = torch.randn(2, 4, *side)
    folded = fold_conv_bn(*pair)
    assert type(folded) is convolution and not folded.training
    torch.testing.assert_close(folded(x), pair(x), rtol=1e-5, atol=1e-5)
    assert all(torch.equal(before[name], now) for name, now in pair.state_dict().items())


def test_strides_padding_and_dilation_stay():
    convolution = nn.Conv2d(3, 4, 3, stride=2, padding=2, dilation=2, padding_mode="reflect")
    pair = settled(nn.Sequential(convolution, nn.BatchNorm2d(4, affine=False)))
    x = torch.randn(2, 3, 9, 9)
    torch.testing.assert_close(fold_conv_bn(*pair)(x), pair(x), rtol=1e-5, atol=1e-5)


def test_weights_are_rounded_once_to_the_dtype_of_the_convolution():
    pair = settled(nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)))
    convolution, norm = copy.deepcopy(pair[0]).bfloat16(), pair[1]
    folded = fold_conv_bn(convolution, norm)
    exact = fold_conv_bn(copy.deepcopy(convolution).double(), norm)
    for ours, theirs in ((folded.weight, exact.weight), (folded.bias, exact.bias)):
        assert ours.dtype == torch.bfloat16 and theirs.dtype == torch.float64
        torch.testing.assert_close(ours.double(), theirs, rtol=2**-8, atol=0)


def test_frozen_weights_stay_frozen_and_channels_last():
    convolution = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last).requires_grad_(False)
    folded = fold_conv_bn(convolution, nn.BatchNorm2d(4).eval())
    assert not folded.weight.requires_grad and not folded.bias.requires_grad
    assert folded.weight.is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize(
    ("convolution", "batch_norm", "problem"),
    [
        (nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), "training mode"),
        (nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4, track_running_stats=False).eval(), "without running statistics"),
        (nn.Conv2d(3, 4, 3), nn.BatchNorm2d(5).eval(), "of 5 channels"),
        (nn.utils.parametrizations.weight_norm(nn.Conv2d(3, 4, 3)), nn.BatchNorm2d(4).eval(), "computed from others"),
    ],
)
def test_what_cannot_be_folded_is_refused(convolution, batch_norm, problem):
    with pytest.raises(SettingsError, match=problem):
        fold_conv_bn(convolution, batch_norm)


@pytest.mark.parametrize(
    ("model", "norms"),
    [(lambda: resnet18(8, (1, 1, 1, 1)), 12), (lambda: resnet50(8, (1, 2, 1, 1), 10), 20), (Named, 1)],
    ids=["resnet18", "resnet50", "named"],
)
def test_every_batch_norm_of_a_resnet_is_folded(model, norms):
    model = settled(model())
    before = copy.deepcopy(model.state_dict())
    x = torch.randn(2, 3, 32, 32)
    folded = fold_all(model)
    assert type(folded) is type(model)
    assert len(norms_in(model)) == norms and not norms_in(folded)
    with torch.no_grad():
        exact = model(x)
        torch.testing.assert_close(folded(x), exact, rtol=1e-5, atol=1e-5 * exact.abs().max().item())
    assert all(torch.equal(before[name], now) for name, now in model.state_dict().items())


@pytest.mark.parametrize("kind", [Twice, Again, Penalised])
def test_what_is_needed_unfolded_stays(kind):
    model = settled(kind())
    folded, x = fold_all(model), torch.randn(2, 3, 5, 5)
    assert len(norms_in(folded)) == 1
    assert torch.equal(folded(x), model(x))


class Watched(nn.Module):
    """Reads a statistic of its batch norm."""

    def __init__(self):
        super().__init__()
        self.convolution, self.norm = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)

    def forward(self, x):
        return self.norm(self.convolution(x)) * self.norm.running_mean.view(1, -1, 1, 1)


def test_a_batch_norm_whose_statistics_are_read_stays():
    model, x = settled(Watched()), torch.randn(2, 3, 5, 5)
    assert torch.equal(fold_all(model)(x), model(x))


@pytest.mark.parametrize("at", [0, 1])
@pytest.mark.parametrize("kind", ["register_forward_hook", "register_forward_pre_hook"])
def test_what_has_hooks_stays(at, kind):
    model = settled(nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)))
    double = (lambda _, __, y: y * 2) if kind == "register_forward_hook" else (lambda _, x: (x[0] * 2,))
    getattr(model[at], kind)(double)
    x = torch.randn(2, 3, 5, 5)
    assert torch.equal(fold_all(model)(x), model(x))


def test_a_model_with_control_flow_is_refused_with_the_reason():
    with pytest.raises(SettingsError, match=r"cannot be traced: .*control flow"):
        fold_all(settled(Branching()))


def test_a_model_in_training_mode_is_refused():
    with pytest.raises(SettingsError, match="call eval"):
        fold_all(Named())
