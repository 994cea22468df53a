"""KitsuneOptimizer: the drop-in. An optimizer that runs its model's forward, backward and update by a plan.

The training loop stays as it is; its semantics, case by case, are those of the wrapped optimizer.
"""

import contextlib
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.optim import LBFGS, Optimizer

from kitsune.amp import AMPConfig
from kitsune.assembly import Assembly, OnDecline
from kitsune.attach import Attachment, Route
from kitsune.device import Recorder, first_line
from kitsune.engine.dispatch import SegmentedForward
from kitsune.engine.snapshot import Snapshot
from kitsune.engine.update import Update, parameters_of
from kitsune.engine.updategraph import UpdateGraph
from kitsune.errors import SettingsError
from kitsune.fusion import FusionConfig
from kitsune.options import Options, Wish, wish_of
from kitsune.plan import Plan
from kitsune.report import Report
from kitsune.streams import StreamConfig
from kitsune.techniques import Build, facts_of

STEP_HOOKS = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
STATE_HOOKS = (
    "_optimizer_state_dict_pre_hooks",
    "_optimizer_state_dict_post_hooks",
    "_optimizer_load_state_dict_pre_hooks",
    "_optimizer_load_state_dict_post_hooks",
)


class KitsuneOptimizer(Optimizer):
    """Wraps an optimizer, or builds one from a class, parameters and its own arguments.

        optimizer = KitsuneOptimizer(torch.optim.AdamW(model.parameters(), lr=1e-3), plan=plan)
        optimizer = KitsuneOptimizer(torch.optim.AdamW, model.parameters(), lr=1e-3, enable_amp=True)

    Options given by hand go over the plan. `param_groups`, `state`, `defaults` and checkpoints are the wrapped
    optimizer's own, both ways. The model is found by its first training forward; `report` then says what was applied
    and what was declined. `close()` gives everything back.
    """

    def __init__(
        self,
        optimizer: Optimizer | type[Optimizer],
        params: Iterable[Any] | None = None,
        *,
        enable_amp: bool | None = None,
        enable_fusion: bool | None = None,
        num_streams: int | None = None,
        profile: bool | None = None,
        amp_config: AMPConfig | None = None,
        fusion_config: FusionConfig | None = None,
        stream_config: StreamConfig | None = None,
        memory_pool_size: int | str | None = None,
        capture_graph: bool | None = None,
        plan: Plan | None = None,
        on_decline: OnDecline = "eager",
        **arguments: Any,
    ) -> None:
        options = Options(
            num_streams=num_streams,
            enable_fusion=enable_fusion,
            enable_amp=enable_amp,
            memory_pool_size=memory_pool_size,
            capture_graph=capture_graph,
            profile=profile,
            amp_config=amp_config,
            fusion_config=fusion_config,
            stream_config=stream_config,
        )
        inner = _inner(optimizer, params, arguments)
        has_bf16 = inner_device(inner).type != "cuda" or torch.cuda.is_bf16_supported(including_emulation=False)
        self._start(inner, wish_of(options, plan, has_bf16), on_decline)

    def _start(self, inner: Optimizer, wish: Wish, on_decline: OnDecline) -> None:
        self.base_optimizer = inner
        self._wish = wish
        self._on_decline = on_decline
        for name in STATE_HOOKS:
            setattr(self, name, getattr(inner, name))
        for name in STEP_HOOKS:
            setattr(self, name, type(getattr(inner, name))())
        self._warned_capturable_if_run_uncaptured = True
        self._patch_step_function()
        self._undo = contextlib.ExitStack()
        self._report = Report(declined=dict(wish.declined))
        self._forward: SegmentedForward | None = None
        self._update: Update | None = None
        self._graph: UpdateGraph | None = None
        self._attachment = Attachment(lambda: parameters_of(inner), self._attach)

    # What the wrapped optimizer owns

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        return self.base_optimizer.param_groups

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        self.base_optimizer.param_groups = groups

    @property
    def state(self) -> Any:  # type: ignore[override]
        return self.base_optimizer.state

    @state.setter
    def state(self, state: Any) -> None:
        self.base_optimizer.state = state

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]
        return self.base_optimizer.defaults

    def state_dict(self) -> dict[str, Any]:
        """The wrapped optimizer's own: a checkpoint loads with and without Kitsune."""
        return self.base_optimizer.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.base_optimizer.load_state_dict(state_dict)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        self.base_optimizer.add_param_group(param_group)

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.base_optimizer.zero_grad(set_to_none)

    @property
    def _step_supports_amp_scaling(self) -> bool:
        return bool(getattr(self.base_optimizer, "_step_supports_amp_scaling", False))

    def __repr__(self) -> str:
        return f"KitsuneOptimizer({self.base_optimizer!r})"

    def __getattr__(self, name: str) -> Any:
        # grad_scale and found_inf are GradScaler's to set here; asking the wrapped optimizer would hide their absence
        if name.startswith("__") or name in ("base_optimizer", "grad_scale", "found_inf"):
            raise AttributeError(name)
        return getattr(self.base_optimizer, name)

    def __getstate__(self) -> dict[str, Any]:
        return {"inner": self.base_optimizer, "wish": self._wish, "on_decline": self._on_decline}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._start(state["inner"], state["wish"], state["on_decline"])

    # What Kitsune adds

    @property
    def report(self) -> Report:
        """What was applied and declined; nothing is decided before the model's first training forward."""
        report = self._report
        if self._forward is not None and self._forward.refusal and "capture" in report.applied:
            report.applied.pop("capture")
            report.declined["capture"] = self._forward.refusal
        if self._graph is not None and self._graph.refusal:
            report.note(f"the update is not captured: {self._graph.refusal}")
        return report

    def close(self) -> None:
        """Gives model and optimizer back as they were; the wrapped optimizer goes on alone."""
        self._attachment.detach()
        self._undo.close()
        self._forward = self._update = self._graph = None

    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        if isinstance(self.base_optimizer, LBFGS):
            return self.base_optimizer.step(closure)
        result = None
        if closure is not None:
            with torch.enable_grad():
                result = closure()
        if hasattr(self, "found_inf"):
            self._step_for_scaler()
        elif self._update is None:
            self.base_optimizer.step()
        else:
            self._step_by_plan(self._update)
        return result

    def _step_for_scaler(self) -> None:
        """The user's own GradScaler handed its tensors over: pass them on."""
        inner: Any = self.base_optimizer
        inner.grad_scale, inner.found_inf = self.grad_scale, self.found_inf
        try:
            inner.step()
        finally:
            del inner.grad_scale, inner.found_inf

    def _step_by_plan(self, update: Update) -> None:
        if self._graph is None or self._forward is None:
            update.step()
        else:
            self._graph(self._forward.owner())

    def _attach(self, model: torch.nn.Module) -> Route | None:
        """Applies the plan to the model that was found; None when its forwards stay plain."""
        device = inner_device(self.base_optimizer)
        facts = facts_of(model, self.base_optimizer, device)
        assembly = Assembly(self._wish.plan, facts, device, self._on_decline)
        self._report = assembly.report
        self._report.declined.update(self._wish.declined)
        reason = why_not_attach(model, facts.distributed, self.base_optimizer)
        if reason is not None:
            for knob in list(assembly.knobs):
                assembly.decline(knob, reason)
        if not assembly.knobs:
            return None
        self._assembly = assembly
        self._assemble(model, device)
        return self._route(model, device.type)

    def _assemble(self, model: torch.nn.Module, device: torch.device) -> None:
        """Builds forward and update anew from what is left of the plan."""
        self._undo.close()
        inner = self.base_optimizer
        build = Build(
            model=model,
            optimizer=inner,
            device=device,
            forward=model._call_impl,
            undo=self._undo,
            loss_scaling=self._wish.loss_scaling,
            compile_options=self._wish.compile_options,
        )
        self._assembly.apply(build)
        captures = build.capture != "none"
        self._forward = SegmentedForward(
            model,
            inner,
            build.forward,
            model._call_impl,
            device,
            capture=captures,
            contexts=[*build.step_contexts, *build.forward_contexts],
            memory_format=build.memory_format,
            scaler=build.scaler,
        )
        self._update = Update(inner, scaler=build.scaler)
        self._graph = UpdateGraph(self._update, Recorder(device)) if captures else None

    def _route(self, model: torch.nn.Module, kind: str) -> Route:
        def route(*args: Any, **kwargs: Any) -> Any:
            # The user's own autocast is the user's choice of precision: their forward runs as they wrote it.
            plain = not (torch.is_grad_enabled() and model.training) or torch.is_autocast_enabled(kind)
            if plain or self._forward is None or torch.compiler.is_compiling():
                return model._call_impl(*args, **kwargs)
            if self._forward.is_settled:
                return self._forward(*args, **kwargs)
            return self._settle(model, args, kwargs)

        return route

    def _settle(self, model: torch.nn.Module, args: Any, kwargs: Any) -> Any:
        """A forward that may compile; when a technique fails in it, the same forward without that technique."""
        assert self._forward is not None
        snapshot = Snapshot(model, self._assembly.device)
        try:
            return self._forward(*args, **kwargs)
        except RuntimeError as error:
            knob = self._assembly.culprit(error)
            if knob is None:
                raise
            reason = first_line(error)
        snapshot.restore()
        self._assembly.decline(knob, reason)
        self._assemble(model, self._assembly.device)
        return self._settle(model, args, kwargs)


