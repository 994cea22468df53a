"""Collects the Facts of a workload, which the techniques need to know whether they apply."""

import shutil
from dataclasses import replace
from importlib.util import find_spec
from typing import Any

import torch
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.overrides import TorchFunctionMode

from kitsune.autograd.hooks import first_hook
from kitsune.device.backend import watch_syncs
from kitsune.open_masks import with_open_masks
from kitsune.techniques.recompute import BATCH_NORMS, repeated_blocks
from kitsune.techniques.technique import Facts
from kitsune.techniques.update import chosen_by_hand, implementations
from kitsune.update.adamw import why_no_kernel
from kitsune.update.optimizer_update import parameters_of
from kitsune.workload import Workload, call_model, loss_of, move_batch

EMBEDDINGS = (torch.nn.Embedding, torch.nn.EmbeddingBag)
NORMS = (torch.nn.LayerNorm, torch.nn.RMSNorm, torch.nn.GroupNorm)
CONVOLUTIONS = (torch.nn.Conv2d, torch.nn.ConvTranspose2d)


def facts_of(model: torch.nn.Module, optimizer: torch.optim.Optimizer, device: torch.device) -> Facts:
    """The facts that are known without running the model."""
    cuda = device.type == "cuda"
    return Facts(
        device=device.type,
        compute_capability=torch.cuda.get_device_capability(device) if cuda else (0, 0),
        compiler=missing_compiler(device),
        parameter_dtypes=frozenset(parameter.dtype for parameter in model.parameters()),
        convolutions=has_convolutions(model),
        wide_activations=has_wide_activations(model),
        open_masks=True,
        batch_norms=any(isinstance(module, BATCH_NORMS) for module in model.modules()),
        blocks=len(repeated_blocks(model)),
        hook=first_hook(model),
        distributed=is_distributed(model),
        optimizer=type(optimizer).__name__,
        optimizer_options=implementations(optimizer),
        optimizer_chosen=chosen_by_hand(optimizer),
        update_kernel=why_no_kernel(optimizer),
        tensor_rate=any(isinstance(group.get("lr"), torch.Tensor) for group in optimizer.param_groups),
        others_parameters=len(others_parameters(model, optimizer)),
        sparse_gradients=any(isinstance(module, EMBEDDINGS) and module.sparse for module in model.modules()),
    )


def observed_facts(workload: Workload, device: torch.device) -> Facts:
    """`facts_of`, and what only a run shows: attention, masks and host synchronisations. Clears the gradients."""
    facts = facts_of(workload.model, workload.optimizer, device)
    calls = AttentionCalls()
    syncs: list[tuple[str, int]] = []
    x, y = move_batch(workload.batch, device)
    with calls, watch_syncs(device, syncs):
        loss_of(call_model(workload.model, x), workload.loss_fn, y).backward()
    workload.model.zero_grad(set_to_none=True)
    return replace(
        facts,
        attention=calls.count > 0,
        open_masks=with_open_masks(x) is not x,
        host_sync=":".join(map(str, syncs[0])) if syncs else None,
    )


class AttentionCalls(TorchFunctionMode):
    """Counts calls of scaled_dot_product_attention, as a function and as an operator of a rebuilt graph."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "scaled_dot_product_attention" in str(func):
            self.count += 1
        return func(*args, **(kwargs or {}))


def others_parameters(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> list[torch.nn.Parameter]:
    """The trained parameters of the model that this optimizer does not update."""
    own = set(map(id, parameters_of(optimizer)))
    return [parameter for parameter in model.parameters() if parameter.requires_grad and id(parameter) not in own]


def missing_compiler(device: torch.device) -> str | None:
    """Why torch.compile cannot work on this machine, or None."""
    if device.type == "cuda":
        return None if find_spec("triton") else "torch.compile needs Triton on a GPU: pip install triton"
    found = any(shutil.which(name) for name in ("g++", "clang++", "c++"))
    return None if found else "torch.compile needs a C++ compiler on a CPU: none is on the PATH"


def has_convolutions(model: torch.nn.Module) -> bool:
    return has_layers(model, CONVOLUTIONS, ("convolution", "conv2d"))


def has_wide_activations(model: torch.nn.Module) -> bool:
    return has_layers(model, (*EMBEDDINGS, *NORMS), ("embedding", "layer_norm", "rms_norm", "group_norm"))


def has_layers(model: torch.nn.Module, kinds: tuple[type, ...], operators: tuple[str, ...]) -> bool:
    """Whether it has a module of these kinds, or, as a graph that was rebuilt, an operator with such a name."""
    if any(isinstance(module, kinds) for module in model.modules()):
        return True
    graphs = [module.graph for module in model.modules() if isinstance(module, torch.fx.GraphModule)]
    return any(name in str(node.target) for graph in graphs for node in graph.nodes for name in operators)


def is_distributed(model: torch.nn.Module) -> bool:
    wrapped = any(isinstance(module, (DataParallel, DistributedDataParallel)) for module in model.modules())
    return wrapped or any(type(parameter.data).__name__ == "DTensor" for parameter in model.parameters())
