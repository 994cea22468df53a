"""The drop-in: forwards and backwards of one model in a user's own loop, and the update, by a plan."""

import contextlib
import sys
from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch

from kitsune.autograd.backward_thread import CallingThread
from kitsune.autograd.fused_loss import FusedLoss
from kitsune.autograd.hooks import Hooks, has_global_hooks
from kitsune.base.environment import is_disabled
from kitsune.capture.forward_dispatch import NOTES, SegmentedForward
from kitsune.device.cuda_graph import Recorder
from kitsune.open_masks import with_open_masks, with_tensors
from kitsune.plan import Plan
from kitsune.runtime.applied_plan import AppliedPlan
from kitsune.runtime.model_discovery import is_looked_for, is_routed
from kitsune.runtime.plan_application import Assembly, OnDecline, refused
from kitsune.runtime.report import Report
from kitsune.runtime.user_options import Wish
from kitsune.techniques import Build, Facts, facts_of
from kitsune.techniques.precision import TECHNIQUE as PRECISION
from kitsune.update.loss_scaler import LossScaler
from kitsune.update.optimizer_update import Update, parameters_of
from kitsune.update.update_graph import UpdateGraph

CAREFUL_FORWARDS = 5  # compiling, warming up and capturing are over after these
SCALED_BY_LOOP = "a GradScaler steps this optimizer: the loop scales its loss already"
AUTOCAST_NOTE = "forwards under the loop's own autocast ran as given, in the loop's precision"
HOOK_NOTE = "forwards ran as given while a hook on all modules was there to see them"


