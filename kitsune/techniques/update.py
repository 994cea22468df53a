"""update: torch's foreach or fused implementation of the optimizer the user gave, or the kernel of ours for AdamW."""

from typing import Any

import torch
from torch.optim import Adam

from kitsune.engine.adamw import KernelUpdate
from kitsune.knobs import Choice
from kitsune.techniques.technique import Build, Facts, Technique, raised_in


class UpdateImplementation(Technique):
    name = "update"

    def why_not(self, choice: Choice, facts: Facts) -> str | None:
        if choice != "kitsune" and choice not in facts.optimizer_options:
            return f"{facts.optimizer} has no {choice} implementation"
        if facts.optimizer_chosen is not None:
            return f"the optimizer was built with {facts.optimizer_chosen}, and what is chosen by hand stays"
        if choice == "kitsune":
            return why_not_kitsune(facts)
        if choice == "fused" and not facts.parameter_dtypes <= FUSED_DTYPES:
            return "the fused implementation needs floating-point parameters"
        if choice == "fused" and facts.sparse_gradients:
            return "the fused implementation does not take sparse gradients"
        if choice == "foreach" and facts.tensor_rate:
            return "the foreach implementation does not take a learning rate in a tensor"
        return None

    def apply(self, choice: Choice, build: Build) -> None:
        """Sets the flags of all groups, and hides them from checkpoints: `state_dict` stays what the user's was."""
        flags = {"foreach": choice == "foreach", "fused": choice != "foreach"}
        known = {flag: value for flag, value in flags.items() if flag in build.optimizer.defaults}
        switch = Switch(build.optimizer, known)
        build.undo.callback(switch.undo)
        if choice == "kitsune" and isinstance(build.optimizer, Adam):  # with its state where that of a fused one is
            build.undo.callback(KernelUpdate(build.optimizer).undo)

    def blames(self, error: BaseException) -> bool:
        return raised_in(error, "/torch/optim/")


def why_not_kitsune(facts: Facts) -> str | None:
    if facts.update_kernel is not None:
        return facts.update_kernel
    if facts.sparse_gradients:
        return "the kernel of ours does not take sparse gradients"
    return "kernels of ours need a GPU" if facts.device != "cuda" else facts.compiler


FUSED_DTYPES = frozenset({torch.float32, torch.float64, torch.float16, torch.bfloat16})


class Switch:
    """Other implementation flags for an optimizer that exists, with its checkpoints as before.

    Step counters move to the device where the new flags need it, and back; a loaded checkpoint gets the flags again.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, flags: dict[str, bool]) -> None:
        self.optimizer = optimizer
        self.flags = flags
        self.moves_steps = not flags.keys().isdisjoint({"fused", "capturable"})
        self.given = self._read()
        self.scaling = getattr(optimizer, "_step_supports_amp_scaling", None)
        self._hooks = [
            optimizer.register_state_dict_post_hook(self._hide),
            optimizer.register_load_state_dict_post_hook(self._take),
        ]
        # torch warns once when a capturable optimizer runs uncaptured; warming up does so on purpose
        optimizer._warned_capturable_if_run_uncaptured = True
        self._set()

    def undo(self) -> None:
        for hook in self._hooks:
            hook.remove()
        for group, given in zip(self.optimizer.param_groups, self.given, strict=False):
            group.update(given)
        if self.scaling is None:
            self.optimizer.__dict__.pop("_step_supports_amp_scaling", None)
        self._move_steps()

    def _read(self) -> list[dict[str, Any]]:
        return [{flag: group.get(flag) for flag in self.flags} for group in self.optimizer.param_groups]

    def _take(self, _: torch.optim.Optimizer) -> None:
        """After a checkpoint was loaded: its flags are the user's now."""
        self.given = self._read()
        self._set()

    def _set(self) -> None:
        for group in self.optimizer.param_groups:
            group.update(self.flags)
        if self.flags.get("fused"):
            self.optimizer._step_supports_amp_scaling = True  # type: ignore[attr-defined]
        self._move_steps()

    def _move_steps(self) -> None:
        if not self.moves_steps:
            return
        for group in self.optimizer.param_groups:
            for parameter in group["params"]:
                state = self.optimizer.state.get(parameter, {})
                if isinstance(state.get("step"), torch.Tensor):
                    state["step"] = state["step"].to(_step_device(group, parameter), torch.float32)

    def _hide(self, _: torch.optim.Optimizer, checkpoint: dict[str, Any]) -> None:
        """The checkpoint as the user's own optimizer would have written it."""
        groups = []
        for group, given in zip(checkpoint["param_groups"], self.given, strict=False):
            groups.append({**group, **given})
        groups.extend(checkpoint["param_groups"][len(groups) :])
        checkpoint["param_groups"] = groups
        on_device = any(group.get("fused") or group.get("capturable") for group in groups)
        if self.moves_steps and not on_device:
            checkpoint["state"] = {key: _with_host_step(state) for key, state in checkpoint["state"].items()}


def _with_host_step(state: Any) -> Any:
    if isinstance(state, dict) and isinstance(state.get("step"), torch.Tensor):
        return {**state, "step": state["step"].cpu()}
    return state


def _step_device(group: dict[str, Any], parameter: torch.Tensor) -> torch.device:
    """Where torch.optim keeps the step counter of a parameter under the flags of its group."""
    return parameter.device if group.get("fused") or group.get("capturable") else torch.device("cpu")


def implementations(optimizer: torch.optim.Optimizer) -> tuple[str, ...]:
    """The implementation flags that an optimizer knows."""
    return tuple(flag for flag in ("foreach", "fused", "capturable") if flag in optimizer.defaults)


def chosen_by_hand(optimizer: torch.optim.Optimizer) -> str | None:
    """The implementation that the user asked for in so many words."""
    for group in optimizer.param_groups:
        for flag in ("foreach", "fused"):
            if group.get(flag) is not None:
                return f"{flag}={group[flag]}"
    return None


TECHNIQUE = UpdateImplementation()
