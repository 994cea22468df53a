"""compile: torch.compile of what the step computes, forward and loss; autograd compiles the backward with it."""

from typing import Any

import torch
import torch._inductor
from torch._dynamo.exc import TorchDynamoException
from torch._inductor.exc import InductorError

from kitsune.knobs import Choice
from kitsune.techniques.technique import Build, Facts, Technique

OWN_GRAPHS = ("reduce-overhead", "max-autotune")


class Compile(Technique):
    name = "compile"

    def why_not(self, choice: Choice, facts: Facts) -> str | None:
        if facts.device != "cuda" and choice in OWN_GRAPHS:
            return "CUDA graphs need a GPU"
        return facts.compiler

    def apply(self, choice: Choice, build: Build) -> None:
        options = {**options_of(str(choice)), **build.compile_options}
        build.forward = torch.compile(build.forward, dynamic=False, options=options)
        if choice in OWN_GRAPHS:
            build.step_contexts.append(_mark_step)

    def blames(self, error: BaseException) -> bool:
        return isinstance(error, (TorchDynamoException, InductorError))


def options_of(choice: str) -> dict[str, Any]:
    """Inductor's options behind a choice; torch.compile takes a mode or options, not both."""
    if choice == "coordinate-descent":
        return {"coordinate_descent_tuning": True}
    return dict(torch._inductor.list_mode_options(choice))


class _mark_step:  # noqa: N801
    """Tells Inductor's CUDA graph trees that a new step begins, so that outputs of the last one may be reused."""

    def __enter__(self) -> None:
        torch.compiler.cudagraph_mark_step_begin()

    def __exit__(self, *_: object) -> None:
        return None


TECHNIQUE = Compile()
