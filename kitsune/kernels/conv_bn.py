"""A convolution and the BatchNorm behind it in, one convolution for evaluation out. Plain torch: nothing to launch.

With fixed statistics a BatchNorm is an affine map of each channel, which weight and bias of the convolution take in.
"""

import copy
from collections import Counter
from typing import cast

import torch
from torch import fx, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd

from kitsune.errors import SURPRISES, SettingsError
from kitsune.kernels.dtypes import wide_of

#: Their subclasses may compute something else, and tracing looks into those that are not torch's own.
CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


def fold_conv_bn(convolution: _ConvNd, batch_norm: _BatchNorm) -> _ConvNd:
    """A new convolution, in evaluation mode, that gives what `batch_norm` makes of the output of `convolution`.

    Of any number of dimensions, transposed or not, with groups, with or without bias. It is folded in fp32 (fp64 for
    fp64) and rounded once, to the dtype of the convolution. Raises SettingsError for a BatchNorm in training mode,
    without running statistics or of another number of channels, and for a weight that is computed from others.
    """
    mean, variance = fixed_statistics(convolution, batch_norm)
    wide = wide_of(convolution.weight)
    with torch.no_grad():
        scale = torch.rsqrt(variance.to(wide) + batch_norm.eps)
        shift = -mean.to(wide) if convolution.bias is None else convolution.bias.to(wide) - mean.to(wide)
        if batch_norm.affine:
            scale = scale * batch_norm.weight.to(wide)
        shift = shift * scale
        if batch_norm.affine:
            shift = shift + batch_norm.bias.to(wide)
        return with_weights(convolution, scaled(convolution, scale), shift)


def fold_all(model: nn.Module) -> nn.Module:
    """A copy of a model in evaluation mode in which every BatchNorm that directly follows a convolution is folded.

    Symbolic tracing finds the pairs: both are called once, only the BatchNorm takes the convolution's output, nobody
    reads a parameter or buffer of theirs, and neither has a hook. In the copy it is an Identity. Raises SettingsError
    for a model that cannot be traced, with the reason (mostly control flow that depends on the input), and where
    `fold_conv_bn` does.
    """
    folded = copy.deepcopy(model)
    for before, after in pairs_of(copy.deepcopy(model)):  # a forward may leave traces in its module
        convolution = cast(_ConvNd, folded.get_submodule(before))
        batch_norm = cast(_BatchNorm, folded.get_submodule(after))
        replace(folded, convolution, fold_conv_bn(convolution, batch_norm))
        replace(folded, batch_norm, nn.Identity())
    return folded


def fixed_statistics(convolution: _ConvNd, batch_norm: _BatchNorm) -> tuple[torch.Tensor, torch.Tensor]:
    """The running mean and variance. Raises SettingsError where they, or the convolution, do not allow folding."""
    if batch_norm.training:
        raise SettingsError("a BatchNorm in training mode cannot be folded: its statistics change; call eval() first")
    if batch_norm.running_mean is None or batch_norm.running_var is None:
        raise SettingsError(
            "a BatchNorm without running statistics cannot be folded: it takes those of each batch; "
            "make it with track_running_stats=True"
        )
    if batch_norm.num_features != convolution.out_channels:
        raise SettingsError(
            f"a BatchNorm of {batch_norm.num_features} channels does not follow a convolution that gives "
            f"{convolution.out_channels}"
        )
    if not isinstance(convolution.weight, nn.Parameter):
        raise SettingsError(
            "a convolution whose weight is computed from others cannot take in a BatchNorm; "
            "remove the parametrization or weight norm first"
        )
    return batch_norm.running_mean, batch_norm.running_var


def scaled(convolution: _ConvNd, scale: torch.Tensor) -> torch.Tensor:
    """The weight with every output channel times its element of `scale`."""
    weight = convolution.weight.to(scale.dtype)
    ones = [1] * (weight.dim() - 2)
    if not convolution.transposed:
        return weight * scale.view(-1, 1, *ones)
    # (in, out / groups, *): a group is some of the inputs, with outputs of its own.
    groups = weight.unflatten(0, (convolution.groups, -1))
    return (groups * scale.view(convolution.groups, 1, -1, *ones)).flatten(0, 1)


def with_weights(convolution: _ConvNd, weight: torch.Tensor, bias: torch.Tensor) -> _ConvNd:
    """A copy with another weight and bias, in the same dtype."""
    own = convolution.weight
    changed = copy.deepcopy(convolution).eval()
    changed.weight = nn.Parameter(weight.to(own.dtype), requires_grad=own.requires_grad)
    changed.bias = nn.Parameter(bias.to(own.dtype), requires_grad=own.requires_grad)
    return changed


def pairs_of(model: nn.Module) -> list[tuple[str, str]]:
    """The names of every convolution and of the BatchNorm that directly follows it."""
    try:
        nodes = Tracer().trace(model).nodes
    except (*SURPRISES, NameError) as error:
        raise SettingsError(
            f"which BatchNorm follows which convolution is not known, as the model cannot be traced: {error}; "
            "fold them one by one with fold_conv_bn"
        ) from error
    uses = Counter(owner_of(node) for node in nodes)
    pairs = [(node.all_input_nodes[0], node) for node in nodes if len(node.all_input_nodes) == 1]
    return [
        (str(before.target), str(after.target))
        for before, after in pairs
        if is_call(model, before, CONVOLUTIONS) and is_call(model, after, BATCH_NORMS)
        if len(before.users) == uses[before.target] == uses[after.target] == 1
        if not (has_hooks(model, before) or has_hooks(model, after))
    ]


class Tracer(fx.Tracer):
    """Sees who reads buffers, too."""

    proxy_buffer_attributes = True


def has_hooks(model: nn.Module, node: fx.Node) -> bool:
    """Whether the module that the node calls has forward hooks, which may change what it is given and gives."""
    module = model.get_submodule(str(node.target))
    return bool(module._forward_hooks or module._forward_pre_hooks)


def owner_of(node: fx.Node) -> str:
    """The name of the module that a node calls, or a tensor of which it takes; otherwise nothing."""
    if node.op == "call_module":
        return str(node.target)
    return str(node.target).rpartition(".")[0] if node.op == "get_attr" else ""


def is_call(model: nn.Module, node: fx.Node, kinds: tuple[type[nn.Module], ...]) -> bool:
    return node.op == "call_module" and type(model.get_submodule(str(node.target))) in kinds


def replace(model: nn.Module, old: nn.Module, new: nn.Module) -> None:
    """Puts a module in the place of another, under all of its names."""
    for parent in list(model.modules()):
        for name, child in list(parent._modules.items()):
            if child is old:
                setattr(parent, name, new)
