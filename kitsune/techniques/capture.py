"""capture: the step, or its segments, as CUDA graphs, so that the host need not launch each kernel."""

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
        """A synchronisation of the step as given may be gone when it is compiled, such as a mask read on the host."""
        if facts.host_sync is None:
            return {}
        return {("compile", "off"): f"the step as given waits for the device at {facts.host_sync}"}

    def apply(self, choice: Choice, build: Build) -> None:
        build.capture = choice
        build.is_specialised = True
        # All other optimizers update outside of the graph, where `capturable` only adds launches.
        if build.device.type == "cuda" and type(build.optimizer) in ADAMS:
            switch = Switch(build.optimizer, {"capturable": True})
            build.undo.callback(switch.undo)

    def splits_loss(self, choice: Choice) -> bool:
        return choice == "segments"

    def blames(self, error: BaseException) -> bool:
        return isinstance(error, CaptureError)


TECHNIQUE = Capture()
