"""accumulation: forward and backward run on parts of a batch, one after the other: less memory, smaller products.

Gradients are added up and the loss is the mean over all rows, so a step computes what it does with the whole batch if
its loss is a mean over rows.
"""

from kitsune.knobs import Choice
from kitsune.techniques.technique import Build, Facts, Technique

IN_LOOP = "accumulation waits for TrainStep: in a loop of your own the model gets the batches that you give it"


class Accumulation(Technique):
    name = "accumulation"

    def why_not(self, choice: Choice, facts: Facts) -> str | None:
        return "batch norm would take its statistics from each part" if facts.batch_norms else None

    def apply(self, choice: Choice, build: Build) -> None:
        if build.in_loop:
            build.waiting[self.name] = IN_LOOP
        else:
            build.parts = int(choice)


TECHNIQUE = Accumulation()
