"""Sets implementation flags of an optimizer while a plan is active, and knows the flags that the user had set."""

from collections.abc import Mapping, Sequence
from itertools import takewhile
from typing import Any, Final

import torch

SWITCHES: Final = "_kitsune_switches"  # attribute of an optimizer; neither copies nor pickles of it have it


class Switch:
    """Sets other implementation flags on an existing optimizer; its checkpoints keep the user's flags.

    Step counters move to the device if the new flags need it, and back on `undo`. The flags are set again when a
    checkpoint is loaded. There may be several switches on one optimizer, as when a step is built again in a notebook.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, flags: dict[str, bool]) -> None:
        self.optimizer = optimizer
        self.flags = flags
        self.moves_steps = not flags.keys().isdisjoint({"fused", "capturable"})
        self.given = self._read()
        vars(optimizer)[SWITCHES] = [*switches_of(optimizer), self]
        self.scaling = getattr(optimizer, "_step_supports_amp_scaling", None)
        self._hooks = [
            optimizer.register_state_dict_post_hook(self._restore_checkpoint),
            optimizer.register_load_state_dict_post_hook(self._reapply),
        ]
        # torch warns when a capturable optimizer runs uncaptured, which a warm-up does on purpose
        optimizer._warned_capturable_if_run_uncaptured = True
        self._set()

    def undo(self) -> None:
        for hook in self._hooks:
            hook.remove()
        vars(self.optimizer)[SWITCHES] = [one for one in switches_of(self.optimizer) if one is not self]
        for group, given in zip(self.optimizer.param_groups, self.given, strict=False):
            group.update(given)
        if self.scaling is None:
            self.optimizer.__dict__.pop("_step_supports_amp_scaling", None)
        self._move_steps()

    def _read(self) -> list[dict[str, Any]]:
        older = list(takewhile(lambda one: one is not self, switches_of(self.optimizer)))
        groups = as_before(self.optimizer.param_groups, older)
        return [{flag: group.get(flag) for flag in self.flags} for group in groups]

    def _reapply(self, _: torch.optim.Optimizer) -> None:
        """Runs after a checkpoint was loaded: keeps its flags as the user's, and sets the switch's flags again."""
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

    def _restore_checkpoint(self, _: torch.optim.Optimizer, checkpoint: dict[str, Any]) -> None:
        """Makes the checkpoint what the user's optimizer would have written without the switch."""
        checkpoint["param_groups"] = groups = as_before(checkpoint["param_groups"], [self])
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


def switches_of(optimizer: torch.optim.Optimizer) -> list[Switch]:
    """The active switches of an optimizer, oldest first."""
    found: list[Switch] = vars(optimizer).get(SWITCHES, [])
    return found


def given_groups(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """The groups of the optimizer as the user set them, without the flags of active plans."""
    return as_before(optimizer.param_groups, switches_of(optimizer))


def as_before(groups: Sequence[Mapping[str, Any]], switches: Sequence[Switch]) -> list[dict[str, Any]]:
    """Copies of the groups as they were before the first of these switches. Groups added later are unchanged."""
    given = [dict(group) for group in groups]
    for switch in reversed(switches):
        for group, flags in zip(given, switch.given, strict=False):
            group.update(flags)
    return given
