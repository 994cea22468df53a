"""pool_bytes: how much memory the launches on several streams may need for what the step itself makes."""

from kitsune.knobs import Choice
from kitsune.techniques.technique import Build, Facts, Technique


class PoolBytes(Technique):
    name = "pool_bytes"

    def why_not(self, choice: Choice, facts: Facts) -> str | None:
        return None if facts.device == "cuda" else "only launches on several streams of a GPU have a pool of their own"

    def apply(self, choice: Choice, build: Build) -> None:
        build.pool_bytes = int(choice) or None


TECHNIQUE = PoolBytes()
