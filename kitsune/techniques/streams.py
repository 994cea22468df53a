"""streams: launches of the captured step that do not wait for each other run side by side, on several streams."""

import torch

from kitsune.engine.triton_launches import why_unknown
from kitsune.knobs import Choice
from kitsune.techniques.technique import Build, Facts, Technique


class Streams(Technique):
    name = "streams"

    def why_not(self, choice: Choice, facts: Facts) -> str | None:
        if facts.device != "cuda":
            return "streams need a GPU"
        return why_unknown(torch.__version__)

    def apply(self, choice: Choice, build: Build) -> None:
        build.streams = int(choice)

    def blames(self, error: BaseException) -> bool:
        """Recording a step holds all of its memory at once."""
        return isinstance(error, torch.OutOfMemoryError)


TECHNIQUE = Streams()
