"""recompute: what the backward needs is computed again instead of kept: less memory, more time.

A share is AOTAutograd's `activation_memory_budget`: it solves a knapsack over the operations of a compiled graph (He,
Yu: "Transcending Runtime-Memory Tradeoffs in Checkpointing by being Fusion Aware", 2023). Blocks are checkpoints (Chen
et al., "Training Deep Nets with Sublinear Memory Cost", 2016), torch's own and not reentrant.
"""

import contextlib
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, Final

import torch
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from kitsune.knobs import SHARES_KEPT, Choice
from kitsune.techniques.technique import Build, Facts, Technique

SHARES: Final = dict(zip(SHARES_KEPT, (0.75, 0.5, 0.3), strict=True))
BATCH_NORMS: Final = torch.nn.modules.batchnorm._BatchNorm
#: Namespace and name of torch's attention operators: they take the longest to compute again for what they keep.
ATTENTION: Final = "aten::_scaled_dot_product"


class Recompute(Technique):
    name = "recompute"

    def why_not(self, choice: Choice, facts: Facts) -> str | None:
        if choice in SHARES:
            if facts.drops:
                return "AOTAutograd may recompute a dropout with another mask (pytorch#190758); blocks do not"
            return facts.compiler
        return None if facts.blocks else "no two modules of one kind, with parameters and without batch norm, in a row"

    def apply(self, choice: Choice, build: Build) -> None:
        if choice in SHARES:
            build.kept_share = SHARES[str(choice)]
            return
        keep = keeps_attention if choice == "blocks-keep-attention" else None
        build.forward_contexts.append(partial(checkpointed, repeated_blocks(build.model), keep))


def repeated_blocks(model: torch.nn.Module) -> list[torch.nn.Module]:
    """The modules that a model repeats: two or more of one class in a Sequential or ModuleList, each with submodules.

    The outermost ones, in order. None with a batch norm: a second forward would count the batch twice.
    """
    found: list[torch.nn.Module] = []
    for child in model.children():
        same = _repeated(child) if isinstance(child, torch.nn.Sequential | torch.nn.ModuleList) else []
        found += same
        if not same:
            found += repeated_blocks(child)
    return found


def _repeated(container: torch.nn.Module) -> list[torch.nn.Module]:
    kinds = [type(child) for child in container.children()]
    return [child for child in container.children() if kinds.count(type(child)) > 1 and _is_block(child)]


def _is_block(module: torch.nn.Module) -> bool:
    has_parts = any(True for _ in module.children()) and any(True for _ in module.parameters())
    return has_parts and not any(isinstance(part, BATCH_NORMS) for part in module.modules())


def has_dropout(model: torch.nn.Module) -> bool:
    """Whether a module of it draws a mask. A dropout that is only a function is not seen."""
    kinds = torch.nn.modules.dropout._DropoutNd
    return any(isinstance(part, kinds) and part.training and part.p > 0 for part in model.modules())


@contextlib.contextmanager
def checkpointed(blocks: Sequence[torch.nn.Module], keep: Any) -> Iterator[None]:
    """Within it the blocks keep their inputs only, and what `keep` says; the forwards of the blocks are replaced."""
    given = [block.__dict__.get("forward") for block in blocks]
    try:
        for block in blocks:
            block.forward = _checkpoint_of(block, keep)
        yield
    finally:
        for block, before in zip(blocks, given, strict=True):
            if before is None:
                block.__dict__.pop("forward", None)
            else:
                block.forward = before


def _checkpoint_of(block: torch.nn.Module, keep: Any) -> Any:
    options: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": has_dropout(block)}
    if keep is not None:
        options["context_fn"] = partial(create_selective_checkpoint_contexts, keep)
    return partial(checkpoint, block.forward, **options)


def keeps_attention(_context: Any, operator: Any, *_: Any, **__: Any) -> CheckpointPolicy:
    """A policy: what attention returns is kept, everything else is computed again."""
    is_attention = str(getattr(operator, "name", operator.__class__)()).startswith(ATTENTION)
    return CheckpointPolicy.MUST_SAVE if is_attention else CheckpointPolicy.PREFER_RECOMPUTE


TECHNIQUE = Recompute()
