"""weights: bf16 copies of the weights of products by few launches; their gradients stay in bf16 for the update."""

import torch

from kitsune.autograd.half_weights import HalfWeights
from kitsune.knobs import Choice
from kitsune.techniques.technique import Build, Facts, Technique, raised_in


class Weights(Technique):
    name = "weights"

    def why_not(self, choice: Choice, facts: Facts) -> str | None:
        if torch.float32 not in facts.parameter_dtypes:
            return "no parameter is in fp32"
        return None

    def apply(self, choice: Choice, build: Build) -> None:
        """`compile` passes the copies to the graphs that it compiles."""
        build.half_weights = weights = HalfWeights(torch.bfloat16)
        build.undo.callback(weights.undo)

    def blames(self, error: BaseException) -> bool:
        return raised_in(error, "kitsune/autograd/half_weights")


TECHNIQUE = Weights()
