"""Captures the optimizer's update in a CUDA graph of its own, for loops that call `backward` themselves."""

import copy
from dataclasses import dataclass

from kitsune.device.cuda_graph import WARM_RUNS, Graph, Recorder
from kitsune.errors import CaptureError
from kitsune.update.optimizer_update import HOOKED, HYPERPARAMETER_CHANGED, Update, has_step_hooks, parameters_of

PATIENCE_UPDATES = 16
FOREIGN = "its gradients are not those of one captured backward, as where several are added up"


@dataclass(slots=True)
class Held:
    """The update for one owner of gradients, with guards on its tensors. `graph` is None until it is captured."""

    update: Update  # a copy with learning-rate tensors of its own
    state: object
    states: int
    parameters: list[tuple[int, int]]
    graph: Graph | None = None

    def fits(self) -> bool:
        """Whether state and parameters are where they were. The forward's guards have checked the rest of the model."""
        state = self.update.optimizer.state
        return state is self.state and len(state) == self.states and self.parameters == places(self.update)


class UpdateGraph:
    """Runs the update as a replay if the gradients are where they were at capture, and eagerly otherwise."""

    def __init__(self, update: Update, recorder: Recorder) -> None:
        self._update = update
        self._recorder = recorder
        self._held: dict[object, Held] = {}
        self._calls = 0
        self._missed = 0  # consecutive updates that could not be replayed; `_why` is the reason of the last one
        self._why = ""
        self._refusal: str | None = None
        self.replays = 0

    @property
    def refusal(self) -> str | None:
        """Why the update is not captured, or None. A reason that may pass counts after PATIENCE_UPDATES in a row."""
        is_waited_for = self.replays or self._missed < PATIENCE_UPDATES
        return self._refusal or (None if is_waited_for else self._why)

    def __call__(self, owner: object) -> None:
        """Runs one update. `owner`: whose static tensors all gradients are; None if they are not all of one owner."""
        self._calls += 1
        self._why = HOOKED if has_step_hooks(self._update.optimizer) else FOREIGN if owner is None else ""
        self._missed = self._missed + 1 if self._why else 0
        if self._why or self._calls <= WARM_RUNS or self._refusal is not None:
            self._update.step()
            return
        held = self._held.get(owner)
        if held is None or not held.fits():
            self._warm(owner)
        elif held.graph is None:
            self._capture(held)
        elif held.update.refresh():
            self._replay(held.graph)
        else:
            self._refusal = HYPERPARAMETER_CHANGED
            self._update.step()

    def _warm(self, owner: object) -> None:
        """Runs one eager step before the capture: state that is made during a capture would be made at each replay."""
        self._update.step()
        self._held = {owner: held for owner, held in self._held.items() if held.fits()}
        state = self._update.optimizer.state
        self._held[owner] = Held(copy.copy(self._update), state, len(state), places(self._update))

    def _replay(self, graph: Graph) -> None:
        graph.replay()
        self.replays += 1

    def _capture(self, held: Held) -> None:
        self._refusal = held.update.why_not_capturable()
        if self._refusal is not None:
            self._update.step()
            return
        held.update.begin_capture()
        try:
            held.graph, _ = self._recorder.capture(held.update.step)
        except CaptureError as error:
            self._refusal = str(error)
        finally:
            held.update.end_capture()
        if self._refusal is not None:
            self._update.step()
        elif not self._recorder.executes and held.graph is not None:
            self._replay(held.graph)


def places(update: Update) -> list[tuple[int, int]]:
    """Identity and address of every parameter."""
    return [(id(parameter), parameter.data_ptr()) for parameter in parameters_of(update.optimizer)]
