"""fusion: replaces patterns in forward and loss by Kitsune's kernels where these were measured to be faster."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

import kitsune.fusion
from kitsune.autograd.hooks import Hooks
from kitsune.capture.compile_isolation import leave_out_repeated_logs, own_code
from kitsune.fusion.config import FusionConfig
from kitsune.knobs import Choice
from kitsune.techniques.technique import Build, Facts, Technique, is_of_dynamo, raised_in


class Fusion(Technique):
    name = "fusion"

    def why_not(self, choice: Choice, facts: Facts) -> str | None:
        return "Kitsune's kernels need a GPU" if facts.device != "cuda" else facts.compiler

    def apply(self, choice: Choice, build: Build) -> None:
        """Rewrites the forward without Inductor. If `compile` is applied later, it starts from `build.unfused`."""
        leave_out_repeated_logs(build.undo)
        build.fusion = engine = kitsune.fusion.FusionEngine(config_of(choice, build.fusion_config))
        build.unfused = build.forward

        def kitsune_kernels(graph: torch.fx.GraphModule, _: list[Any]) -> Callable[..., Any]:
            return engine.rewrite(graph)

        fused = torch.compile(own_code(build.forward), backend=kitsune_kernels, dynamic=False)
        build.forward = plain_once_hooked(fused, build.forward, build.model)

    def blames(self, error: BaseException) -> bool:
        # If compile fails beside it, one of Kitsune's operators may be the cause, so fusion is dropped first.
        parts = ("kitsune/fusion/", "kitsune/kernels/")
        return is_of_dynamo(error) or any(raised_in(error, part) for part in parts)


def config_of(choice: Choice, given: FusionConfig | None) -> FusionConfig:
    """What the user allows, and of it what the choice says."""
    allowed = given or FusionConfig()
    if choice == "products":
        return replace(allowed, enable_elementwise=False, enable_reduction=False)
    return allowed


def plain_once_hooked(
    fused: Callable[..., Any], plain: Callable[..., Any], model: torch.nn.Module
) -> Callable[..., Any]:
    """The fused forward; the plain one once the model's hooks change, which torch.compile does not check again."""
    hooks = Hooks(model)

    def call(*args: Any, **kwargs: Any) -> Any:
        return fused(*args, **kwargs) if hooks.unchanged() else plain(*args, **kwargs)

    return call


TECHNIQUE = Fusion()