def why_not_attach(model: torch.nn.Module, distributed: bool, optimizer: Optimizer) -> str | None:
    """Why a model's forwards cannot be routed, or None."""
    if distributed:
        return "distributed modules are not supported"
    if model._compiled_call_impl is not None:
        return "the model was compiled by hand with model.compile()"
    if isinstance(model, torch._dynamo.OptimizedModule):
        return "the model was compiled by hand with torch.compile()"
    if isinstance(optimizer, LBFGS):
        return "LBFGS evaluates its closure several times a step"
    return None


def inner_device(optimizer: Optimizer) -> torch.device:
    return parameters_of(optimizer)[0].device


def _inner(
    optimizer: Optimizer | type[Optimizer], params: Iterable[Any] | None, arguments: dict[str, Any]
) -> Optimizer:
    if isinstance(optimizer, Optimizer):
        if params is not None or arguments:
            extra = ", ".join(arguments) or "params"
            raise SettingsError(f"{extra}: the optimizer is built already; pass a class to have it built")
        return optimizer
    if not (isinstance(optimizer, type) and issubclass(optimizer, Optimizer)):
        raise SettingsError(f"{optimizer!r} is neither an optimizer nor a class of torch.optim")
    if params is None:
        raise SettingsError(f"{optimizer.__name__} needs the model's parameters: pass model.parameters()")
    return optimizer(params, **arguments)  # type: ignore[call-arg]
