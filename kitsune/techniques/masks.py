"""masks: attention runs without a mask where the mask of the batch shows every position.

Data collators give a mask with each batch, which is full of ones where nothing is padded. Eager models of Hugging Face
look at it and leave it out; compiled ones cannot look, so their attention reads a mask, and no FlashAttention runs.
"""

from kitsune.knobs import Choice
from kitsune.techniques.technique import Build, Facts, Technique, raised_in


class Masks(Technique):
    name = "masks"

    def why_not(self, choice: Choice, facts: Facts) -> str | None:
        return None if facts.open_masks else "the batch has no attention_mask that shows every position"

    def apply(self, choice: Choice, build: Build) -> None:
        """Each batch is asked; `compile` finds what follows from its answer (`kitsune.fusion.masks`)."""
        build.asks_for_masks = True

    def blames(self, error: BaseException) -> bool:
        return raised_in(error, "kitsune/open_masks")


TECHNIQUE = Masks()
