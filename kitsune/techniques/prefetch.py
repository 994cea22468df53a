"""prefetch: how many batches of a loader TrainStep.batches copies to the device ahead of their step."""

from kitsune.knobs import Choice
from kitsune.techniques.technique import Build, Facts, Technique

NO_LOADER = "prefetch waits for a loader: for x, y in step.batches(loader)"


class Prefetch(Technique):
    name = "prefetch"

    def why_not(self, choice: Choice, facts: Facts) -> str | None:
        return None

    def apply(self, choice: Choice, build: Build) -> None:
        build.prefetch = int(choice)
        build.waiting[self.name] = NO_LOADER


TECHNIQUE = Prefetch()
