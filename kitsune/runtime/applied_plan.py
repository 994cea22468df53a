"""A plan, applied to a live step: again when the step has changed, and without a technique that fails in it."""

import contextlib
import dataclasses
from collections.abc import Callable, Iterable
from typing import TypeVar

import torch

from kitsune.errors import DeclinedError
from kitsune.launches.planning.analysis import in_words
from kitsune.launches.plans import Planned
from kitsune.runtime.plan_application import Assembly
from kitsune.runtime.report import Report
from kitsune.runtime.rollback import Rollback
from kitsune.techniques import TECHNIQUES, Build, facts_of
from kitsune.techniques.capture import TECHNIQUE as CAPTURE
from kitsune.techniques.streams import TECHNIQUE as STREAMS
from kitsune.update.loss_scaler import LossScaler

Result = TypeVar("Result")

HALF_UPDATED = "some parameters were updated by then, so the step is not repeated: the next one runs without it"


class AppliedPlan:
    """What `TrainStep` and the drop-in share.

    `begin` makes the build of the step as given; `finish` takes over what the techniques have made of it.
    """

    def __init__(
        self,
        assembly: Assembly,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        begin: Callable[[contextlib.ExitStack], Build],
        finish: Callable[[Build], None],
    ) -> None:
        self.assembly = assembly
        self._model = model
        self._optimizer = optimizer
        self._begin = begin
        self._finish = finish
        self._undo = contextlib.ExitStack()
        self._scaler: LossScaler | None = None

    def apply(self) -> None:
        """Applies what is left of the plan to the step as given."""
        self.undo()
        self._groups = len(self._optimizer.param_groups)  # one that is added later has none of the plan's flags
        self.build = build = self._begin(self._undo)
        self.assembly.apply(build)
        if build.scaler is not None:  # the scale that training has found stays: micro-batches under way refer to it
            build.scaler = self._scaler = self._scaler or build.scaler
        self._finish(build)

    def reapply(self) -> None:
        """To a step that has changed since: a hook, a group of parameters, other modules."""
        self.undo()  # first: the plan's own flags must not be taken for the user's
        self.assembly.check(facts_of(self._model, self._optimizer, self.assembly.device))
        self.apply()

    def undo(self) -> None:
        """Gives model, optimizer and flags back as they were."""
        self._undo.close()

    def has_other_groups(self) -> bool:
        return len(self._optimizer.param_groups) != self._groups

    def go_on_without(self, knob: str, reason: str) -> None:
        """Declines the knob and applies what is left. Raises DeclinedError, after that, with `on_decline="raise"`."""
        try:
            self.assembly.decline(knob, reason)
        finally:
            self.apply()

    def rollback(self, *, repeats_update: bool) -> Rollback:
        """To be made before a run that may fail. `repeats_update`: the run has the optimizer's update in it."""
        is_asked = repeats_update and any(TECHNIQUES[knob].fails_half_updated for knob in self.assembly.knobs)
        return Rollback(self._model, self.assembly.device, self._optimizer if is_asked else None)

    def run(
        self,
        call: Callable[[], Result],
        again: Callable[[], Result],
        rollback: Rollback | None,
        learn: Callable[[], None],
    ) -> Result:
        """`call()`, and `learn()` after it. If a technique fails, `again()` without that technique.

        Raises what no technique has caused, also when the second try shows it; and DeclinedError where the optimizer
        has updated some parameters, so that there can be no second try.
        """
        try:
            result = call()
        except Exception as error:  # those of Triton derive from nothing else; what no technique has caused is raised
            found = self.assembly.blamed(error)
            if found is None:
                raise
            knob, reason = found
            if rollback is not None and TECHNIQUES[knob].fails_half_updated and rollback.is_spoilt():
                self.go_on_without(knob, reason)
                raise DeclinedError(knob, f"{reason}; {HALF_UPDATED}") from error
        else:
            learn()
            return result
        if rollback is not None:
            rollback.restore()
        return self._again(knob, reason, again)

    def _again(self, knob: str, reason: str, again: Callable[[], Result]) -> Result:
        """Outside of the `except` block, whose error would keep the memory of the failed run."""
        try:
            with self.assembly.restored_on_failure():
                self.go_on_without(knob, reason)
                return again()
        except DeclinedError:
            raise
        except Exception:
            self.apply()  # with the knob, which was not the cause
            raise

    def heed(self, refusal: str | None, streams_refusal: str) -> None:
        """Declines what turned out not to work while the step was captured."""
        if refusal is not None:
            self.go_on_without(CAPTURE.name, refusal)
        elif streams_refusal and STREAMS.name in self.assembly.knobs:
            # The programs go on as they are: each that was refused captures its step on one stream next time.
            self.build.streams = 1
            self.assembly.decline(STREAMS.name, streams_refusal)

    def report(self, picture: Planned | None, part: str = "", notes: Iterable[str] = ()) -> Report:
        """What was applied and what was declined. `part` names a picture of less than the step."""
        base, build = self.assembly.report, self.build
        notes = [*base.notes, *build.waiting.values(), *notes]
        return dataclasses.replace(
            base,
            applied={knob: choice for knob, choice in base.applied.items() if knob not in build.waiting},
            declined=dict(base.declined),
            notes=list(dict.fromkeys(notes)),
            fusion=None if build.fusion is None else build.fusion.get_fusion_stats(),
            scaler=None if build.scaler is None else build.scaler.statistics,
            picture=picture,
            planned="" if picture is None else f"{part}{in_words(picture.costs_us, picture.schedule)}; {picture.name}",
        )
