"""pool_bytes: memory limit for the step's own storages when its launches are planned on several streams."""

from kitsune.knobs import Choice
from kitsune.techniques.technique import Build, Facts, Technique


class PoolBytes(Technique):
    name = "pool_bytes"

    def why_not(self, choice: Choice, facts: Facts) -> str | None:
        return None if facts.device == "cuda" else "only launches on several streams of a GPU have a pool of their own"

    def apply(self, choice: Choice, build: Build) -> None:
        build.pool_bytes = int(choice) or None


TECHNIQUE = PoolBytes()
