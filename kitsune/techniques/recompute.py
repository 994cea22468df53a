"""recompute: what the backward needs is computed again instead of kept: less memory, more time.

A share is AOTAutograd's `activation_memory_budget`: it solves a knapsack over the operations of a compiled graph (He,
Yu: "Transcending Runtime-Memory Tradeoffs in Checkpointing by being Fusion Aware", 2023). Blocks are checkpoints (Chen
et al., "Training Deep Nets with Sublinear Memory Cost", 2016), torch's own and not reentrant.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, Final

import torch
from torch.nn.utils.parametrizations import _SpectralNorm
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from kitsune.autograd.random_operations import DRAWS
from kitsune.capture.unkept_caches import cache_classes
from kitsune.errors import UnfitError
from kitsune.knobs import SHARES_KEPT, Choice
from kitsune.techniques.technique import Build, Context, Facts, Technique

SHARES: Final = dict(zip(SHARES_KEPT, (0.75, 0.5, 0.3), strict=True))
BATCH_NORMS: Final = torch.nn.modules.batchnorm._BatchNorm
NO_BLOCKS: Final = (
    "the model repeats no block: modules of one class in a Sequential or ModuleList, with submodules and parameters, "
    "and without batch norm or spectral norm"
)
#: Namespace and name of torch's attention operators: they take the longest to compute again for what they keep.
ATTENTION: Final = "aten::_scaled_dot_product"


class Recompute(Technique):
    name = "recompute"

    def why_not(self, choice: Choice, facts: Facts) -> str | None:
        if choice in SHARES:
            return facts.compiler
        return None if facts.blocks else NO_BLOCKS

    def apply(self, choice: Choice, build: Build) -> None:
        if choice in SHARES:
            build.kept_share = SHARES[str(choice)]
            return
        keep = keeps_attention if choice == "blocks-keep-attention" else None
        others = tuple(build.forward_contexts)
        forwards = [(block, checkpoint_of(block.forward, keep, others)) for block in repeated_blocks(build.model)]
        build.forward_contexts.append(partial(replaced, forwards))

    def blames(self, error: BaseException) -> bool:
        return DRAWS in str(error)


def checkpoint_blocks(model: torch.nn.Module) -> None:
    """Makes each repeated block a checkpoint for good. Raises UnfitError where there is none."""
    blocks = repeated_blocks(model)
    if not blocks:
        raise UnfitError(NO_BLOCKS)
    for block in blocks:
        block.forward = checkpoint_of(block.forward, None, ())


def repeated_blocks(model: torch.nn.Module) -> list[torch.nn.Module]:
    """The modules that a model repeats: two or more of one class in a Sequential or ModuleList, each with submodules.

    The outermost ones, in order, each once. None whose forward is known to write to a buffer: a second forward would
    count the batch twice.
    """
    same = _repeated(model) if isinstance(model, torch.nn.Sequential | torch.nn.ModuleList) else []
    found = same or [block for child in model.children() for block in repeated_blocks(child)]
    return list(dict.fromkeys(found))


def _repeated(container: torch.nn.Module) -> list[torch.nn.Module]:
    children = [child for child in container._modules.values() if child is not None]
    kinds = [type(child) for child in children]
    return [child for child in children if kinds.count(type(child)) > 1 and _is_block(child)]


def _is_block(module: torch.nn.Module) -> bool:
    has_parts = any(True for _ in module.children()) and any(True for _ in module.parameters())
    return has_parts and not any(_writes(part) for part in module.modules())


def _writes(module: torch.nn.Module) -> bool:
    """Whether its forward writes to its buffers: a batch norm, or a spectral norm of either kind."""
    hooks = module._forward_pre_hooks.values()
    return isinstance(module, (BATCH_NORMS, _SpectralNorm)) or any(isinstance(hook, SpectralNorm) for hook in hooks)


Forward = Callable[..., Any]


@contextlib.contextmanager
def replaced(forwards: Sequence[tuple[torch.nn.Module, Forward]]) -> Iterator[None]:
    """Within it each of the modules has this forward."""
    given = [module.__dict__.get("forward") for module, _ in forwards]
    try:
        for module, forward in forwards:
            module.forward = forward
        yield
    finally:
        for (module, _), before in zip(forwards, given, strict=True):
            if before is None:
                module.__dict__.pop("forward", None)
            else:
                module.forward = before


def checkpoint_of(forward: Forward, keep: Any, contexts: Sequence[Context]) -> Forward:
    """The forward of a block that keeps its inputs only, and what the policy `keep` says.

    The backward runs the forward a second time, outside of the contexts of the step, so `contexts` are entered again.
    A cache for generation is not passed on: both forwards would append to it. With a cache that holds keys and
    values already, nothing is recomputed.
    """
    caches = cache_classes()  # looked up here: torch.compile cannot trace it
    options: dict[str, Any] = {"use_reentrant": False}
    if keep is not None:
        options["context_fn"] = partial(create_selective_checkpoint_contexts, keep)

    def within(*arguments: Any, **named: Any) -> Any:
        if torch.compiler.is_compiling():  # the compiled graph was traced in these contexts, its second forward too
            return forward(*arguments, **named)
        with contextlib.ExitStack() as stack:
            for context in contexts:
                stack.enter_context(context())
            return forward(*arguments, **named)

    def run(*arguments: Any, **named: Any) -> Any:
        given: list[Any] = [each for each in (*arguments, *named.values()) if isinstance(each, caches)]
        if any(cache.get_seq_length() > 0 for cache in given):
            return forward(*arguments, **named)
        kept = [None if isinstance(each, caches) else each for each in arguments]
        kept_by_name = {name: None if isinstance(each, caches) else each for name, each in named.items()}
        return checkpoint(partial(within, **kept_by_name), *kept, **options)

    return run


def keeps_attention(_context: Any, operator: Any, *_: Any, **__: Any) -> CheckpointPolicy:
    """A policy: what attention returns is kept, everything else is computed again."""
    is_attention = str(getattr(operator, "name", operator.__class__)()).startswith(ATTENTION)
    return CheckpointPolicy.MUST_SAVE if is_attention else CheckpointPolicy.PREFER_RECOMPUTE


TECHNIQUE = Recompute()
