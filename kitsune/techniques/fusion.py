"""fusion: kernels of ours in the place of patterns in forward and loss, where they are measured to be faster."""

from collections.abc import Callable
from typing import Any

import torch

import kitsune.fusion
from kitsune.autograd.hooks import Hooks
from kitsune.capture.compile_isolation import own_code
from kitsune.knobs import Choice
from kitsune.techniques.technique import Build, Facts, Technique, is_of_dynamo, raised_in


class Fusion(Technique):
    name = "fusion"

    def why_not(self, choice: Choice, facts: Facts) -> str | None:
        return "kernels of ours need a GPU" if facts.device != "cuda" else facts.compiler

    def apply(self, choice: Choice, build: Build) -> None:
        """For a step that nothing else compiles; the technique of compile begins from `build.unfused` again."""
        build.fusion = engine = kitsune.fusion.FusionEngine(build.fusion_config)
        build.unfused = build.forward

        def kitsune_kernels(graph: torch.fx.GraphModule, _: list[Any]) -> Callable[..., Any]:
            return engine.rewrite(graph)

        fused = torch.compile(own_code(build.forward), backend=kitsune_kernels, dynamic=False)
        build.forward = watching(fused, build.forward, build.model)

    def blames(self, error: BaseException) -> bool:
        # Where compile fails beside it, an operator of ours may be what it failed on: the step goes on without first.
        parts = ("kitsune/fusion/", "kitsune/kernels/")
        return is_of_dynamo(error) or any(raised_in(error, part) for part in parts)


def watching(fused: Callable[..., Any], plain: Callable[..., Any], model: torch.nn.Module) -> Callable[..., Any]:
    """The fused forward until somebody hooks the model, which torch.compile does not look for again."""
    hooks = Hooks(model)

    def call(*args: Any, **kwargs: Any) -> Any:
        return fused(*args, **kwargs) if hooks.unchanged() else plain(*args, **kwargs)

    return call


TECHNIQUE = Fusion()
