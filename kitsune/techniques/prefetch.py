"""prefetch: how many batches of a loader TrainStep.batches has on the device ahead of their step."""

from kitsune.knobs import Choice
from kitsune.techniques.technique import Build, Facts, Technique


class Prefetch(Technique):
    name = "prefetch"

    def why_not(self, choice: Choice, facts: Facts) -> str | None:
        return None

    def apply(self, choice: Choice, build: Build) -> None:
        build.prefetch = int(choice)


TECHNIQUE = Prefetch()
