"""Loop: a user's training loop around one model, run by a plan: its forwards, their backwards, and the update."""

import contextlib
import sys
from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch

from kitsune.autograd.backward_thread import CallingThread
from kitsune.autograd.hooks import Hooks, has_global_hooks
from kitsune.base.environment import is_disabled
from kitsune.capture.forward_dispatch import NOTES, SegmentedForward
from kitsune.capture.rollback import Snapshot
from kitsune.device.backend import first_line
from kitsune.device.cuda_graph import Recorder
from kitsune.errors import DeclinedError
from kitsune.plan import Plan
from kitsune.runtime.model_discovery import is_looked_for, is_routed
from kitsune.runtime.plan_application import Assembly, OnDecline, refused, show_plan
from kitsune.runtime.report import Report
from kitsune.runtime.user_options import HALF, Wish
from kitsune.techniques import Build, Facts, facts_of
from kitsune.update.loss_scaler import LossScaler
from kitsune.update.optimizer_update import Update, parameters_of
from kitsune.update.update_graph import UpdateGraph

CAREFUL_FORWARDS = 5  # compiling, warming up and capturing are over after these
SCALED_BY_LOOP = "a GradScaler steps this optimizer: the loop scales its loss already"
AUTOCAST_NOTE = "forwards under the loop's own autocast ran as given: its choice of precision stands"
HOOK_NOTE = "forwards ran as given while a hook on all modules was there to see them"


class Loop:
    """Call it in the place of the model. `step` is the update; `close` gives model and optimizer back as they were."""

    def __init__(
        self, model: torch.nn.Module, optimizer: torch.optim.Optimizer, wish: Wish, on_decline: OnDecline
    ) -> None:
        self.model = model
        self.optimizer = optimizer
        self.device = parameters_of(optimizer)[0].device
        self.scaler: LossScaler | None = None
        self.forward: SegmentedForward | None = None
        self._graph: UpdateGraph | None = None
        self._hooks: Hooks | None = None
        self._earlier: dict[str, int] = {}
        self._unsettled = CAREFUL_FORWARDS
        self._wish = wish
        self._undo = contextlib.ExitStack()
        self._thread = CallingThread()
        facts = facts_of(model, optimizer, self.device)
        self._assembly = assembly_of(wish, facts, self.device, on_decline)
        reason = why_not_route(model, facts)
        if reason is not None:
            for knob in list(self._assembly.knobs):
                self._assembly.decline(knob, reason)
        self._assemble()

    @property
    def is_plain(self) -> bool:
        """Whether nothing of the plan is left to apply."""
        return self.forward is None

    @property
    def is_settled(self) -> bool:
        """Whether compiling, warming up and capturing are over."""
        is_over = self.forward is not None and self.forward.is_settled and not self._unsettled
        return is_over and (self._graph is None or bool(self._graph.replays or self._graph.refusal))

    @property
    def counts(self) -> dict[str, int]:
        """How often forwards ran "captured" or otherwise, and how often the "update" was replayed."""
        counts = Counter(self._earlier)
        if self.forward is not None:
            counts.update(self.forward.counts)
        if self._graph is not None:
            counts["update"] += self._graph.replays
        return dict(counts)

    def report(self) -> Report:
        self._assembly.show_fusion()
        report = self._assembly.report
        report.scaler = None if self.scaler is None else self.scaler.statistics
        for what, text in NOTES.items():
            if self.counts.get(what):
                report.note(text)
        if self._graph is not None and self._graph.refusal:
            report.note(f"the update is not captured: {self._graph.refusal}")
        show_plan(report, self.forward.plan if self.forward is not None else None, "backward: ")
        return report

    def close(self) -> None:
        self._thread.leave()
        self._undo.close()

    def rebuild(self) -> None:
        """To be called when the optimizer has changed in a way that the plan's changes to it do not cover."""
        self._undo.close()  # first, lest the plan's own flags be taken for the user's
        self._assembly.check(facts_of(self.model, self.optimizer, self.device))
        self._assemble()

    def leave_scaling(self) -> None:
        """The loop scales its loss by itself: two scales would multiply."""
        if self.scaler is not None:
            self._assembly.go_on_without("precision", SCALED_BY_LOOP, self._assemble)

    def resume_scaling(self, state: Mapping[str, float] | None) -> None:
        """From what a checkpoint holds, if anything."""
        if state is not None and self.scaler is not None:
            self.scaler.load_state_dict(state)

    def step(self) -> None:
        self._thread.leave()
        if self._graph is None or self.forward is None:
            self._update.step()
        else:
            self._graph(self.forward.owner())

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self._thread.leave()
        if self._is_as_given():
            return self.model._call_impl(*args, **kwargs)
        return self._run(args, kwargs)

    def _is_as_given(self) -> bool:
        """Whether this forward is none of the plan's business."""
        if torch.compiler.is_compiling() or not (torch.is_grad_enabled() and self.model.training):
            return True
        if self.forward is None or is_transformed() or is_looked_for(self.model):
            return True
        if self._assembly.knobs.get("precision") in HALF and torch.is_autocast_enabled(self.device.type):
            self._assembly.report.note(AUTOCAST_NOTE)
            return True
        if has_global_hooks():
            self._assembly.report.note(HOOK_NOTE)
            return True
        return False

    def _is_stale(self) -> bool:
        """Whether something has come that the plan was not applied to: a hook, a group of parameters."""
        has_hooks = self._hooks is not None and not self._hooks.unchanged()
        return has_hooks or len(self.optimizer.param_groups) != self._groups

    def _run(self, args: Any, kwargs: Any) -> Any:
        """A forward by the plan; when a technique fails in it, the same forward without that technique."""
        if self._is_stale():
            self.rebuild()
        forward = self.forward
        if forward is None:
            return self.model._call_impl(*args, **kwargs)
        snapshot = Snapshot(self.model, self.device) if self._unsettled else None
        self._unsettled = max(0, self._unsettled - 1)
        try:
            output = forward(*args, **kwargs)
        except DeclinedError as error:
            knob, reason = error.knob, error.reason
        except Exception as error:  # as in kitsune/step.py
            culprit = self._assembly.culprit(error)
            if culprit is None:
                raise
            knob, reason = culprit, first_line(error)
        else:
            if forward.refusal is not None and forward.capture:
                self._assembly.go_on_without("capture", forward.refusal, self._assemble)
            elif forward.streams_refusal and "streams" in self._assembly.knobs:
                self._assembly.decline("streams", forward.streams_refusal)
            if forward.is_replayed:
                self._thread.take()
            return output
        if snapshot is not None:
            snapshot.restore()
        with self._assembly.unless_blameless(self._assemble):
            self._assembly.go_on_without(knob, reason, self._assemble)
            return self._run(args, kwargs)

    def _assemble(self) -> None:
        """Builds forward and update anew from what is left of the plan."""
        self._undo.close()
        self._earlier, self._unsettled = self.counts, CAREFUL_FORWARDS
        self._groups = len(self.optimizer.param_groups)
        self.forward = self._graph = None
        build = Build(
            model=self.model,
            optimizer=self.optimizer,
            device=self.device,
            forward=self.model._call_impl,
            undo=self._undo,
            in_loop=True,
            loss_scaling=self._wish.loss_scaling,
            fusion_config=self._wish.fusion_config,
        )
        self._assembly.apply(build)
        # A scale that was found stays: micro-batches that are under way refer to it.
        self.scaler = build.scaler if build.scaler is None or self.scaler is None else self.scaler
        self._update = Update(self.optimizer, scaler=self.scaler)
        self._hooks = Hooks(self.model) if "compile" in self._assembly.knobs else None
        if self._assembly.knobs:
            self.forward = self._forward_of(build)
        if build.capture != "none":
            self._graph = UpdateGraph(self._update, Recorder(self.device))

    def _forward_of(self, build: Build) -> SegmentedForward:
        knobs = self._assembly.knobs
        return SegmentedForward(
            self.model,
            self.optimizer,
            build.forward,
            self.model._call_impl,
            self.device,
            capture=build.capture != "none",
            forward_contexts=build.forward_contexts,
            step_contexts=build.step_contexts,
            memory_format=build.memory_format,
            scaler=self.scaler,
            single_outputs=knobs.get("precision") in HALF,
            # What torch.compile makes gives up its activations in the first backward.
            retain_graph="compile" not in knobs,
            streams=build.streams,
            pool_bytes=build.pool_bytes,
        )


