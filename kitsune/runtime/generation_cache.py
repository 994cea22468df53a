"""Caches for generation, which models of transformers make in every forward, also while they train.

Training reads none of them. A compiled forward would return the keys and values of each layer, which then stay in
memory, and a captured one cannot return the object that holds them.
"""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any, Final

import torch

from kitsune.techniques import Build

NOTE: Final = "use_cache is off while the model trains: past_key_values is None"


def leave_out_caches(build: Build) -> bool:
    """Has the model make no caches in its forwards in train mode, unless it is called with `use_cache=True`.

    Returns whether it would make one. Outside of these forwards its configuration is as it was.
    """
    configs = configs_with_cache(build.model)
    if configs:
        build.forward_contexts.append(
            lambda: without_cache(configs) if build.model.training else contextlib.nullcontext()
        )
    return bool(configs)


def configs_with_cache(model: torch.nn.Module) -> list[Any]:
    """The configurations of transformers in the model that ask for a cache."""
    found = [vars(module).get("config") for module in model.modules()]
    asking = [each for each in found if is_of_transformers(each) and getattr(each, "use_cache", None) is True]
    return list({id(each): each for each in asking}.values())


def is_of_transformers(config: Any) -> bool:
    return any(base.__module__.startswith("transformers.") for base in type(config).__mro__)


@contextlib.contextmanager
def without_cache(configs: Sequence[Any]) -> Iterator[None]:
    for config in configs:
        config.use_cache = False
    try:
        yield
    finally:
        for config in configs:
            config.use_cache = True
