"""capture: the step, or its segments, in CUDA graphs, so that launching costs the host nothing."""

from collections.abc import Mapping

from kitsune.errors import CaptureError
from kitsune.knobs import Choice
from kitsune.techniques.technique import Build, Facts, Technique
from kitsune.update.optimizer_flags import Switch
from kitsune.update.optimizer_update import ADAMS


class Capture(Technique):
    name = "capture"

    def why_not(self, choice: Choice, facts: Facts) -> str | None:
        if facts.device != "cuda":
            return "CUDA graphs need a GPU"
        if facts.hook is not None:
            return f"{facts.hook} would not run in a replayed graph"
        if facts.sparse_gradients:
            return "a replayed graph would not fill sparse gradients again"
        return None

    def why_not_beside(self, choice: Choice, facts: Facts) -> Mapping[tuple[str, Choice], str]:
        """What the step as given waits for may be gone when it is compiled: a mask that is looked at on the host."""
        if facts.host_sync is None:
            return {}
        return {("compile", "off"): f"the step as given waits for the device at {facts.host_sync}"}

    def apply(self, choice: Choice, build: Build) -> None:
        build.capture = choice
        build.is_specialised = True
        # Every other optimizer updates outside of the graph, where capturable only costs launches.
        if build.device.type == "cuda" and type(build.optimizer) in ADAMS:
            switch = Switch(build.optimizer, {"capturable": True})
            build.undo.callback(switch.undo)

    def splits_loss(self, choice: Choice) -> bool:
        return choice == "segments"

    def blames(self, error: BaseException) -> bool:
        return isinstance(error, CaptureError)


TECHNIQUE = Capture()
