"""Trains a workload from several seeds, with a plan and as given, and records loss curves for `kitsune verify`."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch

from kitsune.cli import output
from kitsune.device.backend import release_cached
from kitsune.device.tf32 import full_precision
from kitsune.errors import SURPRISES, WorkloadError
from kitsune.plan import Plan
from kitsune.workload import Workload, call_model, loss_of, move_batch
from tuner.building.arms import LiveArm
from tuner.measuring.protocol import ArmSpec, Job
from tuner.numerics.trace_errors import ModelState
from tuner.numerics.training_trace import load_state
from tuner.statistics.loss_curves import ArmName, Curve
from tuner.workloads.data import Data
from tuner.workloads.loader import load_workload

#: Points of a curve, and significant digits of its losses.
POINTS: Final = 20
DIGITS: Final = 6


class HeldOut:
    """Computes the loss of a model's weights on the held-out batches, in eval mode and fp32.

    A model that fails in eval mode is evaluated in train mode.
    """

    def __init__(self, workload: Workload, batches: Sequence[Any]) -> None:
        self._workload = workload
        self.batches = batches
        self.notes: list[str] = []
        workload.model.eval()
        try:
            self._losses()
        except (*SURPRISES, WorkloadError) as error:
            workload.model.train()
            self.notes.append(f"held-out losses are of train mode, since in eval mode: {error}"[:1000])

    def loss_of(self, model: torch.nn.Module) -> float:
        load_state(self._workload, ModelState(list(model.parameters()), list(model.buffers())))
        return self._losses()

    def _losses(self) -> float:
        model, loss_fn = self._workload.model, self._workload.loss_fn
        with torch.no_grad(), full_precision():
            losses = [loss_of(call_model(model, x), loss_fn, y) for x, y in self.batches]
        return float(torch.stack(losses).double().mean())


@dataclass(slots=True)
class Points:
    """The points of a curve so far. `at`: the steps to record; `since`: losses since the last recorded step."""

    at: frozenset[int]
    since: list[torch.Tensor]
    steps: list[int]
    trained: list[float]
    held_out: list[float]


class Trainings:
    """Trains one workload, with the plan or as given, from any seed."""

    def __init__(self, plan: Plan, spec: str, device: str, steps: int) -> None:
        self._plan, self._spec, self._device, self._steps = plan, spec, device, steps
        workload = load_workload(spec, device)
        self._data = Data(workload, spec)
        self.held_out = HeldOut(workload, [move_batch(batch, device) for batch in self._data.held_out])

    def curve(self, seed: int, name: ArmName) -> Curve:
        """One training. Both arms of a seed start from the same weights and see the same batches."""
        knobs = self._plan.knobs if name == "plan" else {}
        spec = ArmSpec(name=name, knobs=dict(knobs))
        arm = LiveArm(Job(kind="prove", workload=self._spec, device=self._device, seed=seed, arms=(spec,)), spec)
        try:
            torch.manual_seed(seed)
            curve = self._trained(arm, seed, name)
        finally:
            arm.close()
            torch.compiler.reset()
            release_cached(arm.device)
        last = curve.ended or f"held-out loss {curve.start:.4g} -> {curve.final:.4g}"
        output.note(f"seed {seed}, {'as given' if name == 'plain' else 'by the plan'}: {last}")
        return curve

    def _trained(self, arm: LiveArm, seed: int, name: ArmName) -> Curve:
        model = arm.workload.model
        start = self.held_out.loss_of(model)
        points = Points(_spread(self._steps), [], [], [], [])
        ended = ""
        if not math.isfinite(start):
            raise WorkloadError(f"the held-out loss of {self._spec} is {start} before anything is trained")
        for step, batch in zip(range(1, self._steps + 1), self._data.stream(seed), strict=False):
            points.since.append(arm(*move_batch(batch, arm.device)))
            if step in points.at and (ended := self._look(points, model, step)):
                break
        return Curve(
            seed=seed,
            arm=name,
            start=_short(start),
            steps=tuple(points.steps),
            trained=tuple(points.trained),
            held_out=tuple(points.held_out),
            ended=ended,
        )

    def _look(self, points: Points, model: torch.nn.Module, step: int) -> str:
        """Records a point. Returns why the training must end, or an empty string."""
        trained = float(torch.stack(points.since).double().mean())
        held_out = self.held_out.loss_of(model)
        if not (math.isfinite(trained) and math.isfinite(held_out)):
            return f"the loss is not finite by step {step}"
        points.since.clear()
        points.steps.append(step)
        points.trained.append(_short(trained))
        points.held_out.append(_short(held_out))
        return ""


def _spread(steps: int) -> frozenset[int]:
    return frozenset(math.ceil(steps * (index + 1) / POINTS) for index in range(POINTS))


def _short(loss: float) -> float:
    return float(f"{loss:.{DIGITS}g}")
