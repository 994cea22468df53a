"""streams: runs independent launches of the captured step side by side on several streams (kitsune/launches)."""

import torch

from kitsune.knobs import Choice
from kitsune.launches.recording.triton_adapter import why_unknown
from kitsune.techniques.technique import Build, Facts, Technique

#: Inductor's backward writes a gradient over the activation that it has just read, so it waits for all other readers of
#: that activation, such as the gradient of a weight. With memory of its own for each result, ResNet-50 on 8 images came
#: to 1.25 times one stream in place of 1.235 on an H200; on one stream the time did not change.
APART = {"inplace_buffers": False}


class Streams(Technique):
    name = "streams"

    def why_not(self, choice: Choice, facts: Facts) -> str | None:
        if facts.device != "cuda":
            return "streams need a GPU"
        return why_unknown(torch.__version__)

    def apply(self, choice: Choice, build: Build) -> None:
        build.streams = int(choice)
        if build.streams > 1:
            build.inductor |= APART

    def blames(self, error: BaseException) -> bool:
        """Out of memory is blamed on streams: while a step is recorded, all of its memory stays allocated."""
        return isinstance(error, torch.OutOfMemoryError)


TECHNIQUE = Streams()