class Loop:
    """Called in place of the model. `step` is the update; `close` gives model and optimizer back as they were."""

    def __init__(
        self, model: torch.nn.Module, optimizer: torch.optim.Optimizer, wish: Wish, on_decline: OnDecline
    ) -> None:
        self.model = model
        self.optimizer = optimizer
        self.device = parameters_of(optimizer)[0].device
        self.forward: SegmentedForward | None = None
        self._graph: UpdateGraph | None = None
        self._hooks: Hooks | None = None
        self._earlier: dict[str, int] = {}
        self._unsettled = CAREFUL_FORWARDS
        self._wish = wish
        self._thread = CallingThread()
        facts = facts_of(model, optimizer, self.device)
        assembly = assembly_of(wish, facts, self.device, on_decline)
        reason = why_not_route(model, facts)
        if reason is not None:
            for knob in list(assembly.knobs):
                assembly.decline(knob, reason)
        self._applied = AppliedPlan(assembly, model, optimizer, begin=self._begin, finish=self._finish)
        self._applied.apply()

    @property
    def scaler(self) -> LossScaler | None:
        return self._applied.build.scaler

    @property
    def is_plain(self) -> bool:
        """Whether nothing of the plan could be applied."""
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
        notes = [text for what, text in NOTES.items() if self.counts.get(what)]
        if self._graph is not None and self._graph.refusal:
            notes.append(f"the update is not captured: {self._graph.refusal}")
        return self._applied.report(self.forward.plan if self.forward is not None else None, "backward: ", notes)

    def close(self) -> None:
        self._thread.leave()
        self._applied.undo()

    def rebuild(self) -> None:
        """Applies the plan anew; to be called when the optimizer has got other groups of parameters."""
        self._applied.reapply()

    def leave_scaling(self) -> None:
        """To be called when the loop scales its loss itself: two scales would multiply."""
        if self.scaler is not None:
            self._applied.go_on_without(PRECISION.name, SCALED_BY_LOOP)

    def resume_scaling(self, state: Mapping[str, float] | None) -> None:
        """Takes over the scale of a checkpoint, if it has one."""
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
        if self._must_run_as_given():
            return self.model._call_impl(*args, **kwargs)
        return self._run(args, kwargs)

    def _must_run_as_given(self) -> bool:
        """Whether this forward must run without the plan."""
        if torch.compiler.is_compiling() or not (torch.is_grad_enabled() and self.model.training):
            return True
        if self.forward is None or is_transformed() or is_looked_for(self.model):
            return True
        if self._applied.build.computes_in_half and torch.is_autocast_enabled(self.device.type):
            self._applied.assembly.report.note(AUTOCAST_NOTE)
            return True
        if has_global_hooks():
            self._applied.assembly.report.note(HOOK_NOTE)
            return True
        return False

    def _call(self, *args: Any, **kwargs: Any) -> Any:
        return self.model._call_impl(*args, **with_tensors(kwargs))

    def _needs_reapply(self) -> bool:
        """Whether there are hooks or groups of parameters to which the plan was not applied."""
        has_hooks = self._hooks is not None and not self._hooks.unchanged()
        return has_hooks or self._applied.has_other_groups()

    def _run(self, args: Any, kwargs: Any) -> Any:
        """A forward by the plan; when a technique fails in it, the same forward without that technique."""
        if self._needs_reapply():
            self.rebuild()
        forward = self.forward
        if forward is None:
            return self.model._call_impl(*args, **kwargs)
        named = with_open_masks(kwargs) if self._applied.build.asks_for_masks else kwargs
        rollback = self._applied.rollback(repeats_update=False) if self._unsettled else None
        self._unsettled = max(0, self._unsettled - 1)
        return self._applied.run(
            lambda: forward(*args, **named),
            again=lambda: self._run(args, kwargs),
            rollback=rollback,
            learn=lambda: self._learn_from(forward),
        )

    def _learn_from(self, forward: SegmentedForward) -> None:
        self._applied.heed(forward.refusal if forward.capture else None, forward.streams_refusal)
        if forward.is_replayed:
            self._thread.take()

    def _begin(self, undo: contextlib.ExitStack) -> Build:
        self._earlier, self._unsettled = self.counts, CAREFUL_FORWARDS
        self.forward = self._graph = None
        return Build(
            model=self.model,
            optimizer=self.optimizer,
            device=self.device,
            forward=self._call,
            undo=undo,
            in_loop=True,
            loss_scaling=self._wish.loss_scaling,
            fusion_config=self._wish.fusion_config,
        )

    def _finish(self, build: Build) -> None:
        """Makes forward and update of what is left of the plan."""
        self._update = Update(self.optimizer, scaler=build.scaler)
        self._hooks = Hooks(self.model) if build.hides_hooks else None
        self.forward = self._forward_of(build) if self._applied.assembly.knobs else None
        self._graph = UpdateGraph(self._update, Recorder(self.device)) if build.capture != "none" else None

    def _forward_of(self, build: Build) -> SegmentedForward:
        return SegmentedForward(
            self.model,
            self.optimizer,
            build.forward,
            self._call,
            self.device,
            capture=build.capture != "none",
            forward_contexts=build.forward_contexts,
            step_contexts=build.step_contexts,
            memory_format=build.memory_format,
            scaler=build.scaler,
            single_outputs=build.computes_in_half,
            retain_graph=not build.frees_activations,
            streams=build.streams,
            pool_bytes=build.pool_bytes,
            fused_loss=FusedLoss.if_possible() if build.computes_in_half else None,
            sole_outputs=build.sole_outputs if build.capture != "none" else None,
        )


def assembly_of(wish: Wish, facts: Facts, device: torch.device, on_decline: OnDecline) -> Assembly:
    """The plan on this machine. The plan of another machine is refused, but for what the user chose by hand."""
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
    """Whether torch.compile made it. Does not load torch's compiler."""
    return "torch._dynamo" in sys.modules and isinstance(model, torch._dynamo.OptimizedModule)


def is_transformed() -> bool:
    """Whether a transform of torch.func, a dispatch mode or a tracer observes the operations of a forward."""
    return bool(
        torch._C._are_functorch_transforms_active()
        or torch._C._len_torch_dispatch_stack()
        or torch._C._get_tracing_state() is not None
    )