def assembly_of(wish: Wish, facts: Facts, device: torch.device, on_decline: OnDecline) -> Assembly:
    """The plan on this machine. What a plan of another machine holds is refused, what was chosen by hand is not."""
    reason = None if is_disabled() else refused(wish.plan, device, Report())
    if reason is None:
        assembly = Assembly(wish.plan, facts, device, on_decline)
    else:
        assembly = Assembly(Plan.by_hand(**wish.by_hand), facts, device, on_decline)
        for knob in wish.plan.knobs:
            if knob not in wish.by_hand:
                assembly.decline(knob, reason)
    assembly.report.declined.update({**wish.overruled, **wish.declined})
    for note in wish.notes:
        assembly.report.note(note)
    return assembly


def why_not_route(model: torch.nn.Module, facts: Facts) -> str | None:
    """Why a model's forwards cannot be routed, or None."""
    if facts.optimizer == "LBFGS":
        return "LBFGS evaluates its closure several times a step"
    if is_routed(model):
        return "another KitsuneOptimizer runs this model's forwards"
    if model._compiled_call_impl is not None:
        return "the model was compiled by hand with model.compile()"
    if is_compiled(model):
        return "the model was compiled by hand with torch.compile()"
    if isinstance(model, torch.jit.ScriptModule):
        return "TorchScript runs the model"
    return None


def is_compiled(model: torch.nn.Module) -> bool:
    """Whether it came out of torch.compile, which is not loaded in order to ask."""
    return "torch._dynamo" in sys.modules and isinstance(model, torch._dynamo.OptimizedModule)


def is_transformed() -> bool:
    """Whether a transform of torch.func, a dispatch mode or a tracer wants to see the operations of a forward."""
    return bool(
        torch._C._are_functorch_transforms_active()
        or torch._C._len_torch_dispatch_stack()
        or torch._C._get_tracing_state() is not None
    )
