"""Moves activations to the host and back, by hand or between a forward and its backward."""

import contextlib
from collections.abc import Iterator
from functools import partial
from typing import Any, Final

import torch
from torch.utils import _pytree as pytree

from kitsune.errors import SettingsError

#: Tensors of fewer bytes stay: a copy of them costs more than they free.
LEAST_BYTES: Final = 2**20


class DynamicActivationOffloading:
    """Keeps activations in the memory of the host.

        offloader = DynamicActivationOffloading(offload_device="cpu")
        with offloader.applied(model):
            loss = loss_fn(model(x), y)
        loss.backward()

    By hand: `kept = offloader.offload_activations(tensors)` and `offloader.reload_activations(kept, device)`. Copies
    from a GPU go into pinned memory and are ordered on the current stream, so a step waits for them. Where a block
    takes less time to compute again than to copy twice, a checkpoint is faster.
    """

    def __init__(self, offload_device: str = "cpu", least_bytes: int = LEAST_BYTES) -> None:
        """`least_bytes`: smaller tensors stay. Raises SettingsError unless the device is the host."""
        if torch.device(offload_device).type != "cpu":
            raise SettingsError(f"offload_device is {offload_device!r:.100}; activations go to the host, which is cpu")
        self.least_bytes = least_bytes
        self.offloaded_bytes = 0  #: that were copied to the host since this object was made

    def offload_activations(self, activations: Any) -> Any:
        """The same structure with copies on the host. A tensor on the host is copied too; others stay as they are."""
        return pytree.tree_map_only(torch.Tensor, partial(self._to_host, blocking=True), activations)

    def reload_activations(self, activations: Any, device: torch.device | str) -> Any:
        """The same structure with copies on the device."""
        return pytree.tree_map_only(torch.Tensor, lambda each: each.to(device, non_blocking=True), activations)

    @contextlib.contextmanager
    def applied(self, model: torch.nn.Module) -> Iterator[None]:
        """Within it, what a forward saves for its backward is kept on the host, but for weights and small tensors."""
        weights = {each.untyped_storage().data_ptr() for each in (*model.parameters(), *model.buffers())}

        def pack(tensor: torch.Tensor) -> tuple[torch.device, torch.Tensor]:
            is_weight = tensor.untyped_storage().data_ptr() in weights
            stays = is_weight or tensor.nbytes < self.least_bytes or tensor.device.type == "cpu"
            return tensor.device, tensor if stays else self._to_host(tensor)

        def unpack(packed: tuple[torch.device, torch.Tensor]) -> torch.Tensor:
            device, tensor = packed
            return tensor.to(device, non_blocking=True)

        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            yield

    def _to_host(self, tensor: torch.Tensor, *, blocking: bool = False) -> torch.Tensor:
        """Without `blocking` only the current stream may read the copy, as a backward does."""
        kept = torch.empty_like(tensor, device="cpu", pin_memory=tensor.device.type == "cuda", requires_grad=False)
        kept.copy_(tensor.detach(), non_blocking=not blocking)
        self.offloaded_bytes += tensor.nbytes
        return kept
