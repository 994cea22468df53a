"""activations: what autocast leaves in fp32 between products is rounded to bf16, as if parameters were in bf16."""

import torch

from kitsune.knobs import Choice
from kitsune.techniques.technique import Build, Facts, Technique, raised_in


class Activations(Technique):
    name = "activations"

    def why_not(self, choice: Choice, facts: Facts) -> str | None:
        if torch.float32 not in facts.parameter_dtypes:
            return "no parameter is in fp32"
        return None if facts.wide_activations else "no embedding and no norm whose results autocast leaves in fp32"

    def apply(self, choice: Choice, build: Build) -> None:
        """`compile` rounds them in the graphs that it compiles."""
        build.half_activations = torch.bfloat16

    def blames(self, error: BaseException) -> bool:
        return raised_in(error, "kitsune/fusion/half_activations")


TECHNIQUE = Activations()
