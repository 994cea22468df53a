"""KitsuneOptimizer: the drop-in. An optimizer that runs its model's forward, backward and update by a plan.

The training loop stays as it is; its semantics, case by case, are those of the wrapped optimizer.
"""

import dataclasses
import functools
import json
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch.optim import Optimizer

from kitsune.amp import AMPConfig, has_bf16
from kitsune.base.atomic_write import writing
from kitsune.client.remote_tuning import Auto, plan_of_model
from kitsune.errors import DeclinedError, SettingsError
from kitsune.fusion import FusionConfig
from kitsune.plan import Plan
from kitsune.runtime.drop_in_loop import Loop, is_transformed
from kitsune.runtime.model_discovery import Attachment
from kitsune.runtime.plan_application import OnDecline
from kitsune.runtime.report import Report
from kitsune.runtime.run_stats import Stats, summary_of, unmeasured
from kitsune.runtime.step_profile import CALIBRATION_STEPS, StepProfile
from kitsune.runtime.user_options import Options, Wish, wish_of
from kitsune.runtime.wrapped_optimizer import as_given, inner_of
from kitsune.streams import Scheduler, StreamConfig
from kitsune.update.optimizer_update import parameters_of
from kitsune.workload import call_of

PATIENCE_STEPS = 3
UNFOUND = (
    f"no training forward of a module that holds all of the optimizer's parameters came before step {PATIENCE_STEPS}; "
    "a module that was compiled by hand is not seen"
)
WAITING = "nothing is decided before the first training forward of a module that holds all of the parameters"
CALIBRATING = f"profile=True: the first {CALIBRATION_STEPS} steps run as given, to be compared with"
NO_PROFILE = "nothing is measured without profile=True"
NO_PLAN = "nothing was asked for that changes the step"
CLOSED = "close() came before anything was applied"
LOST = "a newer KitsuneOptimizer of the same parameters runs the model"
SCALING = "loss_scaling"  # in a checkpoint
Scaling = Mapping[str, float] | None
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

    `plan="auto"` asks a server (see `kitsune.fetch_plan`) at the second training forward, and trains plain when there
    is no plan. Options given by hand go over the plan. `param_groups`, `state`, `defaults` and checkpoints are the
    wrapped optimizer's own, both ways. The model is found by its first training forward; `report` then says what was
    applied and what was declined, and `counts` how the forwards ran. `close()` gives everything back.

    By hand: `enable_amp` is mixed precision (see `amp_config`), `enable_fusion` torch.compile (see `fusion_config`),
    `capture_graph` CUDA graphs around forward, backward and update, `num_streams` or `stream_config` on how many
    streams their launches run, in `memory_pool_size` bytes (or "2GB"); False or 1 leaves out what a plan would do.
    `profile=True` has the first steps run as given, to compare with: see `get_stats`.

    Raises SettingsError for arguments that make no sense, and DeclinedError, with `on_decline="raise"`, for a part of
    the plan or an option that cannot be honoured.
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
        plan: Plan | Auto | None = None,
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
            plan=Plan() if plan == "auto" else plan,
        )
        if on_decline not in ("eager", "raise"):
            raise SettingsError(f"on_decline is {on_decline!r}; use 'eager' or 'raise'")
        if isinstance(optimizer, KitsuneOptimizer):
            raise SettingsError("the optimizer is a KitsuneOptimizer already; pass its base_optimizer")
        inner = inner_of(optimizer, params, arguments)
        wish = wish_of(options, takes_bf16(inner))
        if on_decline == "raise":
            for option, reason in wish.declined.items():
                raise DeclinedError(option, reason)
        self._start(inner, wish, on_decline, options if plan == "auto" else None)

    def _start(
        self, inner: Optimizer, wish: Wish, on_decline: OnDecline, seeking: Options | None, scaling: Scaling = None
    ) -> None:
        self.base_optimizer = inner
        self._wish = wish
        self._seeking = seeking  # options that override the plan that is still to be fetched
        self._on_decline = on_decline
        for name in STATE_HOOKS:
            setattr(self, name, getattr(inner, name))
        self._optimizer_step_pre_hooks = OrderedDict()
        self._optimizer_step_post_hooks = OrderedDict()
        self._warned_capturable_if_run_uncaptured = True
        device = parameters_of(inner)[0].device
        self._profile = StepProfile(device, self._why_unplanned) if wish.profile else None
        waiting = CALIBRATING if wish.profile else WAITING
        self._report = Report(declined={**wish.overruled, **wish.declined}, notes=[*wish.notes, waiting])
        self._loop: Loop | None = None
        self._scaling = scaling
        self._steps_unfound = 0
        self._is_calibrating = wish.profile
        self._attachment = Attachment(lambda: parameters_of(inner), self._attach, self._lose)
        if not wish.profile:
            self._attachment.start()

    # Of the wrapped optimizer

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return self.base_optimizer.param_groups

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        self.base_optimizer.param_groups = groups

    @property
    def state(self) -> Any:
        return self.base_optimizer.state

    @state.setter
    def state(self, state: Any) -> None:
        self.base_optimizer.state = state

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]
        return self.base_optimizer.defaults

    def state_dict(self) -> dict[str, Any]:
        """Of the wrapped optimizer: a checkpoint loads with and without Kitsune. With fp16, "loss_scaling" is added."""
        scaling = self._scaling_state()
        return self.base_optimizer.state_dict() | ({} if scaling is None else {SCALING: scaling})

    def _scaling_state(self) -> Scaling:
        return self._scaling if self._loop is None or self._loop.scaler is None else self._loop.scaler.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Into the wrapped optimizer, and into the loss scaling, at once or when there is one."""
        self._scaling = state_dict.get(SCALING)
        self.base_optimizer.load_state_dict({name: value for name, value in state_dict.items() if name != SCALING})
        if self._loop is not None:
            self._loop.resume_scaling(self._scaling)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds it to the wrapped optimizer, and captures anew."""
        self.base_optimizer.add_param_group(param_group)
        if self._loop is not None:
            self._loop.rebuild()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As torch.optim.Optimizer.zero_grad."""
        if not set_to_none or type(self.base_optimizer).zero_grad is not Optimizer.zero_grad:
            self.base_optimizer.zero_grad(set_to_none)
            return
        for parameter in parameters_of(self.base_optimizer):  # as torch does, less 15 us for its profiler's label
            parameter.grad = None

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """Only a GradScaler reads it, before it steps an optimizer."""
        if self._loop is not None:
            self._loop.leave_scaling()
        return bool(getattr(self.base_optimizer, "_step_supports_amp_scaling", False))

    def __repr__(self) -> str:
        return f"KitsuneOptimizer({self.base_optimizer!r})"

    def __getattr__(self, name: str) -> Any:
        # grad_scale and found_inf are GradScaler's to set here; asking the wrapped optimizer would hide their absence
        if name.startswith("__") or name in ("base_optimizer", "grad_scale", "found_inf"):
            raise AttributeError(name)
        try:
            return getattr(self.base_optimizer, name)
        except AttributeError as error:
            kind = type(self.base_optimizer).__name__
            raise AttributeError(f"neither KitsuneOptimizer nor the {kind} that it wraps has {name!r}") from error

    def __getstate__(self) -> dict[str, Any]:
        inner = self.base_optimizer if self._loop is None else as_given(self.base_optimizer)
        how = {"wish": self._wish, "on_decline": self._on_decline, "seeking": self._seeking}
        return {"inner": inner, **how, "scaling": self._scaling_state()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._start(**state)

    # Of Kitsune

    @property
    def report(self) -> Report:
        """What was applied and declined; nothing is decided before the model's first training forward."""
        return self._report if self._loop is None else self._loop.report()

    @property
    def counts(self) -> dict[str, int]:
        """How often training forwards ran "captured" or otherwise, and how often the "update" was replayed."""
        return {} if self._loop is None else self._loop.counts

    @property
    def scheduler(self) -> Scheduler:
        """How launches are issued, as far as that is decided: see `report`."""
        return Scheduler(int(self.report.applied.get("streams", 1)))

    @property
    def profiler(self) -> StepProfile | None:
        """What `profile=True` measures; `get_metrics()` has the raw samples."""
        return self._profile

    def get_stats(self) -> Stats:
        """What the plan came to on this run, with `profile=True`. Waits for the device."""
        return unmeasured(NO_PROFILE) if self._profile is None else self._profile.stats()

    def _why_unplanned(self) -> str:
        """Why no step runs by a plan, "" where that is only a matter of time."""
        report = self.report
        if report.applied or (self._is_undecided and self._asked):
            return ""
        reasons = [f"{what}: {why}" for what, why in report.declined.items()]
        return "; ".join(reasons or [NO_PLAN, *self._wish.notes])

    @property
    def _asked(self) -> tuple[str, ...]:
        """What is to be applied, or declined: knobs, and "plan" where the server was not asked for one yet."""
        return (*self._wish.plan.knobs, *(["plan"] if self._seeking is not None else []))

    @property
    def _is_undecided(self) -> bool:
        """Whether the training forward that decides what is applied is still to come."""
        is_seeking = self._seeking is not None and self._attachment.root is not None
        return self._is_calibrating or self._attachment.is_looking or is_seeking

    def print_summary(self) -> None:
        """To stdout: what was applied and declined, what it came to, and how its streams and fused kernels did."""
        streams = None if self._profile is None else self._profile.streams
        sys.stdout.write(f"{summary_of(self.report, self.get_stats(), streams)}\n")

    def save_profile(self, filepath: str | Path = "profile.json") -> None:
        """What `profile=True` measured, with the raw samples, as JSON.

        Raises SettingsError without it, and for a file that cannot be written.
        """
        if self._profile is None:
            raise SettingsError(NO_PROFILE)
        report = self.report
        found = {"applied": dict(report.applied), "declined": dict(report.declined)}
        text = json.dumps({**found, **self._profile.get_metrics()}, indent=2, allow_nan=False)
        with writing(str(filepath)):
            Path(filepath).write_text(text + "\n", encoding="utf-8")

    def close(self) -> None:
        """Gives model and optimizer back as they were; the wrapped optimizer goes on alone."""
        if self._is_undecided:
            self._decline_all(CLOSED)
        self._is_calibrating = False
        self._attachment.detach()
        if self._profile is not None:
            self._profile.close()
        if self._loop is not None:
            self._report = self._loop.report()
            self._loop.close()
            self._loop = None

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One update, with the hooks of this optimizer around it; hooks on all optimizers see the wrapped one's."""
        arguments: tuple[Any, ...] = (self,) if closure is None else (self, closure)
        keywords: dict[str, Any] = {}
        for before in self._optimizer_step_pre_hooks.values():
            changed = before(self, arguments, keywords)
            if changed is not None:
                arguments, keywords = changed
        result = self._step(*arguments[1:], **keywords)
        if self._profile is not None:
            self._note(self._profile)
        for after in self._optimizer_step_post_hooks.values():
            after(self, arguments, keywords)
        return result

    def _step(self, closure: Callable[[], Any] | None = None) -> Any:
        if self._attachment.is_looking:
            self._look_no_longer_than_needed()
        if hasattr(self, "found_inf"):
            self._step_for_scaler()
            return None
        if self._loop is None or self._steps_by_itself(closure):
            return self.base_optimizer.step() if closure is None else self.base_optimizer.step(closure)
        result = None
        if closure is not None:
            with torch.enable_grad():
                result = closure()
        # The closure may have run the forward by which the model is found or lost.
        if self._loop is None:
            self.base_optimizer.step()
        else:
            self._loop.step()
        return result

    def _note(self, profile: StepProfile) -> None:
        profile.mark(by_plan=self._loop is not None and self._loop.is_settled)
        if self._is_calibrating and profile.is_calibrated:
            self._is_calibrating = False
            self._attachment.start()

    def _steps_by_itself(self, closure: Any) -> bool:
        """Optimizers that are not torch's may evaluate a closure several times, or late."""
        foreign = not type(self.base_optimizer).__module__.startswith("torch.optim")
        return foreign and closure is not None and self._loop is not None and self._loop.scaler is None

    def _step_for_scaler(self) -> None:
        """Passes the tensors of the user's GradScaler on to the wrapped optimizer."""
        inner: Any = self.base_optimizer
        inner.grad_scale, inner.found_inf = self.grad_scale, self.found_inf
        try:
            inner.step()
        finally:
            del inner.grad_scale, inner.found_inf

    def _look_no_longer_than_needed(self) -> None:
        """Stops watching every forward of the process, which costs time, if no model has been found by now."""
        self._steps_unfound += 1
        if self._steps_unfound < PATIENCE_STEPS:
            return
        self._attachment.detach()
        self._decline_all(UNFOUND)
        if self._on_decline == "raise":
            raise DeclinedError("plan", UNFOUND)

    def _decline_all(self, reason: str) -> None:
        declined = dict.fromkeys(self._asked, reason)
        self._report = Report(declined={**self._report.declined, **declined}, notes=list(self._wish.notes))

    def _attach(self, model: torch.nn.Module) -> Callable[..., Any] | None:
        """Applies the plan to the model that was found; None when its forwards stay plain."""
        if self._seeking is not None:
            return functools.partial(self._seek, model, self._seeking)
        try:
            loop = Loop(model, self.base_optimizer, self._wish, self._on_decline)
        except DeclinedError as error:
            self._report.declined[error.knob] = error.reason
            raise
        self._report = loop.report()
        if loop.is_plain:
            return None
        loop.resume_scaling(self._scaling)
        self._loop = loop
        return loop

    def _seek(self, model: torch.nn.Module, options: Options, *args: Any, **kwargs: Any) -> Any:
        """Asks for the plan at the first training forward, whose arguments the server has to know."""
        if not (torch.is_grad_enabled() and model.training) or torch.compiler.is_compiling() or is_transformed():
            return model._call_impl(*args, **kwargs)
        self._attachment.detach()  # the export calls the model too
        self._seeking = None
        found = plan_of_model(model, self.base_optimizer, lambda: call_of(model, args, kwargs))
        wish = wish_of(dataclasses.replace(options, plan=found.plan or Plan()), takes_bf16(self.base_optimizer))
        self._wish = dataclasses.replace(wish, notes=(*wish.notes, f"plan='auto': {found.reason}"))
        self._attachment.route(model)
        return model(*args, **kwargs)

    def _lose(self) -> None:
        self.close()
        self._decline_all(LOST)


def takes_bf16(optimizer: Optimizer) -> bool:
    return parameters_of(optimizer)[0].device.type != "cuda" or has_bf16()
