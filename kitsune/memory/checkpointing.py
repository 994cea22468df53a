"""Checkpoints around the blocks of a model in a loop of the user's own. In a plan it is the knob `recompute`.

A checkpoint keeps the inputs of a block and computes the rest again in the backward (Chen et al., "Training Deep Nets
with Sublinear Memory Cost", 2016).
"""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any, Final

import torch

from kitsune.base.byte_sizes import parse_memory_limit
from kitsune.errors import SettingsError, UnfitError
from kitsune.techniques.recompute import NO_BLOCKS, Forward, checkpoint_of, repeated_blocks, replaced

#: Share of the free memory that kept blocks may take; the rest is for gradients and for what a block computes again.
SHARE: Final = 0.8


class SelectiveGradientCheckpointing:
    """Checkpoints for the blocks that a model repeats, but for those that are important enough to be kept.

        selective = SelectiveGradientCheckpointing(importance_threshold=0.7)
        selective.update_importance("transformer.layers.23", 0.9)
        with selective.applied(model):
            loss = loss_fn(model(x), y)
        loss.backward()

    The importance of a block is 0 until it is told, and what it means is yours: a block that is slow to compute again
    for the memory that it takes is a good one to keep.
    """

    def __init__(self, importance_threshold: float = 0.5) -> None:
        """Blocks of at least this importance are kept. Raises SettingsError unless it is from 0 to 1."""
        self.importance_threshold = _fraction(importance_threshold, "importance_threshold")
        self._importances: dict[str, float] = {}

    def update_importance(self, name: str, importance: float) -> None:
        """Sets the importance, from 0 to 1, of the block with this name in `model.named_modules()`."""
        self._importances[name] = _fraction(importance, f"the importance of {name}")

    def checkpoints(self, model: torch.nn.Module) -> list[str]:
        """The names of the blocks that are checkpoints, in order.

        Raises SettingsError when an importance was told of what is no repeated block, UnfitError when there is none.
        """
        blocks = _named_blocks(model)
        if strange := [name for name in self._importances if name not in blocks]:
            raise SettingsError(
                f"{strange[0]!r:.100} is no block that the model repeats; there are {', '.join(blocks)}"
            )
        return [name for name in blocks if self._importances.get(name, 0.0) < self.importance_threshold]

    @contextlib.contextmanager
    def applied(self, model: torch.nn.Module) -> Iterator[list[str]]:
        """Within it a forward of the model keeps the inputs of these blocks only. Yields their names."""
        names = self.checkpoints(model)
        with _checkpointed([model.get_submodule(name) for name in names]):
            yield names


class AdaptiveCheckpointing:
    """A forward that keeps as many of the repeated blocks as fit into the memory, and makes the others checkpoints.

        adaptive = AdaptiveCheckpointing()
        output = adaptive.forward(model, x)

    The first block is kept, and what it keeps for the backward is measured; the others are taken to keep as much. The
    blocks that run last are kept, since their backward comes first.
    """

    def __init__(self, memory_limit: str | int | None = None) -> None:
        """`memory_limit`: of what all blocks keep, in bytes or as "4GiB"; None: four fifths of what the GPU has free.

        Raises SettingsError for an amount that makes no sense.
        """
        self._limit_bytes = parse_memory_limit(memory_limit)
        self.block_bytes = 0  #: what one block keeps, as measured in the last forward
        self.kept = 0  #: how many blocks the last forward kept

    def forward(self, model: torch.nn.Module, *inputs: Any, **named: Any) -> Any:
        """What `model(*inputs, **named)` returns.

        Raises UnfitError if the model repeats no block, or on a CPU if there is no limit.
        """
        first, *others = _named_blocks(model).values()
        limit_bytes = self._limit_bytes or _free_bytes(next(model.parameters()).device)
        self.block_bytes, self.kept = 0, 1
        left = len(others)  # blocks that have not run yet

        def deciding(block: torch.nn.Module) -> Forward:
            keep, checkpoint = block.forward, checkpoint_of(block.forward, None, ())

            def run(*arguments: Any, **named: Any) -> Any:
                nonlocal left
                left -= 1
                is_kept = (left + 2) * self.block_bytes <= limit_bytes  # this one, those to come, and the first
                self.kept += is_kept
                return (keep if is_kept else checkpoint)(*arguments, **named)

            return run

        with replaced([(first, self._measured(first)), *((block, deciding(block)) for block in others)]):
            return model(*inputs, **named)

    def _measured(self, block: torch.nn.Module) -> Forward:
        """The forward of a block, which sets `block_bytes`: what it saves for its backward but weights and inputs."""
        forward = block.forward
        weights = {each.untyped_storage().data_ptr() for each in block.parameters()}

        def run(*arguments: Any, **named: Any) -> Any:
            given = [each for each in arguments if isinstance(each, torch.Tensor)]
            known = weights | {each.untyped_storage().data_ptr() for each in given}
            found: dict[int, int] = {}

            def pack(tensor: torch.Tensor) -> torch.Tensor:
                storage = tensor.untyped_storage()
                if storage.data_ptr() not in known:
                    found[storage.data_ptr()] = storage.nbytes()
                return tensor

            with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
                output = forward(*arguments, **named)
            self.block_bytes = sum(found.values())
            return output

        return run


def _named_blocks(model: torch.nn.Module) -> dict[str, torch.nn.Module]:
    """The repeated blocks by name. Raises UnfitError where there is none."""
    blocks = repeated_blocks(model)
    if not blocks:
        raise UnfitError(NO_BLOCKS)
    names = {module: name for name, module in model.named_modules()}
    return {names[block]: block for block in blocks}


def _checkpointed(blocks: Sequence[torch.nn.Module]) -> contextlib.AbstractContextManager[None]:
    return replaced([(block, checkpoint_of(block.forward, None, ())) for block in blocks])


def _free_bytes(device: torch.device) -> int:
    if device.type != "cuda":
        raise UnfitError("only a GPU says how much memory is free; give AdaptiveCheckpointing a memory_limit")
    free_bytes, _ = torch.cuda.mem_get_info(device)
    unused_bytes = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return int(SHARE * (free_bytes + unused_bytes))


def _fraction(value: float, what: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1:
        raise SettingsError(f"{what} is {value!r:.100}; it must be a number from 0 to 1")
    return float(value)
