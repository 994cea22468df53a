"""The optimizer's update as a graph of its own, for loops that keep their backward to themselves."""

from kitsune.device import Graph, Recorder
from kitsune.engine.update import Update, parameters_of
from kitsune.errors import CaptureError

WARM_UPDATES = 3


class UpdateGraph:
    """Steps by replay when the gradients are where they were at capture, eagerly otherwise.

    `refusal` says why the update is not captured, once that is known.
    """

    def __init__(self, update: Update, recorder: Recorder) -> None:
        self._update = update
        self._recorder = recorder
        self._graph: Graph | None = None
        self._owner: object = None
        self._calls = 0
        self.refusal: str | None = None
        self.replays = 0

    def __call__(self, owner: object) -> None:
        """`owner` is whose static tensors all gradients are, or None when they are anybody's."""
        self._calls += 1
        if owner is None or self.refusal is not None or self._calls <= WARM_UPDATES:
            self._update.step()
        elif self._graph is None or owner is not self._owner or not self._unmoved():
            self._capture(owner)
        elif self._update.refresh():
            self._graph.replay()
            self.replays += 1
        else:
            self.refusal = "a hyperparameter other than the learning rate changes between steps"
            self._update.step()

    def _unmoved(self) -> bool:
        return self._update.optimizer.state is self._state and self._look() == self._addresses

    def _look(self) -> list[int]:
        return [parameter.data_ptr() for parameter in parameters_of(self._update.optimizer)]

    def _capture(self, owner: object) -> None:
        self.refusal = self._update.why_not_capturable()
        if self.refusal is not None:
            self._update.step()
            return
        self._update.begin_capture()
        try:
            graph, _ = self._recorder.capture(self._update.step)
        except CaptureError as error:
            self.refusal = str(error)
        finally:
            self._update.end_capture()
        if self.refusal is not None:
            self._update.step()
            return
        self._graph, self._owner = graph, owner
        self._state = self._update.optimizer.state
        self._addresses = self._look()
        if not self._recorder.executes:
            graph.replay()
            self.replays += 1
